// The parts of halo/wgrad.cu's kernels: how a tile lies in shared memory, the copies that bring it,
// the split of fp32, the products. Sums leave by store_partial (wgrad_sum.cuh).
#pragma once

#include <cuda_bf16.h>

#include "parts.cuh"
#include "stripes.cuh"
#include "wgrad_sum.cuh"
#include "cuda/common/wgmma.cuh"

namespace braze::cuda::halo {
namespace {

constexpr int kMaxFilterRows = 3;
constexpr int kMaxThreads = kMaxFilterRows * 128 + 32;  // a warpgroup a row; one warp more loads
constexpr int kMaxPixels = 256;                         // positions of a tile
constexpr int kDepth = 16;                              // positions that one wgmma sums over
constexpr int kDyRowBytes = 128;                        // of a plane of dy, as loaded and in parts
constexpr int kPartChannels = 32;                       // of a block, where x is split
constexpr int kPartRowBytes = kPartChannels * int{sizeof(__nv_bfloat16)};
static_assert(kFilters * sizeof(__nv_bfloat16) == kDyRowBytes);
static_assert(kPartChannels * sizeof(float) == 128);  // of x as loaded: as wide as copies go

// Bytes of a plane: a row for each position, in dy of filters, in x of a block of channels.
struct Planes {
  int dy, x;
};

// A tile in shared memory: planes of dy, behind them planes of x.
template <int kDyPlanes, int kXPlanes>
struct TileLayout {
  static constexpr int kDy = kDyPlanes;
  __host__ __device__ static constexpr int x_offset(Planes p) { return kDyPlanes * p.dy; }
  __host__ __device__ static constexpr int bytes(Planes p) {
    return kDyPlanes * p.dy + kXPlanes * p.x;
  }
};
// As TMA writes it to a stage: rows of swizzled copies have at most 128 bytes, so that the filters
// of fp32 are two planes.
template <typename T>
using LoadedTile = TileLayout<kFilters* int{sizeof(T)} / kDyRowBytes, 1>;
static_assert(LoadedTile<__nv_bfloat16>::kDy == 1 && LoadedTile<float>::kDy == 2);
// As fp32 is split into operands.
template <int kParts>
using SplitTile = TileLayout<kParts, kParts>;

struct WgradPlan {
  Args args;
  int stage_bytes;
  Planes loaded;    // of a stage
  Planes operands;  // 16 bits: the same; fp32: of each part
  int steps;        // of kDepth positions, for each tile
  int row_bytes;    // of x as loaded: a block of channels
  int shared_bytes;
  dim3 grid;
};

// The first filter and the first channel of a block.
struct BlockPlace {
  int k0, c0;
};
template <int kChannelBlock>
__device__ __forceinline__ BlockPlace place_of_block(const Args& a) {
  const int channel_blocks = (a.c + kChannelBlock - 1) / kChannelBlock;
  const int k0 = blockIdx.y / channel_blocks * kFilters;
  const int c0 = blockIdx.y % channel_blocks * kChannelBlock;
  return {k0, c0};
}

// Positions of a tile that are copied.
struct Positions {
  int dy, x;
};
__host__ __device__ __forceinline__ Positions copied_positions(const Args& a) {
  const int dy_rows = a.tile_images > 1 ? a.image_rows * a.tile_images : a.tile_rows;
  return {dy_rows * a.pitch, a.load_rows * a.tile_images * a.pitch};
}

// All threads of a block: zeros for what no copy and no split writes, but products read.
__device__ __forceinline__ void zero_fill(unsigned char* to, int bytes) {
  for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(to + i) = uint4{0, 0, 0, 0};
  }
}

// One thread has the block's tile j, which is number `tile` of all, copied to its stage.
template <typename T, int kChannelBlock>
__device__ __forceinline__ void produce_tile(TileRing<1>& ring, int j, int tile,
                                             const CUtensorMap* x_map, const CUtensorMap* dy_map,
                                             unsigned char* stages, const WgradPlan& plan,
                                             Positions copied, BlockPlace place) {
  using L = LoadedTile<T>;
  constexpr int kXRowBytes = kChannelBlock * int{sizeof(T)};
  const Args& a = plan.args;
  const int stage = a.stage_of(j);
  uint64_t* const full = ring.begin(j, a);
  mbarrier_expect(full, copied.dy * (L::kDy * kDyRowBytes) + copied.x * kXRowBytes);
  const TilePlace from = place_of(a, tile);
  const uint32_t to = shared_address(stages + stage * plan.stage_bytes);
#pragma unroll
  for (int plane = 0; plane < L::kDy; ++plane) {
    tma_load_5d(dy_map, full, to + plane * plan.loaded.dy,
                place.k0 + plane * (kDyRowBytes / int{sizeof(T)}), 0, from.stripe, from.first_row,
                from.image);
  }
  tma_load_4d(x_map, full, to + L::x_offset(plan.loaded), place.c0, from.stripe * a.q - a.pad_l,
              from.first_row - a.pad_t, from.image);
}

// acc += dY X_tap^T over kDepth positions, number `step` of those that the descriptors begin with,
// in 16 bits, for the taps of a filter row.
template <typename T, int kChannelBlock>
__device__ __forceinline__ void multiply_step(float (&acc)[kTapColumns * kChannelBlock / 2],
                                              uint64_t dy_desc, uint64_t x_desc, int step) {
  constexpr int kXRowBytes = kChannelBlock * int{sizeof(T)};
  Wgmma<T, kTapColumns * kChannelBlock>::template run<1, 1>(
      acc, wgmma_advance(dy_desc, step * kDepth * kDyRowBytes),
      wgmma_advance(x_desc, step * kDepth * kXRowBytes), 1);
}

// The same over the positions of a stage, of filter row r.
template <typename T, int kChannelBlock>
__device__ __forceinline__ void multiply_stage(float (&acc)[kTapColumns * kChannelBlock / 2],
                                               const unsigned char* stage, const WgradPlan& plan,
                                               int r) {
  constexpr int kXRowBytes = kChannelBlock * int{sizeof(T)};
  const uint32_t dy = shared_address(stage), x = dy + LoadedTile<T>::x_offset(plan.loaded);
  const uint64_t dy_desc = wgmma_descriptor<kDyRowBytes>(dy);
  const uint64_t x_desc =
      wgmma_descriptor<kXRowBytes>(x + r * plan.args.pitch * kXRowBytes, kXRowBytes);
  wgmma_touch(acc);
  for (int step = 0; step < plan.steps; ++step) {
    wgmma_fence();
    multiply_step<T, kChannelBlock>(acc, dy_desc, x_desc, step);
    wgmma_commit();
  }
  wgmma_wait<0>();
  wgmma_touch(acc);
}

// `threads` threads split a stage of fp32 into a tile's operands. Returns whether this one met an
// infinity or NaN.
template <int kParts>
__device__ __forceinline__ bool split_stage(const unsigned char* stage, unsigned char* operands,
                                            const WgradPlan& plan, Positions copied, int threads) {
  const bool dy_special = split_rows<kParts, kDyRowBytes>(
      stage, plan.loaded.dy, operands, plan.operands.dy, copied.dy, threadIdx.x, threads);
  const bool x_special =
      split_rows<kParts, kPartRowBytes>(stage + LoadedTile<float>::x_offset(plan.loaded), 0,
                                        operands + SplitTile<kParts>::x_offset(plan.operands),
                                        plan.operands.x, copied.x, threadIdx.x, threads);
  return dy_special || x_special;
}

// sum = dY X_tap^T for the taps of filter row r, over a tile in parts. Returns before the products
// are done: wgmma_wait and wgmma_touch have to follow.
template <int kParts>
__device__ __forceinline__ void multiply_parts(float (&sum)[kTapColumns * kPartChannels / 2],
                                               const unsigned char* operands, const WgradPlan& plan,
                                               int r) {
  using Pairs = PartPairs<kParts>;
  const unsigned char* x = operands + SplitTile<kParts>::x_offset(plan.operands);
  const uint64_t dy_desc = wgmma_descriptor<kDyRowBytes>(shared_address(operands));
  const uint64_t x_desc = wgmma_descriptor<kPartRowBytes>(
      shared_address(x) + r * plan.args.pitch * kPartRowBytes, kPartRowBytes);
  wgmma_touch(sum);
  wgmma_fence();
  for (int step = 0; step < plan.steps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Pairs::kCount; ++pair) {
      const int dy_part = Pairs::first(pair) * plan.operands.dy;
      const int x_part = Pairs::second(pair) * plan.operands.x;
      Wgmma<__nv_bfloat16, kTapColumns * kPartChannels>::template run<1, 1>(
          sum, wgmma_advance(dy_desc, dy_part + step * kDepth * kDyRowBytes),
          wgmma_advance(x_desc, x_part + step * kDepth * kPartRowBytes), step + pair > 0);
    }
  }
  wgmma_commit();
}

// One sum of a tile on CUDA cores, from the parts in shared memory. Only true outputs count: beside
// them lie zeros of dy, which must not meet an infinity.
template <int kParts>
__device__ __noinline__ float plain_wgrad(const Args& a, const unsigned char* dy, int dy_bytes,
                                          const unsigned char* x, int x_bytes, int rows_left,
                                          int images_left, int shift, int filter, int c) {
  float sum = 0;
  for (int row = 0; row < a.image_rows * a.tile_images; ++row) {
    const int image = row / a.image_rows, p = row - image * a.image_rows;
    if (image >= images_left) break;
    if (p >= rows_left) {
      if (a.tile_images == 1) break;
      continue;
    }
    for (int column = 0; column < a.q; ++column) {
      const int position = row * a.pitch + column;
      sum += unsplit<kParts, kDyRowBytes>(dy, dy_bytes, position, filter) *
             unsplit<kParts, kPartRowBytes>(x, x_bytes, position + shift, c);
    }
  }
  return sum;
}

// What multiply_parts computes, on CUDA cores: for a tile with infinities or NaN.
template <int kParts>
__device__ __forceinline__ void sum_plainly(float (&sum)[kTapColumns * kPartChannels / 2],
                                            const unsigned char* operands, const WgradPlan& plan,
                                            int tile, int r) {
  const Args& a = plan.args;
  const unsigned char* x = operands + SplitTile<kParts>::x_offset(plan.operands);
  const int filter = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const TilePlace from = place_of(a, tile);
#pragma unroll
  for (int i = 0; i < kTapColumns * kPartChannels / 2; ++i) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    sum[i] = plain_wgrad<kParts>(a, operands, plan.operands.dy, x, plan.operands.x, from.rows_left,
                                 from.images_left, r * a.pitch + column / kPartChannels,
                                 filter + i / 2 % 2 * 8, column % kPartChannels);
  }
}

}  // namespace
}  // namespace braze::cuda::halo
