// Matrix products with the full epilogue, and the two-layer perceptron.
#include "ops/matmul.h"

namespace braze {
namespace {

std::tuple<Tensor, Tensor, Tensor> matmul_epilogue(const Tensor& input, const Tensor& other,
                                                   const std::optional<Tensor>& bias,
                                                   const std::optional<Tensor>& residual,
                                                   const std::optional<Tensor>& relu_result,
                                                   bool relu, bool column_sums, bool row_sums,
                                                   bool allow_tf32, bool deterministic,
                                                   const std::string& backend) {
  constexpr const char* kOp = "matmul_epilogue";
  const DType dtype = dtype_of(kOp, "input", input);
  check_same_device(kOp, "other", other, "input", input);
  check_same_dtype(kOp, "other", other, "input", input);
  BRAZE_CHECK(input.dim() > 0, kOp, ": expected input to be at least 1D, but got 0D");
  BRAZE_CHECK(other.dim() == 2, kOp, ": expected other to be 2D, but got ", other.dim(), "D");
  const int64_t k = input.size(input.dim() - 1), n = other.size(1);
  BRAZE_CHECK(k == other.size(0), "mat1 and mat2 shapes cannot be multiplied (",
              input.numel() / std::max<int64_t>(1, k), "x", k, " and ", other.size(0), "x", n, ")");
  const Sizes sizes = with_last(input, n);
  if (bias) check_like(kOp, "bias", *bias, {n}, "a row of the result", input);
  if (residual) check_like(kOp, "residual", *residual, sizes, "the result", input);
  if (relu_result) check_like(kOp, "relu_result", *relu_result, sizes, "the result", input);

  const DeviceContext context(input);
  Tensor out = empty(sizes, input);
  Sizes outer = sizes;
  outer.pop_back();
  // An empty tensor for what is not wanted: results of an op must not alias.
  Tensor columns = empty({column_sums ? n : 0}, input);
  Tensor rows = empty(row_sums ? outer : Sizes{0}, input);
  if (out.numel() == 0) {
    if (column_sums) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(columns.get()));
    if (row_sums) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(rows.get()));
    return {out, columns, rows};
  }
  const auto dense = [](const std::optional<Tensor>& t) {
    return t ? std::optional<Tensor>(as_contiguous(*t)) : std::nullopt;
  };
  const auto data = [](const std::optional<Tensor>& t) {
    return t ? t->const_data_ptr() : nullptr;
  };
  const auto dense_bias = dense(bias), dense_residual = dense(residual),
             dense_result = dense(relu_result);
  multiply(context, dtype, 1, rows_of(input), rows_of(other), out,
           {data(dense_bias), relu, data(dense_residual), data(dense_result),
            column_sums ? columns.mutable_data_ptr() : nullptr,
            row_sums ? rows.mutable_data_ptr() : nullptr},
           {allow_tf32, deterministic, backend});
  return {out, columns, rows};
}

std::tuple<Tensor, Tensor> linear_relu_linear(const Tensor& input, const Tensor& weight1,
                                              const std::optional<Tensor>& bias1,
                                              const Tensor& weight2,
                                              const std::optional<Tensor>& bias2, bool allow_tf32,
                                              bool deterministic, const std::string& backend) {
  constexpr const char* kOp = "linear_relu_linear";
  const Settings settings{allow_tf32, deterministic, backend};
  Tensor hidden = linear_forward(kOp, input, "weight1", weight1, "bias1", bias1, true, settings);
  Tensor out = linear_forward(kOp, hidden, "weight2", weight2, "bias2", bias2, false, settings);
  return {out, hidden};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("matmul_epilogue", TORCH_BOX(&matmul_epilogue));
  m.impl("linear_relu_linear", TORCH_BOX(&linear_relu_linear));
}

}  // namespace braze
