#include "ops/conv2d_torch.h"

#ifndef BRAZE_CUDA

#include <array>
#include <optional>
#include <vector>

#include "ops/torch_call.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

bool has_strides_of(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < b.dim(); ++d) {
    if (a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

}  // namespace

Tensor blank_4d(const Sizes& nchw, const Tensor& like, bool channels_last) {
  const Sizes strides = dense_strides(nchw, channels_last ? kChannelsLast : nullptr);
  return torch::stable::from_blob(nullptr, nchw, strides, like.device(), like.scalar_type());
}

Tensor filled_in(const Tensor& blank) {
  return empty_strided(blank.sizes().data(), blank.strides().data(), blank.dim(), blank);
}

void run_conv2d_by_torch(const Conv2dProblem& problem, const void* bias, Tensor& result) {
  const Conv2dShape& s = problem.shape;
  const ScalarType type = result.scalar_type();
  const auto blob = [&](const Tensor4dRef& t, const Sizes& sizes) {
    // Only the shape counts of the operand whose gradient it is.
    const void* const data = t.data ? t.data : problem.w.data;
    return torch::stable::from_blob(const_cast<void*>(data), sizes, {t.n, t.c, t.h, t.w},
                                    result.device(), type);
  };
  const auto x = [&] { return blob(problem.x, {s.n, s.c, s.h, s.w}); };
  const auto y = [&] { return blob(problem.y, {s.n, s.k, s.p, s.q}); };
  const auto w = [&] { return blob(problem.w, {s.k, s.c / s.groups, s.r, s.s}); };
  const Sizes stride{s.stride_h, s.stride_w}, padding{s.pad_h, s.pad_w},
      dilation{s.dilation_h, s.dilation_w}, no_padding{0, 0};
  const bool transposed = false;
  Tensor made;
  if (problem.pass == Conv2dPass::kFprop) {
    std::optional<Tensor> added;
    if (bias) {
      added = torch::stable::from_blob(const_cast<void*>(bias), {s.k}, {1}, result.device(), type);
    }
    made = call_torch<1>("aten::convolution", "", x(), w(), added, stride, padding, dilation,
                         transposed, no_padding, s.groups)[0];
  } else {
    const bool is_dgrad = problem.pass == Conv2dPass::kDgrad;
    const std::array<bool, 3> wanted{is_dgrad, !is_dgrad, false};
    const auto grads =
        call_torch<3>("aten::convolution_backward", "", y(), x(), w(), std::optional<Sizes>(),
                      stride, padding, dilation, transposed, no_padding, s.groups,
                      torch::headeronly::HeaderOnlyArrayRef<bool>(wanted));
    made = grads[is_dgrad ? 0 : 1];
  }
  if (has_strides_of(made, result)) {
    result = made;
  } else {
    if (is_blank(result)) result = filled_in(result);
    torch::stable::copy_(result, made);
  }
}

}  // namespace braze

#endif
