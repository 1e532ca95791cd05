// What the front ends of batch norm and of the ops that fuse it share: shapes, argument checks.
#pragma once

#include "launchers/batch_norm.h"
#include "launchers/transpose.h"
#include "ops/backend.h"
#include "ops/common.h"

namespace braze {

inline ScalarType statistics_type(const Tensor& input) {
  return input.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline BatchNormShape batch_norm_shape(const char* op, const Tensor& input) {
  const DType dtype = dtype_of(op, "input", input);
  BRAZE_CHECK(input.dim() >= 2, op, ": expected input of at least 2 dimensions, but got shape ",
              shape_string(input));
  BatchNormShape shape{dtype, input.size(0), input.size(1), 1, false};
  for (int64_t i = 2; i < input.dim(); ++i) shape.inner *= input.size(i);
  // [n, c] and one-pixel images are rows of channels too.
  shape.channels_last = is_channels_last(input) || shape.inner == 1;
  return shape;
}

// One of weight, bias, running_mean, running_var: c elements on the input's device, in the input's
// dtype or, for 16-bit input, float32.
inline void check_channel_vector(const char* op, const char* arg, const std::optional<Tensor>& t,
                                 const Tensor& input) {
  if (!t) return;
  check_same_device(op, arg, *t, "input", input);
  BRAZE_CHECK(t->numel() == input.size(1), op, ": ", arg, " should contain ", input.size(1),
              " elements not ", t->numel());
  BRAZE_CHECK(t->scalar_type() == input.scalar_type() || t->scalar_type() == statistics_type(input),
              op, ": expected ", arg, " of dtype ", scalar_type_name(input.scalar_type()), " or ",
              scalar_type_name(statistics_type(input)), ", but got ",
              scalar_type_name(t->scalar_type()));
}

inline void check_pair(const char* op, const char* a_name, const std::optional<Tensor>& a,
                       const char* b_name, const std::optional<Tensor>& b) {
  if (a && b) check_same_dtype(op, a_name, *a, b_name, *b);
}

inline std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(as_contiguous(*t)) : std::nullopt;
}

inline const void* const_data(const std::optional<Tensor>& t) {
  return t ? t->const_data_ptr() : nullptr;
}
inline void* mutable_data(const std::optional<Tensor>& t) {
  return t ? t->mutable_data_ptr() : nullptr;
}

// A buffer that the kernel writes has to be dense; one that is not is copied there and back.
inline void copy_back(const std::optional<Tensor>& buffer, const std::optional<Tensor>& written) {
  if (!buffer || buffer->data_ptr() == written->data_ptr()) return;
  Tensor target = *buffer;
  torch::stable::copy_(target, *written);
}

inline bool keeps_channels_last(const BatchNormShape& shape) {
  return shape.channels_last && shape.inner != 1;
}

// Dense, in the layout that the shape says: what results have, and arguments are brought to.
inline Tensor empty_like_input(const BatchNormShape& shape, const Tensor& input) {
  std::vector<int64_t> sizes(input.dim());
  for (int64_t i = 0; i < input.dim(); ++i) sizes[i] = input.size(i);
  if (input.dim() == 4) return empty_4d(sizes, input, keeps_channels_last(shape));
  return empty(sizes, input);
}

// Whether kernels may load it in vectors.
inline bool is_aligned([[maybe_unused]] const Tensor& t) {
#ifdef BRAZE_CUDA
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
#else
  return true;
#endif
}

// With that layout and aligned, by copy where it is not. A mean over pixels has a contiguous
// gradient, whatever its input was: that copy is a transposition of each image.
inline Tensor in_layout(const BatchNormShape& shape, const Tensor& t) {
  const bool fits = keeps_channels_last(shape) ? is_channels_last(t) : t.is_contiguous();
  if (fits && is_aligned(t)) return t;
  Tensor copy = empty_like_input(shape, t);
  if (!fits && keeps_channels_last(shape) && t.is_contiguous() && t.numel() > 0) {
    const DeviceContext context(t);
    dev::transpose_copy(context.stream(), shape.dtype, t.const_data_ptr(), copy.mutable_data_ptr(),
                        t.size(0), t.size(1), t.numel() / (t.size(0) * t.size(1)));
  } else {
    torch::stable::copy_(copy, t);
  }
  return copy;
}

inline Tensor dense_and_aligned(const Tensor& t) {
  if (t.is_contiguous() && is_aligned(t)) return t;
  Tensor copy = empty({t.numel()}, t);
  torch::stable::copy_(copy, t);
  return copy;
}

inline BatchNormAffine affine_of(const std::optional<Tensor>& weight,
                                 const std::optional<Tensor>& bias) {
  const DType dtype = weight ? dtype_of("batch_norm", "weight", *weight)
                      : bias ? dtype_of("batch_norm", "bias", *bias)
                             : DType::kFloat32;
  return {const_data(weight), const_data(bias), dtype};
}

// `mean` and `var` are dense.
inline BatchNormBuffers buffers_of(const std::optional<Tensor>& mean,
                                   const std::optional<Tensor>& var,
                                   const std::optional<Tensor>& num_batches_tracked,
                                   std::optional<double> momentum) {
  return {mutable_data(mean), mutable_data(var),
          mean ? dtype_of("batch_norm", "running_mean", *mean) : DType::kFloat32,
          static_cast<int64_t*>(mutable_data(num_batches_tracked)), momentum};
}

// The checks of the forward ops.
inline void check_arguments(const char* op, const BatchNormShape& shape, const Tensor& input,
                            const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                            const std::optional<Tensor>& running_mean,
                            const std::optional<Tensor>& running_var,
                            const std::optional<Tensor>& num_batches_tracked, bool training,
                            std::optional<double> momentum) {
  check_channel_vector(op, "running_mean", running_mean, input);
  check_channel_vector(op, "running_var", running_var, input);
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  check_pair(op, "running_mean", running_mean, "running_var", running_var);
  if (training) {
    BRAZE_CHECK(running_mean.has_value() == running_var.has_value(), op,
                ": running_mean and running_var must either both be None or neither be None");
    BRAZE_CHECK(shape.count() != 1, op,
                ": Expected more than 1 value per channel when training, got input size ",
                shape_string(input));
    BRAZE_CHECK(momentum || num_batches_tracked || !running_mean, op,
                ": expected num_batches_tracked where momentum is None");
  } else {
    BRAZE_CHECK(running_mean, op, ": running_mean must be defined in evaluation mode");
    BRAZE_CHECK(running_var, op, ": running_var must be defined in evaluation mode");
  }
  if (num_batches_tracked) {
    check_same_device(op, "num_batches_tracked", *num_batches_tracked, "input", input);
    BRAZE_CHECK(
        num_batches_tracked->scalar_type() == ScalarType::Long && num_batches_tracked->numel() == 1,
        op, ": expected num_batches_tracked of one int64 element, but got shape ",
        shape_string(*num_batches_tracked), " and dtype ",
        scalar_type_name(num_batches_tracked->scalar_type()));
  }
}

// BatchNormStatistics in a tensor, a row each.
inline Tensor empty_statistics(const Tensor& input) {
  return empty({4, input.size(1)}, input, statistics_type(input));
}
inline BatchNormStatistics statistics_of(const Tensor& t) {
  char* data = static_cast<char*>(t.mutable_data_ptr());
  const int64_t row = t.size(1) * (t.scalar_type() == ScalarType::Double ? 8 : 4);
  return {data, data + row, data + 2 * row, data + 3 * row};
}
// Of a backward op's argument.
inline void check_statistics(const char* op, const Tensor& statistics, const Tensor& input) {
  check_same_device(op, "statistics", statistics, "input", input);
  BRAZE_CHECK(statistics.scalar_type() == statistics_type(input) && statistics.is_contiguous() &&
                  statistics.dim() == 2 && statistics.size(0) == 4 &&
                  statistics.size(1) == input.size(1) && is_aligned(statistics),
              op, ": expected statistics of shape [4, ", input.size(1), "] and dtype ",
              scalar_type_name(statistics_type(input)), ", but got shape ",
              shape_string(statistics), " and dtype ", scalar_type_name(statistics.scalar_type()));
}

// The settings and parameters of batch norm.
struct Norm {
  const std::optional<Tensor>&weight, &bias, &running_mean, &running_var, &num_batches_tracked;
  bool training;
  std::optional<double> momentum;
  double eps;

  void check(const char* op, const BatchNormShape& shape, const Tensor& input) const {
    check_arguments(op, shape, input, weight, bias, running_mean, running_var, num_batches_tracked,
                    training, momentum);
  }

  // Calls f(affine, buffers), both dense.
  template <typename F>
  void with_dense(const F& f) const {
    const auto w = dense(weight), b = dense(bias);
    const auto mean = dense(running_mean), var = dense(running_var);
    f(affine_of(w, b), buffers_of(mean, var, num_batches_tracked, momentum));
    if (!training) return;
    copy_back(running_mean, mean);
    copy_back(running_var, var);
  }

  // Fills `statistics`, and in training updates the buffers. x: the input in its layout. moments:
  // that the kernel which made x left, if any.
  void coefficients(const DeviceContext& context, const BatchNormShape& shape, const Tensor& x,
                    const ChannelMoments& moments, const BatchNormStatistics& statistics) const {
    const bool has_pass = training && moments.sets == 0;
    const Workspace workspace(has_pass ? dev::batch_norm_workspace_bytes(shape) : 0, x);
    with_dense([&](const BatchNormAffine& affine, const BatchNormBuffers& buffers) {
      dev::batch_norm_coefficients(context.stream(), shape, training, x.const_data_ptr(), moments,
                                   affine, buffers, eps, statistics, workspace.data());
    });
  }

  // The same, and y and the mask, or nullptr, of x.
  void normalize(const DeviceContext& context, const BatchNormShape& shape, const Tensor& x,
                 const ChannelMoments& moments, const BatchNormTail& tail,
                 const BatchNormStatistics& statistics, void* y, void* mask) const {
    if (!training || moments.sets > 0) {
      coefficients(context, shape, x, moments, statistics);
      return dev::batch_norm_apply(context.stream(), shape, x.const_data_ptr(), tail, statistics, y,
                                   mask);
    }
    const Workspace workspace(dev::batch_norm_workspace_bytes(shape), x);
    with_dense([&](const BatchNormAffine& affine, const BatchNormBuffers& buffers) {
      dev::batch_norm_train(context.stream(), shape, x.const_data_ptr(), affine, buffers, eps, tail,
                            statistics, y, mask, workspace.data());
    });
  }
};

// The checks of batch_norm_backward.
inline void check_statistics(const char* op, const Tensor& mean, const Tensor& rstd,
                             const std::vector<bool>& output_mask, const Tensor& input) {
  for (const auto& [name, t] : {std::pair("mean", mean), std::pair("rstd", rstd)}) {
    check_channel_vector(op, name, t, input);
    BRAZE_CHECK(t.scalar_type() == statistics_type(input), op, ": expected ", name, " of dtype ",
                scalar_type_name(statistics_type(input)), ", but got ",
                scalar_type_name(t.scalar_type()));
  }
  BRAZE_CHECK(output_mask.size() == 3, op, ": expected output_mask of 3 entries, but got ",
              output_mask.size());
}

}  // namespace braze
