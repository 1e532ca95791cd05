// Element types on the CPU: storage types for the 16-bit formats, accumulation types, dtype
// dispatch.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/types.h"

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

#ifdef __FLT16_MANT_DIG__
struct Half {
  _Float16 value;
  Half() = default;
  Half(float f) : value(static_cast<_Float16>(f)) {}
  Half(const Half&) = default;
  Half& operator=(const Half& other) {
    value = other.value;
    return *this;
  }
  operator float() const { return static_cast<float>(value); }
};
#else
// Without compiler support: the conversion by integer arithmetic and one fp32 rounding.
struct Half {
  uint16_t bits;
  Half() = default;
  Half(float f) {
    const uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) {
      bits = static_cast<uint16_t>(sign | 0x7e00);
    } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
      bits = static_cast<uint16_t>(sign | 0x7c00);
    } else if (magnitude < 0x38800000) {  // subnormal: let the fp32 adder round
      bits = static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
    } else {
      const uint32_t rebased = magnitude - 0x38000000;
      bits = static_cast<uint16_t>(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13));
    }
  }
  Half(const Half&) = default;
  Half& operator=(const Half& other) {
    bits = other.bits;
    return *this;
  }
  operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
    if (magnitude >= 0x0400) return float_of(sign | ((magnitude << 13) + 0x38000000));
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  }
};
#endif

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
