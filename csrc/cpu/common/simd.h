// Vectors of the accumulation types, as wide as the instruction set being compiled has them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/common/numeric.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace braze::cpu {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

// vec_t<float>: a full vector register. vec8_t: eight elements, in as many registers as that takes;
// the unit of conversions and transpositions. index_t, index8_t: what __builtin_shuffle wants.
template <typename Acc>
struct SimdTypes;
template <>
struct SimdTypes<float> {
  typedef float Vec __attribute__((vector_size(kVecBytes)));
  typedef int32_t Index __attribute__((vector_size(kVecBytes)));
  typedef float Vec8 __attribute__((vector_size(32)));
  typedef int32_t Index8 __attribute__((vector_size(32)));
};
template <>
struct SimdTypes<double> {
  typedef double Vec __attribute__((vector_size(kVecBytes)));
  typedef int64_t Index __attribute__((vector_size(kVecBytes)));
  typedef double Vec8 __attribute__((vector_size(64)));
  typedef int64_t Index8 __attribute__((vector_size(64)));
};
template <typename Acc>
using vec_t = typename SimdTypes<Acc>::Vec;
template <typename Acc>
using index_t = typename SimdTypes<Acc>::Index;
template <typename Acc>
using vec8_t = typename SimdTypes<Acc>::Vec8;
template <typename Acc>
using index8_t = typename SimdTypes<Acc>::Index8;

template <typename Acc>
constexpr int kLanes = kVecBytes / int{sizeof(Acc)};

// Unaligned load and store of a whole vector type.
template <typename V, typename Acc>
inline V load(const Acc* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <typename V, typename Acc>
inline void store(Acc* p, const V& v) {
  std::memcpy(p, &v, sizeof(V));
}

// Eight consecutive elements in the accumulation type.
inline vec8_t<float> load8(const float* p) { return load<vec8_t<float>>(p); }
inline vec8_t<double> load8(const double* p) { return load<vec8_t<double>>(p); }
inline vec8_t<float> load8(const BFloat16* p) {
  typedef uint16_t U16 __attribute__((vector_size(16)));
  typedef uint32_t U32 __attribute__((vector_size(32)));
  const U32 wide = __builtin_convertvector(load<U16>(p), U32) << 16;
  return load<vec8_t<float>>(&wide);
}
inline vec8_t<float> load8(const Half* p) {
#ifdef __F16C__
  return reinterpret_cast<vec8_t<float>>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  vec8_t<float> v;
  for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}
template <typename Acc>
inline void store8(Acc* p, const vec8_t<Acc>& v) {
  store(p, v);
}

}  // namespace braze::cpu
