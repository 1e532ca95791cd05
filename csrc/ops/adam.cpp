#include "launchers/adam.h"

#include "ops/update.h"

namespace braze {
namespace {

void adam_(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
           const Tensors& exp_avg_sqs, const Tensors& max_exp_avg_sqs, const Tensors& steps,
           const Tensors& cast_outputs, const Tensors& cast_inputs, double lr, double beta1,
           double beta2, double eps, double weight_decay, bool decoupled_weight_decay, bool amsgrad,
           bool maximize, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
           std::optional<Tensor> found_inf, std::optional<Tensors> averages, double average_weight,
           std::optional<Tensor> averaged, std::optional<Tensor> grad_norm, double max_grad_norm,
           std::optional<Tensor> tickets) {
  const UpdateSettings settings{lr,        lr_tensor,     maximize,       grad_scale,
                                found_inf, averages,      average_weight, averaged,
                                grad_norm, max_grad_norm, tickets};
  UpdateList<3> list("adam_", params, grads,
                     {{"exp_avgs", exp_avgs, true},
                      {"exp_avg_sqs", exp_avg_sqs, true},
                      {"max_exp_avg_sqs", max_exp_avg_sqs, amsgrad}},
                     &steps, cast_outputs, cast_inputs, settings);
  if (list.empty()) return;
  AdamOptions options{};
  enter_settings("adam_", settings, params[0], &options);
  options.source_dtype = list.source_dtype();
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.eps = eps;
  options.weight_decay = weight_decay;
  options.decoupled = decoupled_weight_decay;
  BRAZE_CHECK(!params[0].is_cuda() || tickets, "adam_: expected tickets on a GPU");

  const DeviceContext context(params[0]);
  const auto* tensors = list.lay_out(context);
  dev::adam(context.stream(), list.dtype(), tensors, list.count(), options);
  list.copy_back();
}

}  // namespace

BRAZE_IMPL(m) { m.impl("adam_", TORCH_BOX(&adam_)); }

}  // namespace braze
