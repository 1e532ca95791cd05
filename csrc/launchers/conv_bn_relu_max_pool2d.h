// conv2d + batch norm + ReLU + 2x2 max pool for convolutions with few inputs per output
// (K = C*R*S up to 32: a network's first block), whose input needs no gradient.
//
// The convolution output never reaches memory. Batch norm's statistics follow from the moments of
// the input patches: with p the K-vector under a filter, s = mean(p) and C = cov(p), channel k has
// mean W_k.s and variance W_k' C W_k. In the backward pass, with g the pooled gradient where the
// pooled output is positive and p* the patch at the window's maximum, Q_k = sum(g p*) and
// S1_k = sum(g) give
//     dbeta = S1,  dgamma = S2 = rstd (W.Q - m S1),
//     dW = gamma rstd (Q - S1 s - S2 rstd C W).
// s, C, Q and S1 are accumulated in fp64: in fp32 the conditioning would be squared.
#pragma once

#include "launchers/common/types.h"

namespace braze {

// Stride 1, dilation 1, one group. Pooling 2x2, stride 2, no padding: pooled extents are p/2, q/2.
struct SmallKShape {
  DType dtype;
  int64_t n, c, h, w;          // input extents
  int64_t x_n, x_c, x_h, x_w;  // input strides, in elements
  int64_t k, r, s;             // filters, filter height and width
  int64_t pad_h, pad_w;
  int64_t p, q;        // convolution output extents
  bool channels_last;  // layout of the pooled output and of its gradient
  bool allow_tf32;     // fp32 may be multiplied as TF32
};

// The filters that CUDA has kernels for, which are those that Python sends here.
struct SmallKFilter {
  int r, s, c;
};
constexpr SmallKFilter kSmallKFilters[] = {{3, 3, 1}, {3, 3, 2}, {3, 3, 3}, {5, 5, 1}};

// Parameters and statistics of the batch norm; pointers may be null where noted.
struct SmallKNorm {
  const void* conv_bias;  // [k] or null
  const void* gamma;      // [k] or null
  const void* beta;       // [k] or null
  void* running_mean;     // [k] or null; updated in training
  void* running_var;      // [k] or null; updated in training
  int64_t* batches;       // num_batches_tracked or null; incremented in training, if `cumulative`
                          // where the moments are summed
  DType param_dtype;      // of gamma, beta and the running statistics
  bool training;          // false: normalise with the running statistics
  bool cumulative;        // momentum=None: average over all batches seen; needs `batches`
  double momentum, eps;
};

// What forward leaves for backward, all fp64: patch mean s [K], patch covariance C [K*K], then per
// filter the mean and the reciprocal standard deviation [2*k].
inline int64_t small_k_saved_size(const SmallKShape& a) {
  const int64_t kk = a.c * a.r * a.s;
  return kk + kk * kk + 2 * a.k;
}

// Sums over the input patches p of p_i and of p_i p_j (j >= i), in fp64, in sets that add up to
// them: [kSmallKMostSets][small_k_moments]. Which of the sets there are is the device's own affair.
constexpr int64_t kSmallKMostSets = 512;
inline int64_t small_k_moments(const SmallKShape& a) {
  const int64_t taps = a.c * a.r * a.s;
  return taps + taps * (taps + 1) / 2;
}

// A code per pooled element, for backward: the position of the maximum in the window, and whether
// ReLU stops the gradient. Eight filters to a word, [n * p/2 * q/2][ceil(k / 8)]; a word of
// the CPU holds eight 4-bit codes, one of CUDA what cuda/conv_bn_relu_max_pool2d/small_k.cuh says
// (_unpack() in python/braze/_ops/fused.py reads both).
inline int64_t small_k_code_words(const SmallKShape& a) {
  return a.n * (a.p / 2) * (a.q / 2) * ceil_div(a.k, 8);
}

namespace BRAZE_DEVICE {

// Whether there is a kernel for these filter extents.
bool small_k_supports(const SmallKShape& shape);

// Also adds one to *batches, where it is not null.
void small_k_sum_moments(Stream stream, const SmallKShape& shape, const void* x, double* moments,
                         int64_t* batches);

// x, w: the input and the dense [k][c][r][s] weight in shape.dtype. moments: of x; read in training
// only. y: the pooled output. codes: small_k_code_words. saved: small_k_saved_size doubles.
void small_k_forward(Stream stream, const SmallKShape& shape, const SmallKNorm& norm, const void* x,
                     const void* w, const double* moments, void* y, uint32_t* codes, double* saved);

int64_t small_k_backward_workspace_bytes(const SmallKShape& shape);

// dy: gradient of the pooled output, in its layout. dw: [k][c][r][s] in shape.dtype. dgamma, dbeta
// [k] in norm.param_dtype, dbias [k] in shape.dtype; each may be null.
void small_k_backward(Stream stream, const SmallKShape& shape, const SmallKNorm& norm,
                      const void* x, const void* w, const void* dy, const uint32_t* codes,
                      const double* saved, void* dw, void* dgamma, void* dbeta, void* dbias,
                      void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
