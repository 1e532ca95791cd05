#include "kernels/cast/cast.h"

#include "ops/common.h"

namespace braze {
namespace {

void cast_(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  BRAZE_CHECK(outputs.size() == inputs.size(),
              "cast_: expected as many outputs as inputs, but got ", outputs.size(), " and ",
              inputs.size());
  if (inputs.empty()) return;
  const DType from = dtype_of("cast_", "inputs", inputs[0]);
  const DType to = dtype_of("cast_", "outputs", outputs[0]);
  std::vector<CastTensor> tensors;
  tensors.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_device("cast_", "inputs", inputs[i], "inputs", inputs[0]);
    check_same_device("cast_", "outputs", outputs[i], "inputs", inputs[0]);
    check_same_dtype("cast_", "inputs", inputs[i], "inputs", inputs[0]);
    check_same_dtype("cast_", "outputs", outputs[i], "outputs", outputs[0]);
    check_same_shape("cast_", "outputs", outputs[i], "its input", inputs[i]);
    BRAZE_CHECK(is_dense(inputs[i]) && same_layout(inputs[i], outputs[i]),
                "cast_: expected dense inputs, and outputs with the same strides");
  }
  const DeviceContext context(inputs[0]);
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensor output = outputs[i];
    tensors.push_back({inputs[i].const_data_ptr(), output.mutable_data_ptr(), inputs[i].numel()});
  }
  dev::cast(context.stream(), from, to, tensors.data(), static_cast<int64_t>(tensors.size()));
}

}  // namespace

BRAZE_IMPL(m) { m.impl("cast_", TORCH_BOX(&cast_)); }

}  // namespace braze
