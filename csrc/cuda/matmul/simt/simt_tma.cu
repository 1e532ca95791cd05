// Launches simt_tma.cuh, behind transposed copies of the operands that are K-major.
#include "simt_tma.cuh"

#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/matmul/hopper/hopper.h"
#include "cuda/matmul/hopper/plan.cuh"
#include "launchers/transpose.h"
#include "cuda/matmul/obstacles.h"

namespace braze::cuda::hopper {
namespace {

// Whether the outer index is innermost in memory; the kernel wants it so.
bool outer_first(const Operand& o) { return o.outer_stride == 1 && o.depth_stride >= o.outer; }

bool dense_rows(const Operand& o, int64_t k) {
  return o.depth_stride == 1 && o.outer_stride == k && (!o.batch || o.batch == o.outer * k);
}

const char* operand_obstacle(const Operand& o, int64_t k) {
  if (outer_first(o)) {
    return tma_takes(o, sizeof(float)) ? nullptr : "operands are aligned to 16 bytes";
  }
  return dense_rows(o, k) && o.outer % 4 == 0
             ? nullptr
             : "operands along the depth have no gaps, and a multiple of 4 rows or columns";
}

int64_t copy_bytes(const Operand& o, const MatmulArgs& p) {
  return outer_first(o)
             ? 0
             : aligned(copies(o, p.batch) * o.outer * p.k * static_cast<int64_t>(sizeof(float)));
}

// The operand as the kernel takes it, transposed into `workspace` if need be.
Operand prepared(Stream stream, Operand o, const MatmulArgs& p, void* workspace) {
  if (outer_first(o)) return o;
  transpose_copy(stream, p.dtype, o.data, workspace, copies(o, p.batch), o.outer, p.k);
  o.data = workspace;
  o.batch = o.batch ? o.outer * p.k : 0;
  o.outer_stride = 1, o.depth_stride = o.outer;
  return o;
}

CUtensorMap tile_map(const Operand& o, const MatmulArgs& p, int box) {
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const uint64_t row = u(o.depth_stride) * sizeof(float);
  const uint64_t matrix = o.batch ? u(o.batch) * sizeof(float) : row * u(p.k);
  return make_tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, o.data,
                         {u(o.outer), u(p.k), u(copies(o, p.batch)), 1}, {row, matrix, matrix},
                         {static_cast<uint32_t>(box), TmaTile::kDepth, 1, 1},
                         box * static_cast<int>(sizeof(float)));
}

}  // namespace

const char* simt_tma_obstacle(const MatmulArgs& p) {
  if (const char* why = fp32_obstacle(p)) return why;
  if (!has_wgmma()) return kNeedsHopper;
  if (p.k == 0) return "there is nothing to multiply";
  const char* why = operand_obstacle(operand_a(p), p.k);
  return why ? why : operand_obstacle(operand_b(p), p.k);
}

bool simt_tma_preferred(const MatmulArgs& p) {
  // Two blocks on a multiprocessor want a tile each, and transposing costs two launches.
  const int64_t tiles = p.batch * ceil_div(p.m, TmaTile::kM) * ceil_div(p.n, TmaTile::kN);
  return tiles >= 2 * sm_count() && p.k >= 128;
}

void plan_simt_tma(const MatmulArgs& p, MatmulPlan* plan) {
  plan->workspace_bytes = copy_bytes(operand_a(p), p) + copy_bytes(operand_b(p), p);
}

void run_simt_tma(Stream stream, const MatmulArgs& args, const MatmulPlan&, void* workspace) {
  char* const a_copy = static_cast<char*>(workspace);
  char* const b_copy = a_copy + copy_bytes(operand_a(args), args);
  const Operand a = prepared(stream, operand_a(args), args, a_copy);
  const Operand b = prepared(stream, operand_b(args), args, b_copy);
  MatmulArgs p = args;
  p.a = {a.data, a.batch, a.outer_stride, a.depth_stride};
  p.b = {b.data, b.batch, b.depth_stride, b.outer_stride};
  TmaProblem problem = matmul_problem<float>(p);
  const unsigned blocks = problem.set_tiles<TmaTile::kM, TmaTile::kN, TmaTile::kDepth>(1);
  constexpr int kBytes = kTmaSharedBytes<TmaTile>;
  static std::atomic<uint64_t> done{0};
  allow_shared_memory(reinterpret_cast<const void*>(simt_tma_kernel<TmaTile>), kBytes, done);
  launch_early(simt_tma_kernel<TmaTile>, blocks, TmaTile::kThreads, kBytes, stream,
               tile_map(a, p, TmaTile::kM), tile_map(b, p, TmaTile::kN), problem);
  check_launch("matmul simt_tma");
}

}  // namespace braze::cuda::hopper
