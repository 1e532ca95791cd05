// The convolution's kernels, and the choice among them.
#include "launchers/conv2d.h"
#include "launchers/conv2d_added.h"
#include "launchers/conv2d_norm_grad.h"
#include "launchers/conv2d_tail.h"

#include <algorithm>
#include <climits>
#include <iterator>

#include "cuda/conv2d/depthwise/depthwise.h"
#include "cuda/conv2d/grouped/grouped.h"
#include "cuda/conv2d/halo/halo.h"
#include "cuda/conv2d/im2col/im2col.h"
#include "cuda/conv2d/narrow/narrow.h"
#include "cuda/conv2d/narrow/output.h"
#include "cuda/conv2d/narrow/wgmma.h"
#include "cuda/conv2d/pointwise/pointwise.h"
#include "gather.cuh"
#include "kernels.h"
#include "launchers/conv2d_fft.h"
#include "tail.cuh"

namespace braze::cuda {
namespace {

constexpr int64_t kMaxIndex = INT_MAX - 1024;  // room for the last tile's overhang

bool has_small_extents(const Conv2dArgs& args) {
  const Conv2dShape& p = args.shape;
  const ConvExtents e = conv_extents(args);
  return std::max({e.m, e.n, e.k, p.h, p.w, p.p * p.stride_h + p.r * p.dilation_h,
                   p.q * p.stride_w + p.s * p.dilation_w}) <= kMaxIndex;
}

// Whether 32-bit offsets reach every element of the operands, packed or not, and positions outside
// the image too.
bool has_small_offsets(const Conv2dArgs& args) {
  const Conv2dShape& p = args.shape;
  const auto small = [&](const Tensor4dRef& t, int64_t n, int64_t c, int64_t h, int64_t w) {
    const int64_t rows = h + p.pad_h + p.r * p.dilation_h;
    const int64_t columns = w + p.pad_w + p.s * p.dilation_w;
    return std::max(n * h * w * (c + 8 * p.groups),
                    n * t.n + c * t.c + rows * t.h + columns * t.w) < kMaxIndex / 2;
  };
  const Tensor4dRef &in = args.gathered, &other = args.other;
  switch (args.pass) {
    case Conv2dPass::kFprop:
      return small(in, p.n, p.c, p.h, p.w) && small(other, p.k, p.c, p.r, p.s);
    case Conv2dPass::kDgrad:
      return small(in, p.n, p.k, p.p, p.q) && small(other, p.k, p.c, p.r, p.s);
    case Conv2dPass::kWgrad: break;
  }
  return small(in, p.n, p.c, p.h, p.w) && small(other, p.n, p.k, p.p, p.q);
}

// Why a kernel cannot take the arguments, or nullptr.
const char* direct_obstacle(const Conv2dArgs& args) {
  return has_small_extents(args) ? nullptr : "it counts pixels and taps with 31 bits";
}

const char* gemm_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return has_small_offsets(args) ? nullptr : "it addresses tensors with 31 bits";
}

const char* simt_obstacle(const Conv2dArgs& args) {
  if (const char* why = gemm_obstacle(args)) return why;
  return size_of(args.shape.dtype) == 2 ? "it takes float32 and float64" : nullptr;
}

const char* mma_obstacle(const Conv2dArgs& args) {
  if (const char* why = gemm_obstacle(args)) return why;
  const DType dtype = args.shape.dtype;
  if (dtype == DType::kFloat64) return "it takes float32 (as TF32), bfloat16 and float16";
  if (dtype == DType::kFloat32 && !args.shape.allow_tf32) {
    return "float32 inputs would be rounded to TF32, which is not allowed";
  }
  return nullptr;
}

const char* halo_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return halo::supports(args)
             ? nullptr
             : "it takes channels-last float32, bfloat16 and float16 tensors, stride and "
               "dilation 1, one group, small filters (three columns in wgrad), and compute "
               "capability 9.0";
}

const char* narrow_dgrad_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return halo::supports_narrow_dgrad(args)
             ? halo_obstacle(args)
             : "it takes input gradients of up to 32 channels, three filter columns, up to three "
               "filter rows, filters in multiples of 64 (32 in TF32), all tensors channels last, "
               "weights and tiles that fit shared memory, where halo_wgmma takes them too";
}

const char* depthwise_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return depthwise::supports(args)
             ? nullptr
             : "it takes as many groups as channels with one filter of 3 x 3, 5 x 5 or 7 x 7 each, "
               "stride 1 or 2, dilation 1, padding less than the filter, and channels-last or "
               "contiguous float32, bfloat16 and float16 tensors";
}

const char* pointwise_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return pointwise::obstacle(args);
}

const char* im2col_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return im2col::obstacle(args);
}

const char* narrow_input_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return narrow::obstacle(args);
}

const char* narrow_input_wgmma_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return narrow::wgmma_obstacle(args);
}

const char* narrow_output_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return narrow::output_obstacle(args);
}

const char* grouped_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return grouped::obstacle(args);
}

struct Kernel {
  KernelInfo info;
  const char* (*obstacle)(const Conv2dArgs&);
  void (*plan)(const Conv2dArgs&, Conv2dPlan*);
  void (*run)(Stream, const Conv2dArgs&, const Conv2dPlan&, void* workspace);
};

constexpr Kernel kKernels[] = {
    {{"conv2d", "direct", "float64 float32 bfloat16 float16", "sm_80+", true,
      "one thread per pixel; few taps, few channels, depthwise"},
     direct_obstacle,
     plan_direct,
     run_direct},
    {{"conv2d", "implicit_gemm_simt", "float64 float32", "sm_80+", true,
      "implicit GEMM on CUDA cores"},
     simt_obstacle,
     plan_simt,
     run_simt},
    {{"conv2d", "implicit_gemm_mma", "float32 bfloat16 float16", "sm_80+", true,
      "implicit GEMM on tensor cores; float32 as TF32"},
     mma_obstacle,
     plan_mma,
     run_mma},
    {{"conv2d", "halo_wgmma", "float32 bfloat16 float16", "sm_90a", true,
      "taps are shifted reads of one tile in shared memory; float32 as TF32 or in bf16 parts"},
     halo_obstacle,
     halo::plan,
     halo::run},
    {{"conv2d", "halo_narrow_dgrad", "float32 bfloat16 float16", "sm_90a", true,
      "input gradients of up to 32 channels: as halo_wgmma, with pixels as the product's rows"},
     narrow_dgrad_obstacle,
     halo::plan_narrow_dgrad,
     halo::run_narrow_dgrad},
    {{"conv2d", "depthwise", "float32 bfloat16 float16", "sm_80+", true,
      "depthwise: tiles in shared memory, or rows that pass through registers once"},
     depthwise_obstacle,
     depthwise::plan,
     depthwise::run},
    {{"conv2d", "pointwise", "float64 float32 bfloat16 float16", "sm_80+", true,
      "1 x 1 filters: a matrix product, by the kernel that fits"},
     pointwise_obstacle,
     pointwise::plan,
     pointwise::run},
    {{"conv2d", "implicit_gemm_wgmma", "float32 bfloat16 float16", "sm_90a", true,
      "implicit GEMM on tensor cores: TMA in im2col mode and wgmma, producer and consumers apart; "
      "float32 as TF32 or in bf16 parts"},
     im2col_obstacle,
     im2col::plan,
     im2col::run},
    {{"conv2d", "narrow_input", "float32 bfloat16 float16", "sm_80+", true,
      "images of up to eight channels, forward and weight gradient, and gradients of up to eight "
      "filters: products of patches in shared memory; float32 as TF32 or in parts of TF32"},
     narrow_input_obstacle,
     narrow::plan,
     narrow::run},
    {{"conv2d", "narrow_input_wgmma", "float32 bfloat16 float16", "sm_90a", true,
      "images of up to four channels, forward and, in 16 bits, weight gradient: windows are "
      "shifted reads of one tile in shared memory; float32 as TF32"},
     narrow_input_wgmma_obstacle,
     narrow::plan_wgmma,
     narrow::run_wgmma},
    {{"conv2d", "narrow_output", "float32 bfloat16 float16", "sm_80+", true,
      "up to eight filters, or input gradients of up to eight channels: pixels of a tile in shared "
      "memory times one product's columns; float32 as TF32 or in parts of TF32"},
     narrow_output_obstacle,
     narrow::plan_output,
     narrow::run_output},
    {{"conv2d", "grouped", "float32 bfloat16 float16", "sm_80+", true,
      "groups of a few to some hundred channels: products of each group's pixels in shared memory; "
      "float32 as TF32 or in parts of TF32"},
     grouped_obstacle,
     grouped::plan,
     grouped::run},
    {{"conv2d", "fft", "float64 float32 bfloat16 float16", "sm_80+", true,
      "large filters: products of spectra, by torch's FFT, whole images or overlap-save tiles"},
     nullptr,
     nullptr,
     nullptr},
};
constexpr int kCount = std::size(kKernels);
constexpr int kDirect = kernel_number(kKernels, "direct"),
              kSimt = kernel_number(kKernels, "implicit_gemm_simt"),
              kMma = kernel_number(kKernels, "implicit_gemm_mma"),
              kHalo = kernel_number(kKernels, "halo_wgmma"),
              kNarrowDgrad = kernel_number(kKernels, "halo_narrow_dgrad"),
              kDepthwise = kernel_number(kKernels, "depthwise"),
              kPointwise = kernel_number(kKernels, "pointwise"),
              kIm2col = kernel_number(kKernels, "implicit_gemm_wgmma"),
              kNarrowInput = kernel_number(kKernels, "narrow_input"),
              kNarrowWgmma = kernel_number(kKernels, "narrow_input_wgmma"),
              kNarrowOutput = kernel_number(kKernels, "narrow_output"),
              kGrouped = kernel_number(kKernels, "grouped"), kFft = kernel_number(kKernels, "fft");
const KernelEntries kEntries(kKernels, kCount);

bool is_halo(int kernel) { return kernel == kHalo || kernel == kNarrowDgrad; }

// Tiles of 64 or more are wasted on thin products.
bool is_thin(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  if (args.pass == Conv2dPass::kWgrad) return e.n <= 16 || e.m < 8;
  return e.k <= 32 || e.n < 8;
}

bool is_pointwise(const Conv2dShape& s) { return s.r == 1 && s.s == 1; }
bool is_strided(const Conv2dShape& s) { return s.stride_h > 1 || s.stride_w > 1; }
bool is_plain_fp32(const Conv2dShape& s) { return s.dtype == DType::kFloat32 && !s.allow_tf32; }
bool is_tf32(const Conv2dShape& s) { return s.dtype == DType::kFloat32 && s.allow_tf32; }

// Whether rows of channels and of filters are whole vectors of 16 bits.
bool in_whole_vectors(const Conv2dShape& s) { return s.c % 8 == 0 && s.k % 8 == 0; }

// How much of the rows of shared memory that channels are multiplied by is channels.
double filled_rows(const Conv2dShape& s, int64_t channels) {
  const int64_t row = 128 / size_of(s.dtype);
  return static_cast<double>(channels) / (ceil_div(channels, row) * row);
}

// The same in TF32 (24 to 128 channels and filters; 1.1 to 1.4 times): input gradients of wider
// images too, where there are more channels than filters.
bool im2col_wins_small_images_in_tf32(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t plane = s.p * s.q;
  if (s.n * plane < 1024) return false;
  if (args.pass == Conv2dPass::kFprop) return plane <= 16 * 16 && s.c >= 24 && s.k >= 64;
  if (s.c * s.k < 32 * 128) return false;  // as in 16 bits
  switch (args.pass) {
    case Conv2dPass::kFprop: break;
    case Conv2dPass::kDgrad:
      if (plane <= 16 * 16) return s.c >= 32 && s.k >= 32;
      return plane <= 60 * 60 && s.c >= 128 && s.k >= 32;
    case Conv2dPass::kWgrad: break;
  }
  return plane <= 28 * 28 && s.c >= 32 && s.k >= 64;
}

// Images of few pixels, whose rows and columns fill a tile of halo_wgmma badly, as measured on an
// H200 in bf16 (32 to 256 channels and filters, 7 x 7 to 16 x 16, batch 64): whether
// implicit_gemm_wgmma is faster than that.
bool im2col_wins_small_images(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (is_pointwise(s) || is_strided(s)) return false;
  if (is_tf32(s)) return s.r == 3 && s.s == 3 && im2col_wins_small_images_in_tf32(args);
  if (size_of(s.dtype) != 2) return false;
  if (s.p * s.q > 16 * 16 || s.n * s.p * s.q > 64 * 16 * 16) return false;
  // (Smaller ones are up to a fifth faster by themselves, but not the two gradients beside each
  // other in a graph: its blocks fill multiprocessors. MNIST's step of 64 became 6 us longer.)
  if (std::min(s.c, s.k) < 32 || s.c * s.k < 32 * 128) return false;
  switch (args.pass) {
    case Conv2dPass::kFprop: return s.k >= 64;
    case Conv2dPass::kDgrad: return true;
    case Conv2dPass::kWgrad: break;
  }
  return s.c <= 64 || filled_rows(s, s.c) >= 0.85;
}

// Every s-th pixel of 32 channels and more, forward in 16 bits: whether implicit_gemm_wgmma is
// faster than all others, as measured on an H200 (56 x 56 and 112 x 112, batch 64: 1.2 to 1.6
// times).
bool im2col_wins_strided_products(Conv2dPass pass, const Conv2dShape& s) {
  return pass == Conv2dPass::kFprop && is_strided(s) && is_pointwise(s) && size_of(s.dtype) == 2 &&
         std::min(s.c, s.k) >= 32;
}

// Whether a filter is neither 1 x 1 nor an undilated 3 x 3 with a stride of 1 or 2.
bool is_other_filter(const Conv2dShape& s) {
  const bool usual = is_pointwise(s) || (s.r == 3 && s.s == 3);
  return !usual || std::max(s.dilation_h, s.dilation_w) > 1 || std::max(s.stride_h, s.stride_w) > 2;
}

// Where both take a problem, whether implicit_gemm_wgmma is faster than halo_wgmma, which reads
// each input once and wins while filters are few.
bool im2col_beats_halo(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (s.groups > 1) return false;
  if (im2col_wins_small_images(args)) return true;
  if (std::min(s.c, s.k) < 64) return false;
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
      // Taps of TF32 leave room for tiles of 64 positions only.
      return is_tf32(s) != is_pointwise(s);
    case Conv2dPass::kDgrad:
      return filters > (size_of(s.dtype) == 2 && s.p * s.q < 14 * 14 ? 64 * 64 - 1 : 64 * 64);
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

// Where pointwise is faster than implicit_gemm_wgmma: input gradients of TF32, of long sums or many
// channels (1.05 to 1.2 times). (Forward it is up to 4 us ahead at 1024 channels, but leaves no
// moments.)
bool pointwise_beats_im2col(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!is_tf32(s) || !is_pointwise(s) || args.pass != Conv2dPass::kDgrad) return false;
  const int64_t pixels = s.n * s.p * s.q;
  const bool few = pixels <= 64 * 7 * 7;
  if (is_strided(s)) return s.c > 512 || few;
  if (few && s.c > 800) return std::min(s.c, s.k) >= 256;
  if (std::min(s.c, s.k) > 128) return true;
  return s.k == 128 && pixels <= 64 * 28 * 28 &&
         s.c >= (few                      ? 256
                 : pixels <= 64 * 14 * 14 ? 528
                                          : 480);
}

// Whether implicit_gemm_wgmma is faster than all others where a filter's row of pixels is one pixel
// to it, as measured on an H100 (8 x 8 / 4 of 4 channels, 4 x 4 / 2 of 32, 2 x 2 / 2 of 96 and 192,
// batch 32 to 256, bf16 and TF32): fprop 1.3 to 3 times.
bool im2col_wins_by_rows(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t pixels = s.n * s.p * s.q;
  const double filled = im2col::rows_filled(args);
  if (filled == 0 || std::min(s.stride_h, s.stride_w) < 2)
    return false;  // unpadded 1: not measured
  if (s.k < 32 || pixels < 32 * 9 * 9) return false;
  if (args.pass == Conv2dPass::kFprop) {
    return filled >= 0.75 || pixels <= (size_of(s.dtype) == 2 ? 64 : 32) * 20 * 20;
  }
  // cuDNN's sum short products in 16 bits in half the time.
  return s.k <= 64 && (size_of(s.dtype) == 2 ? s.c <= 4 : filled == 1);
}

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
// 1024): channels last, bf16 and TF32. Long filters leave its tiles no room in shared memory.
bool narrow_input_wins(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool wgrad = args.pass == Conv2dPass::kWgrad, is_16_bit = size_of(s.dtype) == 2;
  const Tensor4dRef &x = args.gathered, &y = wgrad ? args.other : args.out;
  if (args.pass == Conv2dPass::kDgrad || s.c > 8) return narrow_gradients_win(args);
  if (is_plain_fp32(s) || (x.c != 1 && s.c > 1) || y.c != 1) return false;
  if (s.n * s.p * s.q < (is_16_bit ? 64 * 10 * 10 : 64 * 20 * 20)) return false;  // not measured
  if (s.c == 8 && (wgrad || !is_16_bit) && !halo_obstacle(args)) return false;
  const int64_t terms = s.c * s.r * s.s;
  if (wgrad) return terms <= (is_16_bit ? 4 * 8 * 8 : 6 * 5 * 5);
  return terms <= 3 * 11 * 11 && (is_16_bit || s.c < 4 || terms <= 6 * 5 * 5);
}

// Whether narrow_input_wgmma is faster than that and all others, as measured on an H100 (three and
// four channels, 2 x 2 to 11 x 11, 24 to 64 filters, batch 1 to 1024): in bf16 forward 1.0 to 1.8
// times, with moments, which it has for nearly nothing, 1.1 to 1.7 times, and weight gradients 1.0
// to 1.7 times. In TF32 few filters are behind, and so are, in 16 bits on an H200, windows that do
// not overlap (4 x 4 / 4: 0.9). One channel of four is level.
bool narrow_wgmma_wins(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t pixels = s.n * s.p * s.q;
  const bool is_16_bit = size_of(s.dtype) == 2;
  if (args.pass == Conv2dPass::kDgrad || s.c < 3) return false;
  if (args.pass == Conv2dPass::kWgrad) return s.k >= 24 && pixels >= 64 * 28 * 28;
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

// Groups whose channels fill at least a quarter of a product's rows and columns.
bool is_grouped(const Conv2dShape& s) {
  constexpr int64_t kLeast = 4;
  return s.groups > 1 && std::min(s.c, s.k) >= kLeast * s.groups;
}

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

// Large filters of few channels, whose rows of shared memory implicit_gemm_wgmma would fill by
// half: implicit_gemm_mma is twice as fast as that (9 x 9, 32 channels).
bool mma_wins_many_taps(const Conv2dShape& s) {
  return size_of(s.dtype) == 2 && s.groups == 1 && s.r * s.s >= 49 && std::min(s.c, s.k) >= 16 &&
         std::max(s.c, s.k) <= 32 && !is_strided(s);
}

// The fastest of our own, but for the FFT.
int choose(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!depthwise_obstacle(args)) return kDepthwise;
  if (is_grouped(s) && !grouped_obstacle(args)) {
    return mma_wins_groups(args) && !mma_obstacle(args) ? kMma : kGrouped;
  }
  if (grouped_wins_narrow_groups(args) && !grouped_obstacle(args)) return kGrouped;
  const bool product_of_few =
      pointwise_wins_one_pixel(s, args.pass) || pointwise_wins_few_filters(args);
  if (product_of_few && !pointwise_obstacle(args)) return kPointwise;
  if (narrow_wgmma_wins(args) && !narrow_input_wgmma_obstacle(args)) return kNarrowWgmma;
  if (im2col_wins_by_rows(args) && !im2col_obstacle(args)) return kIm2col;
  if (narrow_input_wins(args) && !narrow_input_obstacle(args)) return kNarrowInput;
  if (narrow_output_wins(args) && !narrow_output_obstacle(args)) return kNarrowOutput;
  const bool product_of_im2col = im2col_wins_by_sums(args) || im2col_wins_few_pixels(args) ||
                                 im2col_wins_strided_products(args.pass, s);
  if (product_of_im2col && !im2col_obstacle(args)) return kIm2col;
  if (is_thin(args)) {
    const bool tf32 = is_tf32(s) && !is_pointwise(s);
    return tf32 && args.pass != Conv2dPass::kWgrad && !halo_obstacle(args) ? kHalo : kDirect;
  }
  // Three of four input gradients of a stride of 2 are zeros, which a product need not compute;
  // weight gradients have one product of long sums.
  const bool wgrad = args.pass == Conv2dPass::kWgrad;
  if (wgrad && is_strided(s) && !is_plain_fp32(s) && !im2col_obstacle(args)) return kIm2col;
  const bool by_mma = mma_wins_many_taps(s) || mma_wins_uneven_rows(args);
  if (by_mma && !mma_obstacle(args)) return kMma;
  const bool product = wgrad || pointwise_beats_im2col(args) ||
                       (args.pass == Conv2dPass::kDgrad && is_strided(s) && size_of(s.dtype) == 2);
  if (product && is_pointwise(s) && !pointwise_obstacle(args)) return kPointwise;
  if (im2col_beats_halo(args) && !im2col_obstacle(args)) return kIm2col;
  // Of wider images in 16 bits halo_wgmma was 1.2 times as fast (H200: 24 to 64 channels at 31 x
  // 31, 32 to 64 at 128 x 128).
  const bool narrow = size_of(s.dtype) != 2 || s.w <= 20;
  for (const int kernel : {kNarrowDgrad, kHalo, kPointwise, kIm2col, kMma, kSimt}) {
    if (kernel == kNarrowDgrad && !narrow) continue;
    if (!kKernels[kernel].obstacle(args)) return kernel;
  }
  return kDirect;
}

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

// Whether halo_wgmma is faster than cuDNN's, as measured on an H200 (benchmarks/convolutions.py at
// batch 64, benchmarks/conv2d.py at 64 to 8192), channels last, stride 1.
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
  if (size_of(s.dtype) > 2) return s.c <= 128 && s.k <= 128;
  if (problem.pass == Conv2dPass::kFprop) {
    if (plane > 80 * 80) return s.c <= 64 && s.k <= 64;
    // Half-filled rows and tiles are cuDNN's by some per cent, where no moments are wanted.
    if (s.c <= 32 && s.k < 128 && plane <= 32 * 32) return s.c % 32 == 0 && s.k % 64 == 0;
    return s.c <= 64 ? s.k <= 256 : s.c <= 128 && s.k <= 32 && plane >= 28 * 28;
  }
  if (s.c > 64 || s.k > 64) return false;
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
    if (tf32) return pixels >= 64 * 14 * 14 || least >= 512;
    // (Of channels that do not come in eights cuDNN's are five times as fast.)
    if (!in_whole_vectors(s)) return false;
    const int64_t most = std::max(s.c, s.k);
    if (pixels <= 64 * 7 * 7) return least <= 128 || (least < 256 && s.c * s.k <= 832 * 160);
    if (pixels <= 64 * 14 * 14) return least < 128 || (least == 128 && most <= 576);
    if (pixels <= 64 * 28 * 28) return least < 128 || (least == 128 && most <= 192);
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
    if (s.k < 64) return s.c >= (few ? 528 : 256) && !tiny;
    return !(tiny && s.c > 800 && s.k <= 128);
  }
  if (is_strided(s)) return std::min(s.c, s.k) >= 64 && (s.c <= 128 || tiny);
  if (pixels > 64 * 28 * 28 || s.c < 128) return false;
  if (s.k < 64) return tiny && s.c >= 512;
  if (s.c >= 4 * s.k) return true;
  const bool not_many = few ? s.k <= (tiny ? 384 : 256) : s.c * s.k < 512 * 256;
  return not_many && s.k <= s.c;
}

// Whether implicit_gemm_wgmma was measured for the like: else there may be too little work.
bool im2col_is_known(const Conv2dShape& s) {
  const bool known = is_pointwise(s) || (s.r == 3 && s.s == 3);
  const int64_t least = is_tf32(s) && !is_pointwise(s) ? 64 * 4 * 4 : 32 * 9 * 9;
  return known && s.dilation_h == 1 && s.dilation_w == 1 && std::max(s.stride_h, s.stride_w) <= 2 &&
         std::min(s.c, s.k) >= 64 && s.n * s.p * s.q >= least;
}

// Forward products of 16 bits by implicit_gemm_wgmma: of whole rows and tiles they are level with
// cuDNN's at 28 x 28 and more, and ahead of those with many results.
bool pointwise_16_bits_beat_cudnn(const Conv2dShape& s) {
  const int64_t pixels = s.n * s.p * s.q;
  if (s.k % 64 != 0 || s.k < 128 || s.c % (pixels > 64 * 28 * 28 ? 64 : 32) != 0) return false;
  if (s.k > 256 && s.k % 256 != 0) return false;  // of which cuDNN has tiles
  return pixels >= 64 * 28 * 28 || (pixels >= 64 * 14 * 14 && s.c >= 128 && s.k >= 512);
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
    return !is_plain_fp32(s) && std::min(s.c, s.k) >= 32 && s.dilation_h == 1 &&
           s.dilation_w == 1 && pixels >= 32 * 9 * 9 && pixels <= 256 * 9 * 9;
  }
  const bool wgrad = problem.pass == Conv2dPass::kWgrad;
  if (wgrad && !is_plain_fp32(s)) return stream_k_beats_cudnn(s);
  if (is_16_bit && !one && other_filters_beat_cudnn(s, problem.pass)) return true;
  if (is_16_bit && s.dilation_h == 1 && s.dilation_w == 1) {
    if (one && strided) {
      return im2col_wins_strided_products(problem.pass, s) && pixels >= 32 * 9 * 9 &&
             std::max(s.stride_h, s.stride_w) <= 3;
    }
    if (s.r == 2 && s.s == 2 && s.stride_h == 2 && s.stride_w == 2) {  // ConvNeXt's
      return std::min(s.c, s.k) >= 192 && pixels >= 64 * 7 * 7;
    }
    if (!one && std::min(s.c, s.k) < 64 && im2col_wins_small_images(args_of(problem))) {
      const bool tiny = plane < 14 * 14;
      if (problem.pass == Conv2dPass::kFprop) return s.k >= 128;
      return s.r == 3 && s.s == 3 && (tiny ? s.k <= s.c : s.c <= 64 && s.k <= 128);
    }
  }
  if (is_tf32(s) && one) return pointwise_tf32_beats_cudnn(problem);
  if (is_tf32(s) && std::min(s.c, s.k) < 64 && im2col_wins_small_images(args)) return true;
  if (!im2col_is_known(s)) return false;
  if (is_plain_fp32(s)) return !wgrad || !one;
  const bool small =
      plane <= (is_16_bit ? 80 * 80 : 60 * 60) || (is_16_bit && pixels <= 16 * 32 * 32);
  switch (problem.pass) {
    case Conv2dPass::kFprop:
      if (one) return pointwise_16_bits_beat_cudnn(s);
      // Of rows that are not full cuDNN's sums take less.
      if (is_16_bit && plane >= 14 * 14 && filled_rows(s, s.c) < (s.c > 128 ? 0.75 : 0.85)) {
        return false;
      }
      return small && (is_16_bit || s.c < 256 || plane <= 8 * 8);
    case Conv2dPass::kDgrad:
      // Level with cuDNN's alone, but behind beside a weight gradient: its blocks stay on their
      // SMs.
      if (one) return s.k <= 128 && s.c >= 400 && pixels > 64 * 20 * 20 && pixels <= 64 * 30 * 30;
      if (!is_16_bit && s.k % 32 != 0) return false;  // rows that are not full
      // Few tiles of long sums, too many for clusters to split.
      if (is_16_bit && plane <= 7 * 7 && s.c >= 160 && s.c <= 256 && pixels > 28 * 28) return false;
      if (is_16_bit && plane > 60 * 60 && std::min(s.c, s.k) >= 128) return false;
      if (strided && is_16_bit) {
        return s.k >= 2 * s.c && s.c <= 128 && pixels <= 64 * 14 * 14;
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

// Whether that kernel is faster than cuDNN, as measured on an H200 (the same). What was not
// measured goes to cuDNN.
bool beats_cudnn(const Conv2dProblem& problem, int kernel) {
  const Conv2dShape& s = problem.shape;
  const bool is_channels_last = problem.x.c == 1 && s.c > 1, is_16_bit = size_of(s.dtype) == 2;
  const bool wgrad = problem.pass == Conv2dPass::kWgrad;
  if (kernel == kDepthwise) return depthwise_beats_cudnn(problem);
  const bool narrow_groups =
      kernel == kDirect && is_16_bit && s.groups > 1 && !is_grouped(s) && is_channels_last;
  if (kernel == kGrouped || narrow_groups ||
      (kernel == kMma && is_channels_last && mma_wins_groups(args_of(problem)))) {
    return grouped_beats_cudnn(problem);
  }
  if (kernel == kNarrowInput || kernel == kNarrowWgmma || kernel == kNarrowOutput) {
    return true;  // else it is not chosen
  }
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
  if (kernel == kPointwise && pointwise_wins_few_filters(args_of(problem))) return true;
  if (kernel == kMma && is_channels_last && is_16_bit) return mma_beats_cudnn(problem);
  // cuDNN's first choice for few pixels sums them one after the other: up to 50 times the error.
  if (wgrad && is_plain_fp32(s) && s.n * s.p * s.q < 1 << 16 && s.c <= 256 && s.k <= 256) {
    return true;
  }
  if (is_channels_last) {
    if (kernel == kIm2col) return im2col_beats_cudnn(problem);
    if (kernel == kPointwise) {
      if (wgrad && !is_plain_fp32(s)) return stream_k_beats_cudnn(s);
      if (is_tf32(s)) return pointwise_tf32_beats_cudnn(problem);
      return is_16_bit && is_strided(s) && problem.pass == Conv2dPass::kDgrad &&
             std::min(s.c, s.k) >= 64;
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
bool pays_transposes(const Conv2dShape& s, int kernel) {
  if (s.c < 16 || s.k < 16 || is_pointwise(s)) return false;
  const bool is_large = s.n * s.c * s.h * s.w >= 1 << 20;  // else launches decide
  return (is_plain_fp32(s) || is_large) && (is_halo(kernel) || kernel == kIm2col);
}

bool is_empty(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  return args.shape.groups * e.m * e.n == 0;
}

// Images that fit one run with 32-bit offsets: fprop and dgrad treat images one by one, wgrad sums
// over them.
int64_t images_at_once(Conv2dArgs args) {
  if (args.pass == Conv2dPass::kWgrad) return args.shape.n;
  while (args.shape.n > 1 && !(has_small_extents(args) && has_small_offsets(args))) {
    args.shape.n = ceil_div(args.shape.n, 2);
  }
  return args.shape.n;
}

Conv2dArgs slice(const Conv2dArgs& args, int64_t first, int64_t count) {
  Conv2dArgs part = args;
  part.shape.n = count;
  if (count == args.shape.n) return part;
  const auto image = [&](const Tensor4dRef& t) {
    return static_cast<char*>(const_cast<void*>(t.data)) + first * t.n * size_of(args.shape.dtype);
  };
  part.gathered.data = image(args.gathered);
  part.out.data = image(args.out);
  return part;
}

Conv2dPlan plan_part(const Conv2dArgs& args, int wish) {
  Conv2dPlan plan;
  plan.wish = wish;
  plan.images = args.shape.n;
  plan.kernel = wish == kAnyKernel ? choose(args) : wish;
  const Kernel& kernel = kKernels[plan.kernel];
  plan.obstacle = kernel.obstacle(args);
  if (!plan.obstacle) kernel.plan(args, &plan);
  return plan;
}

// Of an input gradient of stride 1 that implicit_gemm_wgmma takes, on an H100: with the batch
// norm's sums it was ahead of every other kernel and a pass for them, but where a product's long
// sums in TF32 leave multiprocessors idle in the last round of tiles.
bool norm_grad_pays(const Conv2dShape& s) {
  if (!is_pointwise(s) || size_of(s.dtype) == 2 || s.k <= 2 * s.c) return true;
  const int64_t tiles = ceil_div(s.n * s.h * s.w, 128) * ceil_div(s.c, 128);
  return 5 * tiles >= 4 * ceil_div(tiles, sm_count()) * sm_count();
}

// The kernel for a pass with a tail, or -1: of our own choice, if it has the code, or
// implicit_gemm_wgmma in the place of others, which it is behind by less than a pass takes.
int choose_with_tail(const Conv2dArgs& args, const Activation& activation, bool adds) {
  const Conv2dShape& s = args.shape;
  const int kernel = choose(args);
  if (kernel == kDepthwise) {
    const bool is_small = s.n * s.c * s.h * s.w * size_of(s.dtype) < 1 << 19;
    if (adds || !depthwise::takes_tail(args)) return -1;
    return is_small && !depthwise::goes_by_tiles(args) ? -1 : kernel;
  }
  const bool clamps_alone = !adds && !activation.smooth();
  if (kernel == kNarrowInput || kernel == kNarrowWgmma) return clamps_alone ? kernel : -1;
  if (kernel == kHalo && !is_pointwise(s) && clamps_alone) return kernel;
  return is_plain_fp32(s) || kernel == kGrouped || im2col_obstacle(args) ? -1 : kIm2col;
}

}  // namespace

const KernelInfo* conv2d_kernel(int number) {
  return number < kCount ? &kKernels[number].info : nullptr;
}

Conv2dPlan plan_conv2d(const Conv2dProblem& problem, int wish) {
  const Conv2dArgs args = args_of(problem);
  if (is_empty(args)) return {};
  // The FFT is planned from the problem, and parts the batch by itself.
  if (wish == kFft || (wish == kAnyKernel && fft_wins(problem))) {
    Conv2dPlan plan;
    plan.kernel = kFft;
    plan.obstacle = fft_obstacle(problem);
    if (!plan.obstacle) plan_by_fft(problem, kAnyKernel, &plan);
    plan.beats_library = wish == kAnyKernel;
    return plan;
  }
  const Conv2dShape& s = problem.shape;
  const int64_t images = images_at_once(args), rest = s.n % images;
  Conv2dPlan plan = plan_part(slice(args, 0, images), wish);
  if (images < s.n) {
    plan.moment_sets = 0;
    if (rest > 0) {
      const Conv2dPlan last = plan_part(slice(args, s.n - rest, rest), wish);
      plan.workspace_bytes = std::max(plan.workspace_bytes, last.workspace_bytes);
      if (last.obstacle) plan.obstacle = last.obstacle;
    }
  }
  plan.adds_bias = problem.pass == Conv2dPass::kFprop;
  // (Of a batch in parts, the last one may be another kernel's.)
  plan.applies_relu = plan.adds_bias && plan.kernel != kDepthwise && images == s.n;
  if (wish != kAnyKernel || plan.obstacle) return plan;
  plan.beats_library = beats_cudnn(problem, plan.kernel);
  plan.beats_library_with_moments =
      plan.moment_sets > 0 && beats_cudnn_with_moments(s, plan.kernel);
  plan.pays_transposes = plan.beats_library && pays_transposes(s, plan.kernel);
  return plan;
}

void run_conv2d(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                const Conv2dEpilogue& epilogue, void* workspace) {
  const Conv2dArgs args = args_of(problem, epilogue);
  if (is_empty(args)) return;
  const int64_t n = args.shape.n;
  for (int64_t first = 0; first < n; first += plan.images) {
    const Conv2dArgs part = slice(args, first, std::min(plan.images, n - first));
    if (part.shape.n == plan.images) {
      kKernels[plan.kernel].run(stream, part, plan, workspace);
    } else {  // the last of several launches, of gigabytes each: it may be planned again
      const Conv2dPlan last = plan_part(part, plan.wish);
      kKernels[last.kernel].run(stream, part, last, workspace);
    }
  }
}

bool plan_conv2d_added(const Conv2dProblem& problem, bool from_library, Conv2dPlan* plan) {
  const Conv2dArgs args = args_of(problem);
  if (problem.pass != Conv2dPass::kDgrad || is_empty(args) || plan->images < args.shape.n) {
    return false;
  }
  // Products are about level with cuDNN's, and a pass takes as long as the gradient.
  const Conv2dShape& s = args.shape;
  const bool product = is_pointwise(s) && im2col_is_known(s) && plan->wish == kAnyKernel;
  if (product && (size_of(s.dtype) == 2 || (is_tf32(s) && is_strided(s))) &&
      !pointwise_obstacle(args)) {
    *plan = plan_part(args, kPointwise);
  } else if (product && from_library && is_tf32(s) && !is_strided(s) && !im2col_obstacle(args)) {
    *plan = plan_part(args, pointwise_beats_im2col(args) ? kPointwise : kIm2col);
  } else if (from_library) {
    return false;
  }
  if (plan->kernel == kPointwise) return pointwise::plan_added(args, plan);
  if (is_halo(plan->kernel) && im2col_is_known(s) && !im2col_obstacle(args) &&
      im2col::takes_added(args)) {
    *plan = plan_part(args, kIm2col);  // it is ahead by less than the pass takes
  }
  return plan->kernel == kIm2col && im2col::takes_added(args);
}

void run_conv2d_added(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                      const void* added, void* workspace) {
  const Conv2dArgs args = args_of(problem);
  if (plan.kernel == kPointwise) {
    return pointwise::run_added(stream, args, plan, added, workspace);
  }
  im2col::run_added(stream, args, plan, added, workspace);
}

bool plan_conv2d_norm_grad(const Conv2dProblem& problem, bool from_library, bool has_mask,
                           bool adds, Conv2dPlan* plan) {
  const Conv2dArgs args = args_of(problem);
  if (problem.pass != Conv2dPass::kDgrad || is_empty(args) || plan->images < args.shape.n) {
    return false;
  }
  const Conv2dShape& s = args.shape;
  const bool any = plan->wish == kAnyKernel;
  if (!any && (from_library || (plan->kernel != kIm2col && plan->kernel != kPointwise))) {
    return false;
  }
  if (is_strided(s)) {
    const bool product = is_pointwise(s) && (!any || im2col_is_known(s));
    if (!product || !adds || pointwise_obstacle(args)) return false;
    *plan = plan_part(args, kPointwise);
    return pointwise::plan_norm_grad(args, plan);
  }
  if ((any && !(im2col_is_known(s) && norm_grad_pays(s))) || im2col_obstacle(args)) return false;
  *plan = plan_part(args, kIm2col);
  return im2col::plan_norm_grad(args, has_mask, plan);
}

void run_conv2d_norm_grad(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                          const Conv2dNormGrad& norm, void* workspace) {
  const Conv2dArgs args = args_of(problem);
  const bool product = plan.kernel == kPointwise;
  (product ? pointwise::run_norm_grad : im2col::run_norm_grad)(stream, args, plan, norm, workspace);
}

bool plan_conv2d_tail(const Conv2dProblem& problem, const Activation& activation, bool adds,
                      Conv2dPlan* plan) {
  const Conv2dArgs args = args_of(problem);
  if (problem.pass != Conv2dPass::kFprop || problem.shape.dtype == DType::kFloat64) return false;
  if (is_empty(args) || images_at_once(args) < problem.shape.n || !is_inline(activation)) {
    return false;
  }
  const int kernel = choose_with_tail(args, activation, adds);
  if (kernel < 0) return false;
  *plan = plan_part(args, kernel);
  if (plan->obstacle) return false;
  if (kernel == kIm2col) im2col::plan_tail(args, plan);
  return true;
}

}  // namespace braze::cuda
