// All gradients of a linear layer of few outputs and many rows, for a GPU: a classifier's last.
#pragma once

#include "launchers/common/types.h"

namespace braze {

// dx = dy w, dw = dy^T x, and the column sums of dy. All dense and row-major: x and dx
// [rows][columns], dy [rows][outputs], w and dw [outputs][columns].
struct NarrowLinearGradArgs {
  DType dtype;
  int64_t rows, columns, outputs;
  const void *x, *dy, *w;
  void *dx, *dw;
  void* bias;  // or nullptr
};

namespace BRAZE_DEVICE {

// Whether the kernel takes the problem and was measured ahead of a product after the other.
bool narrow_linear_gradients_pay(const NarrowLinearGradArgs& args);

// What follows asks for that.
int64_t narrow_linear_gradients_workspace_bytes(const NarrowLinearGradArgs& args);

// dx; of the others the workspace has parts then.
void narrow_linear_gradients(Stream stream, const NarrowLinearGradArgs& args, void* workspace);

// The others, deterministic: parts are added up in a fixed order.
void finish_narrow_linear_gradients(Stream stream, const NarrowLinearGradArgs& args,
                                    void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
