// matmul's and linear's front end as ops that fuse them call it.
#pragma once

#include "launchers/matmul.h"
#include "ops/branch.h"

namespace braze {

using Sizes = std::vector<int64_t>;

struct Settings {
  bool allow_tf32, deterministic;
  const std::string& backend;
};

// Matrices in the memory of a tensor.
struct Matrices {
  Tensor tensor;
  int64_t rows, cols;
  MatrixRef ref;

  Matrices transposed() const {
    return {tensor, cols, rows, {ref.data, ref.batch, ref.col, ref.row}};
  }
};

// The last dimension are the columns, all others the rows.
Matrices rows_of(const Tensor& t);

// As MatmulArgs has it.
struct Epilogue {
  const void* bias = nullptr;
  bool relu = false;
  const void *residual = nullptr, *relu_result = nullptr;
  void *column_sums = nullptr, *row_sums = nullptr;
};

// out = epilogue(a * b); `out` is dense, with batch * a.rows * b.cols elements. branch: runs it,
// unless null. Returns the memory that the kernels work in: only for the stream that runs it may it
// be anything else's from now on.
Workspace multiply(const DeviceContext& context, DType dtype, int64_t batch, const Matrices& a,
                   const Matrices& b, Tensor& out, const Epilogue& epilogue,
                   const Settings& settings, Branch* branch = nullptr);

// The sizes of `input` with another last one.
Sizes with_last(const Tensor& input, int64_t last);

// Throws unless `t` has those sizes, which are said to be those of `what`, and the device and dtype
// of `input`.
void check_like(const char* op, const char* arg, const Tensor& t, const Sizes& sizes,
                const char* what, const Tensor& input);

// linear under the name of `op`, with its names of the arguments.
Tensor linear_forward(const char* op, const Tensor& input, const char* weight_arg,
                      const Tensor& weight, const char* bias_arg, const std::optional<Tensor>& bias,
                      bool relu, const Settings& settings);

}  // namespace braze
