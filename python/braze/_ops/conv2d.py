"""conv2d: public function, autograd Functions, fake kernels. Kernels: csrc/cuda/conv2d/."""

import operator

import torch
from torch.utils import flop_counter

from braze import _config
from braze._ops._bilinear import double_backward, masked
from braze._ops._common import (
    autocast_dtype,
    below_autograd,
    cast_to,
    eager,
    empty_weight_gradient,
    plain,
    register,
)
from braze._ops.norm_grads import conv2d_backward_for, norm_before

_ops = torch.ops.braze


class Conv2d(torch.autograd.Function):
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
        ctx.before = norm_before(input)
        ctx.save_for_backward(input, weight)
        with below_autograd():
            return _ops.conv2d.default(input, weight, bias, *ctx.geometry, *ctx.settings)

    @staticmethod
    def backward(ctx, grad):
        mask = (*ctx.needs_input_grad, False)[:3]  # a raw call may have left out the bias
        args = grad, *ctx.saved_tensors, *ctx.geometry, mask, *ctx.settings
        if ctx.before is not None and mask[0] and not torch.is_grad_enabled():
            with below_autograd():
                grads = conv2d_backward_for(ctx.before, *args)
        else:
            grads = _conv2d_backward(*args)
        return *masked(grads, mask), None, None, None, None, None, None, None


class Conv2dBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        grad_output,
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
        ctx.save_for_backward(grad_output, input, weight)
        ctx.set_materialize_grads(False)
        with below_autograd():
            return _ops.conv2d_backward.default(
                grad_output, input, weight, *ctx.geometry, output_mask, *ctx.settings
            )

    @staticmethod
    def backward(ctx, *grads):
        d = conv2d_double_backward(ctx, grads, ctx.geometry, ctx.settings)
        return *d, None, None, None, None, None, None, None, None


def conv2d_double_backward(ctx, grads, geometry, settings):
    """:func:`braze._ops._bilinear.double_backward` of conv2d."""
    return double_backward(
        ctx,
        grads,
        lambda x, w, b: _conv2d(x, w, b, *geometry, *settings),
        lambda g, x, w, mask: _conv2d_backward(g, x, w, *geometry, mask, *settings),
        lambda b, like: b.view(-1, 1, 1).expand_as(like),
    )


def _formula(
    input, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1, *settings
):
    return torch.nn.functional.conv2d(input, weight, bias, stride, padding, dilation, groups)


def gradients(
    grad_output, input, weight, stride, padding, dilation, groups, output_mask, *settings
):
    """The backward in torch's ops."""
    channels, geometry = weight.shape[:1], (stride, padding, dilation, False, (0, 0), groups)
    return torch.ops.aten.convolution_backward(
        grad_output, input, weight, channels, *geometry, output_mask
    )


_conv2d = eager(Conv2d, _ops.conv2d.default, 3, _formula)
_conv2d_backward = eager(Conv2dBackward, _ops.conv2d_backward.default, 3, gradients)


def _suggests_channels_last(t):
    """torch's suggest_memory_format, as in csrc/ops/conv2d.cpp."""
    if t.stride(1) == 0:
        return False
    smallest = 0
    for d in (1, 3, 2, 0):
        if t.size(d) == 0 or t.stride(d) < smallest:
            return False
        if d == 0 and smallest == t.stride(1):
            return False
        smallest = t.stride(d) * max(1, t.size(d))
    return True


def memory_format(input, weight):
    """Of the results of the forward and of the gradients."""
    if _suggests_channels_last(input) or _suggests_channels_last(weight):
        return torch.channels_last
    return torch.contiguous_format


def fake_conv2d(
    input, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1, *settings
):
    if input.dim() != 4:
        raise RuntimeError(f"conv2d: expected input to be 4D, but got {input.dim()}D")
    shape = torch.nn.functional.conv2d(input, weight, bias, stride, padding, dilation, groups).shape
    return torch.empty(
        shape,
        dtype=input.dtype,
        device=input.device,
        memory_format=memory_format(input, weight),
    )


def fake_conv2d_backward(
    grad_output, input, weight, stride, padding, dilation, groups, output_mask, *settings
):
    return fake_gradients(input, weight, weight.shape[0], output_mask)


def fake_gradients(input, weight, channels, output_mask):
    """Of input, weight and bias, the latter of the result's `channels`."""
    form = memory_format(input, weight)
    kw = {"dtype": input.dtype, "device": input.device}
    return (
        torch.empty(input.shape, memory_format=form, **kw)
        if output_mask[0]
        else torch.empty(0, **kw),
        empty_weight_gradient(weight, form) if output_mask[1] else torch.empty(0, **kw),
        torch.empty(channels if output_mask[2] else 0, **kw),
    )


def cast(input, weight, bias=None, *rest):
    """The arguments as autocast has them."""
    return *cast_to(autocast_dtype(input), input, weight, bias), *rest


def conv2d_flops(input, weight, *args, out_shape):
    return flop_counter.conv_flop_count(input, weight, out_shape)


def conv2d_backward_flops(grad_output, input, weight, output_mask):
    """As torch counts the gradients of input and weight."""
    unused = (None,) * 4
    results = input, weight, None
    return flop_counter.conv_backward_flop(
        grad_output, input, weight, *unused, False, None, 1, output_mask, out_val=results
    )


_BACKWARD_ARGUMENTS = 11  # without `added`


def _raw_backward(*args):
    """The op of the same name with derivatives; those by `added`, its last argument, are plain."""
    *args, added = args if len(args) > _BACKWARD_ARGUMENTS else (*args, None)
    dx, *grads = _conv2d_backward(*args)
    return dx + added if added is not None and dx.numel() > 0 else dx, *grads


def _fake_norm_backward(
    grad_output, input, weight, stride, padding, dilation, groups, output_mask, allow_tf32,
    deterministic, backend, added, norm_input, mask, statistics, *activation
):  # fmt: skip
    grads = fake_gradients(input, weight, weight.shape[0], output_mask)
    sets = torch.library.get_ctx().new_dynamic_size()
    return *grads, statistics.new_empty((input.shape[1], sets, 2))


def _flops_of_backward(grad_output, input, weight, *args, out_shape):
    return conv2d_backward_flops(grad_output, input, weight, args[4])


register("conv2d", fake=fake_conv2d, autograd=_conv2d, autocast=cast, flops=conv2d_flops)
register(
    "conv2d_backward",
    fake=fake_conv2d_backward,
    autograd=_raw_backward,
    flops=_flops_of_backward,
)
register("conv2d_norm_backward", fake=_fake_norm_backward, flops=_flops_of_backward)


def pair(name, value):
    """An int, or a sequence of one or two of them, as (height, width)."""
    if type(value) is int:
        return value, value
    if type(value) is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int:
        return value
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    try:
        values = tuple([_integer(v) for v in values])
    except TypeError:
        raise TypeError(
            f"conv2d(): argument '{name}' must be an int or a tuple of ints, but got {value!r}"
        ) from None
    if len(values) not in (1, 2):
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 2 values to match the "
            f"convolution dimensions, but got {name}={list(values)}"
        )
    return values if len(values) == 2 else values * 2


def _integer(value):
    """An int, or what torch takes for one: a number of numpy's, a tensor of one element."""
    if isinstance(value, bool):
        raise TypeError("a bool is no integer here")
    return value if isinstance(value, (int, torch.SymInt)) else operator.index(value)


def number(name, value):
    """An int, or what torch takes for one."""
    try:
        return value if type(value) is int else _integer(value)
    except TypeError:
        raise TypeError(
            f"conv2d(): argument '{name}' must be int, not {type(value).__name__}"
        ) from None


def _same_padding(input, weight, stride, dilation):
    """Symmetric padding, and the input extended at the bottom and right where that is uneven."""
    if stride != (1, 1):
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    padding = tuple(t // 2 for t in total)
    if any(t % 2 for t in total):
        input = torch.nn.functional.pad(input, (0, total[1] % 2, 0, total[0] % 2))
    return input, padding


def geometry(input, weight, stride, padding, dilation):
    """The input, extended where padding="same" has to be uneven, and the rest as pairs."""
    stride, dilation = pair("stride", stride), pair("dilation", dilation)
    if not isinstance(padding, str):
        padding = pair("padding", padding)
    elif padding == "valid":
        padding = (0, 0)
    elif padding == "same" and weight.dim() == 4:
        input, padding = _same_padding(input, weight, stride, dilation)
    elif padding == "same":
        raise RuntimeError(
            f"Expected {weight.dim()}-dimensional input for {weight.dim()}-dimensional weight "
            f"{list(weight.shape)}, but got {input.dim()}-dimensional input of size "
            f"{list(input.shape)} instead"
        )
    else:
        raise RuntimeError(f"Invalid padding string: '{padding}'")
    return input, stride, padding, dilation


def op_arguments(input, weight, bias, stride, padding, dilation, groups):
    """A public function's arguments, of a 4-D input, as the op takes them."""
    input, stride, padding, dilation = geometry(input, weight, stride, padding, dilation)
    groups = number("groups", groups)
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = cast_to(dtype, input, weight, bias)
    settings = _config.conv2d_settings(input)
    return input, weight, bias, stride, padding, dilation, groups, *settings


def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """2-D cross-correlation, as ``torch.nn.functional.conv2d``.

    Args:
        input: [N, C, H, W] or [C, H, W], any strides; float64, float32, bfloat16 or float16.
        weight: [K, C / groups, R, S].
        bias: [K], or None.
        stride, dilation: an int, or (vertical, horizontal), at least 1.
        padding: the same, at least 0; or ``"valid"`` (none) or ``"same"`` (the result is as large
            as the input; stride 1).
        groups: each of the `groups` runs of input channels meets its own run of filters.

    Returns:
        [N, K, P, Q] (or [K, P, Q]) in the input's dtype; channels_last if input or weight is,
        else contiguous. 16-bit inputs are summed in float32; float32 is rounded to TF32 only where
        ``torch.backends.cudnn.conv`` allows it. Twice differentiable. Bitwise repeatable for a
        given number of CPU threads; on CUDA with braze's own kernels, and with cuDNN's under
        ``torch.use_deterministic_algorithms(True)``.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: shapes, strides, padding or groups that do not fit (in torch's words),
            different or other dtypes, different devices, or a backend that cannot take the
            arguments.
    """
    if weight is None or not plain(input, weight, bias):
        arguments = stride, padding, dilation, groups
        return torch.nn.functional.conv2d(input, weight, bias, *arguments)
    if input.dim() == 3:
        batch = conv2d(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
        return batch.squeeze(0)
    function = _ops.conv2d if torch.compiler.is_compiling() else _conv2d
    return function(*op_arguments(input, weight, bias, stride, padding, dilation, groups))
