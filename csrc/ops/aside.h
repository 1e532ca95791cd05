// Gradients of parameters made beside the rest of a backward pass: nothing needs them before the
// update. Within the scope that braze::open_aside begins, the ops that make them launch on the
// branch of dev::fork_aside(), and braze::join_aside waits for it.
#pragma once

#include "launchers/graph.h"
#include "ops/common.h"

namespace braze {

// What a branch reads or works in stays allocated until the join, and what it makes is on record:
// whoever reads that earlier reads it unfinished. Undefined tensors may be among `read`.
void keep_aside(const std::vector<Tensor>& read, const std::vector<Tensor>& made);

}  // namespace braze
