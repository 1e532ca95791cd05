// fprop with batch norm in evaluation mode, an addition and an activation on the way out.
//
// With short sums the way out decides. What is added comes through the ring, behind the operands of
// its tile, so that it is under way while the tile before is finished: loads from the epilogue
// would wait for memory several times a tile (1 x 1 filters of 64 channels, 2.5 times as long). And
// each cluster stays in one column of tiles, as with moments.cuh: to find the coefficients of other
// filters takes 4 us, half of the time of such tiles.
#pragma once

#include "copies.cuh"
#include "cuda/conv2d/tail.cuh"

namespace braze::cuda::im2col {

struct TailArgs : ColumnArgs {
  static constexpr bool kTail = true;

  Tail tail;
  bool adds;
  CUtensorMap added;  // laid out as the result: boxes of a tile's rows and kSwizzle bytes

  // How a tile of what is added lies in the ring's stages.
  template <typename Tile>
  struct Parts {
    static constexpr int kBoxBytes = Tile::kRows * hopper::kSwizzle;
    static constexpr int kWidth = hopper::kSwizzle / int{sizeof(typename Tile::T)};  // columns
    static constexpr int kBoxes = (Tile::kColumns + kWidth - 1) / kWidth;
    static constexpr int kEach = Tile::kStageBytes / kBoxBytes;  // boxes of a stage
    static constexpr int kStages = (kBoxes + kEach - 1) / kEach;
    static constexpr int boxes(int part) {
      return kBoxes - part * kEach < kEach ? kBoxes - part * kEach : kEach;
    }
  };

  // By the producer's thread. `row` and `column` are the tile's first.
  template <typename Tile>
  __device__ __forceinline__ void produce(int row, int column, hopper::Cursor<Tile::kStages>& at,
                                          uint32_t stages, uint64_t* full, uint64_t* empty) const {
    using P = Parts<Tile>;
    if (!adds) return;
#pragma unroll 1
    for (int box = 0; box < P::kBoxes; at.next()) {
      mbarrier_wait(&empty[at.stage], at.phase ^ 1);
      const int end = min(box + P::kEach, P::kBoxes);
      mbarrier_expect(&full[at.stage], (end - box) * P::kBoxBytes);
      uint32_t to = stages + at.stage * Tile::kStageBytes;
      for (; box < end; ++box, to += P::kBoxBytes) {
        tma_load_4d(&added, &full[at.stage], to, column + box * P::kWidth, row, 0, 0);
      }
    }
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
    using T = typename Tile::T;
    using P = Parts<Tile>;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int box = 0; box < P::boxes(kPart); ++box) {
#pragma unroll
      for (int j = 0; j < P::kWidth / 8; ++j) {
        const int first = ((kPart * P::kEach + box) * P::kWidth / 8 + j) * 4;
        if (first >= kCount) continue;
        const int byte = (lane % 4 * 2 + j * 8) * int{sizeof(T)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row + half * 8;
          const Vec<T, 2> v = load_pair<T>(from + box * P::kBoxBytes + r * hopper::kSwizzle +
                                           ((byte / 16 ^ r % 8) << 4) + byte % 16);
          acc[first + half * 2] += convert<float>(v.v[0]);
          acc[first + half * 2 + 1] += convert<float>(v.v[1]);
        }
      }
    }
  }

 private:
  template <typename T>
  static __device__ __forceinline__ Vec<T, 2> load_pair(uint32_t from) {
    uint32_t words[sizeof(T) / 2];
    if constexpr (sizeof(T) == 2) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(from) : "memory");
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1])
                   : "r"(from)
                   : "memory");
    }
    return reinterpret_cast<const Vec<T, 2>&>(words);
  }
};

}  // namespace braze::cuda::im2col
