#include "launchers/bias_activation.h"

#include "ops/activation.h"
#include "ops/backend.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

BiasActivationShape checked_shape(const char* op, const Tensor& input, const Tensor& bias) {
  const DType dtype = dtype_of(op, "input", input);
  check_same_device(op, "bias", bias, "input", input);
  const int64_t dims = input.dim();
  BRAZE_CHECK(dims > 0 && bias.dim() == 1 && bias.size(0) == input.size(dims - 1), op,
              ": expected bias to have the extent of input's last dimension, but got ",
              shape_string(bias), " for input of shape ", shape_string(input));
  const DType of_bias = dtype_of(op, "bias", bias);
  BRAZE_CHECK(of_bias == dtype || (size_of(dtype) == 2 && of_bias == DType::kFloat32), op,
              ": expected bias of input's dtype, or float32 for a 16-bit input, but got ",
              scalar_type_name(bias.scalar_type()), " for ", scalar_type_name(input.scalar_type()));
  const int64_t channels = input.size(dims - 1);
  return {dtype, of_bias, input.numel() / std::max<int64_t>(1, channels), channels};
}

// Contiguous.
Tensor bias_activation(const Tensor& input, const Tensor& bias, const std::string& name,
                       double first, double second) {
  const char* op = "bias_activation";
  const BiasActivationShape shape = checked_shape(op, input, bias);
  const Activation activation = activation_of(op, name, first, second);
  const DeviceContext context(input);
  Tensor out = empty(sizes_of(input), input);
  if (out.numel() == 0) return out;
  const Tensor x = as_contiguous(input), b = as_contiguous(bias);
  dev::bias_activation(context.stream(), shape, activation, x.const_data_ptr(), b.const_data_ptr(),
                       out.mutable_data_ptr());
  return out;
}

// An empty tensor for a gradient that is not wanted.
std::tuple<Tensor, Tensor> bias_activation_backward(const Tensor& grad_output, const Tensor& input,
                                                    const Tensor& bias, const std::string& name,
                                                    double first, double second,
                                                    std::vector<bool> output_mask) {
  const char* op = "bias_activation_backward";
  const BiasActivationShape shape = checked_shape(op, input, bias);
  const Activation activation = activation_of(op, name, first, second);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  BRAZE_CHECK(output_mask.size() == 2, op, ": expected output_mask of 2 entries, but got ",
              output_mask.size());
  const DeviceContext context(input);
  const bool of_input = output_mask[0], of_bias = output_mask[1];
  Tensor dx = empty(of_input ? sizes_of(input) : Sizes{0}, input);
  const Sizes sizes = of_bias ? sizes_of(bias) : Sizes{0};
  if (input.numel() == 0) return {dx, zeros(sizes, bias)};
  Tensor dbias = empty(sizes, bias);
  if (!of_input && !of_bias) return {dx, dbias};
  const Tensor x = as_contiguous(input), dy = as_contiguous(grad_output), b = as_contiguous(bias);
  const Workspace workspace(of_bias ? dev::bias_activation_workspace_bytes(shape) : 0, input);
  dev::bias_activation_backward(context.stream(), shape, activation, dy.const_data_ptr(),
                                x.const_data_ptr(), b.const_data_ptr(),
                                of_input ? dx.mutable_data_ptr() : nullptr,
                                of_bias ? dbias.mutable_data_ptr() : nullptr, workspace.data());
  return {dx, dbias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("bias_activation", TORCH_BOX(&bias_activation));
  m.impl("bias_activation_backward", TORCH_BOX(&bias_activation_backward));
}

}  // namespace braze
