// conv_bn_pool_backward.h: batch norm's sums, the kernel that makes both gradients of the
// convolution, and the sum of the weight's parts.
#include "bn_pool_sums.h"
#include "conv_gradients.h"
#include "conv_gradients_tile.cuh"

namespace braze::cuda {
namespace {

// In 16 bits, or in TF32; others have no such kernel.
int tiles_of(const ConvBnPoolBackward& problem) {
  return problem.conv.dtype == DType::kFloat32 ? halo::pooled::conv_gradients_tf32_tiles(problem)
                                               : halo::pooled::conv_gradients_tiles(problem);
}
int blocks_of(const ConvBnPoolBackward& problem) { return std::min(tiles_of(problem), sm_count()); }

// The workspace: partial sums of batch norm's gradients, behind them those of the weight's.
int64_t weight_offset(const ConvBnPoolBackward& problem) {
  return ceil_div(batch_norm_workspace_bytes(problem.pool.norm()), 256) * 256;
}
float* weight_parts(const ConvBnPoolBackward& problem, void* workspace) {
  return reinterpret_cast<float*>(static_cast<char*>(workspace) + weight_offset(problem));
}

}  // namespace

bool conv_bn_pool_backward_pays(const ConvBnPoolBackward& problem) {
  // Measured on an H200 (bf16, 8 to 32 channels, 7 x 7 to 32 x 32 pixels): with more tiles it was
  // 1.1 to 1.7 times as fast as one pass after the other; a tile for every other multiprocessor
  // takes 1 to 2 us longer. In TF32 on an H100, the same sizes and more tiles: 1.2 to 2.2 times.
  return tiles_of(problem) > sm_count() * 3 / 2;
}

int64_t conv_bn_pool_backward_workspace_bytes(const ConvBnPoolBackward& problem) {
  using namespace halo;
  constexpr int64_t kPart = pooled::kFilterRows * kFilters * kTapColumns * pooled::kChannels;
  return weight_offset(problem) + blocks_of(problem) * kPart * sizeof(float);
}

void conv_bn_pool_backward(Stream stream, const ConvBnPoolBackward& problem, void* workspace) {
  const Conv2dShape& s = problem.conv;
  auto* const sums = static_cast<GradPartial<float>*>(workspace);
  const int parts = bn_pool_grad_sums(stream, problem.pool, problem.dy, problem.z, problem.codes,
                                      problem.statistics.mean, sums);
  note_ordering_kernel(stream, {{sums, weight_offset(problem)}});
  const int64_t size = size_of(s.dtype), pooled = problem.pool.pooled();
  const auto readable = [&](const void* p, int64_t bytes) {
    return may_read_early(stream, {p, bytes});
  };
  const bool early = readable(problem.z, s.n * s.p * s.q * s.k * size) &&
                     readable(problem.x.data, s.n * s.h * s.w * s.c * size) &&
                     readable(problem.dy, pooled * size) && readable(problem.codes, pooled / 2) &&
                     may_read_early(stream, halo::weight_span(s, problem.w));
  const auto gradients =
      s.dtype == DType::kFloat32 ? halo::pooled::conv_gradients_tf32 : halo::pooled::conv_gradients;
  gradients(stream, problem, {sums, parts, early, weight_parts(problem, workspace)});
  check_launch("conv_bn_relu2d_backward");
}

void finish_conv_bn_pool_backward(Stream stream, const ConvBnPoolBackward& problem,
                                  void* workspace) {
  using namespace halo;
  const Conv2dShape& s = problem.conv;
  const Tensor4dRef& dw = problem.dw;
  Args a{};
  a.c = static_cast<int>(s.c), a.k = static_cast<int>(s.k), a.r = pooled::kFilterRows;
  a.w_k = dw.n, a.w_c = dw.c, a.w_r = dw.h, a.w_s = dw.w;
  const int blocks = a.r * items_of_row(pooled::kChannels) / kSumItems;
  const float* const parts = weight_parts(problem, workspace);
  void* const out = const_cast<void*>(dw.data);
  const auto launch = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    launch_early(reduce_kernel<T>, blocks, kSumThreads, 0, stream, a, pooled::kChannels,
                 blocks_of(problem), parts, typed);
  };
  if (s.dtype == DType::kBFloat16) {
    launch(static_cast<__nv_bfloat16*>(out));
  } else if (s.dtype == DType::kFloat16) {
    launch(static_cast<__half*>(out));
  } else {
    launch(static_cast<float*>(out));
  }
  check_launch("conv_bn_relu2d_backward");
}

}  // namespace braze::cuda
