#include "launchers/layer_norm.h"

#include "ops/batch_norm.h"
#include "ops/transpose.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

std::string sizes_string(const Sizes& sizes) {
  std::string s = "[";
  for (size_t i = 0; i < sizes.size(); ++i) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + "]";
}

// The result's dtype: the input's, float32 for a 16-bit input, or of 16 bits for float32.
ScalarType checked_result(const char* op, const Tensor& input, std::optional<ScalarType> wanted) {
  const ScalarType own = input.scalar_type();
  const ScalarType result = wanted.value_or(own);
  const auto is_half = [](ScalarType type) {
    return type == ScalarType::BFloat16 || type == ScalarType::Half;
  };
  BRAZE_CHECK(result == own || (result == ScalarType::Float && is_half(own)) ||
                  (is_half(result) && own == ScalarType::Float),
              op, ": expected dtype to be the input's, float32 for a 16-bit input, or of 16 bits ",
              "for a float32 input, but got ", scalar_type_name(result), " for ",
              scalar_type_name(own));
  return result;
}

// Raises where normalized_shape is not how the input's shape ends.
LayerNormShape checked_shape(const char* op, const Tensor& input, const Sizes& normalized_shape,
                             ScalarType result) {
  const DType dtype = dtype_of(op, "input", input);
  const int64_t dims = normalized_shape.size(), outer = input.dim() - dims;
  BRAZE_CHECK(dims >= 1, op,
              ": Expected normalized_shape to be at least 1-dimensional, i.e., containing at least "
              "one element, but got normalized_shape = []");
  bool fits = outer >= 0;
  const DType of_result = result == input.scalar_type()    ? dtype
                          : result == ScalarType::Float    ? DType::kFloat32
                          : result == ScalarType::BFloat16 ? DType::kBFloat16
                                                           : DType::kFloat16;
  LayerNormShape shape{dtype, of_result, 1, 1};
  for (int64_t i = 0; fits && i < dims; ++i) {
    fits = input.size(outer + i) == normalized_shape[i];
    shape.size *= normalized_shape[i];
  }
  BRAZE_CHECK(fits, op, ": Given normalized_shape=", sizes_string(normalized_shape),
              ", expected input whose shape ends so, but got input of size ", shape_string(input));
  for (int64_t i = 0; i < outer; ++i) shape.rows *= input.size(i);
  return shape;
}

// Weight or bias: of the shape that is normalised, in the input's dtype or float32 for 16-bit
// input.
void check_parameter(const char* op, const char* arg, const std::optional<Tensor>& t,
                     const Sizes& normalized_shape, const Tensor& input) {
  if (!t) return;
  check_same_device(op, arg, *t, "input", input);
  BRAZE_CHECK(same_sizes(*t, normalized_shape), op, ": Expected ", arg,
              " to be of same shape as normalized_shape, but got ", arg, " of shape ",
              shape_string(*t), " and normalized_shape = ", sizes_string(normalized_shape));
  BRAZE_CHECK(t->scalar_type() == input.scalar_type() || t->scalar_type() == statistics_type(input),
              op, ": expected ", arg, " of dtype ", scalar_type_name(input.scalar_type()), " or ",
              scalar_type_name(statistics_type(input)), ", but got ",
              scalar_type_name(t->scalar_type()));
}

// One for each row, in torch's shape: the normalised extents are 1.
Sizes statistics_sizes(const Tensor& input, const Sizes& normalized_shape) {
  Sizes sizes = sizes_of(input);
  std::fill(sizes.end() - normalized_shape.size(), sizes.end(), 1);
  return sizes;
}

// How many elements lie between neighbours of the last dimension, where memory is [outer, last,
// inner] and the tensor [outer, inner, last], such as images' channels that were moved to the end;
// 0 elsewhere.
int64_t inner_extent(const Tensor& t) {
  const int64_t last = t.dim() - 1, size = t.size(last), inner = t.stride(last);
  int64_t expected = 1;  // the stride of the next dimension further out
  for (int64_t d = last - 1; d >= 0; --d) {
    if (expected == inner) expected *= size;
    if (t.size(d) != 1 && t.stride(d) != expected) return 0;
    expected *= t.size(d);
  }
  if (expected == inner) expected *= size;
  return expected == t.numel() ? inner : 0;
}

// Contiguous. A copy is made by the transposing kernels where they are for its order.
Tensor as_rows(const DeviceContext& context, const Tensor& t) {
  if (t.is_contiguous()) return t;
  const int64_t inner = inner_extent(t), size = t.size(t.dim() - 1);
  if (inner <= 1) return torch::stable::contiguous(t);
  return transposed(context, t, sizes_of(t), t.numel() / (size * inner), size, inner);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, std::optional<Tensor> weight,
                                              std::optional<Tensor> bias, Sizes normalized_shape,
                                              double eps, std::optional<ScalarType> dtype) {
  const char* op = "layer_norm";
  const ScalarType result = checked_result(op, input, dtype);
  LayerNormShape shape = checked_shape(op, input, normalized_shape, result);
  check_parameter(op, "weight", weight, normalized_shape, input);
  check_parameter(op, "bias", bias, normalized_shape, input);
  check_pair(op, "weight", weight, "bias", bias);
  const DeviceContext context(input);
  Tensor out = empty(sizes_of(input), input, result);
  const Sizes rows = statistics_sizes(input, normalized_shape);
  if (shape.count() == 0) {
    const Tensor zero = zeros(rows, input, statistics_type(input));
    return {out, zero, zeros(rows, input, statistics_type(input))};
  }
  Tensor mean = empty(rows, input, statistics_type(input));
  Tensor rstd = empty(rows, input, statistics_type(input));
  const int64_t inner =
      input.is_contiguous() || normalized_shape.size() > 1 ? 1 : inner_extent(input);
  const bool takes = inner > 1 && dev::layer_norm_takes(shape, inner);
  if (takes) shape.inner = inner;
  const Tensor x = takes ? input : as_rows(context, input);
  const auto w = dense(weight), b = dense(bias);
  dev::layer_norm(context.stream(), shape, x.const_data_ptr(), affine_of(w, b), eps,
                  out.mutable_data_ptr(), mean.mutable_data_ptr(), rstd.mutable_data_ptr());
  return {out, mean, rstd};
}

// grad_weight and grad_bias come in weight's dtype, or the statistics dtype where it is None.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    const Tensor& mean, const Tensor& rstd, Sizes normalized_shape, std::vector<bool> output_mask) {
  const char* op = "layer_norm_backward";
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_shape(op, "grad_output", grad_output, "input", input);
  const ScalarType result = checked_result(op, input, grad_output.scalar_type());
  const LayerNormShape shape = checked_shape(op, input, normalized_shape, result);
  check_parameter(op, "weight", weight, normalized_shape, input);
  for (const auto& [name, t] : {std::pair("mean", mean), std::pair("rstd", rstd)}) {
    check_same_device(op, name, t, "input", input);
    BRAZE_CHECK(t.numel() == shape.rows && t.scalar_type() == statistics_type(input), op,
                ": expected ", name, " of ", shape.rows, " elements and dtype ",
                scalar_type_name(statistics_type(input)), ", but got shape ", shape_string(t),
                " and dtype ", scalar_type_name(t.scalar_type()));
  }
  BRAZE_CHECK(output_mask.size() == 3, op, ": expected output_mask of 3 entries, but got ",
              output_mask.size());
  const DeviceContext context(input);
  const ScalarType parameter_type = weight ? weight->scalar_type() : statistics_type(input);
  const bool no_elements = shape.count() == 0;
  const auto parameter_gradient = [&](bool wanted) {
    const Sizes sizes = wanted ? normalized_shape : Sizes{0};
    return no_elements ? zeros(sizes, input, parameter_type) : empty(sizes, input, parameter_type);
  };
  Tensor grad_input = empty(output_mask[0] ? sizes_of(input) : Sizes{0}, input);
  Tensor grad_weight = parameter_gradient(output_mask[1]);
  Tensor grad_bias = parameter_gradient(output_mask[2]);
  if (no_elements) return {grad_input, grad_weight, grad_bias};
  const Tensor x = as_rows(context, input), dy = as_rows(context, grad_output);
  const auto w = dense(weight);
  const Tensor m = as_contiguous(mean), r = as_contiguous(rstd);
  const bool of_parameters = output_mask[1] || output_mask[2];
  const Workspace workspace(of_parameters ? dev::layer_norm_workspace_bytes(shape) : 0, input);
  const auto wanted = [&](int i, Tensor& t) {
    return output_mask[i] ? t.mutable_data_ptr() : nullptr;
  };
  dev::layer_norm_backward(context.stream(), shape, dy.const_data_ptr(), x.const_data_ptr(),
                           affine_of(w, std::nullopt), m.const_data_ptr(), r.const_data_ptr(),
                           {wanted(0, grad_input), wanted(1, grad_weight), wanted(2, grad_bias),
                            dtype_of(op, "weight", grad_weight)},
                           workspace.data());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace braze
