#include "launchers/sgd.h"

#include "ops/update.h"

namespace braze {
namespace {

void sgd_(const Tensors& params, const Tensors& grads, const Tensors& momentum_buffers,
          const Tensors& cast_outputs, const Tensors& cast_inputs, double lr, double momentum,
          double dampening, double weight_decay, bool nesterov, bool maximize, bool first_step,
          std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
          std::optional<Tensor> found_inf, std::optional<Tensor> unwritten,
          std::optional<Tensors> averages, double average_weight, std::optional<Tensor> averaged,
          std::optional<Tensor> grad_norm, double max_grad_norm, bool grads_in_16_bits) {
  const UpdateSettings settings{lr,       lr_tensor,      maximize, grad_scale, found_inf,
                                averages, average_weight, averaged, grad_norm,  max_grad_norm,
                                {}};
  UpdateList<1> list("sgd_", params, grads, {{"momentum_buffers", momentum_buffers, momentum != 0}},
                     nullptr, cast_outputs, cast_inputs, settings, grads_in_16_bits);
  if (list.empty()) return;
  SgdOptions options{};
  enter_settings("sgd_", settings, params[0], &options);
  options.source_dtype = list.source_dtype();
  options.momentum = momentum;
  options.dampening = dampening;
  options.weight_decay = weight_decay;
  options.nesterov = nesterov;
  options.first_step = first_step;
  options.unwritten = scalar_on_device("sgd_", "unwritten", unwritten, params[0]);

  const DeviceContext context(params[0]);
  const auto* tensors = list.lay_out(context);
  dev::sgd(context.stream(), list.dtype(), tensors, list.count(), options);
  list.copy_back();
}

}  // namespace

BRAZE_IMPL(m) { m.impl("sgd_", TORCH_BOX(&sgd_)); }

}  // namespace braze
