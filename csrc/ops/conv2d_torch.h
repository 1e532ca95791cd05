// A pass of a convolution by torch's own CPU kernels (oneDNN's): the vendor of a CPU.
#pragma once

#include <vector>

#include "launchers/conv2d.h"
#include "ops/common.h"

namespace braze {

// Shape and strides of a result without memory. Else what torch allocates would come beside it, and
// the allocator would give back the one after the other.
Tensor blank_4d(const std::vector<int64_t>& nchw, const Tensor& like, bool channels_last);
// The same with memory.
Tensor filled_in(const Tensor& blank);
inline bool is_blank(const Tensor& t) { return t.numel() > 0 && !t.const_data_ptr(); }

// bias: of fprop's results, or nullptr. result: may be blank; where torch's own tensor has the same
// strides, that takes its place.
void run_conv2d_by_torch(const Conv2dProblem& problem, const void* bias, Tensor& result);

}  // namespace braze
