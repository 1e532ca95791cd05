// The Hopper kernel: which products it takes, and how.
#include "hopper.h"

#include "plan.cuh"
#include "launchers/transpose.h"
#include "cuda/matmul/obstacles.h"

namespace braze::cuda::hopper {

namespace {

int64_t copy_bytes(const MatmulArgs& p, const Plan& plan) {
  const Operand o = plan.copy_a ? operand_a(p) : operand_b(p);
  if (!plan.copy_a && !plan.copy_b) return 0;
  return aligned(copies(o, p.batch) * o.outer * p.k * size_of(p.dtype));
}

// What tiles leave; a copied operand comes behind it.
int64_t tile_bytes(const MatmulArgs& p, const Plan& plan) {
  return sum_parts(p, plan).bytes(p) + stream_bytes(plan);
}

void set_plan(const MatmulArgs& p, const Plan& tiling, MatmulPlan* plan) {
  plan->tiling.set(tiling);
  plan->workspace_bytes = tile_bytes(p, tiling) + copy_bytes(p, tiling);
}

}  // namespace

const char* obstacle(const MatmulArgs& p) {
  if (const char* why = mma_obstacle(p)) return why;
  if (!has_wgmma()) return kNeedsHopper;
  if (p.k == 0) return "there is nothing to multiply";
  const Operand a = operand_a(p), b = operand_b(p);
  const int64_t size = size_of(p.dtype);
  if (!tma_takes(a, size) || !tma_takes(b, size)) {
    return "its operands have one stride of 1, others of multiples of 16 bytes, and are aligned so";
  }
  if (a.mn_major() && b.mn_major() && size == 4 && make_plan(p).cost == kNoPlan) {
    return "TF32 operands without a stride of 1 along the depth, and not dense or of odd depth";
  }
  return nullptr;
}

const char* stream_k_obstacle(const MatmulArgs& p) {
  if (const char* why = obstacle(p)) return why;
  return make_plan(p, true).cost == kNoPlan ? "its tiles fill all multiprocessors" : nullptr;
}

// Against mma_sync, measured on an H200.
bool preferred(const MatmulArgs& p, bool deep_tiles) {
  const int64_t depth_bytes = p.k * size_of(p.dtype), products = p.batch * p.m * p.n * p.k;
  const int64_t narrow = std::min(p.m, p.n);
  if (deep_tiles) {
    if (narrow < 16 || depth_bytes < 6144) return false;
  } else {
    // Tiles are at least 64 x 64, a stage is 128 bytes deep, start-up takes 2 us, and storing
    // results without TMA another.
    const int64_t few = int64_t{1} << (size_of(p.dtype) == 2 && !tma_stores(p) ? 25 : 24);
    if (narrow < 32 || depth_bytes < 128 || products < few) return false;
  }
  // mma_sync takes what is not K-major as it is.
  const bool copies = size_of(p.dtype) == 4 && operand_a(p).mn_major() && operand_b(p).mn_major();
  return !copies || make_plan(p).cost < (products < int64_t{1} << 26 ? 4 : 6 + products / 4.6e7);
}

bool preferred_for_result(const MatmulArgs& p) {
  // Rows of the depth that are not whole sectors of 32 bytes take TMA longer. The full epilogue's
  // tiles are large: few results do not fill the device.
  const bool soon = p.k % 16 == 0 && !p.has_full_epilogue();
  return size_of(p.dtype) == 2 && p.batch * p.m * p.n >= int64_t{1} << (soon ? 20 : 22) &&
         std::min(p.m, p.n) >= 32 && std::max(p.m, p.n) >= 64 && tma_stores(p);
}

void plan(const MatmulArgs& p, MatmulPlan* plan) { set_plan(p, make_plan(p), plan); }

void plan_stream_k(const MatmulArgs& p, MatmulPlan* plan) { set_plan(p, make_plan(p, true), plan); }

void run(Stream stream, const MatmulArgs& args, const MatmulPlan& planned, void* workspace) {
  const Plan& plan = planned.tiling.get<Plan>();
  MatmulArgs p = args;
  if (plan.copy_a || plan.copy_b) {
    void* const copy = static_cast<char*>(workspace) + tile_bytes(args, plan);
    MatrixRef& ref = plan.copy_a ? p.a : p.b;
    const Operand o = plan.copy_a ? operand_a(p) : operand_b(p);
    transpose_copy(stream, p.dtype, ref.data, copy, copies(o, p.batch), p.k, o.outer);
    ref.data = copy;
    ref.batch = o.batch ? p.k * o.outer : 0;
    (plan.copy_a ? ref.row : ref.col) = p.k;
    (plan.copy_a ? ref.col : ref.row) = 1;
  }
  const SumParts parts = sum_parts(p, plan);
  dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      run_bf16(stream, p, plan, workspace);
    } else if constexpr (std::is_same_v<T, __half>) {
      run_fp16(stream, p, plan, workspace);
    } else {
      run_tf32(stream, p, plan, workspace);
    }
    parts.add_up<T>(stream, p, workspace);
  });
}

}  // namespace braze::cuda::hopper
