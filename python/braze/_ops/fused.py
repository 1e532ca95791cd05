"""Fused blocks: public functions, autograd Function, fake kernels. Kernels: csrc/kernels/fused/."""

import torch

from braze._ops._common import (
    autocast_dtype,
    below_autograd,
    cast_to,
    is_channels_last,
    mark_written,
    register,
)
from braze._ops.batch_norm import batch_norm_counting
from braze._ops.conv2d import conv2d
from braze._ops.pool import max_pool2d
from braze._ops.relu import relu

_ops = torch.ops.braze
# Input channels of the filters that the kernels have, by height and width: small_k_supports() in
# csrc/kernels/fused/small_k.cu.
_FILTERS = {(3, 3): (1, 2, 3), (5, 5): (1,)}
_MOST_FILTERS = 128


class ConvBnReLUMaxPool2d(torch.autograd.Function):
    """Returns the result and what the backward needs of the forward: where each window's maximum
    was, and the moments of the input patches."""

    @staticmethod
    def forward(ctx, input, weight, bias, bn_weight, bn_bias, mean, var, batches, *settings):
        if ctx.needs_input_grad[0]:
            raise RuntimeError(
                "braze::conv_bn_relu_max_pool2d has no gradient for its input; "
                "braze.nn.functional.conv_bn_relu_max_pool2d has"
            )
        padding, training, _, _ = settings
        with below_autograd():
            output, codes, moments = _ops.conv_bn_relu_max_pool2d.default(
                input, weight, bias, bn_weight, bn_bias, mean, var, batches, *settings
            )
        if training:
            mark_written(mean, var, batches)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(codes, moments)
        ctx.save_for_backward(input, weight, bn_weight, codes, moments)
        ctx.settings = padding, training, None if bn_bias is None else bn_bias.dtype
        return output, codes, moments

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 12
        grads = ConvBnReLUMaxPool2dBackward.apply(grad_output, *ctx.saved_tensors, *ctx.settings)
        grads = (None, *grads, *(None,) * 7)
        wanted = ctx.needs_input_grad
        return tuple(g if need else None for g, need in zip(grads, wanted, strict=True))


class ConvBnReLUMaxPool2dBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        with below_autograd():
            return _ops.conv_bn_relu_max_pool2d_backward.default(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("braze::conv_bn_relu_max_pool2d is not twice differentiable")


def _forward_fake(input, weight, bias, bn_weight, bn_bias, mean, var, batches, padding, *_):
    n, c, h, w = input.shape
    k, _, r, s = weight.shape
    p, q = (h + 2 * padding[0] - r + 1) // 2, (w + 2 * padding[1] - s + 1) // 2
    channels_last = is_channels_last(input) or is_channels_last(weight)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    output = torch.empty(
        (n, k, p, q), dtype=input.dtype, device=input.device, memory_format=memory_format
    )
    codes = input.new_empty(n * p * q * ((k + 7) // 8), dtype=torch.int32)
    taps = c * r * s
    return output, codes, input.new_empty(taps + taps * taps + 2 * k, dtype=torch.float64)


def _backward_fake(grad_output, input, weight, bn_weight, codes, moments, padding, training, dtype):
    k = weight.shape[0]
    parameters = dtype or (input.dtype if bn_weight is None else bn_weight.dtype)
    return (
        weight.new_empty(weight.shape),
        input.new_empty(k),
        input.new_empty(k, dtype=parameters),
        input.new_empty(k, dtype=parameters),
    )


register("conv_bn_relu_max_pool2d", fake=_forward_fake, autograd=ConvBnReLUMaxPool2d.apply)
register(
    "conv_bn_relu_max_pool2d_backward",
    fake=_backward_fake,
    autograd=ConvBnReLUMaxPool2dBackward.apply,
)
