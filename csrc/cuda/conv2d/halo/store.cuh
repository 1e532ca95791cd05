// Ways from the accumulators of halo/wgmma.cuh's kernel to its result. A warp has 16 filters, from
// warp % 4 * 16 on; acc[i] to acc[i + 3] of a thread are two positions of filter lane / 4 and of
// that 8 on.
#pragma once

#include "epilogue.cuh"
#include "tiles.cuh"
#include "weights.cuh"

namespace braze::cuda::halo {

// 16 bits: to [pixel][filter] in shared memory, from where one copy brings them on. Where there is
// one, add_moments(i, values) is called of accumulators i to i + 3, as they are stored.
template <typename T, int kPixels, typename AddMoments = std::nullptr_t>
__device__ __forceinline__ void stage_results(const float (&acc)[kPixels / 2], unsigned char* out,
                                              bool wants_moments = false,
                                              const AddMoments& add_moments = nullptr) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Lane l addresses row l % 8 of 8x8 matrix l / 8: pixels 0..15 (+ 2 i), filters 0..15.
  const int pixel = lane / 16 * 8 + lane % 8, chunk = (warp % 4) * 2 + lane / 8 % 2;
  const uint32_t to = shared_address(out) + pixel * 128 + ((chunk ^ (pixel % 8)) << 4);
#pragma unroll
  for (int i = 0; i < kPixels / 2; i += 8) {
    uint32_t v[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) v[m] = pack_pair<T>(acc[i + 2 * m], acc[i + 2 * m + 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     to + i * 2 * 128),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
    if constexpr (!std::is_same_v<AddMoments, std::nullptr_t>) {
      if (!wants_moments) continue;
#pragma unroll
      for (int m = 0; m < 4; m += 2) {
        const float2 low = unpack_pair<T>(v[m]), high = unpack_pair<T>(v[m + 1]);
        add_moments(i + 2 * m, {low.x, low.y, high.x, high.y});
      }
    }
  }
}

// Moments of what stage_results() has left in shared memory, as it is stored. A thread of a group has
// 8 filters of every 16th position: so the question whether a position is an output stands once for
// 8 values, and the code is a short loop. (Along the accumulators' registers it took two fifths of
// an epilogue's time to bring the instructions alone.)
template <typename T, int kPixels>
class StagedMoments {
 public:
  // After a barrier behind stage_results(). offsets: of the positions, -1 where there is no output;
  // the first of them is one in a group's first tile. shifts: of the group, what deviations are
  // counted from, which the first tile says.
  __device__ __forceinline__ void add(const unsigned char* out, const int (&offsets)[kPixels],
                                      bool is_first, float (&shifts)[kFilters]) {
    const int chunk = threadIdx.x % kChunks, first = threadIdx.x % 128 / kChunks;
    const unsigned char* const from = out + ((chunk ^ first % 8) << 4);
    auto* const own = reinterpret_cast<float(*)[kFiltersEach]>(shifts) + chunk;
    float shift[kFiltersEach];
    if (is_first) {
      unpack(out + (chunk << 4), shift);
    } else {
#pragma unroll
      for (int k = 0; k < kFiltersEach; ++k) shift[k] = (*own)[k];
    }
#pragma unroll 2
    for (int position = first; position < kPixels; position += 128 / kChunks) {
      if (offsets[position] < 0) continue;
      float values[kFiltersEach];
      unpack(from + position * 128, values);
      ++count_;
#pragma unroll
      for (int k = 0; k < kFiltersEach; ++k) {
        const float d = values[k] - shift[k];
        sum_[k] += d;
        square_sum_[k] = fmaf(d, d, square_sum_[k]);
      }
    }
    if (is_first && first == 0) {
#pragma unroll
      for (int k = 0; k < kFiltersEach; ++k) (*own)[k] = shift[k];
    }
  }

  // Calls f(filter, moments) in threads that have all of a group's, for each of the filters.
  // scratch: of the group, behind a barrier that follows the last add(); sync(): a barrier.
  template <typename Sync, typename F>
  __device__ __forceinline__ void merge(unsigned char* scratch, const float (&shifts)[kFilters],
                                        const Sync& sync, const F& f) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int lanes = kChunks; lanes < 32; lanes *= 2) {
      count_ += __shfl_xor_sync(~0u, count_, lanes);
#pragma unroll
      for (int k = 0; k < kFiltersEach; ++k) {
        sum_[k] += __shfl_xor_sync(~0u, sum_[k], lanes);
        square_sum_[k] += __shfl_xor_sync(~0u, square_sum_[k], lanes);
      }
    }
    float2* const sums = reinterpret_cast<float2*>(scratch);  // [warp][filter]
    int* const counts = reinterpret_cast<int*>(sums + 4 * kFilters);
    if (lane < kChunks) {
#pragma unroll
      for (int k = 0; k < kFiltersEach; ++k) {
        const int filter = lane * kFiltersEach + k;
        sums[warp * kFilters + filter] = float2{sum_[k], square_sum_[k]};
      }
      if (lane == 0) counts[warp] = count_;
    }
    sync();
    if (thread >= kFilters) return;
    float sum = 0, square_sum = 0;
    int count = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 of = sums[w * kFilters + thread];
      sum += of.x, square_sum += of.y, count += counts[w];
    }
    f(thread, moments_of(shifts[thread], sum, square_sum, count));
  }

 private:
  static constexpr int kFiltersEach = 8, kChunks = kFilters / kFiltersEach;

  __device__ __forceinline__ static void unpack(const unsigned char* from,
                                                float (&values)[kFiltersEach]) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int k = 0; k < kFiltersEach; k += 2) {
      const float2 pair = unpack_pair<T>(reinterpret_cast<const uint32_t*>(&chunk)[k / 2]);
      values[k] = pair.x, values[k + 1] = pair.y;
    }
  }

  float sum_[kFiltersEach] = {}, square_sum_[kFiltersEach] = {};
  int count_ = 0;
};

// The same of accumulators: a thread has two filters, of two positions in eight.
template <int kPixels>
class RowMoments {
 public:
  __device__ __forceinline__ void add(const float (&acc)[kPixels / 2],
                                      const int (&offsets)[kPixels], bool is_first,
                                      float (&)[kFilters]) {
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

  template <typename Sync, typename F>
  __device__ __forceinline__ void merge(unsigned char*, const float (&)[kFilters], const Sync&,
                                        const F& f) {
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

// fp32, 16 bytes at a time: through shared memory of the warp, 32 positions at a time, as
// [position][16 filters]. `to`: the result of the tile's first position; k0: the block's first of
// all filters.
template <int kPixels, typename T>
__device__ __forceinline__ void store_wide(const float (&acc)[kPixels / 2], int filters,
                                           const int (&offsets)[kPixels], int k0,
                                           unsigned char* out, T* to) {
  constexpr int kAcc = kPixels / 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* own = reinterpret_cast<float*>(out) + warp % 4 * (kTurnBytes / 4);
  const int filter = k0 + warp % 4 * 16 + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < kAcc; i += 16) {
    __syncwarp();
#pragma unroll
    for (int v = 0; v < std::min(16, kAcc - i); ++v) {
      own[(v / 4 * 8 + lane % 4 * 2 + v % 2) * kTurnPitch + lane / 4 + v / 2 % 2 * 8] = acc[i + v];
    }
    __syncwarp();
#pragma unroll
    for (int v = 0; v < std::min(4, (kAcc - i) / 4); ++v) {
      const int position = v * 8 + lane / 4, offset = offsets[i * 2 + position];
      if (offset >= 0 && filter < filters) {
        *reinterpret_cast<float4*>(to + offset + filter) =
            *reinterpret_cast<const float4*>(own + position * kTurnPitch + lane % 4 * 4);
      }
    }
  }
}

// fp32, one by one, with any strides. filter: of acc[0].
template <int kPixels, typename T>
__device__ __forceinline__ void store_single(const float (&acc)[kPixels / 2], const Args& a,
                                             const int (&offsets)[kPixels], int filter, T* to) {
  const int lane = threadIdx.x % 32;
  to += filter * a.y_k;
#pragma unroll
  for (int i = 0; i < kPixels / 2; i += 4) {
    const int2 o = *reinterpret_cast<const int2*>(&offsets[i * 2 + lane % 4 * 2]);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int offset = v % 2 ? o.y : o.x, k = v / 2 * 8;
      if (offset >= 0 && filter + k < a.k) to[offset + k * a.y_k] = acc[i + v];
    }
  }
}

}  // namespace braze::cuda::halo
