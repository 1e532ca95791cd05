// Element types on the device: accumulation type, conversions, 16-byte vectors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, typename T>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

template <typename T>
constexpr int kVecWidth = 16 / sizeof(T);

template <typename T>
inline bool is_vec_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace braze::cuda
