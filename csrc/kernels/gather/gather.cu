// A batch of a data set in one launch: images gathered, normalised, cast and laid out, labels
// gathered. The batch takes two to eight times the bytes of what is read.
#include "gather.cuh"

#include <type_traits>

#include "kernels/cast/cast_list.cuh"
#include "kernels/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = kCastThreads;

struct NoCasts {
  unsigned blocks() const { return 0; }
};

// casts: float tensors that become T in the same launch, or none.
template <bool kInterleaved, int N, typename T, typename Casts>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ Gather g, T* batch_images, int64_t* batch_labels,
                  const __grid_constant__ Casts casts) {
  wait_for_earlier_kernels();
  if constexpr (!std::is_same_v<Casts, NoCasts>) {
    if (blockIdx.x >= g.blocks) return cast_block<float, T>(casts, blockIdx.x - g.blocks);
  }
  gather_block<kInterleaved, N>(g, blockIdx.x, batch_images, batch_labels);
}

template <bool kInterleaved, int N, typename T, typename Casts>
void launch(Stream stream, Gather g, T* batch_images, int64_t* batch_labels, const Casts& casts) {
  divide(g, N, kThreads);
  g.readers = g.blocks;
  launch_early(gather_kernel<kInterleaved, N, T, Casts>, g.blocks + casts.blocks(), kThreads, 0,
               stream, g, batch_images, batch_labels, casts);
  check_launch("gather_images");
}

template <typename Casts>
void gather(Stream stream, const GatherArgs& args, void* batch_images, int64_t* batch_labels,
            const Casts& casts) {
  // The two layouts are one where there is a single channel or pixel.
  const bool interleaved = args.channels_last && args.channels > 1 && args.pixels > 1;
  Gather g{};
  g.args = args;
  g.inner = FastDiv(interleaved ? args.channels : args.pixels);
  g.image_size = static_cast<int>(args.channels * args.pixels);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    if constexpr (std::is_same_v<Casts, NoCasts> || sizeof(T) == 2) {
      T* out = static_cast<T*>(batch_images);
      const bool wide = g.image_size % N == 0 && is_vec_aligned(out) &&
                        (interleaved || reinterpret_cast<uintptr_t>(args.images) % N == 0);
      if (interleaved) {
        wide ? launch<true, N>(stream, g, out, batch_labels, casts)
             : launch<true, 1>(stream, g, out, batch_labels, casts);
      } else {
        wide ? launch<false, N>(stream, g, out, batch_labels, casts)
             : launch<false, 1>(stream, g, out, batch_labels, casts);
      }
    }
  });
}

const KernelEntry kEntry(
    {"gather_images", "vectorized", "float64 float32 bfloat16 float16", "sm_80+", true,
     "16 bytes of the batch per thread and access; labels in the same launch"});

}  // namespace

GatherDone gather_images(Stream stream, const GatherArgs& args, void* batch_images,
                         int64_t* batch_labels, const GatherBeside& beside) {
  if (args.batch == 0) return {};
  CastList list{};
  int lists = 0;
  if (beside.from == DType::kFloat32 && beside.to == args.dtype && size_of(args.dtype) == 2) {
    list.for_each_launch(beside.casts, beside.cast_count, [&] { ++lists; });
  }
  const bool casts = lists == 1;
  if (beside.patches &&
      gather_and_sum_moments(stream, args, batch_images, batch_labels, *beside.patches,
                             beside.moments, beside.casts, casts ? beside.cast_count : 0)) {
    return {casts, true};
  }
  if (casts) {
    gather(stream, args, batch_images, batch_labels, list);
  } else {
    gather(stream, args, batch_images, batch_labels, NoCasts{});
  }
  return {casts, false};
}

}  // namespace braze::cuda
