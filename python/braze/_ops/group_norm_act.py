"""Group norm and an activation as one op: public function, autograd Function, fake kernels.
Kernels: csrc/cuda/group_norm/, and of tensors whose channels are not innermost that of
csrc/cuda/activation/ behind them."""

import torch

from braze._norm_rules import parameters_fit
from braze._ops import group_norm as plain_norm
from braze._ops._common import (
    HALF_DTYPES,
    autocast_dtype,
    below_autograd,
    cast_to,
    eager,
    eager_backward,
    is_channels_last,
    plain,
    register,
)
from braze._ops.activation import activation as activation_of
from braze._ops.activation import in_torch, passed_back

_ops = torch.ops.braze
#: Activations that only bound a value.
_BOUNDS = "identity", "relu", "hardtanh"


class GroupNormAct(torch.autograd.Function):
    """Returns the result and the statistics it was made with, which are not differentiable."""

    @staticmethod
    def forward(ctx, input, weight, bias, num_groups, eps, *act):
        with below_autograd():
            output, mean, rstd = _ops.group_norm_act.default(
                input, weight, bias, num_groups, eps, *act
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.rest = num_groups, eps, *act
        return output, mean, rstd

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 8
        mask = ctx.needs_input_grad[:3]
        bias = ctx.saved_tensors[2]
        dx, dweight, dbias = _backward(grad_output, *ctx.saved_tensors, *ctx.rest, mask)
        return (
            dx if mask[0] else None,
            dweight if mask[1] else None,
            dbias.to(bias.dtype) if mask[2] else None,
            *(None,) * 5,
        )


def _gradients(grad_output, input, weight, bias, mean, rstd, num_groups, eps, *act_and_mask):
    """The backward in torch's ops, to be differentiated by them: gradients of input, weight and
    bias."""
    act = act_and_mask[:3]
    channels = input.shape[1], *[1] * (input.dim() - 2)
    v = plain_norm.x_hat_of(input, mean, rstd, num_groups).reshape(input.shape)
    if weight is not None:
        v = v * weight.to(v.dtype).view(channels)
    if bias is not None:
        v = v + bias.to(v.dtype).view(channels)
    grad = passed_back(act, grad_output.to(v.dtype), v)
    return plain_norm.gradients(grad, input, weight, mean, rstd, num_groups)


def _formula(input, weight, bias, num_groups, eps, *act):
    output, *statistics = plain_norm.formula(input, weight, bias, num_groups, eps)
    return in_torch(act, output), *statistics


_group_norm_act = eager(GroupNormAct, _ops.group_norm_act.default, tensors=3, formula=_formula)
_backward = eager_backward(
    GroupNormAct, _ops.group_norm_act_backward.default, 6, formula=_gradients
)


def _fake(input, weight, bias, num_groups, eps, activation, first, second):
    return plain_norm.fake(input, weight, bias, num_groups, eps)


def _fake_backward(grad_output, input, weight, bias, mean, rstd, num_groups, eps, *rest):
    return plain_norm.fake_backward(grad_output, input, weight, mean, rstd, num_groups, rest[-1])


register("group_norm_act", fake=_fake, autograd=_group_norm_act)
register("group_norm_act_backward", fake=_fake_backward, autograd=_backward)


def _apply(input, num_groups, weight, bias, eps, act):
    compiling = torch.compiler.is_compiling()
    apply = _ops.group_norm_act.default if compiling else _group_norm_act
    return apply(input, weight, bias, num_groups, eps, *act)[0]


def group_norm_act(
    input, num_groups, weight=None, bias=None, eps=1e-5, *, activation="relu", settings=()
):
    """``activation(group_norm(input))`` as one op.

    Our kernels run where :func:`group_norm`'s do. Of channels_last images on a GPU the activation
    is part of their passes, and what comes before it is made again backward; of other tensors it is
    a pass of its own.

    Args:
        input, num_groups, weight, bias, eps: as of :func:`group_norm`.
        activation, settings: as of :func:`braze.nn.functional.batch_norm_act`.

    Returns:
        As of :func:`group_norm`.

    Raises:
        ValueError: an activation of another name; else as :func:`group_norm`.
        RuntimeError: as :func:`group_norm`.
    """
    act = activation_of(activation, *settings)
    if (
        plain(input, weight, bias)
        and autocast_dtype(input) is None
        and plain_norm.takes(input, num_groups, weight, bias)
        and parameters_fit(input, weight, bias)
    ):
        return _apply(input, num_groups, weight, bias, eps, act)
    return in_torch(act, plain_norm.group_norm(input, num_groups, weight, bias, eps))


def group_norm_act_for_product(input, num_groups, weight, bias, eps, act):
    """:func:`group_norm_act` whose result goes into products that autocast casts it for, and
    nowhere else; None where torch's functions have to run.

    Under CUDA autocast torch's result is float32, of an input that is converted to it, and a
    product rounds it. Our kernels keep to 16 bits in memory.

    Args:
        act: as the op takes it, see :mod:`braze._ops.activation`.
    """
    if not plain(input, weight, bias):
        return None
    dtype = autocast_dtype(input) if input.is_cuda else None
    if dtype is not None:
        if dtype not in HALF_DTYPES or input.dtype != dtype:
            return None
        # Else what comes before the activation would be rounded, which torch's is not.
        if act.name not in _BOUNDS and not is_channels_last(input):
            return None
        weight, bias = cast_to(torch.float32, weight, bias)
    if not plain_norm.takes(input, num_groups, weight, bias, saves_casts=dtype is not None):
        return None
    if not parameters_fit(input, weight, bias):
        return None
    return _apply(input, num_groups, weight, bias, eps, act)
