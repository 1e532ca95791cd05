#include "im2col.h"

#include <algorithm>
#include <climits>

#include "cuda/conv2d/halo/tiles.cuh"
#include "launch.cuh"

namespace braze::cuda::im2col {
namespace {

// What a Conv2dTail adds to a tile, in microseconds on an H200: with wide ones registers run out.
double tail_of(const hopper::TileKind& t) {
  return t.columns > 192 ? 2.5 : t.columns > 128 ? 1.0 : 0.1;
}

// What a variant takes, in microseconds on an H200, and the TB/s that it reaches where memory
// decides (3.00 where it decided no reading): fitted to fprop and dgrad of the networks in
// benchmarks/convolution_cases.py, batches of 1, 8, 64. (In 16 bits the times of tiles that are not
// split are of later runs at batch 64 and, of the last two of these, 256, in which a kernel's start
// took 1.4 more: that is taken off, of the last two 0.7, and 4 % added to their stages, since they
// gain little where the others are not waiting for their columns.)
struct Times {
  Variant variant;
  double start, tile, stage, memory;
};
// The first tile of a kind, by its shape.
constexpr int tile_of(bool (*is_kind)(const hopper::TileKind&), int rows, int columns, int blocks) {
  int tile = 0;  // past the last one there is no constant
  while (!(is_kind(hopper::kTileKinds[tile]) && hopper::kTileKinds[tile].rows == rows &&
           hopper::kTileKinds[tile].columns == columns &&
           hopper::kTileKinds[tile].blocks == blocks)) {
    ++tile;
  }
  return tile;
}
constexpr Variant whole(int rows, int columns, int blocks) {
  return {tile_of(has_tile, rows, columns, blocks), 0};
}
constexpr Variant turns(int rows, int columns, int blocks) {
  return {tile_of(has_turn_tile, rows, columns, blocks), 0};
}
constexpr Variant tall(int rows, int columns, int blocks) {
  return {tile_of(has_tall_tile, rows, columns, blocks), 0};
}
constexpr Variant split(int rows, int columns, int cluster_bits) {
  return {tile_of(has_split_tile, rows, columns, 1), cluster_bits};
}

constexpr Times kTimes16[] = {
    {whole(128, 256, 2), 4.39, 1.25, 0.607, 4.03}, {whole(128, 192, 2), 4.24, 1.32, 0.489, 3.52},
    {whole(128, 128, 1), 3.92, 0.90, 0.350, 3.76}, {whole(128, 64, 1), 4.13, 0.55, 0.287, 3.65},
    {whole(128, 128, 2), 4.16, 0.87, 0.358, 3.81}, {turns(128, 128, 2), 4.28, 0.59, 0.353, 3.99},
    {turns(128, 128, 1), 4.16, 0.57, 0.350, 4.01}, {turns(128, 64, 1), 4.21, 0.39, 0.276, 3.84},
    {turns(256, 64, 1), 5.20, 0.66, 0.494, 3.86},  {tall(256, 128, 1), 5.00, 1.33, 0.658, 3.93},
    {split(128, 128, 1), 2.51, 6.04, 0.308, 0.93}, {split(128, 128, 2), 2.24, 5.92, 0.293, 0.60},
    {split(128, 128, 3), 3.57, 4.70, 0.321, 0.65}, {split(128, 64, 1), 6.50, 0.30, 0.288, 1.80},
    {split(128, 64, 2), 6.42, 0.07, 0.294, 1.19},  {split(128, 64, 3), 6.45, 0.21, 0.309, 1.40},
    {split(64, 64, 1), 6.32, 0.02, 0.224, 1.70},   {split(64, 64, 2), 5.74, 0.22, 0.231, 1.14},
    {split(64, 64, 3), 5.87, 0.02, 0.252, 1.79},
};
constexpr Times kTimesTf32[] = {
    {whole(128, 256, 2), 3.54, 5.51, 0.636, 4.21}, {whole(128, 192, 2), 4.11, 4.13, 0.495, 4.24},
    {whole(128, 128, 1), 4.38, 2.97, 0.328, 3.62}, {whole(128, 64, 1), 5.00, 1.39, 0.246, 3.56},
    {whole(128, 128, 2), 4.63, 2.92, 0.328, 3.60}, {split(128, 128, 1), 8.88, 0.09, 0.329, 2.53},
    {split(128, 128, 2), 2.39, 6.02, 0.361, 1.02}, {split(128, 128, 3), 7.46, 0.56, 0.561, 3.00},
    {split(128, 64, 1), 6.76, 0.55, 0.297, 2.63},  {split(128, 64, 2), 6.58, 0.03, 0.354, 1.76},
    {split(128, 64, 3), 6.23, 0.08, 0.524, 3.00},  {split(64, 64, 1), 6.79, 0.00, 0.242, 2.26},
    {split(64, 64, 2), 5.83, 0.14, 0.307, 3.00},   {split(64, 64, 3), 5.83, 0.03, 0.391, 1.41},
};

// What is read and written at least.
int64_t bytes_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  int64_t pixels = s.h * s.w;
  if (args.pass == Conv2dPass::kFprop) pixels = std::min(pixels, s.p * s.q * s.r * s.s);
  const int64_t elements = s.n * (s.c * pixels + s.k * s.p * s.q) + s.k * s.c * s.r * s.s;
  return elements * size_of(s.dtype);
}

// What results pass through on their way out: bias and ReLU at most; a Conv2dTail; moments or
// another tensor that is added; a Conv2dNormGrad. Not all variants have all.
enum class Then { kStore, kTail, kMoments, kNormGrad };
bool has_variant(const Variant& v, Then then) {
  const hopper::TileKind& t = v.kind();
  if (has_turn_tile(t) || has_tall_tile(t)) return then == Then::kStore;
  if (v.cluster() > 1) return then == Then::kStore || then == Then::kTail;
  return then == Then::kNormGrad ? has_sums_tile(t) : has_tile(t);
}

// Whether rows of shared memory that are read of a pixel's channels lie across cache lines, in
// TF32: narrow tiles, which wait for them most, took 1.3 times as long (144 channels beside 160).
bool crosses_lines(const Conv2dArgs& args) {
  return size_of(args.shape.dtype) == 4 && args.gathered.w * 4 % hopper::kSwizzle != 0;
}

// The variant that takes the least time.
Variant choose_variant(const Conv2dArgs& args, Then then) {
  const MatmulArgs p = result_matrix(args, pass_of(args));
  const int64_t stages = p.k * size_of(p.dtype) / hopper::kSwizzle;
  const bool uneven = crosses_lines(args);
  Variant best{-1, 0};
  double least = hopper::kNoPlan;
  const auto try_variant = [&](const Times& times) {
    const hopper::TileKind& t = times.variant.kind();
    const int cluster = times.variant.cluster();          // of the blocks that split a depth
    if (t.columns > 64 && t.columns - p.n >= 64) return;  // narrower tiles are never slower then
    if (!has_variant(times.variant, then) || (cluster > 1 && stages < 2 * cluster)) return;
    const int64_t tiles = ceil_div(p.m, t.rows * t.blocks) * t.blocks * ceil_div(p.n, t.columns);
    const int64_t blocks = tiles * cluster;
    if (cluster > 1 && blocks > hopper::blocks_at_once(cluster)) return;
    const double slower = !uneven || t.blocks > 1 ? 1 : t.columns > 64 ? 1.15 : 1.3;
    const double tile = times.tile + ceil_div(stages, cluster) * times.stage * slower +
                        (then == Then::kTail && cluster == 1 ? tail_of(t) : 0);
    const double waves = ceil_div(blocks, sm_count()) * tile;
    const double memory = bytes_of(args) / (times.memory * 1e6);
    const double cost = times.start + std::max(waves, memory) + 0.1 * std::min(waves, memory);
    if (cost < least) best = times.variant, least = cost;
  };
  if (size_of(p.dtype) == 2) {
    for (const Times& t : kTimes16) try_variant(t);
  } else {
    for (const Times& t : kTimesTf32) try_variant(t);
  }
  return best;
}

// The tile of a dgrad by phases: of short depths, between whose products consumers take turns
// (H200, the networks' strided layers: up to 1.14 times as fast as the best of the others). Tall
// tiles where one has all columns, in 16 bits: up to 1.4 times. Clusters, which load columns half
// as often, where there are tiles for several rounds, and in 16 bits long sums: up to 1.25 times.
Variant choose_phase_variant(const Conv2dArgs& args, const MatmulArgs& p) {
  const bool is_16_bit = size_of(p.dtype) == 2;
  if (p.n <= 64) return is_16_bit ? turns(256, 64, 1) : turns(128, 64, 1);
  const Conv2dShape& s = args.shape;
  const int64_t phases = s.stride_h * s.stride_w;
  const int64_t stages = s.r * s.s * ceil_div(s.k * size_of(p.dtype), hopper::kSwizzle) / phases;
  const int64_t tiles = ceil_div(p.m, 128) * ceil_div(p.n, 128);
  const bool in_clusters = tiles >= 2 * sm_count() && (!is_16_bit || stages >= 12);
  return turns(128, 128, in_clusters ? 2 : 1);
}

// Of the weight gradient, whose blocks all sum for as long: by stream-K or, in 16 bits, by
// clusters, for few tiles and short sums, whose parts need not go through memory. In 16 bits what
// gathers pixels takes longer than matrices do, above all to several blocks: fitted to the
// networks' layers at 3 x 3 to 28 x 28, batch 64, on an H200 (the chosen tile is 2 % behind the
// best).
Variant choose_wgrad_variant(const Conv2dArgs& args) {
  const MatmulArgs p = gradient_matrices(args);
  const bool gathers = size_of(p.dtype) == 2 && args.shape.r * args.shape.s > 1;
  constexpr double kStart = 1, kClusterStage = 1.3;
  Variant best{-1, 0};
  double least = hopper::kNoPlan;
  for (hopper::Plan plan{}; plan.tile < hopper::kTileKindCount; ++plan.tile) {
    if (!has_wgrad_tile(plan.kind())) continue;
    const double slower = !gathers ? 1 : plan.kind().blocks > 1 ? 1.45 : 1.1;
    const double cost = kStart + hopper::stream_cost_of(p, plan, sm_count(), slower);
    if (cost < least) best = {plan.tile, 0}, least = cost;
  }
  const int64_t stages = ceil_div(p.k * size_of(p.dtype), hopper::kSwizzle);
  for (const Times& t : kTimes16) {
    const hopper::TileKind& kind = t.variant.kind();
    const int cluster = t.variant.cluster();
    if (!has_wgrad_split_tile(kind, size_of(p.dtype)) || stages < 2 * cluster) continue;
    const int64_t tiles = p.batch * ceil_div(p.m, kind.rows) * ceil_div(p.n, kind.columns);
    if (tiles * cluster > hopper::blocks_at_once(cluster)) continue;
    const double cost = t.start + t.tile + ceil_div(stages, cluster) * t.stage * kClusterStage;
    if (cost < least) best = t.variant, least = cost;
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
    const Variant chosen = choose_wgrad_variant(args);
    plan->variant = chosen.number();
    plan->workspace_bytes = hopper::stream_bytes(hopper::Plan{chosen.tile});
    return;
  }
  Phases phases;
  const MatmulArgs p =
      result_matrix(args, has_phases(args) ? pass_of(args, &phases) : pass_of(args));
  if (has_phases(args)) {
    plan->variant = choose_phase_variant(args, p).number();
  } else {
    const Variant uncut = choose_variant(args, Then::kMoments);
    plan->variant = choose_variant(args, Then::kStore).number();
    plan->tiling.set(uncut.number());
    plan->moment_sets = moment_rows(args, p, uncut.kind()) / 64;
  }
  plan->workspace_bytes = weight_bytes(args);
}

void plan_tail(const Conv2dArgs& given, Conv2dPlan* plan) {
  const Conv2dArgs args = by_rows(given);
  plan->variant = choose_variant(args, Then::kTail).number();
}

void run(Stream stream, const Conv2dArgs& given, const Conv2dPlan& plan, void* workspace) {
  const Conv2dArgs args = by_rows(given);
  if (in_parts(args.shape)) return run_split(stream, args, plan, workspace);
  const int variant = args.moments ? plan.tiling.get<int>() : plan.variant;
  switch (args.shape.dtype) {
    case DType::kBFloat16: return run_bf16(stream, args, variant, workspace);
    case DType::kFloat16: return run_fp16(stream, args, variant, workspace);
    case DType::kFloat32: return run_tf32(stream, args, variant, workspace);
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
  run_tf32(stream, args, plan.tiling.get<int>(), workspace, added);
}

bool plan_norm_grad(const Conv2dArgs& args, bool has_mask, Conv2dPlan* plan) {
  const Conv2dShape& s = args.shape;
  if (args.pass != Conv2dPass::kDgrad || in_parts(s) || has_phases(args)) return false;
  // Masks are read by 8 bytes, of 16 bytes of the result each.
  if (has_mask && s.c * size_of(s.dtype) % (8 * 16) != 0) return false;
  const MatmulArgs p = result_matrix(args, pass_of(args));
  const Variant chosen = choose_variant(args, Then::kNormGrad);
  plan->variant = chosen.number();
  plan->workspace_bytes = weight_bytes(args);
  plan->moment_sets = clusters_of_column(p, chosen.kind());
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
