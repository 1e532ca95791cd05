// The weight gradient of narrow/wgmma.cuh's layers, in 16 bits, for strides of 1 and 2; fp32's is
// wgmma_wgrad_parts.cuh.
//
// dW_row (64 filters x 32) += dY^T (64 x 16 positions) X_row (16 x 32), where a row of the filter
// is four chunks of two pixels: a chunk's eight elements are neighbours in N, and chunks of
// positions one behind the other are K, as they lie. dY comes by TMA with the staged positions'
// pitch, zeros behind the ends of rows. A warpgroup has a filter row, or two, and its gradients in
// registers over all tiles of its block; a second kernel adds up what blocks leave, in a fixed
// order.
#pragma once

#include "wgmma.cuh"
#include "cuda/conv2d/halo/stripes.cuh"

namespace braze::cuda::narrow {

constexpr int kTapElements = 32;  // of a filter row in a product, which has no more than these
constexpr int kRowAcc = kTapElements / 2;  // a thread's accumulators of a filter row
constexpr int kDepth = 16;                 // positions of a product
constexpr int kDyRowBytes = 128;           // of a position's filters
constexpr int kMostGroups = 4;             // of a block's consumers
constexpr int kWgradThreads = kMostGroups * 128 + kProducers;

struct WgmmaWgradArgs : WgmmaArgs {
  float* partial;  // for each block the gradients, as they lie in memory
  int64_t weights;
  int groups;    // of consumers: group g has filter rows g, g + groups, ...
  int dy_bytes;  // of a copy in shared memory
};

// A gradient of the accumulators' element v, of filter row r: the filter and the place in its row.
struct Gradient {
  int k, r, s, c;

  __device__ __forceinline__ Gradient(int k0, int r, int v) : r(r) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int e = v / 4 * 8 + lane % 4 * 2 + v % 2;
    k = k0 + thread / 32 * 16 + lane / 4 + v / 2 % 2 * 8;
    s = e / kPixelElements, c = e % kPixelElements;
  }
  __device__ __forceinline__ bool exists(const WgmmaWgradArgs& a) const {
    return r < a.taps_h && s < a.taps_w && c < a.channels && k < a.filters;
  }
  __device__ __forceinline__ int64_t offset(const WgmmaWgradArgs& a) const {
    return k * a.w_k + r * a.w_r + s * a.w_s + c * a.w_c;
  }
};

// What a tile adds to one gradient, on CUDA cores and from memory.
template <typename T>
__device__ float tile_gradient(const WgmmaWgradArgs& a, const Place& at, const Gradient& g) {
  const T* const x = static_cast<const T*>(a.x) + at.image * a.x_n;
  const T* const dy = static_cast<const T*>(a.y) + at.image * a.y_n;
  float sum = 0;
  for (int p = at.p; p < min(at.p + a.tile_rows, a.rows); ++p) {
    for (int q = at.q; q < min(at.q + a.tile_columns, a.columns); ++q) {
      const int row = p * a.stride_h - a.pad_h + g.r;
      const int column = q * a.stride_w - a.pad_w + g.s;
      const bool inside = row >= 0 && row < a.height && column >= 0 && column < a.width;
      const T* const pixel = x + (inside ? row * a.x_h + column * a.channels + g.c : 0);
      sum += (inside ? convert<float>(*pixel) : 0.0f) *
             convert<float>(dy[p * a.y_h + q * a.y_w + g.k]);
    }
  }
  return sum;
}

// The same for all gradients of this thread, of filter rows r0, r0 + groups, ...; what it has left
// of other tiles is in memory, or not.
template <typename T>
__device__ __noinline__ void add_tile(const WgmmaWgradArgs& a, int tile, int k0, int r0, int groups,
                                      bool has_rest, float* partial) {
  const Place at = place_of(a, tile);
  for (int r = r0; r < a.taps_h; r += groups) {
    for (int v = 0; v < kRowAcc; ++v) {
      const Gradient g(k0, r, v);
      if (!g.exists(a)) continue;
      float& to = partial[g.offset(a)];
      const float sum = tile_gradient<T>(a, at, g);
      to = has_rest ? to + sum : sum;
    }
  }
}

// Leaves this thread's sums of those rows in memory, with what add_tile() has left there.
template <int kOwn>
__device__ __forceinline__ void leave_sums(const WgmmaWgradArgs& a,
                                           const float (&sums)[kOwn][kRowAcc], int k0, int r0,
                                           int groups, bool has_rest, float* partial) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int v = 0; v < kRowAcc; ++v) {
      const Gradient g(k0, r0 + i * groups, v);
      if (!g.exists(a)) continue;
      float& to = partial[g.offset(a)];
      to = has_rest ? to + sums[i][v] : sums[i][v];
    }
  }
}

// All of the block: zeros, since products read what no copy writes.
__device__ __forceinline__ void clear_stages(const WgmmaWgradArgs& a, unsigned char* stages) {
  for (int i = threadIdx.x * 16; i < kPatchStages * a.stage_bytes; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(stages + i) = uint4{0, 0, 0, 0};
  }
  fence_async_proxy();
  __syncthreads();
}

// Where a filter row's pixels begin; of one that there is not, the last one's.
__device__ __forceinline__ int row_bytes_of(const WgmmaWgradArgs& a, int row) {
  int phase;
  const int down = a.by_stride_h.div(min(row, a.taps_h - 1), phase);
  return __shfl_sync(~0u, phase * a.phase_bytes + down * a.pitch * kChunk, 0);
}

template <typename T, int kChannels, int kOwn>
__global__ void __launch_bounds__(kWgradThreads, 1)
    narrow_wgmma_wgrad_kernel(const __grid_constant__ CUtensorMap even_map,
                              const __grid_constant__ CUtensorMap odd_map,
                              const __grid_constant__ WgmmaWgradArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* const stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ uint64_t full[kPatchStages], empty[kPatchStages];
  __shared__ int special[kPatchStages];

  const int k0 = blockIdx.y * kFilterRows, all_dy_bytes = a.copies * a.dy_bytes;
  begin_stages(full, empty, special, kProducers + 1, a.groups);
  clear_stages(a, stages);
  wait_for_earlier_kernels();

  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group >= a.groups) {
    const int own = threadIdx.x - a.groups * 128;
    for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
      const int stage = j % kPatchStages, turn = j / kPatchStages;
      unsigned char* const dy = stages + stage * a.stage_bytes;
      if (turn > 0) mbarrier_wait(&empty[stage], turn - 1 & 1);
      if (own == 0) {
        const Place at = place_of(a, tile);
        mbarrier_expect(&full[stage], a.copies * a.positions * kDyRowBytes);
        for (int copy = 0; copy < a.copies; ++copy) {
          halo::tma_load_5d(copy ? &odd_map : &even_map, &full[stage],
                            shared_address(dy + copy * a.dy_bytes), k0, 0, at.q / a.tile_columns,
                            at.p, at.image);
        }
      }
      if (stage_tile<T, T, 1, kChannels>(a, tile, own, dy + all_dy_bytes)) special[stage] = j + 1;
      fence_async_proxy();
      mbarrier_arrive(&full[stage]);
    }
    return;
  }

  const int thread = threadIdx.x % 128;
  float acc[kOwn][kRowAcc] = {};
  bool has_rest = false;  // tiles that CUDA cores have added up, in memory
  float* const partial = a.partial + blockIdx.x * a.weights;
  int row_bytes[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) row_bytes[i] = row_bytes_of(a, group + i * a.groups);

  for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
    const int stage = j % kPatchStages;
    unsigned char* const dy = stages + stage * a.stage_bytes;
    unsigned char* const patch = dy + all_dy_bytes;
    mbarrier_wait(&full[stage], j / kPatchStages & 1);
    if (special[stage] == j + 1) {
      add_tile<T>(a, tile, k0, group, a.groups, has_rest, partial);
      has_rest = true;
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) wgmma_touch(acc[i]);
      for (int copy = 0; copy < a.copies; ++copy) {
        uint64_t dy_desc = wgmma_descriptor<kDyRowBytes>(shared_address(dy + copy * a.dy_bytes));
        uint64_t x_desc =
            plain_descriptor(shared_address(patch + copy * a.copy_bytes), kChunk, 8 * kChunk);
        for (int position = 0; position < a.positions; position += kDepth) {
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            Wgmma<T, kTapElements>::template run<1, 1>(acc[i], dy_desc,
                                                       wgmma_advance(x_desc, row_bytes[i]), 1);
          }
          wgmma_commit();
          dy_desc = wgmma_advance(dy_desc, kDepth * kDyRowBytes);
          x_desc = wgmma_advance(x_desc, kDepth * kChunk);
        }
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) wgmma_touch(acc[i]);
    }
    named_barrier(1 + group, 128);
    if (thread == 0) mbarrier_arrive(&empty[stage]);
  }
  leave_sums(a, acc, k0, group, a.groups, has_rest, partial);
#endif
}

}  // namespace braze::cuda::narrow
