// Element types on the CPU: storage types for the 16-bit formats, accumulation types, dtype
// dispatch.
#pragma once

#include <cstdint>
#include <cstring>

#include "launchers/common/types.h"

namespace braze::cpu {

inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// a or b, by a mask: where the compiler makes a branch of ?:, the loop around it does not
// vectorise.
inline uint32_t pick(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// Assigned member by member: gcc does not vectorise loops that copy the struct.
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  // Round to nearest even; NaN stays a quiet NaN.
  BFloat16(float f) {
    const uint32_t u = bits_of(f);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    bits = static_cast<uint16_t>(f != f ? 0x7fc0 : rounded);
  }
  BFloat16(const BFloat16&) = default;
  BFloat16& operator=(const BFloat16& other) {
    bits = other.bits;
    return *this;
  }
  operator float() const { return float_of(uint32_t{bits} << 16); }
};

// By integer arithmetic and one fp32 rounding, all cases worked out and one picked: that
// vectorises, and gcc has no vectors of _Float16 without AVX512-FP16.
struct Half {
  uint16_t bits;
  Half() = default;
  // Round to nearest even; NaN becomes a quiet NaN.
  Half(float f) {
    const uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    const uint32_t rebased = magnitude - 0x38000000;
    const uint32_t normal = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
    // The fp32 adder rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    uint32_t result = pick(magnitude < 0x38800000, subnormal, normal);
    result = pick(magnitude >= 0x477ff000, 0x7c00, result);  // rounds to 65536 or more
    result = pick(magnitude > 0x7f800000, 0x7e00, result);
    bits = static_cast<uint16_t>(sign | result);
  }
  Half(const Half&) = default;
  Half& operator=(const Half& other) {
    bits = other.bits;
    return *this;
  }
  operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16, magnitude = bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + 0x38000000;
    const uint32_t subnormal =
        bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t finite = pick(magnitude < 0x0400, subnormal, normal);
    const uint32_t result = pick(magnitude >= 0x7c00, 0x7f800000 | magnitude << 13, finite);
    return float_of(sign | result);
  }
};

// 16-bit inputs accumulate in fp32, everything else in its own type.
template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename T>
using acc_t = typename AccOf<T>::type;

template <typename F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64: return f(TypeTag<double>{});
    case DType::kFloat32: return f(TypeTag<float>{});
    case DType::kBFloat16: return f(TypeTag<BFloat16>{});
    case DType::kFloat16: return f(TypeTag<Half>{});
  }
}

}  // namespace braze::cpu
