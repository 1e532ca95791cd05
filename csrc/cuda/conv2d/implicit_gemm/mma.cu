// The tensor cores' implicit GEMM: packs what is not laid out as it wants it, splits the depth
// where tiles are few.
#include "cuda/conv2d/kernels.h"

#include "mma.cuh"
#include "pack.cuh"

namespace braze::cuda {
namespace {

// Tiles: wgrad has those of 64 x 64, fprop and dgrad 128 pixels by 32 or 64 channels.
int splits_of(const Conv2dArgs& args) {
  const ConvExtents e = conv_extents(args);
  const bool wgrad = args.pass == Conv2dPass::kWgrad;
  const int64_t blocks = args.shape.groups * ceil_div(e.m, wgrad ? 64 : 128) *
                         ceil_div(e.n, !wgrad && e.n <= 32 ? 32 : 64);
  return plan_splits(blocks, ceil_div(e.k, 128 / size_of(args.shape.dtype)), 3);
}

}  // namespace

void plan_mma(const Conv2dArgs& args, Conv2dPlan* plan) {
  const PackedConv2d packed = pack_into(args, nullptr);
  const ConvExtents e = conv_extents(packed.args);
  const int splits = splits_of(packed.args);
  plan->workspace_bytes = packed.bytes + split_bytes<float>(splits, args.shape.groups, e.m, e.n);
  plan->tiling.set(splits);
}

void run_mma(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  const PackedConv2d packed = pack_into(args, workspace);
  pack_operands(stream, args, packed);
  void* const rest = static_cast<char*>(workspace) + packed.bytes;
  const int splits = plan.tiling.get<int>();
  switch (args.shape.dtype) {
    case DType::kBFloat16: mma_conv2d_bf16(stream, packed.args, splits, rest); break;
    case DType::kFloat16: mma_conv2d_fp16(stream, packed.args, splits, rest); break;
    default: mma_conv2d_tf32(stream, packed.args, splits, rest); break;
  }
  unpack_result(stream, args, packed);
}

}  // namespace braze::cuda
