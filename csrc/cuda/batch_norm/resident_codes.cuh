// The activations of the kernels that make a whole training pass: resident.cuh and held.cuh.
#pragma once

#include "cuda/common/activate.cuh"

namespace braze::cuda {

// Calls f(code) for the activations that have such kernels; returns whether it has.
template <typename F>
bool with_resident_code(const Activation& activation, const F& f) {
  if (!activation.smooth()) {
    f(std::integral_constant<ActivationCode, ActivationCode::kClamp>{});
  } else if (activation.kind == ActivationKind::kSiLU) {
    f(std::integral_constant<ActivationCode, ActivationCode::kSiLU>{});
  } else if (activation.kind == ActivationKind::kGELU) {
    f(std::integral_constant<ActivationCode, ActivationCode::kGELU>{});
  } else if (activation.kind == ActivationKind::kHardswish) {
    f(std::integral_constant<ActivationCode, ActivationCode::kHardswish>{});
  } else {
    return false;
  }
  return true;
}

}  // namespace braze::cuda
