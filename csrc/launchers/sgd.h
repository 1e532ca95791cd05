#pragma once

#include "launchers/common/update.h"

namespace braze {

using SgdTensor = UpdateTensor<1>;  // the momentum buffer, if there is momentum

struct SgdOptions : UpdateOptions {
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool first_step;         // momentum buffers are written, not read
  const float* unwritten;  // where it is not 0, as first_step; or null
};

// torch.optim.SGD's, of a gradient g that has its sign and scale:
//   g += weight_decay p
//   m = first_step or unwritten ? g : momentum m + (1 - dampening) g
//   p -= lr (no momentum ? g : nesterov ? g + momentum m : m)
template <typename A>
struct SgdUpdate {
  static constexpr int kStates = 1;
  static constexpr unsigned kOptional = 1;
  static constexpr bool kCountsSteps = false;
  static constexpr bool kReadsStep = false;
  static constexpr bool kReadsParam = true;

  A lr, momentum, kept, weight_decay;
  bool nesterov, first_step;

  BRAZE_BOTH SgdUpdate(const SgdOptions& o, double)
      : momentum(static_cast<A>(o.momentum)),
        kept(static_cast<A>(1 - o.dampening)),
        weight_decay(static_cast<A>(o.weight_decay)),
        nesterov(o.nesterov),
        first_step(o.first_step || (o.unwritten != nullptr && *o.unwritten != 0.0f)) {}

  BRAZE_BOTH void set_rate(double rate) { lr = static_cast<A>(rate); }
  BRAZE_BOTH bool reads_states() const { return !first_step; }

  BRAZE_BOTH void operator()(A& p, A g, A (&states)[kStates], unsigned has) const {
    g = weight_decay != A(0) ? multiply_add(weight_decay, p, g) : g;
    if (has) {
      const A m = first_step ? g : multiply_add(momentum, states[0], kept * g);
      states[0] = m;
      g = nesterov ? multiply_add(momentum, m, g) : m;
    }
    p = multiply_add(-lr, g, p);
  }
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// SgdUpdate of `count` tensors of one dtype. 16-bit parameters are computed in float32 and rounded
// once.
void sgd(Stream stream, DType dtype, const SgdTensor* tensors, int64_t count,
         const SgdOptions& options);

}  // namespace braze::BRAZE_DEVICE
