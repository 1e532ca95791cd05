// The sum of the partial weight gradients that halo/wgrad.cu's blocks leave.
#pragma once

#include "tiles.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::halo {
namespace {

constexpr int kTapColumns = 3;  // of the filters
constexpr int kFilters = 64;    // per block

// The accumulator of filter row `r` into its place: partial[block][r][kCount / 4][thread][4], just
// as the registers are.
template <int kCount>
__device__ __forceinline__ void store_partial(const float (&acc)[kCount], int r, int filter_rows,
                                              float* partial) {
  const int64_t block = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  float4* to = reinterpret_cast<float4*>(partial) + (block * filter_rows + r) * (kCount * 32) +
               threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    to[i * 32] = float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
  }
}

// dW = sum of the blocks' partial gradients: four at a time as store_partial left them, 32 lanes of
// a block side by side, eight slices of the parts.
template <typename T>
__global__ void __launch_bounds__(256) reduce_kernel(const Args a, int channel_block, int parts,
                                                     const float* partial, T* __restrict__ dw) {
  wait_for_earlier_kernels();
  __shared__ float4 sums[8][33];
  const int count = kTapColumns * channel_block / 8;  // of four gradients, in each thread
  const int size = gridDim.y * a.r * count * 128;     // of each part
  const int slice = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int item = blockIdx.x * 32 + lane;  // of this block of filters and channels
  const float4* from = reinterpret_cast<const float4*>(partial) + blockIdx.y * a.r * count * 128;
  float4 sum{0, 0, 0, 0};
#pragma unroll 8
  for (int part = slice; part < parts; part += 8) {
    const float4 v = from[int64_t{part} * size + item];
    sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
  }
  sums[slice][lane] = sum;
  __syncthreads();
  // One gradient a thread: number `part` of the four of an item.
  if (threadIdx.x >= 128) return;
  const int part = threadIdx.x % 4, at = threadIdx.x / 4;
  float total = 0;
  for (int other = 0; other < 8; ++other) {
    total += reinterpret_cast<const float*>(&sums[other][at])[part];
  }
  const int channel_blocks = (a.c + channel_block - 1) / channel_block;
  const int of = blockIdx.x * 32 + at, thread = of % 128;
  const int column = of / 128 % count * 8 + thread % 4 * 2 + part % 2, r = of / 128 / count;
  const int k =
      blockIdx.y / channel_blocks * kFilters + thread / 32 * 16 + thread % 32 / 4 + part / 2 * 8;
  const int s = column / channel_block;
  const int c = blockIdx.y % channel_blocks * channel_block + column % channel_block;
  if (k < a.k && c < a.c) {
    dw[k * a.w_k + c * a.w_c + r * a.w_r + s * a.w_s] = convert<T>(total);
  }
}

}  // namespace
}  // namespace braze::cuda::halo
