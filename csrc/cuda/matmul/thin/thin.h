// Products that are done before a pipeline has filled: of a matrix and a vector (gemv.cu), and of
// little depth (thin.cu; outer.cu: of depth 1). All are short code that asks for all of its memory
// at once.
#pragma once

#include "launchers/matmul.h"

namespace braze::cuda {

const char* gemv_obstacle(const MatmulArgs& args);
bool prefers_gemv(const MatmulArgs& args);  // where there is no obstacle
void gemv_matmul(Stream stream, const MatmulArgs& args);

const char* thin_obstacle(const MatmulArgs& args);
bool prefers_thin(const MatmulArgs& args);  // where there is no obstacle
void thin_matmul(Stream stream, const MatmulArgs& args);

const char* outer_obstacle(const MatmulArgs& args);
bool prefers_outer(const MatmulArgs& args);  // where there is no obstacle
void outer_matmul(Stream stream, const MatmulArgs& args);

}  // namespace braze::cuda
