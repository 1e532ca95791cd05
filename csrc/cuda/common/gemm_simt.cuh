// C = A * B on the CUDA cores, in fp32 or fp64. Every block owns a tile of C; tiles of A and B
// stream through shared memory in a pipeline of cp.async stages; every thread keeps a kThreadM x
// kThreadN piece of C in registers, so that one element read from shared memory serves 4 to 8
// multiply-adds.
#pragma once

#include "gemm_load.cuh"
#include "gemm_problem.cuh"

namespace braze::cuda {

// kGroups groups of threads share out the depth of every tile, where C alone occupies too few.
template <int kM_, int kN_, int kThreadM_, int kThreadN_, int kStages_ = 3, int kGroups_ = 1>
struct SimtTile {
  static constexpr int kM = kM_, kN = kN_, kThreadM = kThreadM_, kThreadN = kThreadN_;
  static constexpr int kDepth = 16, kStages = kStages_, kGroups = kGroups_;
  static constexpr int kGroupThreads = (kM / kThreadM) * (kN / kThreadN);
  static constexpr int kThreads = kGroupThreads * kGroups;
  // A warp's 4 x 8 threads take pieces of 4 x 4 that lie side by side, so that its 16-byte reads of
  // shared memory are free of bank conflicts.
  static constexpr int kWarpM = 4 * kThreadM, kWarpN = 8 * kThreadN;
  static_assert(kM % kWarpM == 0 && kN % kWarpN == 0 && kThreadM % 4 == 0 && kThreadN % 4 == 0);
};

template <typename T>
__device__ __forceinline__ void load4(T* to, const T* shared) {
  constexpr int kWidth = kVecWidth<T> < 4 ? kVecWidth<T> : 4;
#pragma unroll
  for (int i = 0; i < 4; i += kWidth) {
    const auto v = *reinterpret_cast<const Vec<T, kWidth>*>(shared + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[i + j] = v.v[j];
  }
}

template <typename Tile, bool kADepthFast, bool kBDepthFast, typename OpA, typename OpB,
          typename Out = Output<typename OpA::T>>
struct SimtKernel {
  using T = typename OpA::T;
  using Problem = GemmProblem<OpA, OpB, Out>;
  using LayoutA = PaddedLayout<T, Tile::kM, Tile::kDepth>;
  using LayoutB = PaddedLayout<T, Tile::kN, Tile::kDepth>;
  using TableA = OuterTable<OpA, Tile::kM>;
  using TableB = OuterTable<OpB, Tile::kN>;
  using LoaderA = ElementLoader<OpA, Tile::kM, Tile::kDepth, kADepthFast, Tile::kThreads, LayoutA>;
  using LoaderB = ElementLoader<OpB, Tile::kN, Tile::kDepth, kBDepthFast, Tile::kThreads, LayoutB>;
  static constexpr int kDepth = Tile::kDepth;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr bool kOrders = false;
  static constexpr int kTileM = Tile::kM, kTileN = Tile::kN;
  static constexpr int kStageSize = LayoutA::kSize + LayoutB::kSize;
  // the stages and the tables, then the tile of C
  static constexpr int kSharedBytes = std::max(
      Tile::kStages * kStageSize * static_cast<int>(sizeof(T)) + TableA::kBytes + TableB::kBytes,
      Problem::template shared_bytes<kTileM, kTileN, Tile::kGroups>());

  static __device__ __forceinline__ void run(const Problem& p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const GemmBlock block = p.template block<kTileM, kTileN>();
    const TableA table_a(p.a, block.m0, shared);
    const TableB table_b(p.b, block.n0, shared + TableA::kBytes);
    T* const stages = reinterpret_cast<T*>(shared + TableA::kBytes + TableB::kBytes);
    __syncthreads();
    const LoaderA loader_a(p.a, p.a.data + block.batch * p.a.batch, block.m0, table_a);
    const LoaderB loader_b(p.b, p.b.data + block.batch * p.b.batch, block.n0, table_b);

    constexpr int kGroupDepth = kDepth / Tile::kGroups;
    const int group = threadIdx.x / Tile::kGroupThreads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % Tile::kGroupThreads / 32;
    const int m_in_tile = warp / (kTileN / Tile::kWarpN) * Tile::kWarpM + lane / 8 * 4;
    const int n_in_tile = warp % (kTileN / Tile::kWarpN) * Tile::kWarpN + lane % 8 * 4;
    T c[Tile::kThreadM][Tile::kThreadN] = {};

    wait_for_earlier_kernels();
    pipeline<Tile::kStages>(
        block.tiles,
        [&](int stage, int tile) {
          const int k0 = (block.first_tile + tile) * kDepth;
          loader_a.load(stages + stage * kStageSize, k0);
          loader_b.load(stages + stage * kStageSize + LayoutA::kSize, k0);
        },
        [&](int stage) {
          const T* const tile = stages + stage * kStageSize;
          const T* const as = tile + LayoutA::offset(m_in_tile, group * kGroupDepth);
          const T* const bs =
              tile + LayoutA::kSize + LayoutB::offset(n_in_tile, group * kGroupDepth);
#pragma unroll
          for (int k = 0; k < kGroupDepth; ++k) {
            T a[Tile::kThreadM], b[Tile::kThreadN];
#pragma unroll
            for (int i = 0; i < Tile::kThreadM; i += 4) {
              load4(a + i, as + LayoutA::offset(i * 4, k));
            }
#pragma unroll
            for (int j = 0; j < Tile::kThreadN; j += 4) {
              load4(b + j, bs + LayoutB::offset(j * 8, k));
            }
#pragma unroll
            for (int i = 0; i < Tile::kThreadM; ++i) {
#pragma unroll
              for (int j = 0; j < Tile::kThreadN; ++j) c[i][j] += a[i] * b[j];
            }
          }
        },
        [](int) { __syncthreads(); });

    p.template store_tile<kTileM, kTileN, kThreads, Tile::kGroups>(block, shared, [&](auto store) {
#pragma unroll
      for (int i = 0; i < Tile::kThreadM; ++i) {
        const int m = block.m0 + m_in_tile + i / 4 * 16 + i % 4;
#pragma unroll
        for (int j = 0; j < Tile::kThreadN; j += 4) {
          const T v[4] = {c[i][j], c[i][j + 1], c[i][j + 2], c[i][j + 3]};
          store(v, m, block.n0 + n_in_tile + j * 8);
        }
      }
    });
  }
};

}  // namespace braze::cuda
