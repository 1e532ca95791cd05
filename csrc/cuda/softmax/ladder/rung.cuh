// What the rungs share: the matrix that they work on. All that they need beside it, the merging of
// maxima and sums, is the shipped kernel's (row_team.cuh) from rung 4 on.
#pragma once

#include "cuda/softmax/row_team.cuh"

namespace braze::cuda::softmax_ladder {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Dense rows of `size` elements, one after the other; at most 2^31 - 1 of them.
template <typename T>
struct Rows {
  const T* x;
  T* y;
  int64_t rows, size;
};

template <typename T>
unsigned blocks_of(const Rows<T>& m, int rows_per_block) {
  return static_cast<unsigned>(ceil_div(m.rows, rows_per_block));
}

[[noreturn]] inline void refuse(const std::string& kernel, const std::string& what_it_takes) {
  throw std::runtime_error("softmax: kernel " + kernel + " cannot take these arguments: it takes " +
                           what_it_takes);
}

}  // namespace braze::cuda::softmax_ladder
