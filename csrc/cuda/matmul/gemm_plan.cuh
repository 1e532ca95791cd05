// From MatmulArgs to the tiled kernels: operands, output, tile shape and split of the depth.
#pragma once

#include "cuda/common/gemm_problem.cuh"
#include "launchers/matmul.h"
#include "sum_parts.cuh"

namespace braze::cuda {

// A tile of C is kLarge (128 x 128, in fp64 128 x 64) for speed, kSmall (64 x 64) and kTiny (32 x
// 32) where larger ones would leave multiprocessors idle, kDeep (32 x 32, or 32 x 16 where B is
// depth-major; with kDeepGroups groups of warps that share out the depth) where those do too, kTall
// (128 x 32) or kWide (32 x 128) where C has few columns or rows.
enum class TileShape { kLarge, kSmall, kTiny, kDeep, kTall, kWide };
constexpr int kDeepGroups = 8;

struct GemmPlan {
  TileShape tile;
  int splits;
  bool clustered;     // the blocks of all splits of a tile add up their parts by themselves
  int rows, columns;  // of a tile
};

// What the kernels of one kind offer the plan.
struct GemmKernels {
  int depth;             // of a tile
  int large;             // columns of kLarge; 0: there is none
  bool narrow;           // whether there are kTall and kWide
  bool deep;             // and kDeep
  bool clusters;         // whether splits may form clusters
  int64_t long_product;  // multiply-adds that take about 20 us
};

// Whether the operand's tile is stored, and read from global memory, along the depth.
inline bool depth_major_a(const MatmulArgs& p) { return p.a.col <= p.a.row; }
inline bool depth_major_b(const MatmulArgs& p) { return p.b.row <= p.b.col; }

inline GemmPlan plan_gemm(const MatmulArgs& p, const GemmKernels& kernels) {
  struct Shape {
    TileShape tile;
    int m, n, per_sm;
  };
  constexpr Shape kSmall{TileShape::kSmall, 64, 64, 3}, kTiny{TileShape::kTiny, 32, 32, 4},
      kTall{TileShape::kTall, 128, 32, 3}, kWide{TileShape::kWide, 32, 128, 3},
      kSquare{TileShape::kDeep, 32, 32, 1};
  const Shape kLarge{TileShape::kLarge, 128, kernels.large, 2};
  const Shape kDeep{TileShape::kDeep, 32, depth_major_b(p) ? 16 : 32, 1};
  const int64_t depth_tiles = ceil_div(p.k, kernels.depth);
  const auto blocks = [&](const Shape& s) {
    return p.batch * ceil_div(p.m, s.m) * ceil_div(p.n, s.n);
  };
  // The sum in a cluster costs little, so that its parts may be short.
  const int64_t most_splits =
      std::max<int64_t>(1, kernels.clusters ? std::min<int64_t>(kMaxCluster, depth_tiles / 2)
                                            : std::min<int64_t>(256, depth_tiles / 4));
  const auto fills = [&](const Shape& s) {
    return blocks(s) * most_splits >= int64_t{sm_count()} * 3 / 4;
  };
  // The full epilogue is compiled for two tile shapes only.
  const bool full = p.has_full_epilogue();
  Shape shape = full ? kSmall : kTiny;
  if (!full && kernels.narrow && p.n <= 32 && fills(kTall)) {
    shape = kTall;
  } else if (!full && kernels.narrow && p.m <= 32 && fills(kWide)) {
    shape = kWide;
  } else if (kernels.large && p.m > 64 && p.n > 64 && fills(kLarge)) {
    shape = kLarge;
  } else if (p.m > 32 && p.n > 32 && fills(kSmall)) {
    shape = kSmall;
  } else if (!full && kernels.deep && blocks(kSquare) <= sm_count()) {
    shape = kDeep;
  }
  const int64_t slots = int64_t{sm_count()} * shape.per_sm, count = blocks(shape);
  int64_t splits = 1;
  if (count > 0 && 2 * count <= slots) splits = std::min(slots / count, most_splits);
  if (shape.tile == TileShape::kDeep) {
    splits = std::clamp(ceil_div(depth_tiles, kDeepGroups), int64_t{1}, splits);
    // Clusters of 5 or 7 blocks, each of a whole multiprocessor, would leave many of those idle.
    while (kernels.clusters && (splits & (splits - 1)) != 0) splits &= splits - 1;
  }
  // A second launch pays where it lets blocks be more and shorter than clusters can, and where the
  // product takes long: blocks that need not start together spread more evenly.
  const int64_t more =
      std::min({slots / std::max<int64_t>(1, count), depth_tiles / 4, int64_t{64}});
  const bool long_sums = more >= 4 * splits && depth_tiles >= 12 * splits;
  const bool long_product = more > 1 && p.batch * p.m * p.n * p.k >= kernels.long_product;
  if (kernels.clusters && splits > 1 && (long_sums || long_product)) {
    return {shape.tile, static_cast<int>(more), false, shape.m, shape.n};
  }
  return {shape.tile, static_cast<int>(splits), kernels.clusters, shape.m, shape.n};
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

template <typename T, typename Out = Output<T>>
Out matmul_output(const MatmulArgs& p) {
  Out out{};
  out.data = static_cast<T*>(p.c);
  out.batch = p.m * p.n;
  out.row_stride = p.n;
  out.vectors = p.n % 4 == 0 && is_vec_aligned(out.data);
  out.bias = static_cast<const T*>(p.bias);
  out.relu = p.relu;
  if constexpr (Out::kFull) {
    out.residual = static_cast<const T*>(p.residual);
    out.relu_result = static_cast<const T*>(p.relu_result);
    out.vectors &=
        is_vec_aligned(out.bias) && is_vec_aligned(out.residual) && is_vec_aligned(out.relu_result);
  }
  return out;
}

template <typename T, typename Out = Output<T>>
GemmProblem<MatrixOperand<T>, MatrixOperand<T>, Out> matmul_problem(const MatmulArgs& p) {
  GemmProblem<MatrixOperand<T>, MatrixOperand<T>, Out> problem{};
  problem.a = matrix_operand<T>(p.a, p.batch, p.m, p.k, p.a.row, p.a.col);
  problem.b = matrix_operand<T>(p.b, p.batch, p.n, p.k, p.b.col, p.b.row);
  problem.out = matmul_output<T, Out>(p);
  problem.batch = p.batch;
  problem.m = static_cast<int>(p.m);
  problem.n = static_cast<int>(p.n);
  problem.k = static_cast<int>(p.k);
  return problem;
}

// The parts of sums that the tiles of a plan leave.
inline SumParts sum_parts(const MatmulArgs& p, const GemmPlan& plan) {
  if (plan.splits > 1 && !plan.clustered) {
    return {ceil_div(p.m, kReduceRows), ceil_div(p.n, kReduceColumns)};
  }
  return {ceil_div(p.m, plan.rows) * plan.splits, ceil_div(p.n, plan.columns)};
}

inline void set_plan(const MatmulArgs& p, const GemmPlan& tiling, MatmulPlan* plan) {
  plan->tiling.set(tiling);
  plan->workspace_bytes = sum_parts(p, tiling).bytes(p);
  if (tiling.clustered) return;
  plan->workspace_bytes += p.dtype == DType::kFloat64
                               ? split_bytes<double>(tiling.splits, p.batch, p.m, p.n)
                               : split_bytes<float>(tiling.splits, p.batch, p.m, p.n);
}

// launch_gemm for a kernel whose output is a FullOutput.
template <typename Kernel>
void launch_full(Stream stream, const MatmulArgs& args, const GemmPlan& plan, void* workspace) {
  using T = typename Kernel::T;
  const SumParts parts = sum_parts(args, plan);
  auto problem = matmul_problem<T, FullOutput<T>>(args);
  problem.out.column_parts = parts.columns<acc_t<T>>(args, workspace);
  problem.out.row_parts = parts.rows<acc_t<T>>(args, workspace);
  const bool in_workspace = plan.splits > 1 && !plan.clustered;
  launch_gemm<Kernel>(stream, problem, plan.splits,
                      in_workspace ? static_cast<char*>(workspace) + parts.bytes(args) : nullptr,
                      plan.clustered);
  parts.add_up<T>(stream, args, workspace);
}

// Whether both operands are read 16 bytes at a time.
template <typename T>
bool takes_vectors(const MatmulArgs& p) {
  return matrix_operand<T>(p.a, p.batch, p.m, p.k, p.a.row, p.a.col).vectors &&
         matrix_operand<T>(p.b, p.batch, p.n, p.k, p.b.col, p.b.row).vectors;
}

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

}  // namespace braze::cuda
