#include "im2col.h"

#include <climits>

#include "cuda/conv2d/halo/tiles.cuh"
#include "launch.cuh"

namespace braze::cuda::im2col {
namespace {

// What a Conv2dTail adds to a tile, in microseconds on an H200: with wide ones registers run out.
double tail_of(const hopper::TileKind& t) {
  return t.columns > 192 ? 2.5 : t.columns > 128 ? 1.0 : 0.1;
}

// The tile whose waves are done first, by the matrix product's times (matmul/hopper/plan.cuh).
int choose_tile(const MatmulArgs& p, bool (*has)(const hopper::TileKind&) = has_tile,
                bool has_tail = false) {
  const int multiprocessors = sm_count();
  const int64_t stages = p.k * size_of(p.dtype) / hopper::kSwizzle;
  int best = -1;
  double least = hopper::kNoPlan;
  for (int i = 0; i < hopper::kTileKindCount; ++i) {
    const hopper::TileKind& t = hopper::kTileKinds[i];
    if (!has(t)) continue;
    const int64_t tiles = ceil_div(p.m, t.rows * t.blocks) * t.blocks * ceil_div(p.n, t.columns);
    const double tile = t.tile + stages * t.stage + (has_tail ? tail_of(t) : 0);
    const double cost = t.start + ceil_div(tiles, multiprocessors) * tile;
    if (cost < least) best = i, least = cost;
  }
  return best;
}

// The same for the weight gradient, whose blocks all sum for as long.
hopper::Plan choose_wgrad_plan(const MatmulArgs& p) {
  hopper::Plan best{};
  best.cost = hopper::kNoPlan;
  for (hopper::Plan plan{}; plan.tile < hopper::kTileKindCount; ++plan.tile) {
    if (!has_wgrad_tile(plan.kind())) continue;
    plan.cost = hopper::stream_cost_of(p, plan, sm_count());
    if (plan.cost < best.cost) best = plan;
  }
  return best;
}

bool is_dense(const Tensor4dRef& t, int64_t c, int64_t h, int64_t w) {
  return t.c == 1 && t.w == c && t.h == w * c && t.n == h * w * c;
}

bool is_aligned(const Tensor4dRef& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

bool in_parts(const Conv2dShape& s) { return s.dtype == DType::kFloat32 && !s.allow_tf32; }

// Of the tensors as TMA reads and stores them.
const char* alignment_obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const int64_t size = size_of(s.dtype);
  const auto whole = [&](int64_t count) { return count * size % 16 == 0; };
  if (!halo::tma_takes(s.dtype, args.gathered) || !whole(s.c) || !is_aligned(args.other) ||
      !is_aligned(args.out)) {
    return "it takes channels-last tensors, aligned to 16 bytes, with a multiple of 16 bytes of "
           "channels";
  }
  if (args.pass == Conv2dPass::kWgrad && !whole(s.k)) {
    return "its weight gradient takes a multiple of 16 bytes of filters";
  }
  return nullptr;
}

// Rows of shared memory that a pixel of so many channels takes.
int64_t rows_of_pixel(const Conv2dShape& s, int64_t channels) {
  return ceil_div(channels * size_of(s.dtype), kRowBytes);
}

// Whether the pixels that a filter's row meets are taken for one pixel of as many channels: they
// lie side by side, and TMA minds no pixels that overlap. A filter of 8 x 8 taps of 4 channels is
// one of 8 taps of 32 channels then. Where that makes fewer rows of shared memory, and nothing is
// padded, since zeros come from outside of the image's rows only.
bool goes_by_rows(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& x = args.gathered;
  if (args.pass == Conv2dPass::kDgrad || in_parts(s) || s.groups != 1) return false;
  if (x.c != 1 || x.w != s.c || s.stride_w * s.c * size_of(s.dtype) % 16 != 0) return false;
  if (s.pad_w != 0 || s.dilation_w != 1 || (s.q - 1) * s.stride_w + s.s > s.w) return false;
  return rows_of_pixel(s, s.s * s.c) < s.s * rows_of_pixel(s, s.c);
}

// The same pass by rows, if it goes so.
Conv2dArgs by_rows(const Conv2dArgs& args) {
  if (!goes_by_rows(args)) return args;
  const Conv2dShape& s = args.shape;
  Conv2dArgs taken = args;
  taken.shape.c = s.s * s.c, taken.shape.s = 1;
  taken.shape.w = s.q, taken.shape.stride_w = 1;
  taken.gathered.w = s.stride_w * s.c;
  Tensor4dRef& w = args.pass == Conv2dPass::kWgrad ? taken.out : taken.other;
  if (w.w == s.c) w.w = taken.shape.c;  // else not dense: an obstacle
  return taken;
}

}  // namespace

const char* obstacle(const Conv2dArgs& given) {
  const Conv2dArgs args = by_rows(given);
  const Conv2dShape& s = args.shape;
  if (!has_wgmma()) return "it needs a GPU of compute capability 9.0, and code made for sm_90a";
  if (s.dtype == DType::kFloat64) return "it takes float32, bfloat16 and float16";
  if (const char* why = window_obstacle(args)) return why;
  const bool dgrad = args.pass == Conv2dPass::kDgrad, wgrad = args.pass == Conv2dPass::kWgrad;
  const Tensor4dRef& y = wgrad ? args.other : dgrad ? args.gathered : args.out;
  const Tensor4dRef &w = wgrad ? args.out : args.other, &x = dgrad ? args.out : args.gathered;
  const bool dense_x = is_dense(x, s.c, s.h, s.w) || (!dgrad && !in_parts(s));
  if (!is_dense(w, s.c, s.r, s.s) || !is_dense(y, s.k, s.p, s.q) || !dense_x) {
    return "it takes channels-last tensors, dense but for the input of 16-bit types and TF32";
  }
  if (const char* why = in_parts(s) ? split_obstacle(args) : alignment_obstacle(args)) return why;
  const int64_t tiles = s.r * s.s * ceil_div(s.k, 64) * ceil_div(s.c, 64);
  if (wgrad && tiles * ceil_div(s.n * s.p * s.q, 32) > INT_MAX) {
    return "it counts stages with 31 bits";
  }
  return nullptr;
}

void plan(const Conv2dArgs& given, Conv2dPlan* plan) {
  const Conv2dArgs args = by_rows(given);
  if (in_parts(args.shape)) return plan_split(args, plan);
  if (args.pass == Conv2dPass::kWgrad) {
    const hopper::Plan chosen = choose_wgrad_plan(gradient_matrices(args));
    plan->variant = chosen.tile;
    plan->workspace_bytes = hopper::stream_bytes(chosen);
    return;
  }
  const MatmulArgs p = result_matrix(args, pass_of(args));
  plan->variant = choose_tile(p);
  plan->workspace_bytes = weight_bytes(args);
  plan->moment_sets = moment_rows(args, p, hopper::kTileKinds[plan->variant]) / 64;
}

void plan_tail(const Conv2dArgs& given, Conv2dPlan* plan) {
  const Conv2dArgs args = by_rows(given);
  plan->variant = choose_tile(result_matrix(args, pass_of(args)), has_tile, true);
}

void run(Stream stream, const Conv2dArgs& given, const Conv2dPlan& plan, void* workspace) {
  const Conv2dArgs args = by_rows(given);
  if (in_parts(args.shape)) return run_split(stream, args, plan, workspace);
  switch (args.shape.dtype) {
    case DType::kBFloat16: return run_bf16(stream, args, plan.variant, workspace);
    case DType::kFloat16: return run_fp16(stream, args, plan.variant, workspace);
    case DType::kFloat32: return run_tf32(stream, args, plan.variant, workspace);
    case DType::kFloat64: break;  // an obstacle
  }
}

double rows_filled(const Conv2dArgs& args) {
  if (!goes_by_rows(args)) return 0;
  const Conv2dShape& s = args.shape;
  const auto bytes = static_cast<double>(s.s * s.c * size_of(s.dtype));
  return bytes / static_cast<double>(kRowBytes * rows_of_pixel(s, s.s * s.c));
}

bool takes_added(const Conv2dArgs& args) {
  return args.shape.dtype == DType::kFloat32 && !in_parts(args.shape) && !has_phases(args);
}

void run_added(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, const void* added,
               void* workspace) {
  run_tf32(stream, args, plan.variant, workspace, added);
}

bool plan_norm_grad(const Conv2dArgs& args, bool has_mask, Conv2dPlan* plan) {
  const Conv2dShape& s = args.shape;
  if (args.pass != Conv2dPass::kDgrad || in_parts(s) || has_phases(args)) return false;
  // Masks are read by 8 bytes, of 16 bytes of the result each.
  if (has_mask && s.c * size_of(s.dtype) % (8 * 16) != 0) return false;
  const MatmulArgs p = result_matrix(args, pass_of(args));
  plan->variant = choose_tile(p, has_sums_tile);
  plan->workspace_bytes = weight_bytes(args);
  plan->moment_sets = clusters_of_column(p, hopper::kTileKinds[plan->variant]);
  return plan->moment_sets > 0;
}

void run_norm_grad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                   const Conv2dNormGrad& norm, void* workspace) {
  switch (args.shape.dtype) {
    case DType::kBFloat16: return run_norm_grad_bf16(stream, args, plan, norm, workspace);
    case DType::kFloat16: return run_norm_grad_fp16(stream, args, plan, norm, workspace);
    case DType::kFloat32: return run_norm_grad_tf32(stream, args, plan, norm, workspace);
    case DType::kFloat64: break;  // an obstacle
  }
}

}  // namespace braze::cuda::im2col
