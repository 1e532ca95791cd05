// Backward of conv_bn_relu_max_pool2d.h in two launches: one pass over the pooled gradient that
// sums Q and S1 (a partial sum for each block, in fp64), then the formulas. 16-bit gradients, and
// fp32's where TF32 is allowed, go through the tensor cores, others through multiply-adds with a
// lane for each filter.
#include "small_k_backward_tf32.cuh"

namespace braze::cuda {
namespace {

using namespace small_k;

constexpr int kFinalizeThreads = 256;
// Bounds the number of fp32 additions behind a partial sum, and so their rounding.
constexpr int kMaxTilesPerBlock = 64;
constexpr int kMaxRun = 4;  // groups of 8 outputs that multiply-adds sum up in fp32

// fp32 and fp64: a lane owns a filter, a warp walks over outputs, 8 at a time; lanes read the patch
// at their maximum from shared memory.
template <typename Tp, typename T, bool kChannelsLast>
__global__ void __launch_bounds__(32 * kMaxTileWarps, Tp::K * sizeof(T) <= 36 ? 2 : 1)
    backward_scalar_kernel(const __grid_constant__ Tiling tiling, bool vectors, const T* x,
                           const T* dy, const uint32_t* codes, double* __restrict__ partial) {
  wait_for_earlier_kernels();
  constexpr int kSums = Tp::K + 1, kOutputs = 8;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* const staged = reinterpret_cast<T*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int k = static_cast<int>(blockIdx.y) * kFilters + lane;
  const bool owner = k < tiling.k;
  double total[kSums] = {};

  int corner[kOutputs];
  T grad[kOutputs];
  uint32_t bits[kOutputs];
  const auto load = [&](const Cursor& at) {
    const Tile tile(tiling, at.index);
    const int64_t first = int64_t{tile.image} * tiling.plane;
    const uint32_t* words = codes + first * tiling.words + k / 8;
    const T* from = dy + (kChannelsLast ? first * tiling.k + k
                                        : (int64_t{tile.image} * tiling.k + k) * tiling.plane);
    int in_plane[kOutputs];
    bool valid[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      valid[o] = tile.locate(tiling, kOutputs * at.group + o, &in_plane[o], &corner[o]) && owner;
      bits[o] = valid[o] ? words[in_plane[o] * tiling.words] : 0;
    }
    if (!kChannelsLast && vectors) {
#pragma unroll
      for (int o = 0; o < kOutputs; o += 4) {
        Vec<T, 4> four{};
        if (valid[o]) four = *reinterpret_cast<const Vec<T, 4>*>(from + in_plane[o]);
#pragma unroll
        for (int e = 0; e < 4; ++e) grad[o + e] = four.v[e];
      }
    } else {
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        grad[o] = valid[o] ? from[in_plane[o] * (kChannelsLast ? tiling.k : 1)] : T(0);
      }
    }
  };
  const int size = tiling.staged(Tp::C), groups = 2 * tiling.groups;
  InputLoader<Tp, TensorPixels<T>> loader(tiling, {tiling, x});
  Cursor cursor{static_cast<int>(blockIdx.x), warp};
  loader.load(Tile(tiling, cursor.index));
  load(cursor);
  T* input = staged;
  T sum[kSums] = {};
  int run = 0;
  for (int index = cursor.index; index < tiling.tiles; index += gridDim.x) {
    loader.store(Tile(tiling, index), [&](int i, T value) { input[i] = value; });
    const int next_index = index + static_cast<int>(gridDim.x);
    if (next_index < tiling.tiles) loader.load(Tile(tiling, next_index));
    __syncthreads();
    for (int group = warp; group < groups; group += tiling.warps) {
      const T* patch[kOutputs];
      T active[kOutputs];
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        const uint32_t code = bits[o] << (lane % 8);
        const auto bit = [&](int byte) { return code >> (8 * byte + 7) & 1; };
        active[o] = bit(Codes::kActive) ? grad[o] : T(0);
        patch[o] = input + corner[o] + bit(Codes::kRight) + (bit(Codes::kBelow) ? tiling.pitch : 0);
      }
      if (cursor.next(tiling, groups)) load(cursor);
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
        for (int i = 0; i < Tp::K; ++i) {
          sum[i] += active[o] * patch[o][staged_offset<Tp>(tiling, Tp::in_window(i))];
        }
        sum[Tp::K] += active[o];
      }
      if (++run == kMaxRun) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          total[i] += static_cast<double>(sum[i]);
          sum[i] = 0;
        }
        run = 0;
      }
    }
    input = input == staged ? staged + size : staged;  // one barrier a tile is enough
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) total[i] += static_cast<double>(sum[i]);

  // The block's sums, warp after warp, some of the taps at a time.
  constexpr int kChunk = 10;
  __shared__ double dump[kMaxTileWarps][kChunk][kFilters];
  partial += (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * kFilters * kSums;
#pragma unroll
  for (int first = 0; first < kSums; first += kChunk) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (first + i < kSums) dump[warp][i][lane] = total[first + i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kChunk * kFilters; i += blockDim.x) {
      const int filter = i / kChunk, tap = first + i % kChunk;
      if (tap >= kSums) continue;
      double value = 0;
      for (int v = 0; v < tiling.warps; ++v) value += dump[v][i % kChunk][filter];
      partial[filter * kSums + tap] = value;
    }
  }
}

template <typename Tp, typename T, bool kTF32, bool kChannelsLast>
constexpr auto sums_kernel() {
  if constexpr (sizeof(T) == 2) {
    return backward_tensor_kernel<Tp, T, kChannelsLast>;
  } else if constexpr (kTF32) {
    return backward_tf32_kernel<Tp, kChannelsLast>;
  } else {
    return backward_scalar_kernel<Tp, T, kChannelsLast>;
  }
}

// A block per filter: sums the partial Q and S1, then the formulas of conv_bn_relu_max_pool2d.h.
// `pitch`: sums in a block's partial.
template <typename Tp, typename T>
__global__ void __launch_bounds__(kFinalizeThreads)
    backward_finalize_kernel(SmallKShape a, SmallKNorm norm, const T* w, const double* partial,
                             int blocks, int64_t pitch, const double* saved, T* __restrict__ dw,
                             void* __restrict__ dgamma, void* __restrict__ dbeta,
                             T* __restrict__ dbias) {
  wait_for_earlier_kernels();
  constexpr int K = Tp::K, kSums = K + 1, kRows = kFinalizeThreads / kSums;
  __shared__ double parts[kRows][kSums];
  __shared__ double sums[kSums], weights[K];
  const int64_t k = blockIdx.x;
  const int row = threadIdx.x / kSums, column = threadIdx.x % kSums;
  // All loads first, so that their latencies overlap.
  const double mu = saved[K + K * K + k], rstd = saved[K + K * K + a.k + k];
  const LoadedValue gamma(norm.gamma, norm.param_dtype, k, 1);
  const int i = min(static_cast<int>(threadIdx.x), K - 1);
  const double mean = norm.training ? saved[i] : 0;
  const T weight = w[k * K + i];
  if (row < kRows) {
    parts[row][column] = strided_sum<8>(partial + k * kSums + column, pitch, row, kRows, blocks);
  }
  if (threadIdx.x < K) weights[i] = convert<double>(weight);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  double row_of_covariance[K];  // in flight during the sums
#pragma unroll
  for (int j = 0; j < K; ++j) row_of_covariance[j] = norm.training ? saved[K + i * K + j] : 0;
  if (threadIdx.x < kSums) {
    double sum = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum += parts[r][threadIdx.x];
    sums[threadIdx.x] = sum;
  }
  __syncwarp();
  const double s1 = sums[K];
  const double wq = warp_sum(threadIdx.x < K ? weights[i] * sums[i] : 0.0);
  const double s2 = rstd * (wq - mu * s1), scale = gamma * rstd;
  double grad = sums[i];
  if (norm.training) {
    double cw = 0;
#pragma unroll
    for (int j = 0; j < K; ++j) cw += row_of_covariance[j] * weights[j];
    grad -= s1 * mean + s2 * rstd * cw;
  }
  if (threadIdx.x < K) dw[k * K + i] = convert<T>(scale * grad);
  if (threadIdx.x == 0) {
    store_value(dgamma, norm.param_dtype, k, s2);
    store_value(dbeta, norm.param_dtype, k, s1);
    // In training a bias before batch norm cancels.
    if (dbias) dbias[k] = convert<T>(norm.training ? 0.0 : scale * s1);
  }
}

int filter_groups(const SmallKShape& a) { return static_cast<int>(ceil_div(a.k, kFilters)); }

Tiling backward_tiling(const SmallKShape& a) {
  return Tiling(a, Squares::pooled(a), wanted_tiles(filter_groups(a)),
                std::max(static_cast<int>(size_of(a.dtype)), 4));
}

// Blocks side by side over the tiles: as many as are resident, or more where each would have to add
// up too much.
int backward_blocks(const Tiling& tiling) {
  return std::min(tiling.tiles,
                  std::max(kResident * sm_count(),
                           static_cast<int>(ceil_div(tiling.tiles, kMaxTilesPerBlock))));
}

}  // namespace

int64_t small_k_backward_workspace_bytes(const SmallKShape& a) {
  const int64_t sums = a.c * a.r * a.s + 1;
  return int64_t{backward_blocks(backward_tiling(a))} * filter_groups(a) * kFilters * sums *
         static_cast<int64_t>(sizeof(double));
}

void small_k_backward(Stream stream, const SmallKShape& a, const SmallKNorm& norm, const void* x,
                      const void* w, const void* dy, const uint32_t* codes, const double* saved,
                      void* dw, void* dgamma, void* dbeta, void* dbias, void* workspace) {
  double* partial = static_cast<double*>(workspace);
  const Tiling tiling = backward_tiling(a);
  const dim3 grid(backward_blocks(tiling), filter_groups(a));
  dispatch(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_taps(a, [&](auto taps) {
      using Tp = decltype(taps);
      // Lanes take four outputs of a plane at once, or four filters of an output.
      const bool vectors = is_vec_aligned(static_cast<const T*>(dy)) &&
                           (a.channels_last ? a.k % 4 == 0 : tiling.quads);
      const auto launch = [&](auto kernel, int shared) {
        launch_early(kernel, grid, 32 * tiling.warps, shared, stream, tiling, vectors,
                     static_cast<const T*>(x), static_cast<const T*>(dy), codes, partial);
        check_launch("small_k backward");
      };
      const int staged = 2 * tiling.staged(Tp::C);
      const int of_tensors = std::max(static_cast<int>((staged + 2) * sizeof(uint32_t)),
                                      tensor_dump_bytes<Tp>(tiling));
      dispatch_tf32<T>(a, [&](auto tf32) {
        constexpr bool kTF32 = decltype(tf32)::value;
        launch(a.channels_last ? sums_kernel<Tp, T, kTF32, true>()
                               : sums_kernel<Tp, T, kTF32, false>(),
               kTF32 || sizeof(T) == 2 ? of_tensors : staged * static_cast<int>(sizeof(T)));
      });
      const int64_t pitch = int64_t{grid.y} * kFilters * (Tp::K + 1);
      launch_early(backward_finalize_kernel<Tp, T>, static_cast<unsigned>(a.k), kFinalizeThreads, 0,
                   stream, a, norm, static_cast<const T*>(w), partial, static_cast<int>(grid.x),
                   pitch, saved, static_cast<T*>(dw), dgamma, dbeta, static_cast<T*>(dbias));
      check_launch("small_k backward finalize");
    });
  });
}

}  // namespace braze::cuda
