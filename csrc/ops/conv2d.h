// conv2d's front end as ops that fuse it call it.
#pragma once

#include "launchers/conv2d.h"
#include "ops/common.h"

namespace braze {

// Everything but the tensors.
struct Conv2dArguments {
  const std::vector<int64_t>&stride, &padding, &dilation;
  int64_t groups;
  bool allow_tf32, deterministic;
  const std::string& backend;
};

// Moments of the result's channels, with their memory.
struct OutputMoments {
  Tensor memory;
  ChannelMoments view;
};

// moments: nullptr, or filled in where a kernel leaves them (view.sets is not 0 then).
Tensor conv2d_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const Conv2dArguments& args, OutputMoments* moments);

// The gradients that output_mask asks for, of input, weight and bias; empty tensors for the rest.
std::tuple<Tensor, Tensor, Tensor> conv2d_gradients(const Tensor& grad_output, const Tensor& input,
                                                    const Tensor& weight,
                                                    const Conv2dArguments& args,
                                                    const std::vector<bool>& output_mask);

}  // namespace braze
