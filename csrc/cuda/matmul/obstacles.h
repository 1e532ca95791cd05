// What the kernels below the Hopper ones cannot take.
#pragma once

#include <climits>

#include "launchers/matmul.h"

namespace braze::cuda {

// Each says why the arguments are refused, or gives nullptr.
using Obstacle = const char* (*)(const MatmulArgs&);

inline const char* no_obstacle(const MatmulArgs&) { return nullptr; }

// Of all tiled kernels.
inline const char* too_large(const MatmulArgs& args) {
  constexpr int64_t kLimit = INT_MAX - 1024;  // room for the last tile's overhang
  return args.m > kLimit || args.n > kLimit || args.k > kLimit
             ? "it indexes rows, columns and depth with 31 bits"
             : nullptr;
}

// Of the tensor cores but for fp64.
inline const char* mma_obstacle(const MatmulArgs& args) {
  if (args.dtype == DType::kFloat64) return "it takes float32 (as TF32), bfloat16 and float16";
  if (args.dtype == DType::kFloat32 && !args.allow_tf32) {
    return "float32 inputs would be rounded to TF32, which is not allowed";
  }
  return too_large(args);
}

// Of the rungs and kernels for one dtype.
inline const char* fp32_obstacle(const MatmulArgs& args) {
  if (args.dtype != DType::kFloat32) return "it takes float32";
  return too_large(args);
}

}  // namespace braze::cuda
