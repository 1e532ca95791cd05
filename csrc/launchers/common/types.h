// Plain types that cross the launcher boundary. No torch and no CUDA header here: the same launcher
// declarations serve the CPU and the CUDA implementation of an op.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

// Every launcher is declared once, in namespace braze::BRAZE_DEVICE, and defined twice: in
// csrc/cpu/<op>.cpp (BRAZE_DEVICE=cpu) and in csrc/cuda/<op>/ (BRAZE_DEVICE=cuda).
#ifndef BRAZE_DEVICE
#error "compile with -DBRAZE_DEVICE=cpu or -DBRAZE_DEVICE=cuda"
#endif

namespace braze {

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16 };

inline int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// cudaStream_t on CUDA; unused on the CPU.
using Stream = void*;

// Carries a C++ type as a value, so that a dtype can be dispatched with a generic lambda:
//   dispatch(dtype, [&](auto tag) { using T = typename decltype(tag)::type; ... });
template <typename T>
struct TypeTag {
  using type = T;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace braze
