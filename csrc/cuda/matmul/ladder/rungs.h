// The ladder's rungs below the Hopper ones, as choose.cu sees them: one file each, 01 to 09, which
// rungs.cu compiles.
#pragma once

#include "launchers/matmul.h"

namespace braze::cuda::ladder {

// On CUDA cores; the first two have 64-bit indices and so no limit at all.
void run_naive(Stream stream, const MatmulArgs& args);
void run_coalesced(Stream stream, const MatmulArgs& args);
void run_shared_tile(Stream stream, const MatmulArgs& args);
void run_register_tile_1d(Stream stream, const MatmulArgs& args);
void run_register_tile_2d(Stream stream, const MatmulArgs& args);

// float32 only
void run_vectorized(Stream stream, const MatmulArgs& args);
void run_warp_tile(Stream stream, const MatmulArgs& args);
void run_double_buffered(Stream stream, const MatmulArgs& args);

// What the tensor cores take: bfloat16, float16, and float32 as TF32.
void run_wmma(Stream stream, const MatmulArgs& args);

}  // namespace braze::cuda::ladder
