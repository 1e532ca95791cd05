// What the Hopper kernel does with a product: tile, which operand makes the accumulator's rows,
// split of the depth.
#pragma once

#include <climits>

#include "cuda/common/launch.cuh"
#include "launchers/matmul.h"
#include "cuda/matmul/sum_parts.cuh"

namespace braze::cuda::hopper {

// An operand by its outer dimension (rows of A, columns of B) and its depth.
struct Operand {
  const void* data;
  int64_t batch, outer_stride, depth_stride, outer;
  bool mn_major() const { return depth_stride != 1; }
};
inline Operand operand_a(const MatmulArgs& p) {
  return {p.a.data, p.batch > 1 ? p.a.batch : 0, p.a.row, p.a.col, p.m};
}
inline Operand operand_b(const MatmulArgs& p) {
  return {p.b.data, p.batch > 1 ? p.b.batch : 0, p.b.col, p.b.row, p.n};
}
// How many of it there are: one may serve the whole batch.
inline int64_t copies(const Operand& o, int64_t batch) { return o.batch ? batch : 1; }

// Of a part of the workspace.
inline int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// TMA: one stride is 1, the others multiples of 16 bytes.
inline bool tma_takes(const Operand& o, int64_t size) {
  const int64_t other = o.mn_major() ? o.depth_stride : o.outer_stride;
  return (o.depth_stride == 1 || o.outer_stride == 1) && other * size % 16 == 0 &&
         o.batch * size % 16 == 0 && reinterpret_cast<uintptr_t>(o.data) % 16 == 0;
}

// Whether TMA can store C; else results are stored from registers.
inline bool tma_stores(const MatmulArgs& p) {
  return p.n * size_of(p.dtype) % 16 == 0 && reinterpret_cast<uintptr_t>(p.c) % 16 == 0;
}

// How a tile's depth is gone through: by one block; by the blocks of a cluster, a part each
// (15_cluster_split.cuh); or in equal shares of the depths of all tiles (16_stream_k.cuh). kTurns:
// by one consumer of a block, while the other has another tile (turns.cuh).
enum class Depth { kWhole, kSplit, kShares, kTurns };

// A tile, all that it is compiled with, and microseconds fitted to an H200.
struct TileKind {
  int rows, columns, blocks;  // blocks: of a multicasting cluster
  int stages16, stages32;     // of the ring, in 16 bits and in TF32
  int consumers;
  Depth depth;
  int full_stages16, full_stages32;  // with the full epilogue; 0: there is none
  bool plain;                        // 16 bits: whether as it is; TF32: at all, either way
  bool across;                       // only of operands that both lie across the depth
  // Of the transposed product, in 16 bits: columns that are loaded where they are K-major, and
  // where they are MN-major, which come by 64; 0: there is none.
  int swapped_columns, swapped_mn_columns;
  double start, tile, stage;  // of the kernel, of a tile, of a stage
  double fragments;           // added to a stage by rows that come from registers
  double stage_kib;           // from L2 to a multiprocessor
  // Of shares of operands that both lie across the depth: of a stage in 16 bits, and in TF32.
  double across16, across32;

  constexpr int stages(int size, bool full) const {
    return size == 2 ? (full ? full_stages16 : stages16) : (full ? full_stages32 : stages32);
  }
  // For operands of that size, whether there is a kernel. TF32 takes columns K-major, or turns them
  // (turn_columns.cuh).
  constexpr bool compiled(int size, bool swap, bool rows_mn, bool columns_mn, bool full) const {
    if (!(rows_mn && columns_mn) && (across || (size == 4 && columns_mn))) return false;
    if (size == 4 && columns_mn && depth != Depth::kShares) return false;
    if (across) return !full;
    if (swap && size == 2) return !full && (columns_mn ? swapped_mn_columns : swapped_columns) > 0;
    return plain && (!full || full_stages16 > 0);
  }
};

// Those of 144 columns are for numbers of rows of C that powers of two do not divide, such as ViT's
// 197 a picture: 11 times 144 and 12 rows of tiles fill an H200. In 16 bits they are of the
// transposed product, and so are those of 128 by 192 where they fit better. Of two of the same cost
// a plan takes the first.
constexpr TileKind kTileKinds[] = {
    // clang-format off
    {128, 256, 2, 4, 4, 2, Depth::kShares, 0, 0,  true, false,   0,   0,  8.2,  5.4,  0.75,  0.01, 32, 0.50, 0.76},
    {128, 256, 1, 4, 4, 2, Depth::kShares, 0, 0,  true,  true,   0,   0,    0,    0,     0,     0,  0, 0.66, 0.90},
    {128, 128, 1, 6, 6, 2, Depth::kShares, 0, 0,  true, false,   0,   0, 15.9,    0,  0.51,  0.07, 32, 0.45, 0.70},
    {128, 128, 2, 6, 6, 2, Depth::kShares, 0, 0,  true,  true,   0,   0,    0,    0,     0,     0,  0, 0.33, 0.59},
    { 64, 128, 2, 8, 8, 1, Depth::kShares, 0, 0,  true,  true,   0,   0,    0,    0,     0,     0,  0, 0.21, 0.44},
    {128,  64, 1, 8, 8, 2, Depth::kShares, 0, 0,  true,  true,   0,   0,    0,    0,     0,     0,  0, 0.36, 0.56},
    {128, 256, 2, 4, 4, 2,  Depth::kWhole, 0, 0,  true, false,   0,   0,  2.4,  1.0, 0.592,     0, 32,    0,    0},
    {128, 192, 2, 4, 5, 2,  Depth::kWhole, 4, 5,  true, false, 192, 192,  2.2, 0.85, 0.447,  0.06, 28,    0,    0},
    {128, 128, 1, 6, 6, 2,  Depth::kWhole, 5, 5,  true, false,   0,   0,  2.1,  0.7, 0.295,  0.12, 32,    0,    0},
    { 64, 192, 1, 6, 6, 1,  Depth::kWhole, 0, 0,  true, false,   0,   0,  1.6, 0.55,  0.25,   0.1, 32,    0,    0},
    {128,  64, 1, 8, 8, 2,  Depth::kWhole, 0, 0,  true, false,   0,   0,  1.9,  0.4, 0.225,  0.13, 24,    0,    0},
    { 64,  64, 1, 8, 8, 1,  Depth::kWhole, 0, 0,  true, false,   0,   0,  1.5, 0.35,  0.17, 0.056, 16,    0,    0},
    {128, 144, 2, 5, 0, 2,  Depth::kWhole, 0, 0, false, false, 144, 192,  2.2, 0.85, 0.345,     0, 25,    0,    0},
    {256, 144, 2, 4, 0, 2,  Depth::kWhole, 0, 0, false, false, 144,   0,  1.4,  2.2, 0.675,     0, 41,    0,    0},
    { 64, 144, 2, 8, 0, 1,  Depth::kWhole, 0, 0, false, false, 144,   0,  1.9,  0.9,  0.21,     0, 17,    0,    0},
    {128, 192, 1, 5, 5, 2,  Depth::kSplit, 0, 0,  true, false,   0,   0,  7.3, 0.75, 0.465,  0.01, 40,    0,    0},
    {128, 128, 1, 6, 6, 2,  Depth::kSplit, 0, 0,  true, false,   0,   0,  2.9,  2.5,  0.34,  0.07, 32,    0,    0},
    {128,  64, 1, 8, 8, 2,  Depth::kSplit, 8, 8,  true, false,   0,   0,  3.4, 0.06, 0.205,  0.06, 24,    0,    0},
    { 64,  64, 1, 8, 8, 1,  Depth::kSplit, 0, 0,  true, false,   0,   0,  1.8,    0,  0.19,     0, 16,    0,    0},
    // Of no product, but of convolutions (conv2d/im2col), which have times of their own.
    {128, 128, 2, 6, 6, 2,  Depth::kWhole, 0, 0, false, false,   0,   0,    0,    0,     0,     0,  0,    0,    0},
    {128, 128, 2, 6, 6, 2,  Depth::kTurns, 0, 0, false, false,   0,   0,    0,    0,     0,     0,  0,    0,    0},
    {128, 128, 1, 6, 6, 2,  Depth::kTurns, 0, 0, false, false,   0,   0,    0,    0,     0,     0,  0,    0,    0},
    {128,  64, 1, 8, 8, 2,  Depth::kTurns, 0, 0, false, false,   0,   0,    0,    0,     0,     0,  0,    0,    0},
    {256,  64, 1, 4, 0, 2,  Depth::kTurns, 0, 0, false, false,   0,   0,    0,    0,     0,     0,  0,    0,    0},
    {256, 128, 1, 4, 0, 2,  Depth::kWhole, 0, 0, false, false,   0,   0,    0,    0,     0,     0,  0,    0,    0},
    // clang-format on
};
constexpr int kTileKindCount = static_cast<int>(sizeof(kTileKinds) / sizeof(TileKind));

struct Plan {
  int tile;             // its number in kTileKinds
  bool swap;            // rows of the accumulator are the columns of C
  int cluster;          // blocks that split the depth
  bool copy_a, copy_b;  // transposed, to K-major, first
  double cost;          // microseconds, estimated

  const TileKind& kind() const { return kTileKinds[tile]; }
};

constexpr double kNoPlan = 1e30;  // microseconds

// How many tiles stream-K cuts: where the last wave is not full that one and the one before.
inline int tiles_to_share(int64_t tiles, int clusters) {
  const int64_t whole = tiles % clusters == 0 ? tiles : (tiles / clusters - 1) * clusters;
  return static_cast<int>(tiles - std::max<int64_t>(0, whole));
}

// In how many parts stream-K cuts each of few tiles, perhaps one, or 0: where that leaves an eighth
// of the clusters without work, the depths of all tiles are shared out instead.
inline int splits_of_tiles(int64_t tiles, int64_t depth_tiles, int clusters) {
  const int64_t splits = std::min<int64_t>(depth_tiles, clusters / std::max<int64_t>(1, tiles));
  return splits > 0 && 8 * splits * tiles >= 7 * clusters ? static_cast<int>(splits) : 0;
}

// A product as 16_stream_k.cuh shares it out.
struct SharedProduct {
  int64_t tiles, stages;  // stages: of each tile
  int clusters;           // that run at once, perhaps none

  SharedProduct(const MatmulArgs& p, const Plan& plan, int multiprocessors) {
    const TileKind& t = plan.kind();
    const int64_t rows = plan.swap ? p.n : p.m, columns = plan.swap ? p.m : p.n;
    tiles = p.batch * ceil_div(rows, t.rows * t.blocks) * ceil_div(columns, t.columns);
    stages = ceil_div(p.k * size_of(p.dtype), 128);
    clusters = multiprocessors / t.blocks;
  }
  bool is_possible() const { return clusters > 0 && tiles * stages <= INT_MAX; }
  // In how many parts each tile is cut, or 0.
  int splits() const { return splits_of_tiles(tiles, stages, clusters); }
  // Whether all tiles stay whole, since they fill their waves.
  bool is_uncut() const { return splits() == 0 && tiles_to_share(tiles, clusters) == 0; }
};

// Workspace for the parts of tiles: at most two of each cluster.
inline int64_t stream_bytes(const Plan& plan) {
  const TileKind& t = plan.kind();
  if (t.depth != Depth::kShares) return 0;
  return aligned(int64_t{2} * sm_count() * t.rows * t.columns * int64_t{sizeof(float)});
}

// Of 16_stream_k.cuh with operands that both lie across the depth, as a weight gradient's do,
// fitted to readings of an H200 with cold caches. What is read comes from memory in the meantime;
// parts go to L2 and back. slower: by how much a stage takes longer than theirs.
inline double across_cost_of(const MatmulArgs& p, const TileKind& t, const SharedProduct& shared,
                             double slower) {
  const int64_t size = size_of(p.dtype);
  const double each = static_cast<double>(shared.tiles) / shared.clusters;
  const double stage = slower * (size == 4 ? t.across32 : t.across16);
  double products = each * shared.stages * stage;
  double parts = std::min(1.0, 2 / each) * (1 + std::max(1.0, 1 / each));  // of a tile
  if (const int splits = shared.splits()) {
    products = ceil_div(shared.stages, splits) * stage;
    parts = splits == 1 ? 0 : splits;
  } else if (shared.is_uncut()) {
    parts = 0;
  }
  const int64_t elements =
      copies(operand_a(p), p.batch) * p.m * p.k + copies(operand_b(p), p.batch) * p.k * p.n;
  const double memory = elements * size / 4.2e6, part_bytes = 4.0 * p.batch * p.m * p.n * parts;
  const double sum = parts > 0 ? 1.2 + part_bytes / 2.1e6 : 0;
  return 5.4 + std::max(products, memory) + 0.05 * std::min(products, memory) + sum;
}

// Of 16_stream_k.cuh, from readings of its own: blocks are at different depths, so that they share
// less of what is in L2 than those of other kernels, and a stage takes longer. kNoPlan where no
// cluster has room.
inline double stream_cost_of(const MatmulArgs& p, const Plan& plan, int multiprocessors,
                             double slower = 1) {
  const TileKind& t = plan.kind();
  const SharedProduct shared(p, plan, multiprocessors);
  if (!shared.is_possible()) return kNoPlan;
  if (operand_a(p).mn_major() && operand_b(p).mn_major()) {
    return across_cost_of(p, t, shared, slower);
  }
  const int64_t size = size_of(p.dtype);
  const double each = static_cast<double>(shared.tiles) / shared.clusters;
  const double parts = std::max(1.0, 1 / each);
  const bool fragments = size == 4 && (plan.swap ? operand_b(p) : operand_a(p)).mn_major();
  const int64_t elements = copies(operand_a(p), p.batch) * p.m * p.k +
                           copies(operand_b(p), p.batch) * p.k * p.n + p.batch * p.m * p.n;
  return t.start + t.tile * (ceil_div(shared.tiles, shared.clusters) + 1) +
         each * shared.stages * (t.stage + fragments * t.fragments) + 0.14 * parts +
         0.03e-6 * elements * size;
}

// Of clusters that split the depth: larger ones do not fill the device, and those that have to wait
// are slow to start.
inline int blocks_at_once(int cluster) {
  return std::min(cluster == 8 ? 64 : cluster == 4 ? 96 : INT_MAX, sm_count());
}

inline double cost_of(const MatmulArgs& p, const Plan& plan, int multiprocessors) {
  const TileKind& t = plan.kind();
  if (t.depth == Depth::kShares) {
    const double cost = stream_cost_of(p, plan, multiprocessors);
    // What need not be cut is left to the other kernels, where they take the operands.
    const bool only = size_of(p.dtype) == 4 && operand_a(p).mn_major() && operand_b(p).mn_major();
    const bool uncut = cost < kNoPlan && SharedProduct(p, plan, multiprocessors).is_uncut();
    return uncut && !only ? kNoPlan : cost;
  }
  const int64_t rows = plan.swap ? p.n : p.m, columns = plan.swap ? p.m : p.n;
  const int64_t blocks = ceil_div(rows, t.rows * t.blocks) * t.blocks * p.batch *
                         ceil_div(columns, t.columns) * plan.cluster;
  if (plan.cluster > 1 && blocks > blocks_at_once(plan.cluster)) return kNoPlan;
  const int64_t waves = ceil_div(blocks, multiprocessors);
  const int64_t size = size_of(p.dtype);
  const int64_t stages = ceil_div(ceil_div(p.k * size, 128), plan.cluster);
  const bool fragments = size == 4 && (plan.swap ? operand_b(p) : operand_a(p)).mn_major();
  // Of MN-major columns, 192 are loaded for 144.
  const bool wasted = plan.swap && t.swapped_mn_columns > t.columns && operand_a(p).mn_major();
  const double scale = size == 4 ? 1.08 : wasted ? 1.14 : 1.0;
  // All multiprocessors together read about 13 TB/s from L2.
  const double stage = std::max(scale * t.stage + (fragments ? t.fragments : 0),
                                std::min<int64_t>(blocks, multiprocessors) * t.stage_kib / 13.2e3);
  const int64_t elements =
      copies(operand_a(p), p.batch) * p.m * p.k + copies(operand_b(p), p.batch) * p.k * p.n;
  // Memory gives 2.9 TB/s, mostly meanwhile. Some of what is written may stay in L2.
  const double products = waves * (t.tile + stages * stage);
  const double memory = (elements + 0.7 * p.batch * p.m * p.n) * size / 2.9e6;
  double cost = t.start + std::max(products, memory) + 0.1 * std::min(products, memory);
  if (plan.cluster > 1) cost += 0.016 * blocks;  // those of a cluster start together
  return cost;
}

inline double copy_cost_of(const MatmulArgs& p, const Plan& plan) {
  if (!plan.copy_a && !plan.copy_b) return 0;
  return 1.9 + 3.0e-6 * p.batch * p.k * (plan.copy_a ? p.m : p.n);
}

inline Plan make_plan(const MatmulArgs& p, bool stream_only = false) {
  const int multiprocessors = sm_count();
  const bool a_mn = operand_a(p).mn_major(), b_mn = operand_b(p).mn_major();
  Plan best{};
  best.cost = kNoPlan;
  for (const bool swap : {false, true}) {
    Plan plan{};
    plan.swap = swap;
    const int size = static_cast<int>(size_of(p.dtype));
    const bool rows_mn = swap ? b_mn : a_mn, columns_mn = swap ? a_mn : b_mn;
    const Operand columns = swap ? operand_a(p) : operand_b(p);
    const bool dense = columns.depth_stride == columns.outer &&
                       (!columns.batch || columns.batch == p.k * columns.outer);
    for (const int cluster : {1, 2, 4, 8}) {  // of the blocks that split a tile's depth
      if (cluster > 1 && ceil_div(p.k * size, 128) < 2 * cluster) break;  // at least two stages
      for (plan.tile = 0; plan.tile < kTileKindCount; ++plan.tile) {
        const TileKind& kind = plan.kind();
        const bool shares = kind.depth == Depth::kShares;
        // TF32 takes columns K-major only, rows also through registers; shares turn both.
        const bool copied = size == 4 && columns_mn && !shares;
        if (copied && !(rows_mn && dense && p.k % 4 == 0)) continue;
        (swap ? plan.copy_a : plan.copy_b) = copied;
        if ((kind.depth == Depth::kSplit) != (cluster > 1) || (stream_only && !shares) ||
            !kind.compiled(size, swap, rows_mn, columns_mn && !copied, p.has_full_epilogue())) {
          continue;
        }
        // In 16 bits shares gain nothing: other tiles keep up where those do not fill the device.
        if (shares && !stream_only && size == 2) continue;
        plan.cluster = cluster;
        plan.cost = cost_of(p, plan, multiprocessors) + copy_cost_of(p, plan);
        if (plan.cost < best.cost) best = plan;
      }
    }
  }
  return best;
}

// The parts of sums that the tiles leave: of columns for every 64 rows of the accumulator.
inline SumParts sum_parts(const MatmulArgs& p, const Plan& plan) {
  const TileKind& t = plan.kind();
  const int64_t rows = plan.swap ? p.n : p.m, columns = plan.swap ? p.m : p.n;
  const int64_t of_column = ceil_div(rows, t.rows * t.blocks) * t.blocks * t.rows / 64;
  const int64_t of_row = ceil_div(columns, t.columns) * plan.cluster;
  if (plan.swap) return {of_row, of_column};
  return {of_column, of_row};
}

// The product for one element type; each .cu beside compiles one. `workspace` is where tiles leave
// parts: of themselves (stream_bytes()), or of sums.
void run_bf16(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace);
void run_fp16(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace);
void run_tf32(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace);

}  // namespace braze::cuda::hopper
