#include "launchers/relu.h"

#include "ops/common.h"

namespace braze {
namespace {

// Elementwise over memory, so any dense layout (contiguous, channels_last, permuted) is kept; other
// strides are copied into the layout that torch.empty_like gives them.
Tensor relu(const Tensor& input) {
  const DType dtype = dtype_of("relu", "input", input);
  const DeviceContext context(input);
  Tensor out = dense_like(input);
  const Tensor x = with_layout_of(input, out);
  dev::relu(context.stream(), dtype, x.const_data_ptr(), out.mutable_data_ptr(), out.numel());
  return out;
}

void relu_(Tensor input) {
  const DType dtype = dtype_of("relu_", "input", input);
  for (int64_t i = 0; i < input.dim(); ++i) {
    BRAZE_CHECK(input.stride(i) != 0 || input.size(i) <= 1 || input.numel() == 0,
                "relu_: unsupported operation: more than one element of the written-to tensor "
                "refers to a single memory location. Please clone() the tensor before performing "
                "the operation.");
  }
  const DeviceContext context(input);
  const bool is_dense = input.is_contiguous() || is_channels_last(input);
  Tensor dense = is_dense ? input : with_layout_of(input, dense_like(input));
  dev::relu(context.stream(), dtype, dense.const_data_ptr(), dense.mutable_data_ptr(),
            dense.numel());
  if (dense.data_ptr() != input.data_ptr()) torch::stable::copy_(input, dense);
}

Tensor relu_backward(const Tensor& grad_output, const Tensor& result) {
  const DType dtype = dtype_of("relu_backward", "result", result);
  check_same_device("relu_backward", "grad_output", grad_output, "result", result);
  check_same_dtype("relu_backward", "grad_output", grad_output, "result", result);
  check_same_shape("relu_backward", "grad_output", grad_output, "result", result);
  const DeviceContext context(result);
  Tensor grad_input = dense_like(result);
  const Tensor y = with_layout_of(result, grad_input);
  const Tensor dy = with_layout_of(grad_output, grad_input);
  dev::relu_backward(context.stream(), dtype, dy.const_data_ptr(), y.const_data_ptr(),
                     grad_input.mutable_data_ptr(), grad_input.numel());
  return grad_input;
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("relu_", TORCH_BOX(&relu_));
  m.impl("relu_backward", TORCH_BOX(&relu_backward));
}

}  // namespace braze
