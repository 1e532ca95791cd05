// What the kernels that multiply fp32 in parts need on the host.
#pragma once

#include <limits>

#include "cuda/matmul/ladder/14_split_fp32.cuh"

namespace braze::cuda::hopper {

// The length of the planes' rows.
inline int64_t padded(int64_t n) { return (n + 7) / 8 * 8; }

// In how many parts the depth is summed, and microseconds for the products, fitted to an H200.
struct SplitDepth {
  int splits;
  double microseconds;
};

// Splits, at most `most`, that fill the waves of blocks. A part is two stages or more.
inline SplitDepth choose_splits(int64_t tiles, int64_t stages, int64_t most, int64_t results) {
  const int64_t multiprocessors = sm_count();
  most = std::clamp(stages / 2, int64_t{1}, most);
  SplitDepth best{1, std::numeric_limits<double>::infinity()};
  for (int splits = 1; splits <= most; ++splits) {
    const double waves = static_cast<double>(ceil_div(tiles * splits, multiprocessors));
    const double sum = splits == 1 ? 0 : 2 + 1.5e-6 * splits * results;
    const double microseconds = waves * (3.8 + 1.7 * ceil_div(stages, splits)) + sum;
    if (microseconds < best.microseconds) best = {splits, microseconds};
  }
  return best;
}

inline void launch_split_planes(Stream stream, const Parts& a, const Parts& b) {
  constexpr int kThreads = 256;
  const auto groups = [](const Parts& p) { return p.batch * p.outer * p.ld / 8; };
  const int blocks = grid_stride_blocks(std::max(groups(a), groups(b)), kThreads);
  launch_early(split_planes_kernel, dim3(blocks, 2), kThreads, 0, stream, a, b);
  check_launch("matmul split_planes");
}

}  // namespace braze::cuda::hopper
