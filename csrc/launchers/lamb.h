#pragma once

#include "launchers/common/update.h"

namespace braze {

using LambTensor = UpdateTensor<2>;  // exp_avg, exp_avg_sq

struct LambOptions : UpdateOptions {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double min_norm;  // the bounds of phi
  double max_norm;
  double* sums;    // workspace: two for each of lamb_workspace() parts
  double* ratios;  // workspace: one for each tensor
};

// You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (2020),
// algorithm 2, of a gradient g that has its sign and scale, at step t, for each parameter by
// itself:
//   m += (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
//   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
//   p -= lr phi(|p|) / |u| u,  phi(z) = min(max(z, min_norm), max_norm)
// where the ratio is 1 if |p| or |u| is 0.
template <typename A>
struct LambUpdate {
  A bias1, root_bias2, rest1, beta2, rest2, eps, weight_decay;

  BRAZE_BOTH LambUpdate(const LambOptions& o, double step)
      : bias1(static_cast<A>(1 - std::pow(o.beta1, step))),
        root_bias2(static_cast<A>(std::sqrt(1 - std::pow(o.beta2, step)))),
        rest1(static_cast<A>(1 - o.beta1)),
        beta2(static_cast<A>(o.beta2)),
        rest2(static_cast<A>(1 - o.beta2)),
        eps(static_cast<A>(o.eps)),
        weight_decay(static_cast<A>(o.weight_decay)) {}

  BRAZE_BOTH void moments(A g, A& m, A& v) const {
    m = lerp(m, g, rest1);
    v = multiply_add(beta2, v, rest2 * g * g);
  }
  BRAZE_BOTH A direction(A p, A m, A v) const {
    return multiply_add(weight_decay, p, m / bias1 / (std::sqrt(v) / root_bias2 + eps));
  }
};

BRAZE_BOTH double lamb_ratio(const LambOptions& o, double param_squares, double update_squares) {
  const double norm = std::sqrt(param_squares), update = std::sqrt(update_squares);
  if (norm == 0 || update == 0) return 1;
  const double phi = norm < o.min_norm ? o.min_norm : norm > o.max_norm ? o.max_norm : norm;
  return phi / update;
}

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// Parts of these tensors, each of which leaves two sums.
int64_t lamb_workspace(const LambTensor* tensors, int64_t count);

// LambUpdate of `count` tensors of one dtype: a pass that leaves the norms, which the update needs
// whole, and another one that updates. 16-bit parameters are computed in
// float32 and rounded once; norms are added up in a fixed order.
void lamb(Stream stream, DType dtype, const LambTensor* tensors, int64_t count,
          const LambOptions& options);

}  // namespace braze::BRAZE_DEVICE
