// Elements of vectors of parameters, whose dtype only the launch knows.
#pragma once

#include "numeric.cuh"
#include "launchers/common/types.h"

namespace braze::cuda {

// An element, or a constant where there is no vector. It is converted when it is used, so that
// several loads are in flight together: a conversion next to its load would wait for it.
class LoadedValue {
 public:
  __device__ __forceinline__ LoadedValue(const void* values, DType dtype, int64_t i, double absent)
      : dtype_(values ? dtype : DType::kFloat64), double_(absent) {
    const int size = dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
    // Predicated, and to a register each: merging behind branches would wait for the load as well.
    asm volatile(
        "{.reg .pred p2, p4, p8;\n"
        "setp.eq.s32 p2, %4, 2;\n"
        "setp.eq.s32 p4, %4, 4;\n"
        "setp.eq.s32 p8, %4, 8;\n"
        "@p2 ld.global.u16 %0, [%3];\n"
        "@p4 ld.global.f32 %1, [%3];\n"
        "@p8 ld.global.f64 %2, [%3];}"
        : "+h"(half_), "+f"(single_), "+d"(double_)
        : "l"(static_cast<const char*>(values) + i * size), "r"(values ? size : 0));
  }

  __device__ __forceinline__ operator double() const {
    switch (dtype_) {
      case DType::kFloat64: return double_;
      case DType::kFloat32: return single_;
      case DType::kBFloat16: return __bfloat162float(__ushort_as_bfloat16(half_));
      case DType::kFloat16: return __half2float(__ushort_as_half(half_));
    }
    return 0;
  }

  __device__ __forceinline__ float single() const {
    switch (dtype_) {
      case DType::kFloat64: return static_cast<float>(double_);
      case DType::kFloat32: return single_;
      case DType::kBFloat16: return __bfloat162float(__ushort_as_bfloat16(half_));
      case DType::kFloat16: return __half2float(__ushort_as_half(half_));
    }
    return 0;
  }

 private:
  DType dtype_;
  unsigned short half_ = 0;
  float single_ = 0;
  double double_;
};

// Nothing where there is no vector.
__device__ __forceinline__ void store_value(void* values, DType dtype, int64_t i, double value) {
  if (!values) return;
  switch (dtype) {
    case DType::kFloat64: static_cast<double*>(values)[i] = value; break;
    case DType::kFloat32: static_cast<float*>(values)[i] = static_cast<float>(value); break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(values)[i] = convert<__nv_bfloat16>(value);
      break;
    case DType::kFloat16: static_cast<__half*>(values)[i] = convert<__half>(value); break;
  }
}

}  // namespace braze::cuda
