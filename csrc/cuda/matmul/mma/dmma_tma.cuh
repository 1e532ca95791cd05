// fp64 on Hopper's tensor cores, tiles by TMA.
//
// mma_sync (common/gemm_mma.cuh) has tiles of 128 x 64, two blocks on a multiprocessor, and
// multiplies four deep: at 8192 cubed 100 GB pass from L2 to the multiprocessors, every sum is read
// and written 2048 times, and power, not the tensor cores, sets the pace. Here a block has 128 x
// 128, a third less to fetch, and an instruction is eight deep, so that sums are touched half as
// often.
//
// An instruction wants of lane l, with g = l / 4 and q = l % 4, rows g and g + 8, or column g, at
// depths q and q + 4. Which rows of the tile these are is free, as long as stores know
// (dmma_outer): so chosen that 16 lanes find what they load in different banks of the 128-byte
// swizzle, and that the four columns of a thread's sums are neighbours.
#pragma once

#include "cuda/matmul/hopper/pipeline.cuh"
#include "cuda/common/gemm_problem.cuh"
#include "cuda/common/mma.cuh"

namespace braze::cuda::hopper {

struct DmmaTile {
  static constexpr int kM = 128, kN = 128, kWarpM = 64, kWarpN = 32, kStages = 6;
  static constexpr int kDepth = kSwizzle / static_cast<int>(sizeof(double));
  static constexpr int kWarps = (kM / kWarpM) * (kN / kWarpN), kThreads = 32 * kWarps;
  // What one copy brings: 16 rows or columns of a stage's depth.
  static constexpr int kBoxBytes = 16 * kSwizzle, kBoxes = (kM + kN) / 16;
  static constexpr int kRowBytes = kM * kSwizzle, kStageBytes = kBoxes * kBoxBytes;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes;
  // One warp of each scheduler asks for tiles: the tensor cores meanwhile have the other one.
  static constexpr int kIssuers = 4, kFetches = kBoxes / kIssuers;  // the latter of each
  static_assert(kWarps == 2 * kIssuers && kBoxes % kIssuers == 0);
};

using DmmaProblem = GemmProblem<MatrixOperand<double>, MatrixOperand<double>>;

// The outer index, of 16, that half `half` of lanes with l / 4 = g stands for.
template <bool kMnMajor>
__device__ __forceinline__ int dmma_outer(int g, int half) {
  return kMnMajor ? g / 2 % 2 * 8 + g / 4 * 4 + half * 2 + g % 2 : 2 * g + half;
}

// Element i of what a lane holds of 16 outer indices from `outer` on at depths 8 t to 8 t + 7: both
// halves of the one times both halves of the other; kOuterFirst: the former change first. In
// assembler, because loads and products written so stay in the order that they are written in.
template <bool kMnMajor, bool kOuterFirst>
__device__ __forceinline__ double load_fragment(uint32_t tile, int outer, int t, int i) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const int o = dmma_outer<kMnMajor>(g, kOuterFirst ? i % 2 : i / 2);
  const int depth = 8 * t + (kOuterFirst ? i / 2 : i % 2) * 4 + q;
  const int line = kMnMajor ? depth : o, along = kMnMajor ? o : depth;  // of 128 bytes
  double v;
  asm volatile(
      "ld.shared.f64 %0, [%1];"
      : "=d"(v)
      : "r"(tile + (outer + line) * kSwizzle + ((along / 2 ^ line % 8) << 4) + along % 2 * 8)
      : "memory");
  return v;
}

template <bool kAMnMajor, bool kBMnMajor>
__global__ void __launch_bounds__(DmmaTile::kThreads, 1)
    dmma_tma_kernel(const __grid_constant__ CUtensorMap a_map,
                    const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ DmmaProblem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  using Tile = DmmaTile;
  static_assert(DmmaProblem::shared_bytes<Tile::kM, Tile::kN>() <=
                Tile::kStages * Tile::kStageBytes);
  extern __shared__ unsigned char shared_bytes[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  // Swizzled rows are found by absolute address, whose pattern repeats every 1024 bytes.
  const uint32_t base = shared_address(shared_bytes);
  unsigned char* const stages = shared_bytes + ((1024 - base % 1024) % 1024);
  const GemmBlock block = p.template block<Tile::kM, Tile::kN>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::kStages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], Tile::kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();

  // Each issuer asks for a share of the tile: with many boxes one warp alone would fall behind.
  const auto await_room = [&](int tile) {
    const int stage = tile % Tile::kStages;
    mbarrier_wait(&empty[stage], (tile / Tile::kStages + 1) & 1);
    if (warp == 0) mbarrier_expect(&full[stage], Tile::kStageBytes);
  };
  const auto fetch = [&](int tile, int i) {
    const int stage = tile % Tile::kStages, depth = tile * Tile::kDepth;
    const int box = i * Tile::kIssuers + warp;
    const bool is_a = box < Tile::kM / 16;
    const int outer = is_a ? block.m0 + box * 16 : block.n0 + box * 16 - Tile::kM;
    const bool mn_major = is_a ? kAMnMajor : kBMnMajor;
    const bool batched = (is_a ? p.a.batch : p.b.batch) != 0;
    tma_load_4d(is_a ? &a_map : &b_map, &full[stage],
                shared_address(stages + stage * Tile::kStageBytes) + box * Tile::kBoxBytes,
                mn_major ? outer : depth, mn_major ? depth : outer,
                batched ? static_cast<int>(block.batch) : 0, 0);
  };
  const bool issues = lane == 0 && warp < Tile::kIssuers;
  if (issues) {
    for (int tile = 0; tile < min(Tile::kStages - 1, block.tiles); ++tile) {
      await_room(tile);
      for (int i = 0; i < Tile::kFetches; ++i) fetch(tile, i);
    }
  }
  __syncwarp();

  constexpr int kBlocksM = Tile::kWarpM / 16, kBlocksN = Tile::kWarpN / 16;
  const int warp_m = warp / (Tile::kN / Tile::kWarpN) * Tile::kWarpM;
  const int warp_n = warp % (Tile::kN / Tile::kWarpN) * Tile::kWarpN;
  double c[kBlocksM][2 * kBlocksN][4] = {};
  double a[2][kBlocksM][4], b[2][kBlocksN][4];
  // Loads of the eight depths that are next, in the order in which products want them.
  constexpr int kLoads = 4 * (kBlocksM + kBlocksN);
  const auto read = [&](int slot, uint32_t stage, int t, int index) {
    const int block = index / 4, i = index % 4;
    if (block < 2 * kBlocksN && block % 2 == 0) {
      b[slot][block / 2][i] =
          load_fragment<kBMnMajor, false>(stage + Tile::kRowBytes, warp_n + 16 * (block / 2), t, i);
    } else {
      const int m = block < 2 * kBlocksN ? block / 2 : block - kBlocksN;
      a[slot][m][i] = load_fragment<kAMnMajor, true>(stage, warp_m + 16 * m, t, i);
    }
  };

  const uint32_t first_stage = shared_address(stages);
  uint32_t now = first_stage;
  int stage = 0, parity = 0;  // of the tile that is multiplied, and of its barrier's phase
  mbarrier_wait(&full[0], 0);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) read(0, now, 0, i);
  for (int tile = 0; tile < block.tiles; ++tile) {
    // The stage of the tile before last: its readers are hardly ever awaited.
    const int ahead = tile + Tile::kStages - 2;
    const bool fetches = issues && tile > 0 && ahead < block.tiles;
    const int next_stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    const uint32_t next = first_stage + next_stage * Tile::kStageBytes;
    const int next_parity = parity ^ (next_stage == 0);
    // Everything else comes between products, a little at a time: the two warps of a scheduler tend
    // to run abreast, and what both did behind the last product the tensor cores would wait for.
    constexpr int kProducts = kBlocksM * 2 * kBlocksN;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        const int i = n / (2 * kBlocksN), j = n % (2 * kBlocksN);
        mma_m16n8k8(c[i][j], a[t][i], b[t][j / 2] + j % 2 * 2);
#pragma unroll
        for (int l = n * kLoads / kProducts; l < (n + 1) * kLoads / kProducts; ++l) {
          t == 0 ? read(1, now, 1, l) : read(0, next, 0, l);
        }
        if (t == 0 && n == 1 && fetches) await_room(ahead);
        if (t == 0 && n >= 3 && n % 2 && n / 2 <= Tile::kFetches && fetches)
          fetch(ahead, n / 2 - 1);
        // Behind the last tile what is read is not used.
        if (t == 0 && n == kProducts - 2 && tile + 1 < block.tiles) {
          mbarrier_wait(&full[next_stage], next_parity);
        }
        // All that this stage held has been multiplied, or is in registers.
        if (t == 1 && n == kProducts - 2 && lane == 0) mbarrier_arrive(&empty[stage]);
      }
    }
    stage = next_stage, parity = next_parity, now = next;
  }

  const int g = lane / 4, q = lane % 4;
  p.template store_tile<Tile::kM, Tile::kN, Tile::kThreads>(block, stages, [&](auto store) {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = block.m0 + warp_m + 16 * i + dmma_outer<kAMnMajor>(g, half);
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          const double *const x = c[i][2 * j] + 2 * half, *const y = c[i][2 * j + 1] + 2 * half;
          // Columns of the thread: of lanes g = 2 q and 2 q + 1, either half.
          const double v[4] = {x[0], kBMnMajor ? x[1] : y[0], kBMnMajor ? y[0] : x[1], y[1]};
          store(v, m, block.n0 + warp_n + 16 * j + dmma_outer<kBMnMajor>(2 * q, 0));
        }
      }
    }
  });
#endif
}

}  // namespace braze::cuda::hopper
