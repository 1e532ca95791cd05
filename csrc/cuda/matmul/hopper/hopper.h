// The Hopper kernels as choose.cu sees them. Each plans where it has no obstacle, and runs as
// planned.
#pragma once

#include "launchers/matmul.h"

namespace braze::cuda::hopper {

// 13_persistent.cuh. Why it cannot take the arguments, or nullptr.
const char* obstacle(const MatmulArgs& args);

// Whether it is the fastest of our own kernels for arguments that it takes. deep_tiles: whether
// mma_sync would use the tiles whose depth several warps share.
bool preferred(const MatmulArgs& args, bool deep_tiles);
// Whether there are so many results that storing them, by TMA, is what counts, however short the
// sums.
bool preferred_for_result(const MatmulArgs& args);

void plan(const MatmulArgs& args, MatmulPlan* plan);
void run(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

// 16_stream_k.cuh, which the plan above takes where it estimates it to be the fastest; run() runs
// either.
const char* stream_k_obstacle(const MatmulArgs& args);
void plan_stream_k(const MatmulArgs& args, MatmulPlan* plan);

// The same for 14_split_fp32.cuh and for 17_scaled_fp16.cuh.
const char* split_obstacle(const MatmulArgs& args);
void plan_split(const MatmulArgs& args, MatmulPlan* plan);
void run_split(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);
bool scaled_preferred(const MatmulArgs& args);
double scaled_microseconds(const MatmulArgs& args);
// Whether it is faster than cuBLAS, whose time on CUDA cores follows from the products (H200).
bool scaled_beats_cublas(const MatmulArgs& args);
void plan_scaled(const MatmulArgs& args, MatmulPlan* plan);
void run_scaled(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

// The same for long_sums.cuh: fp32, long sums of few results. long_microseconds(): estimated for an
// H200.
const char* long_obstacle(const MatmulArgs& args);
double long_microseconds(const MatmulArgs& args);
void plan_long(const MatmulArgs& args, MatmulPlan* plan);
void run_long(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

// The same for simt_tma.cuh: fp32 on CUDA cores.
const char* simt_tma_obstacle(const MatmulArgs& args);
bool simt_tma_preferred(const MatmulArgs& args);
void plan_simt_tma(const MatmulArgs& args, MatmulPlan* plan);
void run_simt_tma(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

// The same for dmma_tma.cuh: fp64.
const char* dmma_tma_obstacle(const MatmulArgs& args);
bool dmma_tma_preferred(const MatmulArgs& args);
void dmma_tma_matmul(Stream stream, const MatmulArgs& args);

// The rungs below; for 16-bit types.
const char* rung_obstacle(const MatmulArgs& args);
void run_wgmma(Stream stream, const MatmulArgs& args);
void run_warp_specialized(Stream stream, const MatmulArgs& args);
void run_cluster(Stream stream, const MatmulArgs& args);

// Says why where !has_wgmma().
constexpr const char* kNeedsHopper =
    "it needs a GPU of compute capability 9.0, and code made for sm_90a";

}  // namespace braze::cuda::hopper
