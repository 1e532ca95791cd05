// fprop with batch norm in evaluation mode, an addition and an activation on the way out.
//
// With short sums the way out decides. What is added comes through the ring, behind the operands of
// its tile, so that it is under way while the tile before is finished: loads from the epilogue
// would wait for memory several times a tile (1 x 1 filters of 64 channels, 2.5 times as long). And
// each cluster stays in one column of tiles, as with moments.cuh: to find the coefficients of other
// filters takes 4 us, half of the time of such tiles.
#pragma once

#include "copies.cuh"
#include "ring_boxes.cuh"
#include "cuda/conv2d/tail.cuh"

namespace braze::cuda::im2col {

// The same where a cluster splits a tile's depth, whose blocks have few results each.
struct SplitTailArgs : WindowArgs {
  static constexpr bool kTail = true;

  Tail tail;
  const void* added;  // laid out as the result, or nullptr

  // sum: of two neighbouring columns, an even one first, of `row` and of that 8 on.
  template <typename T>
  __device__ __forceinline__ void finish(float (&sum)[4], int row, int column) const {
    if (column >= columns) return;  // of which there is an even number
    const float2 first = tail.coefficients(column), second = tail.coefficients(column + 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float &a = sum[2 * half], &b = sum[2 * half + 1];
      a = fmaf(a, first.x, first.y), b = fmaf(b, second.x, second.y);
      const int r = row + half * 8;
      if (!added || r >= rows) continue;
      const auto* const from = static_cast<const T*>(added) + r * c_ld + column;
      const auto pair = *reinterpret_cast<const Vec<T, 2>*>(from);
      a += convert<float>(pair.v[0]), b += convert<float>(pair.v[1]);
    }
    tail.activate<T>(sum);
  }
};

struct TailArgs : ColumnArgs {
  static constexpr bool kTail = true;

  Tail tail;
  bool adds;
  CUtensorMap added;  // laid out as the result

  template <typename Tile>
  using Parts = RingBoxes<Tile>;

  // By the producer's thread. `row` and `column` are the tile's first.
  template <typename Tile>
  __device__ __forceinline__ void produce(int row, int column, hopper::Cursor<Tile::kStages>& at,
                                          uint32_t stages, uint64_t* full, uint64_t* empty) const {
    if (adds) produce_boxes<Tile>(&added, row, column, at, stages, full, empty);
  }

  // A lane's share of the coefficients of a tile's columns: of every 32 pairs, one.
  template <typename Tile>
  struct State {
    float4 pairs[Tile::kColumns / 64];
    int column = -1;  // the tile's first
  };

  template <typename Tile>
  __device__ __forceinline__ void begin(State<Tile>& state, int column) const {
    if (state.column == column) return;
    state.column = column;
    const int lane = threadIdx.x % 32, own = column + lane / 4 * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 64; ++i) {
      const int c = own + i * 64;
      const bool inside = c < columns;  // of which there is an even number
      const float2 first = tail.coefficients(inside ? c : 0);
      const float2 second = tail.coefficients(inside ? c + 1 : 0);
      state.pairs[i] = {first.x, first.y, second.x, second.y};
    }
  }

  // `room`: of the consumer, in shared memory, where the last tile's results may still be read.
  // Each warp has all of the coefficients; one of them lays them out for all.
  template <typename Tile, int kCount>
  __device__ __forceinline__ void scale(const State<Tile>& state, float (&acc)[kCount],
                                        uint32_t room, int group) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    if constexpr (Tile::kStaged) {
      if (thread == 0) tma_store_wait_read<0>();
    } else {
      __shared__ float4 own[Tile::kConsumers][Tile::kColumns / 2];
      room = shared_address(own[group]);
    }
    named_barrier(1 + group, 128);
    if (thread < 32) {
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 64; ++i) {
        const float4& v = state.pairs[i];
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(room + (i * 32 + lane) * 16),
                     "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                     : "memory");
      }
    }
    named_barrier(1 + group, 128);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {  // pairs, 8 columns apart
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                   : "r"(room + (j * 4 + lane % 4) * 16)
                   : "memory");
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        float &first = acc[j * 4 + half], &second = acc[j * 4 + half + 1];
        first = fmaf(first, v.x, v.y), second = fmaf(second, v.z, v.w);
      }
    }
  }

  // The boxes of a stage, in shared memory at `from`.
  template <typename Tile, int kPart, int kCount>
  __device__ __forceinline__ void add(float (&acc)[kCount], uint32_t from) const {
    for_each_pair<Tile, kPart>(from, [&](int i, float2 v) {
      if (i < kCount) acc[i] += v.x, acc[i + 1] += v.y;
    });
  }
};

}  // namespace braze::cuda::im2col
