"""Convolution, batch norm, an addition and an activation as one op, for braze.convert: autograd
Function, fake kernel. Front end: csrc/ops/batch_norm_act.cpp."""

import torch

from braze import _config
from braze._nvtx import ranged
from braze._ops._bilinear import masked
from braze._ops._common import (
    HALF_DTYPES,
    autocast_dtype,
    below_autograd,
    cast_to,
    eager,
    forking,
    is_channels_last,
    overwrite,
    plain,
    register,
)
from braze._ops.activation import activation as activation_of
from braze._ops.again import again_of
from braze._ops.batch_norm import check_settings, kernels_count
from braze._ops.batch_norm_act import (
    _batch_norm_act_backward,
    _fake,
    may_pass_on,
    wants_gradient,
)
from braze._ops.conv2d import _conv2d, _conv2d_backward, conv2d_flops, fake_conv2d, memory_format
from braze._ops.norm_grads import (
    conv2d_backward_for,
    norm_backward_of,
    norm_before,
    offer_norm,
    sums_of,
)

_ops = torch.ops.braze


def _run(*args):
    buffers, training = args[6:9], args[13]
    return overwrite(buffers if training else (), _ops.conv_bn_act.default, *args)


class ConvBnAct(torch.autograd.Function):
    """Returns the result and, not differentiable, the convolution's output and the rest as
    :class:`braze._ops.batch_norm_act.BatchNormAct`."""

    @staticmethod
    def forward(ctx, *args):
        input, weight, conv_bias, residual, bn_weight, bn_bias, *_ = args
        geometry, training, act, settings = args[9:13], args[13], args[16:19], args[19:]
        with below_autograd():
            output, z, mask, statistics = _run(*args)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(z, mask, statistics)
        # The gradient does not depend on what an identity or a mask makes up for.
        reads = residual is not None and act[0] != "identity" and mask.numel() == 0
        kept = residual if reads else None
        ctx.again = again_of(input)
        ctx.before = norm_before(input)
        of_input = input if ctx.again is None else None
        ctx.save_for_backward(of_input, weight, kept, bn_weight, bn_bias, z, mask, statistics)
        ctx.conv_bias = conv_bias
        ctx.clamped = residual is None or mask.numel() > 0  # its derivative is known from these
        ctx.geometry, ctx.norm, ctx.settings = geometry, (training, *act), settings
        return output, z, mask, statistics

    @staticmethod
    def has_norm(ctx):
        """Whether the result's gradient may be taken on to before the activation, by
        :meth:`norm_of`: see :mod:`braze._ops.norm_grads`."""
        return may_pass_on(ctx.clamped, *ctx.norm[:2])

    @staticmethod
    def norm_of(ctx):
        """What was normalised, the mask, the statistics, the activation."""
        *_, z, mask, statistics = ctx.saved_tensors
        return z, mask, statistics, *ctx.norm[1:]

    @staticmethod
    def backward(ctx, grad_output, *_, added=None):
        """added: another gradient of the input, or None."""
        absent = (None,) * (len(ctx.needs_input_grad) - 6)
        if grad_output is None:
            return added, *(None,) * 5, *absent
        input, weight, residual, *norm, z, mask, statistics = ctx.saved_tensors
        if ctx.again is not None:
            input = ctx.again.tensor()
        of_conv, of_norm = ctx.needs_input_grad[:3], ctx.needs_input_grad[3:6]
        if torch.is_grad_enabled() and any(of_conv):  # for its derivatives
            z = _conv2d(input, weight, ctx.conv_bias, *ctx.geometry, *ctx.settings)
        identity = ctx.norm[1] == "identity"
        sums = sums_of(ctx, grad_output)
        if sums is None:
            asked = any(of_conv), of_norm[0] and not identity, *of_norm[1:]
            grads = _batch_norm_act_backward(
                grad_output, z, residual, *norm, mask, statistics, *ctx.norm, asked
            )
            dz, dresidual, *dnorm = masked(grads, asked)
        else:
            asked = any(of_conv), *of_norm[1:], False
            dz, *dnorm, _ = norm_backward_of(sums, grad_output, z, *norm, statistics, asked)
        if of_norm[0] and (identity or sums is not None):
            dresidual = grad_output
        elif sums is not None:
            dresidual = None
        dconv = (None,) * 3
        at_once = not torch.is_grad_enabled() and plain(dz, added)
        if any(of_conv):
            of_conv_args = dz, input, weight, *ctx.geometry, of_conv, *ctx.settings
            if at_once and (added is not None or ctx.before is not None):
                with below_autograd():
                    grads = conv2d_backward_for(ctx.before, *of_conv_args, added=added)
            else:
                grads = _conv2d_backward(*of_conv_args)
            dconv = masked(grads, of_conv)
        if added is not None and not at_once:
            dconv = dconv[0] + added, *dconv[1:]
        return *dconv, dresidual, *dnorm, *absent


ForkedConvBnAct = forking(ConvBnAct)
_conv_bn_act = eager(ConvBnAct, _run, tensors=9)


def _fake_conv_bn_act(
    input, weight, conv_bias, residual, bn_weight, bn_bias, mean, var, batches, stride, padding,
    dilation, groups, training, momentum, eps, activation, first, second, *settings
):  # fmt: skip
    z = fake_conv2d(input, weight, conv_bias, stride, padding, dilation, groups)
    norm = bn_weight, bn_bias, mean, var, batches, training, momentum, eps
    output, mask, statistics = _fake(z, residual, *norm, activation, first, second)
    return output, z, mask, statistics


register(
    "conv_bn_act",
    fake=_fake_conv_bn_act,
    autograd=_conv_bn_act,
    flops=lambda *args, out_shape: conv2d_flops(*args, out_shape=out_shape[1]),
)


def _fake_inference(
    input, weight, conv_bias, residual, bn_weight, bn_bias, mean, var, stride, padding, dilation,
    groups, eps, activation, first, second, *settings
):  # fmt: skip
    return fake_conv2d(input, weight, conv_bias, stride, padding, dilation, groups)


def _composed(input, weight, conv_bias, *args):
    """The op of ops that are differentiable."""
    residual, bn_weight, bn_bias, mean, var, *geometry, eps, activation, first, second = args[:13]
    z = _ops.conv2d.default(input, weight, conv_bias, *geometry, *args[13:])
    norm = bn_weight, bn_bias, mean, var, None, False, 0.0, eps
    return _ops.batch_norm_act.default(z, residual, *norm, activation, first, second)[0]


def _without_gradients(*args):
    with below_autograd():
        return _ops.conv_bn_act_inference.default(*args)


_inference = ranged("ConvBnActInference", _without_gradients)


def _inference_of(*args):
    return _composed(*args) if wants_gradient(*args[:8]) else _inference(*args)


register(
    "conv_bn_act_inference",
    fake=_fake_inference,
    autograd=_inference_of,
    flops=conv2d_flops,
)


def conv_bn_act(
    input, weight, bias, residual, bn_weight, bn_bias, running_mean, running_var,
    num_batches_tracked, stride, padding, dilation, groups, training, momentum, eps, activation,
    settings, forked=False
):  # fmt: skip
    """``activation(batch_norm(conv2d(input, weight, bias)) + residual)`` as one op, or None where
    it is better left to the three, which raise what is to be raised.

    In training the convolution leaves batch norm's statistics where its kernel can, so that no pass
    over its result is needed for them. In evaluation mode, where no gradient is wanted, its kernel
    does all of it on the way out where it can: batch norm is a scale and an offset of each filter.

    Args:
        forked: the result, where autograd records, knows an alias of the input: :func:`alias_in`.
    """
    others = weight, bias, residual, bn_weight, bn_bias, running_mean, running_var
    without_statistics = running_mean is None or running_var is None
    if (
        (not training and (without_statistics or wants_gradient(input, *others)))
        or torch.compiler.is_compiling()
        or weight is None
        or not plain(input, *others)
        or not kernels_count(num_batches_tracked)
    ):
        return None
    if isinstance(padding, str):  # in training not measured
        padding = None if training else _in_numbers(padding, weight, stride, dilation)
        if padding is None:
            return None
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = cast_to(dtype, input, weight, bias)
    shape = _shape(input, weight, bias, stride, padding, dilation, groups)
    if shape is None or not _goes_with(residual, input, weight, shape):
        return None
    of_channels = {input.dtype}
    if input.dtype in HALF_DTYPES:
        of_channels.add(torch.float32)
    for vector in (bn_weight, bn_bias, running_mean, running_var):
        if vector is not None and (
            vector.numel() != shape[1]
            or vector.dtype not in of_channels
            or vector.device != input.device
        ):
            return None
    pairs = (bn_weight, bn_bias), (running_mean, running_var)
    if any(a is not None and b is not None and a.dtype != b.dtype for a, b in pairs):
        return None
    try:
        check_settings(running_mean, running_var, training, eps, momentum)
    except (RuntimeError, TypeError, ValueError):
        return None
    if momentum is None and num_batches_tracked is None:
        momentum = 0.0
    act = activation_of(activation, *settings)
    tensors = input, weight, bias, residual, bn_weight, bn_bias, running_mean, running_var
    geometry = stride, padding, dilation, groups
    norm = training, momentum, eps
    how = _config.conv2d_settings(input)
    if not training:
        return _inference(*tensors, *geometry, eps, *act, *how)
    args = *tensors, num_batches_tracked, *geometry, *norm, *act, *how
    if forked and torch.is_grad_enabled() and input.requires_grad:
        output, alias = ForkedConvBnAct.apply(*args)[:2]
        output._braze_fork = input, alias
    else:
        output = _conv_bn_act(*args)[0]
    offer_norm(output)
    return output


def alias_in(result, input):
    """An alias of `input`, for what else reads that, if `result` is what :func:`conv_bn_act` made
    of it, forked: both gradients of the input are one sum then, without a pass of its own. Else the
    input."""
    source, alias = getattr(result, "_braze_fork", (None, None))
    return alias if source is input and source is not None else input


def _in_numbers(padding, weight, stride, dilation):
    """A padding that is given as a word, as a pair, or None where it is uneven or refused."""
    if padding == "valid":
        return 0, 0
    if padding != "same" or weight.dim() != 4 or set(stride) != {1}:
        return None
    around = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    return None if any(s % 2 for s in around) else tuple(s // 2 for s in around)


def _shape(input, weight, bias, stride, padding, dilation, groups):
    """That of the convolution's result, or None of arguments that it refuses, and of results that
    have few elements, which may be of either memory format."""
    others = weight if bias is None else bias
    if (
        input.dim() != 4
        or weight.dim() != 4
        or not input.dtype == weight.dtype == others.dtype
        or not input.device == weight.device == others.device
        or input.shape[1] != weight.shape[1] * groups
        or weight.shape[0] % groups != 0
        or (bias is not None and bias.shape != weight.shape[:1])
        or input.numel() == 0
        or weight.numel() == 0
    ):
        return None
    p, q = (
        (extent + 2 * pad - d * (size - 1) - 1) // step + 1
        for extent, size, step, pad, d in zip(
            input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    shape = input.shape[0], weight.shape[0], p, q
    return shape if p > 0 and q > 0 and p * q > 1 and shape[1] > 1 else None


def _goes_with(residual, input, weight, shape):
    """Whether what is added is a tensor like the convolution's result."""
    return residual is None or (
        residual.dtype == input.dtype
        and residual.device == input.device
        and residual.shape == shape
        and is_channels_last(residual) == (memory_format(input, weight) == torch.channels_last)
    )
