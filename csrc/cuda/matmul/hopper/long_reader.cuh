// The first half of long_sums.cuh: its tiles and arguments, and the producers, who read both
// operands, split them and write the parts to shared memory.
#pragma once

#include <cuda_bf16.h>

#include "cuda/common/tma.cuh"
#include "cuda/conv2d/halo/split.cuh"

namespace braze::cuda::hopper {

constexpr int kLongParts = 3;
constexpr int kLongGroups = 2;  // of consumers
constexpr int kLongProducers = 256, kLongThreads = kLongProducers + 128 * kLongGroups;
constexpr int kLongRegisters = 65536 / kLongThreads;  // that a thread begins with
constexpr int kLongStep = 16;                         // rows that one wgmma sums over
constexpr int kLongChain = 32;  // rows that the tensor cores, whose additions truncate, sum at most

// A tile of results, and the stages that it is summed up from. kGroupColumns: of a consumer, which
// has 64 rows; kAlongRows and kAlongColumns: how many of them share the tile's rows and columns.
// Those that are left over share the stages. kMostRows: of C, if it has less than 64.
template <int kAlongRows, int kAlongColumns, int kGroupColumns, int kStageDepth,
          int kMostRows = 64 * kAlongRows>
struct LongTile {
  static constexpr int kRows = kMostRows, kColumns = kGroupColumns * kAlongColumns;
  static constexpr int kAcross = kAlongRows * kAlongColumns;  // consumers that share a stage
  static constexpr int kTurns = kLongGroups / kAcross;
  static_assert(kTurns * kAcross == kLongGroups);
  static constexpr int kGroup = kGroupColumns, kGroupsOfRows = kAlongRows;
  // Of a tile's sums as blocks leave them: [consumer that shares a stage][kQuads][its thread].
  static constexpr int kQuads = kGroupColumns / 8, kItems = kAcross * kQuads * 128;
  static constexpr int kDepth = kStageDepth;

  // A plane of parts: blocks of up to 64 columns of an operand, a row for each of the depth,
  // swizzled for wgmma. Where the first operand's block is narrower than the 64 columns that wgmma
  // reads, the others are told to lie where it lies: what they give is not stored.
  static constexpr int kFirstBlock = kMostRows < 64 ? kMostRows : 64;
  static constexpr int kSecondBlock = kGroupColumns < 64 ? kGroupColumns : 64;
  static constexpr int kFirstLeading = kMostRows < 64 ? 0 : 16;
  static constexpr int kRowBytes = 2 * kFirstBlock, kSecondRowBytes = 2 * kSecondBlock;
  static constexpr int kSecond = kDepth * kRows * 2;  // where the second operand's blocks begin
  static constexpr int kPlaneBytes = kSecond + kDepth * kColumns * 2;
  static_assert(kSecond % 1024 == 0 && kPlaneBytes % 1024 == 0);
  static constexpr int kStageBytes = kLongParts * kPlaneBytes;
  // The rest is L1, where what the producers have asked for needs room: 32 to 48 KiB.
  static constexpr int kMostBytes = 194 * 1024;
  static constexpr int kStages = kMostBytes / kStageBytes;
  static_assert(kStages >= 2);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes;

  // Of a thread; a consumer's sums of a stage and of all are in registers.
  static constexpr int kProducerRegisters = kGroupColumns > 64 ? 96 : kLongRegisters;
  static constexpr int kConsumerRegisters = 2 * kLongRegisters - kProducerRegisters;
};

// A matrix of `depth` rows, whose columns are C's rows or columns; the first has fewer.
struct LongOperand {
  const float* data;
  int64_t ld;
  int columns;
  bool vectors;  // whether rows are read 16 bytes at a time
};
struct LongArgs {
  LongOperand first, second;
  int depth, splits;
  int tiles, column_tiles;
  float4* partial;  // [part][tile][item]
  float* c;
  int64_t row_stride, column_stride;  // of C, by the operands' columns
  int parts;
  const float* bias;   // of C's columns, or nullptr
  bool relu, swapped;  // the latter: the first operand's columns are those of C
};

// What a producer has of an operand: of a stage's rows every kStep-th, four columns. kVectors: what
// is read in vectors is known at compile time to be; else the operand says.
template <int kColumns, int kDepth, int kRowBytes, bool kVectors>
struct LongReader {
  static constexpr int kLanes = kColumns / 4, kStep = kLongProducers / kLanes;
  static constexpr int kItems = kDepth / kStep;
  static_assert(kItems * kStep == kDepth && kStep * kRowBytes % 512 == 0);

  const float* at;  // the stage's first row
  int64_t step;     // elements from one to the next
  int left;         // columns, from the thread's first one on
  int row;          // of the stage
  uint32_t to;      // where its parts go in a plane
  bool vectors;
  float values[kItems][4];

  __device__ __forceinline__ LongReader(const LongOperand& o, int first_column, int first_row,
                                        uint32_t plane) {
    const int column = threadIdx.x % kLanes * 4;
    row = threadIdx.x / kLanes;
    left = o.columns - first_column - column;
    at = o.data + (int64_t{first_row} + row) * o.ld + first_column + column;
    step = o.ld * kStep;
    vectors = kVectors || o.vectors;
    constexpr int kBlock = kRowBytes / 2;
    const uint32_t unswizzled =
        column / kBlock * (kDepth * kRowBytes) + row * kRowBytes + column % kBlock * 2;
    to = plane + (unswizzled ^ (unswizzled >> 7 & (kRowBytes / 16 - 1)) << 4);
  }

  // Asks for item i of a stage of which so many rows are left.
  __device__ __forceinline__ void load(int i, int rows) {
    const float* const from = at + i * step;
    const bool inside = row + i * kStep < rows;
    if (vectors) {
      float4 v{0, 0, 0, 0};
      if (inside && left > 0) v = *reinterpret_cast<const float4*>(from);
      values[i][0] = v.x, values[i][1] = v.y, values[i][2] = v.z, values[i][3] = v.w;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) values[i][k] = inside && k < left ? from[k] : 0.0f;
    }
  }
  __device__ __forceinline__ void advance() { at += step * kItems; }

  // Writes item i's parts; returns whether it has an infinity or NaN, whose parts are worthless.
  __device__ __forceinline__ bool store(int i, unsigned char* stage, int plane_bytes) const {
    uint32_t parts[kLongParts][2];
    const bool special = halo::split_values(values[i], parts);
#pragma unroll
    for (int p = 0; p < kLongParts; ++p) {
      *reinterpret_cast<uint2*>(stage + p * plane_bytes + offset(i)) =
          uint2{parts[p][0], parts[p][1]};
    }
    return special;
  }

  // All items of a stage, if `filled`, whose place the next stage's take: asked for as soon as a
  // few have been split, and not before (a warp's barrier keeps the order).
  __device__ __forceinline__ bool turn_over(bool filled, unsigned char* stage, int plane_bytes,
                                            int next_rows) {
    constexpr int kBatch = kItems < 4 ? kItems : 4;
    bool special = false;
#pragma unroll
    for (int first = 0; first < kItems; first += kBatch) {
      if (filled) {
#pragma unroll
        for (int i = first; i < first + kBatch; ++i) special |= store(i, stage, plane_bytes);
      }
#pragma unroll
      for (int i = first; i < first + kBatch; ++i) load(i, next_rows);
      __syncwarp();
    }
    return special;
  }

  // The parts of all items once more, with infinities and NaN, from the stage before `at`.
  __device__ __forceinline__ void store_special(unsigned char* stage, int plane_bytes,
                                                int rows) const {
#pragma unroll 1
    for (int i = 0; i < kItems; ++i) {
      const float* const from = at + (i - kItems) * step;
#pragma unroll 1
      for (int k = 0; k < min(4, left) && row + i * kStep < rows; ++k) {
        __nv_bfloat16 parts[kLongParts];
        halo::split(from[k], parts);
#pragma unroll
        for (int p = 0; p < kLongParts; ++p) {
          *reinterpret_cast<__nv_bfloat16*>(stage + p * plane_bytes + offset(i) + 2 * k) = parts[p];
        }
      }
    }
  }

 private:
  // A row's swizzle is that of the rows eight further on.
  __device__ __forceinline__ uint32_t offset(int i) const {
    static_assert(kStep % 8 == 0 || kStep == 4);
    return (kStep == 4 ? to ^ (i % 2) << 6 : to) + i * kStep * kRowBytes;
  }
};

// The stages' barriers, and whether what a stage holds has infinities or NaN: the number of the
// filling, from 1 on.
template <int kStages>
struct LongRing {
  uint64_t full[kStages], empty[kStages];
  int special[kStages];

  __device__ __forceinline__ void init(int consumers) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&full[i], kLongProducers / 32);
        mbarrier_init(&empty[i], consumers * 4);  // their warps
        special[i] = 0;
      }
      mbarrier_init_fence();
    }
  }
  __device__ __forceinline__ void begin(int j) {
    if (j >= kStages) mbarrier_wait(&empty[j % kStages], (j / kStages + 1) % 2);
  }
  __device__ __forceinline__ void filled(int j) {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&full[j % kStages]);
  }
  __device__ __forceinline__ void wait(int j) {
    mbarrier_wait(&full[j % kStages], j / kStages % 2);
  }
  __device__ __forceinline__ void release(int j) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[j % kStages]);
  }
};

// A block's tile, and its share of the stages: `count` from `first` on.
struct LongPlace {
  int row, column;  // of C, by the operands' columns
  int first, count;
};
template <typename Tile>
__device__ __forceinline__ LongPlace long_place(const LongArgs& args) {
  const int split = blockIdx.x % args.splits, tile = blockIdx.x / args.splits;
  const int64_t stages = (args.depth + Tile::kDepth - 1) / Tile::kDepth;
  const int first = static_cast<int>(stages * split / args.splits);
  const int end = static_cast<int>(stages * (split + 1) / args.splits);
  return {tile / args.column_tiles * Tile::kRows, tile % args.column_tiles * Tile::kColumns, first,
          end - first};
}

template <typename Tile, bool kVectors>
__device__ __forceinline__ void long_produce(const LongArgs& args, const LongPlace& place,
                                             LongRing<Tile::kStages>& ring, unsigned char* stages) {
  const int first_row = place.first * Tile::kDepth;
  LongReader<Tile::kRows, Tile::kDepth, Tile::kRowBytes, kVectors> a(args.first, place.row,
                                                                     first_row, 0);
  LongReader<Tile::kColumns, Tile::kDepth, Tile::kSecondRowBytes, kVectors> b(
      args.second, place.column, first_row, Tile::kSecond);
  int rows = 0, next_rows = args.depth - first_row;  // left, from a stage on
#pragma unroll 1
  for (int j = -1; j < place.count; ++j) {
    const bool filled = j >= 0;
    const int slot = filled ? j % Tile::kStages : 0;
    unsigned char* const stage = stages + slot * Tile::kStageBytes;
    if (filled) {
      ring.begin(j);
      a.advance(), b.advance();
      rows = next_rows;
      next_rows = j + 1 < place.count ? rows - Tile::kDepth : 0;
    }
    bool special = a.turn_over(filled, stage, Tile::kPlaneBytes, next_rows);
    special |= b.turn_over(filled, stage, Tile::kPlaneBytes, next_rows);
    if (special) {
      a.store_special(stage, Tile::kPlaneBytes, rows);
      b.store_special(stage, Tile::kPlaneBytes, rows);
      ring.special[slot] = j + 1;
    }
    if (filled) ring.filled(j);
  }
}

}  // namespace braze::cuda::hopper
