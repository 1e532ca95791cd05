// A batch of a data set in one launch: images gathered, normalised, cast and laid out, labels
// gathered. The batch takes two to eight times the bytes of what is read, so each thread makes 16
// bytes of it; a warp's reads are contiguous too (of each channel, where the channels interleave).
#include "gather.h"

#include <limits>
#include <type_traits>

#include "kernels/cast/cast_list.cuh"
#include "kernels/common/fast_div.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = kCastThreads;

struct Gather {
  GatherArgs args;
  unsigned blocks;   // that gather; the grid's others cast
  FastDiv inner;     // extent of the innermost dimension of the batch
  int image_size;    // channels * pixels
  int vectors;       // per image; at least 1, for the thread that writes the label
  int64_t step;      // threads of the grid, as whole images
  int step_vectors;  // and the rest
};

// Where this launch's batch begins in `indices`. The block that is last to know moves it on for the
// next launch.
__device__ __forceinline__ int64_t take_batch(const GatherArgs& args, unsigned blocks) {
  if (args.position == nullptr) return 0;
  volatile int64_t* position = args.position;
  const int64_t first = position[0];
  __syncthreads();  // the whole block has read it
  if (threadIdx.x == 0) {
    __threadfence();
    auto* arrived = reinterpret_cast<unsigned long long*>(args.position + 1);
    if (atomicAdd(arrived, 1ULL) == blocks - 1) {
      position[0] = first + args.batch;
      position[1] = 0;
    }
  }
  return first;
}

// The image at place b of the batch that begins at `first`, or -1.
__device__ __forceinline__ int64_t index_at(const GatherArgs& args, int64_t first, int64_t b) {
  const uint64_t place = static_cast<uint64_t>(first) + static_cast<uint64_t>(b);
  if (place >= static_cast<uint64_t>(args.index_count)) return -1;
  const int64_t index = args.indices[place];
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(args.count) ? index : -1;
}

// N elements of a normalised image, from offset `at` of its layout in the batch.
template <bool kInterleaved, int N, typename T>
__device__ __forceinline__ Vec<T, N> normalised(const Gather& g, const uint8_t* image, int at) {
  using A = acc_t<T>;
  const A* scale = static_cast<const A*>(g.args.scale);
  const A* shift = static_cast<const A*>(g.args.shift);
  const int extent = g.inner.divisor();
  Vec<T, N> result;
  if constexpr (kInterleaved) {
    const int pixels = static_cast<int>(g.args.pixels);
    int channel, pixel = g.inner.div(at, channel);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A x = static_cast<A>(image[channel * pixels + pixel]);
      result.v[k] = convert<T>(x * scale[channel] + shift[channel]);
      if (++channel == extent && k + 1 < N) {
        channel = 0;
        ++pixel;
      }
    }
  } else {
    const auto bytes = *reinterpret_cast<const Vec<uint8_t, N>*>(image + at);
    int pixel, channel = g.inner.div(at, pixel);
    A factor = scale[channel], term = shift[channel];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      result.v[k] = convert<T>(static_cast<A>(bytes.v[k]) * factor + term);
      if (++pixel == extent && k + 1 < N) {
        pixel = 0;
        ++channel;
        factor = scale[channel];
        term = shift[channel];
      }
    }
  }
  return result;
}

struct NoCasts {
  unsigned blocks() const { return 0; }
};

// casts: float tensors that become T in the same launch, or none.
template <bool kInterleaved, int N, typename T, typename Casts>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ Gather g, T* __restrict__ batch_images,
                  int64_t* __restrict__ batch_labels, const __grid_constant__ Casts casts) {
  wait_for_earlier_kernels();
  if constexpr (!std::is_same_v<Casts, NoCasts>) {
    if (blockIdx.x >= g.blocks) return cast_block<float, T>(casts, blockIdx.x - g.blocks);
  }
  const int64_t first = take_batch(g.args, g.blocks);
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  int64_t b = thread / g.vectors;
  int vector = static_cast<int>(thread % g.vectors);
  while (b < g.args.batch) {
    const int64_t index = index_at(g.args, first, b);
    if (vector == 0) batch_labels[b] = index < 0 ? -1 : g.args.labels[index];
    if (g.image_size > 0) {
      const int at = vector * N;
      Vec<T, N> result;
      if (index >= 0) {
        result = normalised<kInterleaved, N, T>(g, g.args.images + index * g.image_size, at);
      } else {
#pragma unroll
        for (int k = 0; k < N; ++k) {
          result.v[k] = convert<T>(std::numeric_limits<acc_t<T>>::quiet_NaN());
        }
      }
      *reinterpret_cast<Vec<T, N>*>(batch_images + b * g.image_size + at) = result;
    }
    b += g.step;
    vector += g.step_vectors;
    if (vector >= g.vectors) {
      vector -= g.vectors;
      ++b;
    }
  }
}

template <bool kInterleaved, int N, typename T, typename Casts>
void launch(Stream stream, Gather g, T* batch_images, int64_t* batch_labels, const Casts& casts) {
  g.vectors = std::max(1, g.image_size / N);
  const int blocks = grid_stride_blocks(g.args.batch * g.vectors, kThreads);
  const int64_t threads = int64_t{blocks} * kThreads;
  g.step = threads / g.vectors;
  g.step_vectors = static_cast<int>(threads % g.vectors);
  g.blocks = static_cast<unsigned>(blocks);
  const unsigned all_blocks = g.blocks + casts.blocks();
  launch_early(gather_kernel<kInterleaved, N, T, Casts>, all_blocks, kThreads, 0, stream, g,
               batch_images, batch_labels, casts);
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

void gather_images(Stream stream, const GatherArgs& args, void* batch_images,
                   int64_t* batch_labels) {
  if (args.batch > 0) gather(stream, args, batch_images, batch_labels, NoCasts{});
}

bool gather_and_cast(Stream stream, const GatherArgs& args, void* batch_images,
                     int64_t* batch_labels, DType from, DType to, const CastTensor* tensors,
                     int64_t count) {
  if (args.batch == 0 || from != DType::kFloat32 || to != args.dtype || size_of(to) != 2) {
    return false;
  }
  CastList list{};
  int launches = 0;
  list.for_each_launch(tensors, count, [&] { ++launches; });
  if (launches != 1) return false;
  gather(stream, args, batch_images, batch_labels, list);
  return true;
}

}  // namespace braze::cuda
