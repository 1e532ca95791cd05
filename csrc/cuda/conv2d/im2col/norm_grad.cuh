// dgrad of stride 1 whose input a batch norm made, which leaves on the way out what that batch
// norm's backward begins with: the gradient before its activation, in the place of the gradient
// itself, and the sums of it and of it times the normalised input's deviations. A pass that makes
// them reads two tensors, and writes one where there is a residual; here only what was normalised
// is read.
//
// As in tail.cuh, tensors that are read come through the ring, and each block stays in one column
// of tiles: a thread's sums stay in its registers until the block's last tile, and one set of sums
// of each channel is left by each of the blocks of a column.
#pragma once

#include "copies.cuh"
#include "cuda/matmul/hopper/epilogue.cuh"
#include "ring_boxes.cuh"
#include "launchers/common/activation.h"
#include "launchers/conv2d_norm_grad.h"

namespace braze::cuda::im2col {

struct NormGradArgs : ColumnArgs {
  static constexpr bool kSums = true;

  bool adds;                  // another gradient of the same tensor
  CUtensorMap added, before;  // laid out as the result; before: what was normalised
  // A byte for each 16 bytes of a row of the result, a bit of it for each element: whether the
  // activation lets the gradient through. nullptr: that follows from `before`.
  const uint8_t* mask;
  bool clamps;  // there is no mask, and the activation is not the identity
  float low, high;
  const float *mean, *scale, *shift;  // [columns]
  float2* sums;                       // [columns][sets]
  int sets;

  // Of a consumer's thread: of the columns of its accumulators, and the mask of their elements.
  template <typename Tile>
  struct State {
    static constexpr int kWidth = 16 / int{sizeof(typename Tile::T)};  // elements of a mask's byte
    static constexpr int kWords = Tile::kColumns / kWidth / 4;         // of a row's mask
    float sum[Tile::kColumns / 4] = {}, dot[Tile::kColumns / 4] = {};
    uint32_t open[2][kWords];
  };

  template <typename Tile>
  __device__ __forceinline__ void produce(int row, int column, hopper::Cursor<Tile::kStages>& at,
                                          uint32_t stages, uint64_t* full, uint64_t* empty) const {
    if (adds) produce_boxes<Tile>(&added, row, column, at, stages, full, empty);
    produce_boxes<Tile>(&before, row, column, at, stages, full, empty);
  }

  // Of the columns of a consumer's tiles, by pairs.
  template <typename Tile>
  struct Coefficients {
    float2 mean[Tile::kColumns / 2];
    float4 affine[Tile::kColumns / 2];  // scale, shift of the first column and of the second
  };
  template <typename Tile>
  static __device__ __forceinline__ Coefficients<Tile>& coefficients() {
    __shared__ Coefficients<Tile> of_consumer[Tile::kConsumers];
    return of_consumer[threadIdx.x / 128];
  }
  template <typename Tile>
  __device__ __forceinline__ void find_coefficients(int column) const {
    Coefficients<Tile>& found = coefficients<Tile>();
    for (int i = threadIdx.x % 128; i < Tile::kColumns / 2; i += 128) {
      const int c = column + 2 * i;
      const bool inside = c < columns;  // of which there is an even number
      found.mean[i] = inside ? float2{mean[c], mean[c + 1]} : float2{};
      found.affine[i] = inside ? float4{scale[c], shift[c], scale[c + 1], shift[c + 1]} : float4{};
    }
    named_barrier(1 + threadIdx.x / 128, 128);
  }

  // Before a tile's products: asks for its mask. `row` is the place of acc[0], `column` the tile's.
  template <typename Tile>
  __device__ __forceinline__ void begin(State<Tile>& state, int row, int column) const {
    using S = State<Tile>;
    if (!mask) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + half * 8;
      const uint8_t* const from = mask + (int64_t{r} * columns + column) / S::kWidth;
#pragma unroll
      for (int i = 0; i < S::kWords; i += 2) {
        const bool inside = r < rows && column + i * 4 * S::kWidth < columns;
        const uint2 v = inside ? *reinterpret_cast<const uint2*>(from + i * 4) : uint2{};
        state.open[half][i] = v.x, state.open[half][i + 1] = v.y;
      }
    }
  }

  // Makes the tile's results and adds them to the sums. next_stage(f): calls f(address) with the
  // ring's next stage, and releases it.
  template <typename Tile, int kCount, typename NextStage>
  __device__ __forceinline__ void finish(State<Tile>& state, float (&acc)[kCount],
                                         const NextStage& next_stage) const {
    using T = typename Tile::T;
    if (adds) {
      hopper::for_each_constant<RingBoxes<Tile>::kStages>([&](auto part) {
        next_stage([&](uint32_t from) {
          for_each_pair<Tile, part.value>(from, [&](int i, float2 v) {
            if (i < kCount) acc[i] += v.x, acc[i + 1] += v.y;
          });
        });
      });
    }
    // As it is stored.
#pragma unroll
    for (float& g : acc) g = convert<float>(convert<T>(g));
    if (mask) pass_mask<Tile>(state, acc);
    // One loop for each: a choice at each element would cost as much as its sums.
    if (!clamps) {
      add_up<Tile>(state, acc, next_stage, [](float g, float) { return g; });
    } else if (high == high) {
      add_up<Tile>(state, acc, next_stage,
                   [&](float g, float v) { return through_clamp(g, v, low, high); });
    } else {
      add_up<Tile>(state, acc, next_stage, [&](float g, float v) { return v <= low ? 0 : g; });
    }
  }

  // Behind the block's last tile: the sums of its two consumers, in a fixed order.
  template <typename Tile>
  __device__ __forceinline__ void leave(State<Tile>& state, int column) const {
    static_assert(Tile::kConsumers == 2);
    constexpr int kColumns = Tile::kColumns, kCount = kColumns / 4;
    __shared__ float2 totals[8][kColumns];  // by warp
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Eight lanes have the same columns; each goes on with some of them.
    int first = hopper::share_sums<16, kCount / 2>(state.sum);
    first += hopper::share_sums<8, kCount / 4>(state.sum);
    first += hopper::share_sums<4, kCount / 8>(state.sum);
    hopper::share_sums<16, kCount / 2>(state.dot);
    hopper::share_sums<8, kCount / 4>(state.dot);
    hopper::share_sums<4, kCount / 8>(state.dot);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const int c = first + i;
      totals[warp][c / 2 * 8 + lane % 4 * 2 + c % 2] = {state.sum[i], state.dot[i]};
    }
    const int set = static_cast<int>(blockIdx.x) / tile_columns.divisor();
    named_barrier(3, 256);
    for (int c = threadIdx.x; c < kColumns && column + c < columns; c += 256) {
      float2 all = totals[0][c];
#pragma unroll
      for (int w = 1; w < 8; ++w) all.x += totals[w][c].x, all.y += totals[w][c].y;
      sums[int64_t{column + c} * sets + set] = all;
    }
  }

 private:
  template <typename Tile, int kCount>
  static __device__ __forceinline__ void pass_mask(const State<Tile>& state, float (&acc)[kCount]) {
    using S = State<Tile>;
    // Of a row's bits those of the lane's columns come first.
    const int column = threadIdx.x % 4 * 2, shift = column / S::kWidth * 8 + column % S::kWidth;
    uint32_t open[2][S::kWords];
#pragma unroll
    for (int i = 0; i < 2 * S::kWords; ++i) {
      open[i % 2][i / 2] = state.open[i % 2][i / 2] >> shift;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int byte = i / 4 * 8 / S::kWidth;
      if (!(open[i / 2 % 2][byte / 4] >> (byte % 4 * 8 + i % 2) & 1)) acc[i] = 0;
    }
  }

  // passed(g, v): the gradient that goes on to before the activation, v.
  template <typename Tile, int kCount, typename NextStage, typename F>
  static __device__ __forceinline__ void add_up(State<Tile>& state, float (&acc)[kCount],
                                                const NextStage& next_stage, const F& passed) {
    const Coefficients<Tile>& known = coefficients<Tile>();
    const int lane = threadIdx.x % 4;
    hopper::for_each_constant<RingBoxes<Tile>::kStages>([&](auto part) {
      next_stage([&](uint32_t from) {
        for_each_pair<Tile, part.value>(from, [&](int i, float2 v) {
          if (i >= kCount) return;
          const int pair = i / 4 * 4 + lane, own = i / 4 * 2;
          const float2 center = known.mean[pair];
          const float4 k = known.affine[pair];
          v.x -= center.x, v.y -= center.y;
          acc[i] = passed(acc[i], v.x * k.x + k.y);
          acc[i + 1] = passed(acc[i + 1], v.y * k.z + k.w);
          state.sum[own] += acc[i], state.sum[own + 1] += acc[i + 1];
          state.dot[own] = fmaf(acc[i], v.x, state.dot[own]);
          state.dot[own + 1] = fmaf(acc[i + 1], v.y, state.dot[own + 1]);
        });
      });
    });
  }
};

// Stores 64 rows of a tile from registers. `row` and `column` are the place of acc[0].
template <typename T, int kCount>
__device__ __forceinline__ void scatter_direct(const NormGradArgs& a, int,
                                               const float (&acc)[kCount], int row, int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8;
    if (r >= a.rows) continue;
    T* const to = static_cast<T*>(a.c) + r * a.c_ld + column;
#pragma unroll
    for (int i = half * 2; i < kCount; i += 4) {
      if (column + i * 2 - half * 4 < a.columns) {
        *reinterpret_cast<float2*>(to + i / 4 * 8) = {acc[i], acc[i + 1]};
      }
    }
  }
}

}  // namespace braze::cuda::im2col
