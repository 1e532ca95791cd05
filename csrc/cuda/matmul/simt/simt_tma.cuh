// Rung 8 once more with Hopper's copy engine: fp32 on CUDA cores, tiles by TMA.
//
// One thread asks for a tile of both operands with two instructions; nobody computes addresses or
// predicates, which were a tenth of what gemm_simt.cuh executes. A thread's piece is 8 x 16, so
// that 24 values from shared memory serve 128 multiply-adds instead of 16 serving 64: a value that
// arrives costs the register file about as much as a multiply-add. Warps wait for copies and for
// each other by mbarriers only, and the first values of a tile are fetched during the last step of
// the one before. The order of the multiply-adds matters, too: back and forth along the rows, ptxas
// finds registers of which hardly any three share a bank (1 % of the multiply-adds; 5 % in other
// orders, for 4 % of the speed).
#pragma once

#include "cuda/common/gemm_problem.cuh"
#include "cuda/common/gemm_simt.cuh"
#include "cuda/common/tma.cuh"

namespace braze::cuda::hopper {

struct TmaTile {
  static constexpr int kM = 128, kN = 128, kDepth = 32, kStages = 3;
  static constexpr int kThreadM = 8, kThreadN = 16;
  static constexpr int kWarpM = 4 * kThreadM, kWarpN = 8 * kThreadN;
  static constexpr int kWarps = (kM / kWarpM) * (kN / kWarpN), kThreads = 32 * kWarps;
  static constexpr int kStageFloats = (kM + kN) * kDepth;
  static constexpr int kStageBytes = kStageFloats * static_cast<int>(sizeof(float));
  static constexpr int kBarrierBytes = 128;  // which keeps the stages aligned for TMA
};

using TmaProblem = GemmProblem<MatrixOperand<float>, MatrixOperand<float>>;

template <typename Tile>
constexpr int kTmaSharedBytes =
    Tile::kBarrierBytes +
    std::max(Tile::kStages * Tile::kStageBytes, TmaProblem::shared_bytes<Tile::kM, Tile::kN>());

// Both operands with their outer index innermost in memory. Two blocks on a multiprocessor cover
// each other's starts and ends.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    simt_tma_kernel(const __grid_constant__ CUtensorMap a_map,
                    const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ TmaProblem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  constexpr int kStages = Tile::kStages, kDepth = Tile::kDepth;
  extern __shared__ __align__(128) unsigned char shared[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + kStages;
  static_assert(2 * kStages * sizeof(uint64_t) <= Tile::kBarrierBytes);
  float* const stages = reinterpret_cast<float*>(shared + Tile::kBarrierBytes);
  const GemmBlock block = p.template block<Tile::kM, Tile::kN>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, Tile::kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();

  const auto load = [&](int tile) {
    const int stage = tile % kStages;
    float* const to = stages + stage * Tile::kStageFloats;
    mbarrier_wait(empty + stage, (tile / kStages + 1) & 1);
    mbarrier_expect(full + stage, Tile::kStageBytes);
    const int batch = static_cast<int>(block.batch);
    tma_load_4d(&a_map, full + stage, shared_address(to), block.m0, tile * kDepth,
                p.a.batch ? batch : 0, 0);
    tma_load_4d(&b_map, full + stage, shared_address(to + Tile::kM * kDepth), block.n0,
                tile * kDepth, p.b.batch ? batch : 0, 0);
  };
  if (threadIdx.x == 0) {
    for (int tile = 0; tile < min(kStages - 1, block.tiles); ++tile) load(tile);
  }

  // Each of a warp's 4 x 8 threads has pieces of 4 x 4, 16 rows and 32 columns apart.
  const int m_in_tile = warp / (Tile::kN / Tile::kWarpN) * Tile::kWarpM + lane / 8 * 4;
  const int n_in_tile = warp % (Tile::kN / Tile::kWarpN) * Tile::kWarpN + lane % 8 * 4;
  float a[2][Tile::kThreadM], b[2][Tile::kThreadN], c[Tile::kThreadM][Tile::kThreadN] = {};
  const auto fetch = [&](int slot, const float* stage, int k) {
    const float* const as = stage + k * Tile::kM + m_in_tile;
    const float* const bs = stage + Tile::kM * kDepth + k * Tile::kN + n_in_tile;
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i += 4) load4(a[slot] + i, as + i * 4);
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; j += 4) load4(b[slot] + j, bs + j * 8);
  };

  int stage = 0, parity = 0;  // of the tile that is multiplied, and of its barrier's phase
  mbarrier_wait(full, 0);
  fetch(0, stages, 0);
  for (int tile = 0; tile < block.tiles; ++tile) {
    // The stage of the tile before last: its readers are hardly ever awaited.
    const int next_load = tile + kStages - 2;
    if (threadIdx.x == 0 && tile > 0 && next_load < block.tiles) load(next_load);
    const float* const now = stages + stage * Tile::kStageFloats;
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
    const int next_parity = parity ^ (next_stage == 0);
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      if (k + 1 < kDepth) {
        fetch((k + 1) & 1, now, k + 1);
      } else if (tile + 1 < block.tiles) {
        mbarrier_wait(full + next_stage, next_parity);
        fetch(0, stages + next_stage * Tile::kStageFloats, 0);
      }
      // Keeps the loads of the next step ahead of this step's arithmetic: left alone, the compiler
      // puts some of them right before their use.
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; ++j) {
#pragma unroll
        for (int step = 0; step < Tile::kThreadM; ++step) {
          const int i = j % 2 ? Tile::kThreadM - 1 - step : step;
          c[i][j] += a[k & 1][i] * b[k & 1][j];
        }
      }
    }
    if (lane == 0) mbarrier_arrive(empty + stage);
    stage = next_stage, parity = next_parity;
  }

  p.template store_tile<Tile::kM, Tile::kN, Tile::kThreads>(block, stages, [&](auto store) {
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; ++i) {
      const int m = block.m0 + m_in_tile + i / 4 * 16 + i % 4;
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j += 4) {
        const float v[4] = {c[i][j], c[i][j + 1], c[i][j + 2], c[i][j + 3]};
        store(v, m, block.n0 + n_in_tile + j * 8);
      }
    }
  });
#endif
}

}  // namespace braze::cuda::hopper
