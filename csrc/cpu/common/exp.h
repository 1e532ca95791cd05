// exp for loops that the compiler vectorises: no call, no branch.
#pragma once

#include <cmath>

#include "cpu/common/numeric.h"

namespace braze::cpu {

// Within 1 ulp over the whole range, subnormal results included; inf and NaN as std::exp.
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of
// degree 7, whose remainder is 2^-27.
inline float vector_exp(float x) {
  constexpr float kLowest = -104.0f, kHighest = 89.0f;  // rounds to 0, overflows
  x = x < kLowest ? kLowest : x;
  x = x > kHighest ? kHighest : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  float r = x - n * 0.693145752f;  // ln 2 in two parts, the first with zeros at its end
  r = r - n * 1.42860677e-6f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n in two factors, so that neither overflows nor is subnormal.
  const int32_t exponent = static_cast<int32_t>(bits_of(shifted) - bits_of(kRound));
  const int32_t half = exponent >> 1;
  const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float second = float_of(static_cast<uint32_t>(exponent - half + 127) << 23);
  return p * first * second;
}

inline double vector_exp(double x) { return std::exp(x); }

}  // namespace braze::cpu
