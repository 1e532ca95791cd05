// Batch norm's moments of what a block of fprop stores: running sums of each warp in shared memory,
// put together at the end.
#pragma once

#include "args.cuh"

namespace braze::cuda::narrow {

template <int kFilters>
class BlockMoments {
  // Of each warp and filter. Deviations are from the warp's first result, so that squares do not
  // cancel.
  struct Sums {
    float shift, sum, square_sum;
  };
  Sums* sums_;   // [kWarps][kFilters]
  int* counts_;  // [kWarps]
  int count_ = 0;
  bool is_first_ = true;

 public:
  static constexpr int kWords = kWarps * (3 * kFilters + 1);

  __device__ __forceinline__ explicit BlockMoments(float* memory)
      : sums_(reinterpret_cast<Sums*>(memory)),
        counts_(reinterpret_cast<int*>(memory + kWarps * 3 * kFilters)) {}

  // A tile's results, all 32 lanes of each warp together: value(i, j) of a lane's filters i and
  // pixels j, those in `inside`. filter(i): which of the block's it is. Lanes that differ in bits
  // kFrom to kTo / 2 only have the same filters; those that do not, the same pixels.
  template <int kOwn, int kPixels, int kFrom, int kTo, typename Filter, typename Value>
  __device__ __forceinline__ void add(uint32_t inside, const Filter& filter, const Value& value) {
    constexpr int kOthers = kTo - kFrom;  // a lane's number among those of the same filters
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, lead = lane & ~kOthers;
    __syncwarp();  // the sums of the last tile are there
    const bool has_shift = __shfl_sync(~0u, inside, lead) & 1;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      Sums& all = sums_[warp * kFilters + filter(i)];
      const float first = __shfl_sync(~0u, value(i, 0), lead);
      const float shift = !is_first_ ? all.shift : has_shift ? first : 0;
      float sum = 0, square_sum = 0;
#pragma unroll
      for (int j = 0; j < kPixels; ++j) {
        const float d = inside >> j & 1 ? value(i, j) - shift : 0;
        sum += d;
        square_sum += d * d;
      }
#pragma unroll
      for (int lanes = kFrom; lanes < kTo; lanes *= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
        square_sum += __shfl_xor_sync(~0u, square_sum, lanes);
      }
      __syncwarp();  // all have read the shift
      if (lane == lead) {
        if (is_first_) {
          all = {shift, sum, square_sum};
        } else {
          all.sum += sum, all.square_sum += square_sum;
        }
      }
    }
    int count = __popc(inside);
#pragma unroll
    for (int lanes = kFrom; lanes < kTo; lanes *= 2) count += __shfl_xor_sync(~0u, count, lanes);
    count_ += count;
    is_first_ = false;
  }

  // Those of all warps. The whole block calls it; `filters`: that there are.
  __device__ __forceinline__ void store(Moments* sets, int filters) {
    if (threadIdx.x % 32 == 0) counts_[threadIdx.x / 32] = count_;
    __syncthreads();
    for (int i = threadIdx.x; i < min(filters, kFilters); i += kThreads) {
      Moments all{0, 0, 0};
      for (int warp = 0; warp < kWarps; ++warp) {
        const float count = counts_[warp];
        if (count == 0) continue;
        const Sums s = sums_[warp * kFilters + i];
        const float mean = s.sum / count, m2 = s.square_sum - mean * s.sum;
        const float change = s.shift + mean - all.mean, total = all.count + count;
        all.mean += change * (count / total);
        all.m2 += (m2 < 0 ? 0 : m2) + change * change * (all.count * (count / total));
        all.count = total;
      }
      sets[int64_t{i} * gridDim.x + blockIdx.x] = all;
    }
  }
};

}  // namespace braze::cuda::narrow
