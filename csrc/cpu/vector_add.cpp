#include "launchers/vector_add.h"

#include <iterator>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"

namespace braze::cpu {
namespace {

constexpr char kAll[] = "float64 float32 bfloat16 float16";

constexpr KernelInfo kKernels[] = {
    {"vector_add", "01_naive", kAll, "cpu", false, "one loop, one thread"},
    {"vector_add", "02_threaded", kAll, "cpu", true, "the loop shared out to all threads"},
};
constexpr int kCount = std::size(kKernels), kNaive = kernel_number(kKernels, "01_naive");
const KernelEntries kEntries(kKernels, kCount);

// Elements per task, enough to outweigh handing the task over.
constexpr int64_t kGrain = 8192;

// Rung 1: one loop, which the compiler vectorises. A single core has too few cache lines under way
// to use all of the memory's bandwidth.
template <typename T>
void add(const T* a, const T* b, T* out, int64_t first, int64_t last) {
#pragma omp simd
  for (int64_t i = first; i < last; ++i) {
    out[i] = T(static_cast<acc_t<T>>(a[i]) + static_cast<acc_t<T>>(b[i]));
  }
}

// Rung 2: a stretch of the loop for each thread, so that every core waits for lines of its own.
template <typename T>
void threaded_add(const T* a, const T* b, T* out, int64_t n) {
  parallel_for(0, n, kGrain, [&](int64_t first, int64_t last) { add(a, b, out, first, last); });
}

}  // namespace

const KernelInfo* vector_add_kernel(int number) {
  return number < kCount ? &kKernels[number] : nullptr;
}

void vector_add(Stream, DType dtype, const void* a, const void* b, void* out, int64_t n,
                int kernel) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *left = static_cast<const T*>(a), *right = static_cast<const T*>(b);
    if (kernel == kNaive) {
      add(left, right, static_cast<T*>(out), 0, n);
    } else {
      threaded_add(left, right, static_cast<T*>(out), n);
    }
  });
}

}  // namespace braze::cpu
