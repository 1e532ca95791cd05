// Which of our own kernels is the fastest for a pass: from measurements, which stand with each
// rule.
#include <algorithm>

#include "cuda/conv2d/im2col/im2col.h"
#include "gather.cuh"
#include "launchers/conv2d_fft.h"
#include "rules.h"

namespace braze::cuda {

namespace {

// Tiles of 64 or more are wasted on thin products.
bool is_thin(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  if (args.pass == Conv2dPass::kWgrad) return e.n <= 16 || e.m < 8;
  return e.k <= 32 || e.n < 8;
}

// im2col_wins_small_images() in TF32 (3 x 3, 16 to 128 channels and filters, batch 64: 1.1 to 1.4
// times): input gradients of wider images too, where there are more channels than filters.
bool im2col_wins_small_images_in_tf32(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t plane = s.p * s.q, pixels = s.n * plane;
  if (s.r != 3 || s.s != 3 || pixels < 1024 || pixels > 64 * 60 * 60) return false;
  if (args.pass == Conv2dPass::kFprop) {
    if (plane > 16 * 16) return plane <= 28 * 28 && s.c == 32 && s.k >= 96;
    return pixels <= 64 * 16 * 16 && s.c >= 16 && s.k >= 48;
  }
  if (s.c * s.k < 32 * 128) return false;  // as in 16 bits
  if (args.pass == Conv2dPass::kWgrad) {
    return plane <= 28 * 28 && s.c >= 32 && s.c < 64 && s.k >= 64;
  }
  if (plane <= 16 * 16) return s.c >= 32 && s.k >= 32;
  return plane <= 60 * 60 && s.c >= 128 && s.k >= 32;
}

}  // namespace

// Images of few pixels, whose rows and columns fill a tile of halo_wgmma badly, as measured on an
// H200 in bf16 (32 to 256 channels and filters, 7 x 7 to 16 x 16, batch 64): whether
// implicit_gemm_wgmma is faster than that.
bool im2col_wins_small_images(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (is_pointwise(s) || is_strided(s)) return false;
  if (is_tf32(s)) return im2col_wins_small_images_in_tf32(args);
  if (size_of(s.dtype) != 2) return false;
  if (s.p * s.q > 16 * 16 || s.n * s.p * s.q > 64 * 16 * 16) return false;
  // (Smaller ones are up to a fifth faster by themselves, but not in a graph of small kernels: its
  // blocks fill multiprocessors. MNIST's step of 64 became 2.5 us longer with the forward pass by
  // it, 6 us with the two gradients.)
  if (std::min(s.c, s.k) < 32 || s.c * s.k < 32 * 128) return false;
  switch (args.pass) {
    case Conv2dPass::kFprop: return s.k >= 64;
    case Conv2dPass::kDgrad: return true;
    case Conv2dPass::kWgrad: break;
  }
  return s.c <= 64 || filled_rows(s, s.c) >= 0.85;
}

// Every s-th pixel of 32 channels and more, in 16 bits: whether implicit_gemm_wgmma is faster than
// all others, as measured on an H200, batch 64: forward (56 x 56 and 112 x 112) 1.2 to 1.6 times,
// input gradients (14 x 14 to 56 x 56, 64 channels and more) 1.1 to 1.2 times. (Those of few pixels
// and of more than twice as many filters, 896 to 2016 at 14 x 14, are pointwise's by 1.1.)
bool im2col_wins_strided_products(Conv2dPass pass, const Conv2dShape& s) {
  if (!is_strided(s) || !is_pointwise(s) || size_of(s.dtype) != 2) return false;
  if (pass == Conv2dPass::kWgrad) return false;
  const bool is_small = s.n * s.p * s.q <= 64 * 7 * 7;
  if (pass == Conv2dPass::kDgrad && is_small && s.k > 2 * s.c) return false;
  return std::min(s.c, s.k) >= (pass == Conv2dPass::kFprop ? 32 : 64);
}

// Whether a filter is neither 1 x 1 nor an undilated 3 x 3 with a stride of 1 or 2.
bool is_other_filter(const Conv2dShape& s) {
  const bool usual = is_pointwise(s) || (s.r == 3 && s.s == 3);
  return !usual || std::max(s.dilation_h, s.dilation_w) > 1 || std::max(s.stride_h, s.stride_w) > 2;
}

namespace {

// Where both take a problem, whether implicit_gemm_wgmma is faster than halo_wgmma, which reads
// each input once and wins while filters are few.
bool im2col_beats_halo(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (s.groups > 1) return false;
  if (im2col_wins_small_images(args)) return true;
  const bool fprop = args.pass == Conv2dPass::kFprop;
  // Where halo_wgmma goes by blocks of channels it is 1.2 to 1.8 times as fast, with tiles enough
  // for the time that its weights take.
  if (is_tf32(s) && fprop && s.c > 64 && s.k <= 40 && !is_pointwise(s)) {
    return s.n * s.p * s.q < 64 * 28 * 28;
  }
  if (std::min(s.c, s.k) < 64) {  // of which 1 x 1 gradients in TF32 are level
    return is_tf32(s) && is_pointwise(s) && args.pass == Conv2dPass::kDgrad &&
           std::min(s.c, s.k) >= 32;
  }
  const int64_t filters = s.c * s.k;
  if (size_of(s.dtype) == 2) {
    // Filters of one row or column, and images that cannot be cut into stripes of equal width: 1.1
    // to 1.9 times as fast on an H200 (1 x 7, 7 x 1, 3 x 3 at 55 x 57 and 127 x 129).
    const bool is_uneven = s.q % 2 == 1 && s.q > 32;
    if (is_uneven || (args.pass != Conv2dPass::kWgrad && is_other_filter(s))) return true;
  }
  switch (args.pass) {
    case Conv2dPass::kFprop:
      if (is_strided(s)) return true;
      if (s.c > 64 || s.k > 192) return !(is_tf32(s) && is_pointwise(s) && s.c == 64);
      if (size_of(s.dtype) == 2 && s.k >= 128 && s.p * s.q <= 32 * 32) return true;
      return is_pointwise(s) ? !is_tf32(s) : is_tf32(s) && s.k > 64;
    case Conv2dPass::kDgrad:
      // (In 16 bits stripes of other small images fill a tile badly.)
      return filters >
             (size_of(s.dtype) == 2 && s.p * s.q < 28 * 28 && s.q != 14 ? 64 * 64 - 1 : 64 * 64);
    case Conv2dPass::kWgrad: break;
  }
  if (size_of(s.dtype) == 2) {
    // Taps that do not lie side by side are products of their own, with tiles that are not full.
    if (s.c % 64 != 0) return filters > 224 * 224 && filled_rows(s, s.c) >= 0.9;
    return filters > 128 * 256 || s.n * s.p * s.q <= 64 * 16 * 16;
  }
  const bool wide = s.p * s.q > 120 * 120 && s.c > s.k;  // halo_wgmma: 1.15 times as fast
  return filters > (is_plain_fp32(s) || wide ? 64 * 128 : 64 * 64);
}

}  // namespace

// Where pointwise is faster than implicit_gemm_wgmma in TF32, as measured on an H200 at batch 64
// (1.05 to 1.2 times): input gradients of long sums or many channels, and forward, where no moments
// are wanted, which only the other leaves, sums of many channels.
bool pointwise_beats_im2col(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!is_tf32(s) || !is_pointwise(s) || args.pass == Conv2dPass::kWgrad) return false;
  const int64_t pixels = s.n * s.p * s.q;
  const bool few = pixels <= 64 * 7 * 7;
  if (args.pass == Conv2dPass::kFprop) {
    if (s.wants_moments || is_strided(s) || pixels > 64 * 14 * 14) return false;
    return few ? s.c >= 512 && s.k <= 192 : s.c >= 1024 && s.k <= 256;
  }
  if (is_strided(s)) return s.c > 512 || few;
  if (few && s.c >= 800) return std::min(s.c, s.k) >= 256;
  if (std::min(s.c, s.k) > 128) return true;
  if (s.k < 128 || pixels > 64 * 28 * 28) return false;
  if (few) return s.c >= 256;
  // (Its tiles are 192 channels wide.)
  return pixels <= 64 * 14 * 14 ? s.c >= 528 && (s.c <= 576 || s.c > 640) : s.c >= 480;
}

// Whether implicit_gemm_wgmma is faster than all others where a filter's row of pixels is one pixel
// to it, as measured on an H100 (8 x 8 / 4 of 4 channels, 4 x 4 / 2 of 32, 2 x 2 / 2 of 96 and 192,
// batch 32 to 256, bf16 and TF32): fprop 1.3 to 3 times. On an H200 in bf16 one image's 8 x 8 / 4
// takes 7 us in place of 34. In fp32 parts it is far behind.
bool im2col_wins_by_rows(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (is_plain_fp32(s)) return false;
  const int64_t pixels = s.n * s.p * s.q;
  const double filled = im2col::rows_filled(args);
  if (filled == 0 || std::min(s.stride_h, s.stride_w) < 2)
    return false;  // unpadded 1: not measured
  const int64_t least = size_of(s.dtype) == 2 ? 9 * 9 : 32 * 9 * 9;
  if (s.k < 32 || pixels < least) return false;
  if (args.pass == Conv2dPass::kFprop) {
    return filled >= 0.75 || pixels <= (size_of(s.dtype) == 2 ? 64 : 32) * 20 * 20;
  }
  // cuDNN's sum short products in 16 bits in half the time.
  return s.k <= 64 && (size_of(s.dtype) == 2 ? s.c <= 4 : filled == 1);
}

namespace {

// The next one, of gradients of few filters, the last layers of networks (32 to 128 channels, 1 x 1
// and 3 x 3, 64 x 64 pixels and more, bf16 and TF32; of a single channel 5 x 5): 1.5 to 4 times
// faster. With eight filters cuDNN's are ahead.
bool narrow_gradients_win(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool wgrad = args.pass == Conv2dPass::kWgrad;
  const Tensor4dRef &y = wgrad ? args.other : args.gathered, &x = wgrad ? args.gathered : args.out;
  if (is_plain_fp32(s) || y.c != 1 || (x.c != 1 && s.c > 1)) return false;
  return s.k < 8 && s.c <= 128 && s.r * s.s <= 25 && s.n * s.p * s.q >= 64 * 28 * 28;
}

// Whether narrow_input is faster than cuDNN and than the others of ours, as measured on an H200
// (benchmarks/convolutions.py, first layers at batch 64, and LeNet's and Nature-CNN's at 32 to
// 1024): channels last; fp32 in parts 1.1 to 2.6 times, but not forward for few filters of one
// channel, nor weight gradients of windows that do not overlap. Long filters leave its tiles no
// room in shared memory.
bool narrow_input_wins(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool wgrad = args.pass == Conv2dPass::kWgrad, is_16_bit = size_of(s.dtype) == 2;
  const Tensor4dRef &x = args.gathered, &y = wgrad ? args.other : args.out;
  if (args.pass == Conv2dPass::kDgrad || s.c > 8) return narrow_gradients_win(args);
  if ((x.c != 1 && s.c > 1) || y.c != 1) return false;
  if (is_plain_fp32(s) && (wgrad ? s.stride_w >= s.s : s.c < 3 && s.k < 16)) return false;
  if (s.n * s.p * s.q < (is_16_bit ? 64 * 10 * 10 : 64 * 20 * 20)) return false;  // not measured
  if (s.c == 8 && (wgrad || !is_16_bit) && takes(kHalo, args)) return false;
  const int64_t terms = s.c * s.r * s.s;
  // (In fp32 the others for 8 x 8 of four channels to 32 filters took 1.2 and 7.5 times as long.)
  const bool may_be_long = is_16_bit || (is_plain_fp32(s) && s.k <= 32);
  if (wgrad) return terms <= (may_be_long ? 4 * 8 * 8 : 6 * 5 * 5);
  const int64_t most = is_plain_fp32(s) ? 3 * 7 * 7 : 3 * 11 * 11;
  return terms <= most && (is_16_bit || s.c < 4 || terms <= 6 * 5 * 5);
}

// Whether narrow_input_wgmma is faster than that and all others, as measured on an H100 (three and
// four channels, 2 x 2 to 11 x 11, 24 to 64 filters, batch 1 to 1024): in bf16 forward 1.0 to 1.8
// times, with moments, which it has for nearly nothing, 1.1 to 1.7 times, and weight gradients 1.0
// to 1.7 times. In TF32 few filters are behind, and so are, in 16 bits on an H200, windows that do
// not overlap (4 x 4 / 4: 0.9). One channel of four is level. In parts, on an H200 at batch 64:
// fp32 forward 1.1 to 2.3 times, but for 2 x 2; weight gradients of 5 x 5 and 7 x 7 filters 1.3
// to 2.7 times in fp32 and to 1.5 in TF32, fp32's of 3 x 3 ones where a stride or 64 filters leave
// more to multiply than to split.
bool narrow_wgmma_wins(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t pixels = s.n * s.p * s.q;
  const bool is_16_bit = size_of(s.dtype) == 2, is_fp32 = is_plain_fp32(s);
  if (args.pass == Conv2dPass::kDgrad || s.c < 3) return false;
  if (args.pass == Conv2dPass::kWgrad) {
    if (s.k < 24 || pixels < 64 * 28 * 28) return false;
    const bool large = pixels >= 64 * 112 * 112;
    return is_16_bit || s.r * s.s >= 25 || (is_fp32 && large && (s.stride_w > 1 || s.k >= 64));
  }
  if (is_fp32) return s.k >= 24 && s.r * s.s >= 9 && pixels >= 64 * 20 * 20;
  if (im2col_wins_by_rows(args)) return is_16_bit && pixels >= 256 * 20 * 20;
  if (is_16_bit && s.stride_w >= s.s) return false;
  return s.k >= (is_16_bit ? 24 : 48) && pixels >= 112 * 112;
}

// The same of narrow_output (the ends of networks, 3 x 3 to 5 x 5; gradients of 3 and 6 channels):
// 16 bits. With eight results, or in TF32, halo_wgmma is ahead, but for 1 x 1 filters; sums of
// thousands of terms are cuDNN's.
bool narrow_output_wins(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool dgrad = args.pass == Conv2dPass::kDgrad;
  const int64_t results = dgrad ? s.c : s.k, terms = (dgrad ? s.k : s.c) * s.r * s.s;
  if (is_tf32(s) && is_pointwise(s) && !is_strided(s)) {  // the heads of U-Nets
    return !dgrad && results < 8 && terms <= 32 && s.n * s.p * s.q >= 16 * 128 * 128;
  }
  return size_of(s.dtype) == 2 && results < 8 && !is_pointwise(s) && terms <= 128 * 3 * 3 &&
         s.n * s.p * s.q >= 64 * 10 * 10;
}

}  // namespace

// Whether the FFT is faster than cuDNN and than the others of ours, as measured on an H200
// (benchmarks/large_filters.py, bf16): one channel and one filter, images of 512 x 512 to 2048 x
// 2048 with filters of 31 x 31 and 63 x 63. fprop took 60 to 193 us (cuDNN's best engine 140 to
// 2124), dgrad 56 to 108 (262 to 3271), wgrad 80 to 117 (1004 to 8776). float32 is transformed as
// bf16 is, and multiplies no faster. float64 and several channels, depthwise ones too, were not
// measured; matrices of spectra would not follow cuDNN's setting of TF32 either.
bool fft_wins(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  constexpr int64_t kLeastExtent = 31, kMostChannels = 1;
  if (s.dtype == DType::kFloat64 || std::min(s.r, s.s) < kLeastExtent) return false;
  if (std::max(s.c, s.k) > kMostChannels) return false;
  if (is_strided(s) || s.dilation_h > 1 || s.dilation_w > 1 || fft_obstacle(problem)) return false;
  // Of those figures: the launches of small transforms, and what the device takes for a nanosecond
  // of the cost model; cuDNN's multiplications per nanosecond, at most (fprop at 63 x 63; 1400 to
  // 1900 at 31 x 31, wgrad 220 to 470); and by how much the FFT has to be ahead of them.
  constexpr double kLaunches = 60e3, kPerModelled = 3.5e-3, kDirectRate = 2000, kMargin = 1.5;
  const double terms = static_cast<double>(s.n) * s.p * s.q * s.k * s.c * s.r * s.s;
  if (terms / kDirectRate < kMargin * kLaunches) return false;
  FftPlan plan;
  const double fft = kLaunches + kPerModelled * plan_fft(problem, kAnyKernel, &plan);
  return plan.by_elements && kMargin * fft < terms / kDirectRate;
}

// Input gradients of 32 filters of 1 x 1 in TF32 to many channels, whose sums are too short for
// other rules to take them for products: implicit_gemm_wgmma is 1.1 to 1.2 times as fast as cuDNN
// on an H200 (256 channels at 28 x 28 and 528 at 14 x 14, batch 64).
bool im2col_wins_thin_gradients(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (args.pass != Conv2dPass::kDgrad || !is_tf32(s) || !is_pointwise(s) || is_strided(s)) {
    return false;
  }
  const int64_t pixels = s.n * s.p * s.q;
  return s.groups == 1 && s.k == 32 && pixels >= 64 * 14 * 14 &&
         s.c >= (pixels <= 64 * 14 * 14 ? 528 : 256);
}

// Few filters of 1 x 1, forward, of sums too long for the kernels of few terms: in TF32 (64 to 256
// channels, 64 x 64 to 256 x 256 pixels) implicit_gemm_wgmma is 1.3 to 2.7 times as fast as cuDNN,
// in 16 bits (128 channels, 32 x 32 pixels) 1.3 times.
bool im2col_wins_by_sums(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (args.pass != Conv2dPass::kFprop || !is_pointwise(s) || is_strided(s)) return false;
  if (s.groups > 1 || s.k >= 8 || s.c > 256) return false;
  const bool tf32 = is_tf32(s);
  if (!tf32 && size_of(s.dtype) != 2) return false;
  return s.c >= (tf32 ? 64 : 128) && s.n * s.p * s.q >= (tf32 ? 64 * 64 * 64 : 16 * 32 * 32);
}

// 3 x 3 filters on few pixels, whose depth implicit_gemm_wgmma splits over the blocks of clusters,
// on an H200 (ResNet-50's and GoogLeNet's layers, batches of 1 and 8): 1.1 times as fast as cuDNN
// forward, 1.1 times in 16 bits and 1.4 times in TF32 backward; of many channels not where a wave
// is full.
bool im2col_wins_few_pixels(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (args.pass == Conv2dPass::kWgrad || s.groups > 1 || s.r != 3 || s.s != 3) return false;
  if (s.dilation_h > 1 || s.dilation_w > 1 || std::max(s.stride_h, s.stride_w) > 2) return false;
  if (is_strided(s) && args.pass == Conv2dPass::kDgrad) return false;
  if ((size_of(s.dtype) != 2 && !is_tf32(s)) || std::min(s.c, s.k) < 48) return false;
  const int64_t pixels = s.n * s.p * s.q;
  return pixels <= 16 * 16 || (pixels <= 28 * 28 && s.c * s.k <= 192 * 384);
}

// The input gradient of the same in 16 bits and channels last, where all threads of pointwise write
// whole rows: twice as fast as direct and 1.2 times as cuDNN.
bool pointwise_wins_few_filters(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  return args.pass == Conv2dPass::kDgrad && size_of(s.dtype) == 2 && args.out.c == 1 &&
         is_pointwise(s) && !is_strided(s) && s.groups == 1 && s.k < 8 && s.c >= 128 &&
         s.c % 8 == 0;
}

// Images of one pixel (squeeze-and-excitation) in 16 bits: products of as many rows as images, as
// measured on an H200 (batch 64, 4 to 672 channels and filters), where pointwise is up to 1.6
// times, weight gradients up to 2.3 times as fast as cuDNN; sums of input gradients over more
// filters than there are channels are not. Of more channels, up to 3024: weight gradients whose
// rows are no whole vectors are 2 to 6 times as fast, sums of many channels up to 1.3 times. Of a
// single image (2048 to 1000) all three are ahead.
bool pointwise_wins_one_pixel(const Conv2dShape& s, Conv2dPass pass) {
  if (size_of(s.dtype) != 2 || !is_pointwise(s) || s.h * s.w != 1 || s.groups > 1) return false;
  if (s.n == 1) return std::min(s.c, s.k) >= 512;
  if (s.n < 32 || s.n > 128) return false;
  if (std::max(s.c, s.k) > 672) {
    if (pass == Conv2dPass::kWgrad) return !in_whole_vectors(s);
    return pass == Conv2dPass::kFprop && s.k < s.c && (s.c >= 1152 || !in_whole_vectors(s));
  }
  return pass != Conv2dPass::kDgrad || s.k <= s.c;
}

// Groups of 24 channels and more in 16 bits, 3 x 3: whether implicit_gemm_mma is faster than the
// grouped kernel, as measured on an H200 (RegNet-Y, 24, 56 and 112 channels, batch 64: 1.05 to 2.7
// times): with a stride, where tiles of pixels with what their taps reach are four times as large,
// and weight gradients of images smaller than a tile.
bool mma_wins_groups(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t width = s.c / s.groups, plane = s.p * s.q;
  if (size_of(s.dtype) != 2 || s.groups == 1 || s.c != s.k || s.r != 3 || s.s != 3) return false;
  if (width < 24 || width == 32 || width % 8 != 0 || s.n * plane < 64 * 7 * 7) return false;
  const bool fprop = args.pass == Conv2dPass::kFprop;
  if (args.pass == Conv2dPass::kDgrad) return false;
  if (!is_strided(s)) return !fprop && plane <= 7 * 7;
  return width >= 56 || plane <= (fprop ? 7 * 7 : 28 * 28);
}

namespace {

// Groups of one to three channels with several filters in all, 3 x 3 in 16 bits: which of grouped
// and direct is the fastest, as measured on an H200 (one channel and two filters, three and three).
bool grouped_wins_narrow_groups(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (s.groups == 1 || size_of(s.dtype) != 2 || s.r * s.s < 9) return false;
  return s.c < 3 * s.groups || args.pass == Conv2dPass::kDgrad;
}

// Weight gradients of 1 x 1 filters in 16 bits and channels last whose rows are no whole vectors:
// implicit_gemm_mma reads them twice as fast as pointwise.
bool mma_wins_uneven_rows(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  return args.pass == Conv2dPass::kWgrad && size_of(s.dtype) == 2 && is_pointwise(s) &&
         args.gathered.c == 1 && args.other.c == 1 && !in_whole_vectors(s);
}

}  // namespace

// Large filters of few channels, whose rows of shared memory implicit_gemm_wgmma would fill by
// half: implicit_gemm_mma is twice as fast as that (9 x 9, 32 channels).
bool mma_wins_many_taps(const Conv2dShape& s) {
  return size_of(s.dtype) == 2 && s.groups == 1 && s.r * s.s >= 49 && std::min(s.c, s.k) >= 16 &&
         std::max(s.c, s.k) <= 32 && !is_strided(s);
}

int fastest_own(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int of_patches = fastest_own_of_patches(args);
  if (of_patches >= 0 && takes(of_patches, args)) return of_patches;
  const int of_others = fastest_own_of_others(args);
  if (of_others >= 0 && takes(of_others, args)) return of_others;
  const int of_contiguous = fastest_own_of_contiguous(args);
  if (of_contiguous >= 0 && takes(of_contiguous, args)) return of_contiguous;
  if (takes(kDepthwise, args)) return kDepthwise;
  if (is_grouped(s) && takes(kGrouped, args)) {
    return mma_wins_groups(args) && takes(kMma, args) ? kMma : kGrouped;
  }
  if (grouped_wins_narrow_groups(args) && takes(kGrouped, args)) return kGrouped;
  const bool product_of_few =
      pointwise_wins_one_pixel(s, args.pass) || pointwise_wins_few_filters(args);
  if (product_of_few && takes(kPointwise, args)) return kPointwise;
  if (narrow_wgmma_wins(args) && takes(kNarrowWgmma, args)) return kNarrowWgmma;
  if (im2col_wins_by_rows(args) && takes(kIm2col, args)) return kIm2col;
  if (narrow_input_wins(args) && takes(kNarrowInput, args)) return kNarrowInput;
  if (narrow_output_wins(args) && takes(kNarrowOutput, args)) return kNarrowOutput;
  const bool product_of_im2col = im2col_wins_by_sums(args) || im2col_wins_few_pixels(args) ||
                                 im2col_wins_thin_gradients(args) ||
                                 im2col_wins_strided_products(args.pass, s);
  if (product_of_im2col && takes(kIm2col, args)) return kIm2col;
  if (args.gathered.c == 1 && is_known_in_fp32(args.pass, s)) {
    const int kernel = fastest_own_in_fp32(args);
    if (kernel >= 0 && takes(kernel, args)) return kernel;
  }
  if (is_thin(args)) {
    const bool tf32 = is_tf32(s) && !is_pointwise(s);
    return tf32 && args.pass != Conv2dPass::kWgrad && takes(kHalo, args) ? kHalo : kDirect;
  }
  // Three of four input gradients of a stride of 2 are zeros, which a product need not compute;
  // weight gradients have one product of long sums.
  const bool wgrad = args.pass == Conv2dPass::kWgrad;
  if (wgrad && is_strided(s) && !is_plain_fp32(s) && takes(kIm2col, args)) return kIm2col;
  const bool by_mma = mma_wins_many_taps(s) || mma_wins_uneven_rows(args);
  if (by_mma && takes(kMma, args)) return kMma;
  const bool product = wgrad || pointwise_beats_im2col(args) ||
                       (args.pass == Conv2dPass::kDgrad && is_strided(s) && size_of(s.dtype) == 2);
  if (product && is_pointwise(s) && takes(kPointwise, args)) return kPointwise;
  if (im2col_beats_halo(args) && takes(kIm2col, args)) return kIm2col;
  // Of wider images in 16 bits halo_wgmma was 1.2 times as fast (H200: 24 to 64 channels at 31 x
  // 31, 32 to 64 at 128 x 128).
  const bool narrow = size_of(s.dtype) != 2 || s.w <= 20;
  // Of parts of a few channels implicit_gemm_wgmma would multiply rows that are nearly empty.
  const bool empty_rows = wgrad && is_plain_fp32(s) && s.c < 8;
  for (const int kernel : {kNarrowDgrad, kHalo, kPointwise, kIm2col, kMma, kSimt}) {
    if (kernel == kNarrowDgrad && !narrow) continue;
    if (kernel == kIm2col && empty_rows) continue;
    if (takes(kernel, args)) return kernel;
  }
  return kDirect;
}

}  // namespace braze::cuda
