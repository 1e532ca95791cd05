// Rung 5: rung 4 with 16 bytes a load and a store, where rows are multiples of that.
//
// 4 elements in float32, 8 in 16 bits, for the instructions of one; a warp has 512 bytes in flight
// instead of 64 to 256. The online sum gains too: the maximum of a vector is found first, and the
// sum is rescaled once for it, 9 exponentials for 8 elements where rung 4 has 16. Rows of other
// lengths, or at other addresses, go one element at a time, as on rung 4.
#pragma once

#include "04_online.cuh"

namespace braze::cuda::softmax_ladder {

// Whether all rows begin at multiples of 16 bytes and are as long.
template <typename T>
bool takes_vectors(const Rows<T>& m) {
  return m.size % kVecWidth<T> == 0 && is_vec_aligned(m.x) && is_vec_aligned(m.y);
}

template <typename T>
void run_vectorized(Stream stream, const Rows<T>& m) {
  if (takes_vectors(m)) {
    run_online_by<kVecWidth<T>>(stream, m);
  } else {
    run_online_by<1>(stream, m);
  }
}

}  // namespace braze::cuda::softmax_ladder
