"""cross_entropy: public function, autograd Functions, fakes; check_errors. Kernels:
csrc/cuda/cross_entropy/."""

import math

import torch

from braze._ops._common import (
    HALF_DTYPES,
    autocast_dtype,
    below_autograd,
    derivatives,
    eager,
    plain,
    register,
)
from braze._ops._loss import (
    MEAN,
    NONE,
    acc_dtype,
    as_index_error,
    check_labels_fit,
    check_weight_dtype,
    fake_gradient,
    name_of,
    reduction_number,
    refuse_weight_grad,
    row_sizes,
    to_float32,
)
from braze._ops.softmax import log_softmax, softmax
from braze._step_scope import current

_ops = torch.ops.braze


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, input, target, weight, reduction, ignore_index=-100, label_smoothing=0.0, dtype=None
    ):
        scope, ones = current.scope, None
        if scope is not None:
            ones = scope.unit_gradient(dtype or input.dtype, input.device)
        if reduction == NONE or target.requires_grad or torch.compiler.is_compiling():
            ones = None
        op = _ops.cross_entropy if ones is None else _ops.cross_entropy_with_grad
        with below_autograd():
            loss, stats, total_weight, *unit_grad = op.default(
                input, target, weight, reduction, ignore_index, label_smoothing, dtype
            )
        ctx.expected = None if ones is None else (ones, ones._version, *unit_grad)
        ctx.save_for_backward(input, target, weight, stats, total_weight)
        ctx.settings = reduction, ignore_index, label_smoothing
        ctx.mark_non_differentiable(stats, total_weight)
        ctx.set_materialize_grads(False)
        return loss, stats, total_weight

    @staticmethod
    def backward(ctx, grad_output, _stats, _total_weight):
        if grad_output is None:
            return (None,) * 7
        if ctx.expected is not None and not torch.is_grad_enabled():
            ones, version, unit_grad = ctx.expected
            ctx.expected = None
            if grad_output is ones and ones._version == version:
                return unit_grad, None, None, None, None, None, None
        target_grad = ctx.needs_input_grad[1]
        grad_input, grad_target = _cross_entropy_backward(
            grad_output, *ctx.saved_tensors, *ctx.settings, target_grad
        )
        return grad_input, grad_target if target_grad else None, None, None, None, None, None


class CrossEntropyBackward(torch.autograd.Function):
    """Gradients g (Q p - q) of the logits and -g w (1 - s) log p of probability targets; g is the
    row's share of grad_output, q the weighted and smoothed target, Q its sum over classes."""

    @staticmethod
    def forward(
        ctx,
        grad_output,
        input,
        target,
        weight,
        stats,
        total_weight,
        reduction,
        ignore_index,
        label_smoothing,
        target_grad,
    ):
        ctx.save_for_backward(grad_output, input, target, weight, total_weight)
        ctx.settings = reduction, ignore_index, label_smoothing
        ctx.set_materialize_grads(False)
        with below_autograd():
            return _ops.cross_entropy_backward.default(
                grad_output,
                input,
                target,
                weight,
                stats,
                total_weight,
                reduction,
                ignore_index,
                label_smoothing,
                target_grad,
            )

    @staticmethod
    def backward(ctx, v_input, v_target):
        grad_output, input, target, weight, total_weight = ctx.saved_tensors
        reduction, ignore_index, smoothing = ctx.settings
        dim = 0 if input.dim() == 1 else 1
        classes = [1] * input.dim()
        classes[dim] = -1
        work_dtype = total_weight.dtype
        w = 1.0 if weight is None else weight.to(work_dtype).view(classes)
        probability = target.dtype.is_floating_point
        if probability:
            q = w * ((1 - smoothing) * target.to(work_dtype) + smoothing / input.size(dim))
            counted = 1.0
        else:
            labels = target.view([]) if input.dim() == 1 else target
            labels = labels.long().unsqueeze(dim)
            counted = (labels != ignore_index) & (labels >= 0) & (labels < input.size(dim))
            chosen = torch.zeros_like(input, dtype=work_dtype)
            chosen = chosen.scatter(dim, labels.where(counted, 0), 1 - smoothing)
            q = w * (chosen + smoothing / input.size(dim)) * counted
        big_q = q.sum(dim, keepdim=True)
        share = grad_output.to(work_dtype)
        scale = 1.0
        if reduction == NONE:
            share = share.view(input.shape[:dim] + input.shape[dim + 1 :]).unsqueeze(dim)
        elif reduction == MEAN:
            # Not 1 / 0 where every row is ignored.
            scale = total_weight.reciprocal()
            scale = scale if probability else torch.where(counted, scale, 0)
        g = share * scale
        p = softmax(input, dim, dtype=work_dtype)
        # The scalar whose derivatives are wanted: <v_input, g (Q p - q)> + <v_target, dt>.
        per_row = d_input = d_target = 0.0
        if v_input is not None:
            v = v_input.to(work_dtype)
            mean_v = (v * p).sum(dim, keepdim=True)
            per_row = per_row + big_q * mean_v - (v * q).sum(dim, keepdim=True)
            d_input = d_input + g * big_q * p * (v - mean_v)
            d_target = d_target + g * w * (1 - smoothing) * (mean_v - v)
        if v_target is not None and probability:
            weighted = v_target.to(work_dtype) * w * (1 - smoothing)
            log_p = log_softmax(input, dim, dtype=work_dtype)
            per_row = per_row - (weighted * log_p).sum(dim, keepdim=True)
            d_input = d_input - g * (weighted - p * weighted.sum(dim, keepdim=True))
        grads = [None] * 10
        if v_input is None and v_target is None:
            return tuple(grads)
        if ctx.needs_input_grad[0]:
            d_output = (per_row * scale).squeeze(dim)
            d_output = d_output.sum() if reduction != NONE else d_output
            grads[0] = d_output.to(grad_output.dtype).view(grad_output.shape)
        if ctx.needs_input_grad[1]:
            grads[1] = d_input.to(input.dtype)
        if ctx.needs_input_grad[2] and v_input is not None:
            grads[2] = d_target.to(target.dtype)
        return tuple(grads)


def _gradients(grad_output, input, target, weight, *args):
    """The backward by torch's function."""
    reduction, ignore_index, label_smoothing, target_grad = args[2:]
    settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def loss(input, target):
        logits, reduce = input.to(grad_output.dtype), name_of(reduction)
        return torch.nn.functional.cross_entropy(
            logits, target, weight, reduction=reduce, **settings
        )

    return derivatives(loss, [input, target], [True, target_grad], (), [grad_output])


_cross_entropy = eager(CrossEntropy, _ops.cross_entropy.default, tensors=2)
_cross_entropy_backward = eager(
    CrossEntropyBackward, _ops.cross_entropy_backward.default, 6, _gradients
)


def _cross_entropy_autograd(
    input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0, dtype=None
):
    refuse_weight_grad("cross_entropy", weight)
    return _cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing, dtype)


def _fake_cross_entropy(
    input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0, dtype=None
):
    rows = row_sizes(input)
    acc = acc_dtype(input.dtype)
    loss = input.new_empty(rows if reduction == NONE else (), dtype=dtype)
    return loss, input.new_empty((3, math.prod(rows)), dtype=acc), input.new_empty((), dtype=acc)


def _fake_cross_entropy_with_grad(input, *args):
    return *_fake_cross_entropy(input, *args), fake_gradient(input)


def _fake_cross_entropy_backward(
    grad_output,
    input,
    target,
    weight,
    stats,
    total_weight,
    reduction,
    ignore_index,
    label_smoothing,
    target_grad,
):
    grad_target = fake_gradient(input) if target_grad else input.new_empty((0,))
    return fake_gradient(input), grad_target


def _autocast_cross_entropy(
    input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0, dtype=None
):
    if input.dtype in HALF_DTYPES:
        if target.dtype.is_floating_point:
            input, target = input.float(), to_float32(target)
        else:
            dtype = torch.float32  # the kernel reads the 16-bit logits and returns float32
    return (
        input,
        target,
        to_float32(weight),
        reduction,
        ignore_index,
        label_smoothing,
        dtype,
    )


register(
    "cross_entropy",
    fake=_fake_cross_entropy,
    autograd=_cross_entropy_autograd,
    autocast=_autocast_cross_entropy,
)
register("cross_entropy_with_grad", fake=_fake_cross_entropy_with_grad)
register(
    "cross_entropy_backward",
    fake=_fake_cross_entropy_backward,
    autograd=_cross_entropy_backward,
)


def cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """Cross entropy between logits and labels or probabilities. As ``torch.nn.functional``'s.

    One kernel forward (softmax, loss, reduction; a second, tiny one for large batches) and one
    backward, which recomputes the probabilities; in :class:`braze.TrainStep` the forward of small
    batches is the backward too. Label smoothing: Szegedy et al. (2015).

    Args:
        input: logits [C], [N, C] or [N, C, d1, ...]; float64, float32, bfloat16 or float16.
        target: labels [], [N] or [N, d1, ...], int64 or uint8; or probabilities of the input's
            shape.
        weight: per class, [C].
        size_average, reduce: deprecated, see `reduction`.
        ignore_index: rows with this label count for nothing; labels only.
        reduction: ``"none"``, ``"mean"`` (divided by the sum of the labels' weights, or by the
            number of rows for probabilities) or ``"sum"``.
        label_smoothing: share of the target spread evenly over the classes, in [0, 1].

    Returns:
        A scalar, or a loss per row for ``"none"``. Bitwise repeatable. Twice differentiable in
        `input` and in probabilities. Under autocast 16-bit logits give float32.

    Raises:
        IndexError: on the CPU, a label out of range. On CUDA that row's loss is NaN, its gradient
            zero, and :func:`braze.check_errors` raises.
        ValueError, RuntimeError: shapes or dtypes that do not fit.
    """
    if target is None or not plain(input, target, weight):
        settings = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return torch.nn.functional.cross_entropy(input, target, *settings)
    reduction = reduction_number(size_average, reduce, reduction)
    if label_smoothing > 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    dtype = None
    autocast = autocast_dtype(input) is not None
    if input.shape == target.shape:
        if not target.is_floating_point():
            raise RuntimeError(
                "Expected floating point type for target with class probabilities, "
                f"got {target.dtype}"
            )
        if ignore_index >= 0:
            raise RuntimeError("ignore_index is not supported for floating point target")
        if input.dim() == 0:
            raise IndexError("Dimension specified as 1 but tensor has no dimensions")
        if autocast:
            input, target, weight = to_float32(input), to_float32(target), to_float32(weight)
        wanted = torch.promote_types(input.dtype, target.dtype)
        if weight is not None:
            wanted = torch.promote_types(wanted, weight.dtype)
        input, target = input.to(wanted), target.to(wanted)
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return _differentiable_in_weight(input, target, weight, reduction, label_smoothing)
    else:
        check_labels_fit(input, target)
        if autocast:
            weight = to_float32(weight)
            dtype = torch.float32 if input.dtype in HALF_DTYPES else None
        check_weight_dtype(weight, dtype or input.dtype)
        refuse_weight_grad("cross_entropy", weight)
    if torch.compiler.is_compiling():
        return _ops.cross_entropy(
            input, target, weight, reduction, ignore_index, label_smoothing, dtype
        )[0]
    try:
        return _cross_entropy(
            input, target, weight, reduction, ignore_index, label_smoothing, dtype
        )[0]
    except RuntimeError as error:
        raise as_index_error(error) from None


def _differentiable_in_weight(input, target, weight, reduction, label_smoothing):
    """Probability targets with class weights that require grad: rare, so made of smaller ops."""
    dim = 0 if input.dim() == 1 else 1
    if weight.shape != input.shape[dim : dim + 1]:
        raise RuntimeError(
            "cross_entropy: weight tensor should be defined either for all "
            f"{input.size(dim)} classes or no classes but got weight tensor of shape: "
            f"{list(weight.shape)}"
        )
    shape = [1] * input.dim()
    shape[dim] = -1
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / input.size(dim)
    rows = -(log_softmax(input, dim) * target * weight.view(shape)).sum(dim)
    if reduction == NONE:
        return rows
    return rows.mean() if reduction == MEAN else rows.sum()


def check_errors(device=None):
    """Raises if a CUDA kernel met a label out of range since the last call, and clears the mark.

    Losses do not wait for the GPU, so they cannot raise by themselves: such a row's loss is NaN and
    its gradient zero. Call this wherever the program waits anyway, for example beside
    ``loss.item()``. It waits for all work on the device. On the CPU losses raise at once.

    Args:
        device: a CUDA device; all that are initialised by default.

    Raises:
        IndexError: naming the first such label and the device.
    """
    if device is not None:
        devices = [torch.device(device)]
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    else:
        devices = []
    for one in devices:
        raised, label = _ops.take_label_error(torch.empty(0, device=one))
        if raised:
            raise IndexError(f"Target {label} is out of bounds. (on {one})")
