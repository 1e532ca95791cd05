// bn_relu_max_pool2d: what follows a convolution in a block (bn_pool.h).
#include "kernels/fused/bn_pool.h"

#include "ops/batch_norm.h"

namespace braze {
namespace {

BnPoolShape bn_pool_shape(const char* op, const Tensor& input) {
  const DType dtype = dtype_of(op, "input", input);
  BRAZE_CHECK(input.dim() == 4, op, ": expected a 4-D input, but got shape ", shape_string(input));
  const BnPoolShape shape{dtype,         input.size(0), input.size(1),
                          input.size(2), input.size(3), is_channels_last(input)};
  BRAZE_CHECK(shape.pooled() > 0, op,
              ": expected an input with at least one 2x2 window, but got shape ",
              shape_string(input));
  BRAZE_CHECK(shape.tiles() <= kBnPoolMostTiles, op,
              ": expected an input of fewer than 2^31 2x2 tiles, but got shape ",
              shape_string(input));
  return shape;
}

Tensor empty_pooled(const BnPoolShape& shape, const Tensor& input) {
  return empty_4d({shape.n, shape.c, shape.p(), shape.q()}, input, shape.channels_last);
}

Tensor workspace_of(const BnPoolShape& shape, const Tensor& input) {
  return empty({dev::bn_pool_workspace_bytes(shape)}, input, ScalarType::Byte);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bn_relu_max_pool2d(
    const Tensor& input, std::optional<Tensor> weight, std::optional<Tensor> bias,
    std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
    std::optional<Tensor> num_batches_tracked, bool training, std::optional<double> momentum,
    double eps) {
  const char* op = "bn_relu_max_pool2d";
  const BnPoolShape shape = bn_pool_shape(op, input);
  check_arguments(op, shape.norm(), input, weight, bias, running_mean, running_var,
                  num_batches_tracked, training, momentum);
  const DeviceContext context(input);
  Tensor out = empty_pooled(shape, input);
  Tensor codes = empty({bn_pool_code_words(shape)}, input, ScalarType::Int);
  Tensor mean = empty({shape.c}, input, statistics_type(input));
  Tensor rstd = empty({shape.c}, input, statistics_type(input));
  const Tensor z = in_layout(shape.norm(), input), workspace = workspace_of(shape, input);
  const auto w = dense(weight), b = dense(bias);
  const auto mean_buffer = dense(running_mean), var_buffer = dense(running_var);
  dev::bn_pool_forward(context.stream(), shape, training, z.const_data_ptr(), affine_of(w, b),
                       buffers_of(mean_buffer, var_buffer, num_batches_tracked, momentum), eps,
                       out.mutable_data_ptr(), static_cast<uint32_t*>(codes.mutable_data_ptr()),
                       mean.mutable_data_ptr(), rstd.mutable_data_ptr(),
                       workspace.mutable_data_ptr());
  if (training) {
    copy_back(running_mean, mean_buffer);
    copy_back(running_var, var_buffer);
  }
  return {out, codes, mean, rstd};
}

// grad_weight and grad_bias come in weight's dtype, or the statistics dtype where it is None.
std::tuple<Tensor, Tensor, Tensor> bn_relu_max_pool2d_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    const Tensor& codes, const Tensor& mean, const Tensor& rstd, bool training,
    std::vector<bool> output_mask) {
  const char* op = "bn_relu_max_pool2d_backward";
  const BnPoolShape shape = bn_pool_shape(op, input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_device(op, "codes", codes, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_channel_vector(op, "weight", weight, input);
  check_statistics(op, mean, rstd, output_mask, input);
  BRAZE_CHECK(codes.scalar_type() == ScalarType::Int && codes.is_contiguous() &&
                  codes.numel() == bn_pool_code_words(shape),
              op, ": expected codes of ", bn_pool_code_words(shape),
              " int32 elements, but got shape ", shape_string(codes));
  const DeviceContext context(input);
  const Tensor pooled = empty_pooled(shape, input);
  check_same_shape(op, "grad_output", grad_output, "the pooled result", pooled);
  const Tensor dy = with_layout_of(grad_output, pooled);
  const Tensor z = in_layout(shape.norm(), input), workspace = workspace_of(shape, input);
  const ScalarType affine_type = weight ? weight->scalar_type() : statistics_type(input);
  Tensor grad_input = output_mask[0] ? empty_like_input(shape.norm(), input) : empty({0}, input);
  Tensor grad_weight = empty({output_mask[1] ? shape.c : 0}, input, affine_type);
  Tensor grad_bias = empty({output_mask[2] ? shape.c : 0}, input, affine_type);
  const auto w = dense(weight);
  const Tensor m = as_contiguous(mean), r = as_contiguous(rstd);
  BatchNormAffine affine = affine_of(w, std::nullopt);
  if (!weight) affine.dtype = dtype_of(op, "mean", mean);
  const auto result = [&](int i, Tensor& t) {
    return output_mask[i] ? t.mutable_data_ptr() : nullptr;
  };
  dev::bn_pool_backward(context.stream(), shape, training, dy.const_data_ptr(), z.const_data_ptr(),
                        static_cast<const uint32_t*>(codes.const_data_ptr()), affine,
                        m.const_data_ptr(), r.const_data_ptr(), result(0, grad_input),
                        result(1, grad_weight), result(2, grad_bias), workspace.mutable_data_ptr());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("bn_relu_max_pool2d", TORCH_BOX(&bn_relu_max_pool2d));
  m.impl("bn_relu_max_pool2d_backward", TORCH_BOX(&bn_relu_max_pool2d_backward));
}

}  // namespace braze
