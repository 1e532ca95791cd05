// Which of our kernels are faster than cuDNN's for what the other rules do not know: filters of
// other forms, 1 x 1 filters of few channels or pixels, small batches. As measured on an H200 with
// 4 x 4 / 2, 5 x 5 of strides 1 and 2, 7 x 7, 1 x 3, 1 x 7 and 7 x 1, 3 x 3 of stride 3, of
// dilations 2 to 12 and of few images; 13 to 2048 channels, 31 to 1024 filters, 4 to 256 images.
#include <algorithm>

#include "rules.h"

namespace braze::cuda {
namespace {

// At fp32's accuracy products in parts are 1.4 to 9 times as fast as cuDNN's on CUDA cores; ours on
// CUDA cores are where parts of few channels fill no tile.
int of_fp32(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t least = std::min(s.c, s.k), most = std::max(s.c, s.k), pixels = pixels_of(s);
  if (is_pointwise(s)) {
    const bool wgrad = args.pass == Conv2dPass::kWgrad;
    if (is_strided(s) || s.pad_h > 0 || s.pad_w > 0 || least < 16 || pixels < 28 * 28) return -1;
    const bool known = s.c >= 64 && pixels >= 64 * 7 * 6;  // is_known_in_fp32
    if (known || (wgrad && pixels >= 64 * 7 * 6)) return -1;
    return kPointwise;
  }
  if (args.pass == Conv2dPass::kWgrad) {
    // Where halo_wgmma, which is ahead, cannot take it.
    if (most < 48 && least >= 13 && pixels >= 16 * 56 * 28 && !takes(kHalo, args)) return kSimt;
    if (is_known_in_fp32(args.pass, s) || pixels < 8 * 7 * 7) return -1;
    if (s.c >= 48 && s.k >= 32) {
      if (is_strided(s) && most <= 64) return kSimt;
      return has_large_planes(args.pass, s) ? -1 : kIm2col;
    }
    return s.c >= 13 && s.k >= 64 ? kSimt : -1;
  }
  const bool known = is_known_in_fp32(args.pass, s) || takes(kNarrowDgrad, args);
  if (known || pixels < 8 * 7 * 7 || has_large_planes(args.pass, s)) return -1;
  return least >= 32 || (least >= 13 && most >= 64) ? kIm2col : -1;
}

int of_tf32(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t pixels = pixels_of(s), taps = s.r * s.s;
  const bool even = s.c % 32 == 0 && s.k % 32 == 0, strided = is_strided(s);
  switch (args.pass) {
    case Conv2dPass::kFprop:
      if (!even) return -1;
      if (strided) return taps <= 25 ? kIm2col : -1;
      if (s.dilation_w > 1) return s.c <= 64 || s.c >= 1024 ? kIm2col : -1;
      return taps >= 25 || (s.c >= 256 && pixels <= 64 * 8 * 8) ? kIm2col : -1;
    case Conv2dPass::kDgrad:
      return even && (std::min(s.r, s.s) > 1 || pixels <= 64 * 8 * 8) ? kIm2col : -1;
    case Conv2dPass::kWgrad: break;
  }
  if (even) return kIm2col;
  return taps >= 25 && std::min(s.c, s.k) >= 13 ? kMma : -1;
}

int of_16_bits(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool fprop = args.pass == Conv2dPass::kFprop, strided = is_strided(s);
  const int64_t taps = s.r * s.s, from = fprop ? s.c : s.k, to = fprop ? s.k : s.c;
  if (args.pass == Conv2dPass::kWgrad) {
    if (taps == 25 && std::max(s.c, s.k) <= 32 && !strided) return kMma;
    const bool even = s.c % 32 == 0 && s.k % 32 == 0;
    return even && (taps >= 49 || (taps == 16 && strided)) ? kIm2col : -1;
  }
  if (strided) {
    const bool known = taps == 25 || (taps == 16 && fprop);
    return known && from % 32 == 0 ? kIm2col : -1;
  }
  if (taps < 25) return -1;
  // (Of 13 x 17 pixels halo_wgmma's tiles are a third behind.)
  const bool whole_tiles = s.p * s.q >= 28 * 28 && pixels_of(s) >= 64 * 28 * 28;
  if (taps == 25 && s.c <= 32) return whole_tiles ? kHalo : -1;
  return from % 64 == 0 && to >= 64 ? kIm2col : -1;
}

// 3 x 3 of a few images of 31 x 31 pixels and more, in TF32, and of 64 channels in 16 bits.
bool is_of_few_images(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t least = std::min(s.c, s.k), most = std::max(s.c, s.k);
  const bool usual = !is_pointwise(s) && !is_other_filter(s) && !is_strided(s);
  return args.pass != Conv2dPass::kWgrad && usual && s.n <= 4 && s.p * s.q >= 31 * 31 &&
         pixels_of(s) <= 4 * 64 * 64 && least >= 64 && most <= (is_tf32(s) ? 256 : 64);
}

}  // namespace

int fastest_own_of_others(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!runs_sm90_code()) return -1;  // not measured
  if (s.groups > 1 || s.dtype == DType::kFloat64 || args.gathered.c != 1) return -1;
  if (std::min(s.c, s.k) < 13 || s.r * s.s > 49) return -1;
  if (is_plain_fp32(s)) return of_fp32(args);
  if (is_of_few_images(args)) return kIm2col;
  if (!is_other_filter(s) || pixels_of(s) < 64 * 4 * 4) return -1;
  return is_tf32(s) ? of_tf32(args) : of_16_bits(args);
}

}  // namespace braze::cuda
