// A batch of a data set in one launch: images gathered, normalised, cast and laid out, labels
// gathered. The batch takes two to eight times the bytes of what is read.
#include "gather.cuh"

#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

template <bool kInterleaved, int N, typename T>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ Gather g, T* batch_images, int64_t* batch_labels) {
  wait_for_earlier_kernels();
  gather_block<kInterleaved, N>(g, blockIdx.x, batch_images, batch_labels);
}

template <bool kInterleaved, int N, typename T>
void launch(Stream stream, Gather g, T* batch_images, int64_t* batch_labels) {
  divide(g, N, kThreads);
  g.readers = g.blocks;
  launch_early(gather_kernel<kInterleaved, N, T>, g.blocks, kThreads, 0, stream, g, batch_images,
               batch_labels);
  check_launch("gather_images");
}

const KernelEntry kEntry(
    {"gather_images", "vectorized", "float64 float32 bfloat16 float16", "sm_80+", true,
     "16 bytes of the batch per thread and access; labels in the same launch"});

}  // namespace

bool gather_images(Stream stream, const GatherArgs& args, void* batch_images, int64_t* batch_labels,
                   const SmallKShape* patches, double* moments) {
  if (args.batch == 0) return false;
  if (patches &&
      gather_and_sum_moments(stream, args, batch_images, batch_labels, *patches, moments)) {
    return true;
  }
  // The two layouts are one where there is a single channel or pixel.
  const bool interleaved = args.channels_last && args.channels > 1 && args.pixels > 1;
  Gather g{};
  g.args = args;
  g.inner = FastDiv(interleaved ? args.channels : args.pixels);
  g.image_size = static_cast<int>(args.channels * args.pixels);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    T* out = static_cast<T*>(batch_images);
    const bool wide = g.image_size % N == 0 && is_vec_aligned(out) &&
                      (interleaved || reinterpret_cast<uintptr_t>(args.images) % N == 0);
    if (interleaved) {
      wide ? launch<true, N>(stream, g, out, batch_labels)
           : launch<true, 1>(stream, g, out, batch_labels);
    } else {
      wide ? launch<false, N>(stream, g, out, batch_labels)
           : launch<false, 1>(stream, g, out, batch_labels);
    }
  });
  return false;
}

}  // namespace braze::cuda
