#pragma once

#include "launchers/common/update.h"

namespace braze {

using MuonTensor = UpdateTensor<1>;  // the momentum buffer; the parameter is what to orthogonalise

struct MuonOptions : UpdateOptions {
  double momentum;
  bool nesterov;
  double* squares;  // muon_squares() sums for each tensor, one behind the other; or null
};

// How many sums of squares are left of a tensor to orthogonalise, each of so many elements.
constexpr int64_t kMuonSquares = 2048;
inline int64_t muon_squares(int64_t numel) { return ceil_div(numel, kMuonSquares); }

// torch.optim.Muon's momentum, of a gradient g that has its sign and scale:
//   m += (1 - momentum) (g - m),  u = nesterov ? g + momentum (m - g) : m
template <typename A>
struct MuonUpdate {
  static constexpr int kStates = 1;
  static constexpr unsigned kOptional = 0;
  static constexpr bool kCountsSteps = false;
  static constexpr bool kReadsStep = false;
  // A parameter is what to orthogonalise, which is written only.
  static constexpr bool kReadsParam = false;
  static constexpr bool kSumsSquares = true;

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

// A matrix that is written in 16 bits with zeros around it, or without those that were around it.
struct MuonMatrix {
  const void* from;  // rows x columns elements, rows from_pitch apart
  void* to;          // rows to_pitch apart
  int64_t rows, columns, from_pitch, to_pitch;
  int64_t numel;          // of `to`, with what is around the matrix: whole rows
  const double* squares;  // `parts` sums, which together are the sum of all squares; or null
  int64_t parts;
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

// to = from / max(norm, eps) for `count` matrices of one dtype, and zeros around them. The norm is
// the root of all `squares`, added in a fixed order, in the dtype of the division, which is
// float32 for 16-bit matrices; its quotient is rounded to `to`, bfloat16 or float16.
void muon_normalize(Stream stream, DType dtype, DType to, const MuonMatrix* matrices, int64_t count,
                    double eps);

// to = from for `count` matrices in bfloat16 or float16.
void muon_unpad(Stream stream, DType dtype, const MuonMatrix* matrices, int64_t count);

}  // namespace braze::BRAZE_DEVICE
