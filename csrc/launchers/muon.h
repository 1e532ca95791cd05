#pragma once

#include "launchers/common/update.h"

namespace braze {

using MuonTensor = UpdateTensor<1>;  // the momentum buffer; the parameter is what to orthogonalise

struct MuonOptions : UpdateOptions {
  double momentum;
  bool nesterov;
};

// torch.optim.Muon's momentum, of a gradient g that has its sign and scale:
//   m += (1 - momentum) (g - m),  u = nesterov ? g + momentum (m - g) : m
template <typename A>
struct MuonUpdate {
  static constexpr int kStates = 1;
  static constexpr unsigned kOptional = 0;
  static constexpr bool kCountsSteps = false;
  static constexpr bool kReadsStep = false;

  A momentum, rest;
  bool nesterov;

  BRAZE_BOTH MuonUpdate(const MuonOptions& o, double)
      : momentum(static_cast<A>(o.momentum)),
        rest(static_cast<A>(1 - o.momentum)),
        nesterov(o.nesterov) {}

  BRAZE_BOTH void set_rate(double) {}
  BRAZE_BOTH bool reads_states() const { return true; }

  BRAZE_BOTH void operator()(A& u, A g, A (&states)[kStates], unsigned) const {
    const A m = lerp(states[0], g, rest);
    states[0] = m;
    u = nesterov ? lerp(g, m, momentum) : m;
  }
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// MuonUpdate of `count` tensors of one dtype.
void muon_momentum(Stream stream, DType dtype, const MuonTensor* tensors, int64_t count,
                   const MuonOptions& options);

// square = a I + b gram + c square, for `batch` contiguous n x n matrices: the polynomial of a
// Newton-Schulz iteration, rounded once.
void muon_polynomial(Stream stream, DType dtype, const void* gram, void* square, int64_t batch,
                     int64_t n, double a, double b, double c);

}  // namespace braze::BRAZE_DEVICE
