"""Layer norm: public function, autograd Function, fake kernels. Kernels: csrc/cuda/layer_norm/."""

import math

import torch

from braze._norm_rules import may_take_ours, parameters_fit, takes_ours
from braze._ops._common import (
    HALF_DTYPES,
    autocast_dtype,
    below_autograd,
    cast_to,
    eager,
    eager_backward,
    plain,
    register,
    statistics_dtype,
)

_ops = torch.ops.braze


class LayerNorm(torch.autograd.Function):
    """Returns the result and the statistics it was made with, which are not differentiable."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, dtype=None):
        with below_autograd():
            output, mean, rstd = _ops.layer_norm.default(
                input, weight, bias, normalized_shape, eps, dtype
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(input, weight, mean, rstd)
        ctx.normalized_shape = normalized_shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output, mean, rstd

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 6
        mask = ctx.needs_input_grad[:3]
        dx, dweight, dbias = _layer_norm_backward(
            grad_output, *ctx.saved_tensors, ctx.normalized_shape, mask
        )
        return (
            dx if mask[0] else None,
            dweight if mask[1] else None,
            dbias.to(ctx.bias_dtype) if mask[2] else None,
            None,
            None,
            None,
        )


def _gradients(grad_output, input, weight, mean, rstd, normalized_shape, *_):
    """The backward in torch's ops, to be differentiated by them: gradients of input, weight and
    bias."""
    dims = list(range(-len(normalized_shape), 0))
    x = input.to(mean.dtype)
    # Of the values that the forward used, and of the derivatives that those have.
    own_mean = x.mean(dims, keepdim=True)
    mean = mean + (own_mean - own_mean.detach())
    var = x.var(dims, correction=0, keepdim=True)
    rstd = (rstd.square().reciprocal() + (var - var.detach())).rsqrt()
    x_hat = (x - mean) * rstd
    g = grad_output.to(mean.dtype)
    dweight = (g * x_hat).reshape(-1, *normalized_shape).sum(0)
    dbias = g.reshape(-1, *normalized_shape).sum(0)
    if weight is not None:
        g = g * weight.to(mean.dtype)
    centered = g - g.mean(dims, keepdim=True)
    dx = rstd * (centered - x_hat * (g * x_hat).mean(dims, keepdim=True))
    dtype = mean.dtype if weight is None else weight.dtype
    return dx.to(input.dtype), dweight.to(dtype), dbias.to(dtype)


def _formula(input, weight, bias, normalized_shape, eps, dtype=None):
    x = input.to(dtype) if dtype == torch.float32 else input
    weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
    output, *statistics = torch.native_layer_norm(x, normalized_shape, weight, bias, eps)
    return output if dtype is None else output.to(dtype), *statistics


_layer_norm = eager(LayerNorm, _ops.layer_norm.default, tensors=3, formula=_formula)
_layer_norm_backward = eager_backward(
    LayerNorm, _ops.layer_norm_backward.default, 5, formula=_gradients
)


def _fake(input, weight, bias, normalized_shape, eps, dtype=None):
    normalised = len(normalized_shape)
    rows = [*input.shape[: input.dim() - normalised], *[1] * normalised]
    statistics = (input.new_empty(rows, dtype=statistics_dtype(input)) for _ in range(2))
    return input.new_empty(input.shape, dtype=dtype or input.dtype), *statistics


def _fake_backward(grad_output, input, weight, mean, rstd, normalized_shape, output_mask):
    dtype = statistics_dtype(input) if weight is None else weight.dtype
    return (
        input.new_empty(input.shape if output_mask[0] else [0]),
        *(
            input.new_empty(normalized_shape if wanted else [0], dtype=dtype)
            for wanted in output_mask[1:]
        ),
    )


def _autocast_dtype(input):
    """float32 where autocast is on: torch casts the function on CUDA, not on the CPU."""
    if input.is_cuda and input.dtype in HALF_DTYPES and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return None


def _autocast(input, weight, bias, normalized_shape, eps, dtype=None):
    if input.is_cuda and torch.is_autocast_enabled("cuda"):
        weight, bias = cast_to(torch.float32, weight, bias)
        dtype = _autocast_dtype(input) if dtype is None else dtype
    return input, weight, bias, normalized_shape, eps, dtype


register("layer_norm", fake=_fake, autograd=_layer_norm, autocast=_autocast)
register("layer_norm_backward", fake=_fake_backward, autograd=_layer_norm_backward)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """(input - mean) / sqrt(var + eps) * weight + bias, with the mean and the biased variance of
    the last dimensions. As ``torch.nn.functional.layer_norm``.

    Our kernels run where they were measured to be faster, or where a ``braze.backend`` of
    layer_norm asks for them; elsewhere torch's function does. Under CUDA autocast 16-bit inputs
    give float32, as in torch; our kernels do so without a cast before.

    Args:
        input: any shape that ends in `normalized_shape`, any strides; float64, float32, bfloat16 or
            float16.
        normalized_shape: the extents of the dimensions that are normalised together.
        weight, bias: of shape `normalized_shape`, or None; of input's dtype or, for 16-bit input,
            float32.
        eps: added to the variance.

    Returns:
        Contiguous, as torch's; input's shape and dtype. Bitwise repeatable on one kind of GPU and
        on the CPU for any number of threads. Differentiable with respect to input, weight and bias;
        the second derivative and all further ones are made of torch's ops.

        The variance is that of the deviations from the mean, in a second pass over the row while it
        is in registers, so a mean much larger than the deviation costs no accuracy.

    Raises:
        RuntimeError: shapes that do not fit; torch's own error.
    """
    if not _takes(input, normalized_shape, weight, bias):
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    dtype = None
    if input.is_cuda and torch.is_autocast_enabled("cuda"):
        weight, bias = cast_to(torch.float32, weight, bias)
        dtype = _autocast_dtype(input)
    if not parameters_fit(input, weight, bias):
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    apply = _ops.layer_norm.default if torch.compiler.is_compiling() else _layer_norm
    return apply(input, weight, bias, list(normalized_shape), eps, dtype)[0]


def layer_norm_for_product(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """:func:`layer_norm`, whose result goes into products that autocast casts it for, and nowhere
    else.

    Under CUDA autocast torch's result is float32, and a product rounds it. Where our kernel runs,
    it stores the rounded result at once, and its backward reads the product's gradient as it comes:
    no float32 copy is made of a 16-bit input, of its result, or of their gradients.

    Args, returns, raises: as :func:`layer_norm`; the result may have the dtype of autocast.
    """
    dtype = autocast_dtype(input) if isinstance(input, torch.Tensor) and input.is_cuda else None
    if (
        dtype not in HALF_DTYPES
        or input.dtype not in (dtype, torch.float32)
        # Of a small tensor only where no backward pass follows.
        or not _takes(input, normalized_shape, weight, bias, True, not torch.is_grad_enabled())
    ):
        return layer_norm(input, normalized_shape, weight, bias, eps)
    weight, bias = cast_to(torch.float32, weight, bias)
    apply = _ops.layer_norm.default if torch.compiler.is_compiling() else _layer_norm
    return apply(input, weight, bias, list(normalized_shape), eps, dtype)[0]


def _takes(input, normalized_shape, weight, bias, saves_casts=False, of_any_size=False):
    """Whether ours is to run, and takes such shapes."""
    return (
        may_take_ours("layer_norm", input)
        and plain(input, weight, bias)
        and isinstance(normalized_shape, (tuple, list))
        and len(normalized_shape) > 0
        and input.shape[-len(normalized_shape) :] == tuple(normalized_shape)
        and (weight is None or weight.shape == tuple(normalized_shape))
        and (bias is None or bias.shape == tuple(normalized_shape))
        and takes_ours(
            *("layer_norm", input, math.prod(normalized_shape)), saves_casts, of_any_size
        )
    )
