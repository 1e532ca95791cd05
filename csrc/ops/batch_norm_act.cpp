// batch_norm_act: activation(batch_norm(input) + residual), where there is a residual; and
// conv_bn_act, the same of a convolution's result.
#include "launchers/batch_norm.h"

#include "launchers/conv2d_tail.h"
#include "ops/activation.h"
#include "ops/batch_norm.h"
#include "ops/conv2d.h"

namespace braze {
namespace {

void check_residual(const char* op, const std::optional<Tensor>& residual, const Tensor& input) {
  if (!residual) return;
  check_same_device(op, "residual", *residual, "input", input);
  check_same_dtype(op, "residual", *residual, "input", input);
  check_same_shape(op, "residual", *residual, "input", input);
}

// A mask that batch_norm_act left.
void check_mask(const char* op, const Tensor& mask, const BatchNormShape& shape,
                const Activation& activation) {
  const BatchNormTail tail{activation, &mask};  // any residual: whether there is one decides
  const int64_t bytes = dev::batch_norm_mask_bytes(shape, tail);
  BRAZE_CHECK(
      mask.scalar_type() == ScalarType::Byte && mask.is_contiguous() && mask.numel() == bytes, op,
      ": expected a mask of ", bytes, " uint8 elements, but got shape ", shape_string(mask));
}

// Of gradients of the parameters.
ScalarType affine_type(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                       const Tensor& input) {
  return weight ? weight->scalar_type() : bias ? bias->scalar_type() : statistics_type(input);
}

// Results in the order of batch_norm_act's schema. moments: of the input, where what made it left
// them.
std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& input,
                                           const std::optional<Tensor>& residual,
                                           const ChannelMoments& moments, const Norm& norm,
                                           const Activation& activation) {
  const BatchNormShape shape = batch_norm_shape(op, input);
  norm.check(op, shape, input);
  check_residual(op, residual, input);
  BatchNormTail tail{activation, nullptr};
  const DeviceContext context(input);
  Tensor out = empty_like_input(shape, input);
  if (input.numel() == 0) {  // as in torch, the buffers stay as they are
    return {out, empty({0}, input, ScalarType::Byte),
            zeros({4, shape.c}, input, statistics_type(input))};
  }
  const Tensor x = in_layout(shape, input);
  std::optional<Tensor> r;
  if (residual) r = in_layout(shape, *residual);
  tail.residual = const_data(r);
  Tensor mask = empty({dev::batch_norm_mask_bytes(shape, tail)}, input, ScalarType::Byte);
  const Tensor statistics = empty_statistics(input);
  const BatchNormStatistics results = statistics_of(statistics);
  norm.normalize(context, shape, x, moments, tail, results, out.mutable_data_ptr(),
                 mask.numel() > 0 ? mask.mutable_data_ptr() : nullptr);
  return {out, mask, statistics};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act(
    const Tensor& input, const std::optional<Tensor>& residual, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var, const std::optional<Tensor>& num_batches_tracked,
    bool training, std::optional<double> momentum, double eps, const std::string& activation,
    double first, double second) {
  const char* op = "batch_norm_act";
  const Norm norm{weight,   bias,     running_mean, running_var, num_batches_tracked,
                  training, momentum, eps};
  return forward(op, input, residual, {}, norm, activation_of(op, activation, first, second));
}

// batch_norm_act in evaluation mode, without what gradients need.
Tensor batch_norm_act_inference(const Tensor& input, const std::optional<Tensor>& residual,
                                const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& running_mean,
                                const std::optional<Tensor>& running_var, double eps,
                                const std::string& activation, double first, double second) {
  const char* op = "batch_norm_act_inference";
  const Activation act = activation_of(op, activation, first, second);
  const std::optional<Tensor> batches;
  const Norm norm{weight, bias, running_mean, running_var, batches, false, 0.0, eps};
#ifdef BRAZE_CUDA
  const BatchNormShape shape = batch_norm_shape(op, input);
  if (shape.channels_last && dev::takes_tail_pass(shape.dtype, shape.count(), shape.c, act)) {
    norm.check(op, shape, input);
    check_residual(op, residual, input);
    const DeviceContext context(input);
    Tensor out = empty_like_input(shape, input);
    const Tensor x = in_layout(shape, input);
    std::optional<Tensor> r;
    if (residual) r = in_layout(shape, *residual);
    norm.with_dense([&](const BatchNormAffine& affine, const BatchNormBuffers& buffers) {
      const Conv2dTail tail{affine.weight, affine.bias, affine.dtype, buffers.mean,  buffers.var,
                            buffers.dtype, eps,         nullptr,      const_data(r), act};
      dev::run_tail_pass(context.stream(), shape.dtype, shape.count(), shape.c, tail,
                         x.const_data_ptr(), out.mutable_data_ptr());
    });
    return out;
  }
#endif
  return std::get<0>(forward(op, input, residual, {}, norm, act));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_bn_act(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& conv_bias,
    const std::optional<Tensor>& residual, const std::optional<Tensor>& bn_weight,
    const std::optional<Tensor>& bn_bias, const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var, const std::optional<Tensor>& num_batches_tracked,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, bool training,
    std::optional<double> momentum, double eps, const std::string& activation, double first,
    double second, bool allow_tf32, bool deterministic, const std::string& backend) {
  const char* op = "conv_bn_act";
  const Activation act = activation_of(op, activation, first, second);
  const Norm norm{bn_weight,           bn_bias,  running_mean, running_var,
                  num_batches_tracked, training, momentum,     eps};
  OutputMoments moments;
  const Tensor z =
      conv2d_forward(input, weight, conv_bias,
                     {stride, padding, dilation, groups, allow_tf32, deterministic, backend},
                     training ? &moments : nullptr);
  const auto [out, mask, statistics] = forward(op, z, residual, moments.view, norm, act);
  return {out, z, mask, statistics};
}

// conv_bn_act in evaluation mode, without what gradients need.
Tensor conv_bn_act_inference(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& conv_bias,
    const std::optional<Tensor>& residual, const std::optional<Tensor>& bn_weight,
    const std::optional<Tensor>& bn_bias, const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var, const std::vector<int64_t>& stride,
    const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, int64_t groups,
    double eps, const std::string& activation, double first, double second, bool allow_tf32,
    bool deterministic, const std::string& backend) {
  const char* op = "conv_bn_act_inference";
  const Activation act = activation_of(op, activation, first, second);
  const std::optional<Tensor> batches;
  const Norm norm{bn_weight, bn_bias, running_mean, running_var, batches, false, 0.0, eps};
  const Conv2dArguments args{stride, padding, dilation, groups, allow_tf32, deterministic, backend};
  const auto whole = conv2d_with_tail(op, input, weight, conv_bias, norm, residual, act, args);
  if (whole) return *whole;
  const Tensor z = conv2d_forward(input, weight, conv_bias, args, nullptr);
  return std::get<0>(forward(op, z, residual, {}, norm, act));
}

// weight and bias: None, or their gradients come in their dtype. Those that are not wanted are
// empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_act_backward(
    const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& residual,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& mask,
    const Tensor& statistics, bool training, const std::string& activation, double first,
    double second, const std::vector<bool>& output_mask) {
  const char* op = "batch_norm_act_backward";
  const BatchNormShape shape = batch_norm_shape(op, input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  check_residual(op, residual, input);
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  check_statistics(op, statistics, input);
  check_same_device(op, "mask", mask, "input", input);
  BRAZE_CHECK(output_mask.size() == 4, op, ": expected output_mask of 4 entries, but got ",
              output_mask.size());
  BatchNormTail tail{activation_of(op, activation, first, second), nullptr};
  const bool has_mask = mask.numel() > 0, has_residual = has_mask || residual;
  if (has_mask) check_mask(op, mask, shape, tail.activation);
  BRAZE_CHECK(has_residual || !output_mask[1], op, ": expected a residual to differentiate by");
  const DeviceContext context(input);
  const ScalarType type = affine_type(weight, bias, input);
  const bool no_elements = input.numel() == 0;
  const auto channels = [&](bool wanted) {
    const std::vector<int64_t> sizes{wanted ? shape.c : 0};
    return no_elements ? zeros(sizes, input, type) : empty(sizes, input, type);
  };
  const Tensor none = empty({0}, input);
  Tensor grad_input = output_mask[0] ? empty_like_input(shape, input) : none;
  Tensor grad_weight = channels(output_mask[2]), grad_bias = channels(output_mask[3]);
  // Made in any case: the input's gradient is made of it.
  Tensor grad_residual = has_residual ? empty_like_input(shape, input) : none;
  const Tensor residual_result = output_mask[1] ? grad_residual : empty({0}, input);
  if (no_elements) return {grad_input, residual_result, grad_weight, grad_bias};
  const Tensor x = in_layout(shape, input), dy = in_layout(shape, grad_output);
  std::optional<Tensor> r;
  if (residual && !has_mask) r = in_layout(shape, *residual);
  tail.residual = const_data(r);
  const auto w = dense(weight);
  const Workspace workspace(dev::batch_norm_workspace_bytes(shape), input);
  const auto data = [](bool wanted, Tensor& t) { return wanted ? t.mutable_data_ptr() : nullptr; };
  dev::batch_norm_backward(
      context.stream(), shape, training, dy.const_data_ptr(), x.const_data_ptr(), tail,
      has_mask ? mask.const_data_ptr() : nullptr,
      {const_data(w), nullptr, dtype_of(op, "weight", grad_weight)}, statistics_of(statistics),
      {data(output_mask[0], grad_input), data(has_residual, grad_residual),
       data(output_mask[2], grad_weight), data(output_mask[3], grad_bias), nullptr},
      workspace.data());
  return {grad_input, residual_result, grad_weight, grad_bias};
}

// The last gradient: of a constant added to each channel of the input.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_of_sums(
    const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const Tensor& statistics, const Tensor& sums,
    const std::vector<bool>& output_mask) {
  const char* op = "batch_norm_backward_of_sums";
  const BatchNormShape shape = batch_norm_shape(op, input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  check_statistics(op, statistics, input);
  check_same_device(op, "sums", sums, "input", input);
  BRAZE_CHECK(input.scalar_type() != ScalarType::Double, op, ": it does not take float64");
  BRAZE_CHECK(sums.scalar_type() == ScalarType::Float && sums.is_contiguous() && sums.dim() == 3 &&
                  sums.size(0) == shape.c && sums.size(1) > 0 && sums.size(1) <= INT_MAX &&
                  sums.size(2) == 2,
              op, ": expected contiguous float32 sums of shape [", shape.c,
              ", sets, 2], but got shape ", shape_string(sums));
  BRAZE_CHECK(output_mask.size() == 4, op, ": expected output_mask of 4 entries, but got ",
              output_mask.size());
  BRAZE_CHECK(input.numel() > 0, op, ": expected an input with elements");
  const DeviceContext context(input);
  const ScalarType type = affine_type(weight, bias, input);
  Tensor grad_input = output_mask[0] ? empty_like_input(shape, input) : empty({0}, input);
  Tensor grad_weight = empty({output_mask[1] ? shape.c : 0}, input, type);
  Tensor grad_bias = empty({output_mask[2] ? shape.c : 0}, input, type);
  Tensor grad_constant = empty({output_mask[3] ? shape.c : 0}, input);
  const Tensor x = in_layout(shape, input), dy = in_layout(shape, grad_output);
  const auto w = dense(weight);
  const Workspace workspace(dev::batch_norm_workspace_bytes(shape), input);
  const auto data = [](bool wanted, Tensor& t) { return wanted ? t.mutable_data_ptr() : nullptr; };
  dev::batch_norm_backward_of_sums(
      context.stream(), shape, dy.const_data_ptr(), x.const_data_ptr(),
      static_cast<const float*>(sums.const_data_ptr()), static_cast<int>(sums.size(1)),
      {const_data(w), nullptr, dtype_of(op, "weight", grad_weight)}, statistics_of(statistics),
      {data(output_mask[0], grad_input), nullptr, data(output_mask[1], grad_weight),
       data(output_mask[2], grad_bias), data(output_mask[3], grad_constant)},
      workspace.data());
  return {grad_input, grad_weight, grad_bias, grad_constant};
}

// conv2d's backward where batch_norm_act's result is its input.
std::tuple<Tensor, Tensor, Tensor, Tensor> conv2d_norm_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, const std::vector<bool>& output_mask,
    bool allow_tf32, bool deterministic, const std::string& backend,
    const std::optional<Tensor>& added, const Tensor& norm_input, const Tensor& mask,
    const Tensor& statistics, const std::string& activation, double first, double second) {
  const char* op = "conv2d_norm_backward";
  check_same_device(op, "norm_input", norm_input, "input", input);
  check_same_dtype(op, "norm_input", norm_input, "input", input);
  check_same_shape(op, "norm_input", norm_input, "input", input);
  check_statistics(op, statistics, input);
  check_same_device(op, "mask", mask, "input", input);
  NormOfInput norm{norm_input, statistics, std::nullopt,
                   activation_of(op, activation, first, second),
                   empty({input.size(1), 0, 2}, statistics)};
  BRAZE_CHECK(!norm.activation.smooth(), op, ": expected an activation that bounds, but got ",
              activation);
  if (mask.numel() > 0) {
    check_mask(op, mask, batch_norm_shape(op, norm_input), norm.activation);
    norm.mask = mask;
  }
  auto [grad_input, grad_weight, grad_bias] = conv2d_gradients(
      grad_output, input, weight,
      {stride, padding, dilation, groups, allow_tf32, deterministic, backend}, output_mask, nullptr,
      added, output_mask[0] && input.numel() > 0 ? &norm : nullptr);
  return {grad_input, grad_weight, grad_bias, norm.sums};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("batch_norm_backward_of_sums", TORCH_BOX(&batch_norm_backward_of_sums));
  m.impl("conv2d_norm_backward", TORCH_BOX(&conv2d_norm_backward));
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act));
  m.impl("batch_norm_act_backward", TORCH_BOX(&batch_norm_act_backward));
  m.impl("batch_norm_act_inference", TORCH_BOX(&batch_norm_act_inference));
  m.impl("conv_bn_act", TORCH_BOX(&conv_bn_act));
  m.impl("conv_bn_act_inference", TORCH_BOX(&conv_bn_act_inference));
}

}  // namespace braze
