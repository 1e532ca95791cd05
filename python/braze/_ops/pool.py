"""Max and average pooling: public functions, autograd Functions, fake kernels. Kernels:
csrc/cuda/pool/."""

import torch

from braze._ops._common import (
    below_autograd,
    eager,
    eager_backward,
    empty_image,
    int_pair,
    is_channels_last,
    plain,
    register,
)

_ops = torch.ops.braze
#: windows of up to this many elements store the winner's place in a byte, larger ones in an int32
_BYTE_TAPS = 256


class MaxPool2d(torch.autograd.Function):
    """Returns the result and `taps`: which element of its window won, the backward's only need."""

    @staticmethod
    def forward(ctx, input, kernel_size, stride, padding, dilation, ceil_mode):
        settings = kernel_size, stride, padding, dilation, ceil_mode
        with below_autograd():
            output, taps = _ops.max_pool2d.default(input, *settings)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(taps)
        ctx.save_for_backward(taps)
        ctx.args = input.shape, *settings, is_channels_last(input)
        return output, taps

    @staticmethod
    def backward(ctx, grad_output, _):
        if grad_output is None:
            return (None,) * 6
        (taps,) = ctx.saved_tensors
        return _max_pool2d_backward(grad_output, taps, *ctx.args), *(None,) * 5


class AvgPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, *settings):
        ctx.args = input.shape, *settings, is_channels_last(input)
        with below_autograd():
            return _ops.avg_pool2d.default(input, *settings)

    @staticmethod
    def backward(ctx, grad_output):
        return _avg_pool2d_backward(grad_output, *ctx.args), *(None,) * (len(ctx.args) - 2)


class AvgPool2dBackward(torch.autograd.Function):
    """Linear in grad_output: its own gradient is the forward."""

    @staticmethod
    def forward(ctx, grad_output, input_size, *args):
        ctx.settings = args[:-1]
        with below_autograd():
            return _ops.avg_pool2d_backward.default(grad_output, input_size, *args)

    @staticmethod
    def backward(ctx, grad):
        return _avg_pool2d(grad, *ctx.settings), *(None,) * (len(ctx.settings) + 2)


def _max_pool2d_gradient(grad_output, taps, input_size, *args):
    """The backward in torch's ops, to be differentiated by them."""
    indices = _ops.max_pool2d_indices.default(taps, input_size, *args[:-1])
    planes = grad_output.new_zeros((*input_size[:-2], input_size[-2] * input_size[-1]))
    planes = planes.scatter_add(-1, indices.flatten(-2), grad_output.flatten(-2))
    return planes.unflatten(-1, input_size[-2:])


_max_pool2d = eager(MaxPool2d, _ops.max_pool2d.default, tensors=1)
_max_pool2d_backward = eager_backward(
    MaxPool2d, _ops.max_pool2d_backward.default, 2, formula=_max_pool2d_gradient
)


def _avg_pool2d_gradient(grad_output, input_size, *args):
    settings = args[:-1]
    input = torch.zeros((), dtype=grad_output.dtype, device=grad_output.device).expand(input_size)
    return torch.ops.aten.avg_pool2d_backward(grad_output, input, *settings)


_avg_pool2d = eager(AvgPool2d, _ops.avg_pool2d.default, 1, torch.nn.functional.avg_pool2d)
_avg_pool2d_backward = eager(
    AvgPool2dBackward, _ops.avg_pool2d_backward.default, 1, _avg_pool2d_gradient
)


def _output_extent(size, kernel, stride, padding, dilation, ceil_mode):
    room = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    out = room // stride + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    return out


def pooled_size(input, kernel_size, stride, padding, dilation, ceil_mode):
    """Of the result. C++ checks the settings; the fake trusts them."""
    stride = stride or kernel_size
    height, width = (
        _output_extent(
            input.shape[axis], kernel_size[axis if len(kernel_size) > 1 else 0],
            stride[axis if len(stride) > 1 else 0], padding[axis if len(padding) > 1 else 0],
            dilation[axis if len(dilation) > 1 else 0], ceil_mode,
        )
        for axis in (-2, -1)
    )  # fmt: skip
    return (*input.shape[:-2], height, width)


def _pooled(input, *settings, dtype=None):
    """An empty tensor like the result."""
    return empty_image(input, pooled_size(input, *settings), is_channels_last(input), dtype)


def _max_pool2d_fake(input, kernel_size, stride, padding, dilation, ceil_mode):
    args = input, kernel_size, stride, padding, dilation, ceil_mode
    window = kernel_size[0] * kernel_size[-1]
    taps = torch.uint8 if window <= _BYTE_TAPS else torch.int32
    return _pooled(*args), _pooled(*args, dtype=taps)


def _max_pool2d_indices(taps, *args):
    with below_autograd():
        return _ops.max_pool2d_indices.default(taps, *args)


register("max_pool2d", fake=_max_pool2d_fake, autograd=_max_pool2d)
register(
    "max_pool2d_backward",
    fake=lambda grad_output, taps, input_size, *args: empty_image(
        grad_output, input_size, args[-1]
    ),
    autograd=_max_pool2d_backward,
)
register(
    "max_pool2d_indices",
    fake=lambda taps, *args: empty_image(taps, taps.shape, is_channels_last(taps), torch.int64),
    autograd=_max_pool2d_indices,
)
register(
    "avg_pool2d",
    fake=lambda input, kernel_size, stride, padding, ceil_mode, *_: _pooled(
        input, kernel_size, stride, padding, [1], ceil_mode
    ),
    autograd=_avg_pool2d,
)
register(
    "avg_pool2d_backward",
    fake=lambda grad_output, input_size, *args: empty_image(grad_output, input_size, args[-1]),
    autograd=_avg_pool2d_backward,
)


def max_pool2d(
    input,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=False,
):
    """Largest element of each window. As ``torch.nn.functional.max_pool2d``.

    Args:
        input: [N, C, H, W] or [C, H, W]; float64, float32, bfloat16 or float16.
        kernel_size: extent of the window, an int or (height, width), like all that follow.
        stride: distance between windows; default: `kernel_size`.
        padding: rows and columns of -inf on every side, at most half the window.
        dilation: distance between the window's elements.
        ceil_mode: windows may reach over the right and bottom edge.
        return_indices: also return where each maximum lies.

    Returns:
        [N, C, P, Q] or [C, P, Q] in the input's dtype and memory format. With `return_indices`, a
        pair with the int64 indices (row * W + column) of the maxima. NaN counts as the largest; of
        equal elements the first wins. Bitwise repeatable, forward and backward (each input element
        gathers its gradient). Twice differentiable; the second derivative and all further ones are
        made of torch's ops.

    Raises:
        TypeError: a setting that is neither an int nor a tuple of ints.
        RuntimeError: other ranks, settings out of range, or a window larger than the padded input.
    """
    if not plain(input) or not isinstance(ceil_mode, bool):
        settings = kernel_size, stride, padding, dilation, ceil_mode, return_indices
        return torch.nn.functional.max_pool2d(input, *settings)
    kernel_size = int_pair("max_pool2d", "kernel_size", 2, kernel_size)
    stride = [] if stride is None else int_pair("max_pool2d", "stride", 3, stride)
    padding = int_pair("max_pool2d", "padding", 4, padding)
    dilation = int_pair("max_pool2d", "dilation", 5, dilation)
    args = kernel_size, stride, padding, dilation, ceil_mode
    op = _ops.max_pool2d.default if torch.compiler.is_compiling() else _max_pool2d
    output, taps = op(input, *args)
    if return_indices:
        return output, _ops.max_pool2d_indices.default(taps, input.shape, *args)
    return output


def avg_pool2d(
    input,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
):
    """Mean of each window. As ``torch.nn.functional.avg_pool2d``.

    Args:
        input: [N, C, H, W] or [C, H, W]; float64, float32, bfloat16 or float16.
        kernel_size: extent of the window, an int or (height, width), like stride and padding.
        stride: distance between windows; default: `kernel_size`.
        padding: rows and columns of zeros on every side, at most half the window.
        ceil_mode: windows may reach over the right and bottom edge.
        count_include_pad: count padding in the divisor.
        divisor_override: divide by this integer instead of by the window's size.

    Returns:
        [N, C, P, Q] or [C, P, Q] in the input's dtype and memory format; sums are kept in fp32 for
        16-bit input. Bitwise repeatable, forward and backward. Twice differentiable.

    Raises:
        TypeError: a setting that is neither an int nor a tuple of ints.
        RuntimeError: other ranks, settings out of range, a zero divisor, or a window larger than
            the padded input.
    """
    if not plain(input):
        settings = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        return torch.nn.functional.avg_pool2d(input, *settings)
    kernel_size = int_pair("avg_pool2d", "kernel_size", 2, kernel_size)
    stride = [] if stride is None else int_pair("avg_pool2d", "stride", 3, stride)
    padding = int_pair("avg_pool2d", "padding", 4, padding)
    if divisor_override is not None and not isinstance(divisor_override, int):
        raise TypeError(
            "avg_pool2d(): argument 'divisor_override' must be int, "
            f"not {type(divisor_override).__name__}"
        )
    args = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    if torch.compiler.is_compiling():
        return _ops.avg_pool2d.default(input, *args)
    return _avg_pool2d(input, *args)
