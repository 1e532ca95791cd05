// Convolution as an implicit matrix product on the tensor cores for one element type; each .cu
// beside it compiles one. The patches, and for wgrad dy too, have channels fastest in 16-byte
// vectors (pack.cuh sees to it).
#pragma once

#include "cuda/conv2d/gather.cuh"
#include "cuda/common/gemm_mma.cuh"

namespace braze::cuda {

// In `splits` parts of the depth (plan_mma()).
void mma_conv2d_bf16(Stream stream, const Conv2dArgs& args, int splits, void* workspace);
void mma_conv2d_fp16(Stream stream, const Conv2dArgs& args, int splits, void* workspace);
void mma_conv2d_tf32(Stream stream, const Conv2dArgs& args, int splits, void* workspace);

template <typename T>
class MmaConv2d {
  using Patches = PatchOperand<T, int>;
  using Plain = PlainOperand<T, int>;

 public:
  static void launch(Stream stream, const Conv2dArgs& args, int splits, void* workspace) {
    if (args.pass == Conv2dPass::kWgrad) {
      using Kernel = MmaKernel<MmaTile<64, 64, 32, 32>, false, false, Load::kVectors,
                               Load::kVectors, Plain, Patches>;
      launch_gemm<Kernel>(stream, patches_second<T, int>(args), splits, workspace);
      return;
    }
    // The filters' fastest index: input channels, which are fprop's depth and dgrad's columns.
    if (args.pass == Conv2dPass::kFprop) {
      patches<true>(stream, args, splits, workspace);
    } else {
      patches<false>(stream, args, splits, workspace);
    }
  }

 private:
  // Pixels are C's rows where the result's channels are its fastest dimension, else its columns.
  template <bool kFiltersDepthMajor>
  static void patches(Stream stream, const Conv2dArgs& args, int splits, void* workspace) {
    const bool narrow = conv_extents(args).n <= 32;
    const auto rows = [&](auto tile) {
      using Kernel = MmaKernel<decltype(tile), true, kFiltersDepthMajor, Load::kVectors,
                               Load::kEither, Patches, Plain>;
      launch_gemm<Kernel>(stream, patches_first<T, int>(args), splits, workspace);
    };
    const auto columns = [&](auto tile) {
      using Kernel = MmaKernel<decltype(tile), kFiltersDepthMajor, true, Load::kEither,
                               Load::kVectors, Plain, Patches>;
      launch_gemm<Kernel>(stream, patches_second<T, int>(args), splits, workspace);
    };
    if (args.out.c == 1) {
      if (narrow) return rows(MmaTile<128, 32, 32, 32>{});
      rows(MmaTile<128, 64, 64, 32>{});
    } else {
      if (narrow) return columns(MmaTile<32, 128, 32, 32>{});
      columns(MmaTile<64, 128, 32, 64>{});
    }
  }
};

}  // namespace braze::cuda
