#include "launchers/activation.h"

#include <type_traits>

#include "cpu/common/activate.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrain = 8192;  // elements per task
const KernelEntry kEntry({"activation", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "16-bit elements by way of a buffer in the cache, threaded"});

// Calls f(begin, count) on many threads for chunks that cover n elements.
template <typename F>
void for_each_part(int64_t n, const F& f) {
  parallel_for(0, n, kGrain, [&](int64_t first, int64_t last) {
    for_each_chunk(last - first, [&](int64_t begin, int64_t count) { f(first + begin, count); });
  });
}

// The elements as values of the accumulation type: where they lie, or in the buffer.
template <typename T>
const acc_t<T>* values_of(const T* from, acc_t<T>* buffer, int64_t count) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    return from;
  } else {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) buffer[j] = static_cast<acc_t<T>>(from[j]);
    return buffer;
  }
}

// run(to) writes `count` values to `to`, which are stored at `out`: at once, or from the buffer.
template <typename T, typename F>
void store_values(T* out, acc_t<T>* buffer, int64_t count, const F& run) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    run(out);
  } else {
    run(buffer);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = buffer[j];
  }
}

}  // namespace

void activation(Stream, DType dtype, const Activation& activation, const void* x, void* y,
                int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_part(n, [&](int64_t begin, int64_t count) {
      acc_t<T> v[kChunk];
      const acc_t<T>* const values = values_of(static_cast<const T*>(x) + begin, v, count);
      store_values(static_cast<T*>(y) + begin, v, count,
                   [&](acc_t<T>* to) { activate(activation, values, to, count); });
    });
  });
}

void activation_backward(Stream, DType dtype, const Activation& activation, const void* dy,
                         const void* x, void* dx, int64_t n) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_part(n, [&](int64_t begin, int64_t count) {
      acc_t<T> v[kChunk], grad[kChunk];
      const acc_t<T>* const values = values_of(static_cast<const T*>(x) + begin, v, count);
      const acc_t<T>* const grads = values_of(static_cast<const T*>(dy) + begin, grad, count);
      store_values(static_cast<T*>(dx) + begin, grad, count,
                   [&](acc_t<T>* to) { pass_back(activation, values, grads, to, count); });
    });
  });
}

}  // namespace braze::cpu
