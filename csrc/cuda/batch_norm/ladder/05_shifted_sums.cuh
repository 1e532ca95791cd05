// Rung 5: rung 4 with sums about a value close to the mean in the place of Welford's updates.
//
// With d = x - center, the sums of d and of d * d give both moments: the mean is center + sum(d) /
// count, and the squares about it are sum(d * d) - sum(d)^2 / count. About 0 this cancels; about
// the mean of the block's first 256 elements it does not, or, where these are far off, they are
// part of the sum of squares and make it large enough. A subtraction and two additions an element,
// no division, and nothing that waits for it: Welford's division takes more of the arithmetic units
// than memory leaves time for in 16 bits.
//
// `planes`, which ships, is this with 16 bytes a load and four to eight loads of a thread in
// flight; `rows` the same for channels_last.
#pragma once

#include "04_split_channels.cuh"

namespace braze::cuda::batch_norm_ladder {

template <typename T>
__global__ void __launch_bounds__(kPlaneThreads) shifted_moments_kernel(Images<T> m) {
  using A = acc_t<T>;
  __shared__ A shared[kPlaneThreads / 32];
  const auto begin = m.part();
  const int64_t count = begin.count();
  const A first = begin.valid() ? convert<A>(m.x[begin.offset()]) : A(0);
  const int64_t first_count = count < kPlaneThreads ? count : kPlaneThreads;
  const A center = plane_block_sum(first, shared) / static_cast<A>(first_count);
  A sum = 0, squares = 0;
  for (auto at = begin; at.valid(); at.advance()) {
    const A d = convert<A>(m.x[at.offset()]) - center;
    sum += d;
    squares += d * d;
  }
  const double all = plane_block_sum(sum, shared), all_squares = plane_block_sum(squares, shared);
  if (threadIdx.x == 0) {
    const double offset = all / static_cast<double>(count);
    m.partials[int64_t{blockIdx.x} * m.splits + blockIdx.y] = {static_cast<double>(center) + offset,
                                                               all_squares - offset * all,
                                                               static_cast<double>(count)};
  }
}

template <typename T>
void run_shifted_sums(Stream stream, const Images<T>& m) {
  run_in_parts(stream, m, shifted_moments_kernel<T>);
}

}  // namespace braze::cuda::batch_norm_ladder
