// Lists of tensors to cast, checked.
#pragma once

#include "launchers/cast.h"
#include "ops/common.h"

namespace braze {

struct Casts {
  DType from{}, to{};
  std::vector<CastTensor> tensors;
};

// outputs and inputs: dense, one dtype each, pairwise the same shape and strides.
Casts checked_casts(const char* op, const std::vector<Tensor>& outputs,
                    const std::vector<Tensor>& inputs);

}  // namespace braze
