"""Batch norm: public function, autograd Functions, fake kernels. Kernels:
csrc/cuda/batch_norm/."""

import numbers

import torch

from braze import _config
from braze._ops._common import (
    below_autograd,
    eager,
    eager_backward,
    is_channels_last,
    overwrite,
    plain,
    register,
    statistics_dtype,
)

_ops = torch.ops.braze


def _run(*args):
    buffers, training = args[3:6], args[6]
    return overwrite(buffers if training else (), _ops.batch_norm.default, *args)


def _run_rung(*args):
    return overwrite(args[3:6], _ops.batch_norm_rung.default, *args)


class BatchNorm(torch.autograd.Function):
    """Returns the result and the statistics it was made with, which are not differentiable."""

    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        bias,
        running_mean,
        running_var,
        num_batches_tracked,
        training,
        momentum,
        eps,
    ):
        with below_autograd():
            output, mean, rstd = _run(
                input,
                weight,
                bias,
                running_mean,
                running_var,
                num_batches_tracked,
                training,
                momentum,
                eps,
            )
        BatchNorm.keep(ctx, input, weight, bias, mean, rstd, training)
        return output, mean, rstd

    @staticmethod
    def keep(ctx, input, weight, bias, mean, rstd, training):
        """What the backward needs."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(input, weight, mean, rstd)
        ctx.training = training
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 9
        input, weight, mean, rstd = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        dx, dweight, dbias = _batch_norm_backward(
            grad_output, input, weight, mean, rstd, ctx.training, mask
        )
        return (
            dx if mask[0] else None,
            dweight if mask[1] else None,
            dbias.to(ctx.bias_dtype) if mask[2] else None,
            *_NO_GRADS,
        )


class BatchNormRung(BatchNorm):
    """Training, by the kernel that the last argument, `backend`, names; the backward is batch
    norm's."""

    @staticmethod
    def forward(ctx, input, weight, bias, *settings):
        with below_autograd():
            output, mean, rstd = _run_rung(input, weight, bias, *settings)
        BatchNorm.keep(ctx, input, weight, bias, mean, rstd, True)
        return output, mean, rstd


def gradients(grad_output, input, weight, mean, rstd, training, *_):
    """The backward in torch's ops, to be differentiated by them: gradients of input, weight and
    bias. `mean` and `rstd` are taken as constants in evaluation, as input's statistics in training.
    """
    dims = [d for d in range(input.dim()) if d != 1]
    x_hat, rstd = _standardised(input, mean, rstd, training)
    g = grad_output.to(x_hat.dtype)
    scale = rstd if weight is None else weight.to(rstd.dtype).view(rstd.shape) * rstd
    dweight, dbias = (g * x_hat).sum(dims), g.sum(dims)
    if training:
        g = g - g.mean(dims, keepdim=True)
        g = g - x_hat * (g * x_hat).mean(dims, keepdim=True)
    dtype = mean.dtype if weight is None else weight.dtype
    return (scale * g).to(input.dtype), dweight.to(dtype), dbias.to(dtype)


def _standardised(input, mean, rstd, training):
    """(input - mean) * rstd, and rstd, in the statistics' dtype and broadcast."""
    dims = [d for d in range(input.dim()) if d != 1]
    each = [-1 if d == 1 else 1 for d in range(input.dim())]
    x = input.to(mean.dtype)
    mean, rstd = mean.view(each), rstd.view(each)
    if training:
        # Of the values that the forward used, and of the derivatives that those have.
        batch_mean = x.mean(dims, keepdim=True)
        mean = mean + (batch_mean - batch_mean.detach())
        var = x.var(dims, correction=0, keepdim=True)
        rstd = (rstd.square().reciprocal() + (var - var.detach())).rsqrt()
    return (x - mean) * rstd, rstd


def normalised(input, weight, bias, mean, rstd, training):
    """The forward in torch's ops, in the statistics' dtype; arguments as of :func:`gradients`."""
    result, rstd = _standardised(input, mean, rstd, training)
    if weight is not None:
        result = result * weight.to(rstd.dtype).view(rstd.shape)
    return result if bias is None else result + bias.to(rstd.dtype).view(rstd.shape)


_NO_GRADS = (None,) * 6  # of the buffers and settings
_batch_norm = eager(BatchNorm, _run, tensors=6)
_batch_norm_rung = eager(BatchNormRung, _run_rung, tensors=6)
_batch_norm_backward = eager_backward(
    BatchNorm, _ops.batch_norm_backward.default, 5, formula=gradients
)


def fake_parameter_gradients(weight, bias, statistics, output_mask):
    """Of batch norm's weight and bias, in the dtype that these have, for fake kernels."""
    like = statistics if weight is None and bias is None else bias if weight is None else weight
    channels = statistics.shape[1]
    return tuple(
        statistics.new_empty(channels if wanted else 0, dtype=like.dtype) for wanted in output_mask
    )


def empty_like_input(input):
    """The shape function of what the kernels lay out as their input."""
    if is_channels_last(input):
        return torch.empty_like(input, memory_format=torch.channels_last)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def statistics(input):
    """The shape function of the mean and the reciprocal standard deviation."""
    dtype = statistics_dtype(input)
    return input.new_empty(input.shape[1], dtype=dtype)


def _backward_fake(grad_output, input, weight, mean, rstd, training, output_mask):
    dtype = mean.dtype if weight is None else weight.dtype
    channels = input.shape[1]
    return (
        empty_like_input(input) if output_mask[0] else input.new_empty(0),
        *(input.new_empty(channels if wanted else 0, dtype=dtype) for wanted in output_mask[1:]),
    )


def _fake(input, *_):
    return empty_like_input(input), statistics(input), statistics(input)


register("batch_norm", fake=_fake, autograd=_batch_norm)
register("batch_norm_rung", fake=_fake, autograd=_batch_norm_rung)
register("batch_norm_backward", fake=_backward_fake, autograd=_batch_norm_backward)


def check_count(input):
    if input.dim() < 2 or input.numel() == input.shape[1]:
        values = input.shape[0]
        for extent in input.shape[2:]:
            values *= extent
        if values == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, "
                f"got input size {input.shape}"
            )


def check_settings(running_mean, running_var, training, eps, momentum):
    """torch's checks of them that raise something else than RuntimeError."""
    if momentum is not None and not isinstance(momentum, (float, int, numbers.Real)):
        raise TypeError(
            "batch_norm(): argument 'momentum' (position 7) must be float, "
            f"not {type(momentum).__name__}"
        )
    if training:
        if eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
        if (running_mean is None) != (running_var is None):
            raise ValueError(
                "running_mean and running_var must either both be None or neither be None"
            )
    elif eps < 0.0:
        raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")
    if (running_mean is not None and running_mean.requires_grad) or (
        running_var is not None and running_var.requires_grad
    ):
        raise RuntimeError(
            "The function 'batch_norm' is not differentiable with respect to argument "
            "'running_mean' or 'running_var'. These inputs cannot have requires_grad True."
        )


def batch_norm(
    input,
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    """(input - mean) / sqrt(var + eps) * weight + bias per channel. As
    ``torch.nn.functional.batch_norm``.

    Args:
        input: [N, C, ...]; float64, float32, bfloat16 or float16.
        running_mean, running_var: [C], of input's dtype or, for 16-bit input, float32. In
            evaluation the statistics to use; in training, where given, updated in place as
            (1 - momentum) * running + momentum * batch, with the unbiased variance.
        weight, bias: [C] or None, of input's dtype or, for 16-bit input, float32.
        training: use the batch's own mean and biased variance.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.

    Returns:
        Input's shape, dtype and memory format (contiguous or channels_last). Bitwise repeatable on
        one kind of GPU and on the CPU for any number of threads. Differentiable with respect to
        input, weight and bias; the second derivative and all further ones are made of torch's ops.

        Sums are taken about a value close to the mean and merged in float64 (Chan, Golub and
        LeVeque, 1979), so a mean much larger than the deviation costs no accuracy.

    Raises:
        ValueError: one value per channel in training, `eps` out of range, or only one of
            running_mean and running_var in training.
        TypeError: a momentum that is no number.
        RuntimeError: lengths other than C, no statistics in evaluation, or statistics to overwrite
            that are inference tensors outside of inference mode, or a kernel was chosen
            (:class:`braze.backend`) that cannot take the arguments.
    """
    if momentum is None:
        raise TypeError(
            "batch_norm(): argument 'momentum' (position 7) must be float, not NoneType"
        )
    return batch_norm_counting(
        input, running_mean, running_var, weight, bias, training, momentum, eps, None
    )


def batch_norm_counting(
    input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked
):
    """:func:`batch_norm` that in training also adds one to `num_batches_tracked`, if not None;
    without a momentum, the running statistics become the average over that many batches, or stay as
    they are where nothing counts."""
    if momentum is None and num_batches_tracked is None:
        momentum = 0.0
    ours = plain(input, weight, bias, running_mean, running_var)
    if training and not (ours and kernels_count(num_batches_tracked)):
        count(num_batches_tracked)
        momentum = 1 / float(num_batches_tracked) if momentum is None else momentum
        num_batches_tracked = None
    if not ours:
        norm = running_mean, running_var, weight, bias, training, momentum, eps
        return torch.nn.functional.batch_norm(input, *norm)
    uncounted = num_batches_tracked if training else None
    if input.numel() == 0:
        count(uncounted)
        uncounted = None
    buffers = running_mean, running_var, num_batches_tracked
    try:
        if training:
            check_count(input)
        check_settings(running_mean, running_var, training, eps, momentum)
        compiling = torch.compiler.is_compiling()
        if training and (backend := _config.chosen_backend("batch_norm")) != "auto":
            rung = _ops.batch_norm_rung.default if compiling else _batch_norm_rung
            return rung(input, weight, bias, *buffers, momentum, eps, backend)[0]
        apply = _ops.batch_norm.default if compiling else _batch_norm
        return apply(input, weight, bias, *buffers, training, momentum, eps)[0]
    except Exception:
        count(uncounted)
        raise


def kernels_count(num_batches_tracked):
    """Whether the kernels count in a tensor: not in one of another dtype than int64, such as
    ``module.type(dtype)`` leaves, which casts all buffers."""
    return num_batches_tracked is None or num_batches_tracked.dtype is torch.int64


def count(num_batches_tracked):
    """Counts a batch that no kernel has counted: one of no images, or one that is refused, of which
    torch's layer does not know yet when it counts."""
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
