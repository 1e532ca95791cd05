"""Weight standardization: public function, autograd Function, fake kernels. Kernels:
csrc/cuda/weight_standardization/."""

import torch

from braze._ops._common import (
    HALF_DTYPES,
    autocast_dtype,
    below_autograd,
    check_tensor,
    eager,
    eager_backward,
    is_channels_last,
    plain,
    register,
    statistics_dtype,
)

_ops = torch.ops.braze


class WeightStandardization(torch.autograd.Function):
    """Returns the result and the statistics it was made with, which are not differentiable."""

    @staticmethod
    def forward(ctx, weight, gain, scale, eps, dtype=None, private=False):
        with below_autograd():
            output, mean, rstd = _ops.weight_standardization.default(
                weight, gain, scale, eps, dtype
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(weight, gain, mean, rstd)
        ctx.scale, ctx.private = scale, private
        return output, mean, rstd

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 6
        mask = ctx.needs_input_grad[:2]
        # Deterministic algorithms fill a new tensor, which counts as a write.
        filled = torch.utils.deterministic.fill_uninitialized_memory
        written = int(filled and torch.are_deterministic_algorithms_enabled())
        as_made = ctx.private and grad_output._version == written
        dweight, dgain = _backward(grad_output, *ctx.saved_tensors, ctx.scale, mask, as_made)
        return dweight if mask[0] else None, dgain if mask[1] else None, *(None,) * 4


def _factors(weight, gain, scale):
    """What each filter is multiplied with, of a shape that broadcasts, or a number."""
    if gain is None:
        return scale
    dtype = statistics_dtype(weight)
    return gain.to(dtype).reshape(-1, *[1] * (weight.dim() - 1)) * scale


def _formula(weight, gain, scale, eps, dtype=None, private=False):
    """The op made of torch's."""
    x = weight.to(statistics_dtype(weight))
    dims = tuple(range(1, weight.dim()))
    mean = x.mean(dims, keepdim=True)
    rstd = (x.var(dims, correction=0, keepdim=True) + eps).rsqrt()
    output = (x - mean) * rstd * _factors(weight, gain, scale)
    return output.to(dtype or weight.dtype), mean.flatten(), rstd.flatten()


def _gradients(grad_output, weight, gain, mean, rstd, scale, *_):
    """The backward in torch's ops, to be differentiated by them: gradients of weight and gain."""
    dims = tuple(range(1, weight.dim()))
    each = -1, *[1] * (weight.dim() - 1)
    x, g = weight.to(mean.dtype), grad_output.to(mean.dtype)
    mean, rstd = mean.view(each), rstd.view(each)
    # Of the values that the forward used, and of the derivatives that those have.
    own_mean = x.mean(dims, keepdim=True)
    mean = mean + (own_mean - own_mean.detach())
    var = x.var(dims, correction=0, keepdim=True)
    rstd = (rstd.square().reciprocal() + (var - var.detach())).rsqrt()
    x_hat = (x - mean) * rstd
    dgain = None if gain is None else ((g * x_hat).sum(dims) * scale).to(gain.dtype)
    g = g * _factors(weight, gain, scale)
    centered = g - g.mean(dims, keepdim=True)
    dweight = rstd * (centered - x_hat * (g * x_hat).mean(dims, keepdim=True))
    return dweight.to(weight.dtype), None if gain is None else dgain.view(gain.shape)


def _op(weight, gain, scale, eps, dtype=None, private=False):
    return _ops.weight_standardization.default(weight, gain, scale, eps, dtype)


_standardized = eager(WeightStandardization, _op, tensors=2, formula=_formula)
_backward = eager_backward(
    WeightStandardization,
    _ops.weight_standardization_backward.default,
    5,
    formula=_gradients,
)


def _dense_like(weight, dtype=None):
    """Empty, with each filter's elements beside each other, as the kernels leave it."""
    if not (weight.is_contiguous() or is_channels_last(weight)):
        return weight.new_empty(weight.shape, dtype=dtype)
    return torch.empty_strided(
        weight.shape, weight.stride(), dtype=dtype or weight.dtype, device=weight.device
    )


def _fake(weight, gain, scale, eps, dtype=None):
    statistics = statistics_dtype(weight)
    each = (weight.new_empty(weight.shape[0], dtype=statistics) for _ in range(2))
    return _dense_like(weight, dtype), *each


def _fake_backward(grad_output, weight, gain, mean, rstd, scale, output_mask, as_made=False):
    return (
        _dense_like(weight) if output_mask[0] else weight.new_empty(0),
        torch.empty_like(gain, memory_format=torch.contiguous_format)
        if output_mask[1]
        else weight.new_empty(0),
    )


def _autograd(weight, gain, scale, eps, dtype=None):
    return _standardized(weight, gain, scale, eps, dtype)


register("weight_standardization", fake=_fake, autograd=_autograd)
register("weight_standardization_backward", fake=_fake_backward, autograd=_backward)


def weight_standardization(weight, gain=None, scale=1.0, eps=1e-6):
    """(weight - mean) / sqrt(var + eps) * gain * scale, with the mean and the biased variance of
    each filter: what convolutions with standardized weights run on. (Qiao et al., `Micro-Batch
    Training with Batch-Channel Normalization and Weight Standardization
    <https://arxiv.org/abs/1903.10520>`_, 2019; with gain and scale Brock et al., `Characterizing
    signal propagation to close the performance gap in unnormalized ResNets
    <https://arxiv.org/abs/2101.08692>`_, 2021)

    Args:
        weight: [O, ...] of at least 2 dimensions; float64, float32, bfloat16 or float16.
        gain: O elements in the dtype of `weight`, of any shape, or None.
        scale: a number.
        eps: added to the variance.

    Returns:
        Weight's shape, dtype and order in memory (contiguous where filters are not dense in it).
        Bitwise repeatable. Differentiable to any order with respect to `weight` and `gain`.

    Raises:
        TypeError: `weight` is no tensor.
        RuntimeError: shapes or dtypes that do not fit.
    """
    check_tensor("weight_standardization", "weight", 1, weight)
    if not plain(weight, gain):
        return _formula(weight, gain, scale, eps)[0]
    if torch.compiler.is_compiling():
        return _ops.weight_standardization.default(weight, gain, scale, eps, None)[0]
    return _standardized(weight, gain, scale, eps)[0]


def standardized_for_product(weight, gain, scale, eps):
    """:func:`weight_standardization` of a plain weight, whose result goes into one convolution, and
    nowhere else. Where autocast casts it for that, it is stored in that dtype at once.

    Args, returns, raises: as :func:`weight_standardization`.
    """
    dtype = autocast_dtype(weight) if weight.dtype == torch.float32 else None
    if dtype not in HALF_DTYPES:
        dtype = None
    if torch.compiler.is_compiling():
        return _ops.weight_standardization.default(weight, gain, scale, eps, dtype)[0]
    return _standardized(weight, gain, scale, eps, dtype, True)[0]
