// Batches of a data set (gather.h), and the moments of their patches.
#include "launchers/gather.h"

#include "ops/small_k.h"

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

// The patches of a convolution's input, for filters [height, width, padding, padding].
SmallKShape patch_shape(const char* op, const Tensor& x, DType dtype,
                        const std::vector<int64_t>& filters) {
  BRAZE_CHECK(
      filters.size() == 4 && filters[0] > 0 && filters[1] > 0 && filters[2] >= 0 && filters[3] >= 0,
      op, ": expected filters to be a height, a width and two paddings");
  const SmallKShape a = patches_of(x, dtype, filters[0], filters[1], filters[2], filters[3]);
  BRAZE_CHECK(a.p >= 2 && a.q >= 2 && dev::small_k_supports(a), op, ": no kernel for filters ", a.r,
              " x ", a.s, " over images ", shape_string(x));
  return a;
}

void check_images(const char* op, const Tensor& images) {
  BRAZE_CHECK(images.scalar_type() == ScalarType::Byte && images.dim() == 4, op,
              ": expected images of dtype uint8 and shape [N, C, H, W], but got ",
              scalar_type_name(images.scalar_type()), " ", shape_string(images));
  const int64_t size = images.size(1) * images.size(2) * images.size(3);
  BRAZE_CHECK(size < int64_t{1} << 30, op,
              ": expected images of less than 2^30 elements each, but got ", shape_string(images));
}

// patches, moments: null where none are wanted. patches.n: images of a group that has moments of
// its own.
void gather(const char* op, const Tensor& images, const Tensor& labels, const Tensor& indices,
            int64_t* position, const Tensor& scale, const Tensor& shift, Tensor& batch_images,
            Tensor& batch_labels, const SmallKShape* patches, double* moments) {
  const int64_t count = images.size(0), channels = images.size(1);
  const DType dtype = dtype_of(op, "dtype", batch_images);
  check_vector(op, "labels", labels, ScalarType::Long, count, images);
  check_vector(op, "indices", indices, ScalarType::Long, -1, images);
  const ScalarType acc = dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
  check_vector(op, "scale", scale, acc, channels, images);
  check_vector(op, "shift", shift, acc, channels, images);

  const DeviceContext context(images);
  const Tensor data = as_contiguous(images), targets = as_contiguous(labels);
  const Tensor order = as_contiguous(indices);
  const Tensor factors = as_contiguous(scale), terms = as_contiguous(shift);
  GatherArgs args{};
  args.dtype = dtype;
  args.images = static_cast<const uint8_t*>(data.const_data_ptr());
  args.labels = static_cast<const int64_t*>(targets.const_data_ptr());
  args.count = count;
  args.batch = batch_images.size(0);
  args.channels = channels;
  args.pixels = images.size(2) * images.size(3);
  args.indices = static_cast<const int64_t*>(order.const_data_ptr());
  args.index_count = order.numel();
  args.position = position;
  args.scale = factors.const_data_ptr();
  args.shift = terms.const_data_ptr();
  args.channels_last = !batch_images.is_contiguous();
  const Stream stream = context.stream();
  void* const to = batch_images.mutable_data_ptr();
  auto* const labels_to = static_cast<int64_t*>(batch_labels.mutable_data_ptr());
  const bool summed = dev::gather_images(stream, args, to, labels_to, patches, moments);
  if (!patches || summed) return;
  const int64_t bytes = patches->n * channels * args.pixels * size_of(dtype);
  for (int64_t first = 0, group = 0; first < args.batch; first += patches->n, ++group) {
    dev::small_k_sum_moments(stream, *patches, static_cast<char*>(to) + group * bytes,
                             moments + group * moments_size(*patches), nullptr);
  }
}

std::tuple<Tensor, Tensor> gather_images(const Tensor& images, const Tensor& labels,
                                         const Tensor& indices, const Tensor& scale,
                                         const Tensor& shift, ScalarType dtype,
                                         bool channels_last) {
  constexpr const char* kOp = "gather_images";
  check_images(kOp, images);
  const int64_t batch = indices.dim() == 1 ? indices.size(0) : 0;
  Tensor batch_images = empty_4d({batch, images.size(1), images.size(2), images.size(3)}, images,
                                 channels_last, dtype);
  Tensor batch_labels = empty({batch}, images, ScalarType::Long);
  gather(kOp, images, labels, indices, nullptr, scale, shift, batch_images, batch_labels, nullptr,
         nullptr);
  return {batch_images, batch_labels};
}

void gather_next(const Tensor& images, const Tensor& labels, const Tensor& order,
                 const Tensor& position, const Tensor& scale, const Tensor& shift,
                 const Tensor& batch_images, const Tensor& batch_labels,
                 const std::optional<Tensor>& moments, const std::vector<int64_t>& filters) {
  constexpr const char* kOp = "gather_next";
  check_images(kOp, images);
  check_vector(kOp, "position", position, ScalarType::Long, 2, images);
  BRAZE_CHECK(position.is_contiguous(), kOp, ": expected a contiguous position");
  check_same_device(kOp, "batch_images", batch_images, "images", images);
  BRAZE_CHECK(
      batch_images.dim() == 4 && batch_images.size(1) == images.size(1) &&
          batch_images.size(2) == images.size(2) && batch_images.size(3) == images.size(3) &&
          (batch_images.is_contiguous() || is_channels_last(batch_images)),
      kOp, ": expected contiguous or channels_last batch_images of shape [batch, ", images.size(1),
      ", ", images.size(2), ", ", images.size(3), "], but got ", shape_string(batch_images));
  const int64_t batch = batch_images.size(0);
  check_vector(kOp, "batch_labels", batch_labels, ScalarType::Long, batch, images);
  BRAZE_CHECK(batch_labels.is_contiguous(), kOp, ": expected contiguous batch_labels");
  SmallKShape patches{};
  double* sums = nullptr;
  if (moments && batch > 0) {
    patches = patch_shape(kOp, batch_images, dtype_of(kOp, "dtype", batch_images), filters);
    const int64_t groups = moments->dim() == 3 ? moments->size(0) : 0;
    check_moments(kOp, *moments, patches, images, groups);
    BRAZE_CHECK(groups == 0 || batch % groups == 0, kOp, ": expected a multiple of ", groups,
                " images for the moments of as many groups, but got ", batch);
    patches.n = batch / std::max<int64_t>(1, groups);
    Tensor written = *moments;
    sums = static_cast<double*>(written.mutable_data_ptr());
  }
  Tensor place = position, images_to = batch_images, labels_to = batch_labels;
  gather(kOp, images, labels, order, static_cast<int64_t*>(place.mutable_data_ptr()), scale, shift,
         images_to, labels_to, sums ? &patches : nullptr, sums);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("gather_images", TORCH_BOX(&gather_images));
  m.impl("gather_next", TORCH_BOX(&gather_next));
}

}  // namespace braze
