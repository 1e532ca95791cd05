// From MatmulArgs to the tiled kernels: operands, output, tile shape and split of the depth.
#pragma once

#include "kernels/common/gemm_problem.cuh"
#include "matmul.h"

namespace braze::cuda {

// A tile of C is kLarge for speed, kSmall where large ones would leave multiprocessors idle, kTall
// or kWide where C has few columns or rows.
enum class TileShape { kLarge, kSmall, kTall, kWide };

struct MatmulPlan {
  TileShape tile;
  int splits;
};

// kTall and kWide are 128 x 32 and 32 x 128.
inline MatmulPlan plan_matmul(const MatmulArgs& p, int depth, bool narrow_tiles, bool large_tiles) {
  const int64_t depth_tiles = ceil_div(p.k, depth);
  TileShape tile = TileShape::kSmall;
  if (narrow_tiles && p.n <= 32) {
    tile = TileShape::kTall;
  } else if (narrow_tiles && p.m <= 32) {
    tile = TileShape::kWide;
  } else if (large_tiles && p.m > 64 && p.n > 64) {
    const int64_t blocks = p.batch * ceil_div(p.m, 128) * ceil_div(p.n, 128);
    if (blocks * std::max<int64_t>(1, depth_tiles / 8) >= sm_count()) tile = TileShape::kLarge;
  }
  const bool large = tile == TileShape::kLarge;
  const int64_t tile_m = large || tile == TileShape::kTall ? 128
                         : tile == TileShape::kWide        ? 32
                                                           : 64;
  const int64_t tile_n = large || tile == TileShape::kWide ? 128
                         : tile == TileShape::kTall        ? 32
                                                           : 64;
  const int64_t blocks = p.batch * ceil_div(p.m, tile_m) * ceil_div(p.n, tile_n);
  return {tile, plan_splits(blocks, depth_tiles, large ? 2 : 3)};
}

template <typename T>
MatrixOperand<T> matrix_operand(const MatrixRef& ref, int64_t batch, int64_t outer, int64_t depth,
                                int64_t outer_stride, int64_t depth_stride) {
  const bool depth_major = depth_stride <= outer_stride;
  const int64_t unit = depth_major ? depth_stride : outer_stride;
  const int64_t other = depth_major ? outer_stride : depth_stride;
  const int64_t extent = depth_major ? depth : outer;
  const bool vectors = unit == 1 && other % kVecWidth<T> == 0 && extent % kVecWidth<T> == 0 &&
                       (batch == 1 || ref.batch % kVecWidth<T> == 0) &&
                       is_vec_aligned(static_cast<const T*>(ref.data));
  return {static_cast<const T*>(ref.data),
          ref.batch,
          outer_stride,
          depth_stride,
          static_cast<int>(outer),
          static_cast<int>(depth),
          vectors};
}

template <typename T>
GemmProblem<MatrixOperand<T>, MatrixOperand<T>> matmul_problem(const MatmulArgs& p) {
  GemmProblem<MatrixOperand<T>, MatrixOperand<T>> problem{};
  problem.a = matrix_operand<T>(p.a, p.batch, p.m, p.k, p.a.row, p.a.col);
  problem.b = matrix_operand<T>(p.b, p.batch, p.n, p.k, p.b.col, p.b.row);
  problem.batch = p.batch;
  problem.m = static_cast<int>(p.m);
  problem.n = static_cast<int>(p.n);
  problem.k = static_cast<int>(p.k);
  Output<T>& out = problem.out;
  out.data = static_cast<T*>(p.c);
  out.batch = p.m * p.n;
  out.rows.inner = FastDiv(p.m);
  out.rows.offset_step[2] = p.n;
  out.columns.inner = FastDiv(p.n);
  out.columns.offset_step[2] = 1;
  out.vectors = p.n % 4 == 0 && is_vec_aligned(out.data);
  out.bias = static_cast<const T*>(p.bias);
  out.relu = p.relu;
  return problem;
}

// Whether the operand's tile is stored, and read from global memory, along the depth.
inline bool depth_major_a(const MatmulArgs& p) { return p.a.col <= p.a.row; }
inline bool depth_major_b(const MatmulArgs& p) { return p.b.row <= p.b.col; }

// f(std::bool_constant for A, std::bool_constant for B)
template <typename F>
void dispatch_majors(const MatmulArgs& p, F&& f) {
  if (depth_major_a(p)) {
    if (depth_major_b(p)) return f(std::true_type{}, std::true_type{});
    return f(std::true_type{}, std::false_type{});
  }
  if (depth_major_b(p)) return f(std::false_type{}, std::true_type{});
  f(std::false_type{}, std::false_type{});
}

// The kernels, one dtype a file.
int64_t simt_matmul_workspace_bytes(const MatmulArgs& args);
void simt_matmul(Stream stream, const MatmulArgs& args, void* workspace);
void mma_matmul_bf16(Stream stream, const MatmulArgs& args, void* workspace);
void mma_matmul_fp16(Stream stream, const MatmulArgs& args, void* workspace);
void mma_matmul_tf32(Stream stream, const MatmulArgs& args, void* workspace);

}  // namespace braze::cuda
