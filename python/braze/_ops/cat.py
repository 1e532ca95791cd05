"""Concatenation along channels: public function, autograd Function, fake kernels. Kernels:
csrc/cuda/cat/."""

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from braze._ops._bilinear import masked
from braze._ops._common import (
    HALF_DTYPES,
    autocast_dtype,
    below_autograd,
    eager,
    eager_backward,
    plain,
    register,
)

_ops = torch.ops.braze
_STRIDED = torch.strided

#: On which devices :func:`cat` is the op, and from how many bytes of the result on. On a CPU the
#: result is made faster than torch's, but an addition behind the gradients, of which torch's are
#: views, takes longer by a pass.
CAT_ON = ("cuda",)
CAT_BYTES = 1 << 20
#: Of what the channels of each tensor have to be a multiple, in bytes: the narrowest access for
#: which the op has been measured ahead.
CAT_ACCESS = 4


def _op(*tensors):
    return _ops.cat_channels.default(tensors)


def _backward_op(grad_output, channels, output_mask):
    return tuple(_ops.cat_channels_backward.default(grad_output, channels, output_mask))


class CatChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.channels = [t.shape[1] for t in tensors]
        with below_autograd():
            return _op(*tensors)

    @staticmethod
    def backward(ctx, grad_output):
        mask = list(ctx.needs_input_grad)
        return tuple(masked(_cat_channels_backward(grad_output, ctx.channels, mask), mask))


def _formula(*tensors):
    return torch.cat(tensors, 1)


def _gradients(grad_output, channels, output_mask):
    """The backward in torch's ops, to be differentiated by them."""
    return tuple(masked(grad_output.split(channels, 1), output_mask))


_cat_channels = eager(CatChannels, _op, tensors=None, formula=_formula)
_cat_channels_backward = eager_backward(CatChannels, _backward_op, tensors=1, formula=_gradients)


def _empty(like, channels):
    sizes = like.shape[0], channels, *like.shape[2:]
    return torch.empty(
        sizes, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _fake(tensors):
    return _empty(tensors[0], sum(t.shape[1] for t in tensors))


def _fake_backward(grad_output, channels, output_mask):
    return [
        _empty(grad_output, c) if wanted else grad_output.new_empty([0])
        for c, wanted in zip(channels, output_mask, strict=True)
    ]


register("cat_channels", fake=_fake, autograd=lambda tensors: _cat_channels(*tensors))
register(
    "cat_channels_backward",
    fake=_fake_backward,
    autograd=lambda *args: list(_cat_channels_backward(*args)),
)


def cat_takes(tensors, dim):
    """Whether :func:`cat` of such arguments is the op."""
    if (
        (type(tensors) is not list and type(tensors) is not tuple)
        or len(tensors) < 2
        or type(dim) is not int
        or (dim != 1 and dim != -3)
        or not plain(*tensors)
    ):
        return False
    first = tensors[0]
    dtype, device = first.dtype, first.device
    if device.type not in CAT_ON or first.dim() != 4:
        return False
    n, _, h, w = first.shape
    tracing, channels = torch.compiler.is_compiling(), 0
    vector = max(1, CAT_ACCESS // first.element_size())
    for t in tensors:
        if t is None or t.dtype is not dtype or t.layout is not _STRIDED or t.is_nested:
            return False
        if t.dim() != 4:
            return False
        own, c, height, width = t.shape
        strides = t.stride()
        step = strides[3]
        # In the order and with the alignment for which the kernel is fast. The channels may be some
        # of another tensor's. torch gives the result of these, and of no others, this format.
        if (
            strides != (h * w * step, 1, w * step, step)
            or not 1 < c <= step  # of one channel both formats have the same strides
            or c % vector
            or step % vector
            or own != n
            or height != h
            or width != w
            or t.device != device
            # While compiling nobody says where a tensor begins; others take narrower accesses.
            or (not tracing and t.storage_offset() % vector)
        ):
            return False
        channels += c
    if n == 0 or h == 0 or w == 0:  # torch's result is contiguous then
        return False
    enough = n * channels * h * w >= CAT_BYTES // first.element_size()
    if enough is not True and not statically_known_true(enough):  # of sizes that are left open
        return False
    # torch casts, or refuses, 16-bit tensors of another dtype than autocast's.
    return dtype not in HALF_DTYPES or autocast_dtype(first) in (None, dtype)


def cat(tensors, dim=0, *, out=None):
    """Concatenation. As ``torch.cat``.

    Along the channels of channels_last images on a GPU it is an op of one launch, forward and
    backward: the gradients are dense tensors, where torch's are parts of a larger one, which what
    comes next has to copy, or reads more slowly. Bitwise equal to torch's. Everything else is
    torch's: other dimensions and formats, 16-bit tensors of odd numbers of channels, mixed dtypes,
    results of less than 1 MiB, and `out`.

    Args:
        tensors: a list or tuple of tensors of one dtype, which differ in dimension `dim` only.
        dim: along which.
        out: as torch has it.

    Returns:
        Of torch's shape, dtype and strides. Differentiable any number of times.

    Errors are those of ``torch.cat``.
    """
    if out is not None or not cat_takes(tensors, dim):
        return torch.cat(tensors, dim, out=out)
    return cat_channels(tensors)


def cat_channels(tensors):
    """:func:`cat` of what the op takes."""
    if torch.compiler.is_compiling():
        return _ops.cat_channels(tensors)
    return _cat_channels(*tensors)
