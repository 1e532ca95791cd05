"""Global response norm: public function, autograd Function, fake kernels. Kernels:
csrc/cuda/global_response_norm/."""

import torch

from braze._norm_rules import parameters_fit
from braze._ops._common import (
    HALF_DTYPES,
    autocast_dtype,
    below_autograd,
    cast_to,
    check_tensor,
    eager,
    eager_backward,
    is_channels_last,
    plain,
    register,
    statistics_dtype,
)

_ops = torch.ops.braze


class GlobalResponseNorm(torch.autograd.Function):
    """Returns the result, and the norms and scales that it was made with, which are not
    differentiable."""

    @staticmethod
    def forward(ctx, input, weight, bias, eps):
        with below_autograd():
            output, norms, scales = _ops.global_response_norm.default(input, weight, bias, eps)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(norms, scales)
        ctx.save_for_backward(input, weight, norms, scales)
        return output, norms, scales

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 4
        needs = ctx.needs_input_grad
        mask = needs[0], needs[1] or needs[2]
        grads = _backward(grad_output, *ctx.saved_tensors, mask)
        return *(g if n else None for g, n in zip(grads, needs[:3], strict=True)), None


def _of_channels(parameter, dtype):
    return parameter.to(dtype).view(-1, 1, 1)


def _formula(input, weight, bias, eps):
    """The op made of torch's."""
    x = input.to(statistics_dtype(input))
    norms = torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True)
    scales = (norms.mean(1, keepdim=True) + eps).reciprocal()
    output = x + _of_channels(bias, x.dtype) + _of_channels(weight, x.dtype) * (x * norms * scales)
    return output.to(input.dtype), norms.flatten(1), scales.flatten()


def _gradients(grad_output, input, weight, norms, scales, *_):
    """The backward in torch's ops, to be differentiated by them: gradients of input, weight and
    bias."""
    x, g = input.to(norms.dtype), grad_output.to(norms.dtype)
    w = _of_channels(weight, norms.dtype)
    # Of the values that the forward used, and of the derivatives that those have.
    own = torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True)
    of_images, each = (len(norms), -1, 1, 1), (-1, 1, 1, 1)
    norms = norms.view(of_images) + (own - own.detach())
    mean = own.mean(1, keepdim=True)
    r = (scales.view(each).reciprocal() + (mean - mean.detach())).reciprocal()
    dot = (g * x).sum((2, 3), keepdim=True)
    slope = w * dot * r - r.square() * (w * dot * norms).mean(1, keepdim=True)
    zero = norms == 0
    by_input = torch.where(zero, 0, slope / torch.where(zero, 1, norms))
    dx = g * (1 + w * norms * r) + x * by_input
    dweight = (norms * r * dot).sum((0, 2, 3))
    return (
        dx.to(input.dtype),
        dweight.to(weight.dtype),
        g.sum((0, 2, 3)).to(weight.dtype),
    )


_response_norm = eager(
    GlobalResponseNorm, _ops.global_response_norm.default, tensors=3, formula=_formula
)
_backward = eager_backward(
    GlobalResponseNorm, _ops.global_response_norm_backward.default, 5, formula=_gradients
)


def _image_like(input):
    memory_format = torch.channels_last if is_channels_last(input) else torch.contiguous_format
    return torch.empty_like(input, memory_format=memory_format)


def _fake(input, weight, bias, eps):
    dtype = statistics_dtype(input)
    norms = input.new_empty(input.shape[:2], dtype=dtype)
    return _image_like(input), norms, input.new_empty(input.shape[0], dtype=dtype)


def _fake_backward(grad_output, input, weight, norms, scales, output_mask):
    count = input.shape[1] if output_mask[1] else 0
    return (
        _image_like(input) if output_mask[0] else input.new_empty(0),
        *(weight.new_empty(count) for _ in range(2)),
    )


register("global_response_norm", fake=_fake, autograd=_response_norm)
register("global_response_norm_backward", fake=_fake_backward, autograd=_backward)


def response_norm_takes(input, weight, bias):
    """Whether the op takes such arguments; torch's functions take more."""
    return (
        plain(input, weight, bias)
        and weight is not None
        and bias is not None
        and input.dim() == 4
        and weight.dim() == bias.dim() == 1
        and len(weight) == len(bias) == input.shape[1]
        and weight.device == bias.device == input.device
        and parameters_fit(input, weight, bias)
    )


def _apply(input, weight, bias, eps):
    compiling = torch.compiler.is_compiling()
    apply = _ops.global_response_norm.default if compiling else _response_norm
    return apply(input, weight, bias, eps)[0]


def global_response_norm(input, weight, bias, eps=1e-6):
    """input * (1 + weight * n) + bias, where n is a channel's norm over the pixels of its image,
    divided by the mean of the image's norms. (Woo et al., `ConvNeXt V2: Co-designing and Scaling
    ConvNets with Masked Autoencoders <https://arxiv.org/abs/2301.00808>`_, 2023)

    Args:
        input: [N, C, H, W], contiguous or channels_last; float64, float32, bfloat16 or float16.
        weight, bias: [C], of input's dtype or, for 16-bit input, float32.
        eps: added to the mean.

    Returns:
        Input's shape, dtype and memory format. Bitwise repeatable on one kind of GPU.
        Differentiable to any order with respect to input, weight and bias. A channel of zeros gets
        no gradient by way of its norm, as by torch's.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: shapes or dtypes that do not fit.
    """
    check_tensor("global_response_norm", "input", 1, input)
    if not plain(input, weight, bias):
        return _formula(input, weight, bias, eps)[0]
    return _apply(input, weight, bias, eps)


def response_norm_for_product(input, weight, bias, eps):
    """:func:`global_response_norm` whose result goes into products that autocast casts it for, and
    nowhere else; None where torch's functions have to run.

    Under autocast torch's result of a 16-bit input is float32, and so is all on the way; a product
    rounds it.

    Args, returns: as there.
    """
    dtype = autocast_dtype(input) if isinstance(input, torch.Tensor) else None
    if dtype is not None:
        if dtype not in HALF_DTYPES or input.dtype != dtype:
            return None
        weight, bias = cast_to(torch.float32, weight, bias)
    if not response_norm_takes(input, weight, bias):
        return None
    return _apply(input, weight, bias, eps)
