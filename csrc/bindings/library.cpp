// Every schema of torch.ops.braze in one place. Linked into libbraze_ops_*, which is loaded first;
// CPU and CUDA kernels, fake kernels and autograd formulas register themselves against these.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(braze, m) {
  // batch_norm

  // conv2d
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, "
      "int[2] dilation=1, int groups=1, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> Tensor");
  m.def(
      "conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups, bool[3] output_mask, bool allow_tf32=False, "
      "bool deterministic=False, str backend=\"auto\") -> (Tensor, Tensor, Tensor)");

  // cross_entropy

  // matmul, linear
  m.def(
      "matmul(Tensor input, Tensor other, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> Tensor");
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, bool relu=False, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") -> Tensor");
  m.def(
      "linear_backward(Tensor grad_output, Tensor input, Tensor weight, bool[3] output_mask, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") "
      "-> (Tensor, Tensor, Tensor)");

  // pool

  // relu
  m.def("relu(Tensor input) -> Tensor");
  m.def("relu_(Tensor(a!) input) -> ()");
  m.def("relu_backward(Tensor grad_output, Tensor result) -> Tensor");

  // sgd

  // softmax

  // transpose
}
