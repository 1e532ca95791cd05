// Rung 15: products with few tiles. The blocks of a cluster share a tile of C and split its depth;
// their sums meet through distributed shared memory, in a fixed order, and each block stores a
// share of the columns. Against splits whose parts go through global memory that saves a second
// kernel, the workspace and a round trip to L2. Sums are counted on their arrival by a barrier in
// the block that they are for: one of the cluster would wait for all that was written before, which
// takes 1500 cycles. For products whose blocks all run at once.
#pragma once

#include "cuda/matmul/hopper/epilogue.cuh"
#include "cuda/matmul/hopper/pipeline.cuh"

namespace braze::cuda::hopper {

// To `address` in block `rank` of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send(uint32_t address, uint64_t* barrier, uint32_t rank,
                                     const float* v) {
  asm volatile(
      "{.reg .b32 to, counted;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 counted, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, "
      "[counted];}" ::"r"(address),
      "r"(shared_address(barrier)), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}
// In the thread's own block, for itself.
__device__ __forceinline__ void keep(uint32_t address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// T: the operands' type (float stands for TF32). Tile::kCluster is 1: nothing is multicast.
// Clusters are of 2, 4 or 8 blocks.
template <typename T, int kRows, int kColumns, int kStages>
struct SmallTile : Tile<T, kRows, kColumns, kStages, 1, kRows / 64> {
  static constexpr int kConsumers = kRows / 64, kThreads = kConsumers * 128 + 32;
  static constexpr int kSharedBytes = 1024 + kStages * (kRows + kColumns) * kSwizzle;
  static_assert(kRows * kColumns * 4 <= kSharedBytes - 1024);  // the sums go there
  static_assert(kColumns / 8 % 8 == 0);                        // in equal shares
};

template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A = Args>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    cluster_split_kernel(const __grid_constant__ CUtensorMap row_map,
                         const __grid_constant__ CUtensorMap column_map,
                         const __grid_constant__ A a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  using T = typename Tile::T;
  constexpr int kCount = Tile::kColumns / 2, kConsumerThreads = Tile::kConsumers * 128;
  extern __shared__ unsigned char shared_bytes[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  // With the full epilogue: of each warp's rows, for the block's share of the columns.
  constexpr int kShare = A::kFull ? Tile::kColumns / 2 : 1;
  [[maybe_unused]] __shared__ float column_sums[A::kFull ? kConsumerThreads / 32 : 1][kShare];
  const uint32_t stages = (shared_address(shared_bytes) + 1023) & ~1023u;
  static_assert(Tile::kCluster == 1);  // blocks of a cluster share sums, not stages
  __shared__ uint64_t arrived;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 1);
    const uint32_t share = Tile::kRows * Tile::kColumns * sizeof(float) >> a.cluster_bits;
    mbarrier_expect(&arrived, share * ((1u << a.cluster_bits) - 1));  // from all others
  }
  start_ring<Tile>(&row_map, &column_map, full, empty);

  const int cluster = 1 << a.cluster_bits, rank = static_cast<int>(cluster_rank());
  Place p = place_of(a, blockIdx.x >> a.cluster_bits);
  p.first = a.depth_tiles * rank >> a.cluster_bits;
  p.last = a.depth_tiles * (rank + 1) >> a.cluster_bits;
  const int thread = threadIdx.x, lane = thread % 32;
  Cursor<Tile::kStages> at;
  float acc[1][kCount];
  if (thread / 128 == Tile::kConsumers) {
    if (lane == 0) {
      Copies<A, Tile, kRowMajor, kColumnMajor> copies(&row_map, &column_map, a, p, 0);
#pragma unroll 1
      for (int d = p.first; d < p.last; ++d, at.next()) {
        mbarrier_wait(&empty[at.stage], at.phase ^ 1);
        mbarrier_expect(&full[at.stage], copies.bytes());
        copies.copy(d, &full[at.stage], stages + at.stage * Tile::kStageBytes);
      }
    }
    __syncwarp();
  } else {
    multiply_depths<Tile, kRowMajor, kColumnMajor>(a, acc, at, stages, {full, empty, nullptr},
                                                   p.first, p.last);
  }
  // A block's share is `chunks` times 8 columns. Every block sends each share to its owner, to
  // where the stages were, once all have read theirs.
  constexpr int kChunks = kCount / 4;
  const int chunks = kChunks >> a.cluster_bits;
  const auto place = [&](int block, int chunk) {
    return stages + ((block * chunks + chunk) * kConsumerThreads + thread) * 16;
  };
  cluster_meet();
  if (thread < kConsumerThreads) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int owner = i * cluster / kChunks;
      const uint32_t to = place(rank, i - owner * chunks);
      owner == rank ? keep(to, &acc[0][4 * i]) : send(to, &arrived, owner, &acc[0][4 * i]);
    }
  }
  if (thread >= kConsumerThreads) return;
  mbarrier_wait(&arrived, 0);
  const int row = p.row * Tile::kRows + thread / 32 * 16 + lane / 4;
  const int column = p.column * Tile::kColumns + rank * chunks * 8 + lane % 4 * 2;
  T* const c = static_cast<T*>(a.c) + p.batch * a.c_batch;
  [[maybe_unused]] float row_sums[2] = {};
  for (int i = 0; i < chunks; ++i) {
    float sum[4] = {};
    for (int block = 0; block < cluster; ++block) {
      const float4 v = load_shared(place(block, i));
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
    if constexpr (A::kFull) {
      finish_full<T, kSwap>(a, sum, row, column + i * 8);
      row_sums[0] += sum[0] + sum[1], row_sums[1] += sum[2] + sum[3];
      if (a.column_parts) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          float both = sum[v] + sum[v + 2];
#pragma unroll
          for (int lanes = 16; lanes >= 4; lanes /= 2) {
            both += __shfl_xor_sync(0xffffffff, both, lanes);
          }
          if (lane < 4) column_sums[thread / 32][i * 8 + lane * 2 + v] = both;
        }
      }
    } else if constexpr (A::kTail) {
      a.template finish<T>(sum, row, column + i * 8);
    } else {
      finish<T, kSwap>(a, sum, row, column + i * 8);
    }
    store_direct<T, kSwap>(c, a.c_ld, a.rows, a.columns, sum, row, column + i * 8);
  }
  if constexpr (A::kFull) {
    if (a.row_parts) store_row_part(a, row_sums, row, p.column * cluster + rank);
    if (a.column_parts) {
      store_column_part<kShare>(a, &column_sums[thread / 128 * 4],
                                p.row * Tile::kRows + thread / 128 * 64,
                                p.column * Tile::kColumns + rank * chunks * 8, chunks * 8);
    }
  }
#endif
}

}  // namespace braze::cuda::hopper
