// The weight gradient of narrow/wgmma.cuh's layers, in 16 bits, for strides of 1 and 2.
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
constexpr int kDepth = 16;        // positions of a product
constexpr int kDyRowBytes = 128;  // of a position's filters
constexpr int kMostGroups = 4;    // of a block's consumers
constexpr int kWgradThreads = kMostGroups * 128 + kProducers;

struct WgmmaWgradArgs : WgmmaArgs {
  float* partial;  // for each block the gradients, as they lie in memory
  int64_t weights;
  int groups;    // of consumers: group g has filter rows g, g + groups, ...
  int dy_bytes;  // of a copy in shared memory
};

// What a tile adds to one gradient, on CUDA cores: of filter row r, element e of its row.
template <typename T>
__device__ __noinline__ float tile_gradient(const WgmmaWgradArgs& a, const Place& at,
                                            const unsigned char* patch, const unsigned char* dy,
                                            int filter, int r, int e) {
  const int down = r / a.stride_h, phase = r - down * a.stride_h;
  const int chunk = e * int{sizeof(T)} / kChunk, byte = e * int{sizeof(T)} % kChunk;
  float sum = 0;
  for (int copy = 0; copy < a.copies; ++copy) {
    const unsigned char* const pixels =
        patch + copy * a.copy_bytes + phase * a.phase_bytes + (down * a.pitch + chunk) * kChunk;
    for (int p = 0; p < min(a.tile_rows, a.rows - at.p); ++p) {
      for (int q = copy; q < min(a.tile_columns, a.columns - at.q); q += a.copies) {
        const int position = p * a.pitch + q / a.copies, place = filter * int{sizeof(T)};
        const unsigned char* const g = dy + copy * a.dy_bytes + position * kDyRowBytes +
                                       ((place / 16 ^ position % 8) << 4) + place % 16;
        sum += convert<float>(*reinterpret_cast<const T*>(pixels + position * kChunk + byte)) *
               convert<float>(*reinterpret_cast<const T*>(g));
      }
    }
  }
  return sum;
}

template <typename T, int kChannels, int kOwn>
__global__ void __launch_bounds__(kWgradThreads, 1)
    narrow_wgmma_wgrad_kernel(const __grid_constant__ CUtensorMap even_map,
                              const __grid_constant__ CUtensorMap odd_map,
                              const __grid_constant__ WgmmaWgradArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  constexpr int kAcc = kTapElements / 2;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* const stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ uint64_t full[kPatchStages], empty[kPatchStages];
  __shared__ int special[kPatchStages];  // as in narrow_wgmma_fprop_kernel

  const int k0 = blockIdx.y * kFilterRows, all_dy_bytes = a.copies * a.dy_bytes;
  if (threadIdx.x < kPatchStages) {
    mbarrier_init(&full[threadIdx.x], kProducers + 1);
    mbarrier_init(&empty[threadIdx.x], a.groups);
    mbarrier_init_fence();
    special[threadIdx.x] = 0;
  }
  // What no copy writes, products read.
  for (int i = threadIdx.x * 16; i < kPatchStages * a.stage_bytes; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(stages + i) = uint4{0, 0, 0, 0};
  }
  fence_async_proxy();
  __syncthreads();
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
      if (stage_tile<T, kChannels>(a, tile, own, dy + all_dy_bytes)) special[stage] = j + 1;
      fence_async_proxy();
      mbarrier_arrive(&full[stage]);
    }
    return;
  }

  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int filter = thread / 32 * 16 + lane / 4;  // of the accumulators, and the one 8 on
  float acc[kOwn][kAcc] = {};
  bool has_rest = false;  // tiles that CUDA cores have added up, in memory
  float* const partial = a.partial + blockIdx.x * a.weights;
  // f(acc, gradient): where each of this thread's sums goes.
  const auto for_each_sum = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int r = group + i * a.groups;
#pragma unroll
      for (int v = 0; v < kAcc; ++v) {
        const int e = v / 4 * 8 + lane % 4 * 2 + v % 2, own = filter + v / 2 % 2 * 8;
        const int s = e / kPixelElements, c = e % kPixelElements, k = k0 + own;
        if (r >= a.taps_h || s >= a.taps_w || c >= kChannels || k >= a.filters) continue;
        f(acc[i][v], partial[k * a.w_k + r * a.w_r + s * a.w_s + c * a.w_c], own, r, e);
      }
    }
  };
  int row_bytes[kOwn];  // where a filter row's pixels begin; those that are none read the last one
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int r = min(group + i * a.groups, a.taps_h - 1);
    int phase;
    const int down = a.by_stride_h.div(r, phase);
    row_bytes[i] = __shfl_sync(~0u, phase * a.phase_bytes + down * a.pitch * kChunk, 0);
  }

  for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
    const int stage = j % kPatchStages;
    unsigned char* const dy = stages + stage * a.stage_bytes;
    unsigned char* const patch = dy + all_dy_bytes;
    mbarrier_wait(&full[stage], j / kPatchStages & 1);
    if (special[stage] == j + 1) {
      const Place at = place_of(a, tile);
      for_each_sum([&](float, float& rest, int own, int r, int e) {
        const float sum = tile_gradient<T>(a, at, patch, dy, own, r, e);
        rest = has_rest ? rest + sum : sum;
      });
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
  for_each_sum([&](float sum, float& to, int, int, int) { to = has_rest ? to + sum : sum; });
#endif
}

}  // namespace braze::cuda::narrow
