// torch.nn.functional.channel_shuffle of channels_last images. The gradient is the same op with as
// many groups as these had channels.
#include "launchers/channel_shuffle.h"

#include "ops/nhwc.h"

namespace braze {
namespace {

Tensor channel_shuffle(const Tensor& input, int64_t groups) {
  const char* op = "channel_shuffle";
  const DType dtype = dtype_of(op, "input", input);
  BRAZE_CHECK(input.dim() == 4, op, ": expected input to be 4-D, but got shape ",
              shape_string(input));
  BRAZE_CHECK(groups > 0 && input.size(1) % groups == 0, op,
              ": expected groups to divide the number of channels, ", input.size(1), ", but got ",
              groups);
  const DeviceContext context(input);
  const std::vector<int64_t> sizes = sizes_of(input);
  Tensor out = empty_4d(sizes, input, true);
  if (out.numel() == 0) return out;
  const Tensor x = as_nhwc(input);
  dev::channel_shuffle(context.stream(),
                       {dtype, sizes[0] * sizes[2] * sizes[3], sizes[1], groups, pixel_stride(x),
                        x.const_data_ptr(), out.mutable_data_ptr()});
  return out;
}

}  // namespace

BRAZE_IMPL(m) { m.impl("channel_shuffle", TORCH_BOX(&channel_shuffle)); }

}  // namespace braze
