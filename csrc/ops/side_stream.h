// Gradients of parameters made concurrently with the rest of a backward pass: nothing needs them
// before the update. Within the scope that braze::open_side_stream begins, the ops that make them
// launch on the stream of dev::fork_side_stream(), and braze::join_side_stream waits for it.
#pragma once

#include "launchers/graph.h"
#include "ops/common.h"

namespace braze {

// What a side stream reads or works in stays allocated until it has been read: until the join, or,
// where that comes to many bytes, until the main stream has waited for it. What it makes is on
// record as pending up to the join: whoever reads that earlier reads it unfinished. Undefined
// tensors may be among `read`.
void keep_until_join(const std::vector<Tensor>& read, const std::vector<Tensor>& made);

// Takes what is read on the side stream, behind what makes it there, off that record. `made`: the
// whole of it, unchanged since.
void forget_made(const Tensor& made);

// What the ops on a side stream of `main` work in, one after the other: at least so many bytes that
// one of them has left there since the last join, for the next; undefined where there are none.
// `memory` may be undefined.
Tensor side_stream_workspace(Stream main, bool urgent, int64_t bytes, const Tensor& like);
void keep_workspace(Stream main, bool urgent, const Tensor& memory);

}  // namespace braze
