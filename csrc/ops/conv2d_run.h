// One pass of a convolution with all that is done to its result, and on which stream. For
// conv2d.cpp alone.
#pragma once

#include "launchers/bias_activation.h"
#include "launchers/column_sum.h"
#include "launchers/conv2d_norm_grad.h"
#include "launchers/relu.h"
#include "launchers/vector_add.h"
#include "ops/branch.h"
#include "ops/conv2d.h"
#include "ops/conv2d_measure.h"
#include "ops/conv2d_operand.h"

namespace braze {
namespace {

// Of a convolution's weight gradient. A large one fills the device: there is nothing to gain (H200,
// 14 x 14 pixels: batch 64 4 us, 8192 a loss of 1 %). In 16 bits the input's gradient is there so
// soon that the update would wait for the weight's, if that had only what the others leave (batch
// 64 of the MNIST step: 69.1 us against 71.9; in TF32 77.7 against 76.7).
Branch branch_for(Stream main, const Conv2dShape& shape) {
  return Branch(main, shape.n * shape.p * shape.q <= 1 << 16, size_of(shape.dtype) == 2);
}

// max(y, 0) in place, of a dense tensor.
void apply_relu(Stream stream, const Tensor& y) {
  void* const data = y.mutable_data_ptr();
  dev::relu(stream, dtype_of("conv2d", "input", y), data, data, y.numel());
}

// Adds what a kernel without a bias left out, rounded twice, as by torch; and the ReLU.
void add_bias(Stream stream, const Tensor& bias, bool relu, Tensor& result) {
  const int64_t channels = bias.size(0);
  if (!Operand(result, true).is_dense) {
    result = torch::stable::subtract(result, torch::stable::view(bias, {1, channels, 1, 1}), -1.0);
    if (relu) apply_relu(stream, result);
    return;
  }
  const DType dtype = dtype_of("conv2d", "bias", bias);
  void* const data = result.mutable_data_ptr();
  dev::bias_activation(stream, {dtype, dtype, result.numel() / channels, channels},
                       relu ? kReLU : kIdentity, data, bias.const_data_ptr(), data);
}

// An input gradient by a plan of plan_conv2d_added().
void add_on_the_way([[maybe_unused]] Stream stream, [[maybe_unused]] const Conv2dProblem& problem,
                    [[maybe_unused]] const Conv2dPlan& plan, [[maybe_unused]] const Tensor& added,
                    [[maybe_unused]] void* workspace) {
#ifdef BRAZE_CUDA
  dev::run_conv2d_added(stream, problem, plan, added.const_data_ptr(), workspace);
#endif
}

// The plan of an input gradient that does the batch norm's part on the way, where it pays.
std::optional<Conv2dPlan> plan_of_norm([[maybe_unused]] const Conv2dProblem& problem,
                                       [[maybe_unused]] const Choice& choice,
                                       [[maybe_unused]] const Decision& decision,
                                       [[maybe_unused]] const Tensor& result,
                                       [[maybe_unused]] const Tensor* added,
                                       [[maybe_unused]] const NormOfInput& norm) {
#ifdef BRAZE_CUDA
  const auto fits = [&](const Tensor& t) {
    return same_layout(t, result) && alignment_of(t.const_data_ptr()) >= 16;
  };
  const bool from_library = decision.library >= 0;
  if ((from_library && choice.wish.kind != Wish::kAuto) || decision.plan.by_fft ||
      norm.activation.smooth() || !fits(norm.before) || (added && !fits(*added))) {
    return std::nullopt;
  }
  Conv2dPlan plan = from_library ? dev::plan_conv2d(problem, kAnyKernel) : decision.plan;
  if (dev::plan_conv2d_norm_grad(problem, from_library, norm.mask.has_value(), added != nullptr,
                                 &plan))
    return plan;
#endif
  return std::nullopt;
}

// An input gradient by a plan of plan_conv2d_norm_grad(): fills in the norm's sums.
void run_norm_grad([[maybe_unused]] Stream stream, [[maybe_unused]] const Conv2dProblem& problem,
                   [[maybe_unused]] const Conv2dPlan& plan, [[maybe_unused]] const Tensor* added,
                   [[maybe_unused]] NormOfInput& norm, [[maybe_unused]] void* workspace) {
#ifdef BRAZE_CUDA
  norm.sums = empty({problem.shape.c, plan.moment_sets, 2}, norm.statistics);
  dev::run_conv2d_norm_grad(
      stream, problem, plan,
      {added ? added->const_data_ptr() : nullptr, norm.before.const_data_ptr(),
       norm.mask ? static_cast<const uint8_t*>(norm.mask->const_data_ptr()) : nullptr,
       norm.activation, statistics_of(norm.statistics),
       static_cast<float*>(norm.sums.mutable_data_ptr())},
      workspace);
#endif
}

// What is to be done to a pass's result, beside the convolution.
struct Epilogue {
  std::optional<Tensor> bias;  // of the result's channels
  bool relu = false;
  OutputMoments* moments = nullptr;  // as in conv2d_forward
  const Tensor* added = nullptr;     // to it, in whose format it is dense
  NormOfInput* norm = nullptr;       // of an input gradient
};

// Runs one pass; `result` is the tensor that it writes. branch: runs it, unless null. Returns the
// memory that the kernels work in: only for the stream that runs it may it be anything else's from
// now on.
Workspace run(Stream stream, Conv2dProblem problem, Tensor& result, const Choice& choice,
              const Epilogue& epilogue = {}, Branch* branch = nullptr) {
  const std::optional<Tensor>& bias = epilogue.bias;
  const bool relu = epilogue.relu;
  OutputMoments* const moments = epilogue.moments;
  const Tensor* const added = epilogue.added;
  const void* const bias_data = bias ? bias->const_data_ptr() : nullptr;
  problem.shape.wants_moments = moments != nullptr;
  Decision decision;
#ifndef BRAZE_CUDA
  const auto fill_in = [&] {
    if (!is_blank(result)) return;
    result = filled_in(result);
    (problem.pass == Conv2dPass::kDgrad ? problem.x : problem.y).data = result.mutable_data_ptr();
  };
  if (choice.measure) fill_in();
#endif
  // What measuring finds adds nothing on the way, and the pass that would takes longer than it is
  // ahead.
  if (!choice.measure || added || epilogue.norm) {
    decision = decided(result, problem, choice.wish, bias_data);
  }
  if (choice.measure && !decision.adding) {
    decision = benchmarked(stream, problem, result, bias_data);
  }
#ifndef BRAZE_CUDA
  if (decision.library < 0) fill_in();
#endif
  const auto norm_plan =
      epilogue.norm ? plan_of_norm(problem, choice, decision, result, added, *epilogue.norm)
                    : std::nullopt;
  if (norm_plan) {
    Workspace workspace(norm_plan->workspace_bytes, result);
    run_norm_grad(stream, problem, *norm_plan, added, *epilogue.norm, workspace.data());
    return workspace;
  }
  bool adds = added && decision.adding && alignment_of(added->const_data_ptr()) >= 16;
  if (adds) {
    decision.plan = *decision.adding;
    decision.workspace_bytes = decision.plan.workspace_bytes;
  }
  // In the place of a decision for which there was no memory.
  const auto do_without_workspace = [&] {
    const auto smaller = choice.wish.kind == Wish::kAuto
                             ? decision_without_workspace(problem, bias_data)
                             : std::nullopt;
    if (smaller) decision = *smaller, adds = false;
    return smaller.has_value();
  };
  Workspace workspace;
  try {
    const int64_t bytes = decision.workspace_bytes;
    const bool aside = branch && !decision.plan.by_fft;
    workspace = aside ? branch->workspace(bytes, result) : Workspace(bytes, result);
  } catch (const std::runtime_error&) {  // out of memory
    if (!do_without_workspace()) throw;
  }
  // Not before: deterministic algorithms fill what is allocated, on the main stream. torch's own
  // transforms run on that too.
  if (branch && !decision.plan.by_fft) stream = branch->begin();
  Moments* sets = nullptr;
  if (moments && decision.plan.moment_sets > 0) {
    moments->memory =
        empty({problem.shape.k, decision.plan.moment_sets, 3}, result, ScalarType::Float);
    sets = static_cast<Moments*>(moments->memory.mutable_data_ptr());
    moments->view = {sets, decision.plan.moment_sets};
  }
  if (adds) {
    add_on_the_way(stream, problem, decision.plan, *added, workspace.data());
    return workspace;
  }
  // A bias that is still to be added comes before the ReLU.
  const auto bias_is_left = [&] { return bias && !decision.bias_fused; };
  const auto relu_is_left = [&] { return relu && (bias_is_left() || !decision.relu_fused); };
  const auto start = [&] {
    launch(stream, problem, decision, {bias_data, relu && !relu_is_left(), sets}, workspace.data(),
           result);
  };
  try {
    start();
  } catch (const std::runtime_error&) {
    // Transforms allocate as they go.
    if (!decision.plan.by_fft || !do_without_workspace()) throw;
    start();
  }
  if (bias_is_left()) {
    add_bias(stream, *bias, relu_is_left(), result);
  } else if (relu_is_left()) {
    apply_relu(stream, result);
  }
  if (added) {
    dev::vector_add(stream, problem.shape.dtype, result.const_data_ptr(), added->const_data_ptr(),
                    result.mutable_data_ptr(), result.numel(), kAnyKernel);
  }
  return workspace;
}

// The gradient that passes a ReLU behind a convolution, and the sums of its channels, if the same
// pass makes them or their parts.
struct PassedGradient {
  Tensor grad;
  std::optional<Tensor> bias;
  ColumnSumArgs sum;
  Workspace parts;  // with none, `bias` is done

  void add_up_parts(Stream stream, const Branch& branch) const {
    if (!bias || !parts.data()) return;
    const std::optional<Stream> aside = branch.begin_sums();
    dev::finish_column_sum(aside.value_or(stream), sum, parts.data());
    if (aside) keep_until_join({parts.memory()}, {*bias});
  }
};

// result: the ReLU's, in the convolution's own format if the convolution made it, as the gradient
// will be. with_bias: the sums are wanted.
PassedGradient behind_relu(Stream stream, const Tensor& grad_output, const Tensor& result,
                           bool channels_last, bool with_bias) {
  const Operand y = dense(stream, Operand(result, channels_last), channels_last);
  const Operand dy = dense(stream, Operand(grad_output, channels_last), channels_last);
  PassedGradient passed{empty_like_4d(result, channels_last), std::nullopt, {}, {}};
  if (result.numel() == 0) return passed;
  const DType dtype = dtype_of("conv2d", "result", result);
#ifdef BRAZE_CUDA
  // Else sums take single elements, several times as long.
  const bool in_vectors = result.size(1) * size_of(dtype) % 16 == 0;
#else
  const bool in_vectors = true;
#endif
  if (!channels_last || !in_vectors) {
    dev::relu_backward(stream, dtype, dy.ref.data, y.ref.data, passed.grad.mutable_data_ptr(),
                       result.numel());
    return passed;
  }
  const int64_t channels = result.size(1);
  if (with_bias) passed.bias = empty({channels}, result);
  passed.sum = {dtype,
                result.numel() / channels,
                channels,
                dy.ref.data,
                y.ref.data,
                passed.grad.mutable_data_ptr(),
                with_bias ? passed.bias->mutable_data_ptr() : nullptr};
  passed.parts = Workspace(dev::column_sum_workspace_bytes(passed.sum), result);
  dev::begin_column_sum(stream, passed.sum, passed.parts.data());
  return passed;
}

}  // namespace
}  // namespace braze
