// conv2d and its backward: torch's checks, memory formats, choice of kernel. What follows the
// checks serves conv_transpose2d too, which is the same three passes in other roles.
#include "ops/conv2d.h"

#include <algorithm>

#include "launchers/conv2d_tail.h"
#include "ops/conv2d_run.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;
using Arguments = Conv2dArguments;

// torch's suggest_memory_format. Strides of dimensions of size 1 count: that is how one-channel
// tensors say which format they want.
bool suggests_channels_last(const Tensor& t) {
  if (t.stride(1) == 0) return false;
  int64_t smallest = 0;
  for (const int64_t d : {1, 3, 2, 0}) {
    if (t.size(d) == 0 || t.stride(d) < smallest) return false;
    if (d == 0 && smallest == t.stride(1)) return false;
    smallest = t.stride(d) * std::max<int64_t>(1, t.size(d));
  }
  return true;
}

void check_arguments(const Tensor& input, const Tensor& weight, const Arguments& a) {
  check_same_device("conv2d", "weight", weight, "input", input);
  check_same_dtype("conv2d", "weight", weight, "input", input);
  BRAZE_CHECK(input.dim() == 4,
              "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got "
              "input of size: ",
              shape_string(input));
  BRAZE_CHECK(weight.dim() == 4, "conv2d: expected weight to be 4D, but got weight of size ",
              shape_string(weight));
  BRAZE_CHECK(a.stride.size() == 2 && a.padding.size() == 2 && a.dilation.size() == 2,
              "conv2d: expected stride, padding and dilation of two values each");
  BRAZE_CHECK(a.groups > 0, "non-positive groups is not supported");
  for (int i = 0; i < 2; ++i) {
    BRAZE_CHECK(a.padding[i] >= 0, "negative padding is not supported");
    BRAZE_CHECK(a.stride[i] > 0, "non-positive stride is not supported");
    BRAZE_CHECK(a.dilation[i] > 0, "dilation should be greater than zero, but got ",
                list_string(a.dilation));
  }
  BRAZE_CHECK(weight.size(0) >= a.groups, "Given groups=", a.groups,
              ", expected weight to be at "
              "least ",
              a.groups, " at dimension 0, but got weight of size ", shape_string(weight),
              " instead");
  BRAZE_CHECK(weight.size(0) % a.groups == 0, "Given groups=", a.groups,
              ", expected weight to be "
              "divisible by ",
              a.groups, " at dimension 0, but got weight of size ", shape_string(weight),
              " instead");
  BRAZE_CHECK(input.size(1) == weight.size(1) * a.groups, "Given groups=", a.groups,
              ", weight of size ", shape_string(weight), ", expected input", shape_string(input),
              " to have ", weight.size(1) * a.groups, " channels, but got ", input.size(1),
              " channels instead");
  BRAZE_CHECK(weight.size(2) > 0 && weight.size(3) > 0,
              "kernel size should be greater than zero, "
              "but got kernel_height: ",
              weight.size(2), " kernel_width: ", weight.size(3));
  int64_t padded[2], kernel[2];
  for (int i = 0; i < 2; ++i) {
    padded[i] = input.size(2 + i) + 2 * a.padding[i];
    kernel[i] = a.dilation[i] * (weight.size(2 + i) - 1) + 1;
  }
  BRAZE_CHECK(padded[0] >= kernel[0] && padded[1] >= kernel[1],
              "Calculated padded input size per channel: (", padded[0], " x ", padded[1],
              "). Kernel size: (", kernel[0], " x ", kernel[1],
              "). Kernel size can't be greater than actual input size");
  BRAZE_CHECK(input.size(2) > 0 && input.size(3) > 0,
              "Only zero batch or zero channel inputs are supported, but got input shape: ",
              shape_string(input));
}

Conv2dShape shape_of(const Tensor& input, const Tensor& weight, const Arguments& a) {
  Conv2dShape s{};
  s.dtype = dtype_of("conv2d", "input", input);
  s.n = input.size(0), s.c = input.size(1), s.h = input.size(2), s.w = input.size(3);
  s.k = weight.size(0), s.r = weight.size(2), s.s = weight.size(3);
  s.stride_h = a.stride[0], s.stride_w = a.stride[1];
  s.pad_h = a.padding[0], s.pad_w = a.padding[1];
  s.dilation_h = a.dilation[0], s.dilation_w = a.dilation[1];
  s.p = (s.h + 2 * s.pad_h - s.dilation_h * (s.r - 1) - 1) / s.stride_h + 1;
  s.q = (s.w + 2 * s.pad_w - s.dilation_w * (s.s - 1) - 1) / s.stride_w + 1;
  s.groups = a.groups;
  s.allow_tf32 = a.allow_tf32;
  s.deterministic = a.deterministic;
  return s;
}

// The pass as a caller has its tensors in mind: dense in the memory format, but for x, if given.
Conv2dProblem problem_in(bool channels_last, Conv2dPass pass, const Conv2dShape& s,
                         const Tensor* x) {
  const auto dense = [&](int64_t c, int64_t h, int64_t w) {
    if (channels_last) return Tensor4dRef{nullptr, h * w * c, 1, w * c, c};
    return Tensor4dRef{nullptr, c * h * w, h * w, w, 1};
  };
  return {pass, s, x ? Operand(*x, channels_last).ref : dense(s.c, s.h, s.w),
          dense(s.c / s.groups, s.r, s.s), dense(s.k, s.p, s.q)};
}

// Takes a pass down for braze.tune(). x: as in problem_in.
void record(int device, const Tensor* x, bool channels_last, Conv2dPass pass, const Conv2dShape& s,
            bool bias, const Choice& choice) {
  if (!tuned_convolutions.recording || choice.wish.kind != Wish::kAuto) return;
  const auto found = convolution_pass_of(problem_in(channels_last, pass, s, x), bias, device);
  if (found) tuned_convolutions.record(*found);
}

// Whether passes of contiguous tensors had better run in channels_last, with transposes before and
// after. Not where tuning knows what to do with one as it is. x: as in problem_in.
bool prefers_channels_last([[maybe_unused]] const Tensor& input, [[maybe_unused]] const Tensor* x,
                           [[maybe_unused]] const std::vector<Conv2dPass>& passes,
                           [[maybe_unused]] const Conv2dShape& s, [[maybe_unused]] bool bias,
                           [[maybe_unused]] const Choice& choice) {
#ifdef BRAZE_CUDA
  const Wish& wish = choice.wish;
  if (!wish.leaves_choice()) return false;
  const bool asks_tuning = tuned_convolutions.in_use && wish.kind == Wish::kAuto;
  return !passes.empty() && std::all_of(passes.begin(), passes.end(), [&](Conv2dPass pass) {
    if (asks_tuning) {
      const Conv2dProblem as_is = problem_in(false, pass, s, x);
      const void* const some_bias = bias && pass != Conv2dPass::kWgrad ? input.data_ptr() : nullptr;
      if (tuned_decision(as_is, some_bias, input.get_device_index())) return false;
    }
    const Conv2dProblem problem = problem_in(true, pass, s, nullptr);
    return decided(input, problem, {Wish::kOwn}, nullptr).plan.pays_transposes;
  });
#else
  return false;
#endif
}

}  // namespace

std::string list_string(const Sizes& values) {
  std::string s = "[";
  for (size_t i = 0; i < values.size(); ++i) s += (i ? ", " : "") + std::to_string(values[i]);
  return s + "]";
}

bool conv2d_is_channels_last(const Tensor& input, const Tensor& weight) {
  return suggests_channels_last(input) || suggests_channels_last(weight);
}

void check_grad_output(const char* op, const Tensor& grad_output, const Tensor& input,
                       const Sizes& expected) {
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  BRAZE_CHECK(same_sizes(grad_output, expected), op, ": expected grad_output of shape ",
              list_string(expected), ", but got ", shape_string(grad_output));
}

Conv2dShape conv2d_shape(const Tensor& input, const Tensor& weight, const Arguments& args) {
  check_arguments(input, weight, args);
  return shape_of(input, weight, args);
}

Tensor conv2d_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const Arguments& args, OutputMoments* moments, bool to_channels_last,
                      bool relu) {
  const Conv2dShape shape = conv2d_shape(input, weight, args);
  if (bias) {
    check_same_device("conv2d", "bias", *bias, "input", input);
    check_same_dtype("conv2d", "bias", *bias, "input", input);
    BRAZE_CHECK(bias->dim() == 1 && bias->size(0) == shape.k, "Given weight of size ",
                shape_string(weight), ", expected bias to be 1-dimensional with ", shape.k,
                " elements, but got bias of size ", shape_string(*bias), " instead");
  }
  return run_conv2d_forward(Conv2dPass::kFprop, shape, input, weight, bias, args.backend, moments,
                            to_channels_last, relu);
}

// Room for a pass's result: none for a large one that torch will make. x: as in problem_in.
Tensor room_for(const Sizes& nchw, const Tensor& like, bool channels_last,
                [[maybe_unused]] Conv2dPass pass, [[maybe_unused]] const Conv2dShape& shape,
                [[maybe_unused]] const Tensor* x, [[maybe_unused]] const Choice& choice) {
#ifndef BRAZE_CUDA
  const int64_t bytes = nchw[0] * nchw[1] * nchw[2] * nchw[3] * size_of(shape.dtype);
  if (!choice.measure && like.numel() > 0 && bytes >= kHugePageBytes &&
      decided(like, problem_in(channels_last, pass, shape, x), choice.wish, nullptr).library >= 0) {
    return blank_4d(nchw, like, channels_last);
  }
#endif
  return empty_4d(nchw, like, channels_last);
}

Tensor run_conv2d_forward(Conv2dPass forward, const Conv2dShape& shape, const Tensor& input,
                          const Tensor& weight, const std::optional<Tensor>& bias,
                          const std::string& backend, OutputMoments* moments, bool to_channels_last,
                          bool relu) {
  const bool transposed = forward == Conv2dPass::kDgrad;
  std::optional<Tensor> dense_bias;
  if (bias) dense_bias = as_contiguous(*bias);
  const DeviceContext context(input);
  const bool channels_last = to_channels_last || conv2d_is_channels_last(input, weight);
  const bool no_terms = shape.n == 0 || shape.c == 0;
  const Choice choice = no_terms ? Choice() : choice_of(backend);
  const bool with_bias = bias.has_value();
  const Tensor* const as_x = transposed ? nullptr : &input;
  const Sizes sizes = transposed ? Sizes{shape.n, shape.c, shape.h, shape.w}
                                 : Sizes{shape.n, shape.k, shape.p, shape.q};
  Tensor out = room_for(sizes, input, channels_last, forward, shape, as_x, choice);
  if (shape.n == 0) return out;
  if (shape.c == 0) {
    torch::stable::zero_(out);
    if (bias) torch::stable::copy_(out, torch::stable::view(*dense_bias, {1, shape.k, 1, 1}));
    if (relu) apply_relu(context.stream(), out);
    return out;
  }
  std::vector<Tensor> memory;
  if (!channels_last && prefers_channels_last(input, as_x, {forward}, shape, with_bias, choice)) {
    memory = channels_last_memory({&input, &out});
  }
  const bool reformat = !memory.empty();
  const bool within = channels_last || reformat;  // the format that it is computed in
  const Stream stream = context.stream();
  // The kernels of gradients want their operands in the convolution's own format.
  const Operand given(input, within);
  const Operand from = reformat     ? dense(stream, given, within, memory[0])
                       : transposed ? dense(stream, given, within)
                                    : operand(stream, input, within, choice.wish);
  const Operand w = dense(stream, Operand(weight, within), within);
  Tensor result = reformat ? memory[1] : out;
  const Operand to(result, within);
  const Operand &x = transposed ? to : from, &y = transposed ? from : to;
  run(stream, {forward, shape, x.ref, w.ref, y.ref}, result, choice, {dense_bias, relu, moments});
  // (A kernel that leaves moments is not for tuning to replace.)
  if (!moments || moments->view.sets == 0) {
    record(input.get_device_index(), as_x, channels_last, forward, shape, with_bias, choice);
  }
  return reformat ? dense(stream, Operand(result, false), false, out).tensor : result;
}

std::optional<Tensor> conv2d_with_tail(
    [[maybe_unused]] const char* op, [[maybe_unused]] const Tensor& input,
    [[maybe_unused]] const Tensor& weight, [[maybe_unused]] const std::optional<Tensor>& bias,
    [[maybe_unused]] const Norm& norm, [[maybe_unused]] const std::optional<Tensor>& added,
    [[maybe_unused]] const Activation& activation, [[maybe_unused]] const Arguments& args) {
#ifdef BRAZE_CUDA
  const Conv2dShape shape = conv2d_shape(input, weight, args);
  if (!choice_of(args.backend).wish.leaves_choice() || shape.n == 0 || shape.c == 0 ||
      !conv2d_is_channels_last(input, weight)) {
    return std::nullopt;
  }
  const Operand x(input, true), w(weight, true);
  if (!x.is_dense || !w.is_dense) return std::nullopt;
  const DeviceContext context(input);
  Tensor out = empty_4d({shape.n, shape.k, shape.p, shape.q}, input, true);
  const Conv2dProblem problem{Conv2dPass::kFprop, shape, x.ref, w.ref, Operand(out, true).ref};
  if (added && !(same_layout(*added, out) && is_aligned(*added))) return std::nullopt;
  Conv2dPlan plan;
  const bool at_once = dev::plan_conv2d_tail(problem, activation, added.has_value(), &plan);
  const int64_t rows = shape.n * shape.p * shape.q;
  if (!at_once && !dev::takes_tail_pass(shape.dtype, rows, shape.k, activation)) {
    return std::nullopt;
  }
  norm.check(op, batch_norm_shape(op, out), out);
  if (bias) {
    check_same_device(op, "conv_bias", *bias, "input", input);
    check_same_dtype(op, "conv_bias", *bias, "input", input);
    BRAZE_CHECK(bias->numel() == shape.k, op, ": expected conv_bias of ", shape.k,
                " elements, but got ", bias->numel());
  }
  if (!at_once) out = conv2d_forward(input, weight, std::nullopt, args, nullptr);
  const Workspace workspace(at_once ? plan.workspace_bytes : 0, input);
  const auto dense_bias = dense(bias);
  norm.with_dense([&](const BatchNormAffine& affine, const BatchNormBuffers& buffers) {
    const Conv2dTail tail{affine.weight,     affine.bias,   affine.dtype, buffers.mean,
                          buffers.var,       buffers.dtype, norm.eps,     const_data(dense_bias),
                          const_data(added), activation};
    if (at_once) {
      dev::run_conv2d(context.stream(), problem, plan, {nullptr, false, nullptr, &tail},
                      workspace.data());
    } else {
      void* const y = out.mutable_data_ptr();
      dev::run_tail_pass(context.stream(), shape.dtype, rows, shape.k, tail, y, y);
    }
  });
  return out;
#else
  return std::nullopt;
#endif
}

std::tuple<Tensor, Tensor, Tensor> conv2d_gradients(const Tensor& grad_output, const Tensor& input,
                                                    const Tensor& weight, const Arguments& args,
                                                    const std::vector<bool>& output_mask,
                                                    const Tensor* relu_result,
                                                    const std::optional<Tensor>& added,
                                                    NormOfInput* norm) {
  const Conv2dShape shape = conv2d_shape(input, weight, args);
  check_grad_output("conv2d_backward", grad_output, input, {shape.n, shape.k, shape.p, shape.q});
  if (added) {
    check_same_device("conv2d_backward", "added", *added, "input", input);
    check_same_dtype("conv2d_backward", "added", *added, "input", input);
    check_same_shape("conv2d_backward", "added", *added, "input", input);
  }
  return run_conv2d_gradients(Conv2dPass::kFprop, shape, grad_output, input, weight, args.backend,
                              output_mask, relu_result, added, norm);
}

std::tuple<Tensor, Tensor, Tensor> run_conv2d_gradients(
    Conv2dPass forward, const Conv2dShape& shape, const Tensor& grad_output, const Tensor& input,
    const Tensor& weight, const std::string& backend, const std::vector<bool>& output_mask,
    const Tensor* relu_result, const std::optional<Tensor>& added, NormOfInput* norm) {
  const bool transposed = forward == Conv2dPass::kDgrad;
  const Conv2dPass to_input = transposed ? Conv2dPass::kFprop : Conv2dPass::kDgrad;
  const DeviceContext context(input);
  const bool channels_last = conv2d_is_channels_last(input, weight);
  Tensor grad_input, grad_weight, grad_bias;
  const bool no_terms = shape.n == 0 || shape.c == 0;
  std::vector<Conv2dPass> passes;
  if (output_mask[0]) passes.push_back(to_input);
  if (output_mask[1]) passes.push_back(Conv2dPass::kWgrad);
  const Choice choice = no_terms || passes.empty() ? Choice() : choice_of(backend);
  const Tensor* const as_x = transposed ? nullptr : &input;
  for (const Conv2dPass pass : passes) {
    record(input.get_device_index(), as_x, channels_last, pass, shape, false, choice);
  }
  if (output_mask[0]) {
    const Sizes sizes{shape.n, input.size(1), input.size(2), input.size(3)};
    grad_input = no_terms ? empty_4d(sizes, input, channels_last)
                          : room_for(sizes, input, channels_last, to_input, shape, as_x, choice);
  }
  std::vector<Tensor> memory;
  if (!channels_last && !no_terms &&
      prefers_channels_last(input, as_x, passes, shape, false, choice)) {
    memory = output_mask[0] ? channels_last_memory({&input, &grad_output, &grad_input})
                            : channels_last_memory({&input, &grad_output});
  }
  const bool reformat = !memory.empty();
  const bool within = channels_last || reformat;  // the format that they are computed in
  const Stream stream = context.stream();
  const Operand given(input, within);
  const Operand in = reformat     ? dense(stream, given, within, memory[0])
                     : transposed ? dense(stream, given, within)
                                  : operand(stream, input, within, choice.wish);
  const Operand w = dense(stream, Operand(weight, within), within);
  Branch branch = branch_for(stream, shape);
  std::optional<PassedGradient> passed;
  if (relu_result) {
    passed = behind_relu(stream, grad_output, *relu_result, channels_last, output_mask[2]);
    passed->add_up_parts(stream, branch);
  }
  const Tensor& dy = passed ? passed->grad : grad_output;
  const Operand grad = reformat ? dense(stream, Operand(dy, within), within, memory[1])
                                : output_gradient(stream, dy, within);
  const Operand &x = transposed ? grad : in, &y = transposed ? in : grad;
  const auto add_up_bias = [&] {
    const int64_t n = shape.n, c = grad_output.size(1), h = grad_output.size(2),
                  width = grad_output.size(3);
    grad_bias = n > 0 ? empty({c}, input) : zeros({c}, input);
    if (n == 0) return;
    Workspace workspace(dev::channel_sum_workspace_bytes(shape.dtype, n, c, h, width), input);
    const std::optional<Stream> aside = branch.begin_sums();
    dev::channel_sum(aside.value_or(stream), shape.dtype, n, c, h, width, grad.ref,
                     grad_bias.mutable_data_ptr(), workspace.data());
    if (aside) keep_until_join({grad.tensor, workspace.memory()}, {grad_bias});
  };
  const bool sums_bias = output_mask[2] && !(passed && passed->bias);
  // On a side stream as soon as the gradient is there: elsewhere behind the rest.
  const bool sums_aside = sums_bias && branch.has_side_stream();
  if (sums_aside) add_up_bias();
  // The two convolutions need nothing of each other. The branch's memory is kept until they join.
  Workspace kept;
  if (output_mask[1]) {
    grad_weight = empty_weight_gradient(weight, channels_last);
    if (no_terms) {
      torch::stable::zero_(grad_weight);
    } else {
      const Operand dw(grad_weight, channels_last);
      kept = run(stream, {Conv2dPass::kWgrad, shape, x.ref, dw.ref, y.ref}, grad_weight, choice, {},
                 &branch);
      if (branch.outlasts()) branch.keep({x.tensor, y.tensor}, kept, grad_weight);
    }
  }
  if (output_mask[0] && !no_terms) {
    Tensor result = reformat ? memory[2] : grad_input;
    const Operand to(result, within);
    const Operand &to_x = transposed ? grad : to, &to_y = transposed ? to : grad;
    Epilogue epilogue;
    std::optional<Tensor> more;
    if (added) {
      more = dense(stream, Operand(*added, within), within).tensor;
      epilogue.added = &*more;
    }
    if (within == channels_last) epilogue.norm = norm;
    run(stream, {to_input, shape, to_x.ref, w.ref, to_y.ref}, result, choice, epilogue);
    grad_input =
        reformat ? dense(stream, Operand(result, false), false, grad_input).tensor : result;
  }
  branch.join();
  if (sums_bias && !sums_aside) add_up_bias();
  if (passed && passed->bias) grad_bias = *passed->bias;
  // An empty tensor each: results of an op must not alias.
  if (!output_mask[0]) grad_input = empty({0}, input);
  if (!output_mask[1]) grad_weight = empty({0}, input);
  if (!output_mask[2]) grad_bias = empty({0}, input);
  return {grad_input, grad_weight, grad_bias};
}

namespace {

Tensor conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
              const Sizes& stride, const Sizes& padding, const Sizes& dilation, int64_t groups,
              bool allow_tf32, bool deterministic, const std::string& backend) {
  return conv2d_forward(input, weight, bias,
                        {stride, padding, dilation, groups, allow_tf32, deterministic, backend},
                        nullptr);
}

std::tuple<Tensor, Tensor, Tensor> conv2d_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, const Sizes& stride,
    const Sizes& padding, const Sizes& dilation, int64_t groups,
    const std::vector<bool>& output_mask, bool allow_tf32, bool deterministic,
    const std::string& backend, const std::optional<Tensor>& added) {
  return conv2d_gradients(grad_output, input, weight,
                          {stride, padding, dilation, groups, allow_tf32, deterministic, backend},
                          output_mask, nullptr, added);
}

Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   const Sizes& stride, const Sizes& padding, const Sizes& dilation, int64_t groups,
                   bool allow_tf32, bool deterministic, const std::string& backend) {
  return conv2d_forward(input, weight, bias,
                        {stride, padding, dilation, groups, allow_tf32, deterministic, backend},
                        nullptr, false, true);
}

std::tuple<Tensor, Tensor, Tensor> conv2d_relu_backward(
    const Tensor& grad_output, const Tensor& result, const Tensor& input, const Tensor& weight,
    const Sizes& stride, const Sizes& padding, const Sizes& dilation, int64_t groups,
    const std::vector<bool>& output_mask, bool allow_tf32, bool deterministic,
    const std::string& backend) {
  constexpr const char* kOp = "conv2d_relu_backward";
  check_same_device(kOp, "result", result, "input", input);
  check_same_dtype(kOp, "result", result, "input", input);
  check_same_shape(kOp, "result", result, "grad_output", grad_output);
  return conv2d_gradients(grad_output, input, weight,
                          {stride, padding, dilation, groups, allow_tf32, deterministic, backend},
                          output_mask, &result);
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("conv2d", TORCH_BOX(&conv2d));
  m.impl("conv2d_backward", TORCH_BOX(&conv2d_backward));
  m.impl("conv2d_relu", TORCH_BOX(&conv2d_relu));
  m.impl("conv2d_relu_backward", TORCH_BOX(&conv2d_relu_backward));
}

}  // namespace braze
