#include "launchers/activation.h"

#include "ops/activation.h"

namespace braze {
namespace {

// Elementwise over memory, as relu.
Tensor activation(const Tensor& input, const std::string& name, double first, double second) {
  const char* op = "activation";
  const DType dtype = dtype_of(op, "input", input);
  const Activation activation = activation_of(op, name, first, second);
  const DeviceContext context(input);
  Tensor out = dense_like(input);
  const Tensor x = with_layout_of(input, out);
  dev::activation(context.stream(), dtype, activation, x.const_data_ptr(), out.mutable_data_ptr(),
                  out.numel());
  return out;
}

Tensor activation_backward(const Tensor& grad_output, const Tensor& input, const std::string& name,
                           double first, double second) {
  const char* op = "activation_backward";
  const DType dtype = dtype_of(op, "input", input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  const Activation activation = activation_of(op, name, first, second);
  const DeviceContext context(input);
  Tensor grad_input = dense_like(input);
  const Tensor x = with_layout_of(input, grad_input);
  const Tensor dy = with_layout_of(grad_output, grad_input);
  dev::activation_backward(context.stream(), dtype, activation, dy.const_data_ptr(),
                           x.const_data_ptr(), grad_input.mutable_data_ptr(), grad_input.numel());
  return grad_input;
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("activation", TORCH_BOX(&activation));
  m.impl("activation_backward", TORCH_BOX(&activation_backward));
}

}  // namespace braze
