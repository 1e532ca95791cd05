"""Batch norm over the batches of several processes: autograd Function, fake kernels. Kernels:
csrc/cuda/batch_norm/."""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from braze._ops._common import below_autograd, overwrite, register, statistics_dtype
from braze._ops.batch_norm import check_settings, empty_like_input

_ops = torch.ops.braze


class SyncBatchNorm(torch.autograd.Function):
    """One exchange forward, of the moments, and one backward, of the gradients' sums; both of a few
    numbers per channel in float64."""

    @staticmethod
    def forward(ctx, input, weight, bias, running_mean, running_var, batches, momentum, eps, group):
        buffers = running_mean, running_var, batches
        with below_autograd():
            moments = _gathered(_ops.sync_batch_norm_moments.default(input), group)
            output, statistics, total = overwrite(
                buffers, _ops.sync_batch_norm.default,
                input, moments, weight, bias, *buffers, momentum, eps,
            )  # fmt: skip
        ctx.save_for_backward(input, weight, statistics, total)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        input, weight, statistics, total = ctx.saved_tensors
        arguments = grad_output, input, weight, statistics
        sums, grad_weight, grad_bias = _ops.sync_batch_norm_sums.default(*arguments)
        grad_input = None
        if ctx.needs_input_grad[0]:
            dist.all_reduce(sums, group=ctx.group)
            grad_input = _ops.sync_batch_norm_input_grad.default(*arguments, sums, total)
        return (
            grad_input,
            grad_weight if ctx.needs_input_grad[1] else None,
            grad_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *(None,) * 6,
        )


def _gathered(moments, group):
    """[C, processes, 3] of each process's [C, 3]."""
    channels, processes = moments.shape[0], dist.get_world_size(group)
    gathered = moments.new_empty(processes * channels, 3)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
    gather(gathered, moments, group=group)
    return gathered.view(processes, channels, 3).transpose(0, 1).contiguous()


def sync_batch_norm(input, mean, var, weight, bias, momentum, eps, batches, group):
    """:func:`braze.nn.functional.batch_norm` in training, by the moments of the batches of all
    processes in `group`, each of which calls it. Not differentiable twice.

    Args:
        batches: int64, counted up by one; None where nothing counts.
        momentum: None: 1 / `batches`.
    """
    check_settings(mean, var, True, eps, momentum)
    if momentum is None and batches is None:
        momentum = 0.0
    return SyncBatchNorm.apply(input, weight, bias, mean, var, batches, momentum, eps, group)


def _statistics(input):
    dtype = statistics_dtype(input)
    return input.new_empty((4, input.shape[1]), dtype=dtype)


def _moments_fake(input):
    return input.new_empty((input.shape[1], 3), dtype=torch.float64)


def _fake(input, *_):
    return empty_like_input(input), _statistics(input), input.new_empty(1, dtype=torch.float64)


def _sums_fake(grad_output, input, weight, statistics):
    channels, dtype = input.shape[1], statistics.dtype if weight is None else weight.dtype
    sums = input.new_empty((channels, 2), dtype=torch.float64)
    return sums, *(input.new_empty(channels, dtype=dtype) for _ in range(2))


def _input_grad_fake(grad_output, input, *_):
    return empty_like_input(input)


register("sync_batch_norm_moments", fake=_moments_fake)
register("sync_batch_norm", fake=_fake)
register("sync_batch_norm_sums", fake=_sums_fake)
register("sync_batch_norm_input_grad", fake=_input_grad_fake)
