// Columns of TF32 whose depth is not the dimension that lies together in memory, such as either
// operand of a weight gradient: wgmma takes 32-bit columns K-major only. Warps that the producer
// leaves idle transpose them where TMA has put them, stage by stage, which saves the copy of the
// whole operand. A box of 32 columns by 32 depths is square, and the same swizzle describes it
// before and after; a warp has it in registers in between, 4 x 4 elements at a time.
//
// Of every 8 depths the even ones come first, in the order of load_fragment() for turned columns,
// whose reads are free of bank conflicts then; so are those and the writes here.
#pragma once

#include "pipeline.cuh"

namespace braze::cuda::hopper {

constexpr int kTurningWarps = 3;

// Makes the barriers that say that a stage's columns are turned; start_ring() publishes them.
template <typename Tile>
__device__ __forceinline__ void start_turning(uint64_t* turned) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) mbarrier_init(&turned[i], kTurningWarps);
  }
}

// Where a lane reads and writes in a box: its 4 x 4 elements, twice, are at addresses that differ
// by an exclusive or with constants.
struct Turn {
  uint32_t from, to;
};
__device__ __forceinline__ Turn turn_of_lane() {
  const int lane = threadIdx.x % 32, a = lane % 2, b = lane / 2 % 2, c = lane / 4 % 2;
  // In fours: which columns, and which depths. Eight lanes at a time meet eight different chunks of
  // 16 bytes, where they read as where they write.
  const int columns = c * 4 + a * 2 + b, depths = lane / 8 % 2 * 4 + (c ^ lane / 16) * 2 + a;
  const int depth = depths / 2 * 8 + a;  // the first; the others are 2 apart
  return {static_cast<uint32_t>(depth * kSwizzle + (columns ^ a) * 16),
          static_cast<uint32_t>(columns * 4 * kSwizzle + (depths ^ columns % 2 * 4) * 16)};
}

__device__ __forceinline__ void turn_box(uint32_t box, const Turn& turn) {
  constexpr uint32_t kDepthStep = 2 * kSwizzle + 32, kColumnStep = kSwizzle + 16;
  float v[2][4][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // the second one: depths with the last bit turned
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&u)[4] = v[half][i];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(u[0]), "=f"(u[1]), "=f"(u[2]), "=f"(u[3])
                   : "r"((box + turn.from) ^ (i * kDepthStep ^ half * (kSwizzle + 16)))
                   : "memory");
    }
  }
  __syncwarp();  // all have read what others will write
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"((box + turn.to) ^
                                                                    (i * kColumnStep ^ half * 16)),
                   "f"(v[half][0][i]), "f"(v[half][1][i]), "f"(v[half][2][i]), "f"(v[half][3][i])
                   : "memory");
    }
  }
}

// Transposes a stage's columns, of which the first `count` are the product's. Called by the warps
// 1 to kTurningWarps of a group, each of which has every third box.
template <typename Tile>
__device__ __forceinline__ void turn_columns(uint32_t columns, int count, const Turn& turn,
                                             uint64_t* turned) {
  constexpr int kBox = 32;
  const int boxes = min(Tile::kColumns, count + kBox - 1) / kBox;
#pragma unroll 1
  for (int i = threadIdx.x % 128 / 32 - 1; i < boxes; i += kTurningWarps) {
    turn_box(columns + i * kBox * kSwizzle, turn);
  }
  fence_async_proxy();  // the tensor cores are to see what was written
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(turned);
}

}  // namespace braze::cuda::hopper
