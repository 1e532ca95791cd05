// Which of our kernels are faster than cuDNN's for contiguous tensors as they are: 1 x 1 filters
// and images of few channels. As measured on an H200 (benchmarks/convolutions.py, 42 to 53 layers
// of 1 x 1 of networks and 19 first layers in each precision, batch 64).
#include <algorithm>

#include "rules.h"

namespace braze::cuda {
namespace {

constexpr int64_t kBatch = 64;  // of the measurements

bool is_contiguous(const Conv2dArgs& args) {
  const Tensor4dRef& other = args.pass == Conv2dPass::kWgrad ? args.other : args.out;
  const Conv2dShape& s = args.shape;
  return args.gathered.w == 1 && other.w == 1 && std::max(s.c, s.k) > 1 && std::min(s.w, s.q) > 1;
}

// At fp32's accuracy: products in parts, 1.05 to 3.4 times as fast as cuDNN's on CUDA cores, and
// ours on CUDA cores, weight gradients up to 2.7 times, of few channels to many 7.9 times.
int of_fp32_products(Conv2dPass pass, const Conv2dShape& s) {
  const int64_t pixels = pixels_of(s);
  if (pass == Conv2dPass::kWgrad) {
    if (is_strided(s)) return pixels <= kBatch * 14 * 14 && std::min(s.c, s.k) >= 48 ? kSimt : -1;
    return s.c * s.k <= 320'000 ? kSimt : -1;
  }
  if (is_strided(s) || has_large_planes(pass, s)) return -1;
  if (pass == Conv2dPass::kDgrad) return kPointwise;
  if (pixels <= kBatch * 7 * 7) return s.k >= 4 * s.c ? -1 : kPointwise;
  if (pixels <= kBatch * 14 * 14 || s.c <= 64) return kPointwise;
  if (s.k < 64) return kSimt;
  return s.k > 64 && s.k <= s.c ? kPointwise : -1;
}

// Where TMA can address the result's rows, forward and weight gradient: 1.0 to 2.6 times.
int of_tf32_products(Conv2dPass pass, const Conv2dShape& s) {
  const int64_t pixels = pixels_of(s);
  if (pass == Conv2dPass::kDgrad) return -1;
  if (is_strided(s)) return kPointwise;
  if (pixels > kBatch * 28 * 28) return -1;
  const bool is_short = pixels <= kBatch * 14 * 14 || s.c * s.k < 512 * 256;
  return pass == Conv2dPass::kWgrad || is_short ? kPointwise : -1;
}

// The same, 1.06 to 2.1 times: cuDNN's have to find every s-th pixel, and split long sums of many
// results, and of channels that do not come in eights, badly.
int of_16_bit_products(Conv2dPass pass, const Conv2dShape& s) {
  if (pass == Conv2dPass::kDgrad) {
    return !is_strided(s) && !in_whole_vectors(s) && pixels_of(s) >= kBatch * 28 * 28 ? kPointwise
                                                                                      : -1;
  }
  if (is_strided(s)) return kPointwise;
  if (pass == Conv2dPass::kFprop || pixels_of(s) > kBatch * 28 * 28) return -1;
  return s.c * s.k >= 512 * 256 || !in_whole_vectors(s) ? kPointwise : -1;
}

int of_products(Conv2dPass pass, const Conv2dShape& s) {
  if (s.pad_h > 0 || s.pad_w > 0 || std::min(s.c, s.k) < 16) return -1;
  if (pixels_of(s) < kBatch * 7 * 7) return -1;
  if (is_plain_fp32(s)) return of_fp32_products(pass, s);
  if (s.p * s.q * size_of(s.dtype) % 16 != 0) return -1;
  return is_tf32(s) ? of_tf32_products(pass, s) : of_16_bit_products(pass, s);
}

// 2 x 2 to 11 x 11 of one to five channels to 6 to 64 filters, windows that overlap: narrow_input
// is 1.05 to 3.3 times as fast; fp32 in parts of TF32 where there is more to read than to multiply.
int of_few_channels(Conv2dPass pass, const Conv2dShape& s) {
  const int64_t taps = s.r * s.s, terms = s.c * taps, pixels = pixels_of(s);
  if (s.c > 8 || s.k > 64 || taps < 4 || s.stride_w >= s.s || pixels < kBatch * 28 * 28) return -1;
  if (s.dilation_h > 1 || s.dilation_w > 1) return -1;
  const bool is_16_bit = size_of(s.dtype) == 2, is_fp32 = is_plain_fp32(s);
  bool wins = false;
  switch (pass) {
    case Conv2dPass::kFprop:
      if (s.c < 3 || taps < 9) break;
      if (is_fp32) {
        wins = taps == 9 && !is_strided(s) && s.k <= 32 && pixels >= kBatch * 200 * 200;
      } else {
        const bool small = taps == 9 && s.k >= 64 && pixels <= kBatch * 32 * 32;
        wins = terms <= 3 * 11 * 11 && (is_16_bit || !small);
      }
      break;
    case Conv2dPass::kDgrad: wins = is_16_bit && s.k < 8 && taps <= 9; break;
    case Conv2dPass::kWgrad:
      wins = is_fp32 ? taps <= 25 && (is_strided(s) || pixels <= kBatch * 32 * 32)
                     : terms <= (is_16_bit ? 4 * 8 * 8 : 3 * 7 * 7);
      break;
  }
  return wins ? kNarrowInput : -1;
}

}  // namespace

int fastest_own_of_contiguous(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!runs_sm90_code()) return -1;  // not measured
  if (s.groups > 1 || s.dtype == DType::kFloat64 || !is_contiguous(args)) return -1;
  return is_pointwise(s) ? of_products(args.pass, s) : of_few_channels(args.pass, s);
}

}  // namespace braze::cuda
