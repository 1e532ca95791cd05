#include "windows.h"

#include <climits>

#include "cuda/conv2d/halo/tiles.cuh"

namespace braze::cuda::im2col {
namespace {

// Along one dimension: where windows begin, and what TMA calls its bounding box.
struct Span1d {
  int64_t first, stride, step, taps, result, image;
  int64_t upper() const { return first + (result - 1) * stride + 1 - image; }
  bool fits() const {
    const auto is_corner = [](int64_t v) { return v >= -128 && v <= 127; };
    return is_corner(first) && is_corner(upper()) && (taps - 1) * step <= 255 && stride <= 8;
  }
};

Span1d span_of(bool dgrad, int64_t image, int64_t result, int64_t taps, int64_t pad, int64_t stride,
               int64_t dilation) {
  if (dgrad) return {pad - (taps - 1) * dilation, 1, dilation, taps, result, image};
  return {-pad, stride, dilation, taps, result, image};
}
Span1d vertical(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool dgrad = args.pass == Conv2dPass::kDgrad;
  return span_of(dgrad, dgrad ? s.p : s.h, dgrad ? s.h : s.p, s.r, s.pad_h, s.stride_h,
                 s.dilation_h);
}
Span1d horizontal(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool dgrad = args.pass == Conv2dPass::kDgrad;
  return span_of(dgrad, dgrad ? s.q : s.w, dgrad ? s.w : s.q, s.s, s.pad_w, s.stride_w,
                 s.dilation_w);
}

}  // namespace

Pass pass_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool dgrad = args.pass == Conv2dPass::kDgrad;
  const Span1d v = vertical(args), h = horizontal(args);
  Pass pass{};
  pass.taps = s.r * s.s;
  pass.height = v.result, pass.width = h.result;
  pass.pixels = s.n * pass.height * pass.width;
  pass.channels = dgrad ? s.k : s.c;
  pass.filters = dgrad ? s.c : s.k;
  pass.image = args.gathered;
  pass.images = s.n, pass.image_h = v.image, pass.image_w = h.image;

  const auto narrow = [](int64_t value) { return static_cast<int>(value); };
  Windows& w = pass.windows;
  w.columns = FastDiv(pass.width), w.rows = FastDiv(pass.height);
  w.stride_h = narrow(v.stride), w.stride_w = narrow(h.stride);
  w.first_h = narrow(v.first), w.first_w = narrow(h.first);
  w.taps_w = FastDiv(s.s);
  w.step_h = narrow(v.step), w.step_w = narrow(h.step);
  w.blocks = narrow(ceil_div(pass.channels * size_of(s.dtype), kRowBytes));
  w.tap = dgrad ? narrow(pass.taps - 1) : 0;
  w.tap_h = narrow(dgrad ? -s.s : s.s), w.tap_w = dgrad ? -1 : 1;
  return pass;
}

CUtensorMap window_map(DType dtype, const Pass& pass, int pixels) {
  const Windows& w = pass.windows;
  const Span1d v{w.first_h, w.stride_h, 0, 0, pass.height, pass.image_h};
  const Span1d h{w.first_w, w.stride_w, 0, 0, pass.width, pass.image_w};
  const PixelBox box{{w.first_w, w.first_h},
                     {static_cast<int>(h.upper()), static_cast<int>(v.upper())},
                     {static_cast<uint32_t>(w.stride_w), static_cast<uint32_t>(w.stride_h)}};
  const CUtensorMapDataType type = dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
  const uint64_t size = u(size_of(dtype));
  const Tensor4dRef& t = pass.image;
  return make_im2col_map(type, t.data,
                         {u(pass.channels), u(pass.image_w), u(pass.image_h), u(pass.images)},
                         {u(t.w) * size, u(t.h) * size, u(t.n) * size}, box,
                         kRowBytes / static_cast<int>(size), pixels, kRowBytes);
}

const char* window_obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (s.groups != 1) return "it takes one group";
  if (!halo::tma_takes(s.dtype, args.gathered)) {
    return "it takes channels-last tensors, aligned to 16 bytes, with a multiple of 16 bytes of "
           "channels";
  }
  if (!vertical(args).fits() || !horizontal(args).fits()) {
    return "it takes strides up to 8, padding up to 128, and filters that span up to 256 pixels";
  }
  return nullptr;
}

}  // namespace braze::cuda::im2col
