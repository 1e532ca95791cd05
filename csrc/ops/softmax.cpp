#include "launchers/softmax.h"

#include <algorithm>
#include <array>

#include "ops/backend.h"

namespace braze {
namespace {

// empty_like with another dtype, which torch::stable::empty_like does not offer.
Tensor empty_like_as(const Tensor& t, ScalarType dtype) {
  if (dtype == t.scalar_type()) return dense_like(t);
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(t),
                                    from(std::optional<ScalarType>(dtype)),
                                    from(std::nullopt),
                                    from(std::nullopt),
                                    from(std::nullopt),
                                    from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

int64_t checked_dim(const char* op, const Tensor& t, int64_t dim) {
  const int64_t dims = std::max<int64_t>(t.dim(), 1);
  BRAZE_CHECK(dim >= -dims && dim < dims, op,
              ": Dimension out of range (expected to be in range of [", -dims, ", ", dims - 1,
              "], but got ", dim, ")");
  return dim < 0 ? dim + dims : dim;
}

// Rows along `dim` of a dense tensor in whatever order its dimensions lie in memory: the stride of
// `dim` is the number of elements of all dimensions inside it.
RowShape rows_along(const Tensor& dense, int64_t dim) {
  const int64_t size = dense.dim() == 0 ? 1 : dense.size(dim);
  if (dense.numel() == 0) return {0, size, 1};
  const int64_t inner = size == 1 ? 1 : dense.stride(dim);
  return {dense.numel() / (size * inner), size, inner};
}

// The result's dtype: the input's, or float32 for a 16-bit input.
DType result_dtype_of(const char* op, const Tensor& input, DType dtype,
                      std::optional<ScalarType> wanted) {
  if (!wanted || *wanted == input.scalar_type()) return dtype;
  BRAZE_CHECK(*wanted == ScalarType::Float && size_of(dtype) == 2, op,
              ": expected dtype to be the input's, or float32 for a 16-bit input, but got ",
              scalar_type_name(*wanted), " for ", scalar_type_name(input.scalar_type()));
  return DType::kFloat32;
}

// rung: the number of softmax's kernel, where one was asked for.
Tensor softmax_forward(const char* op, bool log, const Tensor& input, int64_t dim,
                       std::optional<ScalarType> dtype, std::optional<int> rung = std::nullopt) {
  const DType input_dtype = dtype_of(op, "input", input);
  const DType result_dtype = result_dtype_of(op, input, input_dtype, dtype);
  dim = checked_dim(op, input, dim);
  const DeviceContext context(input);
  Tensor y = empty_like_as(input, dtype.value_or(input.scalar_type()));
  const Tensor x = same_layout(input, y) ? input : with_layout_of(input, dense_like(input));
  const RowShape rows = rows_along(y, dim);
  if (rung) {
    dev::softmax_rung(context.stream(), input_dtype, result_dtype, rows, x.const_data_ptr(),
                      y.mutable_data_ptr(), *rung);
  } else {
    dev::softmax(context.stream(), input_dtype, result_dtype, log, rows, x.const_data_ptr(),
                 y.mutable_data_ptr());
  }
  return y;
}

Tensor softmax_backward_impl(const char* op, bool log, const Tensor& grad_output,
                             const Tensor& output, int64_t dim, ScalarType input_dtype) {
  const DType result_dtype = dtype_of(op, "output", output);
  check_same_device(op, "grad_output", grad_output, "output", output);
  check_same_dtype(op, "grad_output", grad_output, "output", output);
  check_same_shape(op, "grad_output", grad_output, "output", output);
  dim = checked_dim(op, output, dim);
  const DeviceContext context(output);
  Tensor grad_input = empty_like_as(output, input_dtype);
  const DType grad_dtype = dtype_of(op, "input_dtype", grad_input);
  BRAZE_CHECK(
      grad_dtype == result_dtype || (result_dtype == DType::kFloat32 && size_of(grad_dtype) == 2),
      op, ": expected input_dtype to be the output's, or a 16-bit type for a float32 output",
      ", but got ", scalar_type_name(input_dtype));
  const Tensor y =
      same_layout(output, grad_input) ? output : with_layout_of(output, dense_like(output));
  const Tensor dy = with_layout_of(grad_output, y);
  dev::softmax_backward(context.stream(), grad_dtype, result_dtype, log,
                        rows_along(grad_input, dim), dy.const_data_ptr(), y.const_data_ptr(),
                        grad_input.mutable_data_ptr());
  return grad_input;
}

Tensor softmax(const Tensor& input, int64_t dim, std::optional<ScalarType> dtype) {
  return softmax_forward("softmax", false, input, dim, dtype);
}

Tensor softmax_rung(const Tensor& input, int64_t dim, std::optional<ScalarType> dtype,
                    const std::string& backend) {
  const Wish wish = wish_of("softmax", backend, dev::softmax_rung_info);
  return softmax_forward("softmax", false, input, dim, dtype, wish.kernel());
}

Tensor log_softmax(const Tensor& input, int64_t dim, std::optional<ScalarType> dtype) {
  return softmax_forward("log_softmax", true, input, dim, dtype);
}

Tensor softmax_backward(const Tensor& grad_output, const Tensor& output, int64_t dim,
                        ScalarType input_dtype) {
  return softmax_backward_impl("softmax_backward", false, grad_output, output, dim, input_dtype);
}

Tensor log_softmax_backward(const Tensor& grad_output, const Tensor& output, int64_t dim,
                            ScalarType input_dtype) {
  return softmax_backward_impl("log_softmax_backward", true, grad_output, output, dim, input_dtype);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("softmax", TORCH_BOX(&softmax));
  m.impl("softmax_rung", TORCH_BOX(&softmax_rung));
  m.impl("log_softmax", TORCH_BOX(&log_softmax));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward));
  m.impl("log_softmax_backward", TORCH_BOX(&log_softmax_backward));
}

}  // namespace braze
