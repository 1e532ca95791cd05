// Batch statistics of halo/wgmma.cuh's results, as they are stored: a channel of one value then has
// that mean, and no variance.
#pragma once

#include "epilogue.cuh"
#include "tiles.cuh"
#include "cuda/common/tma.cuh"

namespace braze::cuda::halo {

// 16 bits: warps beside that which copies, for which there are registers anyway. They read results
// where they lie on their way out, while the consumers multiply: in the consumers' own time sums
// took half of an epilogue, two fifths of that to bring the instructions.
constexpr int kMomentWarps = 3;

// What consumers and these warps tell each other about the results of a group.
template <int kConsumers>
struct StagedTiles {
  uint64_t full[kConsumers], read[kConsumers];

  // By one thread.
  __device__ __forceinline__ void init() {
#pragma unroll
    for (int group = 0; group < kConsumers; ++group) {
      mbarrier_init(&full[group], 1);
      mbarrier_init(&read[group], kMomentWarps);
    }
    mbarrier_init_fence();
  }
};

// By these warps: the moments of all of the block's tiles, as stage_results() leaves them at `out`
// for each group. offsets: of positions, -1 where there is no output; the first one of the first
// tile is one. scratch: shared memory that nobody needs when all tiles are staged.
template <typename T, int kPixels, int kConsumers>
__device__ __forceinline__ void sum_up_staged(StagedTiles<kConsumers>& staged, const Args& a,
                                              const unsigned char* out,
                                              const int (&offsets)[kConsumers][kPixels], int k0,
                                              float2* scratch, Moments* moments) {
  // A thread has 8 filters of every so many positions.
  constexpr int kEach = 8, kChunks = kFilters / kEach, kThreads = kMomentWarps * 32;
  constexpr int kLines = kThreads / kChunks, kAtOnce = 4;
  static_assert(kThreads >= kFilters);
  const int thread = static_cast<int>(threadIdx.x) - kConsumers * 128 - 32;
  const int chunk = thread % kChunks, line = thread / kChunks;
  const auto unpack = [](const uint4& packed, float(&values)[kEach]) {
#pragma unroll
    for (int k = 0; k < kEach; k += 2) {
      const float2 pair = unpack_pair<T>(reinterpret_cast<const uint32_t*>(&packed)[k / 2]);
      values[k] = pair.x, values[k + 1] = pair.y;
    }
  };
  uint4 first{};
  float shift[kEach] = {}, sum[kEach] = {}, square_sum[kEach] = {};
  int count = 0;
  for (int i = 0, tile = blockIdx.x; tile < a.tiles; ++i, tile += gridDim.x) {
    const int group = i % kConsumers;
    const unsigned char* const from = out + group * kPixels * 128;
    mbarrier_wait(&staged.full[group], i / kConsumers & 1);
    if (i == 0) {
      first = *reinterpret_cast<const uint4*>(from + (chunk << 4));
      unpack(first, shift);
    }
    // No branches, and several positions at once: a warp has its scheduler's time, but alone.
    for (int position = line; position < kPixels; position += kAtOnce * kLines) {
      uint4 packed[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int at = min(position + u * kLines, kPixels - 1);
        const bool valid = at == position + u * kLines && offsets[group][at] >= 0;
        packed[u] = *reinterpret_cast<const uint4*>(from + at * 128 + ((chunk ^ at % 8) << 4));
        packed[u] = valid ? packed[u] : first;  // which adds nothing
        count += valid;
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        float values[kEach];
        unpack(packed[u], values);
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
          const float d = values[k] - shift[k];
          sum[k] += d;
          square_sum[k] = fmaf(d, d, square_sum[k]);
        }
      }
    }
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(&staged.read[group]);
  }

#pragma unroll
  for (int lanes = kChunks; lanes < 32; lanes *= 2) {
    count += __shfl_xor_sync(~0u, count, lanes);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      sum[k] += __shfl_xor_sync(~0u, sum[k], lanes);
      square_sum[k] += __shfl_xor_sync(~0u, square_sum[k], lanes);
    }
  }
  // [warp][filter] sums, [filter] shifts, [warp] counts
  float* const shifts = reinterpret_cast<float*>(scratch + kMomentWarps * kFilters);
  int* const counts = reinterpret_cast<int*>(shifts + kFilters);
  if (thread % 32 < kChunks) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int filter = chunk * kEach + k;
      scratch[thread / 32 * kFilters + filter] = float2{sum[k], square_sum[k]};
      if (thread < kChunks) shifts[filter] = shift[k];
    }
    if (thread % 32 == 0) counts[thread / 32] = count;
  }
  named_barrier(5, kThreads);  // the consumers have those up to 4
  if (thread >= kFilters || k0 + thread >= a.k) return;
  float2 total{};
  count = 0;
#pragma unroll
  for (int warp = 0; warp < kMomentWarps; ++warp) {
    const float2 of = scratch[warp * kFilters + thread];
    total.x += of.x, total.y += of.y, count += counts[warp];
  }
  moments[int64_t{k0 + thread} * gridDim.x + blockIdx.x] =
      moments_of(shifts[thread], total.x, total.y, count);
}

// fp32: along a consumer's accumulators, of which a thread has two filters, of two positions in
// eight.
template <int kPixels>
class RowMoments {
 public:
  __device__ __forceinline__ void add(const float (&acc)[kPixels / 2],
                                      const int (&offsets)[kPixels], bool is_first) {
    const int lane = threadIdx.x % 32;
    if (is_first) {  // position 0 is an output
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows_[half].shift = __shfl_sync(~0u, acc[2 * half], lane & ~3);
      }
    }
#pragma unroll
    for (int i = 0; i < kPixels / 2; i += 4) {
      const int2 o = *reinterpret_cast<const int2*>(&offsets[i * 2 + lane % 4 * 2]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((e == 0 ? o.x : o.y) < 0) continue;
        ++count_;
        rows_[0].add(acc[i + e]);
        rows_[1].add(acc[i + 2 + e]);
      }
    }
  }

  // Calls f(filter, moments) in one thread for each of the group's filters.
  template <typename F>
  __device__ __forceinline__ void merge(const F& f) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Moments merged = merge_quad(rows_[half], count_);
      if (lane % 4 == 0) f(warp * 16 + lane / 4 + half * 8, merged);
    }
  }

 private:
  Accumulator rows_[2];
  int count_ = 0;
};

}  // namespace braze::cuda::halo
