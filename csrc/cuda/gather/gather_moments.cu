// A batch and the moments of its patches (conv_bn_relu_max_pool2d.h) in one launch, for images of
// one channel. Blocks that sum read the images' bytes for themselves.
#include <limits>

#include "gather.cuh"
#include "launchers/common/registry.h"
#include "cuda/conv_bn_relu_max_pool2d/small_k_moments.cuh"

namespace braze::cuda {
namespace {

using namespace small_k;

// The batch as InputLoader reads it: what gather_block() makes of the bytes.
template <typename T>
class GatheredPixels {
 public:
  using Raw = uint8_t;
  using Held = int;
  static constexpr int kOutside = -1;

  __device__ __forceinline__ GatheredPixels(const Gather& g, int64_t first)
      : g_(g),
        first_(first),
        scale_(*static_cast<const acc_t<T>*>(g.args.scale)),
        shift_(*static_cast<const acc_t<T>*>(g.args.shift)) {}
  __device__ __forceinline__ const uint8_t* image(int n) {
    const int64_t index = index_at(g_.args, first_, n);
    missing_ = index < 0;
    return g_.args.images + (missing_ ? 0 : index) * g_.image_size;
  }
  __device__ __forceinline__ T value(int held, int /*channel*/) const {
    if (missing_) return convert<T>(std::numeric_limits<acc_t<T>>::quiet_NaN());
    return held < 0 ? convert<T>(acc_t<T>(0))
                    : convert<T>(static_cast<acc_t<T>>(held) * scale_ + shift_);
  }

 private:
  const Gather& g_;
  int64_t first_;
  acc_t<T> scale_, shift_;
  bool missing_ = false;
};

// The grid: blocks that sum, those of one group of images after those of another; blocks that
// gather, and some to fill a cluster.
template <typename Tp, typename T>
__global__ void __launch_bounds__(kMomentThreads)
    gather_moments_kernel(const __grid_constant__ Gather g, const __grid_constant__ MomentPart part,
                          int groups, int64_t images_of_group, T* batch_images,
                          int64_t* batch_labels, double* moments) {
  unsigned block = blockIdx.x;
  const auto blocks = static_cast<unsigned>(part.blocks), summing = blocks * groups;
  if (block < summing) {
    const int64_t group = block / blocks;
    const auto pixels = [&] {
      return GatheredPixels<T>(g, take_batch(g.args, g.readers) + group * images_of_group);
    };
    double* const own = moments + group * (int64_t{kSmallKMostSets} * Tp::kMoments);
    sum_moments<Tp>(part, static_cast<int>(block % blocks), pixels, own);
    return;
  }
  wait_for_earlier_kernels();
  block -= summing;
  if (block < g.blocks) gather_block<false, kVecWidth<T>>(g, block, batch_images, batch_labels);
}

const KernelEntry kEntry({"gather_images", "with_moments", "float32 bfloat16 float16", "sm_80+",
                          true,
                          "one channel; the patch moments of a fused block beside the batch"});

}  // namespace

bool gather_and_sum_moments(Stream stream, const GatherArgs& args, void* batch_images,
                            int64_t* batch_labels, const SmallKShape& patches, double* moments) {
  const int64_t width = 16 / size_of(args.dtype);
  const bool whole_vectors = args.pixels % width == 0 &&
                             reinterpret_cast<uintptr_t>(batch_images) % 16 == 0 &&
                             reinterpret_cast<uintptr_t>(args.images) % width == 0;
  if (args.dtype == DType::kFloat64 || args.channels != 1 || args.count == 0 || !whole_vectors) {
    return false;
  }
  SmallKShape source = patches;  // of the data set, but for the images' order
  source.x_n = source.x_c = args.pixels;
  source.x_h = source.w;
  source.x_w = 1;
  const std::vector<MomentPart> parts = moment_parts(source);
  if (parts.size() != 1) return false;
  const MomentPart& part = parts[0];
  Gather g{};
  g.args = args;
  g.inner = FastDiv(args.pixels);
  g.image_size = static_cast<int>(args.pixels);
  divide(g, static_cast<int>(width), kMomentThreads);
  const auto groups = static_cast<int>(args.batch / patches.n);
  g.readers = g.blocks + static_cast<unsigned>(part.blocks) * groups;
  const auto blocks = static_cast<unsigned>(ceil_div(g.readers, part.cluster) * part.cluster);
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto taps) {
      using Tp = decltype(taps);
      launch_early_in_clusters(gather_moments_kernel<Tp, T>, blocks, kMomentThreads,
                               part.shared_bytes(Tp::C), stream, part.cluster, g, part, groups,
                               patches.n, static_cast<T*>(batch_images), batch_labels, moments);
    };
    patches.r == 3 ? launch(Taps<1, 3, 3>{}) : launch(Taps<1, 5, 5>{});
    check_launch("gather_images with moments");
  };
  switch (args.dtype) {
    case DType::kBFloat16: run(TypeTag<__nv_bfloat16>{}); break;
    case DType::kFloat16: run(TypeTag<__half>{}); break;
    default: run(TypeTag<float>{});
  }
  return true;
}

}  // namespace braze::cuda
