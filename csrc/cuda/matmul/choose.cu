// The choice among the matrix product's kernels, and the registry of those that any GPU runs.
#include "launchers/matmul.h"

#include "cuda/matmul/hopper/hopper.h"
#include "launchers/common/registry.h"
#include "cuda/matmul/mma/mma_matmul.cuh"
#include "obstacles.h"
#include "cuda/matmul/ladder/rungs.h"
#include "cuda/matmul/thin/thin.h"

namespace braze::cuda {
namespace {

const KernelEntry kSimtEntry({"matmul", "simt", "float32", "sm_80+", true,
                              "CUDA cores: register tiles, cp.async pipeline, split depth"});
const KernelEntry kMmaEntry({"matmul", "mma_sync", "float64 float32 bfloat16 float16", "sm_80+",
                             true,
                             "tensor cores: ldmatrix and mma.sync, cp.async pipeline, split depth; "
                             "float32 as TF32"});

const KernelEntry kMmaSplitEntry({"matmul", "mma_split", "float32", "sm_80+", true,
                                  "tensor cores at fp32's accuracy, in two parts of TF32: small "
                                  "results of long sums"});

const char* mma_sync_obstacle(const MatmulArgs& args) {
  return args.dtype == DType::kFloat64 ? too_large(args) : mma_obstacle(args);
}

const char* mma_split_obstacle(const MatmulArgs& args) {
  if (!takes_deep_tiles()) return "it wants 128 KiB of shared memory for a block";
  // A product of parts is off by more than fp32's rounding; so is the sum of many.
  if (args.k < kShortestSplitSum) return "it sums at least 64 products";
  return fp32_obstacle(args);
}

template <MatmulPlan (*make_plan)(const MatmulArgs&)>
int64_t mma_workspace_bytes(const MatmulArgs& args) {
  return plan_workspace_bytes(args, make_plan(args));
}

void mma(Stream stream, const MatmulArgs& args, void* workspace) {
  switch (args.dtype) {
    case DType::kBFloat16: return mma_matmul_bf16(stream, args, workspace);
    case DType::kFloat16: return mma_matmul_fp16(stream, args, workspace);
    case DType::kFloat64: return mma_matmul_fp64(stream, args, workspace);
    default: return mma_matmul_tf32(stream, args, workspace);
  }
}

struct Kernel {
  const char* name;
  Obstacle own_obstacle;
  int64_t (*workspace_bytes)(const MatmulArgs&);
  void (*run)(Stream, const MatmulArgs&, void* workspace);
  bool full_epilogue = false;

  const char* obstacle(const MatmulArgs& args) const {
    if (args.has_full_epilogue() && !full_epilogue) {
      return "its epilogue has bias and ReLU only, no residual, ReLU gradient or sums";
    }
    return own_obstacle(args);
  }
};

int64_t no_workspace(const MatmulArgs&) { return 0; }

constexpr Kernel kSimt{"simt", fp32_obstacle, simt_matmul_workspace_bytes, simt_matmul, true};
constexpr Kernel kMma{"mma_sync", mma_sync_obstacle, mma_workspace_bytes<plan_mma_matmul>, mma,
                      true};
constexpr Kernel kMmaSplit{"mma_split", mma_split_obstacle, mma_workspace_bytes<plan_split_matmul>,
                           mma_matmul_split, true};
constexpr Kernel kWgmma{"wgmma", hopper::obstacle, hopper::workspace_bytes, hopper::matmul, true};
constexpr Kernel kStreamK{"stream_k", hopper::stream_k_obstacle, hopper::stream_k_workspace_bytes,
                          hopper::stream_k_matmul};
constexpr Kernel kSplit{"wgmma_split", hopper::split_obstacle, hopper::split_workspace_bytes,
                        hopper::split_matmul, true};

constexpr Kernel kSimtTma{"simt_tma", hopper::simt_tma_obstacle, hopper::simt_tma_workspace_bytes,
                          hopper::simt_tma_matmul};

template <void (*run)(Stream, const MatmulArgs&)>
constexpr Kernel rung(const char* name, Obstacle obstacle) {
  return {name, obstacle, no_workspace,
          [](Stream stream, const MatmulArgs& args, void*) { run(stream, args); }};
}
constexpr Kernel kCoalesced = rung<ladder::run_coalesced>("02_coalesced", no_obstacle);
constexpr Kernel kGemv = rung<gemv_matmul>("gemv", gemv_obstacle);
constexpr Kernel kDmmaTma = rung<hopper::dmma_tma_matmul>("dmma_tma", hopper::dmma_tma_obstacle);
constexpr Kernel kThin = rung<thin_matmul>("thin", thin_obstacle);
constexpr Kernel kOuter = rung<outer_matmul>("outer", outer_obstacle);

constexpr Kernel kKernels[] = {
    rung<ladder::run_naive>("01_naive", no_obstacle),
    kCoalesced,
    rung<ladder::run_shared_tile>("03_shared_tile", too_large),
    rung<ladder::run_register_tile_1d>("04_register_tile_1d", too_large),
    rung<ladder::run_register_tile_2d>("05_register_tile_2d", too_large),
    rung<ladder::run_vectorized>("06_vectorized", fp32_obstacle),
    rung<ladder::run_warp_tile>("07_warp_tile", fp32_obstacle),
    rung<ladder::run_double_buffered>("08_double_buffered", fp32_obstacle),
    rung<ladder::run_wmma>("09_wmma", mma_obstacle),
    rung<hopper::run_wgmma>("10_wgmma", hopper::rung_obstacle),
    rung<hopper::run_warp_specialized>("11_warp_specialized", hopper::rung_obstacle),
    rung<hopper::run_cluster>("12_cluster", hopper::rung_obstacle),
    kGemv,
    kThin,
    kOuter,
    kSimt,
    kSimtTma,
    kDmmaTma,
    kMma,
    kMmaSplit,
    kWgmma,
    kStreamK,
    kSplit,
};

const Kernel* find(const std::string& name) {
  for (const Kernel& kernel : kKernels) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

const Kernel& choose(const MatmulArgs& args, const std::string& name) {
  const auto checked = [&](const Kernel& kernel) -> const Kernel& {
    if (const char* why = kernel.obstacle(args)) {
      throw std::runtime_error(std::string("matmul: kernel ") + kernel.name +
                               " cannot take these arguments: " + why);
    }
    return kernel;
  };
  if (name == "auto") {
    const bool full = args.has_full_epilogue();
    if (!kGemv.obstacle(args) && prefers_gemv(args)) return kGemv;
    if (!kOuter.obstacle(args) && prefers_outer(args)) return kOuter;
    if (hopper::preferred_for_result(args) && !kWgmma.obstacle(args)) return kWgmma;
    if (!kThin.obstacle(args) && prefers_thin(args)) return kThin;
    if (!kDmmaTma.obstacle(args) && hopper::dmma_tma_preferred(args)) return kDmmaTma;
    const bool deep = prefers_deep_tiles(args);  // which mma_sync has without the full epilogue
    if (!kWgmma.obstacle(args) && hopper::preferred(args, deep && !full)) return kWgmma;
    if (mma_sync_obstacle(args)) {  // fp32 at its own accuracy
      if (deep && args.k >= kLongSplitSum && !mma_split_obstacle(args)) return kMmaSplit;
      if (!kSplit.obstacle(args) && hopper::split_preferred(args)) return kSplit;
      if (!kSimtTma.obstacle(args) && hopper::simt_tma_preferred(args)) return kSimtTma;
    }
    if (!mma_sync_obstacle(args)) return kMma;
    return !fp32_obstacle(args) ? kSimt : checked(kCoalesced);
  }
  const Kernel* const kernel = find(name);
  if (!kernel) throw std::runtime_error("matmul: no kernel is named " + name);
  return checked(*kernel);
}

bool is_empty(const MatmulArgs& args) { return args.batch == 0 || args.m == 0 || args.n == 0; }

}  // namespace

const char* matmul_choice(const MatmulArgs& args) { return choose(args, "auto").name; }

bool matmul_takes(const MatmulArgs& args, const std::string& kernel) {
  if (kernel == "auto") return true;
  const Kernel* const found = find(kernel);
  return found && !found->obstacle(args);
}

int64_t matmul_workspace_bytes(const MatmulArgs& args, const std::string& kernel) {
  return is_empty(args) ? 0 : choose(args, kernel).workspace_bytes(args);
}

void matmul(Stream stream, const MatmulArgs& args, const std::string& kernel, void* workspace) {
  const Kernel& chosen = choose(args, kernel);
  if (!is_empty(args)) chosen.run(stream, args, workspace);
}

}  // namespace braze::cuda
