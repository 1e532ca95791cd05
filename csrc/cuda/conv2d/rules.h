// The choice among the convolution's kernels: own_rules.cu, fp32_rules.cu, patch_rules.cu,
// other_rules.cu, contiguous_rules.cu and library_rules.cu, for choose.cu.
// Where a rule names a GPU it was measured there.
#pragma once

#include <algorithm>

#include "args.h"
#include "cuda/common/launch.cuh"

namespace braze::cuda {

// Numbers of kernels in choose.cu's table.
enum Conv2dKernel {
  kDirect,
  kSimt,
  kMma,
  kHalo,
  kNarrowDgrad,
  kDepthwise,
  kPointwise,
  kIm2col,
  kNarrowInput,
  kNarrowWgmma,
  kNarrowOutput,
  kGrouped,
  kPatches,
  kFft
};
inline bool is_halo(int kernel) { return kernel == kHalo || kernel == kNarrowDgrad; }

// Whether the kernel has no obstacle (not of the FFT).
bool takes(int kernel, const Conv2dArgs& args);

// The fastest of our own, but for the FFT.
int fastest_own(const Conv2dArgs& args);
// Whether the FFT is faster than that, and than cuDNN.
bool fft_wins(const Conv2dProblem& problem);

// The same of fp32 at fp32's accuracy, where it was measured, and channels last: -1 where the other
// rules decide.
bool is_known_in_fp32(Conv2dPass pass, const Conv2dShape& s);
bool has_large_planes(Conv2dPass pass, const Conv2dShape& s);
int fastest_own_in_fp32(const Conv2dArgs& args);
bool beats_cudnn_in_fp32(const Conv2dProblem& problem, int kernel);

// The fastest kernel of windows side by side, where it was measured ahead of cuDNN's too: -1 where
// the other rules decide (patch_rules.cu). Of contiguous images as they are, and where transposing
// these would cost what is won.
int fastest_own_of_patches(const Conv2dArgs& args);
bool patches_win_contiguous(Conv2dPass pass, const Conv2dShape& s);
bool few_channels_lose_transposed(Conv2dPass pass, const Conv2dShape& s);

// The same of what no other rule knows (other_rules.cu).
int fastest_own_of_others(const Conv2dArgs& args);

// The same of contiguous tensors (contiguous_rules.cu).
int fastest_own_of_contiguous(const Conv2dArgs& args);

// Whether the kernel, our fastest, is faster than cuDNN; where it leaves moments too.
bool beats_cudnn(const Conv2dProblem& problem, int kernel);
bool beats_cudnn_with_moments(const Conv2dShape& s, int kernel);
// Whether contiguous tensors had better be transposed for it.
bool pays_transposes(Conv2dPass pass, const Conv2dShape& s, int kernel);

// Of the results of a pass, and what cuDNN's engines may take (libraries/cudnn_plans.h).
inline int64_t pixels_of(const Conv2dShape& s) { return s.n * s.p * s.q; }
constexpr int64_t kMostWorkspace = int64_t{2} << 30;

inline bool is_pointwise(const Conv2dShape& s) { return s.r == 1 && s.s == 1; }
inline bool is_strided(const Conv2dShape& s) { return s.stride_h > 1 || s.stride_w > 1; }
inline bool is_plain_fp32(const Conv2dShape& s) {
  return s.dtype == DType::kFloat32 && !s.allow_tf32;
}
inline bool is_tf32(const Conv2dShape& s) { return s.dtype == DType::kFloat32 && s.allow_tf32; }

// Whether rows of channels and of filters are whole vectors of 16 bits.
inline bool in_whole_vectors(const Conv2dShape& s) { return s.c % 8 == 0 && s.k % 8 == 0; }

// How much of the rows of shared memory that channels are multiplied by is channels.
inline double filled_rows(const Conv2dShape& s, int64_t channels) {
  const int64_t row = 128 / size_of(s.dtype);
  return static_cast<double>(channels) / (ceil_div(channels, row) * row);
}

// Groups whose channels fill at least a quarter of a product's rows and columns.
inline bool is_grouped(const Conv2dShape& s) {
  constexpr int64_t kLeast = 4;
  return s.groups > 1 && std::min(s.c, s.k) >= kLeast * s.groups;
}

// Classes of passes that rules of both files are about, and kernels that are the fastest of ours
// for them; what was measured stands with each.
bool is_other_filter(const Conv2dShape& s);
bool im2col_is_known(const Conv2dShape& s);
bool im2col_wins_small_images(const Conv2dArgs& args);
bool im2col_wins_strided_products(Conv2dPass pass, const Conv2dShape& s);
bool im2col_wins_by_rows(const Conv2dArgs& args);
bool im2col_wins_by_sums(const Conv2dArgs& args);
bool im2col_wins_few_pixels(const Conv2dArgs& args);
bool im2col_wins_thin_gradients(const Conv2dArgs& args);
bool mma_wins_groups(const Conv2dArgs& args);
bool mma_wins_many_taps(const Conv2dShape& s);
bool pointwise_beats_im2col(const Conv2dArgs& args);
bool pointwise_wins_few_filters(const Conv2dArgs& args);
bool pointwise_wins_one_pixel(const Conv2dShape& s, Conv2dPass pass);

}  // namespace braze::cuda
