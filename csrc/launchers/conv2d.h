#pragma once

#include "launchers/common/activation.h"
#include "launchers/common/moments.h"
#include "launchers/common/registry.h"
#include "launchers/common/tiling.h"
#include "launchers/common/types.h"
#include "launchers/matmul.h"

namespace braze {

// A 4-D tensor addressed by strides counted in elements. Dense NCHW and dense NHWC are the fast
// cases; any positive strides are correct.
struct Tensor4dRef {
  const void* data;
  int64_t n, c, h, w;  // strides
};

// y[n, k, p, q] = bias[k] + sum over c, r, s of
//     x[n, group * C/groups + c, p * stride_h - pad_h + r * dilation_h, ...] * w[k, c, r, s]
// Names as in the literature: input N C H W, filter K C/groups R S, output N K P Q.
struct Conv2dShape {
  DType dtype;
  int64_t n, c, h, w;  // input extents
  int64_t k, r, s;     // filters, filter height and width
  int64_t p, q;        // output height and width
  int64_t stride_h, stride_w;
  int64_t pad_h, pad_w;  // at the top and at the left; the bottom and right follow from p and q
  int64_t dilation_h, dilation_w;
  int64_t groups;
  bool allow_tf32;             // fp32 inputs may be rounded to TF32
  bool deterministic;          // measured kernel choices are ignored
  bool wants_moments = false;  // of fprop's result, which some kernels leave at less than a pass
};

// Which of the three products: y from x and w, x's gradient from those of y and w, w's from those
// of y and x.
enum class Conv2dPass { kFprop, kDgrad, kWgrad };

// A pass over tensors in the roles that Conv2dShape's formula gives them. The data pointer of the
// result (y, x or w) is written in full and never read.
struct Conv2dProblem {
  Conv2dPass pass;
  Conv2dShape shape;
  Tensor4dRef x, w, y;

  const Tensor4dRef& result() const {
    return pass == Conv2dPass::kFprop ? y : pass == Conv2dPass::kDgrad ? x : w;
  }
};

// Batch norm in evaluation mode and what follows it, on the way out of fprop:
//     activation(batch_norm(y + bias) + added).
struct Conv2dTail {
  const void *weight, *bias;  // of batch norm, [k], or nullptr
  DType affine;               // their dtype
  const void *mean, *var;     // [k]
  DType statistics;
  double eps;
  const void* conv_bias;  // [k] of the result's dtype, or nullptr
  const void* added;      // laid out as the result, aligned to 16 bytes, or nullptr
  Activation activation;
};

// What fprop does to its results before it stores them, and takes down about them.
struct Conv2dEpilogue {
  const void* bias = nullptr;  // of the result's channels, where the plan adds_bias
  bool relu = false;           // max(y, 0) after the bias, where it applies_relu; NaN stays NaN
  Moments* moments = nullptr;  // room for the plan's moment_sets (not 0) of them for each filter
  const Conv2dTail* tail = nullptr;  // in the place of all of these, by a plan_conv2d_tail()
};

// All that is decided about a pass before it runs. It holds for every problem of the same shape and
// strides whose tensors are aligned alike, on the same device (on the CPU: for as many threads).
struct Conv2dPlan {
  int kernel = 0;                  // its number
  const char* obstacle = nullptr;  // why it cannot take the problem; nullptr where it can
  int64_t workspace_bytes = 0;
  int64_t images = 0;         // of the batch, for one run of the kernel
  int wish = kAnyKernel;      // that the plan was made for
  int moment_sets = 0;        // that fprop leaves of each filter's results; 0: none. By a
                              // plan_conv2d_norm_grad(): sets of sums of each channel's gradients
  bool adds_bias = true;      // if it is given one; always for fprop
  bool applies_relu = false;  // if it is asked to; of fprop only
  // Measured rules, where any kernel would do: whether this one is faster than the vendor's
  // library, whether it is where moments are wanted, and whether it is worth transposing contiguous
  // tensors for, to channels_last and back.
  bool beats_library = false, beats_library_with_moments = false, pays_transposes = false;
  bool by_fft = false;  // it is csrc/ops/conv2d_fft.cpp that runs it, in the place of run_conv2d
  Tiling tiling;
  int variant = 0;     // of a kernel that has several: its tile's number
  MatmulPlan product;  // of a kernel that has a matrix product do the work
};

namespace BRAZE_DEVICE {

// The kernel of that number, or nullptr beyond the last.
const KernelInfo* conv2d_kernel(int number);

// kernel: a number, or kAnyKernel.
Conv2dPlan plan_conv2d(const Conv2dProblem& problem, int kernel);

void run_conv2d(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                const Conv2dEpilogue& epilogue, void* workspace);

// out[k] = sum over n, p, q of dy[n, k, p, q]: the bias gradient. Deterministic.
int64_t channel_sum_workspace_bytes(DType dtype, int64_t n, int64_t c, int64_t h, int64_t w);
void channel_sum(Stream stream, DType dtype, int64_t n, int64_t c, int64_t h, int64_t w,
                 const Tensor4dRef& dy, void* out, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
