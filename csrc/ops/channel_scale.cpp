#include "launchers/channel_scale.h"

#include "ops/common.h"

namespace braze {
namespace {

ChannelScaleShape checked_shape(const char* op, const char* arg, const Tensor& t) {
  const DType dtype = dtype_of(op, arg, t);
  BRAZE_CHECK(t.dim() == 4, op, ": expected ", arg, " to be 4-D, but got shape ", shape_string(t));
  return {dtype, t.size(0), t.size(1), t.size(2) * t.size(3), is_channels_last(t)};
}

void check_factors(const char* op, const char* arg, const Tensor& t, const Tensor& input) {
  check_same_device(op, arg, t, "input", input);
  check_same_dtype(op, arg, t, "input", input);
  BRAZE_CHECK(same_sizes(t, {input.size(0), input.size(1), 1, 1}), op, ": expected ", arg,
              " of shape [", input.size(0), ", ", input.size(1), ", 1, 1], but got shape ",
              shape_string(t));
}

Tensor channel_scale(const Tensor& input, const Tensor& scale, std::optional<Tensor> spread) {
  const char* op = "channel_scale";
  checked_shape(op, "input", input);
  check_factors(op, "scale", scale, input);
  if (spread) check_factors(op, "spread", *spread, input);
  const DeviceContext context(input);
  const Tensor x = as_image(input), s = as_contiguous(scale);
  const Tensor b = spread ? as_contiguous(*spread) : s;
  Tensor out = dense_like(x);
  if (out.numel() == 0) return out;
  dev::channel_scale(context.stream(), checked_shape(op, "input", x), x.const_data_ptr(),
                     s.const_data_ptr(), spread ? b.const_data_ptr() : nullptr,
                     out.mutable_data_ptr());
  return out;
}

Tensor channel_dot(const Tensor& input, const Tensor& other) {
  const char* op = "channel_dot";
  checked_shape(op, "input", input);
  check_same_device(op, "other", other, "input", input);
  check_same_dtype(op, "other", other, "input", input);
  check_same_shape(op, "other", other, "input", input);
  const DeviceContext context(input);
  const std::vector<int64_t> sizes{input.size(0), input.size(1), 1, 1};
  if (input.numel() == 0) return zeros(sizes, input);
  // In the format of the tensor that has one, so that at most one is copied.
  const Tensor& like = is_channels_last(other) ? other : input;
  const Tensor a = is_channels_last(like) ? with_layout_of(input, like) : as_contiguous(input);
  const Tensor b = with_layout_of(other, a);
  Tensor out = empty(sizes, input);
  dev::channel_dot(context.stream(), checked_shape(op, "input", a), a.const_data_ptr(),
                   b.const_data_ptr(), out.mutable_data_ptr());
  return out;
}

Tensor channel_mean(const Tensor& input) {
  const char* op = "channel_mean";
  const ChannelScaleShape shape = checked_shape(op, "input", input);
  BRAZE_CHECK(shape.pixels > 0, op, ": expected pixels, but got shape ", shape_string(input));
  const DeviceContext context(input);
  const Tensor x = as_image(input);
  Tensor out = empty_4d({input.size(0), input.size(1), 1, 1}, input, is_channels_last(x));
  if (out.numel() == 0) return out;
  dev::channel_mean(context.stream(), checked_shape(op, "input", x), x.const_data_ptr(),
                    out.mutable_data_ptr());
  return out;
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("channel_scale", TORCH_BOX(&channel_scale));
  m.impl("channel_dot", TORCH_BOX(&channel_dot));
  m.impl("channel_mean", TORCH_BOX(&channel_mean));
}

}  // namespace braze
