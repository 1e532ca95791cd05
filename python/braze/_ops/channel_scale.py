"""Channels scaled image by image, and squeeze-and-excitation, which is made of that: public
functions, autograd Functions, fake kernels. Kernels: csrc/cuda/channel_scale/."""

import torch

from braze._ops._common import (
    below_autograd,
    check_tensor,
    eager,
    empty_image,
    is_channels_last,
    plain,
    register,
)

_ops = torch.ops.braze
_PIXELS = (2, 3)


class ChannelScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, scale, spread):
        # No more than the gradients need: what is not kept may be written to.
        of_input, of_scale, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_scale else None, scale if of_input else None)
        with below_autograd():
            return _ops.channel_scale.default(input, scale, spread)

    @staticmethod
    def backward(ctx, grad_output):
        input, scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _channel_scale(grad_output, scale, None) if wanted[0] else None,
            _channel_dot(grad_output, input) if wanted[1] else None,
            _channel_mean(grad_output) if wanted[2] else None,
        )


class ChannelDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, other):
        ctx.save_for_backward(input, other)
        with below_autograd():
            return _ops.channel_dot.default(input, other)

    @staticmethod
    def backward(ctx, grad_output):
        input, other = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _channel_scale(other, grad_output, None) if wanted[0] else None,
            _channel_scale(input, grad_output, None) if wanted[1] else None,
        )


class ChannelMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ctx.shape = input.shape
        with below_autograd():
            return _ops.channel_mean.default(input)

    @staticmethod
    def backward(ctx, grad_output):
        _, _, h, w = ctx.shape
        return (grad_output / (h * w)).expand(ctx.shape)


def _mean_formula(input):
    return input.mean(_PIXELS, keepdim=True)


def _scale_formula(input, scale, spread):
    output = input * scale
    return output if spread is None else output + spread / (input.shape[2] * input.shape[3])


def _dot_formula(input, other):
    return (input * other).sum(_PIXELS, keepdim=True)


_channel_scale = eager(ChannelScale, _ops.channel_scale.default, tensors=3, formula=_scale_formula)
_channel_dot = eager(ChannelDot, _ops.channel_dot.default, tensors=2, formula=_dot_formula)
_channel_mean = eager(ChannelMean, _ops.channel_mean.default, tensors=1, formula=_mean_formula)


def _fake_scale(input, scale, spread):
    channels_last = is_channels_last(input)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty_like(input, memory_format=memory_format)


def _fake_dot(input, other):
    return input.new_empty((*input.shape[:2], 1, 1))


def _fake_mean(input):
    return empty_image(input, (*input.shape[:2], 1, 1), is_channels_last(input))


register("channel_scale", fake=_fake_scale, autograd=_channel_scale)
register("channel_dot", fake=_fake_dot, autograd=_channel_dot)
register("channel_mean", fake=_fake_mean, autograd=_channel_mean)


def _fits(input, scale):
    """Whether the kernels take these two; torch's rules of broadcasting take others."""
    return (
        plain(input, scale)
        and scale is not None
        and input.dim() == 4
        and (input.is_contiguous() or is_channels_last(input))
        and scale.dtype == input.dtype
        and scale.device == input.device
        and scale.shape == (*input.shape[:2], 1, 1)
    )


def channel_scale(input, scale):
    """``input * scale`` of images and a factor for each channel of each image. Backward takes one
    pass for each gradient: sums over pixels are not preceded by products in memory.

    Args:
        input: [N, C, H, W], contiguous or channels_last; float64, float32, bfloat16 or float16.
        scale: [N, C, 1, 1], in the dtype of `input`; what else torch can multiply goes to torch.

    Returns:
        Same shape and memory format as `input`. Bitwise repeatable. Differentiable to any order.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: shapes that do not broadcast.
    """
    check_tensor("channel_scale", "input", 1, input)
    if not _fits(input, scale):
        return input * scale
    if torch.compiler.is_compiling():
        return _ops.channel_scale(input, scale, None)
    return _channel_scale(input, scale, None)


def channel_mean(input):
    """The mean of each channel of images [N, C, H, W], of dtypes that the kernels take, as
    [N, C, 1, 1] in the input's memory format."""
    if torch.compiler.is_compiling():
        return _ops.channel_mean.default(input)
    return _channel_mean(input)


class _Link:
    """What the two ends of squeeze_excite() share: by what :class:`Squeeze` has to scale the
    gradient that it gets from :class:`Excite`, or None."""

    __slots__ = ("scale",)


class Squeeze(torch.autograd.Function):
    """The mean over pixels, and the input for :class:`Excite`. Its backward is one pass, in which
    that of the product is done, too."""

    @staticmethod
    def forward(ctx, input, link):
        ctx.link, ctx.shape = link, input.shape
        ctx.set_materialize_grads(False)
        with below_autograd():
            return _ops.channel_mean.default(input), input.view_as(input)

    @staticmethod
    def backward(ctx, grad_mean, grad_output):
        if grad_output is not None and ctx.link.scale is not None:
            return _channel_scale(grad_output, ctx.link.scale, grad_mean), None
        if grad_mean is None:
            return grad_output, None
        _, _, h, w = ctx.shape
        of_mean = (grad_mean / (h * w)).expand(ctx.shape)
        return of_mean if grad_output is None else grad_output + of_mean, None


class Excite(torch.autograd.Function):
    """:func:`channel_scale` of what :class:`Squeeze` handed on, for which it leaves the gradient as
    it is: that is scaled there. Where a second derivative may be asked for, it does it itself."""

    @staticmethod
    def forward(ctx, handed_on, scale, input, link):
        ctx.link = link
        # Not what was handed on: second derivatives are none that Squeeze has to scale.
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, scale)
        with below_autograd():
            return _ops.channel_scale.default(handed_on, scale, None)

    @staticmethod
    def backward(ctx, grad_output):
        input, scale = ctx.saved_tensors
        grad_scale = _channel_dot(grad_output, input) if ctx.needs_input_grad[1] else None
        if torch.is_grad_enabled():
            ctx.link.scale = None
            return _channel_scale(grad_output, scale, None), grad_scale, None, None
        ctx.link.scale = scale.detach()
        return grad_output, grad_scale, None, None


def squeeze_excite(input, gate):
    """``input * gate(mean)`` with the mean over the pixels of each channel (Hu et al.,
    Squeeze-and-Excitation Networks, 2018). Over what torch needs it saves the passes over tensors
    of the input's size that its backward takes one by one: both gradients of the product, that of
    the mean, and their sum are two passes instead of seven.

    Args:
        input: [N, C, H, W], any strides; float64, float32, bfloat16 or float16.
        gate: a function from the means, [N, C, 1, 1], to factors of this shape and dtype, made of
            torch's or braze's operations. Factors of others are multiplied by torch's rules.

    Returns:
        Same shape and memory format as `input`. Differentiable as often as `gate`.

    Raises:
        TypeError: `input` is not a tensor.
    """
    check_tensor("squeeze_excite", "input", 1, input)
    records = torch.is_grad_enabled() and input.requires_grad
    fused = not torch.compiler.is_compiling() and plain(input) and input.dim() == 4
    if not (fused and input.numel() > 0):
        return channel_scale(input, gate(_mean_formula(input)))
    if not records:
        return channel_scale(input, gate(_channel_mean(input)))
    link = _Link()
    mean, handed_on = Squeeze.apply(input, link)
    scale = gate(mean)
    if not isinstance(scale, torch.Tensor) or not _fits(input, scale):
        return input * scale
    return Excite.apply(handed_on, scale, input, link)
