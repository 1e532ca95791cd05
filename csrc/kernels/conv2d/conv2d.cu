// The choice among the convolution's kernels, and the registry of them.
#include "conv2d.h"

#include "gather.cuh"
#include "kernels/common/registry.h"

namespace braze::cuda {
namespace {

enum class Choice { kDirect, kSimt, kMma };

const char* name_of(Choice choice) {
  return choice == Choice::kDirect ? "direct"
         : choice == Choice::kSimt ? "implicit_gemm_simt"
                                   : "implicit_gemm_mma";
}

// Why the kernel cannot take the arguments, or nullptr.
const char* obstacle(Choice choice, const Conv2dArgs& args) {
  const Conv2dShape& p = args.shape;
  const ConvExtents e = conv_extents(args);
  constexpr int64_t kLimit = INT_MAX - 1024;  // room for the last tile's overhang
  for (const int64_t extent : {e.m, e.n, e.k, p.h, p.w, p.p * p.stride_h + p.r * p.dilation_h,
                               p.q * p.stride_w + p.s * p.dilation_w}) {
    if (extent > kLimit) return "it indexes pixels and taps with 31 bits";
  }
  if (choice == Choice::kSimt && size_of(p.dtype) == 2) return "it takes float32 and float64";
  if (choice == Choice::kMma) {
    if (p.dtype == DType::kFloat64) return "it takes float32 (as TF32), bfloat16 and float16";
    if (p.dtype == DType::kFloat32 && !p.allow_tf32) {
      return "float32 inputs would be rounded to TF32, which is not allowed";
    }
  }
  return nullptr;
}

// Tiles of 64 or more are wasted on thin products.
bool is_thin(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  if (args.pass == Conv2dPass::kWgrad) return e.n <= 16 || e.m < 8;
  return e.k <= 32 || e.n < 8;
}

Choice choose(const Conv2dArgs& args, const std::string& kernel) {
  Choice choice = Choice::kDirect;
  if (kernel == "auto") {
    if (!is_thin(args)) choice = obstacle(Choice::kMma, args) ? Choice::kSimt : Choice::kMma;
  } else if (kernel == "implicit_gemm_simt") {
    choice = Choice::kSimt;
  } else if (kernel == "implicit_gemm_mma") {
    choice = Choice::kMma;
  } else if (kernel != "direct") {
    throw std::runtime_error("conv2d: no kernel is named " + kernel);
  }
  if (const char* why = obstacle(choice, args)) {
    throw std::runtime_error(std::string("conv2d: kernel ") + name_of(choice) +
                             " cannot take these arguments: " + why);
  }
  return choice;
}

bool is_empty(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  return args.shape.groups * e.m * e.n == 0;
}

void run(Stream stream, const Conv2dArgs& args, const std::string& kernel, void* workspace) {
  if (is_empty(args)) return;
  switch (choose(args, kernel)) {
    case Choice::kDirect: return direct_conv2d(stream, args, workspace);
    case Choice::kSimt: return simt_conv2d(stream, args, workspace);
    case Choice::kMma: break;
  }
  switch (args.shape.dtype) {
    case DType::kBFloat16: return mma_conv2d_bf16(stream, args, workspace);
    case DType::kFloat16: return mma_conv2d_fp16(stream, args, workspace);
    default: return mma_conv2d_tf32(stream, args, workspace);
  }
}

const KernelEntry kDirectEntry({"conv2d", "direct", "float64 float32 bfloat16 float16", "sm_80+",
                                true, "one thread per pixel; few taps, few channels, depthwise"});
const KernelEntry kSimtEntry({"conv2d", "implicit_gemm_simt", "float64 float32", "sm_80+", true,
                              "implicit GEMM on CUDA cores"});
const KernelEntry kMmaEntry({"conv2d", "implicit_gemm_mma", "float32 bfloat16 float16", "sm_80+",
                             true, "implicit GEMM on tensor cores; float32 as TF32"});

}  // namespace

int64_t conv2d_workspace_bytes(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                               const Tensor4dRef& w, const Tensor4dRef& y,
                               const std::string& kernel) {
  const bool dgrad = pass == Conv2dPass::kDgrad, wgrad = pass == Conv2dPass::kWgrad;
  const Conv2dArgs args{pass, shape, dgrad ? y : x, wgrad ? y : w, dgrad ? x : wgrad ? w : y,
                        nullptr};
  if (is_empty(args)) return 0;
  switch (choose(args, kernel)) {
    case Choice::kDirect: return direct_conv2d_workspace_bytes(args);
    case Choice::kSimt: return simt_conv2d_workspace_bytes(args);
    case Choice::kMma: break;
  }
  const ConvExtents e = conv_extents(args);
  return split_bytes<float>(mma_conv2d_splits(args), shape.groups, e.m, e.n);
}

void conv2d_fprop(Stream stream, const Conv2dShape& shape, const Tensor4dRef& x,
                  const Tensor4dRef& w, const void* bias, const Tensor4dRef& y,
                  const std::string& kernel, void* workspace) {
  run(stream, {Conv2dPass::kFprop, shape, x, w, y, bias}, kernel, workspace);
}

void conv2d_dgrad(Stream stream, const Conv2dShape& shape, const Tensor4dRef& dy,
                  const Tensor4dRef& w, const Tensor4dRef& dx, const std::string& kernel,
                  void* workspace) {
  run(stream, {Conv2dPass::kDgrad, shape, dy, w, dx, nullptr}, kernel, workspace);
}

void conv2d_wgrad(Stream stream, const Conv2dShape& shape, const Tensor4dRef& dy,
                  const Tensor4dRef& x, const Tensor4dRef& dw, const std::string& kernel,
                  void* workspace) {
  run(stream, {Conv2dPass::kWgrad, shape, x, dy, dw, nullptr}, kernel, workspace);
}

}  // namespace braze::cuda
