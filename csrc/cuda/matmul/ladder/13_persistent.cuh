// Rung 13: wgmma fed by TMA, producer and consumers apart, blocks in clusters, one launch that
// walks all tiles of C.
//
// A block keeps a ring of stages in shared memory, each a 128-byte deep slice of a tile of A and of
// B. One warp, the producer, has TMA fill them; the consumers, warpgroups that own 64 or 128 rows
// of the tile each, multiply. Two barriers a stage (full, empty) are all they share. The blocks of
// a cluster work on tiles below each other: each loads a part of their common tile of B and sends
// it to all, so that L2 is read half as often.
//
// Blocks stay for all their tiles. The producer runs ahead into the next tile while the consumers
// store the last one, through shared memory and TMA. Tiles are taken in groups of rows, so that the
// blocks in flight read few rows and columns of A and B, which stay in L2.
#pragma once

#include "cuda/matmul/hopper/epilogue.cuh"
#include "cuda/matmul/hopper/pipeline.cuh"
#include "cuda/matmul/hopper/scatter.cuh"

namespace braze::cuda::hopper {

template <typename Tile, int kRowMajor, int kColumnMajor, typename A>
__device__ __forceinline__ void produce(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                        const A& a, uint32_t stages, uint64_t* full,
                                        uint64_t* empty) {
  constexpr int kCluster = Tile::kCluster;
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  Cursor<Tile::kStages> at;
  for (int tile = blockIdx.x / kCluster; tile < a.tiles; tile += gridDim.x / kCluster) {
    const Place p = place_of(a, tile);
    Copies<A, Tile, kRowMajor, kColumnMajor> copies(row_map, column_map, a, p, rank);
#pragma unroll 1
    for (int d = p.first; d < p.last; ++d, at.next()) {
      mbarrier_wait(&empty[at.stage], at.phase ^ 1);
      mbarrier_expect(&full[at.stage], copies.bytes());
      copies.copy(d, &full[at.stage], stages + at.stage * Tile::kStageBytes);
    }
    if constexpr (A::kTail || A::kSums) {
      a.template produce<Tile>((p.row * kCluster + rank) * Tile::kRows, p.column * Tile::kColumns,
                               at, stages, full, empty);
    }
  }
  drain_ring<Tile>(empty, at);
}

// 64 finished rows of 16-bit values that wait to be stored, kChunk columns at a time.
template <typename Tile>
struct Finished {
  static constexpr int kChunks = Tile::kChunks, kPairs = Tile::kChunk / 4;
  uint32_t pairs[kChunks][kPairs];  // of neighbouring columns
  int row, column, batch;           // of the first element in the product

  template <int kCount>
  __device__ __forceinline__ void take(const float (&acc)[kCount], int r, int c, int b) {
    using T = typename Tile::T;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const Vec<T, 2> pair{convert<T>(acc[2 * i]), convert<T>(acc[2 * i + 1])};
      pairs[i / kPairs][i % kPairs] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    row = r, column = c, batch = b;
  }

  // To shared memory, a warp's 16 rows.
  template <bool kSwap>
  __device__ __forceinline__ void stage(int chunk, uint32_t buffer) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Tile::kChunk / 16; ++i) {  // 16 columns
      const uint32_t* v = &pairs[chunk][i * 4];
      if constexpr (kSwap) {
        // Lane l addresses row l % 8 of matrix l / 8: columns become rows.
        const int row = i * 16 + lane / 16 * 8 + lane % 8, to = warp * 2 + lane / 8 % 2;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         buffer + row * kSwizzle + ((to ^ (row % 8)) << 4)),
                     "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
      } else {
        const int row = warp * 16 + lane % 16, to = i * 2 + lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         buffer + row * kSwizzle + ((to ^ (row % 8)) << 4)),
                     "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
      }
    }
  }

  // Through shared memory, one of its two buffers, and TMA.
  template <bool kSwap, typename A>
  __device__ __forceinline__ void store(const A& a, int chunk, const CUtensorMap* map,
                                        uint32_t staging, int group) const {
    const uint32_t buffer = staging + chunk % 2 * Tile::kChunkBytes;
    // The buffer's last copy is the last but one; with an odd number of chunks it may be the last.
    if (threadIdx.x % 128 == 0) tma_store_wait_read<kChunks % 2 == 0 ? 1 : 0>();
    named_barrier(1 + group, 128);
    stage<kSwap>(chunk, buffer);
    fence_async_proxy();
    named_barrier(1 + group, 128);
    if (threadIdx.x % 128 == 0) {
      const int c = column + chunk * Tile::kChunk;
      static_assert(kSwap || Tile::kChunk == 64);
      tma_store_4d(map, buffer, kSwap ? row : c, kSwap ? c : row, batch, 0);
      tma_store_commit();
    }
  }

  template <bool kSwap, typename A>
  __device__ __forceinline__ void flush(const A& a, const CUtensorMap* map, uint32_t staging,
                                        int group) const {
    if constexpr (A::kScattered) {
      static_assert(!kSwap && Tile::kChunk == 64);
      using T = typename Tile::T;
      const ScatteredRows<T> rows(a, batch, row);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint32_t buffer = staging + chunk % 2 * Tile::kChunkBytes;
        stage<kSwap>(chunk, buffer);
        __syncwarp();
        rows.store(buffer, column + chunk * Tile::kChunk, a.columns);
        __syncwarp();
      }
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) store<kSwap>(a, chunk, map, staging, group);
    }
  }
};

// A: Args or, for the full epilogue, FullArgs; or what other kernels make from Args.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A>
__device__ __forceinline__ void consume(const CUtensorMap* c_map, const A& a, uint32_t stages,
                                        uint64_t* full, uint64_t* empty) {
  using T = typename Tile::T;
  constexpr int kCluster = Tile::kCluster, kBlocks = Tile::kBlocks;
  constexpr bool kFragments = sizeof(T) == 4 && kRowMajor == 1;
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes + group * Tile::kStagingBytes;
  const int first_row = group * kBlocks * 64;  // of the tile
  Cursor<Tile::kStages> at;
  float acc[kBlocks][Tile::kColumns / 2];

  // A 16-bit tile is kept, packed, while the next one begins, if there are registers for both: each
  // of the next one's first steps stores a chunk of it.
  Finished<Tile> finished;

  // Code comes from memory as it is run, and quickest in order. So what a block with one tile runs
  // is rolled and together; what others run stands behind it.
  int tile = blockIdx.x / kCluster;
  Place p = place_of(a, tile);
  int d = p.first, before = -1;  // the latter: the stage whose products may still run
  [[maybe_unused]] typename A::template State<Tile> state;
  if constexpr (A::kSums) a.template find_coefficients<Tile>(p.column * Tile::kColumns);
  const auto begin = [&] {
    if constexpr (A::kTail) a.template begin<Tile>(state, p.column * Tile::kColumns);
    if constexpr (A::kSums) {
      const int tile_row = (p.row * kCluster + rank) * Tile::kRows + first_row;
      a.template begin<Tile>(state, tile_row + thread / 32 * 16 + lane / 4,
                             p.column * Tile::kColumns);
    }
  };
  begin();
  Steps<A> steps(a, p.first);
  [[maybe_unused]] uint32_t fragments[2][4][4];
  const auto step = [&](int depth, int chunk, auto& fragment) {
    mbarrier_wait(&full[at.stage], at.phase);
    multiply_stage<Tile, kRowMajor, kColumnMajor>(
        acc, fragment, stages + at.stage * Tile::kStageBytes, depth > p.first, steps.next());
    if constexpr (Tile::kKept) {
      if (chunk >= 0) finished.template store<kSwap>(a, chunk, c_map, staging, group);
    }
    wgmma_wait<1>();
    if (before >= 0) release_stage<Tile>(empty, before);
    before = at.stage;
    at.next();
  };
  while (true) {
    if constexpr (kFragments) {
#pragma unroll 1
      for (; d + 1 < p.last; d += 2) {
        step(d, -1, fragments[0]);
        step(d + 1, -1, fragments[1]);
      }
    }
#pragma unroll 1
    for (; d < p.last; ++d) step(d, -1, fragments[0]);
    wgmma_wait<0>();
    if (before >= 0) release_stage<Tile>(empty, before);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) wgmma_touch(acc[b]);

    const int tile_row = (p.row * kCluster + rank) * Tile::kRows + first_row;
    const int tile_column = p.column * Tile::kColumns;
    const int row = tile_row + thread / 32 * 16 + lane / 4, column = tile_column + lane % 4 * 2;
    if constexpr (A::kFull) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        finish_full<T, kSwap>(a, acc[b], row + b * 64, column);
        sum_tile<Tile::kColumns>(a, acc[b], tile_row + b * 64, tile_column, p.column);
      }
    } else if constexpr (A::kTail) {
      static_assert(kBlocks == 1);
      a.template scale<Tile>(state, acc[0], staging, group);
      const auto add = [&](auto part) {
        mbarrier_wait(&full[at.stage], at.phase);
        a.template add<Tile, part.value>(acc[0], stages + at.stage * Tile::kStageBytes);
        named_barrier(1 + group, 128);
        release_stage<Tile>(empty, at.stage);
        at.next();
      };
      if (a.adds) for_each_constant<A::template Parts<Tile>::kStages>(add);
      a.tail.template activate<T>(acc[0]);
    } else if constexpr (A::kSums) {
      static_assert(kBlocks == 1);
      a.template finish<Tile>(state, acc[0], [&](const auto& use) {
        mbarrier_wait(&full[at.stage], at.phase);
        use(stages + at.stage * Tile::kStageBytes);
        named_barrier(1 + group, 128);
        release_stage<Tile>(empty, at.stage);
        at.next();
      });
    } else if (a.bias || a.relu) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) finish<T, kSwap>(a, acc[b], row + b * 64, column);
    }
    tile += gridDim.x / kCluster;
    const bool last = tile >= a.tiles;
    const bool direct = !Tile::kStaged || a.direct;
    if constexpr (Tile::kStaged) {
      if (!direct) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          finished.take(acc[b], tile_row + b * 64, tile_column, p.batch);
          if (!Tile::kKept || last) finished.template flush<kSwap>(a, c_map, staging, group);
        }
      }
    }
    if constexpr ((A::kScattered || A::kSums) && !Tile::kStaged) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        scatter_direct<T>(a, p.batch, acc[b], row + b * 64, column);
      }
    } else if (direct) {
      T* const c = static_cast<T*>(a.c) + p.batch * a.c_batch;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        store_direct<T, kSwap>(c, a.c_ld, a.rows, a.columns, acc[b], row + b * 64, column);
      }
    }
    if (last) break;

    p = place_of(a, tile);
    d = p.first, before = -1;
    begin();
    if constexpr (A::kFull || A::kTail || A::kSums) {
      // Else ptxas takes what the epilogue wrote for an operand of the next products, which it then
      // has wait for each other (C7515).
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (float& sum : acc[b]) sum = 0;
      }
    }
    if constexpr (Tile::kKept) {
      if (direct) continue;
#pragma unroll
      for (int chunk = 0; chunk < Finished<Tile>::kChunks; ++chunk) {
        if (d < p.last) {
          step(d++, chunk, fragments[0]);
        } else {
          finished.template store<kSwap>(a, chunk, c_map, staging, group);
        }
      }
    }
  }
  if constexpr (A::kSums) a.template leave<Tile>(state, p.column * Tile::kColumns);
  if constexpr (Tile::kStaged) {
    if (thread == 0) tma_store_wait_read<0>();
  }
}

template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A = Args>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    persistent_kernel(const __grid_constant__ CUtensorMap row_map,
                      const __grid_constant__ CUtensorMap column_map,
                      const __grid_constant__ CUtensorMap c_map, const __grid_constant__ A a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  extern __shared__ unsigned char shared_bytes[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  // Swizzled rows are found by absolute address, whose pattern repeats every 1024 bytes.
  const uint32_t stages = (shared_address(shared_bytes) + 1023) & ~1023u;
  start_ring<Tile>(&row_map, &column_map, full, empty);
  // The producer's warpgroup is three idle warps and one thread: the consumers take its registers.
  if (threadIdx.x / 128 == Tile::kConsumers) {
    if constexpr (Tile::kConsumers == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 128 == 0) {
      produce<Tile, kRowMajor, kColumnMajor>(&row_map, &column_map, a, stages, full, empty);
    }
    __syncwarp();
  } else {
    if constexpr (Tile::kConsumers == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<Tile, kRowMajor, kColumnMajor, kSwap>(&c_map, a, stages, full, empty);
  }
#endif
}

}  // namespace braze::cuda::hopper
