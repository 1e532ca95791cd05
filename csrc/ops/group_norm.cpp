#include "launchers/group_norm.h"

#include "ops/batch_norm.h"

namespace braze {
namespace {

GroupNormShape checked_shape(const char* op, const Tensor& input, int64_t num_groups) {
  const BatchNormShape planes = batch_norm_shape(op, input);
  BRAZE_CHECK(num_groups > 0, op, ": Expected num groups to be greater than 0, got ", num_groups);
  BRAZE_CHECK(planes.c % num_groups == 0, op,
              ": Expected number of channels in input to be divisible by num_groups, but got input "
              "of shape ",
              shape_string(input), " and num_groups=", num_groups);
  return {planes.dtype, planes.n, planes.c, planes.inner, num_groups};
}

// The result's format is the input's, while the kernels are for planes.
Tensor result_like(const Tensor& input) {
  return empty_like_input(batch_norm_shape("", input), input);
}

// Calls run(where the kernel is to write) for a `result` in whatever format.
template <typename F>
void write_planes(Tensor& result, const F& run) {
  if (result.is_contiguous()) return run(result.mutable_data_ptr());
  const Tensor planes = empty(sizes_of(result), result);
  run(planes.mutable_data_ptr());
  torch::stable::copy_(result, planes);
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& input, std::optional<Tensor> weight,
                                              std::optional<Tensor> bias, int64_t num_groups,
                                              double eps) {
  const char* op = "group_norm";
  const GroupNormShape shape = checked_shape(op, input, num_groups);
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  const DeviceContext context(input);
  Tensor out = result_like(input);
  const std::vector<int64_t> groups{shape.n, shape.groups};
  if (input.numel() == 0) {
    const auto zero = [&] { return zeros(groups, input, statistics_type(input)); };
    return {out, zero(), zero()};
  }
  Tensor mean = empty(groups, input, statistics_type(input));
  Tensor rstd = empty(groups, input, statistics_type(input));
  const Tensor x = as_contiguous(input);
  const auto w = dense(weight), b = dense(bias);
  write_planes(out, [&](void* y) {
    dev::group_norm(context.stream(), shape, x.const_data_ptr(), affine_of(w, b), eps, y,
                    mean.mutable_data_ptr(), rstd.mutable_data_ptr());
  });
  return {out, mean, rstd};
}

// grad_weight and grad_bias come in weight's dtype, or the statistics dtype where it is None.
std::tuple<Tensor, Tensor, Tensor> group_norm_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    const Tensor& mean, const Tensor& rstd, int64_t num_groups, std::vector<bool> output_mask) {
  const char* op = "group_norm_backward";
  const GroupNormShape shape = checked_shape(op, input, num_groups);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  check_channel_vector(op, "weight", weight, input);
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
  Tensor grad_input = output_mask[0] ? result_like(input) : empty({0}, input);
  Tensor grad_weight = channels(output_mask[1]), grad_bias = channels(output_mask[2]);
  if (no_elements) return {grad_input, grad_weight, grad_bias};
  const Tensor x = as_contiguous(input), dy = as_contiguous(grad_output);
  const auto w = dense(weight);
  const Tensor m = as_contiguous(mean), r = as_contiguous(rstd);
  const Workspace workspace(dev::group_norm_workspace_bytes(shape), input);
  const auto wanted = [&](int i, Tensor& t) {
    return output_mask[i] ? t.mutable_data_ptr() : nullptr;
  };
  write_planes(grad_input, [&](void* dx) {
    dev::group_norm_backward(context.stream(), shape, dy.const_data_ptr(), x.const_data_ptr(),
                             affine_of(w, std::nullopt), m.const_data_ptr(), r.const_data_ptr(),
                             {output_mask[0] ? dx : nullptr, wanted(1, grad_weight),
                              wanted(2, grad_bias), dtype_of(op, "weight", grad_weight)},
                             workspace.data());
  });
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("group_norm", TORCH_BOX(&group_norm));
  m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward));
}

}  // namespace braze
