// erf, tanh and expm1 for loops that the compiler vectorises, as exp.h has exp: no call, no branch.
// Within 2.1 ulp; infinities, NaN and zeros as the standard library's. Polynomials are minimax fits
// of the relative error, by Lawson's iteration (C. Lawson, "Contributions to the theory of linear
// least maximum approximation", 1961), of 40-digit values. They are evaluated by Estrin's scheme
// (G. Estrin, "Organization of computer systems", 1960), whose chains of operations are half as
// long as Horner's: a processor overlaps no more than one or two vectors' chains.
#pragma once

#include <cmath>

#include "cpu/common/exp.h"

namespace braze::cpu {

// |x| < 1: x P(x^2). Beyond, 1 - exp(Q(|x|)), where Q is log(erfc) up to 4; there erf rounds to 1.
inline float vector_erf(float x) {
  const float s = x * x;
  const float s2 = s * s, s4 = s2 * s2;
  const float p =
      (7.853906573e-5f * s2 + (-8.010208257e-4f * s + 5.188329611e-3f)) * s4 +
      ((-2.685381286e-2f * s + 1.128358543e-1f) * s2 + (-3.761262596e-1f * s + 1.283791065e-1f));
  const float small = x + x * p;
  float t = std::fabs(x);
  t = t > 4.0f ? 4.0f : t;
  const float t2 = t * t, t4 = t2 * t2;
  const float r =
      (-2.169760228e-5f * t2 + (4.414724827e-4f * t - 4.205283709e-3f)) * t4 +
      ((2.521033771e-2f * t - 1.084220931e-1f) * t2 + (-6.332163811e-1f * t - 1.129580259f));
  const float q = r * t + 1.884672965e-4f;
  const float large = std::copysign(1.0f - vector_exp_within(q), x);
  return t < 1.0f ? small : large;
}
inline double vector_erf(double x) { return std::erf(x); }

// |x| < 0.625: x P(x^2). Beyond, 1 - 2 / (exp(2 |x|) + 1).
inline float vector_tanh(float x) {
  const float s = x * x;
  float p = -5.660033785e-3f;
  p = p * s + 2.059103735e-2f;
  p = p * s - 5.372108519e-2f;
  p = p * s + 1.333112717e-1f;
  p = p * s - 3.333325982e-1f;
  const float t = std::fabs(x), small = t + t * (s * p);
  const float large = 1.0f - 2.0f / (vector_exp(t + t) + 1.0f);
  return std::copysign(t < 0.625f ? small : large, x);
}
inline double vector_tanh(double x) { return std::tanh(x); }

// |x| < 0.5: x + x^2 P(x). Beyond, exp(x) - 1.
inline float vector_expm1(float x) {
  float p = 1.984119008e-4f;
  p = p * x + 1.399732428e-3f;
  p = p * x + 8.333634585e-3f;
  p = p * x + 4.166531935e-2f;
  p = p * x + 1.666666269e-1f;
  p = p * x + 0.5f;
  const float small = x + x * (x * p), large = vector_exp(x) - 1.0f;
  return std::copysign(std::fabs(x) < 0.5f ? small : large, x);
}
inline double vector_expm1(double x) { return std::expm1(x); }

}  // namespace braze::cpu
