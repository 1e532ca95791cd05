// What choose.cu has to choose from below the Hopper kernels (hopper/hopper.h) and the rungs
// (ladder/rungs.h). Each kernel plans where it has no obstacle, and runs as planned.
#pragma once

#include <climits>

#include "launchers/matmul.h"

namespace braze::cuda {

// Products that are done before a pipeline has filled: of a matrix and a vector (gemv.cu), and of
// little depth (thin.cu; outer.cu: of depth 1). All are short code that asks for all of its memory
// at once.
const char* gemv_obstacle(const MatmulArgs& args);
bool prefers_gemv(const MatmulArgs& args);  // where there is no obstacle
void gemv_matmul(Stream stream, const MatmulArgs& args);

const char* thin_obstacle(const MatmulArgs& args);
bool prefers_thin(const MatmulArgs& args);  // where there is no obstacle
void thin_matmul(Stream stream, const MatmulArgs& args);

const char* outer_obstacle(const MatmulArgs& args);
bool prefers_outer(const MatmulArgs& args);  // where there is no obstacle
void outer_matmul(Stream stream, const MatmulArgs& args);

// CUDA cores, fp32. simt_microseconds(): estimated for an H200, where tiles are large; 0 where they
// are not.
double simt_microseconds(const MatmulArgs& args);
void plan_simt(const MatmulArgs& args, MatmulPlan* plan);
void run_simt(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

// Tensor cores (mma.sync). prefers_deep_tiles(): whether C is so small and deep that the depth of a
// tile is shared out to warps.
bool prefers_deep_tiles(const MatmulArgs& args);
const char* mma_sync_obstacle(const MatmulArgs& args);
void plan_mma_sync(const MatmulArgs& args, MatmulPlan* plan);
void run_mma_sync(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

// The same for fp32 in two parts of TF32. CUDA cores lose to it from sums of kLongSplitSum products
// on.
constexpr int64_t kLongSplitSum = 1536;
const char* mma_split_obstacle(const MatmulArgs& args);
void plan_mma_split(const MatmulArgs& args, MatmulPlan* plan);
void run_mma_split(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace);

}  // namespace braze::cuda
