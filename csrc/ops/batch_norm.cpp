#include "ops/batch_norm.h"

namespace braze {
namespace {

// rung: the number of the forward's kernel in training, where one was asked for.
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const std::optional<Tensor>& weight,
                                           const std::optional<Tensor>& bias,
                                           const std::optional<Tensor>& running_mean,
                                           const std::optional<Tensor>& running_var,
                                           const std::optional<Tensor>& num_batches_tracked,
                                           bool training, std::optional<double> momentum,
                                           double eps, std::optional<int> rung = std::nullopt) {
  const char* op = "batch_norm";
  const BatchNormShape shape = batch_norm_shape(op, input);
  const Norm norm{weight,   bias,     running_mean, running_var, num_batches_tracked,
                  training, momentum, eps};
  norm.check(op, shape, input);
  const DeviceContext context(input);
  Tensor out = empty_like_input(shape, input);
  if (input.numel() == 0) {  // as in torch, the buffers stay as they are
    return {out, zeros({shape.c}, input, statistics_type(input)),
            zeros({shape.c}, input, statistics_type(input))};
  }
  Tensor mean = empty({shape.c}, input, statistics_type(input));
  Tensor rstd = empty({shape.c}, input, statistics_type(input));
  const Tensor scratch = empty_statistics(input);
  BatchNormStatistics statistics = statistics_of(scratch);
  statistics.mean = mean.mutable_data_ptr();
  statistics.rstd = rstd.mutable_data_ptr();
  const Tensor x = in_layout(shape, input);
  if (rung) {
    const Workspace workspace(dev::batch_norm_workspace_bytes(shape), input);
    norm.with_dense([&](const BatchNormAffine& affine, const BatchNormBuffers& buffers) {
      dev::batch_norm_rung(context.stream(), shape, x.const_data_ptr(), affine, buffers, eps,
                           statistics, out.mutable_data_ptr(), workspace.data(), *rung);
    });
    return {out, mean, rstd};
  }
  norm.normalize(context, shape, x, {}, {}, statistics, out.mutable_data_ptr(), nullptr);
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, std::optional<Tensor> weight,
                                              std::optional<Tensor> bias,
                                              std::optional<Tensor> running_mean,
                                              std::optional<Tensor> running_var,
                                              std::optional<Tensor> num_batches_tracked,
                                              bool training, std::optional<double> momentum,
                                              double eps) {
  return forward(input, weight, bias, running_mean, running_var, num_batches_tracked, training,
                 momentum, eps);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_rung(
    const Tensor& input, std::optional<Tensor> weight, std::optional<Tensor> bias,
    std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
    std::optional<Tensor> num_batches_tracked, std::optional<double> momentum, double eps,
    const std::string& backend) {
  const Wish wish = wish_of("batch_norm", backend, dev::batch_norm_rung_info);
  return forward(input, weight, bias, running_mean, running_var, num_batches_tracked, true,
                 momentum, eps, wish.kernel());
}

// grad_weight and grad_bias come in weight's dtype, or the statistics dtype where it is None.
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    const Tensor& mean, const Tensor& rstd, bool training, std::vector<bool> output_mask) {
  const char* op = "batch_norm_backward";
  const BatchNormShape shape = batch_norm_shape(op, input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  check_channel_vector(op, "weight", weight, input);
  check_statistics(op, mean, rstd, output_mask, input);
  const DeviceContext context(input);
  const ScalarType affine_type = weight ? weight->scalar_type() : statistics_type(input);
  const bool no_elements = input.numel() == 0;
  const auto channels = [&](bool wanted) {
    const std::vector<int64_t> sizes{wanted ? shape.c : 0};
    return no_elements ? zeros(sizes, input, affine_type) : empty(sizes, input, affine_type);
  };
  Tensor grad_input = output_mask[0] ? empty_like_input(shape, input) : empty({0}, input);
  Tensor grad_weight = channels(output_mask[1]), grad_bias = channels(output_mask[2]);
  if (no_elements) return {grad_input, grad_weight, grad_bias};
  const Tensor x = in_layout(shape, input), dy = in_layout(shape, grad_output);
  const auto w = dense(weight);
  const Tensor m = dense_and_aligned(mean), r = dense_and_aligned(rstd);
  const Workspace workspace(dev::batch_norm_workspace_bytes(shape), input);
  BatchNormAffine affine = affine_of(w, std::nullopt);
  if (!weight) affine.dtype = dtype_of(op, "mean", mean);
  const auto result = [&](int i, Tensor& t) {
    return output_mask[i] ? t.mutable_data_ptr() : nullptr;
  };
  dev::batch_norm_backward(
      context.stream(), shape, training, dy.const_data_ptr(), x.const_data_ptr(), {}, nullptr,
      affine, {m.mutable_data_ptr(), r.mutable_data_ptr(), nullptr, nullptr},
      {result(0, grad_input), nullptr, result(1, grad_weight), result(2, grad_bias), nullptr},
      workspace.data());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("batch_norm", TORCH_BOX(&batch_norm));
  m.impl("batch_norm_rung", TORCH_BOX(&batch_norm_rung));
  m.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
}

}  // namespace braze
