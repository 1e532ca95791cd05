// The fused blocks: conv2d + batch norm + ReLU + max pool 2x2 from patch moments
// (conv_bn_relu_max_pool2d.h).
#include "launchers/conv_bn_relu_max_pool2d.h"

#include "ops/backend.h"
#include "ops/small_k.h"

namespace braze {
namespace {

constexpr const char* kOp = "conv_bn_relu_max_pool2d";

SmallKShape small_k_shape(const Tensor& input, const Tensor& weight,
                          const std::vector<int64_t>& padding, bool allow_tf32) {
  const DType dtype = dtype_of(kOp, "input", input);
  check_same_dtype(kOp, "weight", weight, "input", input);
  check_same_device(kOp, "weight", weight, "input", input);
  BRAZE_CHECK(input.dim() == 4 && weight.dim() == 4, kOp,
              ": expected 4-D input and weight, but got ", shape_string(input), " and ",
              shape_string(weight));
  BRAZE_CHECK(padding.size() == 2 && padding[0] >= 0 && padding[1] >= 0, kOp,
              ": expected padding to be two non-negative numbers");
  BRAZE_CHECK(input.size(1) == weight.size(1), kOp, ": expected input of shape ",
              shape_string(input), " to have ", weight.size(1), " channels, but got ",
              input.size(1));
  SmallKShape a = patches_of(input, dtype, weight.size(2), weight.size(3), padding[0], padding[1]);
  a.k = weight.size(0);
  a.allow_tf32 = allow_tf32;
  BRAZE_CHECK(a.p >= 2 && a.q >= 2 && a.n > 0 && a.k > 0, kOp,
              ": expected at least one pooled output, but got input ", shape_string(input),
              ", weight ", shape_string(weight), ", padding (", a.pad_h, ", ", a.pad_w, ")");
  BRAZE_CHECK(dev::small_k_supports(a), kOp, ": no kernel for weight ", shape_string(weight));
  // As torch's conv2d: the weight's or the input's format decides.
  a.channels_last = is_channels_last(input) || is_channels_last(weight);
  return a;
}

// Pointers of the batch norm's tensors; a tensor that is there has to be a dense vector of k
// values.
SmallKNorm small_k_norm(const SmallKShape& a, const Tensor& input,
                        const std::optional<Tensor>& conv_bias, const std::optional<Tensor>& gamma,
                        const std::optional<Tensor>& beta,
                        const std::optional<Tensor>& running_mean,
                        const std::optional<Tensor>& running_var) {
  SmallKNorm norm{};
  norm.param_dtype = a.dtype;
  bool known = false;
  const auto vector = [&](const char* arg, const std::optional<Tensor>& t, bool is_param) -> void* {
    if (!t) return nullptr;
    check_same_device(kOp, arg, *t, "input", input);
    BRAZE_CHECK(t->dim() == 1 && t->size(0) == a.k && t->is_contiguous(), kOp, ": expected ", arg,
                " to be a contiguous vector of ", a.k, " values, but got ", shape_string(*t));
    const DType dtype = dtype_of(kOp, arg, *t);
    if (is_param) {
      BRAZE_CHECK(!known || dtype == norm.param_dtype, kOp,
                  ": expected all batch norm parameters to have one dtype");
      norm.param_dtype = dtype;
      known = true;
    } else {
      check_same_dtype(kOp, arg, *t, "input", input);
    }
    return t->data_ptr();
  };
  norm.conv_bias = vector("conv_bias", conv_bias, false);
  norm.gamma = vector("bn_weight", gamma, true);
  norm.beta = vector("bn_bias", beta, true);
  norm.running_mean = vector("running_mean", running_mean, true);
  norm.running_var = vector("running_var", running_var, true);
  BRAZE_CHECK(!running_mean == !running_var, kOp,
              ": expected running_mean and running_var to be given together");
  BRAZE_CHECK(
      norm.param_dtype == a.dtype || (norm.param_dtype == DType::kFloat32 && size_of(a.dtype) == 2),
      kOp, ": expected batch norm parameters in the input's dtype or float32");
  return norm;
}

std::tuple<Tensor, Tensor, Tensor> conv_bn_relu_max_pool2d(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& conv_bias,
    const std::optional<Tensor>& bn_weight, const std::optional<Tensor>& bn_bias,
    std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
    std::optional<Tensor> num_batches_tracked, std::vector<int64_t> padding, bool training,
    std::optional<double> momentum, double eps, const std::optional<Tensor>& moments,
    bool allow_tf32) {
  const SmallKShape a = small_k_shape(input, weight, padding, allow_tf32);
  SmallKNorm norm =
      small_k_norm(a, input, conv_bias, bn_weight, bn_bias, running_mean, running_var);
  BRAZE_CHECK(training || running_mean, kOp, ": evaluation needs running_mean and running_var");
  BRAZE_CHECK(!training || a.n * a.p * a.q > 1, "Expected more than 1 value per channel when ",
              "training, got input size ", shape_string(input));
  if (num_batches_tracked) {
    BRAZE_CHECK(num_batches_tracked->scalar_type() == ScalarType::Long, kOp,
                ": expected num_batches_tracked of dtype int64");
    norm.batches = static_cast<int64_t*>(num_batches_tracked->data_ptr());
  }
  BRAZE_CHECK(!training || momentum || !running_mean || norm.batches, kOp,
              ": momentum=None needs num_batches_tracked");
  norm.training = training;
  norm.cumulative = !momentum && norm.batches;  // else there is nothing to update
  norm.momentum = momentum.value_or(0);
  norm.eps = eps;
  const DeviceContext context(input);
  Tensor out = empty_4d({a.n, a.k, a.p / 2, a.q / 2}, input, a.channels_last);
  Tensor codes = empty({small_k_code_words(a)}, input, ScalarType::Int);
  Tensor saved = empty({small_k_saved_size(a)}, input, ScalarType::Double);
  const Stream stream = context.stream();
  Tensor sums;
  if (moments) {
    sums = *moments;
    check_moments(kOp, sums, a, input);
    BRAZE_CHECK(!norm.cumulative, kOp, ": momentum=None counts batches where moments are summed");
  } else if (training) {
    sums = empty({kSmallKMostSets, small_k_moments(a)}, input, ScalarType::Double);
    dev::small_k_sum_moments(stream, a, input.const_data_ptr(),
                             static_cast<double*>(sums.mutable_data_ptr()),
                             norm.cumulative ? norm.batches : nullptr);
  }
  const Tensor w = as_contiguous(weight);
  dev::small_k_forward(stream, a, norm, input.const_data_ptr(), w.const_data_ptr(),
                       training ? static_cast<const double*>(sums.const_data_ptr()) : nullptr,
                       out.mutable_data_ptr(), static_cast<uint32_t*>(codes.mutable_data_ptr()),
                       static_cast<double*>(saved.mutable_data_ptr()));
  return {out, codes, saved};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_bn_relu_max_pool2d_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const std::optional<Tensor>& bn_weight, const Tensor& codes, const Tensor& saved,
    std::vector<int64_t> padding, bool training, std::optional<ScalarType> bn_dtype,
    bool allow_tf32) {
  SmallKShape a = small_k_shape(input, weight, padding, allow_tf32);
  SmallKNorm norm =
      small_k_norm(a, input, std::nullopt, bn_weight, std::nullopt, std::nullopt, std::nullopt);
  norm.training = training;
  check_same_device(kOp, "grad_output", grad_output, "input", input);
  check_same_dtype(kOp, "grad_output", grad_output, "input", input);
  const std::vector<int64_t> sizes{a.n, a.k, a.p / 2, a.q / 2};
  bool matches = grad_output.dim() == 4;
  for (int i = 0; matches && i < 4; ++i) matches = grad_output.size(i) == sizes[i];
  BRAZE_CHECK(matches, kOp,
              "_backward: expected grad_output of the forward's output shape, but got ",
              shape_string(grad_output));
  BRAZE_CHECK(codes.numel() == small_k_code_words(a) && saved.numel() == small_k_saved_size(a), kOp,
              "_backward: codes or saved do not belong to this input");
  const DeviceContext context(input);
  a.channels_last = is_channels_last(grad_output);
  const Tensor dy = a.channels_last ? grad_output : as_contiguous(grad_output);
  const Tensor w = as_contiguous(weight);
  const ScalarType param_type =
      bn_weight ? bn_weight->scalar_type() : bn_dtype.value_or(input.scalar_type());
  Tensor grad_weight = empty_weight_gradient(weight, false);
  Tensor grad_gamma = empty({a.k}, input, param_type);
  Tensor grad_beta = empty({a.k}, input, param_type);
  Tensor grad_bias = empty({a.k}, input);
  norm.param_dtype = dtype_of(kOp, "bn_weight", grad_gamma);
  const Workspace workspace(dev::small_k_backward_workspace_bytes(a), input);
  dev::small_k_backward(context.stream(), a, norm, input.const_data_ptr(), w.const_data_ptr(),
                        dy.const_data_ptr(), static_cast<const uint32_t*>(codes.const_data_ptr()),
                        static_cast<const double*>(saved.const_data_ptr()),
                        grad_weight.mutable_data_ptr(), grad_gamma.mutable_data_ptr(),
                        grad_beta.mutable_data_ptr(), grad_bias.mutable_data_ptr(),
                        workspace.data());
  return {grad_weight, grad_bias, grad_gamma, grad_beta};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("conv_bn_relu_max_pool2d", TORCH_BOX(&conv_bn_relu_max_pool2d));
  m.impl("conv_bn_relu_max_pool2d_backward", TORCH_BOX(&conv_bn_relu_max_pool2d_backward));
}

}  // namespace braze
