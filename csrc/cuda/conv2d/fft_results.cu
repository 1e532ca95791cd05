// Convolution by FFT, the way from what was transformed back to the result: cropped, with the bias,
// converted (csrc/ops/conv2d_fft.cpp has the rest).
//
// A transform spreads an infinity or a NaN over its tile, and may overflow where no result does. So
// what is not finite is computed again here, directly, by a warp for each result. Where all is
// finite, that costs a comparison, and no kernel, flag or wait of its own.
#include <climits>
#include <cstdlib>

#include "args.h"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/conv2d_fft.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffff;

// A result by its digits, or a difference of such. outer: the image, or of wgrad the filter of the
// group; channel: of the group.
struct Digits {
  int group, outer, channel, row, column;
};
struct Steps {
  int64_t group, outer, channel, row, column;

  __device__ __forceinline__ int64_t operator()(const Digits& d) const {
    return d.group * group + d.outer * outer + d.channel * channel + d.row * row +
           d.column * column;
  }
};

// One dimension of the direct sum: where a term of a result reads the gathered tensor.
struct Window {
  int scale, base, step;  // at result * scale + base + term * step, counted in
  FastDiv stride;         // parts of a pixel, of which only multiples exist
  int extent;             // in pixels
  int terms;

  __device__ bool locate(int result, int term, int& pixel) const {
    const int at = result * scale + base + term * step;
    if (at < 0) return false;
    int rest;
    pixel = stride.div(at, rest);
    return rest == 0 && pixel < extent;
  }
};

// An operand of the direct sum.
template <typename T>
struct Operand {
  const T* data;
  Steps result;                // by the result's digits
  int64_t outer, row, column;  // steps by the term's
};

template <typename T>
struct Results {
  const acc_t<T>* back;  // what came back: units, rows and columns from the first one at work
  T* out;
  const T* bias;  // of the result's channels, or nullptr
  Steps from, to;
  int64_t bias_group;

  // Planes are groups, units and, unless they are within planes, channels; elements of a plane are
  // rows, columns and channels. A unit is a tile of an image, or of wgrad a filter.
  int planes, elements;
  FastDiv units, channels, columns, channels_within;
  FastDiv tiles, tiles_w;    // of an image
  int group, unit, channel;  // the first ones at work
  int tile_rows, tile_columns;
  int rows, all_columns;  // of the result

  Operand<T> gathered, other;
  int outer_terms;
  Window h, w;
};

// The first element of a plane, and how much further element i is.
template <typename T>
__device__ __forceinline__ Digits corner(const Results<T>& p, int plane, int64_t* from) {
  int channel, unit, tile, tile_w;
  const int group = p.units.div(p.channels.div(plane, channel), unit);
  *from = p.from({group, unit, channel, 0, 0});
  const int outer = p.tiles.div(p.unit + unit, tile), tile_h = p.tiles_w.div(tile, tile_w);
  return {p.group + group, outer, p.channel + channel, tile_h * p.tile_rows,
          tile_w * p.tile_columns};
}
template <typename T>
__device__ __forceinline__ Digits element(const Results<T>& p, int i) {
  int channel, column;
  const int row = p.columns.div(p.channels_within.div(i, channel), column);
  return {0, 0, channel, row, column};
}
__device__ __forceinline__ Digits operator+(const Digits& a, const Digits& b) {
  return {a.group + b.group, a.outer + b.outer, a.channel + b.channel, a.row + b.row,
          a.column + b.column};
}

// The result as a direct sum, whose terms the lanes of a warp share out. As in the direct kernels,
// padding is zeros that are multiplied.
template <typename T>
__device__ acc_t<T> direct_sum(const Results<T>& p, const Digits& result, int lane) {
  using Acc = acc_t<T>;
  const T* gathered = p.gathered.data + p.gathered.result(result);
  const T* other = p.other.data + p.other.result(result);
  Acc sum = 0;
  for (int outer = 0; outer < p.outer_terms; ++outer) {
    for (int row = 0; row < p.h.terms; ++row) {
      int h = 0;
      const bool has_row = p.h.locate(result.row, row, h);
#pragma unroll 1  // registers would cost the usual case, which has nothing to sum, its occupancy
      for (int column = lane; column < p.w.terms; column += 32) {
        int w = 0;
        const bool exists = p.w.locate(result.column, column, w) && has_row;
        const Acc value =
            exists ? convert<Acc>(gathered[h * p.gathered.row + w * p.gathered.column]) : Acc(0);
        sum += value * convert<Acc>(other[row * p.other.row + column * p.other.column]);
      }
    }
    gathered += p.gathered.outer;
    other += p.other.outer;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  return sum;
}

// per_warp: results of a plane that a warp takes at once; fewer than it has lanes where there would
// be too few warps to compute them again.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    fft_results_kernel(const __grid_constant__ Results<T> p, int per_warp) {
  using Acc = acc_t<T>;
  const int lane = threadIdx.x % 32;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t step = int64_t{gridDim.x} * kWarps * per_warp;
  for (int64_t plane = blockIdx.y; plane < p.planes; plane += gridDim.y) {
    int64_t from;
    const Digits first = corner(p, static_cast<int>(plane), &from);
    const Acc* const back = p.back + from;
    T* const out = p.out + p.to(first);
    const T* const bias = p.bias ? p.bias + first.group * p.bias_group + first.channel : nullptr;
    for (int64_t begin = warp * per_warp; begin < p.elements; begin += step) {
      const bool is_one = lane < per_warp && begin + lane < p.elements;
      const Digits mine = element(p, is_one ? static_cast<int>(begin + lane) : 0);
      // Tiles reach over the edges of the result.
      const bool exists =
          is_one && first.row + mine.row < p.rows && first.column + mine.column < p.all_columns;
      Acc v = exists ? back[p.from(mine)] : Acc(0);
      unsigned spoilt = __ballot_sync(kAllLanes, !isfinite(v));
      while (spoilt != 0) {
        const int source = __ffs(spoilt) - 1;
        spoilt &= spoilt - 1;
        const Acc sum = direct_sum(p, first + element(p, static_cast<int>(begin + source)), lane);
        if (lane == source) v = sum;
      }
      if (!exists) continue;
      if (bias) v += convert<Acc>(bias[mine.channel]);
      out[p.to(mine)] = convert<T>(v);
    }
  }
}

int checked(int64_t count) {
  if (count > INT_MAX) throw std::runtime_error("conv2d: fft: more than 2^31 - 1 results at once");
  return static_cast<int>(count);
}

template <typename T>
Results<T> results_of(const Conv2dProblem& problem, const FftPlan& plan, const FftPart& part,
                      const void* back, const void* bias) {
  const Conv2dArgs args = args_of(problem);
  const Conv2dShape& s = args.shape;
  const Tensor4dRef &in = args.gathered, &other = args.other, &out = args.out;
  const bool wgrad = args.pass == Conv2dPass::kWgrad, dgrad = args.pass == Conv2dPass::kDgrad;
  const FftExtents rows = fft_rows(problem), columns = fft_columns(problem);
  const int64_t c = s.c / s.groups, k = s.k / s.groups;
  const int64_t units = wgrad ? part.results : part.units;
  const int64_t channels = wgrad ? c : part.results;

  Results<T> r{};
  r.back = static_cast<const acc_t<T>*>(back);
  const int64_t line = plan.w.length, plane = plan.h.length * line;
  r.from = {units * channels * plane, channels * plane, plane,
            (wgrad ? s.dilation_h : rows.result_stride) * line,
            wgrad ? s.dilation_w : columns.result_stride};
  r.out = static_cast<T*>(const_cast<void*>(out.data));
  r.to = {wgrad ? k * out.n : (dgrad ? c : k) * out.c, out.n, out.c, out.h, out.w};
  r.bias = static_cast<const T*>(bias);
  r.bias_group = dgrad ? c : k;

  // Neighbouring threads write neighbours.
  const bool within = out.c == 1 && channels > 1;
  const int64_t tiles_w = wgrad ? 1 : plan.w.tiles, tiles = wgrad ? 1 : plan.h.tiles * tiles_w;
  const int64_t tile_rows = wgrad ? s.r : plan.h.step / rows.result_stride;
  const int64_t tile_columns = wgrad ? s.s : plan.w.step / columns.result_stride;
  r.planes = checked(part.groups * units * (within ? 1 : channels));
  r.elements = checked(tile_rows * tile_columns * (within ? channels : 1));
  r.units = FastDiv(units), r.channels = FastDiv(within ? 1 : channels);
  r.columns = FastDiv(tile_columns), r.channels_within = FastDiv(within ? channels : 1);
  checked(wgrad ? k : s.n * tiles);
  r.tiles = FastDiv(tiles), r.tiles_w = FastDiv(tiles_w);
  r.group = checked(part.group), r.unit = checked(wgrad ? part.result : part.unit);
  r.channel = wgrad ? 0 : checked(part.result);
  r.tile_rows = checked(tile_rows), r.tile_columns = checked(tile_columns);
  r.rows = checked(wgrad ? s.r : dgrad ? s.h : s.p);
  r.all_columns = checked(wgrad ? s.s : dgrad ? s.w : s.q);

  // As in launchers/conv2d.h.
  r.gathered = {static_cast<const T*>(in.data),
                {(dgrad ? k : c) * in.c, wgrad ? 0 : in.n, wgrad ? in.c : 0, 0, 0},
                wgrad ? in.n : in.c,
                in.h,
                in.w};
  r.other = {static_cast<const T*>(other.data),
             {wgrad ? k * other.c : k * other.n, wgrad ? other.c : 0,
              wgrad ? 0 : (dgrad ? other.c : other.n), 0, 0},
             dgrad || wgrad ? other.n : other.c,
             other.h,
             other.w};
  r.outer_terms = checked(wgrad ? s.n : dgrad ? k : c);
  const auto window = [](int64_t scale, int64_t pad, int64_t step, int64_t stride, int64_t extent,
                         int64_t terms) {
    checked(std::max(extent * stride, extent + pad) + std::abs(step) * terms);
    return Window{checked(scale),  checked(pad),    checked(step),
                  FastDiv(stride), checked(extent), checked(terms)};
  };
  if (dgrad) {
    r.h = window(1, s.pad_h, -s.dilation_h, s.stride_h, s.p, s.r);
    r.w = window(1, s.pad_w, -s.dilation_w, s.stride_w, s.q, s.s);
  } else if (wgrad) {
    r.h = window(s.dilation_h, -s.pad_h, s.stride_h, 1, s.h, s.p);
    r.w = window(s.dilation_w, -s.pad_w, s.stride_w, 1, s.w, s.q);
  } else {
    r.h = window(s.stride_h, -s.pad_h, s.dilation_h, 1, s.h, s.r);
    r.w = window(s.stride_w, -s.pad_w, s.dilation_w, 1, s.w, s.s);
  }
  return r;
}

}  // namespace

void store_fft_results(Stream stream, const Conv2dProblem& problem, const FftPlan& plan,
                       const FftPart& part, const void* back, const void* bias) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Results<T> results = results_of<T>(problem, plan, part, back, bias);
    if (results.planes == 0 || results.elements == 0) return;
    constexpr int64_t kWarpsPerSm = 16, kMostRows = 65535;
    const int64_t wanted = sm_count() * kWarpsPerSm;
    const int64_t all = int64_t{results.planes} * results.elements;
    const int per_warp = static_cast<int>(std::clamp<int64_t>(all / wanted, 1, 32));
    const int64_t most = 2 * wanted;  // blocks; beyond that they walk
    const int64_t across = std::min<int64_t>(ceil_div(results.elements, kWarps * per_warp), most);
    const int64_t down = std::clamp<int64_t>(most / across, 1, kMostRows);
    const dim3 grid(static_cast<unsigned>(across),
                    static_cast<unsigned>(std::min<int64_t>(results.planes, down)));
    fft_results_kernel<T><<<grid, kThreads, 0, as_cuda(stream)>>>(results, per_warp);
    check_launch("conv2d fft");
  });
}

}  // namespace braze::cuda
