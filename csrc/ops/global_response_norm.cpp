#include "launchers/global_response_norm.h"

#include "ops/batch_norm.h"

namespace braze {
namespace {

ChannelScaleShape checked_shape(const char* op, const Tensor& input, const Tensor& weight,
                                const Tensor& bias) {
  const DType dtype = dtype_of(op, "input", input);
  BRAZE_CHECK(input.dim() == 4, op, ": expected input to be 4-D, but got shape ",
              shape_string(input));
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_same_dtype(op, "bias", bias, "weight", weight);
  return {dtype, input.size(0), input.size(1), input.size(2) * input.size(3),
          is_channels_last(input)};
}

std::vector<int64_t> sizes_of_norms(const ChannelScaleShape& shape) { return {shape.n, shape.c}; }

std::tuple<Tensor, Tensor, Tensor> global_response_norm(const Tensor& input, const Tensor& weight,
                                                        const Tensor& bias, double eps) {
  const char* op = "global_response_norm";
  const ChannelScaleShape shape = checked_shape(op, input, weight, bias);
  const DeviceContext context(input);
  const ScalarType statistics = statistics_type(input);
  const Tensor x = as_image(input);
  Tensor out = dense_like(x);
  if (input.numel() == 0) {
    return {out, zeros(sizes_of_norms(shape), input, statistics),
            zeros({shape.n}, input, statistics)};
  }
  Tensor norms = empty(sizes_of_norms(shape), input, statistics);
  Tensor scales = empty({shape.n}, input, statistics);
  const Tensor w = as_contiguous(weight), b = as_contiguous(bias);
  dev::global_response_norm(context.stream(), shape, x.const_data_ptr(),
                            {w.const_data_ptr(), b.const_data_ptr(), dtype_of(op, "weight", w)},
                            eps, out.mutable_data_ptr(), norms.mutable_data_ptr(),
                            scales.mutable_data_ptr());
  return {out, norms, scales};
}

std::tuple<Tensor, Tensor, Tensor> global_response_norm_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, const Tensor& norms,
    const Tensor& scales, std::vector<bool> output_mask) {
  const char* op = "global_response_norm_backward";
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  const ChannelScaleShape shape = checked_shape(op, input, weight, weight);
  for (const auto& [name, t, count] :
       {std::tuple("norms", norms, shape.n * shape.c), std::tuple("scales", scales, shape.n)}) {
    check_same_device(op, name, t, "input", input);
    BRAZE_CHECK(t.numel() == count && t.scalar_type() == statistics_type(input), op, ": expected ",
                name, " of ", count, " elements and dtype ",
                scalar_type_name(statistics_type(input)), ", but got shape ", shape_string(t),
                " and dtype ", scalar_type_name(t.scalar_type()));
  }
  BRAZE_CHECK(output_mask.size() == 2, op, ": expected output_mask of 2 entries, but got ",
              output_mask.size());
  const DeviceContext context(input);
  const Tensor x = as_image(input);
  Tensor grad_input = output_mask[0] ? dense_like(x) : empty({0}, input);
  const std::vector<int64_t> sizes{output_mask[1] ? shape.c : 0};
  if (input.numel() == 0) return {grad_input, zeros(sizes, weight), zeros(sizes, weight)};
  Tensor grad_weight = empty(sizes, weight), grad_bias = empty(sizes, weight);
  const Tensor dy = with_layout_of(grad_output, x), w = as_contiguous(weight);
  const Tensor g = as_contiguous(norms), r = as_contiguous(scales);
  const Workspace workspace(dev::global_response_norm_backward_workspace_bytes(shape), input);
  const auto wanted = [&](bool is_wanted, Tensor& t) {
    return is_wanted ? t.mutable_data_ptr() : nullptr;
  };
  dev::global_response_norm_backward(
      context.stream(), shape, dy.const_data_ptr(), x.const_data_ptr(),
      {w.const_data_ptr(), nullptr, dtype_of(op, "weight", w)}, g.const_data_ptr(),
      r.const_data_ptr(),
      {wanted(output_mask[0], grad_input), wanted(output_mask[1], grad_weight),
       wanted(output_mask[1], grad_bias)},
      workspace.data());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("global_response_norm", TORCH_BOX(&global_response_norm));
  m.impl("global_response_norm_backward", TORCH_BOX(&global_response_norm_backward));
}

}  // namespace braze
