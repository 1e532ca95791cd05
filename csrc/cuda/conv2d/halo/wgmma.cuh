// Convolution with stride 1 on Hopper's tensor cores, fprop and dgrad: an implicit GEMM that never
// gathers. Input channels last.
//
// A tile of input pixels, its rows `pitch` pixels apart and its halo included, is copied to shared
// memory once (TMA supplies the zero padding). Seen as one sequence of pixels, filter tap (r, s) is
// a shift by r * pitch + s, the same for every output, and a shared-memory descriptor may start at
// any pixel: so for each tap the tensor cores read the same copy from another row on. Each input
// element comes from global memory about once, and no address is computed per element. The zeros
// right of a row are those left of the next one, the zeros below an image those above the next.
//
// D (64 filters x kPixels pixels) += W_tap (64 x C) X_tap (C x kPixels). Filters are the rows of
// the accumulator, so that batch statistics are sums along a thread's own registers. The weights of
// all taps stay in shared memory. Positions that are padding are computed and not stored.
//
// fp32 at fp32 accuracy: both operands are split into three bf16 parts that add up to the value
// (8 + 8 + 8 bits of significand), and the six products of parts that matter are summed. A consumer
// splits its tile while the other one multiplies. Each tap's sum is added to an fp32 register of
// its own, so that the tensor cores' truncating additions stay few. Tiles with infinities or NaN,
// whose parts would not add up, are computed on CUDA cores.
#pragma once

#include "moments.cuh"
#include "multiply.cuh"
#include "parts.cuh"
#include "store.cuh"
#include "stripes.cuh"
#include "weights.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/conv2d/tail.cuh"

namespace braze::cuda::halo {

// A warp copies; three more are in registers that nobody else could have.
constexpr int threads(int consumers) { return consumers * 128 + 32 * (1 + kMomentWarps); }

// kInPieces: a stage holds some of a tile's channel blocks, not all.
template <typename T, int kPixels, int kChannelBlock, int kPlanes, bool kInPieces>
__global__ void __launch_bounds__(threads(consumers(kPixels, kPlanes)), 1)
    conv_kernel(const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap w_map,
                const __grid_constant__ CUtensorMap y_map, const __grid_constant__ Args a,
                const T* w, const T* bias, bool relu, const __grid_constant__ Tail tail,
                T* __restrict__ y, Moments* __restrict__ moments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  using Op = operand_t<T, kPlanes>;
  using L = Layout<Op, kChannelBlock, kPlanes>;
  using Raw = Layout<T, kChannelBlock>;     // as TMA writes it
  constexpr bool kStaged = sizeof(T) == 2;  // output through shared memory and TMA
  constexpr int kConsumers = consumers(kPixels, kPlanes), kThreads = threads(kConsumers);
  constexpr int kAcc = kPixels / 2;
  // Groups that multiply at the same time also end at the same time, and nobody multiplies then.
  constexpr bool kInTurns = kStaged;
  static_assert(kPixels % 16 == 0);  // results leave by 16 positions
  extern __shared__ unsigned char shared_bytes[];
  // Swizzled rows are found by absolute address, whose pattern repeats every 1024 bytes.
  unsigned char* shared = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ TileRing<kConsumers> ring;
  __shared__ uint64_t weights_full[kMaxWeightTiles];
  // Of a position's output in its tile, or -1.
  __shared__ alignas(8) int offsets[kConsumers][kPixels];
  __shared__ StagedTiles<kConsumers> staged;
  __shared__ uint64_t turns[kConsumers];  // of the groups at the tensor cores
  // Whether weights have infinities or NaN, or a consumer's tile; two in turn.
  __shared__ int special_weights, special_tile[kConsumers][2];

  const int blocks = L::blocks(a), plane_bytes = L::plane_bytes(a);
  const int stage_blocks = kInPieces ? a.stage_blocks : blocks;
  const int raw_plane_bytes = Raw::plane_bytes(a), stage_bytes = stage_blocks * raw_plane_bytes;
  const int weight_tile = L::weight_tile(a), steps = a.r * a.s * blocks;
  unsigned char* stages = shared + L::weight_bytes(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int k0 = blockIdx.y * kFilters;

  ring.init(a.stages);
  if (threadIdx.x == 0) {
    if (kStaged) staged.init();
    for (uint64_t& turn : turns) mbarrier_init(&turn, 1);
    mbarrier_init_fence();
    if (a.copy_weights) {
      for (int i = 0; i < steps; ++i) mbarrier_init(&weights_full[i], 1);
      mbarrier_init_fence();
      prefetch_tensor_map(&w_map);
    }
    prefetch_tensor_map(&x_map);
    if (kStaged) prefetch_tensor_map(&y_map);
  }
  const int loaded = a.load_rows * a.tile_images * a.pitch;
  unsigned char* operands = kPlanes == 1 ? stages : stages + a.stages * stage_bytes;
  const int operand_planes = kPlanes == 1 ? stage_blocks * a.stages : blocks * kConsumers * kPlanes;
  zero_behind<L::kRowBytes>(loaded, operands, operand_planes, plane_bytes, kThreads / 32);
  if (threadIdx.x == 0) special_weights = 0;
  if (threadIdx.x < 2 * kConsumers) special_tile[threadIdx.x / 2][threadIdx.x % 2] = 0;
  // From a shuffle the compiler learns that it is the same in all of a warp, as descriptors must
  // be.
  const int group = __shfl_sync(~0u, warp / 4, 0), thread = threadIdx.x % 128;
  // Which positions of a tile are outputs, and where they go.
  const auto set_offsets = [&](int rows_left, int images_left) {
    for (int i = thread; i < kPixels; i += 128) {
      offsets[group][i] = output_offset(a, i, rows_left, images_left);
    }
  };
  if (group < kConsumers) set_offsets(a.tile_rows, a.tile_images);
  fence_async_proxy();
  __syncthreads();
  if (!a.early_weights) wait_for_earlier_kernels();

  if (warp == kConsumers * 4) {
    if (lane != 0) return;
    const auto copy_weights = [&] {
      int i = 0;
      for (int r = 0; r < a.r; ++r) {
        for (int s = 0; s < a.s; ++s) {
          for (int block = 0; block < blocks; ++block, ++i) {
            mbarrier_expect(&weights_full[i], weight_tile);
            tma_load_4d(&w_map, &weights_full[i], shared_address(shared + i * weight_tile),
                        block * kChannelBlock, s, r, k0);
          }
        }
      }
    };
    if (a.early_weights) {
      if (a.copy_weights) copy_weights();
      wait_for_earlier_kernels();
    }
    if constexpr (!kInPieces) {
      for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
        uint64_t* const full = ring.begin(j, a);
        mbarrier_expect(full, blocks * loaded * Raw::kRowBytes);
        copy_tile<kChannelBlock>(&x_map, full, stages + a.stage_of(j) * stage_bytes, a, tile,
                                 blocks, raw_plane_bytes);
        if (j == 0 && a.copy_weights && !a.early_weights) copy_weights();
      }
      return;
    }
    // Every group's tile by its first channels, then by the next ones.
    const int tiles = (a.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;  // of this block
    for (int first = 0; first < tiles; first += kConsumers) {
      const int present = min(kConsumers, tiles - first);
      for (int piece = 0; piece < a.pieces; ++piece) {
        const int first_block = piece * stage_blocks;
        for (int g = 0; g < present; ++g) {
          const int j = first * a.pieces + piece * kConsumers + g;
          uint64_t* const full = ring.begin(j, a, first * a.pieces, present);
          mbarrier_expect(full, stage_blocks * loaded * Raw::kRowBytes);
          copy_tile<kChannelBlock>(&x_map, full, stages + a.stage_of(j) * stage_bytes, a,
                                   blockIdx.x + (first + g) * gridDim.x, stage_blocks,
                                   raw_plane_bytes, first_block);
          if (j == 0 && a.copy_weights && !a.early_weights) copy_weights();
        }
      }
    }
    return;
  }

  unsigned char* out =
      stages + a.stages * stage_bytes + (kPlanes == 1 ? 0 : kConsumers * L::stage_bytes(a));
  if (warp > kConsumers * 4) {
    if constexpr (kStaged) {
      if (moments) {
        sum_up_staged<T, kPixels>(staged, a, out, offsets, k0, reinterpret_cast<float2*>(shared),
                                  moments);
      }
    }
    return;
  }

  if (!a.copy_weights) {
    if (load_weights<T, kChannelBlock, kPlanes, kConsumers * 128>(a, w, k0, shared))
      special_weights = 1;
    fence_async_proxy();
    named_barrier(1, kConsumers * 128);
  }
  if (a.early_weights) wait_for_earlier_kernels();

  // Consumers: the warpgroups take turns, so that one's epilogue hides behind the others' MMAs.
  out += group * (kStaged ? kPixels * 128 : 4 * kTurnBytes);
  const int row = (warp % 4) * 16 + lane / 4;  // of the accumulator: this filter and the one 8 on
  float bias_values[2] = {};
  if (bias) {
    for (int i = 0; i < 2; ++i) {
      if (k0 + row + 8 * i < a.k) bias_values[i] = convert<float>(bias[k0 + row + 8 * i]);
    }
  }
  float scale_values[2] = {1, 1};
  if (tail.mean) {
    for (int i = 0; i < 2; ++i) {
      if (k0 + row + 8 * i >= a.k) continue;
      const float2 of = tail.coefficients(k0 + row + 8 * i);
      scale_values[i] = of.x, bias_values[i] = of.y;
    }
  }
  int rows_left_before = a.tile_rows, images_left_before = a.tile_images;
  RowMoments<kPixels> row_moments;  // fp32's
  float acc[kAcc];

  for (int j = group, tile = blockIdx.x + group * gridDim.x, turn = 0; tile < a.tiles;
       j += kConsumers, tile += kConsumers * gridDim.x, turn ^= 1) {
    const bool is_first = j == group;
    const TilePlace place = place_of(a, tile);
    if (place.rows_left != rows_left_before || place.images_left != images_left_before) {
      rows_left_before = place.rows_left, images_left_before = place.images_left;
      named_barrier(2 + group, 128);  // nobody reads the old offsets
      if (kStaged && moments && !is_first) mbarrier_wait(&staged.read[group], turn ^ 1);
      set_offsets(place.rows_left, place.images_left);
      named_barrier(2 + group, 128);
    }

    wgmma_touch(acc);
    const uint64_t w_desc = wgmma_descriptor<L::kRowBytes>(shared_address(shared));
    for (int piece = 0;;) {
      const int stage = a.stage_of(j);
      ring.wait(j, a);
      unsigned char* tile_operands = stages + stage * stage_bytes;
      if constexpr (kPlanes > 1) {
        tile_operands = operands + group * L::stage_bytes(a);
        split_tile<kPlanes, L::kRowBytes>(
            ring, j, a, stages + stage * stage_bytes, tile_operands,
            {blocks, loaded, raw_plane_bytes, raw_plane_bytes, plane_bytes}, 2 + group,
            special_tile[group], turn);
      }
      const uint64_t x_desc = wgmma_descriptor<L::kRowBytes>(shared_address(tile_operands));
      if (kPlanes > 1 && (special_weights || special_tile[group][turn])) {
#pragma unroll
        for (int i = 0; i < kAcc; ++i) {
          acc[i] = plain_sum(a, shared, weight_tile, tile_operands, plane_bytes, blocks,
                             i / 4 * 8 + lane % 4 * 2 + i % 2, row + i / 2 % 2 * 8);
        }
      } else {
        const auto wait_for_weights = [&](int first, int count, int stride) {
          if (!a.copy_weights || !is_first) return;
          for (int i = 0; i < count; ++i) mbarrier_wait(&weights_full[first + i * stride], 0);
        };
        const StageBlocks of{piece * stage_blocks, stage_blocks, blocks};
        if (kInTurns && (group > 0 || !is_first)) {
          mbarrier_wait(&turns[group], group > 0 ? turn : turn ^ 1);
        }
        if ((kInTurns || kConsumers > 2) && a.s == 3) {
          multiply_columns<Op, L, kPixels, 3>(acc, a, w_desc, x_desc, weight_tile, plane_bytes, of,
                                              wait_for_weights);
        } else {
          multiply_taps<Op, L, kPixels, kPlanes>(acc, a, w_desc, x_desc, weight_tile, plane_bytes,
                                                 of, [&](int i) { wait_for_weights(i, 1, 0); });
        }
      }
      if (kInTurns && thread == 0) mbarrier_arrive(&turns[(group + 1) % kConsumers]);
      wgmma_wait<0>();
      if (!kInPieces || ++piece == a.pieces) break;
      named_barrier(2 + group, 128);  // all have read this piece
      if (thread == 0) ring.release(j, a);
      j += kConsumers;
    }
    wgmma_touch(acc);
    if (kStaged && thread == 0) {
      tma_store_wait_read<0>();
      if (moments && !is_first) mbarrier_wait(&staged.read[group], turn ^ 1);
    }
    named_barrier(2 + group, 128);  // all have read this tile, and `out` is free
    if (kPlanes == 1 && thread == 0) ring.release(j, a);

    if (bias) {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) acc[i] += bias_values[i / 2 % 2];
    }
    if (relu) {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) acc[i] = acc[i] < 0 ? 0.0f : acc[i];  // NaN stays NaN
    }
    if (tail.mean) {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) {
        const int own = i / 2 % 2;
        acc[i] = bounded(fmaf(acc[i], scale_values[own], bias_values[own]), tail.low, tail.high);
      }
    }
    if constexpr (kStaged) {
      stage_results<T, kPixels>(acc, out);
      fence_async_proxy();
      named_barrier(2 + group, 128);
      if (thread == 0) {
        if (moments) mbarrier_arrive(&staged.full[group]);
        tma_store_5d(&y_map, shared_address(out), k0, 0, place.stripe, place.first_row,
                     place.image);
        tma_store_commit();
      }
    } else {
      if (moments) row_moments.add(acc, offsets[group], is_first);
      T* to = y + first_output(a, place);
      if (a.wide_stores) {
        store_wide<kPixels>(acc, a.k, offsets[group], k0, out, to);
      } else {
        store_single<kPixels>(acc, a, offsets[group], k0 + row, to);
      }
    }
  }
  if (!kStaged && moments) {
    row_moments.merge([&](int filter, const Moments& merged) {
      if (k0 + filter >= a.k) return;
      moments[(int64_t{k0 + filter} * gridDim.x + blockIdx.x) * kConsumers + group] = merged;
    });
  }
  if (kStaged && thread == 0) tma_store_wait_read<0>();
#endif
}

}  // namespace braze::cuda::halo
