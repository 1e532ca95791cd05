// The sum of the partial weight gradients that halo/wgrad.cu's blocks leave.
#pragma once

#include "tiles.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::halo {
namespace {

constexpr int kTapColumns = 3;  // of the filters

// Partial sums lie as the registers they come from: for each block and filter row, and for four
// registers at a time, four numbers of each thread of a warpgroup.
constexpr int kItem = 4;
__host__ __device__ constexpr int items_of_row(int channel_block) {
  return kFilters * kTapColumns * channel_block / kItem;
}

// A block of the sum: items side by side in a warp's lanes, slices of the parts.
constexpr int kSumItems = 32, kSumSlices = 8, kSumThreads = kSumItems * kSumSlices;
static_assert(items_of_row(32) % kSumItems == 0);  // no more than one filter row
static_assert(kSumThreads >= kSumItems * kItem);   // one gradient a thread

// The accumulator of filter row `r` into its place: partial[block][r][kCount / 4][thread][4].
template <int kCount>
__device__ __forceinline__ void store_partial(const float (&acc)[kCount], int r, int filter_rows,
                                              float* partial) {
  static_assert(kCount % kItem == 0);
  const int64_t block = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  float4* to = reinterpret_cast<float4*>(partial) + (block * filter_rows + r) * (kCount * 32) +
               threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < kCount; i += kItem) {
    to[i * 32] = float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
  }
}

// dW = sum of the blocks' partial gradients, as store_partial left them.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    reduce_kernel(const Args a, int channel_block, int parts, const float* partial,
                  T* __restrict__ dw) {
  wait_for_earlier_kernels();
  __shared__ float4 sums[kSumSlices][kSumItems + 1];
  const int count = items_of_row(channel_block) / 128;  // in each thread
  const int size = gridDim.y * a.r * count * 128;       // of each part
  const int slice = threadIdx.x / kSumItems, lane = threadIdx.x % kSumItems;
  const int item = blockIdx.x * kSumItems + lane;  // of this block of filters and channels
  const float4* from = reinterpret_cast<const float4*>(partial) + blockIdx.y * a.r * count * 128;
  float4 sum{0, 0, 0, 0};
#pragma unroll 8
  for (int part = slice; part < parts; part += kSumSlices) {
    const float4 v = from[int64_t{part} * size + item];
    sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
  }
  sums[slice][lane] = sum;
  __syncthreads();
  // One gradient a thread: number `part` of an item.
  if (threadIdx.x >= kSumItems * kItem) return;
  const int part = threadIdx.x % kItem, at = threadIdx.x / kItem;
  float total = 0;
  for (int other = 0; other < kSumSlices; ++other) {
    total += reinterpret_cast<const float*>(&sums[other][at])[part];
  }
  const int channel_blocks = (a.c + channel_block - 1) / channel_block;
  const int of = blockIdx.x * kSumItems + at, thread = of % 128;
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
