// Convolution as an implicit matrix product on the tensor cores for one element type; each .cu
// beside it compiles one.
#pragma once

#include "gather.cuh"
#include "kernels/common/gemm_mma.cuh"

namespace braze::cuda {

template <typename T>
class MmaConv2d {
  using Op = GatheredOperand<T>;

 public:
  // Channels_last with enough channels for 16-byte vectors gathers those; everything else single
  // elements: TF32 through cp.async, 16-bit types through registers.
  static void launch(Stream stream, const Conv2dArgs& args, void* workspace) {
    const bool narrow = conv_extents(args).n <= 32;
    const bool vectors = is_channels_last(args) && gather_input<T>(args).vectors;
    if (args.pass == Conv2dPass::kWgrad) {
      using Tile = MmaTile<64, 64, 32, 32>;
      if (vectors && gather_other<T>(args).vectors) {
        run<Tile, false, false, Load::kVectors, Load::kVectors>(stream, args, false, workspace);
      } else {
        run<Tile, true, true, Load::kElements, Load::kElements>(stream, args, false, workspace);
      }
    } else if (!vectors) {
      if (narrow) {
        run<MmaTile<32, 128, 32, 32>, true, false, Load::kElements, Load::kElements>(
            stream, args, true, workspace);
      } else {
        run<MmaTile<64, 128, 32, 64>, true, false, Load::kElements, Load::kElements>(
            stream, args, true, workspace);
      }
    } else if (args.pass == Conv2dPass::kFprop) {
      launch_vectors<true>(stream, args, narrow, workspace);
    } else {
      launch_vectors<false>(stream, args, narrow, workspace);
    }
  }

 private:
  // The filters' fastest index: input channels, which are fprop's depth and dgrad's columns.
  template <bool kFiltersDepthMajor>
  static void launch_vectors(Stream stream, const Conv2dArgs& args, bool narrow, void* workspace) {
    if (narrow) {
      run<MmaTile<128, 32, 32, 32>, true, kFiltersDepthMajor, Load::kVectors, Load::kEither>(
          stream, args, false, workspace);
    } else {
      run<MmaTile<128, 64, 64, 32>, true, kFiltersDepthMajor, Load::kVectors, Load::kEither>(
          stream, args, false, workspace);
    }
  }

  template <typename Tile, bool kADepthMajor, bool kBDepthMajor, Load kLoadA, Load kLoadB>
  static void run(Stream stream, const Conv2dArgs& args, bool exchange, void* workspace) {
    using Kernel = MmaKernel<Tile, kADepthMajor, kBDepthMajor, kLoadA, kLoadB, Op, Op>;
    launch_gemm<Kernel>(stream, conv_problem<T>(args, exchange), mma_conv2d_splits(args),
                        workspace);
  }
};

}  // namespace braze::cuda
