// AVX512_BF16: the instruction that adds to 16 fp32 sums the products of 16 pairs of bf16 each.
// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS. It counts
// subnormal operands as zero and rounds subnormal sums to zero, as AMX does; so does the one that
// rounds to bf16.
//
// A pair is two neighbours along the reduction: a row of A as it lies in memory is a row of pairs;
// B is packed into rows of pairs (pack_pairs).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/common/copy_matrix.h"
#include "cpu/common/simd.h"

// Assemblers of that age know the instruction.
#if defined(__AVX512F__) && defined(__x86_64__) && \
    ((defined(__clang__) && __clang_major__ >= 9) || (!defined(__clang__) && __GNUC__ >= 10))
#define BRAZE_HAS_DOT_BF16 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace braze::cpu {

// Addresses of pairs are those of bf16 values.
struct __attribute__((packed, aligned(2), may_alias)) Bf16Pair {
  uint32_t bits;
};

#ifdef BRAZE_HAS_DOT_BF16

// Whether the processor has it. (The library is loaded only where the system keeps AVX-512's
// registers.)
inline bool dot_bf16_available() {
  static const bool available = [] {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
  }();
  return available;
}

// Whether it multiplies more than fp32's instructions do, as on AMD's processors. On Intel's, which
// have two units for those, it takes two cycles: of a Xeon's products in bf16 those in fp32 took
// 0.57 to 0.7 of the time.
inline bool dot_bf16_pays() {
  static const bool pays = [] {
    unsigned a, b, c, d;
    constexpr unsigned kGenu = 0x756e6547;  // "GenuineIntel" begins so
    return dot_bf16_available() && __get_cpuid(0, &a, &b, &c, &d) && b != kGenu;
  }();
  return pays;
}

// sum += a, broadcast, times b, both pairs.
inline void add_product(vec_t<float>& sum, Bf16Pair a, const vec_t<float>& b) {
  const __m512i pairs = _mm512_set1_epi32(static_cast<int>(a.bits));
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(b));
}

// rows x columns sums, rows `width` apart, plus a bias of `columns` values, rounded to bf16 at
// `to`, rows `ld` apart.
inline void store_rounded(const float* sums, int64_t width, int64_t rows, int64_t columns,
                          const float* bias, BFloat16* to, int64_t ld) {
  using V = vec_t<float>;
  constexpr int64_t kL = kLanes<float>;
  if (columns == 2 * kL) {
    const V low = load<V>(bias), high = load<V>(bias + kL);
    for (int64_t i = 0; i < rows; ++i, sums += width, to += ld) {
      const V first = load<V>(sums) + low, second = load<V>(sums + kL) + high;
      __m512i rounded;
      asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(first), "v"(second));
      std::memcpy(&to->bits, &rounded, sizeof(rounded));
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i, sums += width, to += ld) {
    for (int64_t j = 0; j < columns; j += kL) {
      const int64_t count = std::min(kL, columns - j);
      const auto mask = static_cast<__mmask16>((1u << count) - 1);
      const __m512 values =
          _mm512_maskz_loadu_ps(mask, sums + j) + _mm512_maskz_loadu_ps(mask, bias + j);
      __m256i rounded;
      asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(values));
      _mm256_mask_storeu_epi16(&to[j].bits, mask, rounded);
    }
  }
}

#else

inline bool dot_bf16_available() { return false; }
inline bool dot_bf16_pays() { return false; }
inline void store_rounded(const float*, int64_t, int64_t, int64_t, const float*, BFloat16*,
                          int64_t) {}
inline void add_product(vec_t<float>&, Bf16Pair, const vec_t<float>&) {}

#endif

// Where a tile of sums goes, plus a bias of its columns and, if not nullptr, what has been summed
// before, rounded to bf16: to rows `ld` apart, of so many columns. kFull: of all that a tile has.
template <bool kFull>
struct RoundedTile {
  BFloat16* to;
  int64_t ld, columns;
  const float* bias;
  const float* before;
  int64_t before_ld;

  template <int kRows, int kVecs>
  void store(const vec_t<float> (&tile)[kRows][kVecs]) const {
#ifdef BRAZE_HAS_DOT_BF16
    using V = vec_t<float>;
    static_assert(kVecs <= 2);
    constexpr int64_t kL = kLanes<float>;
    [[maybe_unused]] const auto mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      __builtin_prefetch(to + (i + kRows) * ld, 1, 3);  // as TileOfSums has it
      V sums[kVecs];
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) {
        sums[j] = tile[i][j];
        if (before) sums[j] += load<V>(before + i * before_ld + j * kL);
        sums[j] += load<V>(bias + j * kL);
      }
      if constexpr (kVecs == 2) {
        __m512i rounded;
        asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(sums[0]), "v"(sums[1]));
        if constexpr (kFull) {
          std::memcpy(&to[i * ld].bits, &rounded, sizeof(rounded));
        } else {
          _mm512_mask_storeu_epi16(&to[i * ld].bits, mask, rounded);
        }
      } else {
        __m256i rounded;
        asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(sums[0]));
        if constexpr (kFull) {
          std::memcpy(&to[i * ld].bits, &rounded, sizeof(rounded));
        } else {
          _mm256_mask_storeu_epi16(&to[i * ld].bits, static_cast<__mmask16>(mask), rounded);
        }
      }
    }
#endif
  }
};

// Values and, above each, another one.
inline void pair_up(uint32_t* __restrict__ to, const uint16_t* low, const uint16_t* high,
                    int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] = low[j] | static_cast<uint32_t>(high[j]) << 16;
}

// Packs `lanes` columns, `depth` deep, into rows of pairs, `width` wide: column j's values of rows
// 2 p and 2 p + 1 lie side by side at p * width + j. What is beyond the columns or the depth is
// zero. to: ceil(depth / 2) rows.
inline void pack_pairs(uint32_t* to, int64_t width, const uint16_t* from, int64_t lane_stride,
                       int64_t depth_stride, int64_t lanes, int64_t depth) {
  for (int64_t p = 0; lanes < width && p < ceil_div(depth, 2); ++p) {
    std::fill(to + p * width + lanes, to + (p + 1) * width, 0u);
  }
  if (depth_stride == 1 && lane_stride % 2 == 0) {
    // Pairs as they are: a transposition of 32-bit elements.
    copy_matrix(reinterpret_cast<float*>(to), width, reinterpret_cast<const float*>(from), 1,
                lane_stride / 2, depth / 2, lanes);
  } else {
    for (int64_t p = 0; p < depth / 2; ++p) {
      uint32_t* __restrict__ const out = to + p * width;
      const uint16_t *const low = from + 2 * p * depth_stride, *const high = low + depth_stride;
      if (lane_stride == 1) {
        pair_up(out, low, high, lanes);
      } else {
        for (int64_t j = 0; j < lanes; ++j) {
          out[j] = low[j * lane_stride] | static_cast<uint32_t>(high[j * lane_stride]) << 16;
        }
      }
    }
  }
  if (depth % 2 == 0) return;
  uint32_t* const last = to + depth / 2 * width;
  for (int64_t j = 0; j < lanes; ++j) last[j] = from[(depth - 1) * depth_stride + j * lane_stride];
}

// Copies rows of bf16 values into rows of pairs, `ld` pairs apart: ceil(depth / 2) each, zeros
// behind an odd depth.
inline void copy_pairs(uint32_t* to, int64_t ld, const uint16_t* from, int64_t row_stride,
                       int64_t depth_stride, int64_t rows, int64_t depth) {
  if (depth_stride == 1) {
    for (int64_t i = 0; i < rows; ++i, to += ld, from += row_stride) {
      if (depth % 2) to[depth / 2] = 0;
      std::memcpy(to, from, depth * sizeof(uint16_t));
    }
    return;
  }
  // Columns become rows of pairs in the first-level cache, which are then transposed.
  constexpr int64_t kPairs = 16, kRows = 64;
  uint32_t pairs[kPairs * kRows];
  for (int64_t p = 0; p < depth; p += 2 * kPairs) {
    const int64_t deep = std::min(2 * kPairs, depth - p);
    for (int64_t i = 0; i < rows; i += kRows) {
      const int64_t count = std::min(kRows, rows - i);
      pack_pairs(pairs, kRows, from + i * row_stride + p * depth_stride, row_stride, depth_stride,
                 count, deep);
      copy_matrix(reinterpret_cast<float*>(to) + i * ld + p / 2, ld,
                  reinterpret_cast<const float*>(pairs), 1, kRows, count, ceil_div(deep, 2));
    }
  }
}

}  // namespace braze::cpu
