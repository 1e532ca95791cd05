// Transposing copies: the rungs of the ladder, 01 to 05, one a file, and which of them "auto"
// takes. docs/warm_up.md goes through them. Only bits move: one kernel per element size.
#include "launchers/transpose.h"

#include "cuda/transpose/ladder/01_naive.cuh"
#include "cuda/transpose/ladder/02_shared_tile.cuh"
#include "cuda/transpose/ladder/03_padded.cuh"
#include "cuda/transpose/ladder/04_vectorized.cuh"
#include "cuda/transpose/ladder/05_register_block.cuh"

namespace braze::cuda {
namespace {

using namespace transpose_ladder;

constexpr char kAll[] = "float64 float32 bfloat16 float16", kArch[] = "sm_80+";

constexpr KernelInfo kKernels[] = {
    {"transpose_copy", "01_naive", kAll, kArch, false, "each element straight to its new place"},
    {"transpose_copy", "02_shared_tile", kAll, kArch, false,
     "32 x 32 tiles turned in shared memory"},
    {"transpose_copy", "03_padded", kAll, kArch, false, "rows of 33 elements, no bank conflicts"},
    {"transpose_copy", "04_vectorized", kAll, kArch, true,
     "64 x 64 tile, 16 bytes per thread and access"},
    {"transpose_copy", "05_register_block", kAll, kArch, true,
     "blocks transposed in registers, swizzled tile"},
};
constexpr int kCount = std::size(kKernels);
constexpr int kNaive = kernel_number(kKernels, "01_naive"),
              kSharedTile = kernel_number(kKernels, "02_shared_tile"),
              kPadded = kernel_number(kKernels, "03_padded"),
              kVectorized = kernel_number(kKernels, "04_vectorized"),
              kRegisterBlock = kernel_number(kKernels, "05_register_block");
const KernelEntries kEntries(kKernels, kCount);

// A side far shorter than a tile leaves most of it empty: one thread per element of the output,
// the strided reads served by L1.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const T* in, T* __restrict__ out, int64_t n, int64_t rows, int64_t cols) {
  wait_for_earlier_kernels();
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += stride) {
    const int64_t row = i % rows, rest = i / rows;
    const int64_t col = rest % cols, matrix = rest / cols;
    out[i] = in[(matrix * rows + row) * cols + col];
  }
}

template <typename T>
void run_best(Stream stream, const Matrices<T>& m) {
  constexpr int64_t kNarrow = 16;
  if (m.rows < kNarrow || m.cols < kNarrow || count_tiles<kTile>(m) > INT_MAX) {
    const int64_t n = m.batch * m.rows * m.cols;
    launch_early(narrow_kernel<T>, grid_stride_blocks(n, kThreads), kThreads, 0, stream, m.in,
                 m.out, n, m.rows, m.cols);
  } else if (takes_register_blocks(m)) {
    run_register_block(stream, m);
  } else {
    run_vectorized(stream, m);
  }
}

template <typename T>
void run(Stream stream, const Matrices<T>& m, int kernel) {
  switch (kernel) {
    case kNaive: run_naive(stream, m); break;
    case kSharedTile: run_shared_tile(stream, m); break;
    case kPadded: run_padded(stream, m); break;
    case kVectorized: run_vectorized(stream, m); break;
    case kRegisterBlock: run_register_block(stream, m); break;
    default: run_best(stream, m); break;
  }
  check_launch("transpose_copy");
}

}  // namespace

const KernelInfo* transpose_kernel(int number) {
  return number < kCount ? &kKernels[number] : nullptr;
}

void transpose_copy(Stream stream, DType dtype, const void* in, void* out, int64_t batch,
                    int64_t rows, int64_t cols, int kernel) {
  if (batch == 0 || rows == 0 || cols == 0) return;
  const auto run_as = [&](auto tag) {
    using T = typename decltype(tag)::type;
    run<T>(stream, {static_cast<const T*>(in), static_cast<T*>(out), batch, rows, cols}, kernel);
  };
  switch (size_of(dtype)) {
    case 8: return run_as(TypeTag<uint64_t>{});
    case 4: return run_as(TypeTag<uint32_t>{});
    default: return run_as(TypeTag<uint16_t>{});
  }
}

}  // namespace braze::cuda
