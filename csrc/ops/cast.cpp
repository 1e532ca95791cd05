#include "ops/cast.h"

namespace braze {

void check_cast(const char* op, const Tensor& output, const Tensor& input) {
  check_same_device(op, "outputs", output, "its input", input);
  check_same_shape(op, "outputs", output, "its input", input);
  BRAZE_CHECK(is_dense(input) && same_layout(input, output), op,
              ": expected dense inputs, and outputs with the same strides");
}

Casts checked_casts(const char* op, const std::vector<Tensor>& outputs,
                    const std::vector<Tensor>& inputs) {
  BRAZE_CHECK(outputs.size() == inputs.size(), op, ": expected as many outputs as inputs, but got ",
              outputs.size(), " and ", inputs.size());
  Casts casts;
  if (inputs.empty()) return casts;
  casts.from = dtype_of(op, "inputs", inputs[0]);
  casts.to = dtype_of(op, "outputs", outputs[0]);
  casts.tensors.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_device(op, "inputs", inputs[i], "inputs", inputs[0]);
    check_same_dtype(op, "inputs", inputs[i], "inputs", inputs[0]);
    check_same_dtype(op, "outputs", outputs[i], "outputs", outputs[0]);
    check_cast(op, outputs[i], inputs[i]);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensor output = outputs[i];
    casts.tensors.push_back(
        {inputs[i].const_data_ptr(), output.mutable_data_ptr(), inputs[i].numel()});
  }
  return casts;
}

namespace {

void cast_(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  const Casts casts = checked_casts("cast_", outputs, inputs);
  if (inputs.empty()) return;
  const DeviceContext context(inputs[0]);
  dev::cast(context.stream(), casts.from, casts.to, casts.tensors.data(),
            static_cast<int64_t>(casts.tensors.size()));
}

}  // namespace

BRAZE_IMPL(m) { m.impl("cast_", TORCH_BOX(&cast_)); }

}  // namespace braze
