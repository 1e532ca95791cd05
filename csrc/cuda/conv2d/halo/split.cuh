// fp32 values as sums of bf16 parts, for products on tensor cores at fp32's accuracy (three parts)
// or better than TF32's (two). bf16 has fp32's range of exponents, so nothing has to be scaled.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

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

// The same for N values, an even number; the 16-bit parts of two are one word. Returns whether any
// value is infinite or NaN: then the parts are worthless, and split() has to make them. (Not here:
// code that hardly ever runs would lie between code that runs once a block, and fetching
// instructions takes a third of a small convolution's time.)
template <int kParts, int N>
__device__ __forceinline__ bool split_values(const float (&values)[N],
                                             uint32_t (&parts)[kParts][N / 2]) {
  float check = 0;  // stays finite as long as the values are
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float v0 = values[2 * i], v1 = values[2 * i + 1];
    const uint32_t bits0 = __float_as_uint(v0), bits1 = __float_as_uint(v1);
    parts[0][i] = __byte_perm(bits0, bits1, 0x7632);
    float rest0 = v0 - __uint_as_float(bits0 & 0xffff0000u);
    float rest1 = v1 - __uint_as_float(bits1 & 0xffff0000u);
    check += rest0 + rest1;
#pragma unroll
    for (int p = 1; p < kParts; ++p) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(rest0, rest1);
      parts[p][i] = *reinterpret_cast<const uint32_t*>(&pair);
      rest0 -= __uint_as_float(parts[p][i] << 16);
      rest1 -= __uint_as_float(parts[p][i] & 0xffff0000u);
    }
  }
  return check != check;
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
  const auto source = [&](int row, int chunk, int half) {
    return reinterpret_cast<const float4*>(raw + chunk / 4 * raw_plane_bytes + row * 128 +
                                           (((2 * (chunk % 4) + half) ^ (row & 7)) << 4));
  };
  const auto target = [&](int row, int chunk) {
    const uint32_t to = row * kRowBytes + chunk * 16;
    return planes + (to ^ (to >> 7 & (kChunks - 1)) << 4);
  };
#pragma unroll 1
  for (int i = thread; i < rows * kChunks; i += threads) {
    const int row = i / kChunks, chunk = i % kChunks;
    float values[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float4*>(values + 4 * half) = *source(row, chunk, half);
    }
    uint32_t parts[kParts][4];
    special |= split_values(values, parts);
    unsigned char* const to = target(row, chunk);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      *reinterpret_cast<uint4*>(to + p * plane_bytes) =
          uint4{parts[p][0], parts[p][1], parts[p][2], parts[p][3]};
    }
  }
  if (!special) return false;
#pragma unroll 1
  for (int i = 8 * thread; i < 8 * rows * kChunks; i += i % 8 == 7 ? 8 * threads - 7 : 1) {
    const int row = i / 8 / kChunks, chunk = i / 8 % kChunks;
    __nv_bfloat16 parts[kParts];
    split(reinterpret_cast<const float*>(source(row, chunk, i % 8 / 4))[i % 4], parts);
    auto* const to = reinterpret_cast<__nv_bfloat16*>(target(row, chunk)) + i % 8;
#pragma unroll
    for (int p = 0; p < kParts; ++p) to[p * plane_bytes / 2] = parts[p];
  }
  return true;
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
// kParts, small products first. Conditions, no loops: where the compiler works a loop out at run
// time, the tensor cores wait for it.
template <int kParts>
struct PartPairs {
  static_assert(kParts == 2 || kParts == 3);
  static constexpr int kCount = kParts * (kParts + 1) / 2;
  // The part of the first operand in product i, and of the second.
  static constexpr int first(int i) { return i < kParts ? i : i < 2 * kParts - 1 ? i - kParts : 0; }
  static constexpr int second(int i) {
    const int level = i < kParts ? kParts - 1 : i < 2 * kParts - 1 ? kParts - 2 : 0;
    return level - first(i);
  }
};

}  // namespace braze::cuda::halo
