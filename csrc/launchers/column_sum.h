// column_sum (launchers/matmul.h) in two steps, of which the second, of small size, may be given to
// another stream.
#pragma once

#include "launchers/matmul.h"

namespace braze::BRAZE_DEVICE {

// Everything, unless it takes a workspace: then `out` is still to be added up from what is in that.
void begin_column_sum(Stream stream, const ColumnSumArgs& args, void* workspace);
void finish_column_sum(Stream stream, const ColumnSumArgs& args, void* workspace);

}  // namespace braze::BRAZE_DEVICE
