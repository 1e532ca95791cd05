// What the Hopper kernels share: a tile's shape, which tile is next, the ring of stages that TMA
// fills, its products by wgmma, and the way from accumulators to C.
//
// Rows and columns here are the accumulator's. With kSwap the product is computed transposed (its
// rows are the columns of C), which lets a kernel that treats rows and columns differently have it
// either way.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/multicast.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/tile_order.cuh"
#include "cuda/common/wgmma.cuh"

namespace braze::cuda::hopper {

constexpr int kSwizzle = 128;  // bytes of a row in shared memory

// T: the operands' type (float stands for TF32). kLoadedColumns: MN-major operands come by 64.
template <typename T_, int kRows_, int kColumns_, int kStages_, int kCluster_, int kConsumers_ = 2,
          int kLoadedColumns_ = kColumns_>
struct Tile {
  using T = T_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kLoadedColumns = kLoadedColumns_;
  static constexpr int kCluster = kCluster_, kConsumers = kConsumers_;
  static constexpr int kDepth = kSwizzle / int{sizeof(T)};
  static constexpr int kBlocks = kRows / kConsumers / 64;  // of 64 rows, per consumer
  static constexpr int kReaders = kConsumers;              // of a stage
  // Of the tile, a consumer's.
  __device__ static constexpr int first_row(int consumer) { return consumer * kBlocks * 64; }
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kRowBytes = kRows * kSwizzle;
  static constexpr int kStageBytes = kRowBytes + kLoadedColumns * kSwizzle;
  // Columns that the blocks of a cluster load at once, in turn.
  static constexpr int kColumnBox =
      kLoadedColumns % (64 * kCluster) == 0 || kLoadedColumns % 64 != 0 ? kLoadedColumns / kCluster
                                                                        : 64;
  // 16-bit results are staged in shared memory, 64 rows by kChunk columns at a time, and kept in
  // registers while the next tile begins, if there are enough of these.
  static constexpr bool kStaged = sizeof(T) == 2, kKept = kStaged && kBlocks == 1;
  static constexpr int kChunk = kColumns % 64 == 0 ? 64 : 48, kChunkBytes = kChunk * kSwizzle;
  static constexpr int kChunks = kColumns / kChunk;
  static constexpr int kStagingBytes = kStaged ? 2 * kChunkBytes : 0;  // of a consumer
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kConsumers * kStagingBytes;
  static_assert(kBlocks * kConsumers * 64 == kRows && kLoadedColumns % kColumnBox == 0 &&
                kColumns % kChunk == 0);
};

// Makes the ring's barriers, for the whole cluster to see: a stage is full with one arrival, the
// producer's, and empty when all that read it have left it. Then waits for earlier kernels.
template <typename Tile>
__device__ __forceinline__ void start_ring(const CUtensorMap* row_map,
                                           const CUtensorMap* column_map, uint64_t* full,
                                           uint64_t* empty) {
  if (threadIdx.x == 0) {
    prefetch_tensor_map(row_map);
    prefetch_tensor_map(column_map);
    for (int i = 0; i < Tile::kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], Tile::kReaders * Tile::kCluster);
    }
    mbarrier_init_fence();
  }
  if constexpr (Tile::kCluster > 1) {
    cluster_meet();  // the fence has published the barriers
  } else {
    __syncthreads();
  }
  wait_for_earlier_kernels();
}

// The barriers of a ring's stages. turned: of columns that are transposed first (turn_columns.cuh).
struct Ring {
  uint64_t *full, *empty, *turned;
};

struct Args {
  static constexpr bool kFull = false;       // of FullArgs (hopper/epilogue.cuh) it is true
  static constexpr bool kWindows = false;    // whether rows are windows: conv2d/im2col/copies.cuh
  static constexpr bool kScattered = false;  // whether rows of C lie anywhere (hopper/scatter.cuh)
  static constexpr bool kTail = false;       // whether it finishes results: conv2d/im2col/tail.cuh
  static constexpr bool kSums = false;       // whether it sums them: conv2d/im2col/norm_grad.cuh
  template <typename Tile>
  struct State {};  // what a consumer's thread keeps for that

  int rows, columns;             // of the product
  TileOrder order;               // a row of tiles stands for as many as a cluster takes at once
  int depth_tiles, tiles;        // the latter in all
  int cluster_bits;              // 15_cluster_split.cuh: of blocks that share a tile, log2
  bool row_batch, column_batch;  // else one operand for all of the batch
  bool direct;                   // C is stored from registers
  bool relu;
  void* c;
  int64_t c_batch, c_ld;
  const void* bias;  // by column of C
};

// Where a cluster's tile is.
struct Place {
  int batch, row, column, first, last;  // row and column in tiles, first..last in depth
};

__device__ __forceinline__ Place place_of(const Args& a, int tile) {
  Place p;
  p.batch = a.order.place(tile, p.row, p.column);
  p.first = 0, p.last = a.depth_tiles;
  return p;
}

// Calls f(std::integral_constant) with 0, 1, ... up to kCount - 1.
template <int kCount, int kFirst = 0, typename F>
__device__ __forceinline__ void for_each_constant(const F& f) {
  if constexpr (kFirst < kCount) {
    f(std::integral_constant<int, kFirst>{});
    for_each_constant<kCount, kFirst + 1>(f);
  }
}

// A place in the ring of stages.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int count) {
    const int to = stage + count, rounds = to / kStages;
    stage = to - rounds * kStages, phase ^= rounds & 1;
  }
};

// The producer's end: a block that has ended could not be told by its neighbours that they have
// left its stages. That costs less than a barrier of the cluster, which would wait for all results
// to be written.
template <typename Tile>
__device__ __forceinline__ void drain_ring(uint64_t* empty, Cursor<Tile::kStages> at) {
  if constexpr (Tile::kCluster > 1) {
#pragma unroll 1
    for (int i = 0; i < Tile::kStages; ++i, at.next()) {
      mbarrier_wait(&empty[at.stage], at.phase ^ 1);
    }
  }
}

// Rows or columns [first, first + kCount) of the operand at depth `depth`, to shared memory. A
// K-major operand is kCount rows of 128 bytes of depth; an MN-major one blocks of kDepth rows, each
// row 128 bytes of M or N. Copied to all blocks of the cluster if kCopies.
template <typename T, int kMajor, int kCount, int kCopies>
__device__ __forceinline__ void load(const CUtensorMap* map, uint64_t* barrier, uint32_t to,
                                     int first, int depth, int batch, int plane = 0) {
  constexpr int kWidth = kSwizzle / int{sizeof(T)};  // of a row; also the depth of a stage
  constexpr uint16_t kMask = (1 << kCopies) - 1;
  const auto copy = [&](uint32_t address, int c0, int c1) {
    if constexpr (kCopies > 1) {
      tma_multicast_4d(map, barrier, address, kMask, c0, c1, batch, plane);
    } else {
      tma_load_4d(map, barrier, address, c0, c1, batch, plane);
    }
  };
  if constexpr (kMajor == 0) {
    copy(to, depth, first);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / kWidth; ++i) {
      copy(to + i * kWidth * kSwizzle, first + i * kWidth, depth);
    }
  }
}

// Calls f(first column in the tile, where it goes) for each of the boxes of columns that the block
// `rank` of the cluster loads into the stage at `to`.
template <typename Tile, typename F>
__device__ __forceinline__ void for_column_boxes(int rank, uint32_t to, F&& f) {
  constexpr int kBox = Tile::kColumnBox, kLoaded = Tile::kLoadedColumns;
#pragma unroll
  for (int i = 0; i < kLoaded; i += Tile::kCluster * kBox) {
    if (i + Tile::kCluster * kBox > kLoaded && i + rank * kBox >= kLoaded) continue;
    f(i + rank * kBox, to + Tile::kRowBytes + (i + rank * kBox) * kSwizzle);
  }
}

// Has TMA fill stages with a cluster's tile, here of two matrices. Kernels that multiply something
// else specialize it for their A, which is Args or made from it; for several by the last parameter.
template <typename A, typename Tile, int kRowMajor, int kColumnMajor, typename = void>
class Copies {
 public:
  __device__ __forceinline__ Copies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                    const A& a, const Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        row_((p.row * Tile::kCluster + rank) * Tile::kRows),
        column_(p.column * Tile::kColumns),
        row_batch_(a.row_batch ? p.batch : 0),
        column_batch_(a.column_batch ? p.batch : 0),
        rank_(rank) {}

  // Of a stage.
  __device__ __forceinline__ static constexpr uint32_t bytes() { return Tile::kStageBytes; }
  // Depth d, in tiles, to the stage at `to`. Depths come one after the other.
  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t to) {
    load<T, kRowMajor, Tile::kRows, 1>(row_map_, full, to, row_, d * Tile::kDepth, row_batch_);
    for_column_boxes<Tile>(rank_, to, [&](int i, uint32_t box) {
      load<T, kColumnMajor, Tile::kColumnBox, Tile::kCluster>(column_map_, full, box, column_ + i,
                                                              d * Tile::kDepth, column_batch_);
    });
  }

 protected:
  using T = typename Tile::T;
  const CUtensorMap *row_map_, *column_map_;
  int row_, column_, row_batch_, column_batch_, rank_;
};

constexpr int kSteps = 4;  // products that a stage's depth is gone through in

// How many of them a stage has, asked once for each. Fewer where a kernel's depth comes in pieces
// that leave stages unfilled: it specializes this for its A.
template <typename A, typename = void>
class Steps {
 public:
  __device__ __forceinline__ Steps(const A&, int) {}
  __device__ __forceinline__ static constexpr int next() { return kSteps; }
};

// Whether columns are transposed in shared memory (turn_columns.cuh).
template <typename T, int kColumnMajor>
constexpr bool are_turned = sizeof(T) == 4 && kColumnMajor == 1;

// The A operand of one wgmma for TF32 from an MN-major tile, which the instruction takes from
// registers only: element (row, k) is word row % 32 of row k of block row / 32. Of the 8 depths
// from `first` on the lane has two: beside turned columns, of which the even ones come first, two
// that follow each other.
template <bool kTurned>
__device__ __forceinline__ void load_fragment(uint32_t tile, int row, int first, uint32_t (&a)[4]) {
  const int k = first + threadIdx.x % 4 * (kTurned ? 2 : 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + i % 2 * 8, d = k + i / 2 * (kTurned ? 1 : 4);
    const uint32_t from =
        tile + r / 32 * 32 * kSwizzle + d * kSwizzle + (((r / 4) ^ d) & 7) * 16 + r % 4 * 4;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[i]) : "r"(from));
  }
}

// acc += the first kCount steps of a slice of the tile: `rows` and `columns` are this consumer's
// operands in shared memory.
template <typename Tile, int kRowMajor, int kColumnMajor, int kCount = kSteps>
__device__ __forceinline__ void multiply(float (&acc)[Tile::kBlocks][Tile::kColumns / 2],
                                         uint32_t rows, uint32_t columns, bool accumulate) {
  using T = typename Tile::T;
  constexpr int kStepDepth = Tile::kDepth / kSteps;
  constexpr int kRowStep = kRowMajor ? kStepDepth * kSwizzle : 32;
  constexpr int kColumnStep = kColumnMajor ? kStepDepth * kSwizzle : 32;
  constexpr int kBlock = Tile::kDepth * kSwizzle;  // between 64 columns of an MN-major operand
  const uint64_t row_desc = wgmma_descriptor<kSwizzle>(rows, kBlock);
  const uint64_t column_desc = wgmma_descriptor<kSwizzle>(columns, kBlock);
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
      Wgmma<T, Tile::kColumns>::template run<kRowMajor, kColumnMajor>(
          acc[b], row_desc + ((b * 64 * kSwizzle + step * kRowStep) >> 4),
          column_desc + (step * kColumnStep >> 4), accumulate || step > 0);
    }
  }
}

// The same for TF32 with rows of an MN-major operand, through registers.
template <typename Tile>
__device__ __forceinline__ void multiply_fragments(float (&acc)[Tile::kBlocks][Tile::kColumns / 2],
                                                   const uint32_t (&fragments)[4][4],
                                                   uint32_t columns, bool accumulate) {
  static_assert(Tile::kBlocks == 1);
  const uint64_t column_desc = wgmma_descriptor<kSwizzle>(columns);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    Wgmma<float, Tile::kColumns>::run(acc[0], fragments[step], column_desc + (step * 32 >> 4),
                                      accumulate || step > 0);
  }
}

// Begins acc += rows * columns of the stage at `stage`, for the calling consumer.
template <typename Tile, int kRowMajor, int kColumnMajor>
__device__ __forceinline__ void multiply_stage(float (&acc)[Tile::kBlocks][Tile::kColumns / 2],
                                               uint32_t (&fragments)[4][4], uint32_t stage,
                                               bool accumulate, int steps = kSteps) {
  const int first_row = Tile::first_row(threadIdx.x / 128);
  const uint32_t columns = stage + Tile::kRowBytes;
  if constexpr (sizeof(typename Tile::T) == 4 && kRowMajor == 1) {
    const int lane = threadIdx.x % 32;
    const int row = first_row + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      load_fragment<are_turned<float, kColumnMajor>>(stage, row, s * 8, fragments[s]);
    }
  }
  const auto begin = [&](auto count) {
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) wgmma_touch(acc[b]);
    wgmma_fence();
    if constexpr (sizeof(typename Tile::T) == 4 && kRowMajor == 1) {
      multiply_fragments<Tile>(acc, fragments, columns, accumulate);
    } else {
      multiply<Tile, kRowMajor, kColumnMajor, count.value>(acc, stage + first_row * kSwizzle,
                                                           columns, accumulate);
    }
    wgmma_commit();
  };
  // Each count for itself: what stands between products would have them wait for each other.
  static_assert(kSteps == 4);
  if (steps == 4) {
    begin(std::integral_constant<int, 4>{});
  } else if (steps == 3) {
    begin(std::integral_constant<int, 3>{});
  } else if (steps == 2) {
    begin(std::integral_constant<int, 2>{});
  } else {
    begin(std::integral_constant<int, 1>{});
  }
}

// The calling consumer has left the stage, and tells all whose copies fill it.
template <typename Tile>
__device__ __forceinline__ void release_stage(uint64_t* empty, int stage) {
  const int thread = threadIdx.x % 128;
  if constexpr (Tile::kCluster > 1) {
    if (thread < Tile::kCluster) mbarrier_arrive_remote(&empty[stage], thread);
  } else {
    if (thread == 0) mbarrier_arrive(&empty[stage]);
  }
}

struct Nothing {
  __device__ void operator()() const {}
};

// acc = rows * columns of the depths [first, last), which come in the stages from `at` on. Returns
// the last of these, which is still to be released. then(): called when all have come, while the
// last products may still run.
template <typename Tile, int kRowMajor, int kColumnMajor, typename A, typename Then = Nothing>
__device__ __forceinline__ int multiply_depths(const A& a,
                                               float (&acc)[Tile::kBlocks][Tile::kColumns / 2],
                                               Cursor<Tile::kStages>& at, uint32_t stages,
                                               const Ring& ring, int first, int last,
                                               const Then& then = {}) {
  int before = -1;  // the stage whose products may still run
  Steps<A> steps(a, first);
  [[maybe_unused]] uint32_t fragments[2][4][4];
  const auto step = [&](int d, auto& fragment) {
    mbarrier_wait(&ring.full[at.stage], at.phase);
    if constexpr (are_turned<typename Tile::T, kColumnMajor>) {
      mbarrier_wait(&ring.turned[at.stage], at.phase);
    }
    multiply_stage<Tile, kRowMajor, kColumnMajor>(
        acc, fragment, stages + at.stage * Tile::kStageBytes, d > first, steps.next());
    wgmma_wait<1>();
    if (before >= 0) release_stage<Tile>(ring.empty, before);
    before = at.stage;
    at.next();
  };
  // Rolled: a few products are over before unrolled code has come from memory.
  int d = first;
  if constexpr (sizeof(typename Tile::T) == 4 && kRowMajor == 1) {
#pragma unroll 1
    for (; d + 1 < last; d += 2) {
      step(d, fragments[0]);
      step(d + 1, fragments[1]);
    }
  }
#pragma unroll 1
  for (; d < last; ++d) step(d, fragments[0]);
  then();
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) wgmma_touch(acc[b]);
  return before;
}

// `row` and `column` are the place of acc[0] in the product.
template <typename T, bool kSwap, int kCount>
__device__ __forceinline__ void add_bias(const Args& a, float (&acc)[kCount], int row, int column) {
  if (a.bias) {
    const T* const bias = static_cast<const T*>(a.bias);
    if constexpr (kSwap) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + half * 8;
        const float value = r < a.rows ? convert<float>(bias[r]) : 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
          acc[i + 2 * half] += value;
          acc[i + 2 * half + 1] += value;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int c = column + i * 2 + v;
          const float value = c < a.columns ? convert<float>(bias[c]) : 0.0f;
          acc[i + v] += value;
          acc[i + 2 + v] += value;
        }
      }
    }
  }
}

template <int kCount>
__device__ __forceinline__ void apply_relu(const Args& a, float (&acc)[kCount]) {
  if (a.relu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] = acc[i] < 0 ? 0.0f : acc[i];  // NaN stays NaN
  }
}

// Bias and ReLU.
template <typename T, bool kSwap, int kCount>
__device__ __forceinline__ void finish(const Args& a, float (&acc)[kCount], int row, int column) {
  add_bias<T, kSwap>(a, acc, row, column);
  apply_relu(a, acc);
}

// From registers to C, or to a part of it, at `c`; what lies outside is dropped.
template <typename T, bool kSwap, int kCount>
__device__ __forceinline__ void store_direct(T* c, int64_t ld, int rows, int columns,
                                             const float (&acc)[kCount], int row, int column) {
  const bool pairs = !kSwap && ld % 2 == 0 && (reinterpret_cast<uintptr_t>(c) & 7) == 0;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int r = row + i / 2 % 2 * 8, j = column + i / 4 * 8;
    if (r >= rows) continue;
    T* const to = c + (kSwap ? j * ld + r : r * ld + j);
    if (pairs && j + 2 <= columns) {
      *reinterpret_cast<Vec<T, 2>*>(to) = {convert<T>(acc[i]), convert<T>(acc[i + 1])};
    } else {
      if (j < columns) to[0] = convert<T>(acc[i]);
      if (j + 1 < columns) to[kSwap ? ld : 1] = convert<T>(acc[i + 1]);
    }
  }
}

}  // namespace braze::cuda::hopper
