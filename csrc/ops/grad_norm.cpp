#include "launchers/grad_norm.h"

#include <array>

#include "ops/update.h"

namespace braze {
namespace {

Tensor grad_norm(const Tensors& grads, std::optional<Tensor> grad_scale,
                 std::optional<Tensor> tickets) {
  BRAZE_CHECK(!grads.empty(), "grad_norm: expected at least one tensor");
  const Tensor& like = grads[0];
  std::array<std::vector<NormTensor>, 4> lists;  // of each dtype
  Tensors kept_alive;
  UpdateOptions options{};
  const std::optional<Tensor> none;
  const std::optional<Tensors> no_list;
  enter_settings("grad_norm",
                 {0, none, false, grad_scale, none, no_list, 0, none, none, 0, tickets}, like,
                 &options);
  for (const Tensor& grad : grads) {
    check_same_device("grad_norm", "grads", grad, "grads", like);
    const DType dtype = dtype_of("grad_norm", "grads", grad);
    if (!is_dense(grad)) kept_alive.push_back(as_contiguous(grad));
    const Tensor& dense = is_dense(grad) ? grad : kept_alive.back();
    if (dense.numel() == 0) continue;
    lists[static_cast<int>(dtype)].push_back({dense.const_data_ptr(), dense.numel()});
  }
  BRAZE_CHECK(!like.is_cuda() || tickets, "grad_norm: expected tickets on a GPU");

  const DeviceContext context(like);
  int64_t sums = 0;
  int last = -1;
  for (int i = 0; i < 4; ++i) {
    sums += dev::grad_norm_workspace(lists[i].data(), static_cast<int64_t>(lists[i].size()));
    if (!lists[i].empty()) last = i;
  }
  if (sums == 0) return zeros({}, like, ScalarType::Double);
  Tensor norm = empty({}, like, ScalarType::Double);
  Tensor workspace = empty({sums}, like, ScalarType::Double);
  auto* const all = static_cast<double*>(workspace.mutable_data_ptr());
  double* own = all;
  for (int i = 0; i <= last; ++i) {
    const auto count = static_cast<int64_t>(lists[i].size());
    if (count == 0) continue;
    dev::grad_norm(context.stream(), static_cast<DType>(i), lists[i].data(), count, own, all, sums,
                   options.grad_scale,
                   i == last ? static_cast<double*>(norm.mutable_data_ptr()) : nullptr,
                   options.tickets);
    own += dev::grad_norm_workspace(lists[i].data(), count);
  }
  return norm;
}

}  // namespace

BRAZE_IMPL(m) { m.impl("grad_norm", TORCH_BOX(&grad_norm)); }

}  // namespace braze
