#include "launchers/activation.h"

#include "cpu/common/activate.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrain = 8192;  // elements per task
const KernelEntry kEntry({"activation", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "by way of a buffer in the cache, threaded"});

// Calls f(begin, count, buffer) on many threads for chunks that cover n elements of in, which the
// buffer holds.
template <typename T, typename F>
void for_each_buffer(const T* in, int64_t n, const F& f) {
  using A = acc_t<T>;
  parallel_for(0, n, kGrain, [&](int64_t first, int64_t last) {
    for_each_chunk(last - first, [&](int64_t begin, int64_t count) {
      A v[kChunk];
      const T* from = in + first + begin;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) v[j] = static_cast<A>(from[j]);
      f(first + begin, count, v);
    });
  });
}

}  // namespace

void activation(Stream, DType dtype, const Activation& activation, const void* x, void* y,
                int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_buffer(static_cast<const T*>(x), n, [&](int64_t begin, int64_t count, acc_t<T>* v) {
      activate(activation, v, count);
      T* out = static_cast<T*>(y) + begin;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) out[j] = v[j];
    });
  });
}

void activation_backward(Stream, DType dtype, const Activation& activation, const void* dy,
                         const void* x, void* dx, int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    for_each_buffer(static_cast<const T*>(x), n, [&](int64_t begin, int64_t count, A* v) {
      A grad[kChunk];
      const T* from = static_cast<const T*>(dy) + begin;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) grad[j] = static_cast<A>(from[j]);
      pass_back(activation, v, grad, count);
      T* out = static_cast<T*>(dx) + begin;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) out[j] = grad[j];
    });
  });
}

}  // namespace braze::cpu
