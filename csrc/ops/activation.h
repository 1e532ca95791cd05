// How ops name an activation, with up to two settings.
#pragma once

#include "launchers/common/activation.h"
#include "ops/common.h"

namespace braze {

struct ActivationName {
  const char* name;
  ActivationKind kind;
};
// Those that take their settings as they are, "hardtanh" its bounds.
constexpr ActivationName kActivationNames[] = {
    {"hardtanh", ActivationKind::kClamp},
    {"leaky_relu", ActivationKind::kLeakyReLU},
    {"silu", ActivationKind::kSiLU},
    {"gelu", ActivationKind::kGELU},
    {"gelu_tanh", ActivationKind::kGELUTanh},
    {"hardswish", ActivationKind::kHardswish},
    {"hardsigmoid", ActivationKind::kHardsigmoid},
    {"sigmoid", ActivationKind::kSigmoid},
    {"tanh", ActivationKind::kTanh},
    {"elu", ActivationKind::kELU},
    {"mish", ActivationKind::kMish},
};

inline Activation activation_of(const char* op, const std::string& name, double first,
                                double second) {
  if (name == "relu") return kReLU;
  if (name == "identity") return kIdentity;
  std::string names = "identity, relu";
  for (const ActivationName& known : kActivationNames) {
    if (name == known.name) return {known.kind, first, second};
    names += std::string(", ") + known.name;
  }
  BRAZE_CHECK(false, op, ": expected activation to be one of ", names, ", but got ", name);
  return kIdentity;  // not reached
}

}  // namespace braze
