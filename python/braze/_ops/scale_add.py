"""residual + scale * input as one op: public function, autograd Function, fake kernels. Kernels:
csrc/cuda/scale_add/."""

import torch

from braze._ops._bilinear import masked
from braze._ops._common import (
    HALF_DTYPES,
    below_autograd,
    check_tensor,
    eager,
    eager_backward,
    is_channels_last,
    plain,
    register,
)

_ops = torch.ops.braze


class ScaleAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, scale, residual):
        # No more than the gradients need: what is not kept may be written to.
        of_input, of_scale, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_scale else None, scale if of_input or of_scale else None)
        ctx.dtype, ctx.residual_dtype = input.dtype, residual.dtype
        with below_autograd():
            return _ops.scale_add.default(input, scale, residual)

    @staticmethod
    def backward(ctx, grad_output):
        input, scale = ctx.saved_tensors
        *mask, of_residual = ctx.needs_input_grad
        grads = None, None
        if mask == [True, False]:
            grads = (grad_output * scale).to(ctx.dtype), None
        elif any(mask):
            grads = masked(_scale_add_backward(grad_output, input, scale, mask), mask)
        return *grads, grad_output.to(ctx.residual_dtype) if of_residual else None


def _formula(input, scale, residual):
    return residual + scale * input


def _gradients(grad_output, input, scale, output_mask):
    """The backward in torch's ops, to be differentiated by them."""
    of_input, of_scale = output_mask
    return (
        (grad_output * scale).to(input.dtype) if of_input else None,
        (grad_output * input).sum_to_size(scale.shape).to(scale.dtype) if of_scale else None,
    )


_scale_add = eager(ScaleAdd, _ops.scale_add.default, tensors=3, formula=_formula)
_scale_add_backward = eager_backward(
    ScaleAdd, _ops.scale_add_backward.default, tensors=3, formula=_gradients
)


def scaled_dim(input, scale):
    """The dimension of `input` that `scale` goes along, or None where it has not that dimension's
    extent and 1 elsewhere."""
    outer, found = input.dim() - scale.dim(), 0
    if scale.dim() == 0 or outer < 0:
        return None
    for i, size in enumerate(scale.shape):
        if size != 1:
            found = i
    for i, size in enumerate(scale.shape):
        if size != (input.shape[outer + i] if i == found else 1):
            return None
    return outer + found


def _empty(input, scale, dtype):
    channels_last = is_channels_last(input) and scaled_dim(input, scale) == 1
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty_like(input, dtype=dtype, memory_format=memory_format)


def _result_dtype(input, scale, residual):
    own = input.dtype
    return next((t.dtype for t in (residual, scale) if t.dtype != own), own)


def _fake(input, scale, residual):
    return _empty(input, scale, _result_dtype(input, scale, residual))


def _fake_backward(grad_output, input, scale, output_mask):
    of_input, of_scale = output_mask
    return (
        _empty(input, scale, input.dtype) if of_input else input.new_empty([0]),
        scale.new_empty(scale.shape if of_scale else [0]),
    )


register("scale_add", fake=_fake, autograd=_scale_add)
register("scale_add_backward", fake=_fake_backward, autograd=_scale_add_backward)


def scale_add_takes(input, scale, residual):
    """Whether the op takes such tensors."""
    if scale is None or residual is None or not plain(input, scale, residual):
        return False
    own = input.dtype
    dtypes = (own, torch.float32) if own in HALF_DTYPES else (own,)
    return (
        scale.numel() > 1
        and scale.dtype in dtypes
        and residual.dtype in dtypes
        and input.device == scale.device == residual.device
        and input.shape == residual.shape
        and scaled_dim(input, scale) is not None
    )


def scale_add(input, scale, residual):
    """residual + scale * input as one op: a layer scale with the addition behind it.

    Forward and backward are one pass each; the backward makes the gradients of `input` and `scale`.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.
        scale: one number for each index of one of input's dimensions, such as [C] along the last
            one or [C, 1, 1] for images.
        residual: of input's shape. It and `scale` are of input's dtype or, for 16-bit input,
            float32.

    Returns:
        Of the dtype that torch promotes the three to, rounded once; channels_last where input is
        and `scale` is of its channels, else contiguous. Bitwise repeatable. Differentiable with
        respect to all three; the second derivative and all further ones are made of torch's ops.
        Other shapes and dtypes are computed, or refused, by torch.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: shapes that do not broadcast.
    """
    for position, (name, tensor) in enumerate(
        (("input", input), ("scale", scale), ("residual", residual)), 1
    ):
        check_tensor("scale_add", name, position, tensor)
    if not scale_add_takes(input, scale, residual):
        return _formula(input, scale, residual)
    function = _ops.scale_add if torch.compiler.is_compiling() else _scale_add
    return function(input, scale, residual)
