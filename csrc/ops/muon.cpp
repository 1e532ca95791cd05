#include "launchers/muon.h"

#include "ops/update.h"

namespace braze {
namespace {

void muon_momentum_(const Tensors& updates, const Tensors& grads, const Tensors& momentum_buffers,
                    const Tensors& cast_outputs, const Tensors& cast_inputs, double momentum,
                    bool nesterov, std::optional<Tensor> grad_scale,
                    std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm,
                    double max_grad_norm) {
  const std::optional<Tensor> none;
  const std::optional<Tensors> no_list;
  const UpdateSettings settings{0, none, false,     grad_scale,    found_inf, no_list,
                                0, none, grad_norm, max_grad_norm, none};
  UpdateList<1> list("muon_momentum_", updates, grads,
                     {{"momentum_buffers", momentum_buffers, true}}, nullptr, cast_outputs,
                     cast_inputs, settings);
  if (list.empty()) return;
  MuonOptions options{};
  enter_settings("muon_momentum_", settings, updates[0], &options);
  options.source_dtype = list.source_dtype();
  options.momentum = momentum;
  options.nesterov = nesterov;

  const DeviceContext context(updates[0]);
  const auto* tensors = list.lay_out(context);
  dev::muon_momentum(context.stream(), list.dtype(), tensors, list.count(), options);
  list.copy_back();
}

void muon_polynomial_(const Tensor& gram, Tensor square, double a, double b, double c) {
  const DType dtype = dtype_of("muon_polynomial_", "gram", gram);
  check_same_device("muon_polynomial_", "square", square, "gram", gram);
  check_same_dtype("muon_polynomial_", "square", square, "gram", gram);
  check_same_shape("muon_polynomial_", "square", square, "gram", gram);
  BRAZE_CHECK(gram.dim() == 3 && gram.size(1) == gram.size(2) && gram.is_contiguous() &&
                  square.is_contiguous(),
              "muon_polynomial_: expected contiguous batches of square matrices, but got ",
              shape_string(gram));
  if (gram.numel() == 0) return;
  const DeviceContext context(gram);
  dev::muon_polynomial(context.stream(), dtype, gram.const_data_ptr(), square.mutable_data_ptr(),
                       gram.size(0), gram.size(1), a, b, c);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("muon_momentum_", TORCH_BOX(&muon_momentum_));
  m.impl("muon_polynomial_", TORCH_BOX(&muon_polynomial_));
}

}  // namespace braze
