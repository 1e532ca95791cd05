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

// Tiles of 128 rows by 256, 192, 128 or 64 columns, and of 64 by 192 or 64; some also with
// their depth split over a cluster (15_cluster_split.cuh) or in equal shares (16_stream_k.cuh).
// Those of 144 columns, by 256, 128 or 64 rows, are for numbers of rows of C that powers of two do
// not divide, such as ViT's 197 a picture: 11 times 144 and 12 rows of tiles fill an H200. In 16
// bits they are of the transposed product, and so are those of 128 by 192 where they fit better.
enum class Shape {
  kLarge,
  kWide,
  kMedium,
  kFlat,
  kSmall,
  kTiny,
  kTall144,
  kMedium144,
  kFlat144,
  kWideSplit,
  kMediumSplit,
  kSmallSplit,
  kTinySplit,
  kLargeStream,
  kMediumStream,
};

struct Plan {
  Shape shape;
  bool swap;            // rows of the accumulator are the columns of C
  int cluster;          // blocks that split the depth
  bool copy_a, copy_b;  // transposed, to K-major, first
  double cost;          // microseconds, estimated
};

// Those that the full epilogue is compiled for.
inline bool has_full_epilogue(Shape shape) {
  return shape == Shape::kWide || shape == Shape::kMedium || shape == Shape::kSmallSplit;
}

// Microseconds for `waves` of tiles that are `depth` stages deep, fitted to an H200.
struct Timing {
  int rows, columns, blocks;  // of a tile; blocks of a multicasting cluster
  double start, tile, stage;
  double fragments;  // added to a stage by rows that come from registers
  double stage_kib;  // from L2 to a multiprocessor
};
inline Timing timing_of(Shape shape) {
  switch (shape) {
    case Shape::kLarge: return {128, 256, 2, 2.4, 1.0, 0.592, 0, 32};
    case Shape::kWide: return {128, 192, 2, 2.2, 0.85, 0.447, 0.06, 28};
    case Shape::kMedium: return {128, 128, 1, 2.1, 0.7, 0.295, 0.12, 32};
    case Shape::kFlat: return {64, 192, 1, 1.6, 0.55, 0.25, 0.1, 32};
    case Shape::kSmall: return {128, 64, 1, 1.9, 0.4, 0.225, 0.13, 24};
    case Shape::kTiny: return {64, 64, 1, 1.5, 0.35, 0.17, 0.056, 16};
    case Shape::kTall144: return {256, 144, 2, 1.4, 2.2, 0.675, 0, 41};
    case Shape::kMedium144: return {128, 144, 2, 2.2, 0.85, 0.345, 0, 25};
    case Shape::kFlat144: return {64, 144, 2, 1.9, 0.9, 0.21, 0, 17};
    case Shape::kWideSplit: return {128, 192, 1, 7.3, 0.75, 0.465, 0.01, 40};
    case Shape::kMediumSplit: return {128, 128, 1, 2.9, 2.5, 0.34, 0.07, 32};
    case Shape::kSmallSplit: return {128, 64, 1, 3.4, 0.06, 0.205, 0.06, 24};
    case Shape::kTinySplit: return {64, 64, 1, 1.8, 0, 0.19, 0, 16};
    case Shape::kLargeStream: return {128, 256, 2, 8.2, 5.4, 0.75, 0.01, 32};
    case Shape::kMediumStream: return {128, 128, 1, 15.9, 0, 0.51, 0.07, 32};
  }
  return {};
}

constexpr double kNoPlan = 1e30;  // microseconds

// How many tiles stream-K cuts: where the last wave is not full that one and the one before.
inline int tiles_to_share(int64_t tiles, int clusters) {
  const int64_t whole = tiles % clusters == 0 ? tiles : (tiles / clusters - 1) * clusters;
  return static_cast<int>(tiles - std::max<int64_t>(0, whole));
}

inline bool is_stream(Shape shape) {
  return shape == Shape::kLargeStream || shape == Shape::kMediumStream;
}

// Workspace for the parts of tiles: at most two of each cluster.
inline int64_t stream_bytes(const Plan& plan) {
  if (!is_stream(plan.shape)) return 0;
  const Timing t = timing_of(plan.shape);
  return aligned(int64_t{2} * sm_count() * t.rows * t.columns * int64_t{sizeof(float)});
}

// Of 16_stream_k.cuh, from readings of its own: blocks are at different depths, so that they share
// less of what is in L2 than those of other kernels, and a stage takes longer.
inline double stream_cost_of(const MatmulArgs& p, const Plan& plan, int multiprocessors) {
  const Timing t = timing_of(plan.shape);
  const int64_t rows = plan.swap ? p.n : p.m, columns = plan.swap ? p.m : p.n;
  const int64_t tiles = p.batch * ceil_div(rows, t.rows * t.blocks) * ceil_div(columns, t.columns);
  const int clusters = multiprocessors / t.blocks;
  const int64_t size = size_of(p.dtype), stages = ceil_div(p.k * size, 128);
  if (tiles_to_share(tiles, clusters) == 0 || tiles * stages > INT_MAX) return kNoPlan;
  const double each = static_cast<double>(tiles) / clusters, parts = std::max(1.0, 1 / each);
  const bool fragments = size == 4 && (plan.swap ? operand_b(p) : operand_a(p)).mn_major();
  const int64_t elements = copies(operand_a(p), p.batch) * p.m * p.k +
                           copies(operand_b(p), p.batch) * p.k * p.n + p.batch * p.m * p.n;
  return t.start + t.tile * (ceil_div(tiles, clusters) + 1) +
         each * stages * (t.stage + fragments * t.fragments) + 0.14 * parts +
         0.03e-6 * elements * size;
}

inline double cost_of(const MatmulArgs& p, const Plan& plan, int multiprocessors) {
  if (is_stream(plan.shape)) return stream_cost_of(p, plan, multiprocessors);
  const Timing t = timing_of(plan.shape);
  const int64_t rows = plan.swap ? p.n : p.m, columns = plan.swap ? p.m : p.n;
  const int64_t blocks = ceil_div(rows, t.rows * t.blocks) * t.blocks * p.batch *
                         ceil_div(columns, t.columns) * plan.cluster;
  // Larger clusters do not fill the device, and those that have to wait are slow to start.
  const int limit = plan.cluster == 8 ? 64 : plan.cluster == 4 ? 96 : multiprocessors;
  if (plan.cluster > 1 && blocks > limit) return kNoPlan;
  const int64_t waves = ceil_div(blocks, multiprocessors);
  const int64_t size = size_of(p.dtype);
  const int64_t stages = ceil_div(ceil_div(p.k * size, 128), plan.cluster);
  const bool fragments = size == 4 && (plan.swap ? operand_b(p) : operand_a(p)).mn_major();
  // Of MN-major columns, 192 are loaded for 144.
  const bool wasted = plan.shape == Shape::kMedium144 && operand_a(p).mn_major();
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
    if (size_of(p.dtype) == 4) {
      // TF32 takes columns K-major only, rows also through registers.
      if (swap ? a_mn : b_mn) (swap ? plan.copy_a : plan.copy_b) = true;
      if ((plan.copy_a || plan.copy_b) && !(a_mn && b_mn)) continue;
      const Operand o = swap ? operand_a(p) : operand_b(p);
      const bool dense = o.depth_stride == o.outer && (!o.batch || o.batch == p.k * o.outer);
      if ((plan.copy_a || plan.copy_b) && (!dense || p.k % 4 != 0)) continue;
    }
    const auto consider = [&](Shape shape, int cluster) {
      if (p.has_full_epilogue() && !has_full_epilogue(shape)) return;
      plan.shape = shape, plan.cluster = cluster;
      plan.cost = cost_of(p, plan, multiprocessors) + copy_cost_of(p, plan);
      if (plan.cost < best.cost) best = plan;
    };
    if (swap && size_of(p.dtype) == 2) {
      if (stream_only || p.has_full_epilogue()) break;
      for (const Shape shape : {Shape::kWide, Shape::kMedium144}) consider(shape, 1);
      if (a_mn) break;  // of the others, with 192 columns loaded, few stages would fit
      for (const Shape shape : {Shape::kTall144, Shape::kFlat144}) consider(shape, 1);
      break;
    }
    // In 16 bits it gains nothing: other tiles keep up where those do not fill the device.
    if (stream_only || size_of(p.dtype) == 4) {
      for (const Shape shape : {Shape::kLargeStream, Shape::kMediumStream}) consider(shape, 1);
    }
    if (stream_only) continue;
    for (const Shape shape :
         {Shape::kLarge, Shape::kWide, Shape::kMedium, Shape::kFlat, Shape::kSmall, Shape::kTiny}) {
      consider(shape, 1);
    }
    for (const int cluster : {2, 4, 8}) {
      if (ceil_div(p.k * size_of(p.dtype), 128) < 2 * cluster) break;  // at least two stages
      for (const Shape shape :
           {Shape::kWideSplit, Shape::kMediumSplit, Shape::kSmallSplit, Shape::kTinySplit}) {
        consider(shape, cluster);
      }
    }
  }
  return best;
}

// The parts of sums that the tiles leave: of columns for every 64 rows of the accumulator.
inline SumParts sum_parts(const MatmulArgs& p, const Plan& plan) {
  const Timing t = timing_of(plan.shape);
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
