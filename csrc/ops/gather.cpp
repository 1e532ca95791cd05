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

std::tuple<Tensor, Tensor> gather(const char* op, const Tensor& images, const Tensor& labels,
                                  const Tensor& indices, int64_t* position, int64_t batch,
                                  const Tensor& scale, const Tensor& shift, ScalarType dtype,
                                  bool channels_last, const Casts& casts = {}) {
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
  const auto count_casts = static_cast<int64_t>(casts.tensors.size());
  if (count_casts == 0 || !dev::gather_and_cast(stream, args, to, labels_to, casts.from, casts.to,
                                                casts.tensors.data(), count_casts)) {
    dev::gather_images(stream, args, to, labels_to);
    if (count_casts > 0) {
      dev::cast(stream, casts.from, casts.to, casts.tensors.data(), count_casts);
    }
  }
  return {batch_images, batch_labels};
}

std::tuple<Tensor, Tensor> gather_images(const Tensor& images, const Tensor& labels,
                                         const Tensor& indices, const Tensor& scale,
                                         const Tensor& shift, ScalarType dtype,
                                         bool channels_last) {
  const int64_t batch = indices.dim() == 1 ? indices.size(0) : 0;
  return gather("gather_images", images, labels, indices, nullptr, batch, scale, shift, dtype,
                channels_last);
}

std::tuple<Tensor, Tensor> gather_next(const Tensor& images, const Tensor& labels,
                                       const Tensor& order, const Tensor& position, int64_t batch,
                                       const Tensor& scale, const Tensor& shift, ScalarType dtype,
                                       bool channels_last, const std::vector<Tensor>& cast_outputs,
                                       const std::vector<Tensor>& cast_inputs) {
  const Casts casts = checked_casts("gather_next", cast_outputs, cast_inputs);
  if (!cast_inputs.empty()) {
    check_same_device("gather_next", "cast_inputs", cast_inputs[0], "images", images);
  }
  check_vector("gather_next", "position", position, ScalarType::Long, 2, images);
  BRAZE_CHECK(position.is_contiguous(), "gather_next: expected a contiguous position");
  BRAZE_CHECK(batch >= 0, "gather_next: expected batch of at least 0, but got ", batch);
  return gather("gather_next", images, labels, order,
                static_cast<int64_t*>(position.mutable_data_ptr()), batch, scale, shift, dtype,
                channels_last, casts);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("gather_images", TORCH_BOX(&gather_images));
  m.impl("gather_next", TORCH_BOX(&gather_next));
}

}  // namespace braze
