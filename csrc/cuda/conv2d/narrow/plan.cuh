// What the plans and launches of both kernels have in common.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/ordered_sum.cuh"
#include "cuda/conv2d/args.h"

namespace braze::cuda::narrow {

// Whether it is fp32 at its own accuracy.
inline bool is_split(const Conv2dArgs& args) {
  return args.shape.dtype == DType::kFloat32 && !args.shape.allow_tf32;
}

inline bool is_wgrad(const Conv2dArgs& args) { return args.pass == Conv2dPass::kWgrad; }

inline int bytes_of(const Conv2dArgs& args) { return static_cast<int>(size_of(args.shape.dtype)); }

inline bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// With a stride of 1 the input's gradient is a convolution too: of the result's, with the filter
// turned by 180 degrees. Its shape, and that filter, of which each tap's strides are negative.
inline Conv2dShape turned(const Conv2dShape& s) {
  Conv2dShape to = s;
  to.c = s.k, to.h = s.p, to.w = s.q, to.k = s.c, to.p = s.h, to.q = s.w;
  to.pad_h = (s.r - 1) * s.dilation_h - s.pad_h, to.pad_w = (s.s - 1) * s.dilation_w - s.pad_w;
  return to;
}
// Elements from a filter's first tap to its last.
inline int64_t last_tap(const Tensor4dRef& w, const Conv2dShape& s) {
  return (s.r - 1) * w.h + (s.s - 1) * w.w;
}
inline Tensor4dRef turned(const Tensor4dRef& w, const Conv2dShape& s) {
  const char* const last = static_cast<const char*>(w.data) + last_tap(w, s) * size_of(s.dtype);
  return {last, w.c, w.n, -w.h, -w.w};
}

// Whether the strides number a tensor's elements without gaps.
inline bool is_dense(const Tensor4dRef& t, const Conv2dShape& s) {
  return (s.k - 1) * t.n + (s.c - 1) * t.c + (s.r - 1) * t.h + (s.s - 1) * t.w ==
         s.k * s.c * s.r * s.s - 1;
}

// The filters' gradients from those that `blocks` blocks have left in the workspace.
inline void add_up(Stream stream, const Conv2dShape& s, int blocks, const void* workspace,
                   const void* out) {
  dispatch(s.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      launch_ordered_sum(stream, static_cast<const float*>(workspace), blocks,
                         s.k * s.c * s.r * s.s, static_cast<T*>(const_cast<void*>(out)));
    }
  });
}

// Before a launch with that much dynamic shared memory. Never less than what every kernel may have:
// another plan of the same kernel, which has only that, would not be launched.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, int bytes) {
  if (bytes > 48 << 10) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
}

}  // namespace braze::cuda::narrow
