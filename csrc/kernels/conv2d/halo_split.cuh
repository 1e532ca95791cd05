// fp32 values as sums of bf16 parts, for products on tensor cores at fp32's accuracy (three parts)
// or better than TF32's (two). bf16 has fp32's range of exponents, so nothing has to be scaled.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/numeric.cuh"

namespace braze::cuda::halo {

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= 3.4028235e38f; }

// v = the sum of the parts: exactly for three parts of a finite v, to 16 bits for two. The first is
// truncated, so that it does not overflow; infinities and NaN are their own first part.
template <int kParts>
__device__ __forceinline__ void split(float v, __nv_bfloat16 (&parts)[kParts]) {
  const float first = is_finite(v) ? __uint_as_float(__float_as_uint(v) & 0xffff0000u) : v;
  parts[0] = __float2bfloat16_rn(first);
  float rest = is_finite(v) ? v - first : 0.0f;
#pragma unroll
  for (int p = 1; p < kParts; ++p) {
    parts[p] = __float2bfloat16_rn(rest);
    rest -= __bfloat162float(parts[p]);
  }
}

// Rows of fp32 (128 bytes, swizzled as TMA writes them; wider rows in planes raw_plane_bytes apart)
// into planes of bf16 parts with rows of kRowBytes, swizzled for wgmma. Shared by `threads`
// threads; returns whether this one met an infinity or NaN. All bases are multiples of 1024 bytes.
template <int kParts, int kRowBytes>
__device__ __forceinline__ bool split_rows(const unsigned char* raw, int raw_plane_bytes,
                                           unsigned char* planes, int plane_bytes, int rows,
                                           int thread, int threads) {
  constexpr int kChunks = kRowBytes / 16;  // of eight values
  bool special = false;
  for (int i = thread; i < rows * kChunks; i += threads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const unsigned char* from = raw + chunk / 4 * raw_plane_bytes + row * 128;
    Vec<__nv_bfloat16, 8> parts[kParts];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int raw_chunk = (2 * (chunk % 4) + half) ^ (row & 7);
      const float4 v = *reinterpret_cast<const float4*>(from + (raw_chunk << 4));
      const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        __nv_bfloat16 p[kParts];
        split(values[k], p);
        special |= !is_finite(values[k]);
#pragma unroll
        for (int part = 0; part < kParts; ++part) parts[part].v[4 * half + k] = p[part];
      }
    }
    uint32_t to = row * kRowBytes + chunk * 16;
    to ^= (to >> 7 & (kChunks - 1)) << 4;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      *reinterpret_cast<Vec<__nv_bfloat16, 8>*>(planes + part * plane_bytes + to) = parts[part];
    }
  }
  return special;
}

// The value at a row and column of planes that split_rows (or the weights' loader) has written.
template <int kParts, int kRowBytes>
__device__ __forceinline__ float unsplit(const unsigned char* planes, int plane_bytes, int row,
                                         int column) {
  uint32_t from = row * kRowBytes + column * 2;
  from ^= (from >> 7 & (kRowBytes / 16 - 1)) << 4;
  float sum = 0;
#pragma unroll
  for (int part = kParts - 1; part >= 0; --part) {
    sum += __bfloat162float(
        *reinterpret_cast<const __nv_bfloat16*>(planes + part * plane_bytes + from));
  }
  return sum;
}

// The products of parts that reach the last bit kept: those whose numbers add up to less than
// kParts, small products first.
template <int kParts>
struct PartPairs {
  static constexpr int kCount = kParts * (kParts + 1) / 2;
  // The part of the first operand in product i, and of the second.
  static constexpr int first(int i) {
    int level = kParts - 1;
    for (; i > level; --level) i -= level + 1;
    return i;
  }
  static constexpr int second(int i) {
    int level = kParts - 1;
    for (; i > level; --level) i -= level + 1;
    return level - i;
  }
};

}  // namespace braze::cuda::halo
