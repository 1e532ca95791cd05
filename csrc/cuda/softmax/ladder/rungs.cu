// Softmax's ladder: compiles the rungs, 01 to 06, one a file, and lists them beside the shipped
// kernel. docs/softmax.md goes through them. The shipped path does not come through here.
#include <climits>
#include <iterator>

#include "launchers/softmax.h"
#include "01_thread_per_row.cuh"
#include "02_block_per_row.cuh"
#include "03_warp_per_row.cuh"
#include "04_online.cuh"
#include "05_vectorized.cuh"
#include "06_registers.cuh"

namespace braze::cuda {
namespace {

using namespace softmax_ladder;

constexpr char kAll[] = "float64 float32 bfloat16 float16", kArch[] = "sm_80+";

constexpr KernelInfo kKernels[] = {
    {"softmax", "01_thread_per_row", kAll, kArch, false, "a thread per row, three passes"},
    {"softmax", "02_block_per_row", kAll, kArch, false,
     "a block per row, reductions as trees in shared memory"},
    {"softmax", "03_warp_per_row", kAll, kArch, false, "a warp per row, reductions by shuffles"},
    {"softmax", "04_online", kAll, kArch, false, "maximum and sum in one pass"},
    {"softmax", "05_vectorized", kAll, kArch, false, "16 bytes per thread and access"},
    {"softmax", "06_registers", kAll, kArch, false, "rows read once and kept in registers"},
    {"softmax", "online", kAll, kArch, true,
     "online maximum and sum; lanes, block or columns per row"},
};
constexpr int kThreadPerRow = kernel_number(kKernels, "01_thread_per_row"),
              kBlockPerRow = kernel_number(kKernels, "02_block_per_row"),
              kWarpPerRow = kernel_number(kKernels, "03_warp_per_row"),
              kOnline = kernel_number(kKernels, "04_online"),
              kVectorized = kernel_number(kKernels, "05_vectorized"),
              kRegisters = kernel_number(kKernels, "06_registers");
constexpr int kRungs = kernel_number(kKernels, "online");  // those before it
const KernelEntries kEntries(kKernels, std::size(kKernels));

template <typename T>
void run(Stream stream, const Rows<T>& m, int kernel) {
  switch (kernel) {
    case kThreadPerRow: return run_thread_per_row(stream, m);
    case kBlockPerRow: return run_block_per_row(stream, m);
    case kWarpPerRow: return run_warp_per_row(stream, m);
    case kOnline: return run_online(stream, m);
    case kVectorized: return run_vectorized(stream, m);
    case kRegisters: return run_registers(stream, m);
  }
}

}  // namespace

const KernelInfo* softmax_rung_info(int number) {
  return number < static_cast<int>(std::size(kKernels)) ? &kKernels[number] : nullptr;
}

void softmax_rung(Stream stream, DType input_dtype, DType result_dtype, const RowShape& shape,
                  const void* x, void* y, int kernel) {
  if (kernel == kAnyKernel || kernel >= kRungs) {
    return softmax(stream, input_dtype, result_dtype, false, shape, x, y);
  }
  if (shape.rows() == 0 || shape.size == 0) return;
  const char* const name = kKernels[kernel].name;
  if (shape.inner != 1) refuse(name, "rows along the innermost dimension in memory");
  if (input_dtype != result_dtype) refuse(name, "results of the input's dtype");
  if (shape.outer > INT_MAX) refuse(name, "fewer than 2^31 rows");
  dispatch(input_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Rows<T> m{static_cast<const T*>(x), static_cast<T*>(y), shape.outer, shape.size};
    run(stream, m, kernel);
  });
  check_launch("softmax");
}

}  // namespace braze::cuda
