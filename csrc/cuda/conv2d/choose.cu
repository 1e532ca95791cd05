// The convolution's kernels: what each takes, and what is run where.
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
#include "cuda/conv2d/pointwise/patches.h"
#include "cuda/conv2d/pointwise/pointwise.h"
#include "gather.cuh"
#include "kernels.h"
#include "launchers/conv2d_fft.h"
#include "rules.h"
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

const char* patches_obstacle(const Conv2dArgs& args) {
  if (const char* why = direct_obstacle(args)) return why;
  return patches::obstacle(args);
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
      "float32 as TF32 or in scaled fp16 parts"},
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
    {{"conv2d", "patches", "float64 float32 bfloat16 float16", "sm_80+", true,
      "windows side by side: their elements in the order of the weights, then as pointwise"},
     patches_obstacle,
     patches::plan,
     patches::run},
    {{"conv2d", "fft", "float64 float32 bfloat16 float16", "sm_80+", true,
      "large filters: products of spectra, by torch's FFT, whole images or overlap-save tiles"},
     nullptr,
     nullptr,
     nullptr},
};
constexpr int kCount = std::size(kKernels);
static_assert(kernel_number(kKernels, "direct") == kDirect &&
              kernel_number(kKernels, "implicit_gemm_simt") == kSimt &&
              kernel_number(kKernels, "implicit_gemm_mma") == kMma &&
              kernel_number(kKernels, "halo_wgmma") == kHalo &&
              kernel_number(kKernels, "halo_narrow_dgrad") == kNarrowDgrad &&
              kernel_number(kKernels, "depthwise") == kDepthwise &&
              kernel_number(kKernels, "pointwise") == kPointwise &&
              kernel_number(kKernels, "implicit_gemm_wgmma") == kIm2col &&
              kernel_number(kKernels, "narrow_input") == kNarrowInput &&
              kernel_number(kKernels, "narrow_input_wgmma") == kNarrowWgmma &&
              kernel_number(kKernels, "narrow_output") == kNarrowOutput &&
              kernel_number(kKernels, "grouped") == kGrouped &&
              kernel_number(kKernels, "patches") == kPatches &&
              kernel_number(kKernels, "fft") == kFft);
const KernelEntries kEntries(kKernels, kCount);

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
  plan.kernel = wish == kAnyKernel ? fastest_own(args) : wish;
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
  const int kernel = fastest_own(args);
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

bool takes(int kernel, const Conv2dArgs& args) { return !kKernels[kernel].obstacle(args); }

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
  plan.pays_transposes = plan.beats_library && pays_transposes(problem.pass, s, plan.kernel);
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
