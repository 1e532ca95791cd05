#include <algorithm>

#include "kernels/transpose/transpose.h"

#include "cpu/parallel.h"
#include "kernels/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"transpose_copy", "blocked", "float64 float32 bfloat16 float16", "cpu",
                          true, "cache-blocked 32 x 32, threaded"});

// Rows and columns of a block, which a level-1 cache holds twice.
constexpr int64_t kBlock = 32;

template <typename T>
void transpose_matrices(const T* in, T* out, int64_t batch, int64_t rows, int64_t cols) {
  const int64_t strips = ceil_div(cols, kBlock);  // a strip: kBlock rows of the output
  const int64_t grain = ceil_div(16384, rows * kBlock);
  parallel_for(0, batch * strips, grain, [&](int64_t first, int64_t last) {
    for (int64_t strip = first; strip < last; ++strip) {
      const int64_t matrix = strip / strips * rows * cols;
      const int64_t first_col = strip % strips * kBlock;
      const int64_t end_col = std::min(first_col + kBlock, cols);
      for (int64_t first_row = 0; first_row < rows; first_row += kBlock) {
        const int64_t end_row = std::min(first_row + kBlock, rows);
        for (int64_t c = first_col; c < end_col; ++c) {
#pragma omp simd
          for (int64_t r = first_row; r < end_row; ++r) {
            out[matrix + c * rows + r] = in[matrix + r * cols + c];
          }
        }
      }
    }
  });
}

}  // namespace

void transpose_copy(Stream, DType dtype, const void* in, void* out, int64_t batch, int64_t rows,
                    int64_t cols) {
  if (batch == 0 || rows == 0 || cols == 0) return;
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    transpose_matrices(static_cast<const T*>(in), static_cast<T*>(out), batch, rows, cols);
  };
  switch (size_of(dtype)) {
    case 8: return run(TypeTag<uint64_t>{});
    case 4: return run(TypeTag<uint32_t>{});
    default: return run(TypeTag<uint16_t>{});
  }
}

}  // namespace braze::cpu
