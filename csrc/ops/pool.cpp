#include "launchers/pool.h"

#include "ops/backend.h"

namespace braze {
namespace {

using Ints = std::vector<int64_t>;

struct Pair {
  int64_t h, w;
};

// torch's rules for a setting given per axis: one integer for both, or two.
Pair pair_of(const char* op, const char* arg, const Ints& v) {
  BRAZE_CHECK(v.size() == 1 || v.size() == 2, op, ": ", arg,
              " must either be a single int, or a tuple of two ints");
  return {v[0], v.back()};
}

int64_t output_extent(int64_t in, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation,
                      bool ceil_mode) {
  BRAZE_CHECK(stride != 0, "stride should not be zero");
  BRAZE_CHECK(pad >= 0, "pad must be non-negative, but got pad: ", pad);
  BRAZE_CHECK(pad <= ((kernel - 1) * dilation + 1) / 2,
              "pad should be at most half of effective kernel size, but got pad=", pad,
              ", kernel_size=", kernel, " and dilation=", dilation);
  const int64_t room = in + 2 * pad - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0);
  int64_t out = (room >= 0 ? room / stride : -ceil_div(-room, stride)) + 1;
  // A window may start in the plane or the left padding, not in the right padding.
  if (ceil_mode && (out - 1) * stride >= in + pad) --out;
  return out;
}

// Checks as torch does and fills everything but dtype and channels_last. `in` is [n,] c, h, w.
Pool2dShape make_shape(const char* op, const Ints& in, const Ints& kernel_size, const Ints& stride,
                       const Ints& padding, const Ints& dilation, bool ceil_mode) {
  const auto [r, s] = pair_of(op, "kernel_size", kernel_size);
  BRAZE_CHECK(stride.size() <= 2, op,
              ": stride must either be omitted, a single int, or a tuple of two ints");
  const auto [stride_h, stride_w] = pair_of(op, "stride", stride.empty() ? kernel_size : stride);
  const auto [pad_h, pad_w] = pair_of(op, "padding", padding);
  const auto [dilation_h, dilation_w] = pair_of(op, "dilation", dilation);
  BRAZE_CHECK(in.size() == 3 || in.size() == 4, op,
              ": non-empty 3D or 4D (batch mode) tensor expected for input, but got ", in.size(),
              " dimensions");
  const bool batched = in.size() == 4;
  const int64_t c = in[batched], h = in[batched + 1], w = in[batched + 2];
  const int64_t p = output_extent(h, r, stride_h, pad_h, dilation_h, ceil_mode);
  const int64_t q = output_extent(w, s, stride_w, pad_w, dilation_w, ceil_mode);
  BRAZE_CHECK(r > 0 && s > 0, "kernel size should be greater than zero, but got kH: ", r,
              " kW: ", s);
  BRAZE_CHECK(stride_h > 0 && stride_w > 0,
              "stride should be greater than zero, but got dH: ", stride_h, " dW: ", stride_w);
  BRAZE_CHECK(dilation_h > 0 && dilation_w > 0,
              "dilation should be greater than zero, but got dilationH: ", dilation_h,
              " dilationW: ", dilation_w);
  BRAZE_CHECK(c != 0 && h != 0 && w != 0,
              "Expected 3D or 4D (batch mode) tensor with optional 0 dim batch size for input, but "
              "got a channel count of ",
              c, ", height of ", h, " and width of ", w);
  BRAZE_CHECK(s / 2 >= pad_w && r / 2 >= pad_h,
              "pad should be smaller than or equal to half of kernel size, but got padW = ", pad_w,
              ", padH = ", pad_h, ", kW = ", s, ", kH = ", r);
  BRAZE_CHECK(p >= 1 && q >= 1, "Given input size: (", c, "x", h, "x", w,
              "). Calculated output size: (", c, "x", p, "x", q, "). Output size is too small");
  return {DType::kFloat32,
          batched ? in[0] : 1,
          c,
          h,
          w,
          p,
          q,
          r,
          s,
          stride_h,
          stride_w,
          pad_h,
          pad_w,
          dilation_h,
          dilation_w,
          false};
}

// A tensor of `planes` (the leading dimensions of `like`) with h x w elements each.
Tensor empty_planes(const Pool2dShape& shape, const Tensor& like, int64_t h, int64_t w,
                    std::optional<ScalarType> dtype = std::nullopt) {
  if (like.dim() == 3) return empty({shape.c, h, w}, like, dtype);
  return empty_4d({shape.n, shape.c, h, w}, like, shape.channels_last, dtype);
}

void check_output_sizes(const char* op, const char* arg, const Pool2dShape& shape, const Tensor& t,
                        const Ints& input_size) {
  Ints expected = input_size;
  expected[expected.size() - 2] = shape.p;
  expected[expected.size() - 1] = shape.q;
  std::string text;
  for (const int64_t extent : expected) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  BRAZE_CHECK(sizes_of(t) == expected, op, ": expected ", arg, " of shape [", text, "], but got ",
              shape_string(t));
}

void check_taps(const char* op, const Pool2dShape& shape, const Tensor& taps) {
  const ScalarType expected = has_byte_taps(shape) ? ScalarType::Byte : ScalarType::Int;
  BRAZE_CHECK(taps.scalar_type() == expected, op, ": expected taps of dtype ",
              scalar_type_name(expected), ", but got ", scalar_type_name(taps.scalar_type()));
}

std::tuple<Tensor, Tensor> max_pool2d(const Tensor& input, const Ints& kernel_size,
                                      const Ints& stride, const Ints& padding, const Ints& dilation,
                                      bool ceil_mode) {
  const DType dtype = dtype_of("max_pool2d", "input", input);
  Pool2dShape shape =
      make_shape("max_pool2d", sizes_of(input), kernel_size, stride, padding, dilation, ceil_mode);
  shape.dtype = dtype;
  shape.channels_last = is_channels_last(input);
  const DeviceContext context(input);
  Tensor out = empty_planes(shape, input, shape.p, shape.q);
  Tensor taps = empty_planes(shape, input, shape.p, shape.q,
                             has_byte_taps(shape) ? ScalarType::Byte : ScalarType::Int);
  const Tensor x = in_order(input, shape.channels_last);
  dev::max_pool2d(context.stream(), shape, x.const_data_ptr(), out.mutable_data_ptr(),
                  taps.mutable_data_ptr());
  return {out, taps};
}

Tensor max_pool2d_backward(const Tensor& grad_output, const Tensor& taps, const Ints& input_size,
                           const Ints& kernel_size, const Ints& stride, const Ints& padding,
                           const Ints& dilation, bool ceil_mode, bool channels_last) {
  const char* op = "max_pool2d_backward";
  const DType dtype = dtype_of(op, "grad_output", grad_output);
  check_same_device(op, "taps", taps, "grad_output", grad_output);
  Pool2dShape shape = make_shape(op, input_size, kernel_size, stride, padding, dilation, ceil_mode);
  check_output_sizes(op, "grad_output", shape, grad_output, input_size);
  check_output_sizes(op, "taps", shape, taps, input_size);
  check_taps(op, shape, taps);
  shape.dtype = dtype;
  shape.channels_last = channels_last && input_size.size() == 4;
  const DeviceContext context(grad_output);
  Tensor grad_input = empty_planes(shape, grad_output, shape.h, shape.w);
  const Tensor dy = in_order(grad_output, shape.channels_last),
               chosen = in_order(taps, shape.channels_last);
  dev::max_pool2d_backward(context.stream(), shape, dy.const_data_ptr(), chosen.const_data_ptr(),
                           grad_input.mutable_data_ptr());
  return grad_input;
}

Tensor max_pool2d_indices(const Tensor& taps, const Ints& input_size, const Ints& kernel_size,
                          const Ints& stride, const Ints& padding, const Ints& dilation,
                          bool ceil_mode) {
  const char* op = "max_pool2d_indices";
  Pool2dShape shape = make_shape(op, input_size, kernel_size, stride, padding, dilation, ceil_mode);
  check_output_sizes(op, "taps", shape, taps, input_size);
  check_taps(op, shape, taps);
  shape.channels_last = is_channels_last(taps);
  const DeviceContext context(taps);
  Tensor indices = empty_planes(shape, taps, shape.p, shape.q, ScalarType::Long);
  const Tensor chosen = in_order(taps, shape.channels_last);
  dev::max_pool2d_indices(context.stream(), shape, chosen.const_data_ptr(),
                          static_cast<int64_t*>(indices.mutable_data_ptr()));
  return indices;
}

// Elements of a gradient that is read, one by one, from another order.
constexpr int64_t kMostTurned = int64_t{1} << 20;

ReluPoolShape relu_pool_shape(const char* op, const Tensor& like, const Ints& input_size,
                              const Ints& kernel_size, const Ints& stride, const Ints& padding,
                              bool ceil_mode) {
  BRAZE_CHECK(input_size.size() == 4, op, ": expected input to be 4D, but got ", input_size.size(),
              "D");
  ReluPoolShape shape{
      make_shape(op, input_size, kernel_size, stride, padding, {1}, ceil_mode), {}, false};
  shape.pool.dtype = shape.bias = dtype_of(op, "input", like);
  shape.pool.channels_last = true;
  BRAZE_CHECK(shape.is_supported(), op,
              ": expected windows of up to 3 x 3 with a stride of 2, and fewer than 2^31 elements");
  return shape;
}

// The result is channels_last, or contiguous where asked for; the taps are channels_last.
std::tuple<Tensor, Tensor> relu_max_pool2d(const Tensor& input, const std::optional<Tensor>& bias,
                                           const Ints& kernel_size, const Ints& stride,
                                           const Ints& padding, bool ceil_mode, bool contiguous) {
  const char* op = "relu_max_pool2d";
  ReluPoolShape shape =
      relu_pool_shape(op, input, sizes_of(input), kernel_size, stride, padding, ceil_mode);
  const Pool2dShape& pool = shape.pool;
  shape.turned = contiguous;
  if (bias) {
    check_same_device(op, "bias", *bias, "input", input);
    shape.bias = dtype_of(op, "bias", *bias);
    BRAZE_CHECK(
        shape.bias == pool.dtype || (size_of(pool.dtype) == 2 && shape.bias == DType::kFloat32), op,
        ": expected bias of input's dtype, or float32 for a 16-bit input, but got ",
        scalar_type_name(bias->scalar_type()), " for ", scalar_type_name(input.scalar_type()));
    BRAZE_CHECK(bias->dim() == 1 && bias->size(0) == pool.c, op, ": expected bias of shape [",
                pool.c, "], but got ", shape_string(*bias));
  }
  const DeviceContext context(input);
  const Ints sizes{pool.n, pool.c, pool.p, pool.q};
  Tensor out = empty_4d(sizes, input, !contiguous);
  Tensor taps = empty_4d(sizes, input, true, ScalarType::Byte);
  const Tensor x = in_order(input, pool.channels_last);
  std::optional<Tensor> b;
  if (bias) b = as_contiguous(*bias);
  dev::relu_max_pool2d(context.stream(), shape, x.const_data_ptr(),
                       b ? b->const_data_ptr() : nullptr, out.mutable_data_ptr(),
                       static_cast<uint8_t*>(taps.mutable_data_ptr()));
  return {out, taps};
}

// bias_dtype: of the bias, whose gradient is empty without.
std::tuple<Tensor, Tensor> relu_max_pool2d_backward(const Tensor& grad_output, const Tensor& taps,
                                                    const Ints& input_size, const Ints& kernel_size,
                                                    const Ints& stride, const Ints& padding,
                                                    bool ceil_mode,
                                                    std::optional<ScalarType> bias_dtype) {
  const char* op = "relu_max_pool2d_backward";
  ReluPoolShape shape =
      relu_pool_shape(op, grad_output, input_size, kernel_size, stride, padding, ceil_mode);
  const Pool2dShape& pool = shape.pool;
  check_same_device(op, "taps", taps, "grad_output", grad_output);
  check_output_sizes(op, "grad_output", pool, grad_output, input_size);
  check_output_sizes(op, "taps", pool, taps, input_size);
  check_taps(op, pool, taps);
  // A large one had better be transposed.
  shape.turned = grad_output.is_contiguous() && pool.output_count() <= kMostTurned;
  const DeviceContext context(grad_output);
  Tensor grad_input = empty_planes(pool, grad_output, pool.h, pool.w);
  const Ints channels{bias_dtype ? pool.c : 0};
  if (bias_dtype && pool.n == 0) return {grad_input, zeros(channels, grad_output, *bias_dtype)};
  Tensor grad_bias = empty(channels, grad_output, bias_dtype);
  if (bias_dtype) shape.bias = dtype_of(op, "bias", grad_bias);
  BRAZE_CHECK(
      shape.bias == pool.dtype || (size_of(pool.dtype) == 2 && shape.bias == DType::kFloat32), op,
      ": expected a bias of grad_output's dtype, or float32 for a 16-bit one");
  const Tensor dy = shape.turned ? grad_output : in_order(grad_output, pool.channels_last);
  const Tensor chosen = in_order(taps, pool.channels_last);
  const Workspace workspace(bias_dtype ? dev::relu_max_pool2d_workspace_bytes(shape) : 0,
                            grad_output);
  dev::relu_max_pool2d_backward(
      context.stream(), shape, dy.const_data_ptr(),
      static_cast<const uint8_t*>(chosen.const_data_ptr()), grad_input.mutable_data_ptr(),
      bias_dtype ? grad_bias.mutable_data_ptr() : nullptr, workspace.data());
  return {grad_input, grad_bias};
}

AvgPoolDivisor make_divisor(bool count_include_pad, std::optional<int64_t> divisor_override) {
  BRAZE_CHECK(divisor_override != 0, "divisor must be not zero");
  return {count_include_pad, divisor_override.value_or(0)};
}

Tensor avg_pool2d(const Tensor& input, const Ints& kernel_size, const Ints& stride,
                  const Ints& padding, bool ceil_mode, bool count_include_pad,
                  std::optional<int64_t> divisor_override) {
  const DType dtype = dtype_of("avg_pool2d", "input", input);
  const AvgPoolDivisor divisor = make_divisor(count_include_pad, divisor_override);
  Pool2dShape shape =
      make_shape("avg_pool2d", sizes_of(input), kernel_size, stride, padding, {1}, ceil_mode);
  shape.dtype = dtype;
  shape.channels_last = is_channels_last(input);
  const DeviceContext context(input);
  Tensor out = empty_planes(shape, input, shape.p, shape.q);
  const Tensor x = in_order(input, shape.channels_last);
  dev::avg_pool2d(context.stream(), shape, divisor, x.const_data_ptr(), out.mutable_data_ptr());
  return out;
}

Tensor avg_pool2d_backward(const Tensor& grad_output, const Ints& input_size,
                           const Ints& kernel_size, const Ints& stride, const Ints& padding,
                           bool ceil_mode, bool count_include_pad,
                           std::optional<int64_t> divisor_override, bool channels_last) {
  const char* op = "avg_pool2d_backward";
  const DType dtype = dtype_of(op, "grad_output", grad_output);
  const AvgPoolDivisor divisor = make_divisor(count_include_pad, divisor_override);
  Pool2dShape shape = make_shape(op, input_size, kernel_size, stride, padding, {1}, ceil_mode);
  check_output_sizes(op, "grad_output", shape, grad_output, input_size);
  shape.dtype = dtype;
  shape.channels_last = channels_last && input_size.size() == 4;
  const DeviceContext context(grad_output);
  Tensor grad_input = empty_planes(shape, grad_output, shape.h, shape.w);
  const Tensor dy = in_order(grad_output, shape.channels_last);
  dev::avg_pool2d_backward(context.stream(), shape, divisor, dy.const_data_ptr(),
                           grad_input.mutable_data_ptr());
  return grad_input;
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("max_pool2d", TORCH_BOX(&max_pool2d));
  m.impl("max_pool2d_backward", TORCH_BOX(&max_pool2d_backward));
  m.impl("max_pool2d_indices", TORCH_BOX(&max_pool2d_indices));
  m.impl("relu_max_pool2d", TORCH_BOX(&relu_max_pool2d));
  m.impl("relu_max_pool2d_backward", TORCH_BOX(&relu_max_pool2d_backward));
  m.impl("avg_pool2d", TORCH_BOX(&avg_pool2d));
  m.impl("avg_pool2d_backward", TORCH_BOX(&avg_pool2d_backward));
}

}  // namespace braze
