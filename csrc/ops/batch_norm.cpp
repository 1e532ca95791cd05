#include "kernels/batch_norm/batch_norm.h"

#include "ops/backend.h"
#include "ops/common.h"

namespace braze {
namespace {

ScalarType statistics_type(const Tensor& input) {
  return input.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

BatchNormShape make_shape(const char* op, const Tensor& input) {
  const DType dtype = dtype_of(op, "input", input);
  BRAZE_CHECK(input.dim() >= 2, op, ": expected input of at least 2 dimensions, but got shape ",
              shape_string(input));
  BatchNormShape shape{dtype, input.size(0), input.size(1), 1, false};
  for (int64_t i = 2; i < input.dim(); ++i) shape.inner *= input.size(i);
  // [n, c] and one-pixel images are rows of channels too.
  shape.channels_last = is_channels_last(input) || shape.inner == 1;
  return shape;
}

// One of weight, bias, running_mean, running_var: c elements on the input's device, in the input's
// dtype or, for 16-bit input, float32.
void check_channel_vector(const char* op, const char* arg, const std::optional<Tensor>& t,
                          const Tensor& input) {
  if (!t) return;
  check_same_device(op, arg, *t, "input", input);
  BRAZE_CHECK(t->numel() == input.size(1), op, ": ", arg, " should contain ", input.size(1),
              " elements not ", t->numel());
  BRAZE_CHECK(t->scalar_type() == input.scalar_type() || t->scalar_type() == statistics_type(input),
              op, ": expected ", arg, " of dtype ", scalar_type_name(input.scalar_type()), " or ",
              scalar_type_name(statistics_type(input)), ", but got ",
              scalar_type_name(t->scalar_type()));
}

void check_pair(const char* op, const char* a_name, const std::optional<Tensor>& a,
                const char* b_name, const std::optional<Tensor>& b) {
  if (a && b) check_same_dtype(op, a_name, *a, b_name, *b);
}

std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(as_contiguous(*t)) : std::nullopt;
}

const void* const_data(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }
void* data(const std::optional<Tensor>& t) { return t ? t->mutable_data_ptr() : nullptr; }

// A buffer that the kernel writes has to be dense; one that is not is copied there and back.
void copy_back(const std::optional<Tensor>& buffer, const std::optional<Tensor>& written) {
  if (!buffer || buffer->data_ptr() == written->data_ptr()) return;
  Tensor target = *buffer;
  torch::stable::copy_(target, *written);
}

bool keeps_channels_last(const BatchNormShape& shape) {
  return shape.channels_last && shape.inner != 1;
}

// Dense, in the layout that the shape says: what results have, and arguments are brought to.
Tensor empty_like_input(const BatchNormShape& shape, const Tensor& input) {
  std::vector<int64_t> sizes(input.dim());
  for (int64_t i = 0; i < input.dim(); ++i) sizes[i] = input.size(i);
  if (input.dim() == 4) return empty_4d(sizes, input, keeps_channels_last(shape));
  return empty(sizes, input);
}

Tensor in_layout(const BatchNormShape& shape, const Tensor& t) {
  if (keeps_channels_last(shape) ? is_channels_last(t) : t.is_contiguous()) return t;
  return with_layout_of(t, empty_like_input(shape, t));
}

Workspace workspace_of(const BatchNormShape& shape, const Tensor& input) {
  return {dev::batch_norm_workspace_bytes(shape), input};
}

BatchNormAffine affine_of(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
  const DType dtype = weight ? dtype_of("batch_norm", "weight", *weight)
                      : bias ? dtype_of("batch_norm", "bias", *bias)
                             : DType::kFloat32;
  return {const_data(weight), const_data(bias), dtype};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, std::optional<Tensor> weight,
                                              std::optional<Tensor> bias,
                                              std::optional<Tensor> running_mean,
                                              std::optional<Tensor> running_var,
                                              std::optional<Tensor> num_batches_tracked,
                                              bool training, std::optional<double> momentum,
                                              double eps) {
  const char* op = "batch_norm";
  const BatchNormShape shape = make_shape(op, input);
  check_channel_vector(op, "running_mean", running_mean, input);
  check_channel_vector(op, "running_var", running_var, input);
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  check_pair(op, "running_mean", running_mean, "running_var", running_var);
  if (training) {
    BRAZE_CHECK(running_mean.has_value() == running_var.has_value(), op,
                ": running_mean and running_var must either both be None or neither be None");
    BRAZE_CHECK(shape.count() != 1, op,
                ": Expected more than 1 value per channel when training, got input size ",
                shape_string(input));
    BRAZE_CHECK(momentum || num_batches_tracked || !running_mean, op,
                ": expected num_batches_tracked where momentum is None");
  } else {
    BRAZE_CHECK(running_mean, op, ": running_mean must be defined in evaluation mode");
    BRAZE_CHECK(running_var, op, ": running_var must be defined in evaluation mode");
  }
  if (num_batches_tracked) {
    check_same_device(op, "num_batches_tracked", *num_batches_tracked, "input", input);
    BRAZE_CHECK(
        num_batches_tracked->scalar_type() == ScalarType::Long && num_batches_tracked->numel() == 1,
        op, ": expected num_batches_tracked of one int64 element, but got shape ",
        shape_string(*num_batches_tracked), " and dtype ",
        scalar_type_name(num_batches_tracked->scalar_type()));
  }
  const DeviceContext context(input);
  Tensor out = empty_like_input(shape, input);
  if (input.numel() == 0) {  // as in torch, the buffers stay as they are
    return {out, zeros({shape.c}, input, statistics_type(input)),
            zeros({shape.c}, input, statistics_type(input))};
  }
  Tensor mean = empty({shape.c}, input, statistics_type(input));
  Tensor rstd = empty({shape.c}, input, statistics_type(input));
  const Tensor x = in_layout(shape, input);
  const auto w = dense(weight), b = dense(bias);
  const auto mean_buffer = dense(running_mean), var_buffer = dense(running_var);
  BatchNormBuffers buffers{
      data(mean_buffer), data(var_buffer),
      running_mean ? dtype_of(op, "running_mean", *running_mean) : DType::kFloat32,
      static_cast<int64_t*>(data(num_batches_tracked)), momentum};
  if (training) {
    const Workspace workspace = workspace_of(shape, input);
    dev::batch_norm_training(context.stream(), shape, x.const_data_ptr(), affine_of(w, b), buffers,
                             eps, out.mutable_data_ptr(), mean.mutable_data_ptr(),
                             rstd.mutable_data_ptr(), workspace.data());
    copy_back(running_mean, mean_buffer);
    copy_back(running_var, var_buffer);
  } else {
    dev::batch_norm_evaluation(context.stream(), shape, x.const_data_ptr(), affine_of(w, b),
                               buffers, eps, out.mutable_data_ptr(), mean.mutable_data_ptr(),
                               rstd.mutable_data_ptr());
  }
  return {out, mean, rstd};
}

// grad_weight and grad_bias come in weight's dtype, or the statistics dtype where it is None.
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    const Tensor& mean, const Tensor& rstd, bool training, std::vector<bool> output_mask) {
  const char* op = "batch_norm_backward";
  const BatchNormShape shape = make_shape(op, input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  check_channel_vector(op, "weight", weight, input);
  for (const auto& [name, t] : {std::pair("mean", mean), std::pair("rstd", rstd)}) {
    check_channel_vector(op, name, t, input);
    BRAZE_CHECK(t.scalar_type() == statistics_type(input), op, ": expected ", name, " of dtype ",
                scalar_type_name(statistics_type(input)), ", but got ",
                scalar_type_name(t.scalar_type()));
  }
  BRAZE_CHECK(output_mask.size() == 3, op, ": expected output_mask of 3 entries, but got ",
              output_mask.size());
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
  const Tensor m = as_contiguous(mean), r = as_contiguous(rstd);
  const Workspace workspace = workspace_of(shape, input);
  BatchNormAffine affine = affine_of(w, std::nullopt);
  if (!weight) affine.dtype = dtype_of(op, "mean", mean);
  const auto result = [&](int i, Tensor& t) {
    return output_mask[i] ? t.mutable_data_ptr() : nullptr;
  };
  dev::batch_norm_backward(context.stream(), shape, training, dy.const_data_ptr(),
                           x.const_data_ptr(), affine, m.const_data_ptr(), r.const_data_ptr(),
                           result(0, grad_input), result(1, grad_weight), result(2, grad_bias),
                           workspace.data());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("batch_norm", TORCH_BOX(&batch_norm));
  m.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
}

}  // namespace braze
