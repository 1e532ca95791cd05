"""conv_transpose2d: public function, autograd Functions, fake kernels. It is conv2d's gradient with
respect to its input, and runs that one's kernels: csrc/ops/conv_transpose2d.cpp."""

import torch
from torch.utils import flop_counter

from braze import _config
from braze._ops._bilinear import double_backward, masked
from braze._ops._common import autocast_dtype, below_autograd, cast_to, eager, plain, register
from braze._ops.conv2d import cast, fake_gradients, memory_format, number, pair

_ops = torch.ops.braze


class ConvTranspose2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        bias=None,
        stride=(1, 1),
        padding=(0, 0),
        output_padding=(0, 0),
        groups=1,
        dilation=(1, 1),
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.geometry = (stride, padding, output_padding, groups, dilation)
        ctx.settings = (allow_tf32, deterministic, backend)
        ctx.save_for_backward(input, weight)
        with below_autograd():
            return _ops.conv_transpose2d.default(input, weight, bias, *ctx.geometry, *ctx.settings)

    @staticmethod
    def backward(ctx, grad):
        mask = ctx.needs_input_grad[:3]
        grads = _backward(grad, *ctx.saved_tensors, *ctx.geometry, mask, *ctx.settings)
        return *masked(grads, mask), *(None,) * 8


class ConvTranspose2dBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        grad_output,
        input,
        weight,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        output_mask,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.geometry = (stride, padding, output_padding, groups, dilation)
        ctx.settings = (allow_tf32, deterministic, backend)
        ctx.output_mask = output_mask
        ctx.save_for_backward(grad_output, input, weight)
        ctx.set_materialize_grads(False)
        with below_autograd():
            return _ops.conv_transpose2d_backward.default(
                grad_output, input, weight, *ctx.geometry, output_mask, *ctx.settings
            )

    @staticmethod
    def backward(ctx, *grads):
        d = double_backward(
            ctx,
            grads,
            lambda x, w, b: _forward(x, w, b, *ctx.geometry, *ctx.settings),
            lambda g, x, w, mask: _backward(g, x, w, *ctx.geometry, mask, *ctx.settings),
            lambda b, like: b.view(-1, 1, 1).expand_as(like),
        )
        return *d, *(None,) * 9


def _formula(
    input,
    weight,
    bias=None,
    stride=(1,),
    padding=(0,),
    output_padding=(0,),
    groups=1,
    dilation=(1,),
    *settings,
):
    return torch.nn.functional.conv_transpose2d(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def _gradients(
    grad_output,
    input,
    weight,
    stride,
    padding,
    output_padding,
    groups,
    dilation,
    output_mask,
    *settings,
):
    """The backward in torch's ops."""
    geometry = stride, padding, dilation, True, output_padding, groups
    return torch.ops.aten.convolution_backward(
        grad_output, input, weight, grad_output.shape[1:2], *geometry, output_mask
    )


_forward = eager(ConvTranspose2d, _ops.conv_transpose2d.default, 3, _formula)
_backward = eager(ConvTranspose2dBackward, _ops.conv_transpose2d_backward.default, 3, _gradients)


def _fake(input, weight, *args):
    if input.dim() != 4:
        raise RuntimeError(f"conv_transpose2d: expected input to be 4D, but got {input.dim()}D")
    return torch.empty(
        _formula(input, weight, *args).shape,
        dtype=input.dtype,
        device=input.device,
        memory_format=memory_format(input, weight),
    )


def _fake_backward(grad_output, input, weight, *args):
    return fake_gradients(input, weight, grad_output.shape[1], args[5])


def _flops(input, weight, *args, out_shape):
    return flop_counter.conv_flop_count(input, weight, out_shape, transposed=True)


def _backward_flops(grad_output, input, weight, *args, out_shape):
    """As torch counts the gradients of input and weight."""
    unused = (None,) * 4
    results = input, weight, None
    return flop_counter.conv_backward_flop(
        grad_output, input, weight, *unused, True, None, 1, args[5], out_val=results
    )


register("conv_transpose2d", fake=_fake, autograd=_forward, autocast=cast, flops=_flops)
register(
    "conv_transpose2d_backward", fake=_fake_backward, autograd=_backward, flops=_backward_flops
)


def conv_transpose2d(
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    """2-D transposed convolution, as ``torch.nn.functional.conv_transpose2d``: the gradient of
    :func:`conv2d` of these settings with respect to its input, where `input` is that of its result.

    Args:
        input: [N, C, H, W] or [C, H, W], any strides; float64, float32, bfloat16 or float16.
        weight: [C, K / groups, R, S].
        bias: [K], or None.
        stride, dilation: an int, or (vertical, horizontal), at least 1.
        padding: the same, at least 0: rows (columns) cut off at either end of the result.
        output_padding: the same, less than the stride or the dilation: rows added at the bottom,
            columns at the right.
        groups: each of the `groups` runs of input channels makes its own run of output channels.

    Returns:
        [N, K, P, Q] (or [K, P, Q]) in the input's dtype, with P = (H - 1) stride - 2 padding +
        dilation (R - 1) + output_padding + 1; channels_last if input or weight is, else
        contiguous. 16-bit inputs are summed in float32; float32 is rounded to TF32 only where
        ``torch.backends.cudnn.conv`` allows it. Twice differentiable. Runs the kernel that
        ``braze.backend(conv2d=...)`` names. Bitwise repeatable for a given number of CPU threads;
        on CUDA with braze's own kernels, and with cuDNN's under
        ``torch.use_deterministic_algorithms(True)``.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: shapes, strides, paddings or groups that do not fit (in torch's words),
            different or other dtypes, different devices, or a backend that cannot take the
            arguments.
    """
    if weight is None or not plain(input, weight, bias) or weight.dim() != 4:
        return _formula(input, weight, bias, stride, padding, output_padding, groups, dilation)
    if input.dim() == 3:
        arguments = stride, padding, output_padding, groups, dilation
        return conv_transpose2d(input.unsqueeze(0), weight, bias, *arguments).squeeze(0)
    try:
        geometry = (
            pair("stride", stride),
            pair("padding", padding),
            pair("output_padding", output_padding),
            number("groups", groups),
            pair("dilation", dilation),
        )
    except TypeError:  # torch's own, if it does not take them either
        return _formula(input, weight, bias, stride, padding, output_padding, groups, dilation)
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = cast_to(dtype, input, weight, bias)
    function = _ops.conv_transpose2d if torch.compiler.is_compiling() else _forward
    return function(input, weight, bias, *geometry, *_config.conv2d_settings(input))
