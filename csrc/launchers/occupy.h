#pragma once

#include "launchers/common/types.h"

#ifdef BRAZE_CUDA
namespace braze::cuda {

// Keeps a stream busy for so many microseconds with one thread, so that what is measured behind it
// has been enqueued when its turn comes: else the time of short kernels is that of their launches.
void occupy(Stream stream, int microseconds);

}  // namespace braze::cuda
#endif
