// Every schema of torch.ops.braze in one place. Linked into libbraze_ops_*, which is loaded first;
// CPU and CUDA kernels, fake kernels and autograd formulas register themselves against these.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(braze, m) {
  // batch_norm

  // conv2d

  // cross_entropy

  // matmul, linear

  // pool

  // relu
  m.def("relu(Tensor input) -> Tensor");
  m.def("relu_(Tensor(a!) input) -> ()");
  m.def("relu_backward(Tensor grad_output, Tensor result) -> Tensor");

  // sgd

  // softmax

  // transpose
}
