// The choice among the matrix product's kernels, and the registry of them.
#include "matmul.h"

#include "01_naive.cuh"
#include "kernels/common/registry.h"
#include "mma_matmul.cuh"

namespace braze::cuda {
namespace {

enum class Choice { kNaive, kSimt, kMma, kMmaSplit };

// Why the tiled kernels cannot take the arguments, or nullptr.
const char* too_large(const MatmulArgs& args) {
  constexpr int64_t kLimit = INT_MAX - 1024;  // room for the last tile's overhang
  return args.m > kLimit || args.n > kLimit || args.k > kLimit
             ? "it indexes rows, columns and depth with 31 bits"
             : nullptr;
}

// Why mma_sync cannot take the arguments, or nullptr.
const char* mma_obstacle(const MatmulArgs& args) {
  if (args.dtype == DType::kFloat64) return "it takes float32 (as TF32), bfloat16 and float16";
  if (args.dtype == DType::kFloat32 && !args.allow_tf32) {
    return "float32 inputs would be rounded to TF32, which is not allowed";
  }
  return too_large(args);
}

const char* simt_obstacle(const MatmulArgs& args) {
  if (size_of(args.dtype) == 2) return "it takes float32 and float64";
  return too_large(args);
}

const char* split_obstacle(const MatmulArgs& args) {
  if (args.dtype != DType::kFloat32) return "it takes float32";
  if (!takes_deep_tiles()) return "it wants 128 KiB of shared memory for a block";
  return too_large(args);
}

Choice choose(const MatmulArgs& args, const std::string& kernel) {
  if (kernel == "auto") {
    if (mma_obstacle(args) && !split_obstacle(args) && prefers_split(args)) {
      return Choice::kMmaSplit;
    }
    return !mma_obstacle(args)    ? Choice::kMma
           : !simt_obstacle(args) ? Choice::kSimt
                                  : Choice::kNaive;
  }
  if (kernel == "01_naive") return Choice::kNaive;
  const auto accept = [&](Choice choice, const char* obstacle) {
    if (obstacle) {
      throw std::runtime_error("matmul: kernel " + kernel +
                               " cannot take these arguments: " + obstacle);
    }
    return choice;
  };
  if (kernel == "simt") return accept(Choice::kSimt, simt_obstacle(args));
  if (kernel == "mma_sync") return accept(Choice::kMma, mma_obstacle(args));
  if (kernel == "mma_split") return accept(Choice::kMmaSplit, split_obstacle(args));
  throw std::runtime_error("matmul: no kernel is named " + kernel);
}

bool is_empty(const MatmulArgs& args) { return args.batch == 0 || args.m == 0 || args.n == 0; }

const KernelEntry kNaiveEntry({"matmul", "01_naive", "float64 float32 bfloat16 float16", "sm_80+",
                               false, "one thread per element of C, no reuse"});
const KernelEntry kSimtEntry({"matmul", "simt", "float64 float32", "sm_80+", true,
                              "CUDA cores: register tiles, cp.async pipeline, split depth"});
const KernelEntry kMmaEntry({"matmul", "mma_sync", "float32 bfloat16 float16", "sm_80+", true,
                             "tensor cores: ldmatrix and mma.sync, cp.async pipeline, split depth; "
                             "float32 as TF32"});
const KernelEntry kSplitEntry({"matmul", "mma_split", "float32", "sm_80+", true,
                               "tensor cores at fp32's accuracy, in two parts of TF32: small "
                               "results of long sums"});

}  // namespace

int64_t matmul_workspace_bytes(const MatmulArgs& args, const std::string& kernel) {
  if (is_empty(args)) return 0;
  switch (choose(args, kernel)) {
    case Choice::kNaive: return 0;
    case Choice::kSimt: return simt_matmul_workspace_bytes(args);
    case Choice::kMma:
    case Choice::kMmaSplit: {
      const bool split = choose(args, kernel) == Choice::kMmaSplit;
      const MatmulPlan plan = split ? plan_split_matmul(args) : plan_mma_matmul(args);
      return plan.clustered ? 0 : split_bytes<float>(plan.splits, args.batch, args.m, args.n);
    }
  }
  return 0;
}

void matmul(Stream stream, const MatmulArgs& args, const std::string& kernel, void* workspace) {
  const Choice choice = choose(args, kernel);
  if (is_empty(args)) return;
  if (choice == Choice::kNaive) return launch_naive_matmul(stream, args);
  if (choice == Choice::kSimt) return simt_matmul(stream, args, workspace);
  if (choice == Choice::kMmaSplit) return mma_matmul_split(stream, args, workspace);
  switch (args.dtype) {
    case DType::kBFloat16: return mma_matmul_bf16(stream, args, workspace);
    case DType::kFloat16: return mma_matmul_fp16(stream, args, workspace);
    default: return mma_matmul_tf32(stream, args, workspace);
  }
}

}  // namespace braze::cuda
