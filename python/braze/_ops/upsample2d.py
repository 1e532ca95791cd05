"""Nearest and bilinear upsampling: public function, autograd Functions, fake kernels. Kernels:
csrc/cuda/upsample2d/."""

import torch

from braze._ops._common import (
    HALF_DTYPES,
    below_autograd,
    eager,
    empty_image,
    is_channels_last,
    plain,
    register,
)

_ops = torch.ops.braze

#: On which devices :func:`interpolate` is the op.
UPSAMPLE_ON = ("cuda",)
MODES = "nearest", "nearest-exact", "bilinear"


class Upsample2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, output_size, mode, align_corners, scale_h, scale_w, dtype=None):
        settings = mode, align_corners, scale_h, scale_w
        own = None if dtype is None else input.dtype
        ctx.args = input.shape, *settings, is_channels_last(input), own
        with below_autograd():
            return _ops.upsample2d.default(input, output_size, *settings, dtype)

    @staticmethod
    def backward(ctx, grad_output):
        return _upsample2d_backward(grad_output, *ctx.args), *(None,) * 6


class Upsample2dBackward(torch.autograd.Function):
    """Linear in grad_output: its own gradient is the forward."""

    @staticmethod
    def forward(ctx, grad_output, input_size, *args):
        dtype = args[5] if len(args) > 5 else None
        ctx.args = grad_output.shape[2:], *args[:4], None if dtype is None else grad_output.dtype
        with below_autograd():
            return _ops.upsample2d_backward.default(grad_output, input_size, *args)

    @staticmethod
    def backward(ctx, grad):
        return _upsample2d(grad, *ctx.args), *(None,) * 7


def _stock(input, output_size, mode, align_corners, scale_h, scale_w, dtype=None):
    if dtype is not None:
        input = input.to(dtype)
    scales = scale_h, scale_w
    if mode == "bilinear":
        return torch.ops.aten.upsample_bilinear2d(input, output_size, align_corners, *scales)
    exact = mode == "nearest-exact"
    op = torch.ops.aten._upsample_nearest_exact2d if exact else torch.ops.aten.upsample_nearest2d
    return op(input, output_size, *scales)


def _stock_backward(
    grad_output, input_size, mode, align_corners, scale_h, scale_w, channels_last, dtype=None
):
    args = grad_output, grad_output.shape[2:], input_size
    scales = scale_h, scale_w
    aten = torch.ops.aten
    if mode == "bilinear":
        grad = aten.upsample_bilinear2d_backward(*args, align_corners, *scales)
    elif mode == "nearest":
        grad = aten.upsample_nearest2d_backward(*args, *scales)
    else:
        grad = aten._upsample_nearest_exact2d_backward(*args, *scales)
    return grad if dtype is None else grad.to(dtype)


_upsample2d = eager(Upsample2d, _ops.upsample2d.default, tensors=1, formula=_stock)
_upsample2d_backward = eager(
    Upsample2dBackward, _ops.upsample2d_backward.default, 1, _stock_backward
)


def _fake(input, output_size, mode, align_corners, scale_h, scale_w, dtype=None):
    size = *input.shape[:2], *output_size
    return empty_image(input, size, is_channels_last(input), dtype)


def _fake_backward(
    grad_output, input_size, mode, align_corners, scale_h, scale_w, channels_last, dtype=None
):
    return empty_image(grad_output, input_size, channels_last, dtype)


def _autocast_arguments(input, *args):
    """The result is float32 where autocast is on: torch casts the function on CUDA, not on the
    CPU. The kernels read 16 bits as they are."""
    return input, *args[:5], _result_dtype(input) or (args[5] if len(args) > 5 else None)


def _result_dtype(input):
    casts = input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype in HALF_DTYPES
    return torch.float32 if casts else None


register("upsample2d", fake=_fake, autograd=_upsample2d, autocast=_autocast_arguments)
register("upsample2d_backward", fake=_fake_backward, autograd=_upsample2d_backward)


def interpolate(
    input,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
):
    """Images of another size. As ``torch.nn.functional.interpolate``, which does what the kernels
    are not made for.

    Args:
        input: [N, C, H, W] on a GPU; float64, float32, bfloat16 or float16. All else is torch's.
        size: an int or (height, width); of the result.
        scale_factor: in its place a number or two, by which height and width are multiplied and
            rounded down.
        mode: "nearest", "nearest-exact" or "bilinear"; all others are torch's.
        align_corners: bilinear: whether the outermost elements keep their places.
        recompute_scale_factor: whether places follow from the size of the result and not from
            `scale_factor`.
        antialias: torch's.

    Returns:
        [N, C, P, Q] in the input's memory format; sums are kept in fp32 for 16-bit input. Under
        autocast on a GPU it is float32, as torch's. Bitwise repeatable, forward and backward, where
        torch's gradient of "bilinear" is not: each input element gathers its own. Differentiable
        any number of times.

    Raises:
        as torch.
    """
    found = _settings(
        input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    )
    if found is None:
        return torch.nn.functional.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    if torch.compiler.is_compiling():
        return _ops.upsample2d.default(input, *found)
    return _upsample2d(input, *found, _result_dtype(input))


def _settings(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias):
    """The op's settings, or None where the call is torch's, perhaps to raise an error."""
    if not (plain(input) and input.device.type in UPSAMPLE_ON and input.dim() == 4):
        return None
    if mode not in MODES or antialias or (size is None) == (scale_factor is None):
        return None
    if mode != "bilinear" and align_corners is not None:
        return None
    height, width = input.shape[2:]
    if height == 0 or width == 0 or input.shape[1] == 0:
        return None
    factors = None, None
    if size is None:
        factors = _pair(scale_factor, (int, float))
        if factors is None:
            return None
        factors = [float(f) for f in factors]
        size = [torch.sym_int(height * factors[0]), torch.sym_int(width * factors[1])]
        if recompute_scale_factor:
            factors = None, None
    elif recompute_scale_factor:
        return None
    else:
        size = _pair(size, (int, torch.SymInt))
    if size is None or size[0] <= 0 or size[1] <= 0:
        return None
    return size, mode, bool(align_corners), *factors


def _pair(value, types):
    """Two values of such types, of one or of two; else None."""
    pair = list(value) if isinstance(value, (tuple, list)) else [value, value]
    fits = len(pair) == 2 and all(isinstance(v, types) and not isinstance(v, bool) for v in pair)
    return pair if fits else None
