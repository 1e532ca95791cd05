// Every schema of torch.ops.braze in one place. Linked into libbraze_ops_*, which is loaded first;
// CPU and CUDA kernels, fake kernels and autograd formulas register themselves against these.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(braze, m) {
  // batch_norm

  // conv2d

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
