// cross_entropy and nll_loss. Rows run along the class dimension (1, or 0 for a 1-D input), in the
// order of the target's elements.
#include "launchers/cross_entropy.h"

#include "ops/backend.h"
#include "ops/common.h"

namespace braze {
namespace {

int64_t class_dim(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

// [N, C, d1, ...] stored as [N, d1, ..., C]: channels_last in any number of dimensions.
bool is_class_last(const Tensor& t) {
  if (t.dim() < 3) return false;
  int64_t expected = t.size(1);
  if (t.size(1) != 1 && t.stride(1) != 1) return false;
  for (int64_t d = t.dim() - 1; d >= 0; --d) {
    if (d == 1) continue;
    if (t.size(d) != 1 && t.stride(d) != expected) return false;
    expected *= t.size(d);
  }
  return true;
}

// The tensors of a call in the layouts that the launchers take, and the launcher's arguments.
struct Loss {
  Tensor input, target;
  std::optional<Tensor> weight;
  bool class_last;
  LossArgs args;
};

std::vector<int64_t> row_sizes(const Tensor& input) {
  std::vector<int64_t> sizes = sizes_of(input);
  sizes.erase(sizes.begin() + class_dim(input));
  return sizes;
}

void check_target(const char* op, const Tensor& input, const Tensor& target, bool allow_probs) {
  if (allow_probs && same_sizes(input, target)) {
    check_same_dtype(op, "target", target, "input", input);
    return;
  }
  const ScalarType type = target.scalar_type();
  BRAZE_CHECK(type == ScalarType::Long || type == ScalarType::Byte, op,
              ": expected target dtype to be Long or Byte, but got ", scalar_type_name(type));
  std::vector<int64_t> expected = row_sizes(input);
  const bool one_row = input.dim() == 1 && target.dim() == 1 && target.size(0) == 1;
  BRAZE_CHECK(one_row || sizes_of(target) == expected, op, ": expected target of shape ",
              "[batch, further dimensions of input without the classes], but got ",
              shape_string(target), " for input ", shape_string(input));
}

Loss make_loss(const char* op, const Tensor& input, const Tensor& target,
               const std::optional<Tensor>& weight, int64_t reduction, int64_t ignore_index,
               double label_smoothing, bool allow_probs) {
  const DType dtype = dtype_of(op, "input", input);
  BRAZE_CHECK(input.dim() >= 1, op, ": Expected 1 or more dimensions (got 0)");
  check_same_device(op, "target", target, "input", input);
  check_target(op, input, target, allow_probs);
  BRAZE_CHECK(reduction >= 0 && reduction <= 2, op,
              ": expected reduction to be 0 (none), 1 (mean) or 2 (sum), but got ", reduction);
  BRAZE_CHECK(label_smoothing <= 1, op,
              ": label_smoothing must be between 0.0 and 1.0. Got: ", label_smoothing);
  const int64_t classes = input.size(class_dim(input));
  if (weight) {
    check_same_device(op, "weight", *weight, "input", input);
    BRAZE_CHECK(weight->dim() == 1 && weight->numel() == classes, op,
                ": weight tensor should be defined either for all ", classes,
                " classes or no classes but got weight tensor of shape: ", shape_string(*weight));
    dtype_of(op, "weight", *weight);
  }
  const bool class_last = !input.is_contiguous() && is_class_last(input);
  Loss loss{class_last ? input : as_contiguous(input), target, std::nullopt, class_last, {}};
  LossArgs& args = loss.args;
  args.dtype = dtype;
  args.loss_is_acc = false;
  const int64_t batch = input.dim() == 1 ? 1 : input.size(0);
  int64_t inner = 1;
  for (int64_t d = 2; d < input.dim(); ++d) inner *= input.size(d);
  args.shape = class_last ? RowShape{batch * inner, classes, 1} : RowShape{batch, classes, inner};
  if (allow_probs && same_sizes(input, target)) {
    args.target_kind = TargetKind::kProbability;
    if (!same_layout(target, loss.input)) {
      loss.target = with_layout_of(target, dense_like(loss.input));
    }
  } else {
    args.target_kind =
        target.scalar_type() == ScalarType::Byte ? TargetKind::kUint8 : TargetKind::kInt64;
    loss.target = as_contiguous(target);
  }
  if (weight) {
    const ScalarType acc = dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
    loss.weight = as_contiguous(*weight);
    if (weight->scalar_type() != acc) loss.weight = torch::stable::to(*loss.weight, acc);
  }
  args.input = loss.input.const_data_ptr();
  args.target = loss.target.const_data_ptr();
  args.weight = loss.weight ? loss.weight->const_data_ptr() : nullptr;
  args.reduction = static_cast<Reduction>(reduction);
  args.ignore_index = ignore_index;
  args.label_smoothing = label_smoothing > 0 ? label_smoothing : 0.0;
  return loss;
}

ScalarType acc_type(const LossArgs& args) {
  return args.dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

Workspace workspace_of(const LossArgs& args, const Tensor& like) {
  return {dev::loss_workspace_bytes(args), like};
}

Tensor empty_loss(const Loss& loss, ScalarType dtype) {
  const bool rows = loss.args.reduction == Reduction::kNone;
  return empty(rows ? row_sizes(loss.input) : std::vector<int64_t>{}, loss.input, dtype);
}

Tensor empty_gradient(const Loss& loss) {
  return loss.class_last ? dense_like(loss.input) : empty(sizes_of(loss.input), loss.input);
}

// grad_output has the loss's dtype: the input's, or float32 for a 16-bit input.
Tensor checked_grad_output(const char* op, const Tensor& grad, Loss& loss) {
  check_same_device(op, "grad_output", grad, "input", loss.input);
  loss.args.loss_is_acc = grad.scalar_type() != loss.input.scalar_type();
  BRAZE_CHECK(
      !loss.args.loss_is_acc || grad.scalar_type() == acc_type(loss.args), op,
      ": expected grad_output of the input's dtype, or float32 for a 16-bit input, but got ",
      scalar_type_name(grad.scalar_type()));
  const bool rows = loss.args.reduction == Reduction::kNone;
  BRAZE_CHECK(grad.numel() == (rows ? loss.args.shape.rows() : 1), op,
              ": expected grad_output of the loss's shape, but got ", shape_string(grad));
  return as_contiguous(grad);
}

void check_saved(const char* op, const char* arg, const Tensor& t, int64_t numel,
                 const Loss& loss) {
  check_same_device(op, arg, t, "input", loss.input);
  BRAZE_CHECK(t.numel() == numel && t.scalar_type() == acc_type(loss.args) && t.is_contiguous(), op,
              ": expected ", arg, " as the forward op returned it, but got ", shape_string(t), " ",
              scalar_type_name(t.scalar_type()));
}

// The loss, what its backward needs, and with unit_grad the gradient of the input that belongs to a
// gradient of 1 of the loss; without, an empty tensor in its place.
std::tuple<Tensor, Tensor, Tensor, Tensor> loss_of(
    const char* op, const Tensor& input, const Tensor& target, const std::optional<Tensor>& weight,
    int64_t reduction, int64_t ignore_index, double label_smoothing,
    std::optional<ScalarType> dtype, bool unit_grad) {
  Loss loss = make_loss(op, input, target, weight, reduction, ignore_index, label_smoothing, true);
  const ScalarType result_dtype = dtype.value_or(input.scalar_type());
  loss.args.loss_is_acc = result_dtype != input.scalar_type();
  BRAZE_CHECK(!loss.args.loss_is_acc || result_dtype == acc_type(loss.args), op,
              ": expected dtype to be the input's, or float32 for a 16-bit input, but got ",
              scalar_type_name(result_dtype));
  const DeviceContext context(input);
  Tensor result = empty_loss(loss, result_dtype);
  Tensor stats = empty({3, loss.args.shape.rows()}, input, acc_type(loss.args));
  Tensor total_weight = empty({}, input, acc_type(loss.args));
  Tensor grad = unit_grad ? empty_gradient(loss) : empty({0}, input);
  const Workspace workspace = workspace_of(loss.args, input);
  dev::cross_entropy(context.stream(), loss.args, result.mutable_data_ptr(),
                     stats.mutable_data_ptr(), total_weight.mutable_data_ptr(),
                     unit_grad ? grad.mutable_data_ptr() : nullptr, workspace.data());
  return {result, stats, total_weight, grad};
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& input, const Tensor& target,
                                                 std::optional<Tensor> weight, int64_t reduction,
                                                 int64_t ignore_index, double label_smoothing,
                                                 std::optional<ScalarType> dtype) {
  const auto [loss, stats, total_weight, none] =
      loss_of("cross_entropy", input, target, weight, reduction, ignore_index, label_smoothing,
              dtype, false);
  return {loss, stats, total_weight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_with_grad(
    const Tensor& input, const Tensor& target, std::optional<Tensor> weight, int64_t reduction,
    int64_t ignore_index, double label_smoothing, std::optional<ScalarType> dtype) {
  const char* op = "cross_entropy_with_grad";
  BRAZE_CHECK(reduction != 0, op, ": expected reduction to be 1 (mean) or 2 (sum), but got 0");
  return loss_of(op, input, target, weight, reduction, ignore_index, label_smoothing, dtype, true);
}

std::tuple<Tensor, Tensor> cross_entropy_backward(const Tensor& grad_output, const Tensor& input,
                                                  const Tensor& target,
                                                  std::optional<Tensor> weight, const Tensor& stats,
                                                  const Tensor& total_weight, int64_t reduction,
                                                  int64_t ignore_index, double label_smoothing,
                                                  bool target_grad) {
  const char* op = "cross_entropy_backward";
  Loss loss = make_loss(op, input, target, weight, reduction, ignore_index, label_smoothing, true);
  BRAZE_CHECK(!target_grad || loss.args.target_kind == TargetKind::kProbability, op,
              ": only a probability target has a gradient");
  const Tensor grad = checked_grad_output(op, grad_output, loss);
  check_saved(op, "stats", stats, 3 * loss.args.shape.rows(), loss);
  check_saved(op, "total_weight", total_weight, 1, loss);
  const DeviceContext context(input);
  Tensor grad_input = empty_gradient(loss);
  Tensor grad_target = target_grad ? empty_gradient(loss) : empty({0}, input);
  dev::cross_entropy_backward(context.stream(), loss.args, grad.const_data_ptr(),
                              stats.const_data_ptr(), total_weight.const_data_ptr(),
                              grad_input.mutable_data_ptr(),
                              target_grad ? grad_target.mutable_data_ptr() : nullptr);
  return {grad_input, grad_target};
}

std::tuple<Tensor, Tensor> nll_loss(const Tensor& input, const Tensor& target,
                                    std::optional<Tensor> weight, int64_t reduction,
                                    int64_t ignore_index) {
  const Loss loss =
      make_loss("nll_loss", input, target, weight, reduction, ignore_index, 0.0, false);
  const DeviceContext context(input);
  Tensor result = empty_loss(loss, input.scalar_type());
  Tensor total_weight = empty({}, input, acc_type(loss.args));
  const Workspace workspace = workspace_of(loss.args, input);
  dev::nll_loss(context.stream(), loss.args, result.mutable_data_ptr(),
                total_weight.mutable_data_ptr(), workspace.data());
  return {result, total_weight};
}

Tensor nll_loss_backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                         std::optional<Tensor> weight, const Tensor& total_weight,
                         int64_t reduction, int64_t ignore_index) {
  const char* op = "nll_loss_backward";
  Loss loss = make_loss(op, input, target, weight, reduction, ignore_index, 0.0, false);
  const Tensor grad = checked_grad_output(op, grad_output, loss);
  check_saved(op, "total_weight", total_weight, 1, loss);
  const DeviceContext context(input);
  Tensor grad_input = empty_gradient(loss);
  dev::nll_loss_backward(context.stream(), loss.args, grad.const_data_ptr(),
                         total_weight.const_data_ptr(), grad_input.mutable_data_ptr());
  return grad_input;
}

std::tuple<bool, int64_t> take_label_error(const Tensor& device_of) {
  const DeviceContext context(device_of);
  const LabelError error = dev::take_label_error();
  return {error.raised, error.label};
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("cross_entropy_with_grad", TORCH_BOX(&cross_entropy_with_grad));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("nll_loss", TORCH_BOX(&nll_loss));
  m.impl("nll_loss_backward", TORCH_BOX(&nll_loss_backward));
  m.impl("take_label_error", TORCH_BOX(&take_label_error));
}

}  // namespace braze
