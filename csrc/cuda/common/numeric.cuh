// Element types on the device: accumulation type, conversions, 16-byte vectors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace braze::cuda {

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

template <typename To, typename From>
__host__ __device__ __forceinline__ To convert(From v) {
  return static_cast<To>(v);
}
template <>
__host__ __device__ __forceinline__ float convert<float, __nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <>
__host__ __device__ __forceinline__ float convert<float, __half>(__half v) {
  return __half2float(v);
}
template <>
__host__ __device__ __forceinline__ double convert<double, __nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <>
__host__ __device__ __forceinline__ double convert<double, __half>(__half v) {
  return __half2float(v);
}
// double -> 16 bit rounds once, through the dedicated conversions.
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 convert<__nv_bfloat16, float>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__host__ __device__ __forceinline__ __half convert<__half, float>(float v) {
  return __float2half_rn(v);
}
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 convert<__nv_bfloat16, double>(double v) {
  return __double2bfloat16(v);
}
template <>
__host__ __device__ __forceinline__ __half convert<__half, double>(double v) {
  return __double2half(v);
}

// N elements loaded or stored by one instruction, or by several of 16 bytes, the widest access of a
// thread and all the alignment that is_vec_aligned() promises.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T v[N];
};

template <typename T>
constexpr int kVecWidth = 16 / sizeof(T);

template <typename T>
inline bool is_vec_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Integers of kBytes, up to 16, as one access.
template <int kBytes>
struct RawAccess;
template <>
struct RawAccess<1> {
  using type = uint8_t;
};
template <>
struct RawAccess<2> {
  using type = uint16_t;
};
template <>
struct RawAccess<4> {
  using type = uint32_t;
};
template <>
struct RawAccess<8> {
  using type = uint2;
};
template <>
struct RawAccess<16> {
  using type = uint4;
};

// The N elements at p, which is aligned to a Vec of them. As integers: a copy of a Vec goes element
// by element, which the compiler does not always merge for 16-bit types.
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_vec(const T* p) {
  using V = Vec<T, N>;
  using Raw = typename RawAccess<alignof(V)>::type;
  constexpr int kCount = sizeof(V) / sizeof(Raw);
  Raw raw[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) raw[i] = reinterpret_cast<const Raw*>(p)[i];
  return *reinterpret_cast<const V*>(raw);
}

// A vector as it was loaded. Until it is used it stays so: as elements, 16-bit ones would take a
// register each.
template <typename T, int N>
struct Packed {
  using Raw = typename RawAccess<alignof(Vec<T, N>)>::type;
  static constexpr int kCount = sizeof(Vec<T, N>) / sizeof(Raw);
  Raw raw[kCount];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = reinterpret_cast<const Raw*>(p)[i];
  }
  __device__ __forceinline__ Vec<T, N> unpacked() const {
    return *reinterpret_cast<const Vec<T, N>*>(raw);
  }
};

// N elements of a Packed as accumulation values.
template <typename T, int N>
__device__ __forceinline__ void unpack(const Packed<T, N>& packed, acc_t<T> (&out)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    // The upper half of a word is a float as it stands: one instruction, where converting takes
    // two.
    const auto* const words = reinterpret_cast<const uint32_t*>(packed.raw);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      out[k] = __uint_as_float(words[k / 2] << 16);
      out[k + 1] = __uint_as_float(words[k / 2] & 0xffff0000u);
    }
  } else {
    const Vec<T, N> v = packed.unpacked();
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = convert<acc_t<T>>(v.v[k]);
  }
}

__device__ __forceinline__ void store_raw(uint4* p, const uint4& v) {
  // Assembler, because a store of values that were put together is taken apart again.
  asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_raw(uint2* p, const uint2& v) {
  asm volatile("st.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
template <typename Raw>
__device__ __forceinline__ void store_raw(Raw* p, const Raw& v) {
  *p = v;
}

template <int N, typename T>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& v) {
  using V = Vec<T, N>;
  using Raw = typename RawAccess<alignof(V)>::type;
  constexpr int kCount = sizeof(V) / sizeof(Raw);
  Raw raw[kCount];
  *reinterpret_cast<V*>(raw) = v;
#pragma unroll
  for (int i = 0; i < kCount; ++i) store_raw(reinterpret_cast<Raw*>(p) + i, raw[i]);
}

// The values as elements of T, by stores of whole vectors: a Vec that is assigned may be taken
// apart into stores of 16 bits.
template <typename T, typename A, int N>
__device__ __forceinline__ void store_as(T* to, const A (&v)[N]) {
  Vec<T, N> elements;
#pragma unroll
  for (int k = 0; k < N; ++k) elements.v[k] = convert<T>(v[k]);
  store_vec(to, elements);
}

}  // namespace braze::cuda
