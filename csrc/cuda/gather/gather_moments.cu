// A batch and the moments of its patches (conv_bn_relu_max_pool2d.h) in one launch, for images of
// one channel. Where a tile of the sums is an image, one block reads its bytes once, for the batch
// and for the sums. Else blocks that sum read them for themselves.
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
    return held < 0 ? convert<T>(acc_t<T>(0)) : normalised_pixel<T>(held, scale_, shift_);
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

// Words of four pixels that a thread holds of an image.
constexpr int kImageWords = 3;

// Images of whole words of bytes, a tile each: to the batch, and to shared memory as doubles.
template <typename T>
class WholeImages {
 public:
  // values: [256] in shared memory, what each byte becomes. `first`: where the images begin among
  // `indices`. A barrier has to follow.
  __device__ __forceinline__ WholeImages(const Gather& g, const Tiling& tiling, int64_t first,
                                         double* values)
      : args_(g.args),
        first_(first),
        values_(values),
        scale_(*static_cast<const acc_t<T>*>(g.args.scale)),
        shift_(*static_cast<const acc_t<T>*>(g.args.shift)),
        words_(g.image_size / 4) {
    for (int byte = threadIdx.x; byte < 256; byte += kMomentThreads) {
      values[byte] = convert<double>(normalised(byte));
    }
#pragma unroll
    for (int i = 0; i < kImageWords; ++i) {
      const int word = threadIdx.x + i * kMomentThreads, in_row = tiling.w / 4;
      places_[i] = (word / in_row + tiling.pad_h) * tiling.pitch + word % in_row * 4 + tiling.pad_w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) turned_[j] = (j + static_cast<int>(threadIdx.x) / 4) % 4;
  }
  // Asks which image is at place n, and for the bytes of the one that was asked for before.
  __device__ __forceinline__ void find(int64_t n, bool exists) {
    index_ = exists ? index_at(args_, first_, n) : -1;
  }
  __device__ __forceinline__ void load() {
    loaded_ = index_;
    label_ = index_ >= 0 && threadIdx.x == 0 ? args_.labels[index_] : -1;
    const auto* const image = reinterpret_cast<const uint32_t*>(args_.images + index_ * 4 * words_);
#pragma unroll
    for (int i = 0; i < kImageWords; ++i) {
      const int word = threadIdx.x + i * kMomentThreads;
      if (index_ >= 0 && word < words_) held_[i] = image[word];
    }
  }
  // The image that was loaded last, at place n of the batch.
  __device__ __forceinline__ void store(int64_t n, double* staged, T* batch_images,
                                        int64_t* batch_labels) const {
    if (threadIdx.x == 0) batch_labels[n] = label_;
    T* const image = batch_images + n * 4 * words_;
#pragma unroll
    for (int i = 0; i < kImageWords; ++i) {
      const int word = threadIdx.x + i * kMomentThreads;
      if (word >= words_) continue;
      Vec<T, 4> pixels;
      double doubles[4];
      if (loaded_ >= 0) {
        // The lanes of a fourth of a warp begin with another pixel each, in banks of their own.
        const uint32_t turned = __funnelshift_r(held_[i], held_[i], 8 * turned_[0]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          pixels.v[j] = normalised(static_cast<int>(held_[i] >> 8 * j & 255));
          doubles[j] = values_[turned >> 8 * j & 255];
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          pixels.v[j] = convert<T>(std::numeric_limits<acc_t<T>>::quiet_NaN());
          doubles[j] = std::numeric_limits<double>::quiet_NaN();
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) staged[places_[i] + turned_[j]] = doubles[j];
      store_vec(image + 4 * word, pixels);
    }
  }

 private:
  __device__ __forceinline__ T normalised(int byte) const {
    return normalised_pixel<T>(byte, scale_, shift_);
  }

  const GatherArgs& args_;
  const int64_t first_;
  const double* const values_;
  const acc_t<T> scale_, shift_;
  const int words_;
  int places_[kImageWords], turned_[4];
  uint32_t held_[kImageWords];
  int64_t index_ = -1, loaded_ = -1, label_ = -1;
};

// Block `block` of part.blocks of each group's, in order.
template <typename Tp, typename T>
__global__ void __launch_bounds__(kMomentThreads)
    gather_whole_images_kernel(const __grid_constant__ Gather g,
                               const __grid_constant__ MomentPart part, int64_t images_of_group,
                               T* batch_images, int64_t* batch_labels, double* moments) {
  const Tiling& tiling = part.tiling;
  const int group = static_cast<int>(blockIdx.x) / part.blocks;
  int index = static_cast<int>(blockIdx.x) % part.blocks;
  const int set = index / part.cluster, size = tiling.staged(Tp::C);
  extern __shared__ double staged[];
  __shared__ int corners[2 * kMaxTileSquares];
  __shared__ double values[256];
  __shared__ BlockMoments<Tp> block;
  StagedWindows<Tp> windows(tiling, staged, corners);
  for (int i = threadIdx.x; i < 2 * size; i += kMomentThreads) staged[i] = 0;  // the padding
  for (int buffer = 0; buffer < 2; ++buffer) windows.locate(buffer, Tile(tiling, 0));
  WindowSums<Tp> sums;
  wait_for_earlier_kernels();
  const int64_t before = group * images_of_group;
  WholeImages<T> images(g, tiling, take_batch(g.args, g.readers) + before, values);
  batch_images += before * g.image_size;
  batch_labels += before;
  images.find(index, index < tiling.tiles);
  __syncthreads();
  images.load();
  images.find(index + part.blocks, index + part.blocks < tiling.tiles);
  for (int buffer = 0; index < tiling.tiles; index += part.blocks, buffer ^= 1) {
    images.store(index, staged + buffer * size, batch_images, batch_labels);
    images.load();
    const int next = index + 2 * part.blocks;
    images.find(next, next < tiling.tiles);
    __syncthreads();  // one an image: the next one goes to the other buffer
    windows.add_to(sums, buffer);
  }
  leave_moments<Tp>(part, set, sums, staged, block,
                    moments + group * (int64_t{kSmallKMostSets} * Tp::kMoments));
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
  const auto summing = static_cast<unsigned>(part.blocks * groups);
  // Whether a tile is an image, of words of pixels that lie as words.
  const bool whole = part.tiling.tiles == patches.n && source.w % 4 == 0 &&
                     args.pixels <= 4 * kImageWords * kMomentThreads &&
                     reinterpret_cast<uintptr_t>(args.images) % 4 == 0;
  g.readers = whole ? summing : g.blocks + summing;
  const auto blocks = static_cast<unsigned>(ceil_div(g.readers, part.cluster) * part.cluster);
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto taps) {
      using Tp = decltype(taps);
      T* const to = static_cast<T*>(batch_images);
      const int bytes = part.shared_bytes<Tp>();
      if (whole) {
        launch_early_in_clusters(gather_whole_images_kernel<Tp, T>, blocks, kMomentThreads, bytes,
                                 stream, part.cluster, g, part, patches.n, to, batch_labels,
                                 moments);
      } else {
        launch_early_in_clusters(gather_moments_kernel<Tp, T>, blocks, kMomentThreads, bytes,
                                 stream, part.cluster, g, part, groups, patches.n, to, batch_labels,
                                 moments);
      }
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
