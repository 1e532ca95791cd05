// a + b, the first ladder to read: one rung a file, 01 to 04. docs/warm_up.md goes through them.
#include "launchers/vector_add.h"

#include "cuda/vector_add/ladder/01_naive.cuh"
#include "cuda/vector_add/ladder/02_grid_stride.cuh"
#include "cuda/vector_add/ladder/03_vectorized.cuh"
#include "cuda/vector_add/ladder/04_loads_in_flight.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr char kAll[] = "float64 float32 bfloat16 float16", kArch[] = "sm_80+";

const KernelEntry kNaive({"vector_add", "01_naive", kAll, kArch, false, "a thread per element"});
const KernelEntry kGridStride({"vector_add", "02_grid_stride", kAll, kArch, false,
                               "a grid that fills the device and loops"});
const KernelEntry kVectorized({"vector_add", "03_vectorized", kAll, kArch, false,
                               "16 bytes per thread and access, grid-stride"});
const KernelEntry kLoadsInFlight({"vector_add", "04_loads_in_flight", kAll, kArch, true,
                                  "eight 16-byte loads of a thread in flight"});

}  // namespace

void vector_add(Stream stream, DType dtype, const void* a, const void* b, void* out, int64_t n,
                const std::string& kernel) {
  if (n == 0) return;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto rung) {
      rung(stream, static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(out), n);
    };
    if (kernel == "auto" || kernel == "04_loads_in_flight") {
      run(vector_add_ladder::run_loads_in_flight<T>);
    } else if (kernel == "03_vectorized") {
      run(vector_add_ladder::run_vectorized<T>);
    } else if (kernel == "02_grid_stride") {
      run(vector_add_ladder::run_grid_stride<T>);
    } else if (kernel == "01_naive") {
      run(vector_add_ladder::run_naive<T>);
    } else {
      throw std::runtime_error("vector_add: no CUDA kernel is called " + kernel);
    }
  });
  check_launch("vector_add");
}

}  // namespace braze::cuda
