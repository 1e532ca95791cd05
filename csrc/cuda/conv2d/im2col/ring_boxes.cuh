// A tensor laid out as the result, of which each tile comes through the ring of stages, behind the
// operands of the tile: so it is under way while the tile before is finished.
#pragma once

#include "copies.cuh"

namespace braze::cuda::im2col {

// How a tile of it lies in the ring's stages: boxes of a tile's rows and kSwizzle bytes.
template <typename Tile>
struct RingBoxes {
  static constexpr int kBytes = Tile::kRows * hopper::kSwizzle;
  static constexpr int kWidth = hopper::kSwizzle / int{sizeof(typename Tile::T)};  // columns
  static constexpr int kBoxes = (Tile::kColumns + kWidth - 1) / kWidth;
  static constexpr int kEach = Tile::kStageBytes / kBytes;  // boxes of a stage
  static constexpr int kStages = (kBoxes + kEach - 1) / kEach;
  static constexpr int boxes(int stage) {
    return kBoxes - stage * kEach < kEach ? kBoxes - stage * kEach : kEach;
  }
};

// By the producer's thread. `row` and `column` are the tile's first.
template <typename Tile>
__device__ __forceinline__ void produce_boxes(const CUtensorMap* map, int row, int column,
                                              hopper::Cursor<Tile::kStages>& at, uint32_t stages,
                                              uint64_t* full, uint64_t* empty) {
  using P = RingBoxes<Tile>;
#pragma unroll 1
  for (int box = 0; box < P::kBoxes; at.next()) {
    mbarrier_wait(&empty[at.stage], at.phase ^ 1);
    const int end = min(box + P::kEach, P::kBoxes);
    mbarrier_expect(&full[at.stage], (end - box) * P::kBytes);
    uint32_t to = stages + at.stage * Tile::kStageBytes;
    for (; box < end; ++box, to += P::kBytes) {
      tma_load_4d(map, &full[at.stage], to, column + box * P::kWidth, row, 0, 0);
    }
  }
}

// Calls f(i, pair) with the values where acc[i] and acc[i + 1] of a consumer's thread lie, for all
// of a stage, the tile's kStage-th, in shared memory at `from`. i may lie behind the tile's
// columns.
template <typename Tile, int kStage, typename F>
__device__ __forceinline__ void for_each_pair(uint32_t from, const F& f) {
  using T = typename Tile::T;
  using P = RingBoxes<Tile>;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int box = 0; box < P::boxes(kStage); ++box) {
#pragma unroll
    for (int j = 0; j < P::kWidth / 8; ++j) {
      const int first = ((kStage * P::kEach + box) * P::kWidth / 8 + j) * 4;
      const int byte = (lane % 4 * 2 + j * 8) * int{sizeof(T)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + half * 8;
        const uint32_t at =
            from + box * P::kBytes + r * hopper::kSwizzle + ((byte / 16 ^ r % 8) << 4) + byte % 16;
        uint32_t words[sizeof(T) / 2];
        if constexpr (sizeof(T) == 2) {
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(at) : "memory");
        } else {
          asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                       : "=r"(words[0]), "=r"(words[1])
                       : "r"(at)
                       : "memory");
        }
        const auto& v = reinterpret_cast<const Vec<T, 2>&>(words);
        f(first + half * 2, float2{convert<float>(v.v[0]), convert<float>(v.v[1])});
      }
    }
  }
}

}  // namespace braze::cuda::im2col
