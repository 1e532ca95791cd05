#include "windows.h"

#include <algorithm>
#include <climits>
#include <iterator>
#include <numeric>

namespace braze::cuda::im2col {
namespace {

// A pass along one dimension.
struct Line {
  int64_t image, result;  // extents
  int64_t first, stride,
      step;       // of windows: where they begin, how far they and their taps are apart
  int64_t reach;  // from a window's first pixel to its last
  int64_t tap, taps, tap_step;  // the filter's taps in the order of the window
  Phase phases[kMaxStride];

  // What TMA calls the upper corner of the bounding box.
  int64_t upper() const { return first + (result - 1) * stride + 1 - image; }
  bool fits() const {
    const auto is_corner = [](int64_t v) { return v >= -128 && v <= 127; };
    return is_corner(first) && is_corner(upper()) && reach <= 255;
  }
};

// What belongs to one dimension.
struct Extents {
  int64_t input, output, taps, pad, stride, dilation;
};

Line forward(const Extents& e) {
  return {e.input, e.output, -e.pad, e.stride, e.dilation, (e.taps - 1) * e.dilation,
          0,       e.taps,   1,      {}};
}

Line backward(const Extents& e) {
  const int64_t reach = (e.taps - 1) * e.dilation;
  return {e.output, e.input, e.pad - reach, 1, e.dilation, reach, e.taps - 1, e.taps, -1, {}};
}

// Input pixel a + s i meets tap r at output pixel i + (a + pad - r dilation) / s, where that
// divides.
Line backward_in_phases(const Extents& e) {
  const int64_t apart = e.stride / std::gcd(e.stride, e.dilation);  // taps of a phase
  Line line{e.output,
            ceil_div(e.input, e.stride),
            INT_MAX,
            1,
            apart * e.dilation / e.stride,
            0,
            0,
            0,
            -apart,
            {}};
  for (int64_t a = 0; a < e.stride; ++a) {
    Phase& phase = line.phases[a];
    phase.first = static_cast<int>(a);
    for (int64_t r = 0; r < e.taps; ++r) {
      const int64_t ahead = a + e.pad - r * e.dilation;
      if (ahead % e.stride != 0) continue;
      phase.tap = static_cast<int>(r), ++phase.taps;
      phase.shift = static_cast<int>(ahead / e.stride);  // of the last one, which comes first
    }
    if (phase.taps > 0) line.first = std::min<int64_t>(line.first, phase.shift);
  }
  for (int64_t a = 0; a < e.stride; ++a) {
    Phase& phase = line.phases[a];
    phase.shift = phase.taps > 0 ? phase.shift - static_cast<int>(line.first) : 0;
    line.taps = std::max<int64_t>(line.taps, phase.taps);
    line.reach = std::max(line.reach, phase.shift + (phase.taps - 1) * line.step);
  }
  std::stable_sort(line.phases, line.phases + e.stride,
                   [](const Phase& a, const Phase& b) { return a.taps > b.taps; });
  return line;
}

struct Lines {
  Line h, w;
};
Lines lines_of(const Conv2dArgs& args, bool in_phases) {
  const Conv2dShape& s = args.shape;
  const auto line = args.pass != Conv2dPass::kDgrad ? forward
                    : in_phases                     ? backward_in_phases
                                                    : backward;
  return {line({s.h, s.p, s.r, s.pad_h, s.stride_h, s.dilation_h}),
          line({s.w, s.q, s.s, s.pad_w, s.stride_w, s.dilation_w})};
}

int narrow(int64_t value) { return static_cast<int>(value); }

}  // namespace

Pass pass_of(const Conv2dArgs& args, Phases* phases) {
  const Conv2dShape& s = args.shape;
  const bool dgrad = args.pass == Conv2dPass::kDgrad;
  const auto [v, h] = lines_of(args, phases != nullptr);
  Pass pass{};
  pass.taps = v.taps * h.taps;
  pass.height = v.result, pass.width = h.result;
  pass.pixels = s.n * pass.height * pass.width;
  pass.channels = dgrad ? s.k : s.c;
  pass.filters = dgrad ? s.c : s.k;

  Windows& w = pass.windows;
  w.columns = FastDiv(pass.width), w.rows = FastDiv(pass.height);
  w.stride_h = narrow(v.stride), w.stride_w = narrow(h.stride);
  w.first_h = narrow(v.first), w.first_w = narrow(h.first);
  w.taps_w = FastDiv(h.taps);
  w.step_h = narrow(v.step), w.step_w = narrow(h.step);
  const int64_t bytes = pass.channels * size_of(s.dtype);
  w.set_blocks(ceil_div(bytes, kRowBytes));
  w.last_bytes = narrow(bytes - (w.blocks - 1) * kRowBytes);
  w.tap = narrow(v.tap * s.s + h.tap);
  w.tap_h = narrow(v.tap_step * s.s), w.tap_w = narrow(h.tap_step);
  if (phases) {
    std::copy(std::begin(v.phases), std::end(v.phases), phases->h);
    std::copy(std::begin(h.phases), std::end(h.phases), phases->w);
    phases->of_row = FastDiv(s.stride_w);
    phases->stride_h = narrow(s.stride_h), phases->stride_w = narrow(s.stride_w);
    phases->filter_w = narrow(s.s);
    phases->height = narrow(s.h), phases->width = narrow(s.w);
  }
  return pass;
}

Pass pass_of(const Conv2dArgs& args) { return pass_of(args, nullptr); }

CUtensorMap window_map(const Conv2dArgs& args, int pixels) {
  return window_map(args, pixels, args.shape.dtype, args.gathered, args.shape.n);
}

CUtensorMap window_map(const Conv2dArgs& args, int pixels, DType dtype, const Tensor4dRef& t,
                       int64_t images) {
  const Conv2dShape& s = args.shape;
  const auto [v, h] = lines_of(args, has_phases(args));
  const PixelBox box{{narrow(h.first), narrow(v.first)},
                     {narrow(h.upper()), narrow(v.upper())},
                     {static_cast<uint32_t>(h.stride), static_cast<uint32_t>(v.stride)}};
  const CUtensorMapDataType type = dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
  const uint64_t size = u(size_of(dtype));
  const int64_t channels = args.pass == Conv2dPass::kDgrad ? s.k : s.c;
  return make_im2col_map(type, t.data, {u(channels), u(h.image), u(v.image), u(images)},
                         {u(t.w) * size, u(t.h) * size, u(t.n) * size}, box,
                         kRowBytes / static_cast<int>(size), pixels, kRowBytes);
}

const char* window_obstacle(const Conv2dArgs& args) {
  static constexpr char kLimits[] =
      "it takes strides up to 8, padding up to 128, and filters that span up to 256 pixels";
  const Conv2dShape& s = args.shape;
  if (s.groups != 1) return "it takes one group";
  if (s.stride_h > kMaxStride || s.stride_w > kMaxStride) return kLimits;
  const auto [v, h] = lines_of(args, has_phases(args));
  return v.fits() && h.fits() ? nullptr : kLimits;
}

}  // namespace braze::cuda::im2col
