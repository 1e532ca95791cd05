"""max_pool2d(relu(input + bias)) as one op: public function, autograd Function, fake kernels.
Kernels: csrc/cuda/pool/relu_max_pool2d.cu."""

import torch

from braze._ops._common import (
    HALF_DTYPES,
    below_autograd,
    check_tensor,
    eager,
    eager_backward,
    plain,
    register,
)
from braze._ops.pool import max_pool2d, pooled_size
from braze._ops.relu import relu

_ops = torch.ops.braze
#: Of windows whose gradient ReLU stops, in the place of their winner.
_NO_TAP = 255
_MOST_ELEMENTS = 1 << 31


class ReLUMaxPool2d(torch.autograd.Function):
    """Returns the result and `taps`: which element of its window won, or that ReLU stops the
    gradient, which is all that the backward needs."""

    @staticmethod
    def forward(ctx, input, bias, kernel_size, stride, padding, ceil_mode, contiguous=False):
        settings = kernel_size, stride, padding, ceil_mode
        with below_autograd():
            output, taps = _ops.relu_max_pool2d.default(input, bias, *settings, contiguous)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(taps)
        ctx.save_for_backward(taps)
        ctx.args = input.shape, *settings
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output, taps

    @staticmethod
    def backward(ctx, grad_output, _):
        if grad_output is None:
            return (None,) * 7
        of_input, of_bias = ctx.needs_input_grad[:2]
        dtype = ctx.bias_dtype if of_bias else None
        dx, dbias = _backward(grad_output, *ctx.saved_tensors, *ctx.args, dtype)
        return dx if of_input else None, dbias if of_bias else None, *(None,) * 5


def _gradients(grad_output, taps, input_size, kernel_size, stride, padding, ceil_mode, dtype):
    """The backward in torch's ops, to be differentiated by them."""
    passed = grad_output.where(taps != _NO_TAP, 0)
    # Where nothing passes any element will do.
    args = input_size, kernel_size, stride, padding, [1], ceil_mode
    first = torch.zeros_like(taps)
    indices = _ops.max_pool2d_indices.default(taps.where(taps != _NO_TAP, first), *args)
    inside = (indices >= 0) & (indices < input_size[2] * input_size[3])
    indices = indices.where(inside & (taps != _NO_TAP), 0)
    planes = passed.new_zeros((*input_size[:2], input_size[2] * input_size[3]))
    dx = planes.scatter_add(-1, indices.flatten(-2), passed.flatten(-2))
    dx = dx.unflatten(-1, input_size[2:])
    return dx, None if dtype is None else passed.sum((0, 2, 3), dtype=dtype)


_forward = eager(ReLUMaxPool2d, _ops.relu_max_pool2d.default, tensors=2)
_backward = eager_backward(
    ReLUMaxPool2d, _ops.relu_max_pool2d_backward.default, 2, formula=_gradients
)


def _fake(input, bias, kernel_size, stride, padding, ceil_mode, contiguous=False):
    size = pooled_size(input, kernel_size, stride, padding, [1], ceil_mode)
    memory_format = torch.contiguous_format if contiguous else torch.channels_last
    taps = torch.empty(
        size, dtype=torch.uint8, device=input.device, memory_format=torch.channels_last
    )
    return torch.empty_like(taps, dtype=input.dtype, memory_format=memory_format), taps


def _fake_backward(grad_output, taps, input_size, kernel_size, stride, padding, ceil_mode, dtype):
    dx = torch.empty(
        input_size,
        dtype=grad_output.dtype,
        device=grad_output.device,
        memory_format=torch.channels_last,
    )
    channels = 0 if dtype is None else input_size[1]
    return dx, grad_output.new_empty(channels, dtype=dtype or grad_output.dtype)


register("relu_max_pool2d", fake=_fake, autograd=_forward)
register("relu_max_pool2d_backward", fake=_fake_backward, autograd=_backward)


def _pair(value):
    """An int or two of them as (height, width), or None for all else."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    if len(values) not in (1, 2) or any(type(v) is not int for v in values):
        return None
    return values[0], values[-1]


def pools_behind_relu(kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    """Whether the op has such windows: of up to 3 x 3, in every second row and column."""
    stride = kernel_size if stride is None else stride
    pairs = [_pair(v) for v in (kernel_size, stride, padding, dilation)]
    if None in pairs or type(ceil_mode) is not bool:
        return False
    size, step, pad, dilated = pairs
    return (
        min(size) > 0
        and max(size) <= 3
        and step == (2, 2)
        and dilated == (1, 1)
        and all(0 <= p <= s // 2 for p, s in zip(pad, size, strict=True))
    )


def takes_bias(dtype, bias):
    """Whether the op adds such a bias, or None, to a tensor of a dtype."""
    return bias is None or bias.dtype == dtype or (
        dtype in HALF_DTYPES and bias.dtype == torch.float32
    )  # fmt: skip


def _takes(input, bias):
    return (
        input.dim() == 4
        and takes_bias(input.dtype, bias)
        and (bias is None or (bias.shape == input.shape[1:2] and bias.device == input.device))
    )


def relu_max_pool2d(
    input, bias, kernel_size, stride=None, padding=0, ceil_mode=False, contiguous=False
):
    """``max_pool2d(relu(input + bias), kernel_size, stride, padding)`` as one op, with a bias for
    each channel, or None.

    The backward reads the gradient and which element of each window won, and makes the bias'
    gradient in the same pass.

    Args:
        input: [N, C, H, W], copied unless channels_last; float64, float32, bfloat16 or float16.
        bias: [C], of input's dtype or, for 16-bit input, float32, which is not rounded then.
        kernel_size, stride, padding, ceil_mode: as in :func:`max_pool2d`.
        contiguous: leave the result contiguous, as a linear layer behind it reads it.

    Returns:
        [N, C, P, Q] in the input's dtype, channels_last unless `contiguous`. NaN and equal elements
        count as in :func:`max_pool2d`. Bitwise repeatable. Differentiable with respect to both; the
        second derivative and all further ones are made of torch's ops. Windows
        of more than 3 x 3 elements, and strides other than 2, are left to :func:`max_pool2d`.

    Raises:
        TypeError: `input` or `bias` is not a tensor.
        RuntimeError: a bias that does not fit; settings as in :func:`max_pool2d`.
    """
    check_tensor("relu_max_pool2d", "input", 1, input)
    if bias is not None:
        check_tensor("relu_max_pool2d", "bias", 2, bias)
    stride = kernel_size if stride is None else stride
    windows = kernel_size, stride, padding, 1, ceil_mode
    if not (plain(input, bias) and _takes(input, bias) and pools_behind_relu(*windows)):
        total = input if bias is None else (input + bias.view(-1, 1, 1)).to(input.dtype)
        output = max_pool2d(relu(total), *windows)
        return output.contiguous() if contiguous else output
    pairs = [list(_pair(v)) for v in (kernel_size, stride, padding)]
    op = _ops.relu_max_pool2d.default if torch.compiler.is_compiling() else _forward
    return op(input, bias, *pairs, ceil_mode, contiguous)[0]
