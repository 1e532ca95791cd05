// conv2d's front end as ops that fuse it call it.
#pragma once

#include "launchers/conv2d.h"
#include "ops/backend.h"
#include "ops/batch_norm.h"
#include "ops/common.h"

namespace braze {

// Everything but the tensors.
struct Conv2dArguments {
  const std::vector<int64_t>&stride, &padding, &dilation;
  int64_t groups;
  bool allow_tf32, deterministic;
  const std::string& backend;
};

// The backend that measures at the first call of a pass (conv2d_measure.h).
constexpr char kBenchmark[] = "benchmark";

// Whether `backend` lets ops that convolve in a kernel of their own take it: that is measured to be
// faster than all that a convolution by itself may find.
inline bool leaves_convolution(const std::string& backend) {
  return leaves_choice(backend) || backend == kBenchmark;
}

// Moments of the result's channels, with their memory.
struct OutputMoments {
  Tensor memory;
  ChannelMoments view;
};

// The batch norm, in training, whose result is a convolution's input, for that one's gradient.
struct NormOfInput {
  Tensor before, statistics;   // what was normalised, and what with
  std::optional<Tensor> mask;  // of batch_norm_act, where there was a residual
  Activation activation;       // a clamp
  Tensor sums;                 // what the gradient's kernel leaves, [c, sets, 2]; or as it was
};

// Of checked arguments.
Conv2dShape conv2d_shape(const Tensor& input, const Tensor& weight, const Conv2dArguments& args);

// moments: nullptr, or filled in where a kernel leaves them (view.sets is not 0 then).
// to_channels_last: the result is channels_last whatever its operands are. relu: max(y, 0) of it,
// not beside moments.
Tensor conv2d_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const Conv2dArguments& args, OutputMoments* moments,
                      bool to_channels_last = false, bool relu = false);

// activation(batch_norm(conv2d(input, weight, bias)) + added) in evaluation mode by one kernel, or
// nothing where there is none for it.
std::optional<Tensor> conv2d_with_tail(const char* op, const Tensor& input, const Tensor& weight,
                                       const std::optional<Tensor>& bias, const Norm& norm,
                                       const std::optional<Tensor>& added,
                                       const Activation& activation, const Conv2dArguments& args);

// The gradients that output_mask asks for, of input, weight and bias; empty tensors for the rest.
// relu_result: of a ReLU behind the convolution, whose result grad_output is the gradient of; or
// nullptr. added: what is added to the input's. norm: where its `sums` are filled in, the input's
// gradient is that before the activation.
std::tuple<Tensor, Tensor, Tensor> conv2d_gradients(const Tensor& grad_output, const Tensor& input,
                                                    const Tensor& weight,
                                                    const Conv2dArguments& args,
                                                    const std::vector<bool>& output_mask,
                                                    const Tensor* relu_result = nullptr,
                                                    const std::optional<Tensor>& added = {},
                                                    NormOfInput* norm = nullptr);

// The same two with all arguments checked, of a convolution (forward: kFprop) or of the transposed
// one of that shape, whose result has the part of x, its input that of y (kDgrad).
Tensor run_conv2d_forward(Conv2dPass forward, const Conv2dShape& shape, const Tensor& input,
                          const Tensor& weight, const std::optional<Tensor>& bias,
                          const std::string& backend, OutputMoments* moments,
                          bool to_channels_last = false, bool relu = false);
std::tuple<Tensor, Tensor, Tensor> run_conv2d_gradients(
    Conv2dPass forward, const Conv2dShape& shape, const Tensor& grad_output, const Tensor& input,
    const Tensor& weight, const std::string& backend, const std::vector<bool>& output_mask,
    const Tensor* relu_result = nullptr, const std::optional<Tensor>& added = {},
    NormOfInput* norm = nullptr);

// Whether a convolution's result is channels_last, as torch has it; else it is contiguous.
bool conv2d_is_channels_last(const Tensor& input, const Tensor& weight);

// That a backward's grad_output fits its input, and is of the forward's shape.
void check_grad_output(const char* op, const Tensor& grad_output, const Tensor& input,
                       const std::vector<int64_t>& expected);

// "[1, 2]"
std::string list_string(const std::vector<int64_t>& values);

}  // namespace braze
