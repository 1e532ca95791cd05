#pragma once

#include "launchers/common/types.h"
#include "launchers/softmax.h"

namespace braze {

// torch's numbers for reduction="none", "mean" and "sum".
enum class Reduction : int64_t { kNone, kMean, kSum };
enum class TargetKind { kInt64, kUint8, kProbability };

struct LossArgs {
  DType dtype;         // of input, gradients and a probability target
  bool loss_is_acc;    // loss and grad_output in float32 for a 16-bit dtype; else in dtype
  RowShape shape;      // rows along the class dimension
  const void* input;   // logits, or log-probabilities for nll_loss
  const void* target;  // a label per row, or probabilities laid out as the input
  TargetKind target_kind;
  const void* weight;  // per class, float64 for a float64 dtype, else float32; or null
  Reduction reduction;
  int64_t ignore_index;
  double label_smoothing;
};

struct LabelError {
  bool raised;
  int64_t label;
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// With p = softmax(x) and the row's target distribution
//   q_c = w_c ((1 - s) t_c + s / C)             probabilities t, label smoothing s
//   q_c = (1 - s) w_y [c = y] + w_c s / C       label y (q = 0 where it is to be ignored)
// the loss of a row is -sum(q_c log p_c); mean divides by the number of rows, or by the sum of w_y
// over the rows that are not ignored. `stats` keeps, for backward, three arrays with an element per
// row: max(x), sum(exp(x - max(x))), sum(q). `total_weight` is mean's divisor. Both are of the
// accumulation type (float64 or float32). unit_grad, unless null, is for a reduced loss: it gets
// the gradient of the logits that belongs to a grad_output of 1, which costs less here than later.
//
// A label that is neither in range nor ignored: the CPU throws before anything is written; CUDA
// makes the row's loss NaN and its gradient zero, and keeps the first such label for
// take_label_error. Rows are summed in float64, in the same order in every run.
void cross_entropy(Stream stream, const LossArgs& args, void* loss, void* stats, void* total_weight,
                   void* unit_grad, void* workspace);

// dx_c = g (sum(q) p_c - q_c), dt_c = -g w_c (1 - s) log p_c; grad_target may be null, and so may
// grad_output, for 1, of a reduced loss.
void cross_entropy_backward(Stream stream, const LossArgs& args, const void* grad_output,
                            const void* stats, const void* total_weight, void* grad_input,
                            void* grad_target);

// The same with log p = x given, labels only and no smoothing.
void nll_loss(Stream stream, const LossArgs& args, void* loss, void* total_weight, void* workspace);
void nll_loss_backward(Stream stream, const LossArgs& args, const void* grad_output,
                       const void* total_weight, void* grad_input);

// For cross_entropy and nll_loss; 0 where none is needed.
int64_t loss_workspace_bytes(const LossArgs& args);

// Whether a label was out of range on the current device since the last call, and which; waits for
// the device.
LabelError take_label_error();

}  // namespace braze::BRAZE_DEVICE
