// conv_transpose2d and its backward: torch's checks. It is the gradient of conv2d with respect to
// its input: x is the result, y the input, both with the weight as it is. So the passes are
// conv2d's (Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", 2016,
// chapter 4).
#include <algorithm>

#include "ops/conv2d.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

struct Geometry {
  const Sizes &stride, &padding, &output_padding, &dilation;
  int64_t groups;
};

// "name_height: 1 name_width: 2"
std::string pair_string(const char* name, const Sizes& v, const char* separator = " ") {
  return concat(name, "_height: ", v[0], separator, name, "_width: ", v[1]);
}

void check_arguments(const Tensor& input, const Tensor& weight, const Geometry& g) {
  check_same_device("conv_transpose2d", "weight", weight, "input", input);
  check_same_dtype("conv_transpose2d", "weight", weight, "input", input);
  BRAZE_CHECK(input.dim() == 4,
              "Expected 3D (unbatched) or 4D (batched) input to conv_transpose2d, but got "
              "input of size: ",
              shape_string(input));
  BRAZE_CHECK(weight.dim() == 4,
              "conv_transpose2d: expected weight to be 4D, but got weight of size ",
              shape_string(weight));
  BRAZE_CHECK(g.stride.size() == 2 && g.padding.size() == 2 && g.output_padding.size() == 2 &&
                  g.dilation.size() == 2,
              "conv_transpose2d: expected stride, padding, output_padding and dilation of two "
              "values each");
  BRAZE_CHECK(g.groups > 0, "non-positive groups is not supported");
  for (int i = 0; i < 2; ++i) {
    BRAZE_CHECK(g.padding[i] >= 0, "negative padding is not supported");
    BRAZE_CHECK(g.output_padding[i] >= 0, "negative output_padding is not supported");
    BRAZE_CHECK(g.stride[i] > 0, "non-positive stride is not supported");
    BRAZE_CHECK(g.dilation[i] > 0, "dilation should be greater than zero, but got ",
                pair_string("dilation", g.dilation, ", "));
  }
  BRAZE_CHECK(weight.size(0) >= g.groups, "Given groups=", g.groups,
              ", expected weight to be at least ", g.groups,
              " at dimension 0, but got weight of size ", shape_string(weight), " instead");
  BRAZE_CHECK(weight.size(0) % g.groups == 0, "Given groups=", g.groups,
              ", expected weight to be divisible by ", g.groups,
              " at dimension 0, but got weight of size [", shape_string(weight), "] instead");
  BRAZE_CHECK(input.size(1) == weight.size(0), "Given transposed=1, weight of size ",
              shape_string(weight), ", expected input", shape_string(input), " to have ",
              weight.size(0), " channels, but got ", input.size(1), " channels instead");
  BRAZE_CHECK(input.size(2) > 0 && input.size(3) > 0,
              "Only zero batch or zero channel inputs are supported, but got input shape: ",
              shape_string(input));
  BRAZE_CHECK(weight.size(2) > 0 && weight.size(3) > 0,
              "kernel size should be greater than zero, but got ",
              pair_string("kernel", {weight.size(2), weight.size(3)}));
  BRAZE_CHECK(weight.size(1) > 0,
              "non-empty 2D or 4D weight tensor expected, but got: ", shape_string(weight));
  for (int i = 0; i < 2; ++i) {
    BRAZE_CHECK(g.output_padding[i] < std::max(g.stride[i], g.dilation[i]),
                "output padding must be smaller than either stride or dilation, but got ",
                pair_string("output_padding", g.output_padding), " ",
                pair_string("stride", g.stride), " ", pair_string("dilation", g.dilation));
  }
}

// The convolution whose input is the result. (With an output padding of a stride or more, it has
// windows for more outputs than p x q: those are not there.)
Conv2dShape shape_of(const Tensor& input, const Tensor& weight, const Geometry& g, bool allow_tf32,
                     bool deterministic) {
  check_arguments(input, weight, g);
  Conv2dShape s{};
  s.dtype = dtype_of("conv_transpose2d", "input", input);
  s.n = input.size(0), s.k = input.size(1), s.p = input.size(2), s.q = input.size(3);
  s.c = weight.size(1) * g.groups, s.r = weight.size(2), s.s = weight.size(3);
  s.stride_h = g.stride[0], s.stride_w = g.stride[1];
  s.pad_h = g.padding[0], s.pad_w = g.padding[1];
  s.dilation_h = g.dilation[0], s.dilation_w = g.dilation[1];
  s.h = (s.p - 1) * s.stride_h - 2 * s.pad_h + s.dilation_h * (s.r - 1) + g.output_padding[0] + 1;
  s.w = (s.q - 1) * s.stride_w - 2 * s.pad_w + s.dilation_w * (s.s - 1) + g.output_padding[1] + 1;
  BRAZE_CHECK(s.h > 0 && s.w > 0, "Given input size per channel: (", s.p, " x ", s.q,
              "). Calculated output size per channel: (", s.h, " x ", s.w,
              "). Output size is too small");
  s.groups = g.groups;
  s.allow_tf32 = allow_tf32;
  s.deterministic = deterministic;
  return s;
}

Tensor conv_transpose2d(const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias, const Sizes& stride,
                        const Sizes& padding, const Sizes& output_padding, int64_t groups,
                        const Sizes& dilation, bool allow_tf32, bool deterministic,
                        const std::string& backend) {
  const Conv2dShape shape =
      shape_of(input, weight, {stride, padding, output_padding, dilation, groups}, allow_tf32,
               deterministic);
  if (bias) {
    check_same_device("conv_transpose2d", "bias", *bias, "input", input);
    check_same_dtype("conv_transpose2d", "bias", *bias, "input", input);
    BRAZE_CHECK(same_sizes(*bias, Sizes{shape.c}), "Given transposed=1, weight of size ",
                shape_string(weight), ", expected bias to be 1-dimensional with ", shape.c,
                " elements, but got bias of size ", shape_string(*bias), " instead");
  }
  return run_conv2d_forward(Conv2dPass::kDgrad, shape, input, weight, bias, backend, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> conv_transpose2d_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, const Sizes& stride,
    const Sizes& padding, const Sizes& output_padding, int64_t groups, const Sizes& dilation,
    const std::vector<bool>& output_mask, bool allow_tf32, bool deterministic,
    const std::string& backend) {
  const Conv2dShape shape =
      shape_of(input, weight, {stride, padding, output_padding, dilation, groups}, allow_tf32,
               deterministic);
  check_grad_output("conv_transpose2d_backward", grad_output, input,
                    {shape.n, shape.c, shape.h, shape.w});
  return run_conv2d_gradients(Conv2dPass::kDgrad, shape, grad_output, input, weight, backend,
                              output_mask);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("conv_transpose2d", TORCH_BOX(&conv_transpose2d));
  m.impl("conv_transpose2d_backward", TORCH_BOX(&conv_transpose2d_backward));
}

}  // namespace braze
