// Rung 14: fp32 at fp32's accuracy on the tensor cores.
//
// Every value is the sum of three bf16 parts (8 + 8 + 8 bits of significand), written once to three
// planes in workspace; bf16 has fp32's exponents, so nothing has to be scaled. Of the nine products
// of parts the six that reach fp32's last bit are summed, smallest first: six bf16 products, at
// twice TF32's rate each, and exact. The tensor cores truncate when they add, so that long sums
// would drift: a stage's sum starts from zero and is added to an fp32 register of its own, rounded
// to nearest. Tiles with an infinity or NaN, whose parts would not add up, go to CUDA cores.
// Method: splitting after Ootomo and Yokota (arXiv 2203.03341), who use fp16 or TF32 parts.
#pragma once

#include "cuda/matmul/hopper/pipeline.cuh"
#include "cuda/matmul/hopper/scatter.cuh"
#include "cuda/conv2d/halo/split.cuh"

namespace braze::cuda::hopper {

constexpr int kSplitDepth = 64;  // of a stage

// Tiles of parts: in kPlanes planes of T. Of narrow ones more columns may be loaded, as rows of
// MN-major operands are 64 columns wide.
template <typename T_, int kPlanes_, int kStages_, int kCluster_, int kColumns_ = 128,
          int kLoadedColumns_ = kColumns_>
struct PartTile {
  using T = T_;
  static constexpr int kPlanes = kPlanes_, kStages = kStages_, kCluster = kCluster_;
  static constexpr bool kScaled = std::is_same_v<T, __half>;  // fp16 has few exponents
  static constexpr int kRows = 128, kColumns = kColumns_, kLoadedColumns = kLoadedColumns_;
  static constexpr int kConsumers = 2, kReaders = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kDepth = kSplitDepth;
  static constexpr int kShare = kLoadedColumns / kCluster;  // that a block loads, for all
  static constexpr int kRowPlane = kRows * kSwizzle, kColumnPlane = kLoadedColumns * kSwizzle;
  static constexpr int kRowBytes = kPlanes * kRowPlane;
  static constexpr int kStageBytes = kRowBytes + kPlanes * kColumnPlane;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes;
};

template <int kCluster>
using SplitTile = PartTile<__nv_bfloat16, 3, 2, kCluster>;

// The matrices before they were split, and which blocks of 128 rows or columns hold infinities or
// NaN (by batch, if the operand has one). What 17_scaled_fp16.cuh scaled them by: the bits of the
// largest magnitudes, with their strides; nullptr of other parts.
struct SplitOperand {
  const float* data;
  int64_t batch, outer, depth;  // strides
  const int* special;
  int blocks;
  const uint32_t* largest;
  int64_t largest_batch, largest_outer;
};
struct SplitArgs : Args {
  SplitOperand row, column;
  int depth, batch;
  int splits;  // in how many parts the depth is summed
  FastDiv by_splits;
  float* partial;  // [split][batch][row][column] if what follows adds up the parts, or nullptr
};

template <typename Tile>
__device__ __forceinline__ bool is_special(const SplitArgs& a, const Place& p) {
  const int batch = a.column_batch ? p.batch : 0;
  bool special = a.column.special[batch * a.column.blocks + p.column * Tile::kColumns / 128] != 0;
  const int* const rows = a.row.special + (a.row_batch ? p.batch : 0) * a.row.blocks;
  for (int i = p.row * Tile::kCluster; i < (p.row + 1) * Tile::kCluster; ++i) {
    special |= i < a.row.blocks && rows[i] != 0;
  }
  return special;
}

// One element of the product on CUDA cores, over stages [first, last).
static __device__ __noinline__ float plain_sum(const SplitArgs& a, int batch, int row, int column,
                                               int first, int last) {
  if (row >= a.rows || column >= a.columns) return 0;
  const float* x = a.row.data + batch * a.row.batch + row * a.row.outer;
  const float* y = a.column.data + batch * a.column.batch + column * a.column.outer;
  float sum = 0;
  for (int d = first * kSplitDepth; d < min(last * kSplitDepth, a.depth); ++d) {
    sum += x[d * a.row.depth] * y[d * a.column.depth];
  }
  return sum;
}

struct PartPlace : Place {
  int split;
};
template <typename A>
__device__ __forceinline__ PartPlace part_of(const A& a, int tile) {
  PartPlace p{place_of(a, tile), 0};
  p.batch = a.by_splits.div(p.batch, p.split);
  if (a.splits > 1) {
    p.first = static_cast<int>(int64_t{a.depth_tiles} * p.split / a.splits);
    p.last = static_cast<int>(int64_t{a.depth_tiles} * (p.split + 1) / a.splits);
  }
  return p;
}

// As Copies (hopper/pipeline.cuh), of all parts. Kernels that multiply something else specialize it
// for their A, which is made from SplitArgs, and have place_of, is_special and plain_sum for it.
template <typename A, typename Tile, int kRowMajor, int kColumnMajor>
class PartCopies {
 public:
  __device__ __forceinline__ PartCopies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                        const A& a, const Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        row_((p.row * Tile::kCluster + rank) * Tile::kRows),
        column_(p.column * Tile::kColumns + rank * Tile::kShare),
        row_batch_(a.row_batch ? p.batch : 0),
        column_batch_(a.column_batch ? p.batch : 0) {}

  // Depth d, in stages: rows to `rows`, the block's share of the columns to `columns`.
  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t rows, uint32_t columns) {
    using T = typename Tile::T;
#pragma unroll
    for (int plane = 0; plane < Tile::kPlanes; ++plane) {
      load<T, kRowMajor, Tile::kRows, 1>(row_map_, full, rows + plane * Tile::kRowPlane, row_,
                                         d * Tile::kDepth, row_batch_, plane);
      load<T, kColumnMajor, Tile::kShare, Tile::kCluster>(
          column_map_, full, columns + plane * Tile::kColumnPlane, column_, d * Tile::kDepth,
          column_batch_, plane);
    }
  }

 private:
  const CUtensorMap *row_map_, *column_map_;
  int row_, column_, row_batch_, column_batch_;
};

template <typename Tile, int kRowMajor, int kColumnMajor, typename A>
__device__ __forceinline__ void produce_parts(const CUtensorMap* row_map,
                                              const CUtensorMap* column_map, const A& a,
                                              uint32_t stages, uint64_t* full, uint64_t* empty) {
  constexpr int kCluster = Tile::kCluster;
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  Cursor<Tile::kStages> at;
  for (int tile = blockIdx.x / kCluster; tile < a.tiles; tile += gridDim.x / kCluster) {
    const PartPlace p = part_of(a, tile);
    if (is_special<Tile>(a, p)) continue;
    PartCopies<A, Tile, kRowMajor, kColumnMajor> copies(row_map, column_map, a, p, rank);
    for (int d = p.first; d < p.last; ++d, at.next()) {
      mbarrier_wait(&empty[at.stage], at.phase ^ 1);
      mbarrier_expect(&full[at.stage], Tile::kStageBytes);
      const uint32_t rows = stages + at.stage * Tile::kStageBytes;
      copies.copy(d, &full[at.stage], rows,
                  rows + Tile::kRowBytes + rank * Tile::kShare * kSwizzle);
    }
  }
  drain_ring<Tile>(empty, at);
}

// What a thread sums of its tile: 64 rows of results are its warpgroup's.
template <typename Tile>
class PartSums {
 public:
  static constexpr int kCount = Tile::kColumns / 2;
  float sums[kCount];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = 0;
  }
  // Multiplies a stage.
  template <int kRowMajor, int kColumnMajor>
  __device__ __forceinline__ void multiply(uint64_t rows, uint64_t columns) {
    using Pairs = halo::PartPairs<Tile::kPlanes>;
    wgmma_touch(part_);
    wgmma_fence();
#pragma unroll
    for (int pair = 0; pair < Pairs::kCount; ++pair) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Wgmma<typename Tile::T, Tile::kColumns>::template run<kRowMajor, kColumnMajor>(
            part_,
            wgmma_advance(rows, Pairs::first(pair) * Tile::kRowPlane + step * step_of(kRowMajor)),
            wgmma_advance(columns,
                          Pairs::second(pair) * Tile::kColumnPlane + step * step_of(kColumnMajor)),
            pair + step > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_touch(part_);
  }
  // Adds what the stage gave.
  __device__ __forceinline__ void add() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += part_[i];
  }
  // Behind the last stage.
  template <typename A>
  __device__ __forceinline__ void finish(const A&, const Place&, int, int) {}

 private:
  // Bytes between 16 values of the depth.
  static constexpr int step_of(int major) { return major ? 16 * kSwizzle : 32; }
  float part_[kCount];
};

template <typename Tile, int kRowMajor, int kColumnMajor, typename A>
__device__ __forceinline__ void consume_parts(const A& a, uint32_t stages, uint64_t* full,
                                              uint64_t* empty) {
  constexpr int kCluster = Tile::kCluster;
  constexpr int kBlock = Tile::kDepth * kSwizzle;  // between 64 columns of an MN-major operand
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  Cursor<Tile::kStages> at;
  PartSums<Tile> acc;

  for (int tile = blockIdx.x / kCluster; tile < a.tiles; tile += gridDim.x / kCluster) {
    const PartPlace p = part_of(a, tile);
    const int row =
        (p.row * kCluster + rank) * Tile::kRows + group * 64 + thread / 32 * 16 + lane / 4;
    const int column = p.column * Tile::kColumns + lane % 4 * 2;
    if (is_special<Tile>(a, p)) {
#pragma unroll
      for (int i = 0; i < acc.kCount; ++i) {
        acc.sums[i] =
            plain_sum(a, p.batch, row + i / 2 % 2 * 8, column + i / 4 * 8 + i % 2, p.first, p.last);
      }
    } else {
      acc.clear();
      for (int d = p.first; d < p.last; ++d, at.next()) {
        mbarrier_wait(&full[at.stage], at.phase);
        const uint32_t rows = stages + at.stage * Tile::kStageBytes;
        acc.template multiply<kRowMajor, kColumnMajor>(
            wgmma_descriptor<kSwizzle>(rows + group * 64 * kSwizzle, kBlock),
            wgmma_descriptor<kSwizzle>(rows + Tile::kRowBytes, kBlock));
        release_stage<Tile>(empty, at.stage);
        acc.add();
      }
      acc.finish(a, p, row, column);
    }
    if constexpr (A::kScattered) {
      scatter_direct<float, true>(a, p.batch, acc.sums, row, column);
    } else if (a.partial) {
      const int64_t index = int64_t{p.split} * a.batch + p.batch;
      store_direct<float, false>(a.partial + index * a.rows * a.columns, a.columns, a.rows,
                                 a.columns, acc.sums, row, column);
    } else {
      hopper::finish<float, false>(a, acc.sums, row, column);
      store_direct<float, false>(static_cast<float*>(a.c) + p.batch * a.c_batch, a.c_ld, a.rows,
                                 a.columns, acc.sums, row, column);
    }
  }
}

template <typename Tile, int kRowMajor, int kColumnMajor, typename A = SplitArgs>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    split_kernel(const __grid_constant__ CUtensorMap row_map,
                 const __grid_constant__ CUtensorMap column_map, const __grid_constant__ A a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  extern __shared__ unsigned char shared_bytes[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  const uint32_t stages = (shared_address(shared_bytes) + 1023) & ~1023u;
  start_ring<Tile>(&row_map, &column_map, full, empty);
  if (threadIdx.x / 128 == Tile::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 128 == 0) {
      produce_parts<Tile, kRowMajor, kColumnMajor>(&row_map, &column_map, a, stages, full, empty);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume_parts<Tile, kRowMajor, kColumnMajor>(a, stages, full, empty);
  }
#endif
}

// What the parts of a matrix were scaled by together.
enum class Scaled : uint8_t { kNot, kRows, kColumns, kAll };

// A matrix's parts, in the layout it has: `outer` rows of `inner` values, rows of planes padded to
// `ld`. Infinities and NaN are told by blocks of `block` rows (`block_inner`: columns).
struct Parts {
  const float* data;
  int64_t batch_stride, row_stride, batch, outer, inner, ld;
  void* planes;
  int* special;
  int blocks;
  bool block_inner, vectors;
  int64_t block = 128;
  Scaled scaled = Scaled::kNot;
  // Bits of magnitudes, of each batch's rows, columns, or of all, behind which those of `maxima`
  // parts lie.
  uint32_t* largest = nullptr;
  int maxima = 0;

  // Values [column, column + N) of a row, zeros behind its end.
  template <int N>
  __device__ __forceinline__ void load(const float* row, int64_t column, float (&v)[N]) const {
    if (vectors && column + N <= inner) {
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        *reinterpret_cast<float4*>(v + j) = *reinterpret_cast<const float4*>(row + column + j);
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = column + j < inner ? row[column + j] : 0.0f;
    }
  }
};

// Eight values a thread; the blocks' second coordinate tells the operand.
static __global__ void __launch_bounds__(256)
    split_planes_kernel(const __grid_constant__ Parts a, const __grid_constant__ Parts b) {
  wait_for_earlier_kernels();
  const Parts& p = blockIdx.y == 0 ? a : b;
  const int64_t groups = p.ld / 8, total = p.batch * p.outer * groups;
  const int64_t plane = p.batch * p.outer * p.ld;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += stride) {
    const int64_t row = i / groups, column = (i - row * groups) * 8;
    const int64_t batch = row / p.outer, outer = row - batch * p.outer;
    float v[8];
    p.load(p.data + batch * p.batch_stride + outer * p.row_stride, column, v);
    // Tiles of infinities and NaN are marked, and never read.
    constexpr int kPlanes = SplitTile<1>::kPlanes;
    uint32_t parts[kPlanes][4];
    const bool special = halo::split_values(v, parts);
#pragma unroll
    for (int k = 0; k < kPlanes; ++k) {
      // A plain assignment would become stores of 4 bytes.
      __stcg(reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.planes) + k * plane +
                                      row * p.ld + column),
             uint4{parts[k][0], parts[k][1], parts[k][2], parts[k][3]});
    }
    if (special) p.special[batch * p.blocks + (p.block_inner ? column : outer) / p.block] = 1;
  }
}

}  // namespace braze::cuda::hopper
