"""Batch norm + ReLU + 2x2 max pool: function, autograd Functions, fake kernels. Kernels:
csrc/kernels/fused/bn_pool.h."""

import torch

from braze._ops._common import below_autograd, is_channels_last, mark_written, register
from braze._ops.batch_norm import check_settings, empty_like_input, statistics

_ops = torch.ops.braze
# The kernels number 2x2 tiles in 31 bits: kBnPoolMostTiles.
_MOST_TILES = 2**31 - 1


class BnReLUMaxPool2d(torch.autograd.Function):
    """Returns the result and what the backward needs of the forward, which is not differentiable:
    where each window's maximum was, and the statistics."""

    @staticmethod
    def forward(ctx, input, weight, bias, mean, var, batches, training, momentum, eps):
        with below_autograd():
            results = _ops.bn_relu_max_pool2d.default(
                input, weight, bias, mean, var, batches, training, momentum, eps
            )
        if training:
            mark_written(mean, var, batches)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        ctx.save_for_backward(input, weight, *results[1:])
        ctx.training = training
        ctx.bias_dtype = None if bias is None else bias.dtype
        return results

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 9
        mask = ctx.needs_input_grad[:3]
        grad_input, grad_weight, grad_bias = BnReLUMaxPool2dBackward.apply(
            grad_output, *ctx.saved_tensors, ctx.training, list(mask)
        )
        return (
            grad_input if mask[0] else None,
            grad_weight if mask[1] else None,
            grad_bias.to(ctx.bias_dtype) if mask[2] else None,
            *(None,) * 6,
        )


class BnReLUMaxPool2dBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        with below_autograd():
            return _ops.bn_relu_max_pool2d_backward.default(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("braze::bn_relu_max_pool2d is not twice differentiable")


def _forward_fake(input, *_):
    n, c, h, w = input.shape
    memory_format = torch.channels_last if is_channels_last(input) else torch.contiguous_format
    sizes = n, c, h // 2, w // 2
    output = torch.empty(sizes, dtype=input.dtype, device=input.device, memory_format=memory_format)
    codes = input.new_empty((output.numel() + 7) // 8, dtype=torch.int32)
    return output, codes, statistics(input), statistics(input)


def _backward_fake(grad_output, input, weight, codes, mean, rstd, training, output_mask):
    dtype = mean.dtype if weight is None else weight.dtype
    channels = input.shape[1]
    return (
        empty_like_input(input) if output_mask[0] else input.new_empty(0),
        *(input.new_empty(channels if wanted else 0, dtype=dtype) for wanted in output_mask[1:]),
    )


register("bn_relu_max_pool2d", fake=_forward_fake, autograd=BnReLUMaxPool2d.apply)
register("bn_relu_max_pool2d_backward", fake=_backward_fake, autograd=BnReLUMaxPool2dBackward.apply)


def takes(input):
    """Whether the op takes an input of this shape: 4-D, with a window, not beyond 2^31 of them."""
    if input.dim() != 4:
        return False
    n, c, h, w = input.shape
    return h >= 2 and w >= 2 and 0 < n * c * ((h + 1) // 2) * ((w + 1) // 2) <= _MOST_TILES


def bn_relu_max_pool2d(
    input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked
):
    """``max_pool2d(relu(batch_norm(input)), 2)`` without the normalised tensor in memory. Arguments
    as in ``batch_norm_counting``; differentiable once; bitwise repeatable."""
    check_settings(input, running_mean, running_var, training, eps)
    op = _ops.bn_relu_max_pool2d.default
    apply = op if torch.compiler.is_compiling() else BnReLUMaxPool2d.apply
    buffers = running_mean, running_var, num_batches_tracked
    return apply(input, weight, bias, *buffers, training, momentum, eps)[0]
