#include "launchers/group_norm.h"

#include "launchers/activation.h"
#include "ops/activation.h"
#include "ops/batch_norm.h"
#include "ops/transpose.h"

namespace braze {
namespace {

// result: the dtype of what the forward makes, whose gradient has it too.
GroupNormShape checked_shape(const char* op, const Tensor& input, int64_t num_groups,
                             ScalarType result) {
  const BatchNormShape planes = batch_norm_shape(op, input);
  BRAZE_CHECK(num_groups > 0, op, ": Expected num groups to be greater than 0, got ", num_groups);
  BRAZE_CHECK(planes.c % num_groups == 0, op,
              ": Expected number of channels in input to be divisible by num_groups, but got input "
              "of shape ",
              shape_string(input), " and num_groups=", num_groups);
  const bool channels_last = keeps_channels_last(planes) && dev::group_norm_takes_channels_last();
  const bool is_own = result == input.scalar_type();
  const DType of_result = is_own ? planes.dtype : DType::kFloat32;
  BRAZE_CHECK(is_own || (result == ScalarType::Float &&
                         (planes.dtype == DType::kBFloat16 || planes.dtype == DType::kFloat16)),
              op, ": expected dtype to be the input's, or float32 for a 16-bit input, but got ",
              scalar_type_name(result), " for ", scalar_type_name(input.scalar_type()));
  return {planes.dtype, of_result, planes.n, planes.c, planes.inner, num_groups, channels_last};
}

// Where the kernels take no float32 result: what they are given instead.
Tensor in_float32(const Tensor& t) {
  Tensor copy = t.dim() == 4 ? empty_4d(sizes_of(t), t, is_channels_last(t), ScalarType::Float)
                             : empty(sizes_of(t), t, ScalarType::Float);
  torch::stable::copy_(copy, t);
  return copy;
}
std::optional<Tensor> in_float32(const std::optional<Tensor>& t) {
  return t ? std::optional(in_float32(*t)) : t;
}
bool is_taken(const GroupNormShape& shape) {
  return shape.result == shape.dtype || dev::group_norm_takes_float32(shape);
}

// As the kernels take it: in the shape's layout. Where they take none but planes, these are made.
// dtype: of the tensor.
Tensor as_taken(const DeviceContext& context, const GroupNormShape& shape, DType dtype,
                const Tensor& t) {
  if (shape.channels_last) return in_layout({dtype, shape.n, shape.c, shape.inner, true}, t);
  if (!is_channels_last(t)) return as_contiguous(t);
  return transposed(context, t, sizes_of(t), shape.n, shape.inner, shape.c);
}

// A tensor of the input's format, and of a dtype (the input's where that is not channels_last),
// that run(memory) fills, in the shape's layout.
template <typename F>
Tensor written(const DeviceContext& context, const GroupNormShape& shape, const Tensor& input,
               ScalarType dtype, const F& run) {
  if (shape.channels_last) {
    Tensor result = empty_4d(sizes_of(input), input, true, dtype);
    run(result.mutable_data_ptr());
    return result;
  }
  Tensor planes = empty(sizes_of(input), input);
  run(planes.mutable_data_ptr());
  if (!is_channels_last(input)) return planes;
  Tensor result = empty_4d(sizes_of(input), input, true);
  dev::transpose_copy(context.stream(), shape.dtype, planes.const_data_ptr(),
                      result.mutable_data_ptr(), shape.n, shape.c, shape.inner);
  return result;
}

// The same of what is empty or not wanted.
Tensor unwritten(const Tensor& input, ScalarType dtype) {
  const Tensor result = empty_like_input(batch_norm_shape("group_norm", input), input);
  return dtype == input.scalar_type() ? result : in_float32(result);
}

// The normalised images, mean and rstd.
std::tuple<Tensor, Tensor, Tensor> normalised(const char* op, const Tensor& input,
                                              const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, int64_t num_groups,
                                              double eps, const Activation& activation,
                                              std::optional<ScalarType> dtype = std::nullopt) {
  const ScalarType result = dtype.value_or(input.scalar_type());
  GroupNormShape shape = checked_shape(op, input, num_groups, result);
  if (!is_taken(shape)) {
    return normalised(op, in_float32(input), in_float32(weight), in_float32(bias), num_groups, eps,
                      activation);
  }
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  const DeviceContext context(input);
  const std::vector<int64_t> groups{shape.n, shape.groups};
  if (input.numel() == 0) {
    const auto zero = [&] { return zeros(groups, input, statistics_type(input)); };
    return {unwritten(input, result), zero(), zero()};
  }
  if (dev::group_norm_takes_activation(shape)) shape.activation = activation;
  Tensor mean = empty(groups, input, statistics_type(input));
  Tensor rstd = empty(groups, input, statistics_type(input));
  const Tensor x = as_taken(context, shape, shape.dtype, input);
  const auto w = dense(weight), b = dense(bias);
  const Workspace workspace(dev::group_norm_forward_workspace_bytes(shape), input);
  const Tensor out = written(context, shape, input, result, [&](void* y) {
    dev::group_norm(context.stream(), shape, x.const_data_ptr(), affine_of(w, b), eps, y,
                    mean.mutable_data_ptr(), rstd.mutable_data_ptr(), workspace.data());
  });
  if (!activation.identity() && shape.activation.identity()) {
    dev::activation(context.stream(), shape.dtype, activation, out.const_data_ptr(),
                    out.mutable_data_ptr(), out.numel());
  }
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& input, std::optional<Tensor> weight,
                                              std::optional<Tensor> bias, int64_t num_groups,
                                              double eps, std::optional<ScalarType> dtype) {
  return normalised("group_norm", input, weight, bias, num_groups, eps, kIdentity, dtype);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_act(const Tensor& input, std::optional<Tensor> weight,
                                                  std::optional<Tensor> bias, int64_t num_groups,
                                                  double eps, const std::string& activation,
                                                  double first, double second) {
  const char* op = "group_norm_act";
  return normalised(op, input, weight, bias, num_groups, eps,
                    activation_of(op, activation, first, second));
}

// What a gradient passes back to in front of an activation that the kernels do not take: that of
// the value there, which is made again.
Tensor in_front(const DeviceContext& context, const Activation& activation,
                const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                const std::optional<Tensor>& bias, int64_t num_groups, double eps) {
  const char* op = "group_norm_act_backward";
  const Tensor before =
      std::get<0>(normalised(op, input, weight, bias, num_groups, eps, kIdentity));
  const Tensor dy = with_layout_of(grad_output, before);
  Tensor result = dense_like(before);
  dev::activation_backward(context.stream(), dtype_of(op, "input", input), activation,
                           dy.const_data_ptr(), before.const_data_ptr(), result.mutable_data_ptr(),
                           result.numel());
  return result;
}

// grad_weight and grad_bias come in weight's dtype, or the statistics dtype where it is None.
std::tuple<Tensor, Tensor, Tensor> gradients(const char* op, const Tensor& grad_output,
                                             const Tensor& input,
                                             const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& bias, const Tensor& mean,
                                             const Tensor& rstd, int64_t num_groups, double eps,
                                             const Activation& activation,
                                             const std::vector<bool>& output_mask) {
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  GroupNormShape shape = checked_shape(op, input, num_groups, grad_output.scalar_type());
  BRAZE_CHECK(activation.identity() || shape.result == shape.dtype, op,
              ": expected grad_output of the input's dtype, but got ",
              scalar_type_name(grad_output.scalar_type()));
  if (!is_taken(shape)) {
    auto [dx, dweight, dbias] =
        gradients(op, grad_output, in_float32(input), in_float32(weight), bias, mean, rstd,
                  num_groups, eps, activation, output_mask);
    const auto narrowed = [](const Tensor& t, const Tensor& like) {
      Tensor copy = t.dim() == 4 ? empty_4d(sizes_of(t), like, is_channels_last(t))
                                 : empty(sizes_of(t), like);
      torch::stable::copy_(copy, t);
      return copy;
    };
    if (!weight) return {narrowed(dx, input), dweight, dbias};
    return {narrowed(dx, input), narrowed(dweight, *weight), narrowed(dbias, *weight)};
  }
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  for (const auto& [name, t] : {std::pair("mean", mean), std::pair("rstd", rstd)}) {
    check_same_device(op, name, t, "input", input);
    BRAZE_CHECK(t.numel() == shape.rows() && t.scalar_type() == statistics_type(input), op,
                ": expected ", name, " of ", shape.rows(), " elements and dtype ",
                scalar_type_name(statistics_type(input)), ", but got shape ", shape_string(t),
                " and dtype ", scalar_type_name(t.scalar_type()));
  }
  BRAZE_CHECK(output_mask.size() == 3, op, ": expected output_mask of 3 entries, but got ",
              output_mask.size());
  const DeviceContext context(input);
  const ScalarType parameter_type = weight ? weight->scalar_type() : statistics_type(input);
  const bool no_elements = input.numel() == 0;
  const auto channels = [&](bool wanted) {
    const std::vector<int64_t> sizes{wanted ? shape.c : 0};
    return no_elements ? zeros(sizes, input, parameter_type) : empty(sizes, input, parameter_type);
  };
  Tensor grad_weight = channels(output_mask[1]), grad_bias = channels(output_mask[2]);
  if (no_elements) {
    return {output_mask[0] ? unwritten(input, input.scalar_type()) : empty({0}, input), grad_weight,
            grad_bias};
  }
  if (dev::group_norm_takes_activation(shape)) shape.activation = activation;
  const bool aside = !activation.identity() && shape.activation.identity();
  const Tensor grad =
      aside ? in_front(context, activation, grad_output, input, weight, bias, num_groups, eps)
            : grad_output;
  const Tensor x = as_taken(context, shape, shape.dtype, input);
  const Tensor dy = as_taken(context, shape, shape.result, grad);
  const auto w = dense(weight), b = dense(bias);
  const Tensor m = as_contiguous(mean), r = as_contiguous(rstd);
  const Workspace workspace(dev::group_norm_workspace_bytes(shape), input);
  const auto wanted = [&](int i, Tensor& t) {
    return output_mask[i] ? t.mutable_data_ptr() : nullptr;
  };
  const auto run = [&](void* dx) {
    dev::group_norm_backward(
        context.stream(), shape, dy.const_data_ptr(), x.const_data_ptr(), affine_of(w, b),
        m.const_data_ptr(), r.const_data_ptr(),
        {dx, wanted(1, grad_weight), wanted(2, grad_bias), dtype_of(op, "weight", grad_weight)},
        workspace.data());
  };
  if (output_mask[0]) {
    return {written(context, shape, input, input.scalar_type(), run), grad_weight, grad_bias};
  }
  run(nullptr);
  return {empty({0}, input), grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    const Tensor& mean, const Tensor& rstd, int64_t num_groups, std::vector<bool> output_mask) {
  return gradients("group_norm_backward", grad_output, input, weight, std::nullopt, mean, rstd,
                   num_groups, 0, kIdentity, output_mask);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_act_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    std::optional<Tensor> bias, const Tensor& mean, const Tensor& rstd, int64_t num_groups,
    double eps, const std::string& activation, double first, double second,
    std::vector<bool> output_mask) {
  const char* op = "group_norm_act_backward";
  return gradients(op, grad_output, input, weight, bias, mean, rstd, num_groups, eps,
                   activation_of(op, activation, first, second), output_mask);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("group_norm", TORCH_BOX(&group_norm));
  m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward));
  m.impl("group_norm_act", TORCH_BOX(&group_norm_act));
  m.impl("group_norm_act_backward", TORCH_BOX(&group_norm_act_backward));
}

}  // namespace braze
