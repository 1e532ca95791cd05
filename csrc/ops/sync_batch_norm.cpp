// Batch norm over the batches of several processes, in four ops between which Python exchanges what
// they leave: python/braze/_ops/sync_batch_norm.py.
#include "ops/batch_norm.h"

namespace braze {
namespace {

// [rows, width] of float64: `what` the launchers take as a struct of `width` numbers each.
void check_exchanged(const char* op, const char* what, const Tensor& t, const Tensor& input,
                     std::initializer_list<int64_t> sizes) {
  check_same_device(op, what, t, "input", input);
  bool matches = t.scalar_type() == ScalarType::Double && t.is_contiguous() &&
                 t.dim() == static_cast<int64_t>(sizes.size());
  int64_t d = 0;
  for (const int64_t size : sizes) matches = matches && (t.size(d) == size || size < 0), ++d;
  BRAZE_CHECK(matches, op, ": ", what, " of another shape or dtype: ", shape_string(t), ", ",
              scalar_type_name(t.scalar_type()));
}

// [C, 3]: mean, sum of squares about it, and count of each channel.
Tensor moments(const Tensor& input) {
  const BatchNormShape shape = batch_norm_shape("sync_batch_norm_moments", input);
  const DeviceContext context(input);
  if (input.numel() == 0) return zeros({shape.c, 3}, input, ScalarType::Double);
  Tensor result = empty({shape.c, 3}, input, ScalarType::Double);
  const Tensor x = in_layout(shape, input);
  const Workspace workspace(dev::batch_norm_workspace_bytes(shape), input);
  dev::batch_norm_moments(context.stream(), shape, x.const_data_ptr(),
                          static_cast<MomentsPartial*>(result.mutable_data_ptr()),
                          workspace.data());
  return result;
}

// moments: [C, processes, 3]. The result, the statistics, and the number of elements per channel.
std::tuple<Tensor, Tensor, Tensor> normalise(const Tensor& input, const Tensor& moments,
                                             const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& bias,
                                             const std::optional<Tensor>& running_mean,
                                             const std::optional<Tensor>& running_var,
                                             const std::optional<Tensor>& num_batches_tracked,
                                             std::optional<double> momentum, double eps) {
  const char* op = "sync_batch_norm";
  const BatchNormShape shape = batch_norm_shape(op, input);
  const Norm norm{weight, bias,     running_mean, running_var, num_batches_tracked,
                  true,   momentum, eps};
  // One element here is enough where the others have more.
  BatchNormShape together = shape;
  together.n = 2;
  norm.check(op, together, input);
  check_exchanged(op, "moments", moments, input, {shape.c, -1, 3});
  const DeviceContext context(input);
  Tensor out = empty_like_input(shape, input);
  const Tensor statistics = empty_statistics(input);
  Tensor total = empty({1}, input, ScalarType::Double);
  norm.with_dense([&](const BatchNormAffine& affine, const BatchNormBuffers& buffers) {
    dev::batch_norm_merge(
        context.stream(), shape, static_cast<const MomentsPartial*>(moments.const_data_ptr()),
        static_cast<int>(moments.size(1)), affine, buffers, eps, statistics_of(statistics),
        static_cast<double*>(total.mutable_data_ptr()));
  });
  if (input.numel() > 0) {
    const Tensor x = in_layout(shape, input);
    dev::batch_norm_apply(context.stream(), shape, x.const_data_ptr(), {},
                          statistics_of(statistics), out.mutable_data_ptr(), nullptr);
  }
  return {out, statistics, total};
}

void check_gradient(const char* op, const Tensor& grad_output, const Tensor& input,
                    const std::optional<Tensor>& weight, const Tensor& statistics) {
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  check_channel_vector(op, "weight", weight, input);
  check_statistics(op, statistics, input);
}

// [C, 2]: sums of the gradient and of it times the deviation from the mean; the gradients of weight
// and bias, in weight's dtype or, where it is None, the statistics'.
std::tuple<Tensor, Tensor, Tensor> sums(const Tensor& grad_output, const Tensor& input,
                                        const std::optional<Tensor>& weight,
                                        const Tensor& statistics) {
  const char* op = "sync_batch_norm_sums";
  const BatchNormShape shape = batch_norm_shape(op, input);
  check_gradient(op, grad_output, input, weight, statistics);
  const DeviceContext context(input);
  const ScalarType type = weight ? weight->scalar_type() : statistics_type(input);
  if (input.numel() == 0) {
    return {zeros({shape.c, 2}, input, ScalarType::Double), zeros({shape.c}, input, type),
            zeros({shape.c}, input, type)};
  }
  Tensor result = empty({shape.c, 2}, input, ScalarType::Double);
  Tensor grad_weight = empty({shape.c}, input, type), grad_bias = empty({shape.c}, input, type);
  const Tensor x = in_layout(shape, input), dy = in_layout(shape, grad_output);
  const Workspace workspace(dev::batch_norm_workspace_bytes(shape), input);
  dev::batch_norm_sums(context.stream(), shape, dy.const_data_ptr(), x.const_data_ptr(),
                       {nullptr, nullptr, dtype_of(op, "weight", grad_weight)},
                       statistics_of(statistics), static_cast<GradSums*>(result.mutable_data_ptr()),
                       grad_weight.mutable_data_ptr(), grad_bias.mutable_data_ptr(),
                       workspace.data());
  return {result, grad_weight, grad_bias};
}

// sums: of all processes together; total: of the forward pass.
Tensor input_grad(const Tensor& grad_output, const Tensor& input,
                  const std::optional<Tensor>& weight, const Tensor& statistics, const Tensor& sums,
                  const Tensor& total) {
  const char* op = "sync_batch_norm_input_grad";
  const BatchNormShape shape = batch_norm_shape(op, input);
  check_gradient(op, grad_output, input, weight, statistics);
  check_exchanged(op, "sums", sums, input, {shape.c, 2});
  check_exchanged(op, "total", total, input, {1});
  const DeviceContext context(input);
  Tensor result = empty_like_input(shape, input);
  if (input.numel() == 0) return result;
  const Tensor x = in_layout(shape, input), dy = in_layout(shape, grad_output);
  const auto w = dense(weight);
  const Workspace workspace(dev::batch_norm_workspace_bytes(shape), input);
  dev::batch_norm_input_grad(context.stream(), shape, dy.const_data_ptr(), x.const_data_ptr(),
                             affine_of(w, std::nullopt), statistics_of(statistics),
                             static_cast<const GradSums*>(sums.const_data_ptr()),
                             static_cast<const double*>(total.const_data_ptr()),
                             result.mutable_data_ptr(), workspace.data());
  return result;
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("sync_batch_norm_moments", TORCH_BOX(&moments));
  m.impl("sync_batch_norm", TORCH_BOX(&normalise));
  m.impl("sync_batch_norm_sums", TORCH_BOX(&sums));
  m.impl("sync_batch_norm_input_grad", TORCH_BOX(&input_grad));
}

}  // namespace braze
