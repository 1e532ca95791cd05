// bn_relu2d: batch norm, ReLU and, where max_pool says so, 2x2 max pooling, which is what follows a
// convolution in a block; and conv_bn_relu2d, which is the whole block.
#include "launchers/conv_bn_relu2d.h"
#include "launchers/conv_bn_pool_backward.h"
#include "ops/batch_norm.h"
#include "ops/branch.h"
#include "ops/conv2d.h"

namespace braze {
namespace {

using Ints = std::vector<int64_t>;

BnPoolShape bn_pool_shape(const char* op, const Tensor& z, [[maybe_unused]] bool training) {
  const DType dtype = dtype_of(op, "input", z);
  BnPoolShape shape{dtype, z.size(0), z.size(1), z.size(2), z.size(3), is_channels_last(z)};
#ifdef BRAZE_CUDA
  shape.keeps_maxima = training && shape.may_keep_maxima();
#endif
  BRAZE_CHECK(shape.pooled() > 0, op,
              ": expected an input with at least one 2x2 window, but got shape ", shape_string(z));
  BRAZE_CHECK(shape.tiles() <= kBnPoolMostTiles, op,
              ": expected an input of fewer than 2^31 2x2 tiles, but got shape ", shape_string(z));
  return shape;
}

Tensor empty_pooled(const BnPoolShape& shape, const Tensor& z) {
  const bool channels_last = shape.channels_last && !shape.turned;
  return empty_4d({shape.n, shape.c, shape.p(), shape.q()}, z, channels_last);
}

void check_input(const char* op, const Tensor& z) {
  BRAZE_CHECK(z.dim() == 4 && z.numel() > 0, op,
              ": expected a 4-D input that is not empty, but got shape ", shape_string(z));
}

// Results in the order of bn_relu2d's schema. contiguous: so is a pooled result, whatever the
// input.
std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& input,
                                           const ChannelMoments& moments, const Norm& norm,
                                           bool max_pool, bool contiguous = false) {
  check_input(op, input);
  const BatchNormShape shape = batch_norm_shape(op, input);
  norm.check(op, shape, input);
  std::optional<BnPoolShape> pool =
      max_pool ? std::optional(bn_pool_shape(op, input, norm.training)) : std::nullopt;
  if (pool) pool->turned = contiguous && dev::bn_pool_turns(*pool);
  const DeviceContext context(input);
  Tensor out = pool ? empty_pooled(*pool, input) : empty_like_input(shape, input);
  Tensor codes = empty({pool ? bn_pool_code_words(*pool) : 0}, input, ScalarType::Int);
  Tensor statistics = empty_statistics(input);
  const BatchNormStatistics results = statistics_of(statistics);
  const Tensor z = in_layout(shape, input);
  if (pool) {
    norm.coefficients(context, shape, z, moments, results);
    dev::bn_pool_forward(context.stream(), *pool, z.const_data_ptr(), results,
                         out.mutable_data_ptr(), static_cast<uint32_t*>(codes.mutable_data_ptr()));
  } else {
    norm.normalize(context, shape, z, moments, {kReLU, nullptr}, results, out.mutable_data_ptr(),
                   nullptr);
  }
  if (pool && contiguous) out = as_contiguous(out);
  return {out, codes, statistics};
}

struct Gradients {
  Tensor input, weight, bias;
  Tensor constant;  // of one added to each channel of the input, in the input's dtype
};

struct Wanted {
  bool weight, bias, constant;
};

// A backward's arguments, checked and in z's layout, and what the gradients of weight, bias and
// constant are written to.
struct Backward {
  BatchNormShape shape;
  std::optional<BnPoolShape> pool;
  Tensor z, dy, codes;
  std::optional<Tensor> weight;
  BatchNormStatistics statistics;
  BatchNormAffine affine;
  bool training;
  Gradients grads;
  void *dweight, *dbias, *dconstant;
};

// weight and bias: None, or their gradients come in their dtype. Those that are not wanted are
// empty.
Backward checked_backward(const char* op, const Tensor& grad_output, const Tensor& input,
                          const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                          const Tensor& codes, const Tensor& statistics, bool training,
                          bool max_pool, const Wanted& wanted) {
  check_input(op, input);
  Backward b{batch_norm_shape(op, input)};
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_device(op, "codes", codes, "input", input);
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_channel_vector(op, "weight", weight, input);
  check_channel_vector(op, "bias", bias, input);
  check_pair(op, "weight", weight, "bias", bias);
  check_statistics(op, statistics, input);
  if (max_pool) b.pool = bn_pool_shape(op, input, training);
  if (b.pool) b.pool->turned = grad_output.is_contiguous() && dev::bn_pool_turns(*b.pool);
  const int64_t code_words = b.pool ? bn_pool_code_words(*b.pool) : 0;
  BRAZE_CHECK(codes.scalar_type() == ScalarType::Int && codes.is_contiguous() &&
                  codes.numel() == code_words,
              op, ": expected codes of ", code_words, " int32 elements, but got shape ",
              shape_string(codes));
  const DeviceContext context(input);
  b.z = in_layout(b.shape, input);
  const Tensor result = b.pool ? empty_pooled(*b.pool, input) : b.z;
  check_same_shape(op, "grad_output", grad_output, "the result", result);
  b.dy = b.pool ? with_layout_of(grad_output, result) : in_layout(b.shape, grad_output);
  b.codes = codes;
  const ScalarType type = weight ? weight->scalar_type()
                          : bias ? bias->scalar_type()
                                 : statistics_type(input);
  const int64_t c = b.shape.c;
  b.grads = {empty({0}, input), empty({wanted.weight ? c : 0}, input, type),
             empty({wanted.bias ? c : 0}, input, type), empty({wanted.constant ? c : 0}, input)};
  const auto data = [](bool is_wanted, Tensor& t) {
    return is_wanted ? t.mutable_data_ptr() : nullptr;
  };
  b.dweight = data(wanted.weight, b.grads.weight);
  b.dbias = data(wanted.bias, b.grads.bias);
  b.dconstant = data(wanted.constant, b.grads.constant);
  b.weight = dense(weight);
  b.affine = {const_data(b.weight), nullptr, dtype_of(op, "weight", b.grads.weight)};
  b.statistics = statistics_of(statistics);
  b.training = training;
  return b;
}

// Fills in the gradients. to_input: where that of the input goes, or nullptr.
void run_backward(const DeviceContext& context, const Backward& b, const Tensor* to_input) {
  void* const dz = to_input ? to_input->mutable_data_ptr() : nullptr;
  const Workspace workspace(dev::batch_norm_workspace_bytes(b.shape), b.z);
  if (b.pool) {
    dev::bn_pool_backward(context.stream(), *b.pool, b.training, b.dy.const_data_ptr(),
                          b.z.const_data_ptr(),
                          static_cast<const uint32_t*>(b.codes.const_data_ptr()), b.affine,
                          b.statistics, dz, b.dweight, b.dbias, b.dconstant, workspace.data());
  } else {
    dev::batch_norm_backward(context.stream(), b.shape, b.training, b.dy.const_data_ptr(),
                             b.z.const_data_ptr(), {kReLU, nullptr}, nullptr, b.affine,
                             b.statistics, {dz, nullptr, b.dweight, b.dbias, b.dconstant},
                             workspace.data());
  }
}

std::tuple<Tensor, Tensor, Tensor> bn_relu2d(
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_var,
    const std::optional<Tensor>& num_batches_tracked, bool training, std::optional<double> momentum,
    double eps, bool max_pool) {
  const Norm norm{weight,   bias,     running_mean, running_var, num_batches_tracked,
                  training, momentum, eps};
  return forward("bn_relu2d", input, {}, norm, max_pool);
}

std::tuple<Tensor, Tensor, Tensor> bn_relu2d_backward(
    const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const Tensor& codes, const Tensor& statistics, bool training,
    bool max_pool, const std::vector<bool>& output_mask) {
  const char* op = "bn_relu2d_backward";
  BRAZE_CHECK(output_mask.size() == 3, op, ": expected output_mask of 3 entries, but got ",
              output_mask.size());
  Backward b = checked_backward(op, grad_output, input, weight, bias, codes, statistics, training,
                                max_pool, {output_mask[1], output_mask[2], false});
  const DeviceContext context(input);
  Gradients& grads = b.grads;
  if (output_mask[0]) grads.input = empty_like_input(b.shape, input);
  run_backward(context, b, output_mask[0] ? &grads.input : nullptr);
  return {grads.input, grads.weight, grads.bias};
}

// The result of bn_relu2d or conv_bn_relu2d without pooling once more, bit for bit, of batch norm's
// input and the statistics that they left.
Tensor bn_relu2d_again(const Tensor& input, const Tensor& statistics) {
  const char* op = "bn_relu2d_again";
  check_input(op, input);
  check_statistics(op, statistics, input);
  const BatchNormShape shape = batch_norm_shape(op, input);
  const DeviceContext context(input);
  Tensor out = empty_like_input(shape, input);
  const Tensor z = in_layout(shape, input);
  dev::batch_norm_apply(context.stream(), shape, z.const_data_ptr(), {kReLU, nullptr},
                        statistics_of(statistics), out.mutable_data_ptr(), nullptr);
  return out;
}

// Whether a convolution before pooling leaves its result, which only the block itself reads, in
// channels_last, whatever the format of its operands: the CPU's kernels have filters across the
// lanes, and so has pooling then.
bool leaves_channels_last([[maybe_unused]] const Tensor& weight) {
#ifdef BRAZE_CUDA
  return false;
#else
  constexpr int64_t kLeastFilters = 16;
  return weight.dim() == 4 && weight.size(0) >= kLeastFilters;
#endif
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_bn_relu2d(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& conv_bias,
    const std::optional<Tensor>& bn_weight, const std::optional<Tensor>& bn_bias,
    const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_var,
    const std::optional<Tensor>& num_batches_tracked, const Ints& stride, const Ints& padding,
    const Ints& dilation, int64_t groups, bool training, std::optional<double> momentum, double eps,
    bool max_pool, bool contiguous, bool allow_tf32, bool deterministic,
    const std::string& backend) {
  OutputMoments moments;
  const bool within_channels_last = max_pool && leaves_channels_last(weight);
  const Tensor z =
      conv2d_forward(input, weight, conv_bias,
                     {stride, padding, dilation, groups, allow_tf32, deterministic, backend},
                     training ? &moments : nullptr, within_channels_last);
  if (within_channels_last && !conv2d_is_channels_last(input, weight)) contiguous = true;
  const Norm norm{bn_weight,           bn_bias,  running_mean, running_var,
                  num_batches_tracked, training, momentum,     eps};
  const auto [out, codes, statistics] =
      forward("conv_bn_relu2d", z, moments.view, norm, max_pool, contiguous);
  return {out, z, codes, statistics};
}

// The gradients of the convolution's input and weight by one kernel, which makes that of its output
// on the way; nothing where passes one after the other have to, or do it faster. (Tuning and
// "benchmark", which time convolutions alone, know nothing of it.)
std::optional<std::pair<Tensor, Tensor>> gradients_at_once(
    [[maybe_unused]] const DeviceContext& context, [[maybe_unused]] const Backward& b,
    [[maybe_unused]] const Tensor& input, [[maybe_unused]] const Tensor& weight,
    [[maybe_unused]] const Conv2dArguments& args) {
#ifdef BRAZE_CUDA
  if (!b.training || !b.pool || !leaves_convolution(args.backend) || input.numel() == 0) {
    return std::nullopt;
  }
  if (!is_channels_last(input) || !is_channels_last(weight)) return std::nullopt;
  const Conv2dShape shape = conv2d_shape(input, weight, args);
  check_grad_output("conv2d_backward", b.z, input, {shape.n, shape.k, shape.p, shape.q});
  const auto ref = [](const Tensor& t, const void* data) {
    return Tensor4dRef{data, t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
  };
  ConvBnPoolBackward problem{shape,
                             *b.pool,
                             ref(input, input.const_data_ptr()),
                             ref(weight, weight.const_data_ptr()),
                             {},
                             nullptr,
                             b.dy.const_data_ptr(),
                             b.z.const_data_ptr(),
                             static_cast<const uint32_t*>(b.codes.const_data_ptr()),
                             b.affine,
                             b.statistics,
                             b.dweight,
                             b.dbias,
                             b.dconstant};
  if (!dev::conv_bn_pool_backward_pays(problem)) return std::nullopt;
  Tensor grad_input = empty_4d({shape.n, shape.c, shape.h, shape.w}, input, true);
  Tensor grad_weight = empty_weight_gradient(weight, true);
  problem.dx = grad_input.mutable_data_ptr();
  problem.dw = ref(grad_weight, grad_weight.mutable_data_ptr());
  const Stream stream = context.stream();
  const Workspace workspace(dev::conv_bn_pool_backward_workspace_bytes(problem), input);
  dev::conv_bn_pool_backward(stream, problem, workspace.data());
  // Nothing waits for the weight's gradient before the update.
  const std::optional<Stream> aside = Branch(stream, true, true).begin_sums();
  dev::finish_conv_bn_pool_backward(aside.value_or(stream), problem, workspace.data());
  if (aside) keep_until_join({workspace.memory()}, {grad_weight});
  return std::pair(grad_input, grad_weight);
#else
  return std::nullopt;
#endif
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_bn_relu2d_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const std::optional<Tensor>& bn_weight, const std::optional<Tensor>& bn_bias, const Tensor& z,
    const Tensor& codes, const Tensor& statistics, const Ints& stride, const Ints& padding,
    const Ints& dilation, int64_t groups, bool training, bool max_pool,
    const std::vector<bool>& output_mask, bool allow_tf32, bool deterministic,
    const std::string& backend, const std::optional<Tensor>& added) {
  const char* op = "conv_bn_relu2d_backward";
  BRAZE_CHECK(output_mask.size() == 5, op, ": expected output_mask of 5 entries, but got ",
              output_mask.size());
  Backward b = checked_backward(op, grad_output, z, bn_weight, bn_bias, codes, statistics, training,
                                max_pool, {output_mask[3], output_mask[4], output_mask[2]});
  const DeviceContext context(z);
  const Gradients& grads = b.grads;
  const Conv2dArguments args{stride, padding, dilation, groups, allow_tf32, deterministic, backend};
  const bool has_conv = output_mask[0] || output_mask[1];
  if (output_mask[0] && output_mask[1] && !added) {
    if (const auto done = gradients_at_once(context, b, input, weight, args)) {
      return {done->first, done->second, grads.constant, grads.weight, grads.bias};
    }
  }
  WorkingTensor dz;
  if (has_conv) {
    dz = WorkingTensor({z.size(0), z.size(1), z.size(2), z.size(3)}, z,
                       keeps_channels_last(b.shape));
  }
  run_backward(context, b, has_conv ? &dz.tensor() : nullptr);
  // With an empty mask it checks its arguments all the same.
  const auto [grad_input, grad_weight, none] =
      conv2d_gradients(has_conv ? dz.tensor() : z, input, weight, args,
                       {output_mask[0], output_mask[1], false}, nullptr, added);
  return {grad_input, grad_weight, grads.constant, grads.weight, grads.bias};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("bn_relu2d_again", TORCH_BOX(&bn_relu2d_again));
  m.impl("bn_relu2d", TORCH_BOX(&bn_relu2d));
  m.impl("bn_relu2d_backward", TORCH_BOX(&bn_relu2d_backward));
  m.impl("conv_bn_relu2d", TORCH_BOX(&conv_bn_relu2d));
  m.impl("conv_bn_relu2d_backward", TORCH_BOX(&conv_bn_relu2d_backward));
}

}  // namespace braze
