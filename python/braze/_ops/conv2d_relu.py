"""A convolution and the ReLU behind it as one op: public function, autograd Functions, fake
kernels. Front end: csrc/ops/conv2d.cpp."""

import torch

from braze._ops._bilinear import Saved, masked
from braze._ops._common import below_autograd, eager, plain, register
from braze._ops.conv2d import (
    cast,
    conv2d,
    conv2d_backward_flops,
    conv2d_double_backward,
    conv2d_flops,
    fake_conv2d,
    fake_gradients,
    gradients,
    op_arguments,
)
from braze._ops.relu import relu, relu_backward

_ops = torch.ops.braze


class Conv2dReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        bias=None,
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
        groups=1,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.geometry = (stride, padding, dilation, groups)
        ctx.settings = (allow_tf32, deterministic, backend)
        with below_autograd():
            out = _ops.conv2d_relu.default(input, weight, bias, *ctx.geometry, *ctx.settings)
        ctx.save_for_backward(out, input, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        mask = (*ctx.needs_input_grad, False)[:3]  # a raw call may have left out the bias
        grads = _backward(grad, *ctx.saved_tensors, *ctx.geometry, mask, *ctx.settings)
        return *masked(grads, mask), None, None, None, None, None, None, None


class Conv2dReLUBackward(torch.autograd.Function):
    """Conv2dBackward of relu_backward(grad_output, result), in fewer kernels; its own derivatives
    are those of the two ops. The result enters through its sign only."""

    @staticmethod
    def forward(
        ctx,
        grad_output,
        result,
        input,
        weight,
        stride,
        padding,
        dilation,
        groups,
        output_mask,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.geometry = (stride, padding, dilation, groups)
        ctx.settings = (allow_tf32, deterministic, backend)
        ctx.output_mask = output_mask
        ctx.save_for_backward(grad_output, result, input, weight)
        ctx.set_materialize_grads(False)
        with below_autograd():
            return _ops.conv2d_relu_backward.default(
                grad_output, result, input, weight, *ctx.geometry, output_mask, *ctx.settings
            )

    @staticmethod
    def backward(ctx, *grads):
        grad_output, result, input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        passed = Saved(
            (relu_backward(grad_output, result), input, weight),
            ctx.output_mask,
            (wanted[0], *wanted[2:4]),
        )
        d_passed, *d = conv2d_double_backward(passed, grads, ctx.geometry, ctx.settings)
        d_grad = None if d_passed is None else relu_backward(d_passed, result)
        return d_grad, None, *d, None, None, None, None, None, None, None, None


def _formula(
    input, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1, *settings
):
    out = torch.nn.functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return torch.relu(out)


def _gradients(grad_output, result, *args):
    return gradients(relu_backward(grad_output, result), *args)


_conv2d_relu = eager(Conv2dReLU, _ops.conv2d_relu.default, 3, _formula)
_backward = eager(Conv2dReLUBackward, _ops.conv2d_relu_backward.default, 4, _gradients)


def _fake_backward(
    grad_output, result, input, weight, stride, padding, dilation, groups, output_mask, *settings
):
    return fake_gradients(input, weight, weight.shape[0], output_mask)


register("conv2d_relu", fake=fake_conv2d, autograd=_conv2d_relu, autocast=cast, flops=conv2d_flops)
register(
    "conv2d_relu_backward",
    fake=_fake_backward,
    autograd=_backward,
    flops=lambda grad_output, result, input, weight, *args, out_shape: conv2d_backward_flops(
        grad_output, input, weight, args[4]
    ),
)


def conv2d_relu(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """max(conv2d(input, weight, bias), 0) as one op; NaN stays NaN.

    Most kernels apply the ReLU to results on their way out; else it is applied in place, where a
    bias is still to be added in the same pass. The backward zeroes the gradient where the result
    is, and sums it for the bias, in one pass if tensors are channels_last.

    Args:
        input, weight, bias, stride, padding, dilation, groups: as in :func:`conv2d`.

    Returns:
        As :func:`conv2d`. Twice differentiable.

    Raises:
        TypeError, RuntimeError: as :func:`conv2d`.
    """
    settings = stride, padding, dilation, groups
    if weight is None or not plain(input, weight, bias):
        return relu(conv2d(input, weight, bias, *settings))
    if input.dim() == 3:
        return conv2d_relu(input.unsqueeze(0), weight, bias, *settings).squeeze(0)
    function = _ops.conv2d_relu if torch.compiler.is_compiling() else _conv2d_relu
    return function(*op_arguments(input, weight, bias, *settings))
