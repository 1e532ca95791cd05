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
  dtype_of(kOp, "first", first[0]);
  check_same_device(kOp, "second", second[0], "first", first[0]);
  check_same_dtype(kOp, "second", second[0], "first", first[0]);
  const Casts of_first = checked_casts(kOp, outputs, first);
  const Casts of_second = checked_casts(kOp, outputs, second);
  std::vector<MeanTensor> tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const CastTensor& t = of_first.tensors[i];
    tensors.push_back({t.from, of_second.tensors[i].from, t.to, t.numel});
  }
  const DeviceContext context(first[0]);
  dev::mean(context.stream(), of_first.from, of_first.to, tensors.data(),
            static_cast<int64_t>(count));
}

}  // namespace

BRAZE_IMPL(m) { m.impl("mean_", TORCH_BOX(&mean_)); }

}  // namespace braze
