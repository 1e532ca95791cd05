// Lists of tensors to cast, checked.
#pragma once

#include "launchers/cast.h"
#include "ops/common.h"

namespace braze {

struct Casts {
  DType from{}, to{};
  std::vector<CastTensor> tensors;
};

// Throws unless the output is dense and has the shape, the strides and the device of the input.
void check_cast(const char* op, const Tensor& output, const Tensor& input);

// outputs and inputs: dense, one dtype each, pairwise the same shape and strides.
Casts checked_casts(const char* op, const std::vector<Tensor>& outputs,
                    const std::vector<Tensor>& inputs);

}  // namespace braze
