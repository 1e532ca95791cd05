// Which kernel is the fastest of windows that lie side by side, as measured on an H200: patches, or
// implicit_gemm_wgmma, which moves nothing before its product, but needs rows of 16 bytes.
#include "launchers/conv2d_patches.h"
#include "rules.h"

namespace braze::cuda {
namespace {

// Filters that have the image's extents: 5 x 5 and 7 x 7 of 16 to 512 channels to 120 to 1024
// filters, of 64 and 256 images, 2 to 100 times as fast as what cuDNN chooses.
bool are_whole(const Conv2dShape& s) {
  return s.r * s.s > 1 && s.h == s.r && s.w == s.s && s.p * s.q == 1 && s.groups == 1;
}
int of_whole(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (s.n < 32 || s.c < 16 || s.k < 64) return -1;
  // (fp32's weight gradient splits both operands again and again.)
  const bool large = s.r * s.s * s.c * s.k >= 1 << 24;
  const bool splits = is_plain_fp32(s) && args.pass == Conv2dPass::kWgrad && large;
  return splits && takes(kIm2col, args) ? kIm2col : kPatches;
}

bool are_patches(const Conv2dShape& s) {
  return lie_side_by_side(s) && s.stride_h == s.r && s.stride_w == s.s;
}
bool are_halved(const Conv2dShape& s) { return s.r == 2 && s.s == 2; }

// Large ones, with which vision transformers and ConvNeXts begin: 4 x 4 to 32 x 32 (and 7 x 7 of
// one channel) of 1 to 64 images of up to 224 x 224 to 64 to 1024 filters. Few weights of float32
// leave the pass over the image too little to save.
int of_large(const Conv2dArgs& args, bool channels_last) {
  const Conv2dShape& s = args.shape;
  const bool fprop = args.pass == Conv2dPass::kFprop, wgrad = args.pass == Conv2dPass::kWgrad;
  const bool few_weights = s.r * s.s * s.c < 192 && size_of(s.dtype) == 4;
  const int64_t pixels = pixels_of(s);
  if (s.k < 64 || pixels < 14 * 14) return -1;
  if (few_weights && wgrad && pixels < 56 * 56) return -1;
  if (few_weights && fprop && is_plain_fp32(s) && pixels < 16 * 56 * 56) return -1;
  const bool by_rows = is_tf32(s) && fprop && channels_last && pixels >= 64 * 14 * 14;
  return by_rows && takes(kIm2col, args) ? kIm2col : kPatches;
}

// 2 x 2 of latent images, four channels of 32 x 32 to 384 filters, 8 and 64 of them.
int of_latents(const Conv2dArgs& args, bool channels_last) {
  const Conv2dShape& s = args.shape;
  const int64_t pixels = pixels_of(s);
  if (s.k < 128 || pixels < 8 * 16 * 16) return -1;
  if (args.pass != Conv2dPass::kFprop) return kPatches;
  const bool few = pixels < 32 * 16 * 16;
  const bool by_rows = channels_last && !is_plain_fp32(s) && (few || is_tf32(s));
  if (by_rows && takes(kIm2col, args)) return kIm2col;
  return few ? -1 : kPatches;
}

// 2 x 2 of many channels, by which ConvNeXts halve their images, and U-Nets double theirs backward:
// 32 to 512 channels to twice as many filters, or less, 1024 pixels of the result to 262144.
int of_halved(const Conv2dArgs& args, bool channels_last) {
  const Conv2dShape& s = args.shape;
  if (std::min(s.c, s.k) < 32 || pixels_of(s) < 16 * 8 * 8) return -1;
  if (!channels_last) return patches_win_contiguous(args.pass, s) ? kPatches : -1;
  const bool is_16_bit = size_of(s.dtype) == 2;
  switch (args.pass) {
    case Conv2dPass::kFprop: return kIm2col;
    case Conv2dPass::kDgrad:
      if (is_16_bit) return s.c >= 256 ? kPatches : s.c >= 96 ? kIm2col : -1;
      // (In TF32 192 channels, a tile and a half, are a sixth behind cuDNN.)
      return is_plain_fp32(s) || s.c <= 128 || s.c % 128 == 0 ? kIm2col : -1;
    case Conv2dPass::kWgrad: break;
  }
  return is_plain_fp32(s) && s.c <= 128 ? kPatches : kIm2col;
}

// Whether the matrix of patches, and in fp32 planes of its parts, take more workspace than cuDNN is
// given.
bool takes_much_workspace(Conv2dPass pass, const Conv2dShape& s) {
  const int64_t matrix = pixels_of(s) * weights_of_filter(s) * size_of(s.dtype);
  if (is_plain_fp32(s)) return 2 * matrix > kMostWorkspace || has_large_planes(pass, s);
  return matrix > kMostWorkspace;
}

}  // namespace

bool patches_win_contiguous(Conv2dPass pass, const Conv2dShape& s) {
  const bool wgrad = pass == Conv2dPass::kWgrad;
  return wgrad && are_patches(s) && are_halved(s) && (size_of(s.dtype) == 4 || s.c >= 192);
}

bool few_channels_lose_transposed(Conv2dPass pass, const Conv2dShape& s) {
  const int64_t least = is_plain_fp32(s) ? 128 : is_tf32(s) ? 64 : 0;
  return pass == Conv2dPass::kFprop && are_patches(s) && are_halved(s) && s.c < least;
}

int fastest_own_of_patches(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!runs_sm90_code()) return -1;  // not measured
  if (s.dtype == DType::kFloat64 || takes_much_workspace(args.pass, s)) return -1;
  if (are_whole(s)) return of_whole(args);
  if (!are_patches(s)) return -1;
  const Tensor4dRef& x = args.pass == Conv2dPass::kDgrad ? args.out : args.gathered;
  const bool channels_last = x.c == 1 && s.c > 1;
  if (s.c <= 4 && s.r * s.s >= 16) return of_large(args, channels_last);
  if (!are_halved(s)) return -1;
  return s.c <= 4 ? of_latents(args, channels_last) : of_halved(args, channels_last);
}

}  // namespace braze::cuda
