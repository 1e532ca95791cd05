// Host side of 14_split_fp32.cuh and 17_scaled_fp16.cuh.
#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/matmul/kernels.h"
#include "hopper.h"
#include "launch.cuh"
#include "split.cuh"
#include "cuda/common/gemm_problem.cuh"
#include "cuda/matmul/obstacles.h"

namespace braze::cuda::hopper {
namespace {

struct SplitPlan {
  // Bytes of workspace. `flags`: infinities and NaN, and largest magnitudes, of A and of B.
  int64_t sums, a_special, b_special, a_largest, b_largest, a_planes, b_planes, partial;
  int splits;
  double microseconds;  // estimated
  int64_t flags() const { return a_special + b_special + a_largest + b_largest; }
  int64_t total() const { return sums + flags() + a_planes + b_planes + partial; }
};

// The sums of the second launch, which has the full epilogue; the product leaves it to that.
SumParts sum_parts(const MatmulArgs& p) {
  return {ceil_div(p.m, kReduceRows), ceil_div(p.n, kReduceColumns)};
}

int64_t inner(const Operand& o, const MatmulArgs& p) { return o.mn_major() ? o.outer : p.k; }
int64_t outer(const Operand& o, const MatmulArgs& p) { return o.mn_major() ? p.k : o.outer; }

int64_t plane_elements(const Operand& o, const MatmulArgs& p) {
  return copies(o, p.batch) * outer(o, p) * padded(inner(o, p));
}

template <typename Tile>
void set_splits(const MatmulArgs& p, SplitPlan& plan) {
  const int64_t tiles = p.batch * ceil_div(p.m, 256) * 2 * ceil_div(p.n, 128);
  const SplitDepth depth =
      choose_splits(tiles, ceil_div(p.k, Tile::kDepth), 16, p.batch * p.m * p.n,
                    Tile::kScaled ? kScaledStage : kSplitStage);
  const int64_t elements = plane_elements(operand_a(p), p) + plane_elements(operand_b(p), p);
  plan.splits = depth.splits;
  // Columns' largest magnitudes are looked for row by row, of many short rows slowly.
  const int64_t rows = (operand_a(p).mn_major() + operand_b(p).mn_major()) * p.k;
  plan.microseconds = depth.microseconds + (Tile::kScaled ? 14 + 3.1e-6 * elements + 1.9e-3 * rows
                                                          : 11 + 5e-6 * elements);
}

template <typename Tile>
SplitPlan make_split_plan(const MatmulArgs& p) {
  const Operand a = operand_a(p), b = operand_b(p);
  SplitPlan plan{};
  plan.a_special = aligned(copies(a, p.batch) * ceil_div(p.m, 128) * 4);
  plan.b_special = aligned(copies(b, p.batch) * ceil_div(p.n, 128) * 4);
  if (Tile::kScaled) {
    plan.a_largest = aligned(copies(a, p.batch) * p.m * 4);
    plan.b_largest = aligned(copies(b, p.batch) * p.n * 4);
  }
  plan.a_planes = aligned(Tile::kPlanes * plane_elements(a, p) * 2);
  plan.b_planes = aligned(Tile::kPlanes * plane_elements(b, p) * 2);
  set_splits<Tile>(p, plan);
  plan.sums = sum_parts(p).bytes(p);
  const bool in_two_launches = plan.splits > 1 || p.has_full_epilogue();
  plan.partial = in_two_launches ? plan.splits * p.batch * p.m * p.n * 4 : 0;
  return plan;
}

// largest: nullptr of parts that are not scaled.
Parts parts_of(const Operand& o, const MatmulArgs& p, void* special, void* largest, void* planes) {
  const auto* const data = static_cast<const float*>(o.data);
  const int64_t row_stride = o.mn_major() ? o.depth_stride : o.outer_stride;
  return {data,
          o.batch,
          row_stride,
          copies(o, p.batch),
          outer(o, p),
          inner(o, p),
          padded(inner(o, p)),
          planes,
          static_cast<int*>(special),
          static_cast<int>(ceil_div(o.outer, 128)),
          o.mn_major(),
          is_vec_aligned(data) && row_stride % 4 == 0 && o.batch % 4 == 0,
          128,
          !largest       ? Scaled::kNot
          : o.mn_major() ? Scaled::kColumns
                         : Scaled::kRows,
          static_cast<uint32_t*>(largest)};
}

SplitOperand split_operand(const Operand& o, const Parts& parts) {
  return {parts.data,     o.batch,       o.outer_stride,
          o.depth_stride, parts.special, parts.blocks,
          parts.largest,  o.outer,       1};
}

template <typename Tile>
CUtensorMap planes_map(const Operand& o, const MatmulArgs& p, const void* planes, int outer_box) {
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const int64_t ld = padded(inner(o, p)), rows = outer(o, p), batch = copies(o, p.batch);
  return make_tensor_map(
      Tile::kScaled ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, planes,
      {u(inner(o, p)), u(rows), u(batch), Tile::kPlanes},
      {u(ld) * 2, u(ld * rows) * 2, u(ld * rows * batch) * 2},
      {64, static_cast<uint32_t>(o.mn_major() ? 64 : outer_box), 1, 1}, kSwizzle);
}

template <typename Tile, int kRowMajor, int kColumnMajor>
void launch_split(Stream stream, const CUtensorMap& row_map, const CUtensorMap& column_map,
                  const SplitArgs& args) {
  constexpr auto kKernel = split_kernel<Tile, kRowMajor, kColumnMajor>;
  launch_persistent<Tile, kKernel>(stream, args.tiles, true, row_map, column_map, args);
}

template <typename Tile>
void plan_parts(const MatmulArgs& p, MatmulPlan* plan) {
  const SplitPlan tiling = make_split_plan<Tile>(p);
  plan->tiling.set(tiling);
  plan->workspace_bytes = tiling.total();
}

template <typename Tile>
void run_parts(Stream stream, const MatmulArgs& p, const MatmulPlan& planned, void* workspace) {
  const SplitPlan& plan = planned.tiling.get<SplitPlan>();
  const Operand a = operand_a(p), b = operand_b(p);
  char* const special = static_cast<char*>(workspace) + plan.sums;
  char* const largest = special + plan.a_special + plan.b_special;
  char* const a_planes = special + plan.flags();
  char* const b_planes = a_planes + plan.a_planes;
  cudaMemsetAsync(special, 0, plan.flags(), as_cuda(stream));

  const Parts a_parts = parts_of(a, p, special, Tile::kScaled ? largest : nullptr, a_planes);
  const Parts b_parts = parts_of(b, p, special + plan.a_special,
                                 Tile::kScaled ? largest + plan.a_largest : nullptr, b_planes);
  launch_split_planes(stream, a_parts, b_parts);

  SplitArgs args{};
  args.row = split_operand(a, a_parts);
  args.column = split_operand(b, b_parts);
  args.depth = static_cast<int>(p.k), args.batch = static_cast<int>(p.batch);
  args.splits = plan.splits, args.by_splits = FastDiv(plan.splits);
  if (plan.partial) args.partial = reinterpret_cast<float*>(b_planes + plan.b_planes);
  set_tiles<Tile>(args, p, a, b, plan.splits);
  const CUtensorMap row_map = planes_map<Tile>(a, p, a_planes, Tile::kRows);
  const CUtensorMap column_map = planes_map<Tile>(b, p, b_planes, Tile::kColumns / Tile::kCluster);
  if (a.mn_major()) {
    if (b.mn_major()) {
      launch_split<Tile, 1, 1>(stream, row_map, column_map, args);
    } else {
      launch_split<Tile, 1, 0>(stream, row_map, column_map, args);
    }
  } else {
    if (b.mn_major()) {
      launch_split<Tile, 0, 1>(stream, row_map, column_map, args);
    } else {
      launch_split<Tile, 0, 0>(stream, row_map, column_map, args);
    }
  }
  const int m = static_cast<int>(p.m), n = static_cast<int>(p.n);
  if (p.has_full_epilogue()) {
    const SumParts parts = sum_parts(p);
    auto out = matmul_output<float, FullOutput<float>>(p);
    out.column_parts = parts.columns<float>(p, workspace);
    out.row_parts = parts.rows<float>(p, workspace);
    launch_gemm_reduce<float>(stream, args.partial, out, p.batch, m, n, plan.splits);
    parts.add_up<float>(stream, p, workspace);
  } else if (plan.splits > 1) {
    launch_gemm_reduce<float>(stream, args.partial, matmul_output<float>(p), p.batch, m, n,
                              plan.splits);
  }
}

}  // namespace

const char* split_obstacle(const MatmulArgs& p) {
  if (const char* why = fp32_obstacle(p)) return why;
  if (!has_wgmma()) return kNeedsHopper;
  if (p.k == 0) return "there is nothing to multiply";
  const Operand a = operand_a(p), b = operand_b(p);
  for (const Operand& o : {a, b}) {
    if (o.depth_stride != 1 && o.outer_stride != 1) return "its operands have one stride of 1";
  }
  return nullptr;
}

bool scaled_preferred(const MatmulArgs& p) {
  constexpr int64_t kMaxWorkspace = int64_t{1} << 30;
  if (p.k < 256) return false;  // of short sums the parts' own error shows
  const SplitPlan plan = make_split_plan<ScaledTile<2>>(p);
  return plan.microseconds < simt_microseconds(p) && plan.total() <= kMaxWorkspace;
}

double scaled_microseconds(const MatmulArgs& p) {
  return make_split_plan<ScaledTile<2>>(p).microseconds;
}

bool scaled_beats_cublas(const MatmulArgs& p) {
  const double products = static_cast<double>(p.batch) * p.m * p.n * p.k;
  return scaled_microseconds(p) < 0.97 * (7 + products / 24e6);
}

void plan_split(const MatmulArgs& p, MatmulPlan* plan) { plan_parts<SplitTile<2>>(p, plan); }
void plan_scaled(const MatmulArgs& p, MatmulPlan* plan) { plan_parts<ScaledTile<2>>(p, plan); }

void run_split(Stream stream, const MatmulArgs& p, const MatmulPlan& plan, void* workspace) {
  run_parts<SplitTile<2>>(stream, p, plan, workspace);
}
void run_scaled(Stream stream, const MatmulArgs& p, const MatmulPlan& plan, void* workspace) {
  run_parts<ScaledTile<2>>(stream, p, plan, workspace);
}

}  // namespace braze::cuda::hopper
