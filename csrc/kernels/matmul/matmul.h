#pragma once

#include "kernels/common/types.h"

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
};

namespace BRAZE_DEVICE {

// Bytes of workspace that `matmul` wants for these arguments (0: none), for example for split-K.
int64_t matmul_workspace_bytes(const MatmulArgs& args, const std::string& kernel);

// kernel: "auto" picks by shape, dtype and architecture among the shipped kernels; else the
// registered name of one kernel. Throws where that kernel cannot take the arguments. k == 0 gives
// the epilogue of zero.
void matmul(Stream stream, const MatmulArgs& args, const std::string& kernel, void* workspace);

// out[j] = sum over i of x[i * n + j], x dense m x n, summed in fp32 (fp64 for fp64): the gradient
// of a bias. Deterministic. The workspace holds column_sum_workspace_bytes.
int64_t column_sum_workspace_bytes(DType dtype, int64_t m, int64_t n);
void column_sum(Stream stream, DType dtype, int64_t m, int64_t n, const void* x, void* out,
                void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
