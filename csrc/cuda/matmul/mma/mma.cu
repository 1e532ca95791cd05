// Plans of the products on tensor cores by mma.sync, and the way to their kernels.
#include "cuda/matmul/kernels.h"
#include "cuda/matmul/obstacles.h"
#include "mma_matmul.cuh"

namespace braze::cuda {
namespace {

constexpr int64_t kLongProduct = int64_t{1} << 31, kLongFp64Product = int64_t{1} << 29;
constexpr int64_t kShortestSplitSum = 64;

bool takes_deep_tiles() {
  return most_shared_memory() >= kDeepGroups * DeepTile<false>::kStages * (32 + 32) * 128;
}

GemmPlan tiling_of(const MatmulArgs& args) {
  const bool fp64 = args.dtype == DType::kFloat64;
  const bool vectors =
      args.dtype == DType::kFloat32 ? takes_vectors<float>(args) : takes_vectors<__half>(args);
  const int large = !fp64 ? (vectors ? 128 : 0) : args.has_full_epilogue() ? 0 : 64;
  return plan_gemm(args,
                   {128 / static_cast<int>(size_of(args.dtype)), large, false, takes_deep_tiles(),
                    runs_sm90_code(), fp64 ? kLongFp64Product : kLongProduct});
}

}  // namespace

bool prefers_deep_tiles(const MatmulArgs& args) {
  return args.k >= kShortestSplitSum &&
         tiling_of(args.with_plain_epilogue()).tile == TileShape::kDeep;
}

const char* mma_sync_obstacle(const MatmulArgs& args) {
  return args.dtype == DType::kFloat64 ? too_large(args) : mma_obstacle(args);
}

void plan_mma_sync(const MatmulArgs& args, MatmulPlan* plan) {
  set_plan(args, tiling_of(args), plan);
}

void run_mma_sync(Stream stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  const GemmPlan& tiling = plan.tiling.get<GemmPlan>();
  switch (args.dtype) {
    case DType::kBFloat16: return mma_matmul_bf16(stream, args, tiling, workspace);
    case DType::kFloat16: return mma_matmul_fp16(stream, args, tiling, workspace);
    case DType::kFloat64: return mma_matmul_fp64(stream, args, tiling, workspace);
    default: return mma_matmul_tf32(stream, args, tiling, workspace);
  }
}

const char* mma_split_obstacle(const MatmulArgs& args) {
  if (!takes_deep_tiles()) return "it wants 128 KiB of shared memory for a block";
  // A product of parts is off by more than fp32's rounding; so is the sum of many.
  if (args.k < kShortestSplitSum) return "it sums at least 64 products";
  return fp32_obstacle(args);
}

// It has one tile shape, which pays where C is small and deep.
void plan_mma_split(const MatmulArgs& args, MatmulPlan* plan) {
  GemmPlan tiling = tiling_of(args.with_plain_epilogue());
  if (tiling.tile != TileShape::kDeep) {
    tiling = {TileShape::kDeep, 1, false, 32, depth_major_b(args) ? 16 : 32};
  }
  set_plan(args, tiling, plan);
}

}  // namespace braze::cuda
