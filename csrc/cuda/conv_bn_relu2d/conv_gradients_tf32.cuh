// The tiles of conv_gradients_tf32.cu's kernel: the copies that bring their parts, how these become
// operands, and what they are scaled by.
#pragma once

#include "conv_gradients_products.cuh"

namespace braze::cuda::halo::pooled {
namespace {

constexpr int kStages = 2;     // a tile that is made, one that is multiplied
constexpr int kMostSlots = 8;  // of parts as they are copied
constexpr int kVector = 4, kVectors = kFilters / kVector;  // filters that a thread takes at once
// Threads that make operands, the first of the makers; the last of their warps copies.
constexpr int kMakerThreads = kMakers * 128 - 32, kMakerBarrier = 1;
static_assert(kMakerThreads % kVectors == 0);

// Tiles are copied in parts: two rows of z and of x, and the row of windows that covers z's.
struct PlanTF32 : Plan {
  int x_part, dy_part, codes_part, part_bytes;  // of a slot: z, x, the pooled gradient, the codes
  int slots;
  int rounds;  // of makers, for a row
};

// Of each stage: its tile is made, and has been read by all products. Of each slot: its part has
// been copied, and is operands. The last slot is that of tiles that are made once more.
struct Barriers {
  uint64_t made[kStages], empty[kStages], full[kMostSlots + 1], free[kMostSlots];
};

// What is read, dense.
struct Sources {
  const float *z, *x, *dy;
  const uint32_t* codes;
};

// A part of a tile: two rows of its image, the second perhaps none, and its windows.
struct Part {
  int image, window_row, rows;
  bool pooled;  // has a gradient
};
__device__ __forceinline__ Part part_at(const Plan& p, const Tile& t, int number) {
  const int window_row = t.window_row + number;
  return {t.image, window_row, min(2, p.h - 2 * window_row), number < t.pooled_rows};
}

// One thread has a part copied to a slot that is free.
__device__ __forceinline__ void copy_part(uint64_t* full, unsigned char* slot, const Part& part,
                                          const Sources& from, const PlanTF32& p) {
  const int64_t pixel = (int64_t{part.image} * p.h + 2 * part.window_row) * p.w;
  const int64_t window = (int64_t{part.image} * (p.h / 2) + part.window_row) * (p.w / 2);
  const int pixels = part.rows * p.w, windows = part.pooled ? p.w / 2 : 0;
  const uint32_t z_bytes = pixels * kFilters * 4, x_bytes = pixels * p.channels * 4;
  const uint32_t dy_bytes = windows * kFilters * 4, code_bytes = windows * kFilters / 2;
  mbarrier_expect(full, z_bytes + x_bytes + dy_bytes + code_bytes);
  const uint32_t to = shared_address(slot);
  tma_load_bytes(full, to, from.z + pixel * kFilters, z_bytes);
  tma_load_bytes(full, to + p.x_part, from.x + pixel * p.channels, x_bytes);
  if (windows == 0) return;
  tma_load_bytes(full, to + p.dy_part, from.dy + window * kFilters, dy_bytes);
  tma_load_bytes(full, to + p.codes_part, from.codes + window * (kFilters / 8), code_bytes);
}

// Operands are fp16, which has TF32's ten bits of mantissa at twice its rate, times powers of two,
// one for a tile's dz, one for its x, one for all weights: exact, and undone in the sums. fp16's
// normal numbers span 30 binary orders. The largest value of a tile is scaled to 2^kTopExponent or
// a little more, and may then be anything from 2^kLeastTop on, for the next tiles' sake: what is
// 2^-18 of it still has all its bits.
constexpr int kTopExponent = 9, kLeastTop = 4, kMostTop = 15;
// As much smaller than those of another tile of its block may be what is scaled to the same.
constexpr int kExponentRange = 30;

// The binary exponent of a value that is not negative; -127 of zero and what is no normal number.
__device__ __forceinline__ int exponent_of(float v) {
  return static_cast<int>(__float_as_uint(v) >> 23) - 127;
}
__device__ __forceinline__ float power_of_two(int exponent) {  // -126 to 127
  return __uint_as_float((exponent + 127) << 23);
}
__device__ __forceinline__ int in_range(int exponent) { return max(min(exponent, 126), -126); }
// v * 2^exponent, of up to twice what float has.
__device__ __forceinline__ float scale_by(float v, int exponent) {
  const int half = in_range(exponent / 2);
  return v * power_of_two(half) * power_of_two(in_range(exponent - half));
}

// The exponent of the power of two that dz or x is multiplied by, and the least that the block has
// used: the larger, the finer.
struct Scale {
  int exponent, least = 126;

  // most: the largest finite value of a tile.
  __device__ __forceinline__ void choose(float most) {
    exponent = min(min(kTopExponent - exponent_of(most), 126), least + kExponentRange);
    least = min(least, exponent);
  }
  // Whether it suits a tile with that largest value. Where all is zero, any does.
  __device__ __forceinline__ bool suits(float most) const {
    const int top = exponent_of(most) + exponent;
    return most == 0 ||
           (top < kMostTop && (top >= kLeastTop || exponent >= min(126, least + kExponentRange)));
  }
};
struct Scales {
  Scale dz, x;

  __device__ __forceinline__ void choose(float2 most) {
    dz.choose(most.x);
    x.choose(most.y);
  }
  // Whether they suit a tile with those largest values; else those that do are chosen.
  __device__ __forceinline__ bool suit(float2 most) {
    const bool dz_suits = dz.suits(most.x), x_suits = x.suits(most.y);
    if (!dz_suits) dz.choose(most.x);
    if (!x_suits) x.choose(most.y);
    return dz_suits && x_suits;
  }
};

// The largest of finite magnitudes, as integers in their order, which infinities and NaN are below.
constexpr int kZeroMost = 0x00800000;
__device__ __forceinline__ int more(int most, float v) {
  return __viaddmax_s32(__float_as_int(v) & 0x7fffffff, kZeroMost, most);
}
__device__ __forceinline__ int more(int most, const float4& v) {
  return more(more(more(more(most, v.x), v.y), v.z), v.w);
}
__device__ __forceinline__ float magnitude(int most) { return __int_as_float(most - kZeroMost); }

// Four values as fp16.
__device__ __forceinline__ uint2 pack_scaled(const float4& v, float factor) {
  return {pack_pair<__half>(v.x * factor, v.y * factor),
          pack_pair<__half>(v.z * factor, v.w * factor)};
}

// The largest magnitudes of operands as they are written: of pairs of fp16 values, NaN aside.
struct Tops {
  __half2 dz{}, x{};
};
__device__ __forceinline__ void raise(__half2& top, const uint2& v) {
  const auto magnitudes = [](uint32_t pair) {
    return __habs2(*reinterpret_cast<const __half2*>(&pair));
  };
  top = __hmax2(top, __hmax2(magnitudes(v.x), magnitudes(v.y)));
}

// What dz is made with, of a thread's vector of filters.
struct Coefficients {
  float by_grad[kVector], by_input[kVector], offset[kVector];

  // Without a center of their own: what cancels then is less than the TF32 products lost that z
  // comes from.
  __device__ explicit Coefficients(const BackwardCoefficients<float>* of) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      by_grad[k] = of[k].by_grad, by_input[k] = of[k].by_input;
      offset[k] = of[k].offset - of[k].center * of[k].by_input;
    }
  }
};

// What a thread makes of a part: of dz, of one of its two rows, a vector of filters of a window's
// two pixels; of x a vector of channels of a pixel. Offsets of bytes, within the part's slot and
// within a stage from the part's first row on.
struct Place {
  static constexpr int kLanes = kChannels / 4;  // that a pixel of x has at most
  static constexpr int kWindows = kMakerThreads / kVectors / 2;
  static constexpr int kColumns = kMakerThreads / kLanes / 2;
  int z, dy, codes, x, to_dz[2], to_x;
  int row, x_row;
  bool makes_dz, second, makes_x;  // whether there are a window, its second pixel, and a pixel

  // Of a row's windows and pixels of x the n-th kWindows and kColumns.
  __device__ __forceinline__ Place(const PlanTF32& p, int thread, int n) {
    const int vector = thread % kVectors, lane = thread % kLanes, vectors = p.channels / 4;
    const int pitch = p.pitch.divisor();
    const int window = thread / kVectors / 2 + n * kWindows;
    const int column = thread / kLanes / 2 + n * kColumns;
    row = thread / kVectors % 2, x_row = thread / kLanes % 2;
    makes_dz = window < p.windows.divisor(), second = 2 * window + 1 < p.w;
    makes_x = lane < vectors && column < p.w;
    z = ((row * p.w + 2 * window) * kVectors + vector) * 16;
    dy = p.dy_part + (window * kVectors + vector) * 16;
    codes = p.codes_part + (window * kVectors + vector) * 2;
    x = p.x_part + ((x_row * p.w + column) * vectors + lane) * 16;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int position = 2 * window + e + 1;
      to_dz[e] = (row * pitch + position) * kDzRowBytes + ((vector / 2 ^ position % 8) << 4) +
                 vector % 2 * 8;
    }
    const int position = column + 1;
    to_x = (x_row * pitch + position) * kXRowBytes + ((lane / 2 ^ position / 2 % 4) << 4) +
           lane % 2 * 8;
  }
};

// This thread's operands of a part, before they are scaled: with_dz(offset, values) and with_x take
// them. first, last: of the part's two rows, those that the tile has.
template <typename DzFunction, typename XFunction>
__device__ __forceinline__ void each_operand(const unsigned char* slot, int first, int last,
                                             bool pooled, const Place& at, const Coefficients& k,
                                             const DzFunction& with_dz, const XFunction& with_x) {
  const bool makes_dz = at.makes_dz && at.row >= first && at.row <= last;
  const bool makes_x = at.makes_x && at.x_row >= first && at.x_row <= last;
  // All loads first: a thread has nothing else to do while they are under way.
  float4 g{0, 0, 0, 0}, z[2] = {}, of_x{};
  uint32_t bits = kAllStopped;
  const auto vector_at = [&](int offset) {
    return *reinterpret_cast<const float4*>(slot + offset);
  };
  if (makes_dz) {
    if (pooled && at.second) {
      g = vector_at(at.dy);
      bits = *reinterpret_cast<const uint16_t*>(slot + at.codes);
    }
    z[0] = vector_at(at.z);
    if (at.second) z[1] = vector_at(at.z + kFilters * 4);
  }
  if (makes_x) {
    of_x = vector_at(at.x);
    with_x(at.to_x, of_x);
  }
  if (!makes_dz) return;
  const float through[kVector] = {g.x * k.by_grad[0], g.y * k.by_grad[1], g.z * k.by_grad[2],
                                  g.w * k.by_grad[3]};
  bits ^= 0x2222u * at.row;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float values[kVector] = {z[e].x, z[e].y, z[e].z, z[e].w};
    const uint32_t other = bits ^ 0x1111u * e;  // no bits where the maximum is here
    float made[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      made[j] = fmaf(values[j], k.by_input[j], k.offset[j]);
      if ((other & 7u << 4 * j) == 0) made[j] += through[j];
    }
    if (e == 1 && !at.second) break;
    with_dz(at.to_dz[e], float4{made[0], made[1], made[2], made[3]});
  }
}

// The same of all rounds that makers need for a row. kOnce: it is one; else `at` is not read.
template <bool kOnce, typename DzFunction, typename XFunction>
__device__ __forceinline__ void each_operand(const unsigned char* slot, int first, int last,
                                             bool pooled, const PlanTF32& p, const Place& at,
                                             const Coefficients& k, int thread,
                                             const DzFunction& with_dz, const XFunction& with_x) {
  if constexpr (kOnce) {
    each_operand(slot, first, last, pooled, at, k, with_dz, with_x);
  } else {
#pragma unroll 1
    for (int n = 0; n < p.rounds; ++n) {
      const Place place(p, thread, n);
      each_operand(slot, first, last, pooled, place, k, with_dz, with_x);
    }
  }
}

// Some of the largest values of a block's first part, for want of a tile before it.
__device__ __forceinline__ int2 sample(const unsigned char* slot, const PlanTF32& p,
                                       const Part& part, const Coefficients& k, int thread) {
  int2 most{kZeroMost, kZeroMost};
  if (part.pooled && thread < p.w / 2 * kVectors) {
    const float4 g = reinterpret_cast<const float4*>(slot + p.dy_part)[thread];
    most.x = more(most.x, float4{g.x * k.by_grad[0], g.y * k.by_grad[1], g.z * k.by_grad[2],
                                 g.w * k.by_grad[3]});
  }
  if (thread < part.rows * p.w * p.channels / 4) {
    most.y = more(most.y, reinterpret_cast<const float4*>(slot + p.x_part)[thread]);
  }
  return most;
}

// What makers share of the largest values, in turn: all zero before they are used.
constexpr int kMaxima = 3;
struct Maxima {
  int of_dz[kMaxima], of_x[kMaxima];
};

// The largest of all makers, who call it together and in turn. Not of negative numbers.
__device__ __forceinline__ int2 merge_maxima(int2 most, Maxima& shared, int& turn, int thread) {
  const int of_dz = __reduce_max_sync(~0u, most.x), of_x = __reduce_max_sync(~0u, most.y);
  if (thread % 32 == 0) {
    atomicMax(&shared.of_dz[turn], of_dz);
    atomicMax(&shared.of_x[turn], of_x);
  }
  const int now = turn;
  turn = turn + 1 < kMaxima ? turn + 1 : 0;
  // Those of the call before the last, which all had read when they came to the last one's barrier.
  if (thread == 0) shared.of_dz[turn] = shared.of_x[turn] = 0;
  named_barrier(kMakerBarrier, kMakerThreads);
  return {shared.of_dz[now], shared.of_x[now]};
}

// Whether operands with that largest magnitude, the bits of an fp16 value, are scaled well, as far
// as that can be seen.
__device__ __forceinline__ bool looks_well(int top) {
  constexpr int kLeast = (kLeastTop + 15) << 10, kInfinity = 0x7c00;
  return top >= kLeast && top < kInfinity;
}
__device__ __forceinline__ int bits_of(__half2 top) {
  return __half_as_ushort(__hmax(__low2half(top), __high2half(top)));
}

// Zeros in the rows of a stage that lie outside of the image, where other tiles have some. Called
// by all makers.
__device__ __forceinline__ void zero_rows(unsigned char* stage, const PlanTF32& p, const Tile& t,
                                          int thread) {
  if (p.row_tiles.divisor() == 1) return;  // always the same ones, zero from the beginning
  const int pitch = p.pitch.divisor(), below = p.h - t.first_row + 1;
  const auto zero = [&](int first, int rows) {
    uint4* const dz = reinterpret_cast<uint4*>(stage + first * pitch * kDzRowBytes);
    uint4* const x = reinterpret_cast<uint4*>(stage + p.x_offset + first * pitch * kXRowBytes);
#pragma unroll 1
    for (int i = thread; i < rows * pitch * kDzRowBytes / 16; i += kMakerThreads) dz[i] = {};
#pragma unroll 1
    for (int i = thread; i < rows * pitch * kXRowBytes / 16; i += kMakerThreads) x[i] = {};
  };
  if (t.first_row == 0) zero(0, 1);
  if (below < p.tile_rows + 2) zero(below, p.tile_rows + 2 - below);
}

}  // namespace
}  // namespace braze::cuda::halo::pooled
