// The persistent kernel (ladder/13_persistent.cuh) with a tile to each of its two consumers, which
// take turns: while one stores its results, the other has the tensor cores. That hides what lies
// between a tile's last product and the next one's first, of which there is more the shorter the
// depth; a consumer has twice the sums in registers, so that tiles are at most 128 columns wide.
// (CUTLASS calls this ping-pong.)
#pragma once

#include "cuda/matmul/hopper/pipeline.cuh"
#include "cuda/matmul/ladder/13_persistent.cuh"

namespace braze::cuda::hopper {

template <typename T, int kRows_, int kColumns_, int kStages_, int kCluster_>
struct TurnTile : Tile<T, kRows_, kColumns_, kStages_, kCluster_> {
  static constexpr int kBlocks = kRows_ / 64;
  static constexpr int kReaders = 1;
  static constexpr bool kKept = false;
  __device__ static constexpr int first_row(int) { return 0; }
};

// named_barrier() without waiting for the others.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <typename Tile, int kRowMajor, int kColumnMajor, typename A>
__device__ __forceinline__ void consume_in_turns(const CUtensorMap* c_map, const A& a,
                                                 uint32_t stages, const Ring& ring) {
  using T = typename Tile::T;
  const int rank = Tile::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes + group * Tile::kStagingBytes;
  const bool direct = !Tile::kStaged || a.direct;
  Cursor<Tile::kStages> at;
  float acc[Tile::kBlocks][Tile::kColumns / 2];
  int tile = blockIdx.x / Tile::kCluster;
  const int stride = gridDim.x / Tile::kCluster;
  // A wait for a stage sees no more of its phase than the parity. So a consumer may not wait for
  // one before the other has found the stages before it to be full, and says so.
  constexpr int kTurn = 3, kBoth = 256;  // named barriers
  bool has_turn = group == 0;
  // Past the stages of a tile of the other consumer's.
  const auto leave_to_other = [&] {
    if (tile < a.tiles) {
      const Place p = place_of(a, tile);
      at.skip(p.last - p.first);
    }
    tile += stride;
  };
  if (group > 0) leave_to_other();
  while (tile < a.tiles) {
    const Place p = place_of(a, tile);
    if (!has_turn) named_barrier(kTurn + group, kBoth);
    has_turn = false;
    const int last = multiply_depths<Tile, kRowMajor, kColumnMajor>(
        a, acc, at, stages, ring, p.first, p.last, [&] {
          if (tile + stride < a.tiles) named_barrier_arrive(kTurn + 1 - group, kBoth);
        });
    if (last >= 0) release_stage<Tile>(ring.empty, last);
    const int tile_row = (p.row * Tile::kCluster + rank) * Tile::kRows;
    const int tile_column = p.column * Tile::kColumns;
    const int row = tile_row + thread / 32 * 16 + lane / 4, column = tile_column + lane % 4 * 2;
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
      if constexpr (A::kScattered) {
        if (p.first == p.last) {  // nothing is summed
#pragma unroll
          // Not a choice for each sum, which all tiles would pay for.
          for (float& sum : acc[b]) asm volatile("mov.b32 %0, 0;" : "=f"(sum));
        }
      }
      if (a.bias || a.relu) finish<T, false>(a, acc[b], row + b * 64, column);
      if constexpr (Tile::kStaged) {
        if (!direct) {
          Finished<Tile> finished;
          finished.take(acc[b], tile_row + b * 64, tile_column, p.batch);
          finished.template flush<false>(a, c_map, staging, group);
          continue;
        }
      }
      if constexpr (A::kScattered) {
        if constexpr (!Tile::kStaged) {
          scatter_direct<T>(a, p.batch, acc[b], row + b * 64, column);
        }
      } else {
        T* const c = static_cast<T*>(a.c) + p.batch * a.c_batch;
        store_direct<T, false>(c, a.c_ld, a.rows, a.columns, acc[b], row + b * 64, column);
      }
    }
    tile += stride;
    leave_to_other();
  }
  if constexpr (Tile::kStaged) {
    if (thread == 0) tma_store_wait_read<0>();
  }
}

template <typename Tile, int kRowMajor, int kColumnMajor, typename A>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    turns_kernel(const __grid_constant__ CUtensorMap row_map,
                 const __grid_constant__ CUtensorMap column_map,
                 const __grid_constant__ CUtensorMap c_map, const __grid_constant__ A a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  static_assert(Tile::kConsumers == 2 && !A::kTail && !A::kSums && !A::kFull);
  extern __shared__ unsigned char shared_bytes[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  // Swizzled rows are found by absolute address, whose pattern repeats every 1024 bytes.
  const uint32_t stages = (shared_address(shared_bytes) + 1023) & ~1023u;
  start_ring<Tile>(&row_map, &column_map, full, empty);
  if (threadIdx.x / 128 == Tile::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 128 == 0) {
      produce<Tile, kRowMajor, kColumnMajor>(&row_map, &column_map, a, stages, full, empty);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume_in_turns<Tile, kRowMajor, kColumnMajor>(&c_map, a, stages, {full, empty, nullptr});
  }
#endif
}

}  // namespace braze::cuda::hopper
