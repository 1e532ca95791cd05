#include "launchers/transpose.h"

#include <algorithm>
#include <iterator>

#include "cpu/common/parallel.h"
#include "cpu/common/transpose_matrix.h"

namespace braze::cpu {
namespace {

constexpr char kAll[] = "float64 float32 bfloat16 float16";

constexpr KernelInfo kKernels[] = {
    {"transpose_copy", "01_naive", kAll, "cpu", false, "row by row, one thread"},
    {"transpose_copy", "02_blocked", kAll, "cpu", true, "cache-blocked 32 x 32, threaded"},
};
constexpr int kCount = std::size(kKernels), kNaive = kernel_number(kKernels, "01_naive");
const KernelEntries kEntries(kKernels, kCount);

// Rung 1: the rows one after the other, one thread. A row of the input is read once from end to
// end, but each of its elements goes to another cache line of the output, which has left the cache
// by the time that the next row comes to it.
template <typename T>
void naive_transpose(const T* in, T* out, int64_t batch, int64_t rows, int64_t cols) {
  for (int64_t b = 0; b < batch; ++b, in += rows * cols, out += rows * cols) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) out[c * rows + r] = in[r * cols + c];
    }
  }
}

// Rows and columns of a block, which a level-1 cache holds twice.
constexpr int64_t kBlock = 32;

// Rung 2: in blocks whose cache lines all stay until they have been used up, on both sides; strips
// of blocks are shared out to the threads. Blocks are transposed in registers: elements one by one
// take three times as long.
template <typename T>
void blocked_transpose(const T* in, T* out, int64_t batch, int64_t rows, int64_t cols) {
  const int64_t strips = ceil_div(cols, kBlock);  // a strip: kBlock rows of the output
  const int64_t grain = ceil_div(16384, rows * kBlock);
  parallel_for(0, batch * strips, grain, [&](int64_t first, int64_t last) {
    for (int64_t strip = first; strip < last; ++strip) {
      const int64_t matrix = strip / strips * rows * cols;
      const int64_t first_col = strip % strips * kBlock;
      const int64_t end_col = std::min(first_col + kBlock, cols);
      for (int64_t first_row = 0; first_row < rows; first_row += kBlock) {
        const int64_t end_row = std::min(first_row + kBlock, rows);
        transpose_matrix(out + matrix + first_col * rows + first_row, rows,
                         in + matrix + first_row * cols + first_col, cols, end_col - first_col,
                         end_row - first_row);
      }
    }
  });
}

}  // namespace

const KernelInfo* transpose_kernel(int number) {
  return number < kCount ? &kKernels[number] : nullptr;
}

void transpose_copy(Stream, DType dtype, const void* in, void* out, int64_t batch, int64_t rows,
                    int64_t cols, int kernel) {
  if (batch == 0 || rows == 0 || cols == 0) return;
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(in);
    if (kernel == kNaive) {
      naive_transpose(from, static_cast<T*>(out), batch, rows, cols);
    } else {
      blocked_transpose(from, static_cast<T*>(out), batch, rows, cols);
    }
  };
  switch (size_of(dtype)) {
    case 8: return run(TypeTag<double>{});
    case 4: return run(TypeTag<float>{});
    default: return run(TypeTag<uint16_t>{});
  }
}

}  // namespace braze::cpu
