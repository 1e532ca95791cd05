#include "launchers/cat.h"

#include "ops/nhwc.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

char* bytes_of(const Tensor& t) {
  return static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
}

Tensor cat_channels(std::vector<Tensor> tensors) {
  const char* op = "cat_channels";
  BRAZE_CHECK(!tensors.empty(), op, ": expected a non-empty list of tensors");
  const Tensor& like = tensors[0];
  const int64_t size = size_of(dtype_of(op, "tensors", like));
  BRAZE_CHECK(like.dim() == 4, op, ": expected 4-D tensors, but got shape ", shape_string(like));
  Sizes sizes = sizes_of(like);
  sizes[1] = 0;
  for (const Tensor& t : tensors) {
    check_same_device(op, "each tensor", t, "the first", like);
    check_same_dtype(op, "each tensor", t, "the first", like);
    BRAZE_CHECK(
        t.dim() == 4 && t.size(0) == sizes[0] && t.size(2) == sizes[2] && t.size(3) == sizes[3], op,
        ": expected tensors that differ in their channels only, but got shapes ",
        shape_string(like), " and ", shape_string(t));
    sizes[1] += t.size(1);
  }
  const DeviceContext context(like);
  Tensor out = empty_4d(sizes, like, true);
  if (out.numel() == 0) return out;
  std::vector<ChannelCopy> copies;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    t = as_nhwc(t);  // a copy lives until the launch
    const int64_t bytes = t.size(1) * size;
    copies.push_back({bytes_of(t), to, pixel_stride(t) * size, sizes[1] * size, bytes});
    to += bytes;
  }
  dev::copy_channels(context.stream(), sizes[0] * sizes[2] * sizes[3], copies.data(),
                     static_cast<int64_t>(copies.size()));
  return out;
}

// An empty tensor for a gradient that is not wanted.
std::vector<Tensor> cat_channels_backward(const Tensor& grad_output, Sizes channels,
                                          std::vector<bool> output_mask) {
  const char* op = "cat_channels_backward";
  const int64_t size = size_of(dtype_of(op, "grad_output", grad_output));
  BRAZE_CHECK(grad_output.dim() == 4, op, ": expected grad_output to be 4-D, but got shape ",
              shape_string(grad_output));
  BRAZE_CHECK(output_mask.size() == channels.size(), op, ": expected output_mask of ",
              channels.size(), " entries, but got ", output_mask.size());
  int64_t sum = 0;
  for (const int64_t c : channels) {
    BRAZE_CHECK(c >= 0, op, ": expected channels of 0 or more, but got ", c);
    sum += c;
  }
  BRAZE_CHECK(sum == grad_output.size(1), op, ": expected grad_output of ", sum,
              " channels, but got shape ", shape_string(grad_output));
  const DeviceContext context(grad_output);
  // Of a gradient in another order torch copies the channels, which is one pass as well.
  const int64_t step = grad_output.numel() == 0 ? 0 : pixel_stride(grad_output);
  Sizes sizes = sizes_of(grad_output);
  std::vector<Tensor> grads;
  std::vector<ChannelCopy> copies;
  int64_t first = 0;
  for (size_t i = 0; i < channels.size(); first += channels[i++]) {
    if (!output_mask[i]) {
      grads.push_back(empty({0}, grad_output));
      continue;
    }
    sizes[1] = channels[i];
    Tensor grad = empty_4d(sizes, grad_output, true);
    grads.push_back(grad);
    if (grad.numel() == 0) continue;
    if (step == 0) {
      Tensor view = grad_output;
      torch::stable::copy_(grad, torch::stable::narrow(view, 1, first, channels[i]));
      continue;
    }
    const int64_t bytes = channels[i] * size;
    copies.push_back(
        {bytes_of(grad_output) + first * size, grad.mutable_data_ptr(), step * size, bytes, bytes});
  }
  if (!copies.empty()) {
    dev::copy_channels(context.stream(), sizes[0] * sizes[2] * sizes[3], copies.data(),
                       static_cast<int64_t>(copies.size()));
  }
  return grads;
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("cat_channels", TORCH_BOX(&cat_channels));
  m.impl("cat_channels_backward", TORCH_BOX(&cat_channels_backward));
}

}  // namespace braze
