// Rung 3: rung 2 with one unused element at the end of each row of the tile.
//
// Rows are now 33 elements apart in shared memory, so that a column's 32 elements lie in 32
// different banks (of 2-byte elements two share a bank's word at most, of 8-byte ones half a warp
// takes all banks): the load is one pass, as the store is. All that remains is how little each
// access moves: 64 bytes a warp for 2-byte elements, and one element a thread at a time.
#pragma once

#include "02_shared_tile.cuh"

namespace braze::cuda::transpose_ladder {

template <typename T>
void run_padded(Stream stream, const Matrices<T>& m) {
  run_small_tiles<kSmallTile + 1>(stream, m);
}

}  // namespace braze::cuda::transpose_ladder
