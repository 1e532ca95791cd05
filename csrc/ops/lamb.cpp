#include "launchers/lamb.h"

#include "ops/update.h"

namespace braze {
namespace {

void lamb_(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
           const Tensors& exp_avg_sqs, const Tensors& steps, const Tensors& cast_outputs,
           const Tensors& cast_inputs, double lr, double beta1, double beta2, double eps,
           double weight_decay, double min_norm, double max_norm, bool maximize,
           std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
           std::optional<Tensor> found_inf, std::optional<Tensors> averages, double average_weight,
           std::optional<Tensor> averaged, std::optional<Tensor> grad_norm, double max_grad_norm,
           std::optional<Tensor> tickets) {
  const UpdateSettings settings{lr,        lr_tensor,     maximize,       grad_scale,
                                found_inf, averages,      average_weight, averaged,
                                grad_norm, max_grad_norm, tickets};
  UpdateList<2> list("lamb_", params, grads,
                     {{"exp_avgs", exp_avgs, true}, {"exp_avg_sqs", exp_avg_sqs, true}}, &steps,
                     cast_outputs, cast_inputs, settings);
  if (list.empty()) return;
  LambOptions options{};
  enter_settings("lamb_", settings, params[0], &options);
  options.source_dtype = list.source_dtype();
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.eps = eps;
  options.weight_decay = weight_decay;
  options.min_norm = min_norm;
  options.max_norm = max_norm;
  BRAZE_CHECK(!params[0].is_cuda() || tickets, "lamb_: expected tickets on a GPU");

  const DeviceContext context(params[0]);
  const auto* tensors = list.lay_out(context);
  const int64_t sums = 2 * dev::lamb_workspace(tensors, list.count());
  Tensor workspace = empty({sums + list.count()}, params[0], ScalarType::Double);
  options.sums = static_cast<double*>(workspace.mutable_data_ptr());
  options.ratios = options.sums + sums;
  dev::lamb(context.stream(), list.dtype(), tensors, list.count(), options);
  list.copy_back();
}

}  // namespace

BRAZE_IMPL(m) { m.impl("lamb_", TORCH_BOX(&lamb_)); }

}  // namespace braze
