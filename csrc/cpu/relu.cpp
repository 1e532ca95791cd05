#include "kernels/relu/relu.h"

#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "kernels/common/registry.h"

namespace braze::cpu {
namespace {

// Elements per task: 32 KiB of fp32, enough to outweigh handing the task over.
constexpr int64_t kGrain = 8192;

const KernelEntry kEntry({"relu", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised, threaded"});

}  // namespace

void relu(Stream, DType dtype, const void* x, void* y, int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    parallel_for(0, n, kGrain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        out[i] = static_cast<acc_t<T>>(in[i]) < 0 ? T(acc_t<T>(0)) : in[i];
      }
    });
  });
}

void relu_backward(Stream, DType dtype, const void* dy, const void* y, void* dx, int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(dy);
    const T* result = static_cast<const T*>(y);
    T* out = static_cast<T*>(dx);
    parallel_for(0, n, kGrain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        out[i] = static_cast<acc_t<T>>(result[i]) <= 0 ? T(acc_t<T>(0)) : grad[i];
      }
    });
  });
}

}  // namespace braze::cpu
