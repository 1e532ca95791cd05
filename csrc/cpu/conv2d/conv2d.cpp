// The table of the convolution's kernels on the CPU, and the choice among them.
#include "launchers/conv2d.h"

#include <algorithm>

#include "cpu/conv2d/kernels.h"
#include "cpu/conv2d/side_by_side.h"
#include "cpu/matmul/amx.h"
#include "cpu/matmul/dot_bf16.h"
#include "cpu/matmul/gemm.h"
#include "launchers/common/registry.h"
#include "launchers/conv2d_fft.h"

namespace braze::cpu {
namespace {

struct Kernel {
  KernelInfo info;
  const char* (*obstacle)(const Conv2dProblem&);
  void (*plan)(const Conv2dProblem&, Conv2dPlan*);
  void (*run)(const Conv2dProblem&, const Conv2dPlan&, const void* bias, void* workspace);
};

const char* no_obstacle(const Conv2dProblem&) { return nullptr; }

constexpr char kAll[] = "float64 float32 bfloat16 float16";
void plan_fft_repaired(const Conv2dProblem& problem, Conv2dPlan* plan);
const char* patches_obstacle(const Conv2dProblem& problem);
void plan_patches(const Conv2dProblem& problem, Conv2dPlan* plan);
void run_patches(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                 void* workspace);
constexpr Kernel kKernels[] = {
    {{"conv2d", "implicit_gemm", kAll, "cpu", true,
      "register tiles on shifted windows of a padded copy, threads"},
     no_obstacle,
     plan_implicit_gemm,
     run_implicit_gemm},
    {{"conv2d", "pointwise", kAll, "cpu", true, "1 x 1 filters as a product of the pixels"},
     pointwise_obstacle,
     plan_pointwise,
     run_pointwise},
    {{"conv2d", "winograd", "float32 bfloat16 float16", "cpu", true,
      "F(2 x 2, 3 x 3): 3 x 3 filters of stride 1 as 16 products of transformed tiles"},
     winograd_obstacle,
     plan_winograd,
     run_winograd},
    {{"conv2d", "blocked_im2col", kAll, "cpu", true,
      "patches of a block of pixels, in the cache, times packed filters"},
     no_obstacle,
     plan_blocked_im2col,
     run_blocked_im2col},
    {{"conv2d", "depthwise", kAll, "cpu", true,
      "one filter a channel, channels across the lanes of the image or of a padded copy"},
     depthwise_obstacle,
     plan_depthwise,
     run_depthwise},
    {{"conv2d", "grouped", "float64 float32", "cpu", true,
      "groups of few channels, each spread over the lanes of its filters"},
     grouped_obstacle,
     plan_grouped,
     run_grouped},
    {{"conv2d", "narrow_input", kAll, "cpu", true,
      "weight gradients of few channels, filters across the lanes, patches where they lie"},
     narrow_input_obstacle,
     plan_narrow_input,
     run_narrow_input},
    {{"conv2d", "direct", kAll, "cpu", false, "the formula as plain loops"},
     no_obstacle,
     plan_direct,
     run_direct},
    {{"conv2d", "im2col", kAll, "cpu", false, "patches as a matrix, and matmul's blocked product"},
     im2col_obstacle,
     plan_im2col,
     run_im2col},
    {{"conv2d", "fft", kAll, "cpu", true,
      "large filters: products of spectra, by torch's FFT, whole images or overlap-save tiles"},
     fft_obstacle,
     plan_fft_repaired,
     nullptr},
    {{"conv2d", "patches", kAll, "cpu", true,
      "windows side by side: their elements in the order of the weights, then as 1 x 1"},
     patches_obstacle,
     plan_patches,
     run_patches},
    {{"conv2d", "amx", "bfloat16", "cpu", true,
      "tile registers on shifted windows of a padded copy, threads"},
     amx_obstacle,
     plan_amx,
     run_amx},
};
// The last one is listed where the machine has it.
const int kCount = static_cast<int>(std::size(kKernels)) - !amx_available();
constexpr int kImplicitGemm = kernel_number(kKernels, "implicit_gemm");
constexpr int kPointwise = kernel_number(kKernels, "pointwise");
constexpr int kWinograd = kernel_number(kKernels, "winograd");
constexpr int kBlockedIm2col = kernel_number(kKernels, "blocked_im2col");
constexpr int kDepthwise = kernel_number(kKernels, "depthwise");
constexpr int kGrouped = kernel_number(kKernels, "grouped");
constexpr int kNarrowInput = kernel_number(kKernels, "narrow_input");
constexpr int kFft = kernel_number(kKernels, "fft");
constexpr int kPatches = kernel_number(kKernels, "patches");
constexpr int kAmx = kernel_number(kKernels, "amx");
const KernelEntries kEntries(kKernels, kCount);

// What is not finite is made again by a kernel that takes everything.
void plan_fft_repaired(const Conv2dProblem& problem, Conv2dPlan* plan) {
  plan_by_fft(problem, kImplicitGemm, plan);
}

bool reads_pairs(const Conv2dShape& s) { return s.dtype == DType::kBFloat16 && dot_bf16_pays(); }
// Whether kernels multiply values in fp32 one by one, also where they read bf16.
bool multiplies_in_fp32(const Conv2dShape& s) {
  return s.dtype == DType::kFloat32 || (s.dtype == DType::kBFloat16 && !reads_pairs(s));
}
bool is_strided(const Conv2dShape& s) { return s.stride_h > 1 || s.stride_w > 1; }

// Whose products are slower than AVX-512's: copies and transformations pay for fewer channels.
constexpr bool kIsAvx2 = kLanes<float> == 8;

// Whether blocked_im2col is faster: than implicit_gemm, or in bf16 in pairs than winograd too,
// which both multiply in fp32.
bool wants_patches(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const int64_t taps = s.r * s.s, c = s.c / s.groups, k = s.k / s.groups;
  const bool is_wgrad = problem.pass == Conv2dPass::kWgrad;
  // A patch's values meet that many filters, in vectors of which fewer would be idle lanes.
  const int64_t filters = problem.pass == Conv2dPass::kDgrad ? c : k;
  const int64_t channels = problem.pass == Conv2dPass::kDgrad ? k : c;
  const auto& from = problem.pass == Conv2dPass::kDgrad ? problem.y : problem.x;
  // Few channels of contiguous images are put side by side one by one.
  constexpr int64_t kFewChannels = 8;
  const bool is_slow_to_copy = from.c != 1 && channels < kFewChannels;
  if (reads_pairs(s)) {
    constexpr int64_t kLeastFilters = 12, kLeastWeights = 512;
    return filters >= kLeastFilters &&
           taps * c * k >= (is_slow_to_copy ? 4 * kLeastWeights : kLeastWeights);
  }
  // In fp32 windows are read where they are, in rows of eight pixels and more (without AVX-512 of
  // four); shorter ones are copied, which is slow where channels do not lie side by side.
  constexpr int64_t kManyFilters = 128, kShortRow = 8;
  if (!is_wgrad) {
    // Pixels of two to four values cost implicit_gemm a broadcast for each.
    const bool is_few = channels > 1 && channels <= 4 && problem.pass == Conv2dPass::kFprop;
    const int64_t least = kIsAvx2 || is_few ? 16 : 32;
    return filters >= (is_slow_to_copy && s.q < kShortRow ? kManyFilters : least);
  }
  // Against implicit_gemm's weight gradients: those of rows of which its tiles waste a part, of few
  // channels, sums that no cache holds, and dilated filters of which much meets padding.
  constexpr int64_t kLeastFilters = 32, kManyWeights = int64_t{1} << 21, kWastedRow = 2;
  if (filters < kLeastFilters) return false;
  if (s.q <= kWastedRow) return true;
  if (s.dilation_h > 1 && s.pad_h >= s.dilation_h && 8 * s.dilation_h > s.p) return true;
  const bool is_few = c < kLanes<float> && taps * c >= (is_slow_to_copy ? 64 : 16);
  return is_few || taps * c * k >= kManyWeights;
}

// For the weight gradient of 1 x 1 filters over pixels that lie side by side, multiplied in fp32:
// blocked_im2col where its blocks have all channels of a pixel, and all filters or few channels, so
// that hardly anything is read twice; pointwise where no cache holds the sums that implicit_gemm
// has in each thread. Images of a few pixels leave most of its tiles empty (1 x 1: 4 times as
// slow).
int pointwise_wgrad_kernel(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const int64_t c = s.c / s.groups, k = s.k / s.groups;
  constexpr int64_t kManyWeights = int64_t{1} << 20, kMostChannels = 288, kFewChannels = 64;
  constexpr int64_t kMostFilters = kIsAvx2 ? 64 : 256;
  constexpr int64_t kFewPixels = 64, kSmallImage = 4;
  if (c * k >= kManyWeights || s.n * s.p * s.q <= kFewPixels) return kPointwise;
  if (s.p * s.q <= kSmallImage) return kBlockedIm2col;
  // In bf16 panels that stay half empty are converted all the same.
  constexpr int64_t kFewFilters = kLanes<float> / 2, kLeastChannels = 16;
  const bool is_fp32 = s.dtype == DType::kFloat32;
  if (!is_fp32 && k <= kFewFilters && c >= kLeastChannels) return kPointwise;
  const bool has_few = !kIsAvx2 && c <= kFewChannels;
  const bool is_narrow =
      is_strided(s) ? has_few && k >= 2 * c : c <= kMostChannels && (k <= kMostFilters || has_few);
  return is_narrow ? kBlockedIm2col : kImplicitGemm;
}

// Whether a weight gradient of so many sums, and of so many tiles of 2 x 2 pixels an image, gains
// by Winograd's: it transforms both operands, and the sums back, so that it gains later, of few
// pixels and against AVX-512's products too, and not where odd extents leave much of the tiles
// empty.
bool transformed_wgrad_gains(const Conv2dShape& s, int64_t sums, int64_t tiles) {
  constexpr int64_t kFewPixels = 4096, kLeastSumsOfFew = 48 * 48;
  constexpr int64_t kLeastSums = kIsAvx2 ? 16 * 16 : 32 * 32;
  constexpr int64_t kLeastFilled = 82;  // of tiles, per cent
  const int64_t pixels = s.p * s.q;
  return sums >= (s.n * pixels < kFewPixels ? kLeastSumsOfFew : kLeastSums) &&
         100 * pixels > kLeastFilled * 4 * tiles;
}

// Whether grouped is faster than what takes any convolution, as measured in fp32 with AVX2 and
// AVX-512, filters of up to 3 x 3: two channels a group 2 to 6 times, four 1.2 to 4 times, eight
// 1.1 to 3 times (but for weight gradients without a stride with AVX2, 0.6 to 0.9). With AVX-512
// sixteen 1.1 to 2 times, forward and input gradient, and input gradients with a stride of 24 and
// 32, and of large images of up to 64, 1.1 to 1.7 times.
bool grouped_wins(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  constexpr int64_t kMostTaps = 9, kLanesOfFp32 = kLanes<float>;
  if (s.dtype != DType::kFloat32 || s.r * s.s > kMostTaps || grouped_obstacle(problem)) {
    return false;
  }
  const bool wgrad = problem.pass == Conv2dPass::kWgrad;
  const int64_t width = s.c / s.groups;
  if (width <= 4) return true;
  if (s.r * s.s == 1) return false;
  if (width <= 8) return width <= kLanesOfFp32 && (!wgrad || !kIsAvx2 || is_strided(s));
  if (kLanesOfFp32 < 16 || wgrad) return false;
  const bool is_large = s.h * s.w >= 56 * 56;
  const bool is_narrow =
      width <= 24 || (s.groups > 1 && (width == 32 || (width <= 64 && is_large)));
  return width == 16 || (is_narrow && is_strided(s) && problem.pass == Conv2dPass::kDgrad);
}

// Whether narrow_input is faster than copies of patches and implicit_gemm, as measured in fp32
// with images of one and three channels. Where dy has to be copied there have to be taps and
// filters enough to meet the copies; more weights than these are in nobody's first-level cache.
bool narrow_input_wins(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  constexpr int64_t kMostChannels = 3, kLeastFilters = 8, kMostWeights = 1 << 16;
  constexpr int64_t kLeastTapsCopied = 16, kLeastFiltersCopied = 32;
  if (!multiplies_in_fp32(s) || s.c > kMostChannels || narrow_input_obstacle(problem) ||
      s.c * s.r * s.s * s.k > kMostWeights) {
    return false;
  }
  if (problem.y.c == 1) return s.k >= kLeastFilters;
  return s.r * s.s >= kLeastTapsCopied && s.k >= kLeastFiltersCopied;
}

// Whether the FFT is faster than the best of the others, as measured in float32 at stride 1 with
// filters of 15 x 15 to 31 x 31.
bool fft_wins(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  constexpr int64_t kLeastTaps = 15 * 15;
  if (s.dtype != DType::kFloat32 || s.r * s.s < kLeastTaps || std::min(s.r, s.s) < 2) return false;
  if (is_strided(s) || s.dilation_h > 1 || s.dilation_w > 1 || fft_obstacle(problem)) return false;
  // The others' multiplications per nanosecond; and by how much it has to be ahead of them.
  constexpr double kDirectRate = 40, kMargin = 1.15;
  const double terms = static_cast<double>(s.n) * s.p * s.q * s.k * (s.c / s.groups) * s.r * s.s;
  FftPlan plan;
  return kMargin * plan_fft(problem, kAnyKernel, &plan) < terms / kDirectRate;
}

// Whether patches is faster than what takes any convolution, as measured with 4 x 4 to 16 x 16 of
// three channels, 2 x 2 of four, and filters that have the image's extents: input gradients up to
// 13 times, whose windows the others look for at every pixel. Of many channels (2 x 2 of 64 to 384)
// it is level, and large weight gradients in fp32 are written slowly.
bool patches_win(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  constexpr int64_t kFewChannels = 4, kManyWeights = 512;
  const bool is_fp32 = s.dtype == DType::kFloat32;
  if (!(is_fp32 || s.dtype == DType::kBFloat16) || s.r * s.s < 4) return false;
  const bool is_few = s.c <= kFewChannels, is_whole = s.h == s.r && s.w == s.s;
  if (problem.pass == Conv2dPass::kDgrad) return is_few || is_whole;
  if (is_whole) return is_fp32 == (problem.pass == Conv2dPass::kFprop);
  return is_few && s.r * s.s * s.c >= kManyWeights;
}

// Measured with `python -m braze bench convolutions`.
int choose(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const bool is_wgrad = problem.pass == Conv2dPass::kWgrad;
  if (fft_wins(problem)) return kFft;
  if (patches_win(problem) && !patches_obstacle(problem)) return kPatches;
  // Fewer channels leave most lanes idle.
  constexpr int64_t kLeastGroups = kLanes<float> / 2;
  if (s.groups >= kLeastGroups && !depthwise_obstacle(problem)) return kDepthwise;
  if (grouped_wins(problem)) return kGrouped;
  if (!amx_obstacle(problem)) {
    // Weight gradients of three channels, which fill a tenth of a tile.
    constexpr int64_t kFewChannels = 3, kLeastFilters = 8;
    const bool is_narrow = is_wgrad && s.c <= kFewChannels && s.k >= kLeastFilters;
    if (is_narrow && problem.y.c == 1 && !narrow_input_obstacle(problem)) return kNarrowInput;
    // With fewer weights most of what tiles multiply are zeros; not where pixels fill their rows.
    constexpr int64_t kRow = 32;
    const bool is_fprop = problem.pass == Conv2dPass::kFprop;
    const int64_t least = is_fprop && s.c >= kFewChannels ? 256 : 512, c = s.c / s.groups;
    if ((is_fprop && c >= kRow) || s.r * s.s * c * (s.k / s.groups) >= least) return kAmx;
  }
  if (!pointwise_obstacle(problem)) {
    // Every s-th pixel of contiguous images has to be copied one by one.
    const bool skips = problem.pass == Conv2dPass::kFprop && is_strided(s) && problem.x.c != 1;
    if ((!is_wgrad && !skips) || has_few_pixels(problem)) return kPointwise;
    if (is_wgrad && multiplies_in_fp32(s) && problem.x.c == 1 && problem.y.c == 1) {
      return pointwise_wgrad_kernel(problem);
    }
    if (wants_patches(problem) || blocked_im2col_reads_in_place(problem)) return kBlockedIm2col;
    // Weight gradients of many pixels, or of pixels that do not lie side by side, are read in place
    // there.
    constexpr int64_t kFewPixels = 1024;
    const bool is_large = s.n * s.p * s.q > kFewPixels;
    return is_wgrad && (is_strided(s) || is_large) ? kImplicitGemm : kPointwise;
  }
  if (narrow_input_wins(problem)) return kNarrowInput;
  const int64_t c = s.c / s.groups, k = s.k / s.groups;
  if (reads_pairs(s) && wants_patches(problem)) {
    // Weight gradients whose sums each thread keeps to itself are faster transformed, in fp32.
    constexpr int64_t kLeastSums = 64 * 64, kMostSums = 128 * 256, kManyPixels = 8192;
    const bool is_faster = is_wgrad && c * k >= kLeastSums && c * k <= kMostSums &&
                           s.n * s.p * s.q >= kManyPixels && !winograd_obstacle(problem);
    return is_faster ? kWinograd : kBlockedIm2col;
  }
  // With fewer channels or filters transformations take longer than they save.
  constexpr int64_t kLeastChannels = 16;
  const int64_t tiles = ceil_div(s.p, 2) * ceil_div(s.q, 2);  // of 2 x 2 pixels, of an image
  const bool is_wide =
      std::min(c, k) >= kLeastChannels && (!is_wgrad || transformed_wgrad_gains(s, c * k, tiles));
  // Of few tiles the filters are most of what is read, and transformed they are nearly twice as
  // large (64 to 512 channels, 3 x 3 to 11 x 11 pixels, batch 1 to 4).
  constexpr int64_t kFewTiles = 32, kManyFilters = 64 * 64;
  const bool has_few_tiles = s.n * tiles <= kFewTiles && c * k >= kManyFilters;
  if (has_few_tiles && wants_patches(problem)) return kBlockedIm2col;
  if (has_few_tiles && is_wgrad) return kImplicitGemm;
  if (is_wide && !winograd_obstacle(problem)) return kWinograd;
  return wants_patches(problem) ? kBlockedIm2col : kImplicitGemm;
}

// Whether torch's own convolution (oneDNN's) is faster than what choose() takes, as measured in
// channels_last on a Xeon: in fp32 with AVX-512, in bf16 with AMX. The call takes longer than ours,
// with cold caches 0.1 ms, which short passes do not make up for.
bool library_wins(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const bool is_fprop = problem.pass == Conv2dPass::kFprop;
  const bool is_wgrad = problem.pass == Conv2dPass::kWgrad;
  constexpr double kLeastTerms = 9e7;
  const double terms = static_cast<double>(s.n) * s.p * s.q * s.k * (s.c / s.groups) * s.r * s.s;
  if (problem.x.c != 1 || problem.y.c != 1 || terms < kLeastTerms || kIsAvx2) return false;
  const int64_t channels = s.c / s.groups;
  if (s.dtype == DType::kFloat32 && s.groups > 1 && channels > 4 && !is_wgrad) {
    // Groups that leave a part of a vector idle; and windows that share few pixels.
    const bool leaves_lanes = channels > 16 && channels < 32;
    return is_strided(s) ? is_fprop && channels != 16 : leaves_lanes;
  }
  if (s.dtype == DType::kFloat32 && s.groups == 1 && is_wgrad && !pointwise_obstacle(problem)) {
    // Too many weights for blocked_im2col, and more pixels than implicit_gemm finds in a cache.
    constexpr int64_t kManyPixels = 12000;
    return !is_strided(s) && s.n * s.p * s.q >= kManyPixels &&
           pointwise_wgrad_kernel(problem) == kImplicitGemm;
  }
  // First layers, of which most of a tile would be empty.
  constexpr int64_t kFewChannels = 3, kManyPixels = 1 << 17;
  return is_wgrad && !amx_obstacle(problem) && s.groups == 1 && s.c <= kFewChannels &&
         s.r * s.s > 1 && s.n * s.p * s.q >= kManyPixels;
}

const char* patches_obstacle(const Conv2dProblem& problem) {
  return braze::patches_obstacle(problem.pass, problem.shape, problem.w);
}

void plan_patches(const Conv2dProblem& problem, Conv2dPlan* plan) {
  const Patches patches(problem);
  const Conv2dProblem product = patches.product(nullptr);
  kKernels[choose(product)].plan(product, plan);
  plan->workspace_bytes += patches.bytes();
  plan->adds_bias = problem.pass == Conv2dPass::kFprop;  // else there is one for all of a patch
}

void run_patches(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                 void* workspace) {
  const Patches patches(problem);
  const Conv2dProblem product = patches.product(workspace);
  const bool is_dgrad = problem.pass == Conv2dPass::kDgrad;
  if (!is_dgrad) patches.move(workspace);
  kKernels[choose(product)].run(product, plan, bias,
                                static_cast<char*>(workspace) + patches.bytes());
  if (is_dgrad) patches.move(workspace);
}

}  // namespace

const KernelInfo* conv2d_kernel(int number) {
  return number < kCount ? &kKernels[number].info : nullptr;
}

Conv2dPlan plan_conv2d(const Conv2dProblem& problem, int kernel) {
  Conv2dPlan plan;
  plan.kernel = kernel != kAnyKernel ? kernel : choose(problem);
  plan.obstacle = kKernels[plan.kernel].obstacle(problem);
  if (!plan.obstacle) kKernels[plan.kernel].plan(problem, &plan);
  plan.beats_library = !library_wins(problem);
  return plan;
}

void run_conv2d(Stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                const Conv2dEpilogue& epilogue, void* workspace) {
  kKernels[plan.kernel].run(problem, plan, epilogue.bias, workspace);
}

}  // namespace braze::cpu
