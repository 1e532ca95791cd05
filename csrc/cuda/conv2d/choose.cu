// The choice among the convolution's kernels, and the registry of them.
#include "launchers/conv2d.h"

#include "gather.cuh"
#include "cuda/conv2d/halo/halo.h"
#include "launchers/common/registry.h"
#include "cuda/conv2d/implicit_gemm/pack.cuh"

namespace braze::cuda {
namespace {

enum class Choice { kDirect, kSimt, kMma, kHalo };

const char* name_of(Choice choice) {
  return choice == Choice::kDirect ? "direct"
         : choice == Choice::kSimt ? "implicit_gemm_simt"
         : choice == Choice::kMma  ? "implicit_gemm_mma"
                                   : "halo_wgmma";
}

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

// Why the kernel cannot take the arguments, or nullptr.
const char* obstacle(Choice choice, const Conv2dArgs& args) {
  if (!has_small_extents(args)) return "it counts pixels and taps with 31 bits";
  if (choice == Choice::kDirect) return nullptr;
  if (choice == Choice::kHalo) {
    return halo::supports(args.pass, args.shape, args.gathered, args.other, args.out)
               ? nullptr
               : "it takes channels-last float32, bfloat16 and float16 tensors, stride and "
                 "dilation 1, one group, small filters (three columns in wgrad), and compute "
                 "capability 9.0";
  }
  if (!has_small_offsets(args)) return "it addresses tensors with 31 bits";
  const DType dtype = args.shape.dtype;
  if (choice == Choice::kSimt) {
    return size_of(dtype) == 2 ? "it takes float32 and float64" : nullptr;
  }
  if (dtype == DType::kFloat64) return "it takes float32 (as TF32), bfloat16 and float16";
  if (dtype == DType::kFloat32 && !args.shape.allow_tf32) {
    return "float32 inputs would be rounded to TF32, which is not allowed";
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
    if (!is_thin(args)) {
      choice = !obstacle(Choice::kHalo, args)   ? Choice::kHalo
               : !obstacle(Choice::kMma, args)  ? Choice::kMma
               : !obstacle(Choice::kSimt, args) ? Choice::kSimt
                                                : Choice::kDirect;
    }
  } else if (kernel == "implicit_gemm_simt") {
    choice = Choice::kSimt;
  } else if (kernel == "implicit_gemm_mma") {
    choice = Choice::kMma;
  } else if (kernel == "halo_wgmma") {
    choice = Choice::kHalo;
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

void run_mma(Stream stream, const Conv2dArgs& args, void* workspace) {
  const PackedConv2d packed = plan_packed(args, workspace);
  pack_operands(stream, args, packed);
  void* const rest = static_cast<char*>(workspace) + packed.bytes;
  switch (args.shape.dtype) {
    case DType::kBFloat16: mma_conv2d_bf16(stream, packed.args, rest); break;
    case DType::kFloat16: mma_conv2d_fp16(stream, packed.args, rest); break;
    default: mma_conv2d_tf32(stream, packed.args, rest); break;
  }
  unpack_result(stream, args, packed);
}

int64_t mma_workspace_bytes(const Conv2dArgs& args) {
  const PackedConv2d packed = plan_packed(args, nullptr);
  const ConvExtents e = conv_extents(packed.args);
  return packed.bytes +
         split_bytes<float>(mma_conv2d_splits(packed.args), args.shape.groups, e.m, e.n);
}

void run_halo(Stream stream, const Conv2dArgs& args, void* workspace) {
  if (args.pass == Conv2dPass::kWgrad) {
    return halo::wgrad(stream, args.shape, args.other, args.gathered, args.out, workspace);
  }
  halo::conv(stream, args.pass, args.shape, args.gathered, args.other, args.bias, args.out,
             args.moments);
}

// f(part) for parts of the batch small enough for 32-bit offsets: fprop and dgrad treat images one
// by one, wgrad sums over them.
template <typename F>
void for_each_part(const Conv2dArgs& args, F&& f) {
  if (args.pass == Conv2dPass::kWgrad) return f(args);
  Conv2dArgs part = args;
  const int64_t n = args.shape.n, size = size_of(args.shape.dtype);
  while (part.shape.n > 1 && !(has_small_extents(part) && has_small_offsets(part))) {
    part.shape.n = ceil_div(part.shape.n, 2);
  }
  const int64_t step = part.shape.n;
  const auto image = [&](const Tensor4dRef& t, int64_t i) {
    return static_cast<char*>(const_cast<void*>(t.data)) + i * t.n * size;
  };
  for (int64_t i = 0; i < n; i += step) {
    part.shape.n = std::min(step, n - i);
    if (step != n) {
      part.gathered.data = image(args.gathered, i);
      part.out.data = image(args.out, i);
    }
    f(part);
  }
}

void run(Stream stream, const Conv2dArgs& args, const std::string& kernel, void* workspace) {
  if (is_empty(args)) return;
  for_each_part(args, [&](const Conv2dArgs& part) {
    switch (choose(part, kernel)) {
      case Choice::kDirect: return direct_conv2d(stream, part, workspace);
      case Choice::kSimt: return simt_conv2d(stream, part, workspace);
      case Choice::kMma: return run_mma(stream, part, workspace);
      case Choice::kHalo: return run_halo(stream, part, workspace);
    }
  });
}

int64_t workspace_bytes(const Conv2dArgs& args, const std::string& kernel) {
  if (is_empty(args)) return 0;
  int64_t bytes = 0;
  for_each_part(args, [&](const Conv2dArgs& part) {
    switch (choose(part, kernel)) {
      case Choice::kDirect: bytes = std::max(bytes, direct_conv2d_workspace_bytes(part)); break;
      case Choice::kSimt: bytes = std::max(bytes, simt_conv2d_workspace_bytes(part)); break;
      case Choice::kMma: bytes = std::max(bytes, mma_workspace_bytes(part)); break;
      case Choice::kHalo:
        if (part.pass == Conv2dPass::kWgrad) {
          bytes = std::max(bytes, halo::wgrad_workspace_bytes(part.shape));
        }
        break;
    }
  });
  return bytes;
}

// x, w and y in their roles for the pass.
Conv2dArgs make_args(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                     const Tensor4dRef& w, const Tensor4dRef& y) {
  switch (pass) {
    case Conv2dPass::kFprop: return {pass, shape, x, w, y, nullptr};
    case Conv2dPass::kDgrad: return {pass, shape, y, w, x, nullptr};
    case Conv2dPass::kWgrad: break;
  }
  return {pass, shape, x, y, w, nullptr};
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
  return workspace_bytes(make_args(pass, shape, x, w, y), kernel);
}

int conv2d_moment_sets(const Conv2dShape& shape, const Tensor4dRef& x, const Tensor4dRef& w,
                       const Tensor4dRef& y, const std::string& kernel) {
  const Conv2dArgs args = make_args(Conv2dPass::kFprop, shape, x, w, y);
  if (is_empty(args)) return 0;
  int parts = 0, sets = 0;
  for_each_part(args, [&](const Conv2dArgs& part) {
    ++parts;
    if (choose(part, kernel) == Choice::kHalo) sets = halo::moment_sets(part.pass, part.shape);
  });
  return parts == 1 ? sets : 0;
}

const char* conv2d_auto_kernel(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                               const Tensor4dRef& w, const Tensor4dRef& y) {
  return name_of(choose(make_args(pass, shape, x, w, y), "auto"));
}

void conv2d_fprop(Stream stream, const Conv2dShape& shape, const Tensor4dRef& x,
                  const Tensor4dRef& w, const void* bias, const Tensor4dRef& y,
                  const std::string& kernel, void* workspace, Moments* moments) {
  run(stream, {Conv2dPass::kFprop, shape, x, w, y, bias, moments}, kernel, workspace);
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
