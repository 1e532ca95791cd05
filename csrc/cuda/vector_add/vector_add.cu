// a + b, the first ladder to read: one rung a file, 01 to 04. docs/warm_up.md goes through them.
#include "launchers/vector_add.h"

#include "cuda/vector_add/ladder/01_naive.cuh"
#include "cuda/vector_add/ladder/02_grid_stride.cuh"
#include "cuda/vector_add/ladder/03_vectorized.cuh"
#include "cuda/vector_add/ladder/04_loads_in_flight.cuh"

namespace braze::cuda {
namespace {

constexpr char kAll[] = "float64 float32 bfloat16 float16", kArch[] = "sm_80+";

constexpr KernelInfo kKernels[] = {
    {"vector_add", "01_naive", kAll, kArch, false, "a thread per element"},
    {"vector_add", "02_grid_stride", kAll, kArch, false, "a grid that fills the device and loops"},
    {"vector_add", "03_vectorized", kAll, kArch, false,
     "16 bytes per thread and access, grid-stride"},
    {"vector_add", "04_loads_in_flight", kAll, kArch, true,
     "eight 16-byte loads of a thread in flight"},
};
constexpr int kCount = std::size(kKernels);
constexpr int kNaive = kernel_number(kKernels, "01_naive"),
              kGridStride = kernel_number(kKernels, "02_grid_stride"),
              kVectorized = kernel_number(kKernels, "03_vectorized");
const KernelEntries kEntries(kKernels, kCount);

}  // namespace

const KernelInfo* vector_add_kernel(int number) {
  return number < kCount ? &kKernels[number] : nullptr;
}

void vector_add(Stream stream, DType dtype, const void* a, const void* b, void* out, int64_t n,
                int kernel) {
  if (n == 0) return;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto rung) {
      rung(stream, static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(out), n);
    };
    switch (kernel) {
      case kNaive: return run(vector_add_ladder::run_naive<T>);
      case kGridStride: return run(vector_add_ladder::run_grid_stride<T>);
      case kVectorized: return run(vector_add_ladder::run_vectorized<T>);
      default: return run(vector_add_ladder::run_loads_in_flight<T>);
    }
  });
  check_launch("vector_add");
}

}  // namespace braze::cuda
