// What the kernels that multiply fp32 in parts need on the host.
#pragma once

#include <limits>

#include "cuda/matmul/ladder/14_split_fp32.cuh"
#include "cuda/matmul/ladder/17_scaled_fp16.cuh"

namespace braze::cuda::hopper {

// The length of the planes' rows.
inline int64_t padded(int64_t n) { return (n + 7) / 8 * 8; }

// In how many parts the depth is summed, and microseconds for the products, fitted to an H200.
struct SplitDepth {
  int splits;
  double microseconds;
};

// Splits, at most `most`, that fill the waves of blocks. A part is two stages or more. stage: its
// microseconds.
inline SplitDepth choose_splits(int64_t tiles, int64_t stages, int64_t most, int64_t results,
                                double stage) {
  const int64_t multiprocessors = sm_count();
  most = std::clamp(stages / 2, int64_t{1}, most);
  SplitDepth best{1, std::numeric_limits<double>::infinity()};
  for (int splits = 1; splits <= most; ++splits) {
    const double waves = static_cast<double>(ceil_div(tiles * splits, multiprocessors));
    const double sum = splits == 1 ? 0 : 2 + 1.5e-6 * splits * results;
    const double microseconds = waves * (3.8 + stage * ceil_div(stages, splits)) + sum;
    if (microseconds < best.microseconds) best = {splits, microseconds};
  }
  return best;
}

// Of tiles of three parts, and of two.
constexpr double kSplitStage = 1.7, kScaledStage = 1.05;

// As one row, where that makes no difference to what is largest.
inline Parts in_one_row(Parts p) {
  if (p.scaled != Scaled::kAll || p.batch != 1 || p.row_stride != p.inner) return p;
  p.inner *= p.outer, p.outer = 1;
  return p;
}

// Of find_largest_kernel over whole matrices: four of a multiprocessor have enough to wait for.
inline int most_maxima() { return 4 * sm_count(); }
inline int64_t maxima_bytes() { return (1 + most_maxima()) * int64_t{sizeof(uint32_t)}; }

// Makes the planes of two matrices; where they are scaled, after what they are scaled by. Flags and
// largest magnitudes are 0 before, but for Scaled::kAll, of both or neither.
inline void launch_split_planes(Stream stream, Parts a, Parts b) {
  const auto groups = [](const Parts& p) { return p.batch * p.outer * p.ld / 8; };
  const int blocks = grid_stride_blocks(std::max(groups(a), groups(b)), kSplitThreads);
  if (a.scaled == Scaled::kNot) {
    launch_early(split_planes_kernel, dim3(blocks, 2), kSplitThreads, 0, stream, a, b);
  } else {
    const Parts rows[] = {in_one_row(a), in_one_row(b)};
    const int64_t pieces = std::max(largest_pieces(rows[0]), largest_pieces(rows[1]));
    int finders = grid_stride_blocks(32 * pieces, kLargestThreads);
    if (a.scaled == Scaled::kAll) {
      finders = std::min(finders, most_maxima());
      a.maxima = b.maxima = finders;
    }
    launch_early(find_largest_kernel, dim3(finders, 2), kLargestThreads, 0, stream, rows[0],
                 rows[1]);
    launch_early(split_scaled_kernel, dim3(blocks, 2), kSplitThreads, 0, stream, a, b);
  }
  check_launch("matmul split_planes");
}

}  // namespace braze::cuda::hopper
