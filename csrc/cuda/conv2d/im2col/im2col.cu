#include "im2col.h"

#include <climits>

#include "launch.cuh"

namespace braze::cuda::im2col {
namespace {

// The tile whose waves are done first, by the matrix product's times (matmul/hopper/plan.cuh).
int choose_tile(const MatmulArgs& p) {
  const int multiprocessors = sm_count();
  const int64_t stages = p.k * size_of(p.dtype) / hopper::kSwizzle;
  int best = -1;
  double least = hopper::kNoPlan;
  for (int i = 0; i < hopper::kTileKindCount; ++i) {
    const hopper::TileKind& t = hopper::kTileKinds[i];
    if (!has_tile(t)) continue;
    const int64_t tiles = ceil_div(p.m, t.rows * t.blocks) * t.blocks * ceil_div(p.n, t.columns);
    const double cost = t.start + ceil_div(tiles, multiprocessors) * (t.tile + stages * t.stage);
    if (cost < least) best = i, least = cost;
  }
  return best;
}

// The same for the weight gradient, whose blocks all sum for as long.
int choose_wgrad_tile(const MatmulArgs& p) {
  const bool swap = size_of(p.dtype) == 4;
  const int64_t rows = swap ? p.n : p.m, columns = swap ? p.m : p.n;
  int best = 0;
  double least = hopper::kNoPlan;
  for (int i = 0; i < kWgradTileCount; ++i) {
    const WgradTile& t = kWgradTiles[i];
    const int64_t tiles = ceil_div(rows, kWgradRows * t.blocks) * ceil_div(columns, t.columns);
    const double cost = static_cast<double>(tiles) * t.blocks * t.stage;
    if (cost < least) best = i, least = cost;
  }
  return best;
}

bool is_dense(const Tensor4dRef& t, int64_t c, int64_t h, int64_t w) {
  return t.c == 1 && t.w == c && t.h == w * c && t.n == h * w * c;
}

}  // namespace

const char* obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (!has_wgmma()) return "it needs a GPU of compute capability 9.0, and code made for sm_90a";
  if (s.dtype == DType::kFloat64) return "it takes float32 (as TF32), bfloat16 and float16";
  if (s.dtype == DType::kFloat32 && !s.allow_tf32) {
    return "float32 inputs would be rounded to TF32, which is not allowed";
  }
  const bool dgrad = args.pass == Conv2dPass::kDgrad, wgrad = args.pass == Conv2dPass::kWgrad;
  if (const char* why = window_obstacle(args)) return why;
  const Tensor4dRef &w = wgrad ? args.out : args.other, &result = wgrad ? args.other : args.out;
  if (!is_dense(w, s.c, s.r, s.s) || s.c * size_of(s.dtype) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(w.data) % 16 != 0) {
    return "its weights are dense, channels last, a multiple of 16 bytes of them, and aligned so";
  }
  const Pass pass = pass_of(args);
  if (!is_dense(result, pass.filters, dgrad ? s.h : s.p, dgrad ? s.w : s.q) ||
      (dgrad && reinterpret_cast<uintptr_t>(result.data) % 16 != 0)) {
    return "its result is dense, channels last";
  }
  if (wgrad) {
    const int64_t unit = s.dtype == DType::kFloat32 ? pass.pixels : pass.filters;
    if (unit * size_of(s.dtype) % 16 != 0 || reinterpret_cast<uintptr_t>(result.data) % 16 != 0) {
      return "its weight gradient takes a multiple of 8 filters, or of 4 pixels in TF32, aligned "
             "to 16 bytes";
    }
    const int64_t tiles = pass.taps * ceil_div(s.k, 64) * ceil_div(s.c, 64);
    if (tiles * ceil_div(pass.pixels, 32) > INT_MAX) return "it counts stages with 31 bits";
  }
  return nullptr;
}

void plan(const Conv2dArgs& args, Conv2dPlan* plan) {
  if (args.pass == Conv2dPass::kWgrad) {
    plan->variant = choose_wgrad_tile(gradient_matrices(args));
    plan->workspace_bytes = wgrad_workspace_bytes(args, kWgradTiles[plan->variant]);
    return;
  }
  plan->variant = choose_tile(result_matrix(args, pass_of(args)));
  plan->workspace_bytes = weight_bytes(args);
}

void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  switch (args.shape.dtype) {
    case DType::kBFloat16: return run_bf16(stream, args, plan.variant, workspace);
    case DType::kFloat16: return run_fp16(stream, args, plan.variant, workspace);
    case DType::kFloat32: return run_tf32(stream, args, plan.variant, workspace);
    case DType::kFloat64: break;  // an obstacle
  }
}

}  // namespace braze::cuda::im2col
