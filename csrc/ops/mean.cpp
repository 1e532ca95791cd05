#include "launchers/mean.h"

#include "ops/common.h"

namespace braze {
namespace {

void mean_(const std::vector<Tensor>& outputs, const std::vector<Tensor>& first,
           const std::vector<Tensor>& second) {
  constexpr const char* kOp = "mean_";
  const size_t count = outputs.size();
  BRAZE_CHECK(first.size() == count && second.size() == count, kOp,
              ": expected as many outputs as pairs, but got ", count, ", ", first.size(), " and ",
              second.size());
  if (count == 0) return;
  const DType from = dtype_of(kOp, "first", first[0]), to = dtype_of(kOp, "outputs", outputs[0]);
  std::vector<MeanTensor> tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    Tensor output = outputs[i];
    for (const Tensor* input : {&first[i], &second[i]}) {
      check_same_device(kOp, "inputs", *input, "first", first[0]);
      check_same_dtype(kOp, "inputs", *input, "first", first[0]);
      check_same_shape(kOp, "inputs", *input, "their output", output);
      BRAZE_CHECK(is_dense(*input) && same_layout(*input, output), kOp,
                  ": expected dense inputs, and outputs with the same strides");
    }
    check_same_device(kOp, "outputs", output, "first", first[0]);
    check_same_dtype(kOp, "outputs", output, "outputs", outputs[0]);
    tensors.push_back({first[i].const_data_ptr(), second[i].const_data_ptr(),
                       output.mutable_data_ptr(), output.numel()});
  }
  const DeviceContext context(first[0]);
  dev::mean(context.stream(), from, to, tensors.data(), static_cast<int64_t>(count));
}

}  // namespace

BRAZE_IMPL(m) { m.impl("mean_", TORCH_BOX(&mean_)); }

}  // namespace braze
