#include "launchers/sgd.h"

#include <algorithm>
#include <map>

#include "ops/cast.h"

namespace braze {
namespace {

void check_no_overlap(const char* arg, const Tensor& t) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    BRAZE_CHECK(t.stride(d) != 0 || t.size(d) <= 1,
                "sgd_: unsupported operation: more than one element of a tensor in ", arg,
                " refers to a single memory location");
  }
}

const float* scalar_on_device(const char* arg, const std::optional<Tensor>& t, const Tensor& like) {
  if (!t) return nullptr;
  check_same_device("sgd_", arg, *t, "params", like);
  BRAZE_CHECK(t->numel() == 1 && t->scalar_type() == ScalarType::Float, "sgd_: expected ", arg,
              " to be one float32 element, but got ", shape_string(*t), " ",
              scalar_type_name(t->scalar_type()));
  return static_cast<const float*>(t->const_data_ptr());
}

void sgd_(const std::vector<Tensor>& params, const std::vector<Tensor>& grads,
          const std::vector<Tensor>& momentum_buffers, const std::vector<Tensor>& cast_outputs,
          const std::vector<Tensor>& cast_inputs, double lr, double momentum, double dampening,
          double weight_decay, bool nesterov, bool maximize, bool first_step,
          std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
          std::optional<Tensor> found_inf, std::optional<Tensor> unwritten) {
  const size_t count = params.size(), wanted = momentum != 0 ? count : 0;
  BRAZE_CHECK(grads.size() == count && momentum_buffers.size() == wanted, "sgd_: expected ", count,
              " grads and ", wanted, " momentum_buffers, but got ", grads.size(), " and ",
              momentum_buffers.size());
  Casts casts = checked_casts("sgd_", cast_outputs, cast_inputs);
  if (count == 0) {
    BRAZE_CHECK(casts.tensors.empty(), "sgd_: expected casts of grads only");
    return;
  }
  const DType dtype = dtype_of("sgd_", "params", params[0]);
  for (const Tensor& t : cast_outputs) {
    check_same_device("sgd_", "cast_outputs", t, "params", params[0]);
    check_same_dtype("sgd_", "cast_outputs", t, "params", params[0]);
  }
  const auto check = [&](const char* arg, const Tensor& t, const Tensor& param) {
    check_same_device("sgd_", arg, t, "params", params[0]);
    check_same_dtype("sgd_", arg, t, "params", params[0]);
    check_same_shape("sgd_", arg, t, "its parameter", param);
  };
  for (size_t i = 0; i < count; ++i) {
    check("params", params[i], params[i]);
    check("grads", grads[i], params[i]);
    check_no_overlap("params", params[i]);
    if (wanted == 0) continue;
    check("momentum_buffers", momentum_buffers[i], params[i]);
    check_no_overlap("momentum_buffers", momentum_buffers[i]);
  }
  SgdOptions options{lr,       nullptr,    false,   momentum, dampening, weight_decay, nesterov,
                     maximize, first_step, nullptr, nullptr,  nullptr,   casts.from};
  if (lr_tensor) {
    check_same_device("sgd_", "lr_tensor", *lr_tensor, "params", params[0]);
    const ScalarType type = lr_tensor->scalar_type();
    BRAZE_CHECK(
        lr_tensor->numel() == 1 && (type == ScalarType::Float || type == ScalarType::Double),
        "sgd_: expected lr_tensor to be one float32 or float64 element, but got ",
        shape_string(*lr_tensor), " ", scalar_type_name(type));
    options.lr_tensor = lr_tensor->const_data_ptr();
    options.lr_is_double = type == ScalarType::Double;
  }
  options.grad_scale = scalar_on_device("grad_scale", grad_scale, params[0]);
  options.found_inf = scalar_on_device("found_inf", found_inf, params[0]);
  options.unwritten = scalar_on_device("unwritten", unwritten, params[0]);

  const DeviceContext context(params[0]);
  // Casts that make a gradient while the update reads it; the others come first.
  std::map<const void*, const void*> sources;
  if (!found_inf && !casts.tensors.empty() && dev::sgd_takes_sources(dtype, casts.from)) {
    for (size_t i = 0; i < count; ++i) {
      if (!is_dense(params[i]) || !same_layout(grads[i], params[i])) continue;
      const auto makes_it = [&](const CastTensor& c) { return c.to == grads[i].const_data_ptr(); };
      const auto found = std::find_if(casts.tensors.begin(), casts.tensors.end(), makes_it);
      if (found == casts.tensors.end()) continue;
      sources[found->to] = found->from;
      casts.tensors.erase(found);
    }
  }
  if (!casts.tensors.empty()) {
    dev::cast(context.stream(), casts.from, casts.to, casts.tensors.data(),
              static_cast<int64_t>(casts.tensors.size()));
  }
  std::vector<SgdTensor> tensors;
  std::vector<Tensor> kept_alive;                         // copies in another layout
  std::vector<std::pair<Tensor, const Tensor*>> to_copy;  // updated copies and where they belong
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    // The dense tensor that stands for t, laid out as `layout`.
    const auto in_layout = [&](const Tensor& t, const Tensor& layout) {
      if (same_layout(t, layout)) return t;
      kept_alive.push_back(with_layout_of(t, dense_like(layout)));
      return kept_alive.back();
    };
    Tensor param = params[i];
    if (!is_dense(param)) {
      param = in_layout(param, dense_like(param));
      to_copy.emplace_back(param, &params[i]);
    }
    Tensor grad = in_layout(grads[i], param);
    SgdTensor entry{param.mutable_data_ptr(), grad.mutable_data_ptr(), nullptr, nullptr,
                    param.numel()};
    const auto source = sources.find(entry.grad);
    if (source != sources.end()) entry.source = source->second;
    if (wanted != 0) {
      Tensor buffer = in_layout(momentum_buffers[i], param);
      if (!same_layout(momentum_buffers[i], param)) {
        to_copy.emplace_back(buffer, &momentum_buffers[i]);
      }
      entry.momentum = buffer.mutable_data_ptr();
    }
    tensors.push_back(entry);
  }
  dev::sgd(context.stream(), dtype, tensors.data(), static_cast<int64_t>(count), options);
  for (auto& [copy, destination] : to_copy) {
    Tensor target = *destination;
    torch::stable::copy_(target, copy);
  }
}

}  // namespace

BRAZE_IMPL(m) { m.impl("sgd_", TORCH_BOX(&sgd_)); }

}  // namespace braze
