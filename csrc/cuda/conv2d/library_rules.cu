// Whether our fastest kernel for a pass is faster than cuDNN's: from measurements, which stand with
// each rule. What nobody has measured goes to cuDNN.
#include <algorithm>
#include <cmath>

#include "cuda/conv2d/depthwise/depthwise.h"
#include "rules.h"

namespace braze::cuda {

namespace {

// Whether the depthwise kernel is faster than cuDNN, or level with what that compiles at run time,
// for a second or two each: as measured on an H200 (benchmarks/depthwise.py, tensors of 16 MB and
// more; the gain hardly depends on the size), and by tiles on an H100.
bool depthwise_beats_cudnn(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const bool is_channels_last = problem.x.c == 1 && s.c > 1, is_16_bit = size_of(s.dtype) == 2;
  const bool fprop = problem.pass == Conv2dPass::kFprop, strided = s.stride_h == 2;
  const bool tiles = depthwise::goes_by_tiles(args_of(problem));
  if (s.n * s.c * s.h * s.w * size_of(s.dtype) < 1 << 20) return tiles;  // else launches decide
  // Strided rows of few taps are read with few bytes in flight.
  if (!is_channels_last) return !(fprop && is_16_bit && s.r == 5 && strided && s.h > 28);
  // Blocks of channels that are filled badly cost what there is to gain.
  const bool fills = tiles && s.c % 32 == 0;
  if (s.r == 3) {
    if (problem.pass == Conv2dPass::kDgrad) return is_16_bit || strided || fills;
    if (!fprop) return is_16_bit && !strided && (s.h >= 40 || (s.h >= 10 && s.h <= 20));
    return strided ? is_16_bit && (fills || (tiles && s.h <= 28)) : fills;
  }
  if (s.r == 7) return true;
  return !(fprop && strided) || (tiles && (is_16_bit || s.h < 28));
}

// Whether the grouped kernel, or implicit_gemm_mma where that is taken in its place, is faster than
// cuDNN, as measured on an H200 (ResNeXt-50 and RegNet-Y, 3 x 3, batch 64, bf16, channels last;
// other precisions were not). cuDNN has kernels for groups of 4, 8, 16 and 32 channels, which are
// up to twice as fast but for strided input gradients, weight gradients of 4 channels and most of
// 8, above all where groups do not come in fours; of 24, 56 and 112 it is 1.1 to 6 times slower.
bool grouped_beats_cudnn(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  // Of fewer elements launches decide; of shapes that cuDNN has hardly a kernel for, of still
  // fewer.
  constexpr int64_t kLeastElements = 1 << 20, kLeastOfRare = 100'000;
  const int64_t elements = s.n * std::min(s.c * s.h * s.w, s.k * s.p * s.q);
  if (elements < kLeastOfRare) return false;
  const int64_t width = s.c / s.groups, plane = s.p * s.q;
  const bool wgrad = problem.pass == Conv2dPass::kWgrad;
  if (size_of(s.dtype) != 2 || width > 112) return false;
  if (s.dilation_h > 1 || s.dilation_w > 1) return false;
  const bool gradient = problem.pass != Conv2dPass::kFprop;
  // Two groups of 32: cuDNN's gradients took twice as long.
  if (is_pointwise(s)) return gradient && s.groups == 2 && width == 32 && !is_strided(s);
  if (s.r != 3 || s.s != 3) return false;
  // Three groups of 16 and 32, one to three channels a group: cuDNN's took up to 16 times as long.
  if (width < 4) return std::max(s.c, s.k) > s.groups;
  if (s.groups == 3 && (width == 16 || width == 32)) return !gradient || s.c != s.k;
  if (elements < kLeastElements || s.c != s.k) return false;
  if (width == 4) return wgrad && !is_strided(s) && plane >= 28 * 28;
  if (width % 8 != 0) return false;
  const bool special = width == 8 || width == 16 || width == 32;
  if (!special) return width >= 24;
  if (problem.pass == Conv2dPass::kDgrad && is_strided(s)) return true;
  if (width != 8) return false;
  const bool fours = s.groups % 4 == 0;
  if (wgrad) return !is_strided(s) && !fours && plane >= 14 * 14;
  if (problem.pass == Conv2dPass::kDgrad) return true;
  return plane >= 28 * 28 && (!is_strided(s) || !fours);
}

// Batches of more images than most measurements have: those of 256.
bool is_large_batch(const Conv2dShape& s) { return s.n > 64; }

// Whether halo_wgmma is faster than cuDNN's, as measured on an H200 (benchmarks/convolutions.py at
// batch 64 and 256, benchmarks/conv2d.py at 64 to 8192), channels last, stride 1.
bool halo_beats_cudnn(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const int64_t plane = s.p * s.q;
  if (is_pointwise(s)) return false;
  if (size_of(s.dtype) == 2 && s.r * s.s > 9) return false;  // 5 x 5: 0.6 and 0.75 of its speed
  // cuDNN's weight gradients split the sum over pixels badly.
  if (problem.pass == Conv2dPass::kWgrad) {
    if (size_of(s.dtype) == 2 && s.n * plane < 64 * 7 * 7) return false;  // launches decide
    const bool many = s.n * plane >= 64 * 14 * 14;
    return s.c * s.k <= (many ? 160 * 320 : 128 * 256) && s.c <= 256;
  }
  const bool few = is_plain_fp32(s) && problem.pass == Conv2dPass::kFprop && s.c < 16;
  if (size_of(s.dtype) > 2) return !few && s.c <= 128 && s.k <= 128;
  if (problem.pass == Conv2dPass::kFprop) {
    if (plane > 80 * 80) return s.c <= 64 && s.k <= 128;
    // Half-filled rows and tiles are cuDNN's by some per cent, where no moments are wanted.
    if (s.c <= 32 && s.k < 128 && plane <= 32 * 32 && s.n * plane <= 128 * 28 * 28) {
      return s.c % 32 == 0 && s.k % 64 == 0;
    }
    return s.c <= 64 ? s.k <= 256 : s.c <= 128 && s.k <= 32 && plane >= 28 * 28;
  }
  if (s.c > 64 || s.k > 64) return is_large_batch(s) && s.c <= 32 && s.k <= 128;
  // Tiles are whole images, or rows: those of 15 x 15 and 16 x 16 fill them badly.
  return plane <= 14 * 14 ? s.c <= 32 : plane >= 28 * 28;
}

// Whether stream-K is faster than cuDNN's weight gradients, by pointwise for 1 x 1 filters of
// stride 1, else by implicit_gemm_wgmma, as measured on an H200 (all of benchmarks/convolutions.py
// at batch 64, 16 bits and TF32).
bool stream_k_beats_cudnn(const Conv2dShape& s) {
  const int64_t pixels = s.n * s.p * s.q, least = std::min(s.c, s.k);
  const bool tf32 = is_tf32(s);
  if (is_pointwise(s) && !is_strided(s)) {
    if (least < 16 || (tf32 && pixels > 64 * 56 * 56)) return false;
    if (tf32) {
      if (pixels < 64 * 14 * 14) return least >= 512;
      // cuDNN's split some of 128 filters better.
      const bool many = pixels <= 64 * 14 * 14 ? s.c >= 800 : s.c >= 288 && s.c < 384;
      return !(many && s.k <= 128 && pixels <= 64 * 28 * 28);
    }
    // (Of channels that do not come in eights cuDNN's are five times as fast.)
    if (!in_whole_vectors(s)) return false;
    const int64_t most = std::max(s.c, s.k);
    if (pixels <= 64 * 7 * 7) return least <= 128 || (least < 256 && s.c * s.k <= 832 * 160);
    if (pixels <= 64 * 14 * 14) return least < 128 || (least == 128 && most <= 576);
    if (pixels <= 64 * 28 * 28) {
      if (is_large_batch(s) && s.c >= 480 && s.k < 112) return false;
      return least < 128 || (least == 128 && most <= 192);
    }
    // (What cuDNN chooses for batch 256 is up to twice as slow as its best.)
    if (is_large_batch(s) && s.p * s.q <= 28 * 28 && least == 128) {
      return most <= 400 || most % 64 == 0;
    }
    return least < 128 || (least == 128 && most <= 256 && most % 128 == 0);
  }
  if (least < 32 || std::max(s.r, s.s) > (tf32 ? 5 : 7) || s.r * s.s > 25) return false;
  if (std::max(s.stride_h, s.stride_w) > 3) return false;
  if (tf32) return pixels >= 512;
  // cuDNN's split short sums of many results better, and long ones of 25 taps.
  if (is_pointwise(s)) return pixels >= 64 * 7 * 7;
  const int64_t taps = s.r * s.s, filters = s.c * s.k;
  if (taps == 25) return pixels >= 4096 && pixels <= 64 * 16 * 16;
  return pixels >= 4096 || (pixels >= 1024 && filters <= (taps <= 4 ? 128 * 160 : 128 * 128));
}

// The same of both for 1 x 1 filters of TF32, forward and input gradient.
bool pointwise_tf32_beats_cudnn(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const int64_t pixels = s.n * s.p * s.q;
  const bool tiny = pixels <= 64 * 7 * 7, few = pixels <= 64 * 14 * 14;
  if (std::min(s.c, s.k) < 32 || pixels < 64 * 7 * 7) return false;
  if (problem.pass == Conv2dPass::kDgrad) {
    if (is_strided(s)) return s.k >= 64;
    if (s.c < 64) return false;
    if (pixels > 64 * 28 * 28) return s.c >= 96 && s.c <= 192 && s.k >= 128;
    if (s.k < 64) return im2col_wins_thin_gradients(args_of(problem));
    return !(tiny && s.c > 800 && s.k <= 128);
  }
  if (is_strided(s)) return std::min(s.c, s.k) >= 64 && (s.c <= 128 || tiny);
  if (pixels > 64 * 28 * 28 || s.c < 128) return false;
  if (s.k < 64) return tiny && s.c >= 512;
  if (s.c >= 4 * s.k) return true;
  const bool not_many = few ? s.k <= (tiny ? 384 : 256) : s.c * s.k < 512 * 256;
  return not_many && s.k <= s.c;
}

}  // namespace

// Whether implicit_gemm_wgmma was measured for the like: else there may be too little work.
bool im2col_is_known(const Conv2dShape& s) {
  const bool known = is_pointwise(s) || (s.r == 3 && s.s == 3);
  const int64_t least = is_tf32(s) && !is_pointwise(s) ? 64 * 4 * 4 : 32 * 9 * 9;
  return known && s.dilation_h == 1 && s.dilation_w == 1 && std::max(s.stride_h, s.stride_w) <= 2 &&
         std::min(s.c, s.k) >= 64 && s.n * s.p * s.q >= least;
}

namespace {

// Forward products of 16 bits by implicit_gemm_wgmma: of whole rows and tiles they are level with
// cuDNN's at 28 x 28 and more, and ahead of those with many results.
bool pointwise_16_bits_beat_cudnn(const Conv2dShape& s) {
  const int64_t pixels = s.n * s.p * s.q;
  const int64_t even = pixels <= 64 * 28 * 28 || (pixels > 64 * 60 * 60 && s.c >= 160) ? 32 : 64;
  if (s.k % 64 != 0 || s.k < 128 || s.c % even != 0) return false;
  if (s.k > 256 && s.k % 256 != 0) return false;  // of which cuDNN has tiles
  return pixels >= 64 * 28 * 28 || (pixels >= 64 * 14 * 14 && s.c >= 128 && s.k >= 512);
}

// Input gradients of 1 x 1 filters of 16 bits by the same: of many channels 1.02 to 1.4 times as
// fast as cuDNN's. Others are level with cuDNN's alone, but behind beside a weight gradient: the
// blocks stay on their multiprocessors.
bool product_gradients_beat_cudnn(const Conv2dShape& s) {
  const int64_t pixels = s.n * s.p * s.q;
  if (s.k < 96 || s.k > 192 || pixels <= 64 * 10 * 10) return false;
  // For these numbers of channels cuDNN chooses badly.
  if (pixels > 64 * 60 * 60) return s.c >= 160 && s.c <= 224;
  if (pixels > 64 * 30 * 30) return s.c > 400 && s.c < 480 && s.k <= 128;
  if (pixels > 64 * 20 * 20) return s.c >= 352 && (s.c <= 512 || s.c >= 560) && s.k <= 128;
  // Where tiles are full, and waves of blocks.
  constexpr int64_t kTile = 128;
  const int64_t columns = ceil_div(s.c, kTile);
  const double waves = static_cast<double>(ceil_div(pixels, kTile) * columns) / sm_count();
  const double full = static_cast<double>(s.c) / (columns * kTile) * waves / std::ceil(waves);
  return s.c >= 480 && full >= 0.83 && (s.c <= 800 || full >= 0.85);
}

// Forward and input gradient of 16 bits by implicit_gemm_wgmma, filters of other forms: 1.05 to
// 1.7 times as fast as cuDNN on an H200 (1 x 3, 1 x 7, 7 x 1, 2 x 2, 4 x 4, strides of 3, dilations
// of 2 to 12; batch 8 to 64); of many channels only the far dilations are.
bool other_filters_beat_cudnn(const Conv2dShape& s, Conv2dPass pass) {
  const int64_t pixels = s.n * s.p * s.q, filters = s.c * s.k, taps = s.r * s.s;
  const bool fprop = pass == Conv2dPass::kFprop;
  const bool strides_far = std::max(s.stride_h, s.stride_w) >= 3;
  const int64_t dilation = std::max(s.dilation_h, s.dilation_w);
  if (!is_other_filter(s) || taps > 25 || pixels < 16 * 8 * 8 || pixels > 64 * 33 * 33) {
    return false;
  }
  if (std::min(s.c, s.k) < (strides_far ? 32 : 64)) return false;
  if (strides_far) return filters <= 128 * 256 && pixels <= 64 * 22 * 22;
  if (dilation >= 8) return true;
  if (dilation > 1) return filters <= (fprop ? 256 * 256 : 128 * 128);
  if (s.r == s.s && s.r % 2 == 0) {  // (The input gradient of 4 x 4 / 2 has a rule of its own.)
    return is_strided(s) && filters <= 64 * 128 && pixels <= 32 * (fprop ? 14 * 14 : 8 * 8);
  }
  if (taps == 3 && pixels <= 64 * 8 * 8) return filters <= 384 * 384;
  return taps < 25 && filters <= 128 * (fprop ? 128 : 192) && pixels <= 64 * 17 * 17;
}

// The same of implicit_gemm_wgmma.
bool im2col_beats_cudnn(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const int64_t plane = s.p * s.q, pixels = s.n * plane;
  const bool one = is_pointwise(s), strided = is_strided(s), is_16_bit = size_of(s.dtype) == 2;
  const Conv2dArgs args = args_of(problem);
  if (im2col_wins_by_rows(args) || im2col_wins_by_sums(args) || im2col_wins_few_pixels(args)) {
    return true;
  }
  if (problem.pass == Conv2dPass::kDgrad && s.r == 4 && s.s == 4 && s.stride_h == 2 &&
      s.stride_w == 2) {  // Nature-CNN's: its phases have the same number of taps
    const int64_t least = is_16_bit ? 9 * 9 : 32 * 9 * 9;
    return !is_plain_fp32(s) && std::min(s.c, s.k) >= 32 && s.dilation_h == 1 &&
           s.dilation_w == 1 && pixels >= least && pixels <= 256 * 9 * 9;
  }
  const bool wgrad = problem.pass == Conv2dPass::kWgrad;
  if (wgrad && !is_plain_fp32(s)) return stream_k_beats_cudnn(s);
  if (is_16_bit && !one && other_filters_beat_cudnn(s, problem.pass)) return true;
  if (is_16_bit && s.dilation_h == 1 && s.dilation_w == 1) {
    if (one && strided) {
      // (Of more pixels gradients, most of them zeros, are cuDNN's by 8 %.)
      if (problem.pass == Conv2dPass::kDgrad && pixels > 128 * 28 * 28) return false;
      return im2col_wins_strided_products(problem.pass, s) && pixels >= 32 * 9 * 9 &&
             std::max(s.stride_h, s.stride_w) <= 3;
    }
    if (s.r == 2 && s.s == 2 && s.stride_h == 2 && s.stride_w == 2) {  // ConvNeXt's
      return std::min(s.c, s.k) >= 192 && pixels >= 64 * 7 * 7;
    }
    if (!one && std::min(s.c, s.k) < 64 && im2col_wins_small_images(args)) {
      const bool tiny = plane < 14 * 14;
      if (problem.pass == Conv2dPass::kFprop) return s.k >= 128;
      if (s.r != 3 || s.s != 3) return false;
      return tiny ? s.k <= s.c || is_large_batch(s) : s.c <= 64 && s.k <= 128;
    }
  }
  if (is_tf32(s) && one) return pointwise_tf32_beats_cudnn(problem);
  if (is_tf32(s) && std::min(s.c, s.k) < 64 && im2col_wins_small_images(args)) return true;
  if (!im2col_is_known(s)) return false;
  const bool small =
      plane <= (is_16_bit ? 80 * 80 : 60 * 60) || (is_16_bit && pixels <= 16 * 32 * 32);
  switch (problem.pass) {
    case Conv2dPass::kFprop:
      if (one) return pointwise_16_bits_beat_cudnn(s);
      // Of rows that are not full cuDNN's sums take less.
      if (is_16_bit && plane >= 14 * 14 &&
          filled_rows(s, s.c) < (s.c > 128 && !is_large_batch(s) ? 0.75 : 0.85)) {
        return false;
      }
      return small && (is_16_bit || s.c < 256 || plane <= 8 * 8);
    case Conv2dPass::kDgrad:
      if (one) return product_gradients_beat_cudnn(s);
      if (!is_16_bit && s.k % 32 != 0) return false;  // rows that are not full
      if (is_16_bit && strided) return true;
      // Tiles of 128 channels, less than half of the last ones filled.
      if (strided && s.c > 128 && s.c % 128 > 0 && s.c % 128 < 64) return false;
      if (is_16_bit && plane > 80 * 80) return s.c > s.k || is_large_batch(s);
      if (is_16_bit && plane > 60 * 60 && std::min(s.c, s.k) >= 128) return is_large_batch(s);
      // Tiles that are not full, and many of them.
      if (is_16_bit && s.c <= 64 && s.k > 128 && plane > 32 * 32) return false;
      if (is_16_bit && s.c < 128 && filled_rows(s, s.k) < 0.9 && is_large_batch(s)) return false;
      // Few tiles of long sums, too many for clusters to split.
      if (is_16_bit && plane <= 7 * 7 && plane > 4 * 4 && s.c >= 160 && s.c <= 256) {
        return pixels <= 28 * 28 || is_large_batch(s);
      }
      return small;
    case Conv2dPass::kWgrad: break;
  }
  return false;
}

// Whether implicit_gemm_mma is faster than cuDNN, as measured on an H200 (batch 16 and 32, bf16):
// on large filters of few channels gradients 1.4 and 3.7 times; on channels that do not come in
// eights, so that no kernel with TMA takes them (13 to 127), forward of few channels 1.3 to 1.8
// times, weight gradients of neither few nor many filters 1.6 and 8 times.
bool mma_beats_cudnn(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const bool fprop = problem.pass == Conv2dPass::kFprop;
  const int64_t pixels = s.n * s.p * s.q;
  if (is_strided(s) || pixels < 32 * 14 * 14) return false;
  if (mma_wins_many_taps(s)) return !fprop;
  if (in_whole_vectors(s)) return false;
  const int64_t weights = s.c * s.k * s.r * s.s;
  if (is_pointwise(s)) {
    const bool short_sums = pixels <= 64 * 14 * 14;
    return problem.pass == Conv2dPass::kWgrad && short_sums && weights >= 60000;
  }
  if (fprop) return s.c > 8 && s.c <= 20;
  return problem.pass == Conv2dPass::kWgrad && weights >= 20000 && weights <= 100000;
}

}  // namespace

// Whether that kernel is faster than cuDNN, as measured on an H200 (the same). What was not
// measured goes to cuDNN.
bool beats_cudnn(const Conv2dProblem& problem, int kernel) {
  const Conv2dShape& s = problem.shape;
  const Conv2dArgs args = args_of(problem);
  const bool is_channels_last = problem.x.c == 1 && s.c > 1, is_16_bit = size_of(s.dtype) == 2;
  const bool wgrad = problem.pass == Conv2dPass::kWgrad;
  if (kernel == kDepthwise) return depthwise_beats_cudnn(problem);
  const bool narrow_groups =
      kernel == kDirect && is_16_bit && s.groups > 1 && !is_grouped(s) && is_channels_last;
  if (kernel == kGrouped || narrow_groups ||
      (kernel == kMma && is_channels_last && mma_wins_groups(args))) {
    return grouped_beats_cudnn(problem);
  }
  if (kernel == kNarrowInput || kernel == kNarrowWgmma || kernel == kNarrowOutput) {
    return true;  // else it is not chosen
  }
  if (kernel == fastest_own_of_patches(args) || kernel == fastest_own_of_others(args)) return true;
  if (kernel == fastest_own_of_contiguous(args)) return true;
  if (s.dtype == DType::kFloat64) {
    return problem.pass != Conv2dPass::kDgrad && s.c / s.groups * s.r * s.s <= 32;
  }
  if (s.groups > 1) return false;
  if (kernel == kPointwise && pointwise_wins_one_pixel(s, problem.pass)) return true;
  // Few inputs per output: the direct kernels.
  const bool few = s.c * s.r * s.s <= 32 && s.k <= (is_16_bit && is_channels_last ? 8 : 32);
  if (problem.pass == Conv2dPass::kFprop && few) return true;
  if (problem.pass == Conv2dPass::kDgrad && s.k * s.r * s.s <= 4) return true;
  if (wgrad && s.c == 1 && s.r * s.s <= 32 && s.k <= 32) return true;
  if (kernel == kPointwise && pointwise_wins_few_filters(args)) return true;
  if (kernel == kMma && is_channels_last && is_16_bit) return mma_beats_cudnn(problem);
  // cuDNN's first choice for few pixels sums them one after the other: up to 50 times the error.
  if (wgrad && is_plain_fp32(s) && s.n * s.p * s.q < 1 << 16 && s.c <= 256 && s.k <= 256) {
    return true;
  }
  if (is_channels_last) {
    if (is_known_in_fp32(problem.pass, s)) return beats_cudnn_in_fp32(problem, kernel);
    if (kernel == kIm2col) return im2col_beats_cudnn(problem);
    if (kernel == kPointwise) {
      if (wgrad && !is_plain_fp32(s)) return stream_k_beats_cudnn(s);
      if (is_tf32(s)) return pointwise_tf32_beats_cudnn(problem);
      return is_16_bit && is_strided(s) && problem.pass == Conv2dPass::kDgrad &&
             std::min(s.c, s.k) >= 64 && s.n * s.p * s.q <= 128 * 28 * 28;
    }
    return !is_strided(s) && is_halo(kernel) && halo_beats_cudnn(problem);
  }
  return wgrad && is_tf32(s) && !is_strided(s) && s.c <= 32 && s.k <= 64;
}

// Whether it is where it leaves moments, which saves a pass over the result: more than cuDNN is
// ahead anywhere.
bool beats_cudnn_with_moments(const Conv2dShape& s, int kernel) {
  const bool known = im2col_is_known(s);
  if (is_tf32(s) && known && s.p * s.q <= 80 * 80) return true;
  if (kernel != kIm2col) return s.c <= 128 && s.k <= 128;
  if (size_of(s.dtype) != 2 || !known) return false;
  return is_pointwise(s) ? s.c <= 512 && s.n * s.p * s.q >= 64 * 14 * 14 : s.p * s.q <= 80 * 80;
}

// Whether contiguous tensors had better be transposed for a kernel that beats cuDNN's in
// channels_last: cuDNN transposes them too, but for 1 x 1 filters, and all that takes contiguous
// fp32 as it is stays far behind.
bool pays_transposes(Conv2dPass pass, const Conv2dShape& s, int kernel) {
  if (s.c < 16 || s.k < 16 || is_pointwise(s)) return false;
  if (patches_win_contiguous(pass, s) || few_channels_lose_transposed(pass, s)) return false;
  const bool is_large = s.n * s.c * s.h * s.w >= 1 << 20;  // else launches decide
  return (is_plain_fp32(s) || is_large) && (is_halo(kernel) || kernel == kIm2col);
}

}  // namespace braze::cuda
