// exp for loops that the compiler vectorises: no call, no branch.
#pragma once

#include <cmath>

#include "cpu/common/numeric.h"

namespace braze::cpu {

// 2^n and exp(r) with exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; exp(r) by its
// Taylor polynomial of degree 7, whose remainder is 2^-27. n is `shifted` less kRound.
struct ExpParts {
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

  explicit ExpParts(float x) : shifted(x * 1.44269504f + kRound) {
    const float n = shifted - kRound;
    float r = x - n * 0.693145752f;  // ln 2 in two parts, the first with zeros at its end
    r = r - n * 1.42860677e-6f;
    // Estrin's scheme but for the last two steps: a shorter chain than Horner's.
    const float r2 = r * r;
    const float high = (1.0f / 5040 * r + 1.0f / 720) * (r2 * r2);
    p = (1.0f / 120 * r + 1.0f / 24) * r2 + (1.0f / 6 * r + 0.5f) + high;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
  }
  int32_t exponent() const { return static_cast<int32_t>(bits_of(shifted) - bits_of(kRound)); }
  static float power_of_two(int32_t n) { return float_of(static_cast<uint32_t>(n + 127) << 23); }

  float shifted, p;
};

// Within 1 ulp over the whole range, subnormal results included; inf and NaN as std::exp.
inline float vector_exp(float x) {
  constexpr float kLowest = -104.0f, kHighest = 89.0f;  // rounds to 0, overflows
  x = x < kLowest ? kLowest : x;
  x = x > kHighest ? kHighest : x;
  const ExpParts parts(x);
  // 2^n in two factors, so that neither overflows nor is subnormal.
  const int32_t exponent = parts.exponent(), half = exponent >> 1;
  return parts.p * ExpParts::power_of_two(half) * ExpParts::power_of_two(exponent - half);
}
// Of -87 <= x <= 88, where nothing overflows or is subnormal, and NaN.
inline float vector_exp_within(float x) {
  const ExpParts parts(x);
  return parts.p * ExpParts::power_of_two(parts.exponent());
}

inline double vector_exp(double x) { return std::exp(x); }

}  // namespace braze::cpu
