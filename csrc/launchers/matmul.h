#pragma once

#include "launchers/common/registry.h"
#include "launchers/common/tiling.h"
#include "launchers/common/types.h"

namespace braze {

// One matrix, or a batch of them, addressed by strides counted in elements: element (b, i, j) is at
// data[b * batch + i * row + j * col]. A batch stride of 0 broadcasts; row or col strides of 0 and
// negative ones do not occur.
struct MatrixRef {
  const void* data;
  int64_t batch, row, col;
};

// C[b] = epilogue(A[b] (m x k) * B[b] (k x n)), C dense and row-major: element (b, i, j) at
// (b * m + i) * n + j. 16-bit inputs accumulate in fp32; C has the inputs' dtype.
struct MatmulArgs {
  DType dtype;
  int64_t batch, m, n, k;
  MatrixRef a, b;
  void* c;
  const void* bias;    // n values added to every row, or nullptr
  bool relu;           // max(x, 0) after the bias; NaN stays NaN
  bool allow_tf32;     // fp32 inputs may be rounded to TF32
  bool deterministic;  // measured kernel choices are ignored

  // The full epilogue, each part of it if not nullptr, for one matrix (batch is 1). In this order:
  const void* residual = nullptr;  // laid out as C; added after the bias, before the ReLU
  // Laid out as C, the result of a ReLU: where it is not positive C counts as 0 (NaN is as torch
  // has it: positive), which makes of a gradient behind the ReLU that before it.
  const void* relu_result = nullptr;
  // n sums over the rows of C, m over its columns, of the values as they were rounded; in C's
  // dtype, summed in fp32 (fp64 for fp64), always in the same order.
  void *column_sums = nullptr, *row_sums = nullptr;

  bool has_full_epilogue() const { return residual || has_more_than_residual(); }
  bool has_more_than_residual() const { return relu_result || column_sums || row_sums; }
  MatmulArgs with_plain_epilogue() const {
    MatmulArgs plain = *this;
    plain.residual = plain.relu_result = nullptr;
    plain.column_sums = plain.row_sums = nullptr;
    return plain;
  }
};

// out[j] = sum over i of x[i * n + j]: the gradient of a bias. With the result of a ReLU given, x
// is the gradient that reaches it, and elements where the result is not positive count as 0 (NaN is
// as torch has it: positive); what they became is written to `masked`. All dense, m x n.
struct ColumnSumArgs {
  DType dtype;
  int64_t m, n;
  const void* x;
  const void* result;  // or nullptr
  void* masked;        // nullptr without a result
  void* out;           // n sums, or nullptr if only `masked` is wanted
};

// The gradients of a linear layer of few rows: the two products, both of the gradient dy that
// reaches the layer (A of the one, transposed A of the other), and the column sums of dy.
struct LinearGradArgs {
  MatmulArgs input, weight;
  const void* result;  // of a ReLU that follows, with dy's strides; or nullptr
  void* bias;          // or nullptr
};

// All that is decided about a product before it runs. It holds for all of the same extents, strides
// and epilogue whose matrices are aligned alike, on the same device (on the CPU: for as many
// threads).
struct MatmulPlan {
  int kernel = 0;                  // its number
  const char* obstacle = nullptr;  // why it cannot take the arguments; nullptr where it can
  int64_t workspace_bytes = 0;
  // A measured rule, where any kernel would do: whether this one is faster than the vendor's
  // library.
  bool beats_library = false;
  Tiling tiling;
};

namespace BRAZE_DEVICE {

// The kernel of that number, or nullptr beyond the last.
const KernelInfo* matmul_kernel(int number);

// kernel: a number, or kAnyKernel.
MatmulPlan plan_matmul(const MatmulArgs& args, int kernel);

// k == 0 gives the epilogue of zero.
void run_matmul(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

// The sums of columns, in fp32 (fp64 for fp64), always in the same order.
int64_t column_sum_workspace_bytes(const ColumnSumArgs& args);
void column_sum(Stream stream, const ColumnSumArgs& args, void* workspace);

// Everything in one launch where the device, the sizes and the strides are such that it is the
// fastest way; else nothing, and false.
bool linear_gradients(Stream stream, const LinearGradArgs& args);

}  // namespace BRAZE_DEVICE
}  // namespace braze
