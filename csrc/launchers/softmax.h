#pragma once

#include "launchers/common/registry.h"
#include "launchers/common/row_shape.h"
#include "launchers/common/types.h"

namespace braze::BRAZE_DEVICE {

// y = softmax(x) along each row, or its logarithm. The result's dtype is the input's, or float32
// for a 16-bit input. A row that is all -inf, or holds +inf or NaN, gives NaN. x may equal y where
// the dtypes agree.
void softmax(Stream stream, DType input_dtype, DType result_dtype, bool log, const RowShape& shape,
             const void* x, void* y);

// The kernels of softmax's forward pass: the rungs of the ladder, where the device has one, and
// what ships. nullptr beyond the last.
const KernelInfo* softmax_rung_info(int number);

// softmax(), not its logarithm, by the kernel of that number, or kAnyKernel. Throws where the
// kernel does not take the arguments.
void softmax_rung(Stream stream, DType input_dtype, DType result_dtype, const RowShape& shape,
                  const void* x, void* y, int kernel);

// softmax: dx = y * (dy - sum(dy * y)); log_softmax: dx = dy - exp(y) * sum(dy). dy and y have the
// result's dtype, dx the input's.
void softmax_backward(Stream stream, DType input_dtype, DType result_dtype, bool log,
                      const RowShape& shape, const void* dy, const void* y, void* dx);

}  // namespace braze::BRAZE_DEVICE
