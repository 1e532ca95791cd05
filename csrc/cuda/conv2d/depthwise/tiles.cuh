// Depthwise convolution, channels last, by tiles that lie in shared memory with what they read of
// their neighbours: a block asks for all of it at once, and each thread has four channels of a few
// results side by side. It takes less time from the first load to the last store than the walk of
// nhwc.cuh, and reads the rows between tiles again, from L2.
#pragma once

#include "args.h"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::depthwise {
namespace {

extern __shared__ __align__(16) char tiles_memory[];

// The four values at p.
__device__ __forceinline__ void load_four(const float* p, float (&x)[4]) {
  const float4 all = *reinterpret_cast<const float4*>(p);
  x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
}
__device__ __forceinline__ void load_four(const __nv_bfloat16* p, float (&x)[4]) {
  const uint2 all = *reinterpret_cast<const uint2*>(p);
  x[0] = __uint_as_float(all.x << 16), x[1] = __uint_as_float(all.x & 0xffff0000);
  x[2] = __uint_as_float(all.y << 16), x[3] = __uint_as_float(all.y & 0xffff0000);
}
__device__ __forceinline__ void load_four(const __half* p, float (&x)[4]) {
  const uint2 all = *reinterpret_cast<const uint2*>(p);
  const float2 a = __half22float2(reinterpret_cast<const __half2&>(all.x));
  const float2 b = __half22float2(reinterpret_cast<const __half2&>(all.y));
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
}

// The filters of a block's channels, from `first` on, as [tap][channel].
template <typename T, int R>
__device__ __forceinline__ void load_tile_weights(const Args& a, int first, float* to) {
  constexpr int V = kGranule / sizeof(T), kTaps = R * R;
  const T* const from = static_cast<const T*>(a.w) + int64_t{first} * kTaps;
  const int count = min(a.slab, a.channels - first) * kTaps;
  for (int i = threadIdx.x * V; i < count; i += blockDim.x * V) {
    const Vec<T, V> w = load_vec<V>(from + i);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (i + v) / kTaps, tap = (i + v) - c * kTaps;
      to[(a.turned ? kTaps - 1 - tap : tap) * a.slab + c] = convert<float>(w.v[v]);
    }
  }
}

template <typename T, int R, int kStride>
__global__ void __launch_bounds__(kTileThreads) tiles_kernel(const __grid_constant__ Args a) {
  constexpr int V = kTileChannels, kColumns = tile_columns(kStride);
  constexpr int kWindow = (kColumns - 1) * kStride + R;
  wait_for_earlier_kernels();
  const int first = blockIdx.y * a.slab;
  int row_tile, column_tile;
  const int n = a.by_row_tiles.div(a.by_column_tiles.div(blockIdx.x, column_tile), row_tile);
  const int top = row_tile * a.tile_rows, left = column_tile * a.strips * kColumns;

  // The pixels that the tile reads, zeros outside of the image, one after the other.
  float* const weights = reinterpret_cast<float*>(tiles_memory);
  char* const pixels = tiles_memory + R * R * a.slab * sizeof(float);
  const int columns = a.by_dy_vectors.divisor(), granules = a.by_vectors.divisor();
  const int rows = (a.tile_rows - 1) * kStride + R;
  const T* const image = static_cast<const T*>(a.in.data) + n * a.in.n + first;
  for (int i = threadIdx.x; i < rows * columns * granules; i += blockDim.x) {
    int part, column;
    const int pixel = a.by_vectors.div(i, part), row = a.by_dy_vectors.div(pixel, column);
    const int h = a.first_row + top * kStride + row, w = a.first_column + left * kStride + column;
    const int c = part * (kGranule / static_cast<int>(sizeof(T)));
    const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(a.in.height) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(a.in.width) &&
                        first + c < a.channels;
    cp_async<kGranule>(pixels + pixel * a.pitch + part * kGranule,
                       image + h * a.in.h + w * a.in.w + c, inside);
  }
  cp_async_commit();
  load_tile_weights<T, R>(a, first, weights);

  int unit, across;
  const int group = a.by_units.div(threadIdx.x, unit), down = a.by_strips.div(group, across);
  const int own = unit * V, channel = first + own;
  const int p = top + down, q = left + across * kColumns;
  const bool active = group < a.groups && p < a.rows && q < a.columns && channel < a.channels;
  float sum[kColumns][V] = {};
  if (a.bias && active) {
    load_four(static_cast<const T*>(a.bias) + channel, sum[0]);
#pragma unroll
    for (int i = V; i < kColumns * V; ++i) sum[i / V][i % V] = sum[0][i % V];
  }
  const bool has_tail = a.tail.mean != nullptr;
  Tail::Coefficients of[V];
  if (has_tail && active) a.tail.find_coefficients(channel, of);
  cp_async_wait<0>();
  __syncthreads();
  if (!active) return;
  const char* window =
      pixels + (down * kStride * columns + across * kColumns * kStride) * a.pitch + own * sizeof(T);
  const float* factors = weights + own;
  // Not unrolled where the code would be longer than the instruction cache next to the scheduler.
#pragma unroll(R == 3 ? R : 1)
  for (int r = 0; r < R; ++r, window += columns * a.pitch, factors += R * a.slab) {
    float x[kWindow][V];
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      load_four(reinterpret_cast<const T*>(window + i * a.pitch), x[i]);
    }
#pragma unroll
    for (int s = 0; s < R; ++s) {
      float w[V];
      load_four(factors + s * a.slab, w);
#pragma unroll
      for (int i = 0; i < kColumns * V; ++i) {
        sum[i / V][i % V] += x[i / V * kStride + s][i % V] * w[i % V];
      }
    }
  }
  if (has_tail) {
#pragma unroll
    for (int i = 0; i < kColumns * V; ++i) sum[i / V][i % V] = of[i % V](sum[i / V][i % V]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) a.tail.activate<T>(sum[i]);
  }
  T* const out = static_cast<T*>(a.out.data) + n * a.out.n + p * a.out.h + channel;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    Vec<T, V> y;
#pragma unroll
    for (int v = 0; v < V; ++v) y.v[v] = convert<T>(sum[i][v]);
    if (q + i < a.columns) store_vec(out + (q + i) * a.out.w, y);
  }
}

template <typename T>
Function tiles_function(const Kernel& k) {
  if (k.taps == 3) return k.stride == 1 ? tiles_kernel<T, 3, 1> : tiles_kernel<T, 3, 2>;
  if (k.taps == 5) return k.stride == 1 ? tiles_kernel<T, 5, 1> : tiles_kernel<T, 5, 2>;
  return k.stride == 1 ? tiles_kernel<T, 7, 1> : tiles_kernel<T, 7, 2>;
}

}  // namespace
}  // namespace braze::cuda::depthwise
