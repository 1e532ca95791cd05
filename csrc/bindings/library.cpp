// Every schema of torch.ops.braze in one place. Linked into libbraze_ops_*, which is loaded first;
// CPU and CUDA kernels, fake kernels and autograd formulas register themselves against these.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(braze, m) {
  // batch_norm
  m.def(
      "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, bool training, float? momentum, "
      "float eps) -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
      "Tensor rstd, bool training, bool[] output_mask) -> (Tensor, Tensor, Tensor)");

  // conv2d

  // cross_entropy

  // matmul, linear

  // pool
  m.def(
      "max_pool2d(Tensor input, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
      "bool ceil_mode) -> (Tensor output, Tensor taps)");
  m.def(
      "max_pool2d_backward(Tensor grad_output, Tensor taps, SymInt[] input_size, "
      "int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode, "
      "bool channels_last) -> Tensor");
  m.def(
      "max_pool2d_indices(Tensor taps, SymInt[] input_size, int[] kernel_size, int[] stride, "
      "int[] padding, int[] dilation, bool ceil_mode) -> Tensor");
  m.def(
      "avg_pool2d(Tensor input, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
      "bool count_include_pad, int? divisor_override) -> Tensor");
  m.def(
      "avg_pool2d_backward(Tensor grad_output, SymInt[] input_size, int[] kernel_size, "
      "int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, "
      "int? divisor_override, bool channels_last) -> Tensor");

  // relu
  m.def("relu(Tensor input) -> Tensor");
  m.def("relu_(Tensor(a!) input) -> ()");
  m.def("relu_backward(Tensor grad_output, Tensor result) -> Tensor");

  // sgd

  // softmax

  // transpose
}
