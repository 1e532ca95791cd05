// torch.nn.functional.interpolate of images, nearest and bilinear.
#include "launchers/upsample2d.h"

#include "ops/common.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

UpsampleMode mode_of(const char* op, const std::string& name, bool align_corners) {
  BRAZE_CHECK(name == "bilinear" || !align_corners, op,
              ": align_corners belongs to mode bilinear alone, but mode is ", name);
  if (name == "nearest") return UpsampleMode::kNearest;
  if (name == "nearest-exact") return UpsampleMode::kNearestExact;
  BRAZE_CHECK(name == "bilinear", op,
              ": expected mode to be nearest, nearest-exact or bilinear, but got ", name);
  return align_corners ? UpsampleMode::kBilinearCorners : UpsampleMode::kBilinear;
}

// Elements of an axis from one result to the next, in the precision that torch has it in: that of
// the places. factor: as the caller gave it.
template <typename A>
double step_of(UpsampleMode mode, int64_t in, int64_t out, std::optional<double> factor) {
  if (mode == UpsampleMode::kBilinearCorners) {
    return out > 1 ? static_cast<A>(in - 1) / static_cast<A>(out - 1) : A(0);
  }
  // torch's kernels don't look at the factor there.
  if (in == out && mode <= UpsampleMode::kNearestExact) return 1;
#ifndef BRAZE_CUDA
  if (in == out) return 1;
  if (out == 2 * in && mode == UpsampleMode::kNearest) return 0.5;
#endif
  if (factor && *factor > 0) return static_cast<A>(1.0 / *factor);
  return static_cast<A>(in) / static_cast<A>(out);
}

// Checks as torch does. in: n, c, h, w.
Upsample2dShape checked_shape(const char* op, const Sizes& in, const Sizes& output_size,
                              const std::string& mode, bool align_corners,
                              std::optional<double> factor_h, std::optional<double> factor_w,
                              DType dtype, DType result) {
  BRAZE_CHECK(output_size.size() == 2, op, ": expected output_size to have 2 elements, but got ",
              output_size.size());
  BRAZE_CHECK(in.size() == 4 && in[1] > 0 && in[2] > 0 && in[3] > 0, op,
              ": expected input of shape [N, C, H, W] with an optional N of 0");
  const int64_t p = output_size[0], q = output_size[1];
  constexpr int64_t kMost = int64_t{1} << 30;
  BRAZE_CHECK(p > 0 && q > 0,
              "Input and output sizes should be greater than 0, but got input (H: ", in[2],
              ", W: ", in[3], ") output (H: ", p, ", W: ", q, ")");
  BRAZE_CHECK(in[2] < kMost && in[3] < kMost && p < kMost && q < kMost, op,
              ": expected fewer than 2^30 rows and columns");
  Upsample2dShape shape{
      dtype, result, mode_of(op, mode, align_corners), in[0], in[1], in[2], in[3], p, q, 0,
      0,     false};
  // A copy, whatever the factors.
  if (shape.h == p && shape.w == q) shape.mode = UpsampleMode::kNearest;
  const auto set_steps = [&](auto tag) {
    using A = typename decltype(tag)::type;
    shape.scale_h = step_of<A>(shape.mode, shape.h, shape.p, factor_h);
    shape.scale_w = step_of<A>(shape.mode, shape.w, shape.q, factor_w);
  };
  const bool is_double = dtype == DType::kFloat64 && shape.is_bilinear();
  is_double ? set_steps(TypeTag<double>{}) : set_steps(TypeTag<float>{});
  return shape;
}

void check_result(const char* op, ScalarType result, ScalarType input) {
  const bool is_half = input == ScalarType::BFloat16 || input == ScalarType::Half;
  BRAZE_CHECK(result == input || (result == ScalarType::Float && is_half), op,
              ": expected a result of input's dtype, or float32 for a 16-bit one, but got ",
              scalar_type_name(result), " for ", scalar_type_name(input));
}

Tensor upsample2d(const Tensor& input, const Sizes& output_size, const std::string& mode,
                  bool align_corners, std::optional<double> scale_h, std::optional<double> scale_w,
                  std::optional<ScalarType> dtype) {
  const char* op = "upsample2d";
  const DType of_input = dtype_of(op, "input", input);
  const ScalarType result = dtype.value_or(input.scalar_type());
  check_result(op, result, input.scalar_type());
  Upsample2dShape shape =
      checked_shape(op, sizes_of(input), output_size, mode, align_corners, scale_h, scale_w,
                    of_input, result == input.scalar_type() ? of_input : DType::kFloat32);
  shape.channels_last = is_channels_last(input);
  const DeviceContext context(input);
  Tensor out = empty_4d({shape.n, shape.c, shape.p, shape.q}, input, shape.channels_last, result);
  const Tensor x = in_order(input, shape.channels_last);
  dev::upsample2d(context.stream(), shape, x.const_data_ptr(), out.mutable_data_ptr());
  return out;
}

// dtype: of the input, where the result has another one.
Tensor upsample2d_backward(const Tensor& grad_output, const Sizes& input_size,
                           const std::string& mode, bool align_corners,
                           std::optional<double> scale_h, std::optional<double> scale_w,
                           bool channels_last, std::optional<ScalarType> dtype) {
  const char* op = "upsample2d_backward";
  const DType of_grad = dtype_of(op, "grad_output", grad_output);
  BRAZE_CHECK(grad_output.dim() == 4 && input_size.size() == 4 &&
                  grad_output.size(0) == input_size[0] && grad_output.size(1) == input_size[1],
              op, ": expected grad_output of as many images and channels as the input, but got ",
              shape_string(grad_output));
  Tensor grad_input = empty_4d(input_size, grad_output, channels_last, dtype);
  check_result(op, grad_output.scalar_type(), grad_input.scalar_type());
  Upsample2dShape shape =
      checked_shape(op, input_size, {grad_output.size(2), grad_output.size(3)}, mode, align_corners,
                    scale_h, scale_w, dtype_of(op, "dtype", grad_input), of_grad);
  shape.channels_last = channels_last;
  const DeviceContext context(grad_output);
  const Tensor dy = in_order(grad_output, channels_last);
  dev::upsample2d_backward(context.stream(), shape, dy.const_data_ptr(),
                           grad_input.mutable_data_ptr());
  return grad_input;
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("upsample2d", TORCH_BOX(&upsample2d));
  m.impl("upsample2d_backward", TORCH_BOX(&upsample2d_backward));
}

}  // namespace braze
