// The activations of the kernels that make a whole training pass: held.cuh, and of channels_last
// tensors resident.cuh and held_rows.cuh.
//
// LeakyReLU, which networks have in channels_last more than in contiguous tensors, is among those
// of the latter alone: each code inline is two more kernels of every type and vector width.
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

// The same for channels_last tensors.
template <typename F>
bool with_ring_code(const Activation& activation, const F& f) {
  if (activation.kind != ActivationKind::kLeakyReLU) return with_resident_code(activation, f);
  f(std::integral_constant<ActivationCode, ActivationCode::kLeakyReLU>{});
  return true;
}

}  // namespace braze::cuda
