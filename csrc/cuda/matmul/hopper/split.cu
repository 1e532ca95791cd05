// Host side of 14_split_fp32.cuh.
#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/matmul/kernels.h"
#include "hopper.h"
#include "launch.cuh"
#include "split.cuh"
#include "cuda/common/gemm_problem.cuh"
#include "cuda/matmul/obstacles.h"

namespace braze::cuda::hopper {
namespace {

using Shape128 = SplitTile<2>;

struct SplitPlan {
  int64_t sums, a_special, b_special, a_planes, b_planes, partial;  // bytes of workspace
  int splits;
  double microseconds;  // estimated
  int64_t total() const { return sums + a_special + b_special + a_planes + b_planes + partial; }
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

void set_splits(const MatmulArgs& p, SplitPlan& plan) {
  const int64_t tiles = p.batch * ceil_div(p.m, 256) * 2 * ceil_div(p.n, 128);
  const SplitDepth depth =
      choose_splits(tiles, ceil_div(p.k, Shape128::kDepth), 16, p.batch * p.m * p.n);
  const int64_t elements = plane_elements(operand_a(p), p) + plane_elements(operand_b(p), p);
  plan.splits = depth.splits;
  plan.microseconds = depth.microseconds + 11 + 5e-6 * elements;
}

SplitPlan make_split_plan(const MatmulArgs& p) {
  const Operand a = operand_a(p), b = operand_b(p);
  SplitPlan plan{};
  plan.a_special = aligned(copies(a, p.batch) * ceil_div(p.m, 128) * 4);
  plan.b_special = aligned(copies(b, p.batch) * ceil_div(p.n, 128) * 4);
  plan.a_planes = aligned(kPlanes * plane_elements(a, p) * 2);
  plan.b_planes = aligned(kPlanes * plane_elements(b, p) * 2);
  set_splits(p, plan);
  plan.sums = sum_parts(p).bytes(p);
  const bool in_two_launches = plan.splits > 1 || p.has_full_epilogue();
  plan.partial = in_two_launches ? plan.splits * p.batch * p.m * p.n * 4 : 0;
  return plan;
}

Parts parts_of(const Operand& o, const MatmulArgs& p, void* special, void* planes) {
  const auto* const data = static_cast<const float*>(o.data);
  const int64_t row_stride = o.mn_major() ? o.depth_stride : o.outer_stride;
  return {data,
          o.batch,
          row_stride,
          copies(o, p.batch),
          outer(o, p),
          inner(o, p),
          padded(inner(o, p)),
          static_cast<__nv_bfloat16*>(planes),
          static_cast<int*>(special),
          static_cast<int>(ceil_div(o.outer, 128)),
          o.mn_major(),
          is_vec_aligned(data) && row_stride % 4 == 0 && o.batch % 4 == 0};
}

SplitOperand split_operand(const Operand& o, const Parts& parts) {
  return {parts.data, o.batch, o.outer_stride, o.depth_stride, parts.special, parts.blocks};
}

CUtensorMap planes_map(const Operand& o, const MatmulArgs& p, const void* planes, int outer_box) {
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const int64_t ld = padded(inner(o, p)), rows = outer(o, p), batch = copies(o, p.batch);
  return make_tensor_map(
      CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, planes, {u(inner(o, p)), u(rows), u(batch), kPlanes},
      {u(ld) * 2, u(ld * rows) * 2, u(ld * rows * batch) * 2},
      {64, static_cast<uint32_t>(o.mn_major() ? 64 : outer_box), 1, 1}, kSwizzle);
}

template <int kRowMajor, int kColumnMajor>
void launch_split(Stream stream, const CUtensorMap& row_map, const CUtensorMap& column_map,
                  const SplitArgs& args) {
  using Tile = Shape128;
  constexpr auto kKernel = split_kernel<Tile, kRowMajor, kColumnMajor>;
  launch_persistent<Tile, kKernel>(stream, args.tiles, true, row_map, column_map, args);
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

bool split_preferred(const MatmulArgs& p) {
  constexpr int64_t kMaxWorkspace = int64_t{1} << 30;
  if (p.k < 256) return false;  // for short sums the parts' own error shows
  const SplitPlan plan = make_split_plan(p);
  return plan.microseconds < simt_microseconds(p) && plan.total() <= kMaxWorkspace;
}

void plan_split(const MatmulArgs& p, MatmulPlan* plan) {
  const SplitPlan tiling = make_split_plan(p);
  plan->tiling.set(tiling);
  plan->workspace_bytes = tiling.total();
}

void run_split(Stream stream, const MatmulArgs& p, const MatmulPlan& planned, void* workspace) {
  using Tile = Shape128;
  const SplitPlan& plan = planned.tiling.get<SplitPlan>();
  const Operand a = operand_a(p), b = operand_b(p);
  char* const special = static_cast<char*>(workspace) + plan.sums;
  char* const a_planes = special + plan.a_special + plan.b_special;
  char* const b_planes = a_planes + plan.a_planes;
  cudaMemsetAsync(special, 0, plan.a_special + plan.b_special, as_cuda(stream));

  const Parts a_parts = parts_of(a, p, special, a_planes);
  const Parts b_parts = parts_of(b, p, special + plan.a_special, b_planes);
  launch_split_planes(stream, a_parts, b_parts);

  SplitArgs args{};
  args.row = split_operand(a, a_parts);
  args.column = split_operand(b, b_parts);
  args.depth = static_cast<int>(p.k), args.batch = static_cast<int>(p.batch);
  args.splits = plan.splits, args.by_splits = FastDiv(plan.splits);
  if (plan.partial) args.partial = reinterpret_cast<float*>(b_planes + plan.b_planes);
  set_tiles<Tile>(args, p, a, b, plan.splits);
  const CUtensorMap row_map = planes_map(a, p, a_planes, Tile::kRows);
  const CUtensorMap column_map = planes_map(b, p, b_planes, Tile::kColumns / Tile::kCluster);
  if (a.mn_major()) {
    if (b.mn_major()) {
      launch_split<1, 1>(stream, row_map, column_map, args);
    } else {
      launch_split<1, 0>(stream, row_map, column_map, args);
    }
  } else {
    if (b.mn_major()) {
      launch_split<0, 1>(stream, row_map, column_map, args);
    } else {
      launch_split<0, 0>(stream, row_map, column_map, args);
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

}  // namespace braze::cuda::hopper
