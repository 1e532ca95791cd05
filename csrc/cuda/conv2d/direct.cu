// Direct convolution, any shape and dtype: no tiles of patches in shared memory. It is the fast one
// where a product is too thin for tiles: few taps (one input channel), few channels (depthwise).
#include "gather.cuh"
#include "kernels.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTapChunk = 32;
using Offset = int64_t;  // any tensor

// fprop and dgrad: one thread per pixel and kChannels channels, whose sums stay in registers. The
// filters' values and the taps' positions are the same for all threads of a block: they are read
// from shared memory, kTapChunk taps at a time. Blocks walk over the pixels, so that where all taps
// fit they are prepared once. kWidth: taps gathered by one load, where channels are the fastest
// taps.
template <typename T, int kChannels, int kWidth>
__global__ void __launch_bounds__(kThreads)
    direct_patches_kernel(const __grid_constant__ PatchesFirst<T, Offset> p, int channel_chunks,
                          int pixel_blocks) {
  using Acc = acc_t<T>;
  constexpr int kUnroll = kWidth == 1 ? 9 : 2;
  __shared__ Acc filters[kTapChunk][kChannels], bias[kChannels];
  __shared__ Position<Offset> taps[kTapChunk];
  // channel chunks of the same pixels are neighbours, so that they share the input in L2
  const int n0 = static_cast<int>(blockIdx.x % channel_chunks) * kChannels;
  const unsigned rest = blockIdx.x / channel_chunks;
  const int64_t group = rest / pixel_blocks;
  const T* const a = p.a.data + group * p.a.batch;
  const T* const b = p.b.data + group * p.b.batch;
  if (threadIdx.x < kChannels) {
    const bool used = p.out.bias && n0 + static_cast<int>(threadIdx.x) < p.n;
    bias[threadIdx.x] =
        used ? convert<Acc>(p.out.bias[group * p.out.bias_batch + n0 + threadIdx.x]) : Acc(0);
  }
  const int64_t step = p.out.columns.offset_step[2];
  T* const out = p.out.data + group * p.out.batch + n0 * step;

  const int64_t first = int64_t{rest % pixel_blocks} * kThreads;
  for (int64_t m0 = first; m0 < p.m; m0 += int64_t{pixel_blocks} * kThreads) {
    const bool inside = m0 + threadIdx.x < p.m;
    const int m = inside ? static_cast<int>(m0 + threadIdx.x) : p.m - 1;
    const Position<Offset> pixel = p.a.outer(m);
    Acc sum[kChannels] = {};
    for (int k0 = 0; k0 < p.k; k0 += kTapChunk) {
      const int count = min(kTapChunk, p.k - k0);
      if (m0 == first || p.k > kTapChunk) {
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += kThreads) taps[i] = p.a.depth(k0 + i);
        for (int i = threadIdx.x; i < count * kChannels; i += kThreads) {
          const int tap = i / kChannels, channel = i % kChannels;
          Offset offset;
          const bool valid = p.b.locate(p.b.outer(n0 + channel), p.b.depth(k0 + tap), offset);
          filters[tap][channel] = valid ? convert<Acc>(b[offset]) : Acc(0);
        }
        __syncthreads();
      }
#pragma unroll kUnroll
      for (int i = 0; i < count; i += kWidth) {
        Offset offset;
        Vec<T, kWidth> x{};
        if (p.a.locate(pixel, taps[i], offset)) {
          x = *reinterpret_cast<const Vec<T, kWidth>*>(a + offset);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) sum[c] += convert<Acc>(x.v[j]) * filters[i + j][c];
        }
      }
    }
    if (p.k == 0) __syncthreads();  // the bias
    if (!inside) continue;
    const auto result = [&](int c) {
      const Acc v = sum[c] + bias[c];
      return convert<T>(p.out.relu && v < Acc(0) ? Acc(0) : v);  // NaN stays NaN
    };
    T* const to = out + p.out.rows.at(m).offset;
    constexpr int kStore = kChannels % 4 != 0 ? 1 : sizeof(T) == 8 ? 2 : 4;
    if (kStore > 1 && p.out.vectors && n0 + kChannels <= p.n) {
#pragma unroll
      for (int c = 0; c < kChannels; c += kStore) {
        Vec<T, kStore> v;
#pragma unroll
        for (int j = 0; j < kStore; ++j) v.v[j] = result(c + j);
        *reinterpret_cast<Vec<T, kStore>*>(to + c) = v;
      }
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (n0 + c < p.n) to[c * step] = result(c);
      }
    }
  }
}

// wgrad: threads share out the pixels; each keeps the sums of kFilters x kTaps products over its
// own pixels in registers. At the end the block adds its threads' sums, always in the same order.
constexpr int kTaps = 9;

template <typename T, int kFilters>
__global__ void __launch_bounds__(kThreads)
    direct_wgrad_kernel(const __grid_constant__ PatchesSecond<T, Offset> p, int filter_chunks,
                        int tap_chunks) {
  using Acc = acc_t<T>;
  __shared__ Acc warp_sums[kThreads / 32][kFilters * kTaps];
  __shared__ Position<Offset> taps[kTaps];
  unsigned rest = blockIdx.x;
  const int m0 = static_cast<int>(rest % filter_chunks) * kFilters;
  rest /= filter_chunks;
  const int n0 = static_cast<int>(rest % tap_chunks) * kTaps;
  rest /= tap_chunks;
  const int split = static_cast<int>(rest % p.splits);
  const int64_t group = rest / p.splits;
  if (threadIdx.x < kTaps) taps[threadIdx.x] = p.b.outer(n0 + threadIdx.x);
  __syncthreads();

  const T* const dy = p.a.data + group * p.a.batch + m0 * p.a.outer_axis.offset_step[2];
  const T* const x = p.b.data + group * p.b.batch;
  const int64_t filter_step = p.a.outer_axis.offset_step[2];
  const int filters = min(kFilters, p.m - m0);
  const int64_t begin = int64_t{p.k} * split / p.splits;
  const int64_t end = int64_t{p.k} * (split + 1) / p.splits;
  Acc sum[kFilters][kTaps] = {};
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const T* const gradient = dy + p.a.depth_axis.at(static_cast<int>(i)).offset;
    Acc g[kFilters];
#pragma unroll
    for (int f = 0; f < kFilters; ++f) {
      g[f] = f < filters ? convert<Acc>(gradient[f * filter_step]) : Acc(0);
    }
    const Position<Offset> pixel = p.b.depth_axis.at(static_cast<int>(i));
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      Offset offset;
      const bool valid = p.b.locate(taps[t], pixel, offset);
      const Acc v = valid ? convert<Acc>(x[offset]) : Acc(0);
#pragma unroll
      for (int f = 0; f < kFilters; ++f) sum[f][t] += g[f] * v;
    }
  }

#pragma unroll
  for (int f = 0; f < kFilters; ++f) {
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      Acc v = sum[f][t];
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(0xffffffff, v, lanes);
      if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][f * kTaps + t] = v;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kFilters * kTaps; i += kThreads) {
    const int m = m0 + i / kTaps, n = n0 + i % kTaps;
    if (m >= p.m || n >= p.n) continue;
    Acc v = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) v += warp_sums[warp][i];
    p.partial[((split * p.batch + group) * p.m + m) * p.n + n] = v;
  }
}

unsigned checked_blocks(int64_t blocks) {
  if (blocks > INT_MAX) throw std::runtime_error("conv2d: direct: more than 2^31 - 1 blocks");
  return static_cast<unsigned>(blocks);
}

template <typename T, int kChannels, int kWidth>
void launch_patches(Stream stream, const PatchesFirst<T, Offset>& problem) {
  const int chunks = static_cast<int>(ceil_div(problem.n, kChannels));
  // enough blocks to fill the device several times over, no more
  const int64_t pixel_blocks = std::min(ceil_div(problem.m, kThreads),
                                        ceil_div(int64_t{sm_count()} * 64, problem.batch * chunks));
  const unsigned blocks = checked_blocks(problem.batch * pixel_blocks * chunks);
  direct_patches_kernel<T, kChannels, kWidth>
      <<<blocks, kThreads, 0, as_cuda(stream)>>>(problem, chunks, static_cast<int>(pixel_blocks));
  check_launch("conv2d direct");
}

template <typename T, int kChannels>
void launch_patches(Stream stream, const PatchesFirst<T, Offset>& problem) {
  if (problem.a.vectors) return launch_patches<T, kChannels, kVecWidth<T>>(stream, problem);
  launch_patches<T, kChannels, 1>(stream, problem);
}

int wgrad_filters(int64_t filters) { return filters >= 4 ? 8 : 1; }

int wgrad_splits(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  const int64_t chunks =
      args.shape.groups * ceil_div(e.m, wgrad_filters(e.m)) * ceil_div(e.n, kTaps);
  const int64_t wanted = ceil_div(int64_t{sm_count()} * 8, chunks);
  return static_cast<int>(
      std::max<int64_t>(1, std::min({wanted, e.k / (4 * kThreads), int64_t{1024}})));
}

template <typename T, int kFilters>
void launch_wgrad(Stream stream, const PatchesSecond<T, Offset>& problem) {
  const int filter_chunks = static_cast<int>(ceil_div(problem.m, kFilters));
  const int tap_chunks = static_cast<int>(ceil_div(problem.n, kTaps));
  const unsigned blocks =
      checked_blocks(problem.batch * problem.splits * filter_chunks * tap_chunks);
  direct_wgrad_kernel<T, kFilters>
      <<<blocks, kThreads, 0, as_cuda(stream)>>>(problem, filter_chunks, tap_chunks);
  check_launch("conv2d direct wgrad");
  launch_gemm_reduce<T>(stream, problem.partial, problem.out, problem.batch, problem.m, problem.n,
                        problem.splits);
}

}  // namespace

void plan_direct(const Conv2dArgs& args, Conv2dPlan* plan) {
  if (args.pass != Conv2dPass::kWgrad) return;
  const ConvExtents e = conv_extents(args);
  const int splits = wgrad_splits(args);
  const int64_t accumulator = args.shape.dtype == DType::kFloat64 ? 8 : 4;
  plan->workspace_bytes = splits * args.shape.groups * e.m * e.n * accumulator;
  plan->tiling.set(splits);
}

void run_direct(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  dispatch(args.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (args.pass == Conv2dPass::kWgrad) {
      PatchesSecond<T, Offset> problem = patches_second<T, Offset>(args);
      problem.splits = plan.tiling.get<int>();
      problem.partial = static_cast<acc_t<T>*>(workspace);
      if (wgrad_filters(problem.m) == 8) return launch_wgrad<T, 8>(stream, problem);
      return launch_wgrad<T, 1>(stream, problem);
    }
    const PatchesFirst<T, Offset> problem = patches_first<T, Offset>(args);
    if (problem.n >= 16) return launch_patches<T, 16>(stream, problem);
    if (problem.n >= 2) return launch_patches<T, 4>(stream, problem);
    launch_patches<T, 1>(stream, problem);
  });
}

}  // namespace braze::cuda
