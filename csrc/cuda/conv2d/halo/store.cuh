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
