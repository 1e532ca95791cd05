// The matrix product's kernels, and the choice among them.
#include "launchers/matmul.h"

#include <algorithm>
#include <iterator>

#include "cuda/matmul/hopper/hopper.h"
#include "cuda/matmul/ladder/rungs.h"
#include "kernels.h"
#include "obstacles.h"

namespace braze::cuda {
namespace {

struct Kernel {
  KernelInfo info;
  Obstacle own_obstacle;
  void (*plan)(const MatmulArgs&, MatmulPlan*);
  void (*run)(Stream, const MatmulArgs&, const MatmulPlan&, void* workspace);
  bool full_epilogue = false;

  const char* obstacle(const MatmulArgs& args) const {
    if (args.has_full_epilogue() && !full_epilogue) {
      return "its epilogue has bias and ReLU only, no residual, ReLU gradient or sums";
    }
    return own_obstacle(args);
  }
};

void no_plan(const MatmulArgs&, MatmulPlan*) {}

// Of kernels with nothing to decide.
template <void (*run)(Stream, const MatmulArgs&)>
void run_plain(Stream stream, const MatmulArgs& args, const MatmulPlan&, void*) {
  run(stream, args);
}

constexpr char kAll[] = "float64 float32 bfloat16 float16", kTensor[] = "float32 bfloat16 float16",
               k16Bit[] = "bfloat16 float16", kFp32[] = "float32", kAny[] = "sm_80+",
               kHopper[] = "sm_90a";

constexpr Kernel kKernels[] = {
    {{"matmul", "01_naive", kAll, kAny, false, "a thread per element of C, neighbours in a column"},
     no_obstacle,
     no_plan,
     run_plain<ladder::run_naive>},
    {{"matmul", "02_coalesced", kAll, kAny, false,
      "a thread per element of C, neighbours in a row"},
     no_obstacle,
     no_plan,
     run_plain<ladder::run_coalesced>},
    {{"matmul", "03_shared_tile", kAll, kAny, false, "32 x 32 tiles of A and B in shared memory"},
     too_large,
     no_plan,
     run_plain<ladder::run_shared_tile>},
    {{"matmul", "04_register_tile_1d", kAll, kAny, false,
      "8 elements of a column of C in a thread"},
     too_large,
     no_plan,
     run_plain<ladder::run_register_tile_1d>},
    {{"matmul", "05_register_tile_2d", kAll, kAny, false, "8 x 8 elements of C in a thread"},
     too_large,
     no_plan,
     run_plain<ladder::run_register_tile_2d>},
    {{"matmul", "06_vectorized", kFp32, kAny, false,
      "16-byte loads, A transposed in shared memory"},
     fp32_obstacle,
     no_plan,
     run_plain<ladder::run_vectorized>},
    {{"matmul", "07_warp_tile", kFp32, kAny, false, "compact 32 x 64 pieces for warps"},
     fp32_obstacle,
     no_plan,
     run_plain<ladder::run_warp_tile>},
    {{"matmul", "08_double_buffered", kFp32, kAny, false,
      "cp.async: a tile is copied while another is multiplied"},
     fp32_obstacle,
     no_plan,
     run_plain<ladder::run_double_buffered>},
    {{"matmul", "09_wmma", kTensor, kAny, false, "tensor cores by nvcuda::wmma; float32 as TF32"},
     mma_obstacle,
     no_plan,
     run_plain<ladder::run_wmma>},
    {{"matmul", "10_wgmma", k16Bit, kHopper, false, "TMA and wgmma, copies and products in turn"},
     hopper::rung_obstacle,
     no_plan,
     run_plain<hopper::run_wgmma>},
    {{"matmul", "11_warp_specialized", k16Bit, kHopper, false,
      "a producer warp and two consumer warpgroups, ring of stages"},
     hopper::rung_obstacle,
     no_plan,
     run_plain<hopper::run_warp_specialized>},
    {{"matmul", "12_cluster", k16Bit, kHopper, false,
      "pairs of blocks share their tile of B by multicast"},
     hopper::rung_obstacle,
     no_plan,
     run_plain<hopper::run_cluster>},
    {{"matmul", "gemv", kAll, kAny, true,
      "one row or one column: CUDA cores, the depth shared out to lanes and warps"},
     gemv_obstacle,
     no_plan,
     run_plain<gemv_matmul>},
    {{"matmul", "thin", kAll, kAny, true,
      "depths up to 128: CUDA cores, the whole depth in shared memory"},
     thin_obstacle,
     no_plan,
     run_plain<thin_matmul>},
    {{"matmul", "outer", kAll, kAny, true, "depth 1: CUDA cores, from registers to registers"},
     outer_obstacle,
     no_plan,
     run_plain<outer_matmul>},
    {{"matmul", "simt", kFp32, kAny, true,
      "CUDA cores: register tiles, cp.async pipeline, split depth"},
     fp32_obstacle,
     plan_simt,
     run_simt,
     true},
    {{"matmul", "simt_tma", kFp32, kHopper, true,
      "CUDA cores: register tiles of 8 x 16, TMA, mbarriers"},
     hopper::simt_tma_obstacle,
     hopper::plan_simt_tma,
     hopper::run_simt_tma},
    {{"matmul", "dmma_tma", "float64", kHopper, true,
      "tensor cores: mma.sync fed by TMA, tiles of 128 x 128"},
     hopper::dmma_tma_obstacle,
     no_plan,
     run_plain<hopper::dmma_tma_matmul>},
    {{"matmul", "mma_sync", kAll, kAny, true,
      "tensor cores: ldmatrix and mma.sync, cp.async pipeline, split depth; float32 as TF32"},
     mma_sync_obstacle,
     plan_mma_sync,
     run_mma_sync,
     true},
    {{"matmul", "mma_split", kFp32, kAny, true,
      "tensor cores at fp32's accuracy, in two parts of TF32: small results of long sums"},
     mma_split_obstacle,
     plan_mma_split,
     run_mma_split,
     true},
    {{"matmul", "wgmma", kTensor, kHopper, true,
      "tensor cores: TMA and wgmma, producer and consumers apart, clusters, persistent; float32 as "
      "TF32"},
     hopper::obstacle,
     hopper::plan,
     hopper::run,
     true},
    {{"matmul", "stream_k", kTensor, kHopper, true,
      "wgmma with the depths of all tiles in equal shares; float32 as TF32"},
     hopper::stream_k_obstacle,
     hopper::plan_stream_k,
     hopper::run},
    {{"matmul", "wgmma_split", kFp32, kHopper, true,
      "fp32 at fp32's accuracy on tensor cores: six products of bf16 parts"},
     hopper::split_obstacle,
     hopper::plan_split,
     hopper::run_split,
     true},
    {{"matmul", "wgmma_scaled", kFp32, kHopper, true,
      "fp32 at fp32's accuracy on tensor cores: three products of scaled fp16 parts"},
     hopper::split_obstacle,
     hopper::plan_scaled,
     hopper::run_scaled,
     true},
    {{"matmul", "wgmma_long", kFp32, kHopper, true,
      "fp32 at fp32's accuracy on tensor cores: long sums of few results, split as they are read"},
     hopper::long_obstacle,
     hopper::plan_long,
     hopper::run_long},
};
constexpr int kCount = std::size(kKernels);
const KernelEntries kEntries(kKernels, kCount);

constexpr int number_of(const char* name) { return kernel_number(kKernels, name); }
constexpr int kCoalesced = number_of("02_coalesced"), kGemv = number_of("gemv"),
              kThin = number_of("thin"), kOuter = number_of("outer"), kSimt = number_of("simt"),
              kSimtTma = number_of("simt_tma"), kDmmaTma = number_of("dmma_tma"),
              kMma = number_of("mma_sync"), kMmaSplit = number_of("mma_split"),
              kWgmma = number_of("wgmma"), kScaled = number_of("wgmma_scaled"),
              kLong = number_of("wgmma_long");

int64_t products_of(const MatmulArgs& args) { return args.batch * args.m * args.n * args.k; }

// Long sums in parts that are made as operands are read, where planes of parts, whose products are
// half as many, would take longer.
bool prefers_long(const MatmulArgs& args) {
  return args.k >= 1024 && products_of(args) >= 1 << 26 &&
         hopper::long_microseconds(args) < hopper::scaled_microseconds(args);
}

// The fastest of our own.
int choose(const MatmulArgs& args) {
  const auto takes = [&](int kernel) { return !kKernels[kernel].obstacle(args); };
  const bool full = args.has_full_epilogue();
  if (takes(kGemv) && prefers_gemv(args)) return kGemv;
  if (takes(kOuter) && prefers_outer(args)) return kOuter;
  if (hopper::preferred_for_result(args) && takes(kWgmma)) return kWgmma;
  if (takes(kThin) && prefers_thin(args)) return kThin;
  if (takes(kDmmaTma) && hopper::dmma_tma_preferred(args)) return kDmmaTma;
  const bool deep = prefers_deep_tiles(args);  // which mma_sync has without the full epilogue
  if (takes(kWgmma) && hopper::preferred(args, deep && !full)) return kWgmma;
  if (!takes(kMma)) {  // fp32 at its own accuracy
    if (takes(kLong) && prefers_long(args)) return kLong;
    if (deep && args.k >= kLongSplitSum && takes(kMmaSplit)) return kMmaSplit;
    if (takes(kScaled) && hopper::scaled_preferred(args)) return kScaled;
    if (takes(kSimtTma) && hopper::simt_tma_preferred(args)) return kSimtTma;
  }
  return takes(kMma) ? kMma : takes(kSimt) ? kSimt : kCoalesced;
}

// Whether that is faster than cuBLASLt, as measured on an H200 (benchmarks/products.py): where the
// result or the sum is thin, because cuBLASLt's first choice is slow to start or splits a long sum
// badly (53 us against 9 for 10 x 128 over 1024 in fp32; with 64 x 128 over 3136 the MNIST step
// takes 2 to 4 us more); fp32 at its own accuracy on tensor cores; TF32 up to the sizes where power
// decides, and beyond where neither operand lies along the depth.
bool beats_cublas(const MatmulArgs& args, int kernel) {
  const int64_t products = products_of(args);
  if (kernel == kOuter) return true;
  if (kernel == kScaled) return hopper::scaled_beats_cublas(args);
  if (kernel == kLong) return products >= 1 << 28;
  // 16-bit operands from the caches: cuBLASLt takes 0.6 to 0.76 of the time for larger results.
  if (kernel == kThin) return size_of(args.dtype) > 2 || args.batch * args.m * args.n <= 1 << 13;
  if (kernel == kGemv) return products <= 1 << 23;  // long rows of outputs come slowly
  if (kernel == kWgmma && args.dtype == DType::kFloat32) {
    return products < int64_t{1} << 32 || (args.a.col != 1 && args.b.row != 1);
  }
  if (args.dtype == DType::kFloat64 || args.k > 4096) return false;
  const bool small = args.batch == 1 && args.m * args.n <= 1 << 15;
  // Behind cuBLASLt's a ReLU is a launch of its own (libraries/cublas.cpp).
  if (args.relu && small && kernel == kMma && size_of(args.dtype) == 2 && args.k <= 1024) {
    return true;
  }
  if (small && args.k >= 2048 && std::min(args.m, args.n) >= 32) return true;
  return args.dtype == DType::kFloat32 && !args.allow_tf32 && std::min(args.m, args.n) <= 16 &&
         std::max(args.m, args.n) >= 64 && args.k >= 512;
}

bool is_empty(const MatmulArgs& args) { return args.batch == 0 || args.m == 0 || args.n == 0; }

}  // namespace

const KernelInfo* matmul_kernel(int number) {
  return number < kCount ? &kKernels[number].info : nullptr;
}

MatmulPlan plan_matmul(const MatmulArgs& args, int wish) {
  MatmulPlan plan;
  plan.kernel = wish == kAnyKernel ? choose(args) : wish;
  const Kernel& kernel = kKernels[plan.kernel];
  plan.obstacle = kernel.obstacle(args);
  if (!plan.obstacle && !is_empty(args)) kernel.plan(args, &plan);
  plan.beats_library = wish == kAnyKernel && beats_cublas(args, plan.kernel);
  return plan;
}

void run_matmul(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  if (!is_empty(args)) kKernels[plan.kernel].run(stream, args, plan, workspace);
}

}  // namespace braze::cuda
