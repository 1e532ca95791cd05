#include "launchers/rmsprop.h"

#include "ops/update.h"

namespace braze {
namespace {

void rmsprop_(const Tensors& params, const Tensors& grads, const Tensors& square_avgs,
              const Tensors& momentum_buffers, const Tensors& grad_avgs, const Tensors& steps,
              const Tensors& cast_outputs, const Tensors& cast_inputs, double lr, double alpha,
              double eps, double weight_decay, double momentum, bool centered, bool maximize,
              std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
              std::optional<Tensor> found_inf, std::optional<Tensors> averages,
              double average_weight, std::optional<Tensor> averaged,
              std::optional<Tensor> grad_norm, double max_grad_norm) {
  const UpdateSettings settings{lr,       lr_tensor,      maximize, grad_scale, found_inf,
                                averages, average_weight, averaged, grad_norm,  max_grad_norm,
                                {}};
  UpdateList<3> list("rmsprop_", params, grads,
                     {{"square_avgs", square_avgs, true},
                      {"momentum_buffers", momentum_buffers, momentum > 0},
                      {"grad_avgs", grad_avgs, centered}},
                     &steps, cast_outputs, cast_inputs, settings);
  if (list.empty()) return;
  RMSpropOptions options{};
  enter_settings("rmsprop_", settings, params[0], &options);
  options.source_dtype = list.source_dtype();
  options.alpha = alpha;
  options.eps = eps;
  options.weight_decay = weight_decay;
  options.momentum = momentum;

  const DeviceContext context(params[0]);
  const auto* tensors = list.lay_out(context);
  dev::rmsprop(context.stream(), list.dtype(), tensors, list.count(), options);
  list.copy_back();
}

}  // namespace

BRAZE_IMPL(m) { m.impl("rmsprop_", TORCH_BOX(&rmsprop_)); }

}  // namespace braze
