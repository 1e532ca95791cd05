#include "launchers/weight_standardization.h"

#include "ops/batch_norm.h"
#include "ops/branch.h"

namespace braze {
namespace {

// The result's dtype: the weight's, or of 16 bits for float32.
ScalarType checked_result(const char* op, const Tensor& weight, std::optional<ScalarType> wanted) {
  const ScalarType own = weight.scalar_type(), result = wanted.value_or(own);
  const bool is_half = result == ScalarType::BFloat16 || result == ScalarType::Half;
  BRAZE_CHECK(result == own || (is_half && own == ScalarType::Float), op,
              ": expected dtype to be the weight's, or of 16 bits for a float32 weight, but got ",
              scalar_type_name(result), " for ", scalar_type_name(own));
  return result;
}

FiltersShape checked_shape(const char* op, const Tensor& weight, const std::optional<Tensor>& gain,
                           ScalarType result) {
  BRAZE_CHECK(weight.dim() >= 2, op, ": expected weight of at least 2 dimensions, but got shape ",
              shape_string(weight));
  const DType dtype = dtype_of(op, "weight", weight);
  if (gain) {
    check_same_device(op, "gain", *gain, "weight", weight);
    check_same_dtype(op, "gain", *gain, "weight", weight);
    BRAZE_CHECK(gain->numel() == weight.size(0), op, ": gain should contain ", weight.size(0),
                " elements not ", gain->numel());
  }
  const int64_t rows = weight.size(0);
  const DType of_result = result == weight.scalar_type()   ? dtype
                          : result == ScalarType::BFloat16 ? DType::kBFloat16
                                                           : DType::kFloat16;
  return {dtype, of_result, rows, rows == 0 ? 0 : weight.numel() / rows};
}

Tensor empty_as(const Tensor& filters, std::optional<ScalarType> dtype = std::nullopt) {
  return empty_strided(filters.sizes().data(), filters.strides().data(), filters.dim(), filters,
                       dtype);
}

std::tuple<Tensor, Tensor, Tensor> weight_standardization(const Tensor& weight,
                                                          std::optional<Tensor> gain, double scale,
                                                          double eps,
                                                          std::optional<ScalarType> dtype) {
  const char* op = "weight_standardization";
  const ScalarType result = checked_result(op, weight, dtype);
  const FiltersShape shape = checked_shape(op, weight, gain, result);
  const DeviceContext context(weight);
  const Tensor w = as_image(weight);  // each filter's elements beside each other
  const Tensor out = empty_as(w, result);
  const auto statistics = [&](auto make) {
    return make({shape.rows}, weight, statistics_type(weight));
  };
  if (weight.numel() == 0) return {out, statistics(zeros), statistics(zeros)};
  const Tensor mean = statistics(empty), rstd = statistics(empty);
  const auto g = dense(gain);
  dev::weight_standardization(context.stream(), shape, w.const_data_ptr(), const_data(g), scale,
                              eps, out.mutable_data_ptr(), mean.mutable_data_ptr(),
                              rstd.mutable_data_ptr());
  return {out, mean, rstd};
}

// as_made: nobody has written to grad_output, or seen it, since whatever made it returned it.
std::tuple<Tensor, Tensor> weight_standardization_backward(
    const Tensor& grad_output, const Tensor& weight, std::optional<Tensor> gain, const Tensor& mean,
    const Tensor& rstd, double scale, std::vector<bool> output_mask, bool as_made) {
  const char* op = "weight_standardization_backward";
  check_same_device(op, "grad_output", grad_output, "weight", weight);
  check_same_shape(op, "grad_output", grad_output, "weight", weight);
  const FiltersShape shape =
      checked_shape(op, weight, gain, checked_result(op, weight, grad_output.scalar_type()));
  for (const auto& [name, t] : {std::pair("mean", mean), std::pair("rstd", rstd)}) {
    check_same_device(op, name, t, "weight", weight);
    BRAZE_CHECK(t.numel() == shape.rows && t.scalar_type() == statistics_type(weight), op,
                ": expected ", name, " of ", shape.rows, " elements and dtype ",
                scalar_type_name(statistics_type(weight)), ", but got shape ", shape_string(t),
                " and dtype ", scalar_type_name(t.scalar_type()));
  }
  BRAZE_CHECK(output_mask.size() == 2, op, ": expected output_mask of 2 entries, but got ",
              output_mask.size());
  BRAZE_CHECK(!output_mask[1] || gain, op, ": the gradient of a gain that is None is wanted");
  const DeviceContext context(weight);
  const Tensor w = as_image(weight);  // each filter's elements beside each other
  Tensor grad_weight = output_mask[0] ? empty_as(w) : empty({0}, weight);
  Tensor grad_gain = output_mask[1] ? empty(sizes_of(*gain), weight) : empty({0}, weight);
  if (weight.numel() == 0) {
    torch::stable::zero_(grad_gain);
    return {grad_weight, grad_gain};
  }
  const auto g = dense(gain);
  const Tensor m = as_contiguous(mean), r = as_contiguous(rstd);
  // A convolution's gradient of its weight may still be in the making on a side stream, where this
  // is made behind it. A copy would read it unfinished: see side_stream.h.
  const bool fits = same_layout(grad_output, w);
  Tensor dy = grad_output;
  if (!fits) {
    dy = empty_as(w, grad_output.scalar_type());
    torch::stable::copy_(dy, grad_output);
  }
  const Stream main = context.stream();
  Stream stream = main;
  const bool aside = fits && dev::fork_side_stream(main, size_of(shape.result) == 2, &stream);
  if (aside) {
    dev::follow_side_stream(main, stream);  // there are two of them
    if (as_made) forget_made(grad_output);
  }
  dev::weight_standardization_backward(stream, shape, dy.const_data_ptr(), w.const_data_ptr(),
                                       const_data(g), scale, m.const_data_ptr(), r.const_data_ptr(),
                                       output_mask[0] ? grad_weight.mutable_data_ptr() : nullptr,
                                       output_mask[1] ? grad_gain.mutable_data_ptr() : nullptr);
  if (aside) {
    std::vector<Tensor> made;
    if (output_mask[0]) made.push_back(grad_weight);
    if (output_mask[1]) made.push_back(grad_gain);
    keep_until_join({dy, w, g.value_or(Tensor()), m, r}, made);
  }
  return {grad_weight, grad_gain};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("weight_standardization", TORCH_BOX(&weight_standardization));
  m.impl("weight_standardization_backward", TORCH_BOX(&weight_standardization_backward));
}

}  // namespace braze
