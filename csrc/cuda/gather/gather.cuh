// A block's part in gathering a batch: each thread makes 16 bytes of it at a time; a warp's reads
// are contiguous too (of each channel, where the channels interleave).
#pragma once

#include <limits>

#include "launchers/gather.h"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda {

struct Gather {
  GatherArgs args;
  unsigned blocks;   // that gather
  unsigned readers;  // that ask for the batch
  FastDiv inner;     // extent of the innermost dimension of the batch
  int image_size;    // channels * pixels
  int vectors;       // per image; at least 1, for the thread that writes the label
  int64_t step;      // threads of the grid, as whole images
  int step_vectors;  // and the rest
};

// Where this launch's batch begins in `indices`. The block that is last to know moves it on for the
// next launch.
__device__ __forceinline__ int64_t take_batch(const GatherArgs& args, unsigned readers) {
  if (args.position == nullptr) return 0;
  volatile int64_t* position = args.position;
  const int64_t first = position[0];
  __syncthreads();  // the whole block has read it
  if (threadIdx.x == 0) {
    __threadfence();
    auto* arrived = reinterpret_cast<unsigned long long*>(args.position + 1);
    if (atomicAdd(arrived, 1ULL) == readers - 1) {
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

// What a byte becomes.
template <typename T, typename Byte>
__device__ __forceinline__ T normalised_pixel(Byte byte, acc_t<T> scale, acc_t<T> shift) {
  return convert<T>(static_cast<acc_t<T>>(byte) * scale + shift);
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
      result.v[k] = normalised_pixel<T>(x, scale[channel], shift[channel]);
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
      result.v[k] = normalised_pixel<T>(bytes.v[k], factor, term);
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

// Block `block` of g.blocks of the launch's; of the grid's blocks, g.readers ask for the batch.
template <bool kInterleaved, int N, typename T>
__device__ __forceinline__ void gather_block(const Gather& g, unsigned block, T* batch_images,
                                             int64_t* batch_labels) {
  const int64_t first = take_batch(g.args, g.readers);
  const int64_t thread = block * int64_t{blockDim.x} + threadIdx.x;
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

// The grid's blocks that gather, and what each thread of them does.
inline void divide(Gather& g, int width, int threads_per_block) {
  g.vectors = std::max(1, g.image_size / width);
  g.blocks = static_cast<unsigned>(grid_stride_blocks(g.args.batch * g.vectors, threads_per_block));
  const int64_t threads = int64_t{g.blocks} * threads_per_block;
  g.step = threads / g.vectors;
  g.step_vectors = static_cast<int>(threads % g.vectors);
}

// gather_moments.cu: gathers and sums moments, where that can be one launch; else does nothing and
// returns false.
bool gather_and_sum_moments(Stream stream, const GatherArgs& args, void* batch_images,
                            int64_t* batch_labels, const SmallKShape& patches, double* moments);

}  // namespace braze::cuda
