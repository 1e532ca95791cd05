// What the front ends of optimizers share: lists of tensors checked and laid out alike, settings.
#pragma once

#include <map>

#include "launchers/common/update.h"
#include "ops/cast.h"

namespace braze {

using Tensors = std::vector<Tensor>;

// Tensors kept for the parameters: one for each of them, or none.
struct StateList {
  const char* name;
  const Tensors& tensors;
  bool wanted;
};

// What every optimizer's op takes beside its own settings.
struct UpdateSettings {
  double lr;
  const std::optional<Tensor>& lr_tensor;
  bool maximize;
  const std::optional<Tensor>& grad_scale;
  const std::optional<Tensor>& found_inf;
  const std::optional<Tensors>& averages;
  double average_weight;
  const std::optional<Tensor>& averaged;
  const std::optional<Tensor>& grad_norm;
  double max_grad_norm;
  const std::optional<Tensor>& tickets;
};

void check_no_overlap(const char* op, const char* arg, const Tensor& t);

// The pointer to one float32 element on the device of `like`; null for none.
const float* scalar_on_device(const char* op, const char* arg, const std::optional<Tensor>& t,
                              const Tensor& like);

void enter_settings(const char* op, const UpdateSettings& settings, const Tensor& like,
                    UpdateOptions* options);

// The lists of a launch. The constructor checks all of them; nothing is written before lay_out().
// grads_in_16_bits: gradients may all be in one 16-bit dtype where parameters are float32.
template <int kStates>
class UpdateList {
 public:
  UpdateList(const char* op, const Tensors& params, const Tensors& grads,
             const StateList (&states)[kStates], const Tensors* steps, const Tensors& cast_outputs,
             const Tensors& cast_inputs, const UpdateSettings& settings,
             bool grads_in_16_bits = false)
      : params_(params),
        grads_(grads),
        steps_(steps),
        averages_(settings.averages ? &*settings.averages : nullptr),
        casts_(checked_casts(op, cast_outputs, cast_inputs)),
        casts_may_wait_(!settings.found_inf) {
    const size_t count = params.size();
    for (int s = 0; s < kStates; ++s) states_[s] = states[s].wanted ? &states[s].tensors : nullptr;
    for (const StateList& state : states) {
      const size_t wanted = state.wanted ? count : 0;
      BRAZE_CHECK(grads.size() == count && state.tensors.size() == wanted, op, ": expected ", count,
                  " grads and ", wanted, " ", state.name, ", but got ", grads.size(), " and ",
                  state.tensors.size());
    }
    BRAZE_CHECK(!steps || steps->size() == count, op, ": expected ", count, " steps, but got ",
                steps ? steps->size() : 0);
    BRAZE_CHECK(!averages_ || averages_->size() == count, op, ": expected ", count,
                " averages, but got ", averages_ ? averages_->size() : 0);
    BRAZE_CHECK(count > 0 || casts_.tensors.empty(), op, ": expected casts of grads only");
    if (count == 0) return;
    const Tensor& like = params[0];
    dtype_ = dtype_of(op, "params", like);
    if (grads_in_16_bits && dtype_ == DType::kFloat32 && cast_outputs.empty()) {
      const DType grad_dtype = dtype_of(op, "grads", grads[0]);
      if (size_of(grad_dtype) == 2) sources_dtype_ = grad_dtype;
    }
    for (const Tensor& t : cast_outputs) {
      check_same_device(op, "cast_outputs", t, "params", like);
      check_same_dtype(op, "cast_outputs", t, "params", like);
    }
    const auto check = [&](const char* arg, const Tensor& t, const Tensor& param, bool written,
                           const Tensor& dtype) {
      check_same_device(op, arg, t, "params", like);
      check_same_dtype(op, arg, t, &dtype == &like ? "params" : arg, dtype);
      if (&t != &param) check_same_shape(op, arg, t, "its parameter", param);
      if (written) check_no_overlap(op, arg, t);
    };
    for (size_t i = 0; i < count; ++i) {
      check("params", params[i], params[i], true, like);
      check("grads", grads[i], params[i], false, sources_dtype_ ? grads[0] : like);
      for (const StateList& state : states) {
        if (state.wanted) check(state.name, state.tensors[i], params[i], true, like);
      }
      if (averages_) check("averages", (*averages_)[i], params[i], true, like);
      if (steps) scalar_on_device(op, "steps", (*steps)[i], like);
    }
  }

  bool empty() const { return params_.empty(); }
  DType dtype() const { return dtype_; }
  int64_t count() const { return static_cast<int64_t>(params_.size()); }
  DType source_dtype() const { return sources_dtype_.value_or(casts_.from); }

  // The tensors as the launcher takes them, in order. Casts that it does not do itself are done.
  const UpdateTensor<kStates>* lay_out(const DeviceContext& context) {
    const std::map<const void*, const void*> sources = do_casts(context);
    tensors_.reserve(params_.size());
    for (size_t i = 0; i < params_.size(); ++i) {
      Tensor param = params_[i];
      if (!is_dense(param)) {
        param = in_layout(param, dense_like(param));
        to_copy_.emplace_back(param, &params_[i]);
      }
      UpdateTensor<kStates> entry{};
      entry.param = param.mutable_data_ptr();
      entry.numel = param.numel();
      if (sources_dtype_ && kReadsSources && same_layout(grads_[i], param)) {
        entry.source = grads_[i].const_data_ptr();
      } else {
        Tensor grad = in_layout(grads_[i], param, sources_dtype_.has_value());
        entry.grad = grad.mutable_data_ptr();
        const auto source = sources.find(entry.grad);
        if (source != sources.end()) entry.source = source->second;
      }
      for (int s = 0; s < kStates; ++s) {
        if (states_[s]) entry.states[s] = written((*states_[s])[i], param);
      }
      if (averages_) entry.average = written((*averages_)[i], param);
      if (steps_) {
        Tensor step = (*steps_)[i];
        entry.step = static_cast<float*>(step.mutable_data_ptr());
      }
      tensors_.push_back(entry);
    }
    return tensors_.data();
  }

  // After the launch: what it has written into copies goes where it belongs.
  void copy_back() {
    for (auto& [copy, destination] : to_copy_) {
      Tensor target = *destination;
      torch::stable::copy_(target, copy);
    }
  }

 private:
#ifdef BRAZE_CUDA
  static constexpr bool kReadsSources = true;  // launchers, in 16 bits where parameters are float32
#else
  static constexpr bool kReadsSources = false;
#endif

  // The dense tensor that stands for t, laid out as `layout`, and in its dtype.
  Tensor in_layout(const Tensor& t, const Tensor& layout, bool casts = false) {
    if (same_layout(t, layout) && !casts) return t;
    Tensor copy = dense_like(layout);
    torch::stable::copy_(copy, t);
    kept_alive_.push_back(copy);
    return copy;
  }

  void* written(const Tensor& t, const Tensor& layout) {
    Tensor dense = in_layout(t, layout);
    if (!same_layout(t, layout)) to_copy_.emplace_back(dense, &t);
    return dense.mutable_data_ptr();
  }

  // Address of a gradient -> that of what the launch casts to it, while it reads it.
  std::map<const void*, const void*> do_casts(const DeviceContext& context) {
    const bool takes_sources =
        kReadsSources && dtype_ == DType::kFloat32 && size_of(casts_.from) == 2;
    std::map<const void*, const void*> sources;
    if (casts_may_wait_ && !casts_.tensors.empty() && takes_sources) {
      for (size_t i = 0; i < params_.size(); ++i) {
        if (!is_dense(params_[i]) || !same_layout(grads_[i], params_[i])) continue;
        const auto makes_it = [&](const CastTensor& c) {
          return c.to == grads_[i].const_data_ptr();
        };
        const auto found = std::find_if(casts_.tensors.begin(), casts_.tensors.end(), makes_it);
        if (found == casts_.tensors.end()) continue;
        sources[found->to] = found->from;
        casts_.tensors.erase(found);
      }
    }
    if (!casts_.tensors.empty()) {
      dev::cast(context.stream(), casts_.from, casts_.to, casts_.tensors.data(),
                static_cast<int64_t>(casts_.tensors.size()));
    }
    return sources;
  }

  const Tensors& params_;
  const Tensors& grads_;
  const Tensors* states_[kStates];
  const Tensors* steps_;
  const Tensors* averages_;
  Casts casts_;
  bool casts_may_wait_;
  DType dtype_{};
  std::optional<DType> sources_dtype_;  // of gradients in 16 bits, which are not kept in float32
  std::vector<UpdateTensor<kStates>> tensors_;
  Tensors kept_alive_;                                     // copies in another layout
  std::vector<std::pair<Tensor, const Tensor*>> to_copy_;  // updated ones and where they belong
};

}  // namespace braze
