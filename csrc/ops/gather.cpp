// Batches of a data set (gather.h), and what a captured step has made in the same launch.
#include "kernels/gather/gather.h"

#include "ops/cast.h"
#include "ops/common.h"

namespace braze {
namespace {

void check_vector(const char* op, const char* arg, const Tensor& t, ScalarType dtype, int64_t count,
                  const Tensor& images) {
  check_same_device(op, arg, t, "images", images);
  BRAZE_CHECK(t.scalar_type() == dtype && t.dim() == 1 && (count < 0 || t.size(0) == count), op,
              ": expected ", arg, " of dtype ", scalar_type_name(dtype), " and shape [",
              count < 0 ? "count" : std::to_string(count), "], but got ",
              scalar_type_name(t.scalar_type()), " ", shape_string(t));
}

using Batch = std::tuple<Tensor, Tensor, Tensor>;

// The patches of a convolution's input, for filters [height, width, padding, padding].
SmallKShape patch_shape(const char* op, const Tensor& x, DType dtype,
                        const std::vector<int64_t>& filters) {
  BRAZE_CHECK(
      filters.size() == 4 && filters[0] > 0 && filters[1] > 0 && filters[2] >= 0 && filters[3] >= 0,
      op, ": expected filters to be a height, a width and two paddings");
  SmallKShape a{};
  a.dtype = dtype;
  a.n = x.size(0), a.c = x.size(1), a.h = x.size(2), a.w = x.size(3);
  a.x_n = x.stride(0), a.x_c = x.stride(1), a.x_h = x.stride(2), a.x_w = x.stride(3);
  a.r = filters[0], a.s = filters[1], a.pad_h = filters[2], a.pad_w = filters[3];
  a.p = a.h + 2 * a.pad_h - a.r + 1, a.q = a.w + 2 * a.pad_w - a.s + 1;
  BRAZE_CHECK(a.p >= 2 && a.q >= 2 && dev::small_k_supports(a), op, ": no kernel for filters ", a.r,
              " x ", a.s, " over images ", shape_string(x));
  return a;
}

Batch gather(const char* op, const Tensor& images, const Tensor& labels, const Tensor& indices,
             int64_t* position, int64_t batch, const Tensor& scale, const Tensor& shift,
             ScalarType dtype, bool channels_last, const Casts& casts = {},
             const std::vector<int64_t>& filters = {}) {
  BRAZE_CHECK(images.scalar_type() == ScalarType::Byte && images.dim() == 4, op,
              ": expected images of dtype uint8 and shape [N, C, H, W], but got ",
              scalar_type_name(images.scalar_type()), " ", shape_string(images));
  const int64_t count = images.size(0), channels = images.size(1);
  const int64_t pixels = images.size(2) * images.size(3);
  BRAZE_CHECK(channels * pixels < int64_t{1} << 30, op,
              ": expected images of less than 2^30 elements each, but got ", shape_string(images));
  check_vector(op, "labels", labels, ScalarType::Long, count, images);
  check_vector(op, "indices", indices, ScalarType::Long, -1, images);
  const ScalarType acc = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  check_vector(op, "scale", scale, acc, channels, images);
  check_vector(op, "shift", shift, acc, channels, images);

  const DeviceContext context(images);
  Tensor batch_images =
      empty_4d({batch, channels, images.size(2), images.size(3)}, images, channels_last, dtype);
  Tensor batch_labels = empty({batch}, labels);
  const DType batch_dtype = dtype_of(op, "dtype", batch_images);
  const Tensor data = as_contiguous(images), targets = as_contiguous(labels);
  const Tensor order = as_contiguous(indices);
  const Tensor factors = as_contiguous(scale), terms = as_contiguous(shift);
  GatherArgs args{};
  args.dtype = batch_dtype;
  args.images = static_cast<const uint8_t*>(data.const_data_ptr());
  args.labels = static_cast<const int64_t*>(targets.const_data_ptr());
  args.count = count;
  args.batch = batch;
  args.channels = channels;
  args.pixels = pixels;
  args.indices = static_cast<const int64_t*>(order.const_data_ptr());
  args.index_count = order.numel();
  args.position = position;
  args.scale = factors.const_data_ptr();
  args.shift = terms.const_data_ptr();
  args.channels_last = channels_last;
  const Stream stream = context.stream();
  void* const to = batch_images.mutable_data_ptr();
  auto* const labels_to = static_cast<int64_t*>(batch_labels.mutable_data_ptr());
  GatherBeside beside{};
  beside.from = casts.from;
  beside.to = casts.to;
  beside.casts = casts.tensors.data();
  beside.cast_count = static_cast<int64_t>(casts.tensors.size());
  SmallKShape patches{};
  const bool wants_moments = !filters.empty() && batch > 0;
  if (wants_moments) patches = patch_shape(op, batch_images, batch_dtype, filters);
  const int64_t sets = wants_moments ? kSmallKMostSets : 0;
  Tensor moments =
      empty({sets, wants_moments ? small_k_moments(patches) : 0}, images, ScalarType::Double);
  auto* const sums = static_cast<double*>(moments.mutable_data_ptr());
  if (wants_moments) {
    beside.patches = &patches;
    beside.moments = sums;
  }
  const GatherDone done = dev::gather_images(stream, args, to, labels_to, beside);
  if (beside.cast_count > 0 && !done.casts) {
    dev::cast(stream, casts.from, casts.to, casts.tensors.data(), beside.cast_count);
  }
  if (wants_moments && !done.moments) {
    dev::small_k_sum_moments(stream, patches, to, sums, nullptr);
  }
  return {batch_images, batch_labels, moments};
}

std::tuple<Tensor, Tensor> gather_images(const Tensor& images, const Tensor& labels,
                                         const Tensor& indices, const Tensor& scale,
                                         const Tensor& shift, ScalarType dtype,
                                         bool channels_last) {
  const int64_t batch = indices.dim() == 1 ? indices.size(0) : 0;
  auto [batch_images, batch_labels, moments] = gather(
      "gather_images", images, labels, indices, nullptr, batch, scale, shift, dtype, channels_last);
  return {batch_images, batch_labels};
}

Batch gather_next(const Tensor& images, const Tensor& labels, const Tensor& order,
                  const Tensor& position, int64_t batch, const Tensor& scale, const Tensor& shift,
                  ScalarType dtype, bool channels_last, const std::vector<Tensor>& cast_outputs,
                  const std::vector<Tensor>& cast_inputs, const std::vector<int64_t>& filters) {
  const Casts casts = checked_casts("gather_next", cast_outputs, cast_inputs);
  if (!cast_inputs.empty()) {
    check_same_device("gather_next", "cast_inputs", cast_inputs[0], "images", images);
  }
  check_vector("gather_next", "position", position, ScalarType::Long, 2, images);
  BRAZE_CHECK(position.is_contiguous(), "gather_next: expected a contiguous position");
  BRAZE_CHECK(batch >= 0, "gather_next: expected batch of at least 0, but got ", batch);
  return gather("gather_next", images, labels, order,
                static_cast<int64_t*>(position.mutable_data_ptr()), batch, scale, shift, dtype,
                channels_last, casts, filters);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("gather_images", TORCH_BOX(&gather_images));
  m.impl("gather_next", TORCH_BOX(&gather_next));
}

}  // namespace braze
