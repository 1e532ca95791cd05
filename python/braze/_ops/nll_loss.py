"""nll_loss: public function, autograd Functions, fakes. Kernels: csrc/cuda/cross_entropy/."""

import torch

from braze._ops._common import below_autograd, derivatives, eager, plain, register
from braze._ops._loss import (
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

_ops = torch.ops.braze


class NLLLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, target, weight, reduction, ignore_index=-100):
        with below_autograd():
            loss, total_weight = _ops.nll_loss.default(
                input, target, weight, reduction, ignore_index
            )
        ctx.save_for_backward(input, target, weight, total_weight)
        ctx.settings = reduction, ignore_index
        ctx.mark_non_differentiable(total_weight)
        ctx.set_materialize_grads(False)
        return loss, total_weight

    @staticmethod
    def backward(ctx, grad_output, _total_weight):
        if grad_output is None:
            return (None,) * 5
        grad = _nll_loss_backward(grad_output, *ctx.saved_tensors, *ctx.settings)
        return grad, None, None, None, None


class NLLLossBackward(torch.autograd.Function):
    """Linear in grad_output and independent of the input's values; its adjoint is the loss."""

    @staticmethod
    def forward(ctx, grad_output, input, target, weight, total_weight, reduction, ignore_index):
        ctx.save_for_backward(target, weight)
        ctx.settings = reduction, ignore_index
        ctx.shape = grad_output.shape
        with below_autograd():
            return _ops.nll_loss_backward.default(
                grad_output, input, target, weight, total_weight, reduction, ignore_index
            )

    @staticmethod
    def backward(ctx, grad):
        loss, _ = _nll_loss(grad, *ctx.saved_tensors, *ctx.settings)
        return loss.view(ctx.shape), None, None, None, None, None, None


def _gradient(grad_output, input, target, weight, total_weight, reduction, ignore_index):
    """The backward by torch's function."""

    def loss(input):
        settings = {"ignore_index": ignore_index, "reduction": name_of(reduction)}
        return torch.nn.functional.nll_loss(input, target, weight, **settings)

    return derivatives(loss, [input], [True], (), [grad_output])[0]


_nll_loss = eager(NLLLoss, _ops.nll_loss.default, tensors=2)
_nll_loss_backward = eager(NLLLossBackward, _ops.nll_loss_backward.default, 5, _gradient)


def _nll_loss_autograd(input, target, weight=None, reduction=1, ignore_index=-100):
    refuse_weight_grad("nll_loss", weight)
    return _nll_loss(input, target, weight, reduction, ignore_index)


def _fake_nll_loss(input, target, weight=None, reduction=1, ignore_index=-100):
    loss = input.new_empty(row_sizes(input) if reduction == NONE else ())
    return loss, input.new_empty((), dtype=acc_dtype(input.dtype))


def _fake_nll_loss_backward(
    grad_output, input, target, weight, total_weight, reduction, ignore_index
):
    return fake_gradient(input)


def _autocast_nll_loss(input, target, weight=None, reduction=1, ignore_index=-100):
    return to_float32(input), target, to_float32(weight), reduction, ignore_index


register("nll_loss", fake=_fake_nll_loss, autograd=_nll_loss_autograd, autocast=_autocast_nll_loss)
register("nll_loss_backward", fake=_fake_nll_loss_backward, autograd=_nll_loss_backward)


def nll_loss(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
):
    """Negative log likelihood of labels under log-probabilities. As ``torch.nn.functional``'s.

    Args:
        input: log-probabilities [C], [N, C] or [N, C, d1, ...]; float64, float32, bfloat16 or
            float16.
        target: labels [], [N] or [N, d1, ...]; int64 or uint8.
        weight: per class, [C], of the input's dtype.
        size_average, reduce: deprecated, see `reduction`.
        ignore_index: rows with this label count for nothing.
        reduction: ``"none"``, ``"mean"`` (divided by the sum of the labels' weights) or ``"sum"``.

    Returns:
        A scalar, or a loss per label for ``"none"``. Bitwise repeatable. Twice differentiable in
        `input`. Under autocast 16-bit inputs give float32.

    Raises:
        IndexError: on the CPU, a label out of range. On CUDA that row's loss is NaN, its gradient
            zero, and :func:`braze.check_errors` raises.
        ValueError, RuntimeError: shapes or dtypes that do not fit.
    """
    if target is None or not plain(input, target, weight):
        settings = weight, size_average, ignore_index, reduce, reduction
        return torch.nn.functional.nll_loss(input, target, *settings)
    reduction = reduction_number(size_average, reduce, reduction)
    check_labels_fit(input, target)
    if torch.is_autocast_enabled(input.device.type):
        input, weight = to_float32(input), to_float32(weight)
    check_weight_dtype(weight, input.dtype)
    refuse_weight_grad("nll_loss", weight)
    if torch.compiler.is_compiling():
        return _ops.nll_loss(input, target, weight, reduction, ignore_index)[0]
    try:
        return _nll_loss(input, target, weight, reduction, ignore_index)[0]
    except RuntimeError as error:
        raise as_index_error(error) from None
