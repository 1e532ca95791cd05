"""Group norm and instance norm: public functions, autograd Function, fake kernels. Kernels:
csrc/cuda/group_norm/."""

import torch

from braze._norm_rules import may_take_ours, parameters_fit, takes_ours
from braze._ops._common import (
    HALF_DTYPES,
    below_autograd,
    cast_to,
    eager,
    eager_backward,
    is_channels_last,
    plain,
    register,
    statistics_dtype,
)
from braze._ops.batch_norm import empty_like_input

_ops = torch.ops.braze


class GroupNorm(torch.autograd.Function):
    """Returns the result and the statistics it was made with, which are not differentiable."""

    @staticmethod
    def forward(ctx, input, weight, bias, num_groups, eps, dtype=None):
        with below_autograd():
            output, mean, rstd = _ops.group_norm.default(
                input, weight, bias, num_groups, eps, dtype
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(input, weight, mean, rstd)
        ctx.num_groups = num_groups
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output, mean, rstd

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 6
        mask = ctx.needs_input_grad[:3]
        dx, dweight, dbias = _group_norm_backward(
            grad_output, *ctx.saved_tensors, ctx.num_groups, mask
        )
        return (
            dx if mask[0] else None,
            dweight if mask[1] else None,
            dbias.to(ctx.bias_dtype) if mask[2] else None,
            None,
            None,
            None,
        )


def _in_groups(t, num_groups, dtype):
    return t.to(dtype).reshape(t.shape[0], num_groups, t.shape[1] // num_groups, -1)


def _statistics(input, mean, rstd, num_groups):
    """Input in its groups, mean and rstd: of the values that the forward used, and of the
    derivatives that those have."""
    x = _in_groups(input, num_groups, mean.dtype)
    mean, rstd = mean[:, :, None, None], rstd[:, :, None, None]
    own_mean = x.mean((2, 3), keepdim=True)
    mean = mean + (own_mean - own_mean.detach())
    var = x.var((2, 3), correction=0, keepdim=True)
    rstd = (rstd.square().reciprocal() + (var - var.detach())).rsqrt()
    return x, mean, rstd


def x_hat_of(input, mean, rstd, num_groups):
    """The normalised input in torch's ops, in its groups."""
    x, mean, rstd = _statistics(input, mean, rstd, num_groups)
    return (x - mean) * rstd


def gradients(grad_output, input, weight, mean, rstd, num_groups, *_):
    """The backward in torch's ops, to be differentiated by them: gradients of input, weight and
    bias."""
    x, mean, rstd = _statistics(input, mean, rstd, num_groups)
    x_hat = (x - mean) * rstd
    g = _in_groups(grad_output, num_groups, mean.dtype)
    dweight, dbias = (g * x_hat).sum((0, 3)).view(-1), g.sum((0, 3)).view(-1)
    if weight is not None:
        g = g * weight.to(mean.dtype).view(1, num_groups, -1, 1)
    centered = g - g.mean((2, 3), keepdim=True)
    dx = rstd * (centered - x_hat * (g * x_hat).mean((2, 3), keepdim=True))
    dtype = mean.dtype if weight is None else weight.dtype
    return dx.reshape(input.shape).to(input.dtype), dweight.to(dtype), dbias.to(dtype)


def formula(input, weight, bias, num_groups, eps, dtype=None):
    images, channels = input.shape[:2]
    inner = input.numel() // max(images * channels, 1)
    if dtype is not None:
        input, weight, bias = (t if t is None else t.to(dtype) for t in (input, weight, bias))
    return torch.native_group_norm(
        input.contiguous(), weight, bias, images, channels, inner, num_groups, eps
    )


_group_norm = eager(GroupNorm, _ops.group_norm.default, tensors=3, formula=formula)
_group_norm_backward = eager_backward(
    GroupNorm, _ops.group_norm_backward.default, 5, formula=gradients
)


def fake(input, weight, bias, num_groups, eps, dtype=None):
    groups = input.shape[0], num_groups
    statistics = (input.new_empty(groups, dtype=statistics_dtype(input)) for _ in range(2))
    output = empty_like_input(input)
    return output if dtype is None else output.to(dtype), *statistics


def fake_backward(grad_output, input, weight, mean, rstd, num_groups, output_mask):
    dtype = statistics_dtype(input) if weight is None else weight.dtype
    channels = input.shape[1]
    return (
        empty_like_input(input) if output_mask[0] else input.new_empty(0),
        *(input.new_empty(channels if wanted else 0, dtype=dtype) for wanted in output_mask[1:]),
    )


def _autocast_arguments(input, weight, bias):
    """Tensors and the result's dtype: float32 where autocast is on. Torch casts the function on
    CUDA, not on the CPU."""
    if not (input.is_cuda and torch.is_autocast_enabled("cuda")):
        return input, weight, bias, None
    if _saves_casts(input):
        return input, *cast_to(torch.float32, weight, bias), torch.float32
    return *cast_to(torch.float32, input, weight, bias), None


def _saves_casts(input):
    """Whether torch would convert to float32 what the kernels take as it is."""
    return (
        input.is_cuda
        and input.dtype in HALF_DTYPES
        and is_channels_last(input)
        and torch.is_autocast_enabled("cuda")
    )


def _autocast(input, weight, bias, num_groups, eps, dtype=None):
    *tensors, own = _autocast_arguments(input, weight, bias)
    return *tensors, num_groups, eps, own if dtype is None else dtype


register("group_norm", fake=fake, autograd=_group_norm, autocast=_autocast)
register("group_norm_backward", fake=fake_backward, autograd=_group_norm_backward)


def _is_per_channel(parameter, input):
    return parameter is None or (parameter.dim() == 1 and len(parameter) == input.shape[1])


def takes(input, num_groups, weight, bias, saves_casts=False):
    """Whether our op is to run, and can.

    Args:
        saves_casts: whether torch's function casts before and behind.
    """
    return (
        may_take_ours("group_norm", input)
        and plain(input, weight, bias)
        and input.dim() >= 2
        and type(num_groups) is int
        and num_groups > 0
        and input.shape[1] % num_groups == 0
        and input.numel() > input.shape[0] * num_groups  # more than one value in a group
        and _is_per_channel(weight, input)
        and _is_per_channel(bias, input)
        and takes_ours(
            *("group_norm", input, input.shape[1:].numel() // num_groups), saves_casts, saves_casts
        )
    )


def _apply(input, num_groups, weight, bias, eps, dtype=None):
    apply = _ops.group_norm.default if torch.compiler.is_compiling() else _group_norm
    return apply(input, weight, bias, num_groups, eps, dtype)[0]


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    """(input - mean) / sqrt(var + eps) * weight + bias, with the mean and the biased variance of
    each group of channels in each image. As ``torch.nn.functional.group_norm``.

    Our kernels run where they were measured to be faster, or where a ``braze.backend`` of
    group_norm asks for them; elsewhere torch's function does. Under CUDA autocast 16-bit inputs
    give float32, as in torch; of channels_last images our kernels do so without a cast before.

    Args:
        input: [N, C, ...]; float64, float32, bfloat16 or float16.
        num_groups: into how many groups of neighbouring channels C is cut.
        weight, bias: [C] or None, of input's dtype or, for 16-bit input, float32.
        eps: added to the variance.

    Returns:
        Input's shape, dtype and memory format (contiguous or channels_last). Bitwise repeatable on
        one kind of GPU and on the CPU for any number of threads. Differentiable with respect to
        input, weight and bias; the second derivative and all further ones are made of torch's ops.
        A mean much larger than the deviation costs no accuracy.

    Raises:
        ValueError: one value in all groups of a channel.
        RuntimeError: shapes that do not fit. Torch's own errors.
    """
    saves_casts = isinstance(input, torch.Tensor) and _saves_casts(input)
    if takes(input, num_groups, weight, bias, saves_casts):
        *tensors, dtype = _autocast_arguments(input, weight, bias)
        if parameters_fit(*tensors):
            return _apply(tensors[0], num_groups, *tensors[1:], eps, dtype)
    return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)


def instance_norm(
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    """:func:`group_norm` with a group for each channel. As ``torch.nn.functional.instance_norm``,
    which runs where there are running statistics.

    Args:
        input: [N, C, ...] of more than one element per channel.
        running_mean, running_var: [C] or None.
        weight, bias: [C] or None.
        use_input_stats: False: normalise with the running statistics.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.

    Returns:
        As of :func:`group_norm`.

    Raises:
        ValueError: one element per channel.
        RuntimeError: shapes that do not fit. Torch's own errors.
    """
    ours = use_input_stats and running_mean is None and running_var is None
    if ours and isinstance(input, torch.Tensor) and input.dim() >= 2:
        channels = input.shape[1]
        if takes(input, channels, weight, bias) and parameters_fit(input, weight, bias):
            if not (input.is_cuda and torch.is_autocast_enabled("cuda")):
                return _apply(input, channels, weight, bias, eps)
            with torch.autocast("cuda", enabled=False):  # which casts group norm's arguments only
                return _apply(input, channels, weight, bias, eps)
    return torch.nn.functional.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )
