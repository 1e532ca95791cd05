#include "launchers/mean.h"

#include "ops/cast.h"

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
  const DType to = dtype_of(kOp, "outputs", outputs[0]);
  std::vector<MeanTensor> tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const DType from = dtype_of(kOp, "first", first[i]);
    check_same_device(kOp, "first", first[i], "first", first[0]);
    check_same_dtype(kOp, "second", second[i], "first", first[i]);
    check_same_dtype(kOp, "outputs", outputs[i], "outputs", outputs[0]);
    for (const Tensor* source : {&first[i], &second[i]}) check_cast(kOp, outputs[i], *source);
    tensors.push_back({first[i].const_data_ptr(), second[i].const_data_ptr(),
                       Tensor(outputs[i]).mutable_data_ptr(), first[i].numel(), from});
  }
  const DeviceContext context(first[0]);
  dev::mean(context.stream(), to, tensors.data(), static_cast<int64_t>(count));
}

}  // namespace

BRAZE_IMPL(m) { m.impl("mean_", TORCH_BOX(&mean_)); }

}  // namespace braze
