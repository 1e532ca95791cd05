#include "launchers/scale_add.h"

#include "ops/backend.h"
#include "ops/common.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

// float32 where one of the tensors has it, beside 16-bit ones; else the input's.
ScalarType checked_result(const char* op, const Tensor& input, const char* arg,
                          const Tensor& other) {
  const ScalarType own = input.scalar_type(), type = other.scalar_type();
  const bool is_half = own == ScalarType::BFloat16 || own == ScalarType::Half;
  BRAZE_CHECK(type == own || (is_half && type == ScalarType::Float), op, ": expected ", arg,
              " of input's dtype, or float32 for a 16-bit input, but got ", scalar_type_name(type),
              " for ", scalar_type_name(own));
  return type;
}

// The input's dimension that the scale goes along: the one where it has more than one element.
int64_t scaled_dim(const char* op, const Tensor& input, const Tensor& scale) {
  const int64_t outer = input.dim() - scale.dim();
  int64_t found = 0;
  bool fits = scale.dim() > 0 && outer >= 0;
  for (int64_t i = 0; fits && i < scale.dim(); ++i) {
    if (scale.size(i) != 1) found = i;
  }
  for (int64_t i = 0; fits && i < scale.dim(); ++i) {
    fits = i == found ? scale.size(i) == input.size(outer + i) : scale.size(i) == 1;
  }
  BRAZE_CHECK(fits, op,
              ": expected scale to have the extent of one of input's dimensions and 1 in ",
              "those behind it, but got ", shape_string(scale), " for input of shape ",
              shape_string(input));
  return outer + found;
}

// The layout in which the kernels take all tensors: channels_last where the input is and the scale
// is of its channels, else contiguous.
struct Layout {
  bool channels_last;
  ScaleAddShape shape;

  Tensor empty(const Tensor& like, ScalarType dtype) const {
    return channels_last ? empty_4d(sizes_of(like), like, true, dtype)
                         : braze::empty(sizes_of(like), like, dtype);
  }
  Tensor of(const Tensor& t) const {
    if (channels_last ? is_nhwc(t) : t.is_contiguous()) return t;
    Tensor copy = empty(t, t.scalar_type());
    torch::stable::copy_(copy, t);
    return copy;
  }
};

Layout layout_of(const char* op, const Tensor& input, const Tensor& scale) {
  check_same_device(op, "scale", scale, "input", input);
  const int64_t dim = scaled_dim(op, input, scale);
  const DType dtype = dtype_of(op, "input", input);
  checked_result(op, input, "scale", scale);
  Layout layout{is_channels_last(input) && dim == 1,
                {dtype, dtype, dtype, dtype_of(op, "scale", scale), 1, input.size(dim), 1}};
  for (int64_t i = 0; i < dim; ++i) layout.shape.outer *= input.size(i);
  for (int64_t i = dim + 1; i < input.dim(); ++i) layout.shape.inner *= input.size(i);
  if (layout.channels_last) {
    layout.shape.outer *= layout.shape.inner;
    layout.shape.inner = 1;
  }
  return layout;
}

Tensor scale_add(const Tensor& input, const Tensor& scale, const Tensor& residual) {
  const char* op = "scale_add";
  Layout layout = layout_of(op, input, scale);
  check_same_device(op, "residual", residual, "input", input);
  check_same_shape(op, "residual", residual, "input", input);
  layout.shape.residual = dtype_of(op, "residual", residual);
  const ScalarType own = input.scalar_type();
  const ScalarType other = checked_result(op, input, "residual", residual);
  const ScalarType result = other == own ? scale.scalar_type() : other;
  layout.shape.result = result == own ? layout.shape.dtype : DType::kFloat32;
  const DeviceContext context(input);
  Tensor out = layout.empty(input, result);
  if (out.numel() == 0) return out;
  const Tensor x = layout.of(input), added = layout.of(residual), s = as_contiguous(scale);
  dev::scale_add(context.stream(), layout.shape, x.const_data_ptr(), s.const_data_ptr(),
                 added.const_data_ptr(), out.mutable_data_ptr());
  return out;
}

// An empty tensor for a gradient that is not wanted.
std::tuple<Tensor, Tensor> scale_add_backward(const Tensor& grad_output, const Tensor& input,
                                              const Tensor& scale, std::vector<bool> output_mask) {
  const char* op = "scale_add_backward";
  Layout layout = layout_of(op, input, scale);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  checked_result(op, input, "grad_output", grad_output);
  layout.shape.result = dtype_of(op, "grad_output", grad_output);
  BRAZE_CHECK(output_mask.size() == 2, op, ": expected output_mask of 2 entries, but got ",
              output_mask.size());
  const DeviceContext context(input);
  const bool of_input = output_mask[0], of_scale = output_mask[1];
  Tensor dx = of_input ? layout.empty(input, input.scalar_type()) : empty({0}, input);
  const Sizes sizes = of_scale ? sizes_of(scale) : Sizes{0};
  if (input.numel() == 0) return {dx, zeros(sizes, scale)};
  Tensor dscale = empty(sizes, scale);
  if (!of_input && !of_scale) return {dx, dscale};
  const Tensor x = layout.of(input), dy = layout.of(grad_output), s = as_contiguous(scale);
  const Workspace workspace(of_scale ? dev::scale_add_workspace_bytes(layout.shape) : 0, input);
  dev::scale_add_backward(context.stream(), layout.shape, dy.const_data_ptr(), x.const_data_ptr(),
                          s.const_data_ptr(), of_input ? dx.mutable_data_ptr() : nullptr,
                          of_scale ? dscale.mutable_data_ptr() : nullptr, workspace.data());
  return {dx, dscale};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("scale_add", TORCH_BOX(&scale_add));
  m.impl("scale_add_backward", TORCH_BOX(&scale_add_backward));
}

}  // namespace braze
