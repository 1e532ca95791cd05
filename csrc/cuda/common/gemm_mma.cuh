// C = A * B on the tensor cores with mma.sync (sm_80+): bf16 and fp16 with fp32 sums, fp32, rounded
// to TF32 or split into two parts of TF32, and fp64. Tiles of A and B stream through swizzled
// shared memory in a pipeline of cp.async stages; every warp multiplies 16 x 8 fragments that
// ldmatrix, or of fp64 single loads, bring to registers.
#pragma once

#include "gemm_load.cuh"
#include "gemm_problem.cuh"
#include "mma.cuh"
#include "split_fragment.cuh"

namespace braze::cuda {

// kGroups groups of warps, each with stages of its own, take turns at the tiles of the depth: where
// few blocks have much depth each, they wait for memory and for each other side by side.
template <int kM_, int kN_, int kWarpM_, int kWarpN_, int kStages_ = 3, int kGroups_ = 1>
struct MmaTile {
  static constexpr int kM = kM_, kN = kN_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kStages = kStages_, kGroups = kGroups_;
  static constexpr int kGroupThreads = (kM / kWarpM) * (kN / kWarpN) * 32;
  static constexpr int kThreads = kGroupThreads * kGroups;
  static_assert(kM % kWarpM == 0 && kN % kWarpN == 0 && kWarpM % 16 == 0 && kWarpN % 16 == 0);
};

enum class Load { kVectors, kEither };  // kEither: single elements unless the operand's `vectors`

// How an operand reaches shared memory, and fragments of it the registers.
template <typename Op, int kOuter, int kThreads, bool kDepthMajor, Load kLoad>
class MmaOperand {
  using T = typename Op::T;
  static constexpr int kVec = kVecWidth<T>;

 public:
  static constexpr int kDepth = 8 * kVec;  // 128 bytes
  using Layout = std::conditional_t<kDepthMajor, DepthMajorLayout<T, kOuter, kDepth>,
                                    OuterMajorLayout<T, kOuter, kDepth>>;
  using Table = OuterTable<Op, kOuter>;
  static constexpr int kSize = Layout::kSize * (Op::kMasked ? 2 : 1);  // of a stage, in elements
  // What a lane holds of 16 outer indices, and of how many of the depth's 8 chunks of 16 bytes.
  using Fragment = std::conditional_t<sizeof(T) == 8, double[8], uint32_t[4]>;
  static constexpr int kChunks = sizeof(T) == 8 ? 8 : 2;

  __device__ MmaOperand(const Op& op, const T* data, int outer0, const Table& table)
      : op_(op), vectors_(op, data, outer0, table), elements_(op, data, outer0, table) {}

  __device__ __forceinline__ void load(T* tile, int k0) const {
    if (kLoad == Load::kVectors || op_.vectors) {
      vectors_.load(tile, k0);
    } else {
      elements_.load(tile, k0);
    }
  }

  // Between the end of this thread's copies and the barrier.
  __device__ __forceinline__ void finish(T* tile) const {
    if constexpr (Op::kMasked) {
      if (op_.mask == 0) return;
      if (kLoad == Load::kVectors || op_.vectors) {
        vectors_.mask(tile);
      } else {
        elements_.mask(tile);
      }
    }
  }

  // The four 8 x 16-byte blocks at outer o and o + 8, chunks `chunk` and `chunk` + 1 of the depth.
  // kOuterFirst: in the order (o, chunk), (o + 8, chunk), (o, chunk + 1), (o + 8, chunk + 1), which
  // mma.sync wants of A; else the middle two change places: two fragments of B.
  // kRound: 32-bit elements to TF32.
  template <bool kOuterFirst, bool kRound>
  static __device__ __forceinline__ void fragments(uint32_t (&r)[4], const T* tile, int o,
                                                   int chunk) {
    const int lane = threadIdx.x % 32;
    const int block = lane / 8;
    const int outer_half = kOuterFirst ? block % 2 : block / 2;
    const int depth_half = kOuterFirst ? block / 2 : block % 2;
    if constexpr (kDepthMajor) {
      ldmatrix_x4(
          r, tile + Layout::offset(o + outer_half * 8 + lane % 8, (chunk + depth_half) * kVec));
    } else if constexpr (sizeof(T) == 2) {
      ldmatrix_x4_trans(
          r, tile + Layout::offset(o + outer_half * 8, (chunk + depth_half) * kVec + lane % 8));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int outer = o + (kOuterFirst ? i % 2 : i / 2) * 8 + lane / 4;
        const int depth = (chunk + (kOuterFirst ? i / 2 : i % 2)) * kVec + lane % 4;
        r[i] = __float_as_uint(tile[Layout::offset(outer, depth)]);
      }
    }
    if constexpr (sizeof(T) == 4 && kRound) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = round_tf32(r[i]);
    }
  }

  // The same of fp64: the eight blocks of 8 x 4 elements at outer o and o + 8.
  template <bool kOuterFirst, bool>
  static __device__ __forceinline__ void fragments(double (&r)[8], const T* tile, int o, int) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int outer = (kOuterFirst ? i % 2 : i / 4) * 8 + lane / 4;
      const int depth = (kOuterFirst ? i / 2 : i % 4) * 4 + lane % 4;
      // The swizzle begins anew every 16 outer indices.
      r[i] = tile[Layout::offset(o, 0) + Layout::offset(outer, depth)];
    }
  }

 private:
  const Op& op_;
  VectorLoader<Op, kOuter, kDepth, kThreads, Layout> vectors_;
  ElementLoader<Op, kOuter, kDepth, kDepthMajor, kThreads, Layout> elements_;
};

// kSplit: fp32 in two parts, at fp32's accuracy (but for denormals, whose last bits are lost).
template <typename Tile, bool kADepthMajor, bool kBDepthMajor, Load kLoadA, Load kLoadB,
          typename OpA, typename OpB, bool kSplit = false, typename Out = Output<typename OpA::T>>
struct MmaKernel {
  using T = typename OpA::T;
  using Problem = GemmProblem<OpA, OpB, Out>;
  using A = MmaOperand<OpA, Tile::kM, Tile::kGroupThreads, kADepthMajor, kLoadA>;
  using B = MmaOperand<OpB, Tile::kN, Tile::kGroupThreads, kBDepthMajor, kLoadB>;
  using Acc = acc_t<T>;
  using Fragment = typename A::Fragment;
  static_assert(!kSplit || sizeof(T) == 4);
  static_assert(Tile::kGroups == 1 || (!OpA::kGathered && !OpB::kGathered));
  static constexpr int kDepth = A::kDepth;
  static constexpr int kThreads = Tile::kThreads;
  // Kernels for small results order earlier ones, so that the next one may begin with its weights.
  static constexpr bool kOrders = Tile::kGroups > 1;
  static constexpr int kTileM = Tile::kM, kTileN = Tile::kN;
  static constexpr int kSizeA = A::kSize, kStageSize = kSizeA + B::kSize;
  static constexpr int kTables = A::Table::kBytes + B::Table::kBytes;
  // the stages and the tables, then the tile of C
  static constexpr int kSharedBytes =
      std::max(Tile::kGroups * Tile::kStages * kStageSize * static_cast<int>(sizeof(T)) + kTables,
               Problem::template shared_bytes<kTileM, kTileN, Tile::kGroups>());
  static constexpr int kFragmentsM = Tile::kWarpM / 16, kFragmentsN = Tile::kWarpN / 8;

  static __device__ __forceinline__ void run(const Problem& p) {
    // 128-byte rows keep the swizzle free of bank conflicts
    extern __shared__ __align__(128) unsigned char shared[];
    const GemmBlock block = p.template block<kTileM, kTileN>();
    constexpr int kStagesSize = Tile::kStages * kStageSize;
    const int group = threadIdx.x / Tile::kGroupThreads;
    T* const stages = reinterpret_cast<T*>(shared) + group * kStagesSize;
    unsigned char* const tables =
        shared + Tile::kGroups * kStagesSize * static_cast<int>(sizeof(T));
    const typename A::Table table_a(p.a, block.m0, tables);
    const typename B::Table table_b(p.b, block.n0, tables + A::Table::kBytes);
    if (kTables > 0) __syncthreads();
    const A a(p.a, p.a.data + block.batch * p.a.batch, block.m0, table_a);
    const B b(p.b, p.b.data + block.batch * p.b.batch, block.n0, table_b);

    const int warp = threadIdx.x % Tile::kGroupThreads / 32;
    const int warp_m = warp / (kTileN / Tile::kWarpN) * Tile::kWarpM;
    const int warp_n = warp % (kTileN / Tile::kWarpN) * Tile::kWarpN;
    Acc c[kFragmentsM][kFragmentsN][4] = {};

    int loaded_b = 0;  // tiles whose part of B has been asked for
    const auto depth_of = [&](int tile) {
      return (block.first_tile + tile * Tile::kGroups + group) * kDepth;
    };
    const auto load_b = [&](int stage, int tile) {
      b.load(stages + stage * kStageSize + kSizeA, depth_of(tile));
    };
    const auto load = [&](int stage, int tile) {
      a.load(stages + stage * kStageSize, depth_of(tile));
      if (!kOrders || tile >= loaded_b) load_b(stage, tile);
    };
    const auto compute = [&](int stage) {
      // Unrolled in full, the addresses of operands that are not depth-major spill up to 13
      // registers in the largest tile; half of it, without spills, was 5 to 15 % slower (H200).
      const T* const as = stages + stage * kStageSize;
      const T* const bs = as + kSizeA;
#pragma unroll(kSplit ? 1 : 4)
      for (int chunk = 0; chunk < 8; chunk += A::kChunks) {
        Fragment fa[kFragmentsM], fb[kFragmentsN / 2];
#pragma unroll
        for (int i = 0; i < kFragmentsM; ++i) {
          A::template fragments<true, !kSplit>(fa[i], as, warp_m + i * 16, chunk);
        }
#pragma unroll
        for (int j = 0; j < kFragmentsN / 2; ++j) {
          B::template fragments<false, !kSplit>(fb[j], bs, warp_n + j * 16, chunk);
        }
        multiply(c, fa, fb);
      }
    };
    const auto sync_group = [&] {
      if constexpr (Tile::kGroups == 1) {
        __syncthreads();
      } else if constexpr (Tile::kGroupThreads == 32) {
        __syncwarp();
      } else {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(Tile::kGroupThreads) : "memory");
      }
    };
    const auto arrived = [&](int stage) {
      a.finish(stages + stage * kStageSize);
      b.finish(stages + stage * kStageSize + kSizeA);
      sync_group();
    };
    if constexpr (Tile::kGroups == 1) {
      wait_for_earlier_kernels();
      pipeline<Tile::kStages>(block.tiles, load, compute, arrived);
    } else {
      const int tiles = (block.tiles - group + Tile::kGroups - 1) / Tile::kGroups;
      if (p.early_b) {
        loaded_b = min(tiles, Tile::kStages);
        for (int tile = 0; tile < loaded_b; ++tile) load_b(tile, tile);
      }
      order_earlier_kernels();
      short_pipeline<Tile::kStages>(tiles, load, compute, arrived);
      // As many barriers in every group: racecheck takes the next one for missing otherwise.
      if (tiles * Tile::kGroups < block.tiles) sync_group();
    }

    // A thread holds two neighbouring columns in each of two rows, 8 apart; trading with its
    // neighbour gives it four columns of one row.
    const int lane = threadIdx.x % 32;
    const bool odd = lane % 2;
    const int m = block.m0 + warp_m + lane / 4 + (odd ? 8 : 0);
    const int n = block.n0 + warp_n + lane % 4 / 2 * 4;
    p.template store_tile<kTileM, kTileN, kThreads, Tile::kGroups>(block, shared, [&](auto store) {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
          const Acc(&f)[4] = c[i][j];
          const Acc x = __shfl_xor_sync(0xffffffff, odd ? f[0] : f[2], 1);
          const Acc y = __shfl_xor_sync(0xffffffff, odd ? f[1] : f[3], 1);
          const Acc v[4] = {odd ? x : f[0], odd ? y : f[1], odd ? f[2] : x, odd ? f[3] : y};
          store(v, m + i * 16, n + j * 8);
        }
      }
    });
  }

 private:
  // Fragments of B come in pairs.
  static __device__ __forceinline__ void multiply(Acc (&c)[kFragmentsM][kFragmentsN][4],
                                                  const Fragment (&fa)[kFragmentsM],
                                                  const Fragment (&fb)[kFragmentsN / 2]) {
    const auto for_all = [&](auto product) {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) product(i, j);
      }
    };
    if constexpr (sizeof(T) == 8) {
      // The smallest of the depths that the instruction comes in is the fastest: what it reads is
      // free the soonest (H200, 4096 cubed: 51 TFLOP/s; 16 at a time: 49).
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        for_all([&](int i, int j) {
          mma_m16n8(c[i][j], fa[i][2 * d], fa[i][2 * d + 1], fb[j / 2][j % 2 * 4 + d]);
        });
      }
    } else if constexpr (!kSplit) {
      for_all([&](int i, int j) {
        const uint32_t pair[2] = {fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]};
        mma_m16n8<T>(c[i][j], fa[i], pair);
      });
    } else {
      SplitFragment<4> x[kFragmentsM];
      SplitFragment<2> y[kFragmentsN];
#pragma unroll
      for (int i = 0; i < 4 * kFragmentsM; ++i) x[i / 4].set(i % 4, fa[i / 4][i % 4]);
#pragma unroll
      for (int j = 0; j < 2 * kFragmentsN; ++j) y[j / 2].set(j % 2, fb[j / 4][j % 4]);
      for_all([&](int i, int j) { mma_split(c[i][j], x[i], y[j]); });
    }
  }
};

}  // namespace braze::cuda
