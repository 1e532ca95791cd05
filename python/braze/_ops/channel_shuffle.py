"""Channel shuffle: public function, autograd Function, fake kernel. Kernels:
csrc/cuda/cat/channel_shuffle.cu."""

import torch

from braze._ops._common import (
    below_autograd,
    check_tensor,
    eager,
    is_channels_last,
    plain,
    register,
)

_ops = torch.ops.braze

#: On which devices :func:`channel_shuffle` is the op.
SHUFFLE_ON = ("cuda",)


class ChannelShuffle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, groups):
        ctx.groups = groups
        with below_autograd():
            return _ops.channel_shuffle.default(input, groups)

    @staticmethod
    def backward(ctx, grad_output):
        return _channel_shuffle(grad_output, grad_output.shape[1] // ctx.groups), None


def _formula(input, groups):
    split = input.unflatten(1, (groups, -1))
    return split.transpose(1, 2).flatten(1, 2)


_channel_shuffle = eager(ChannelShuffle, _ops.channel_shuffle.default, tensors=1, formula=_formula)


def _fake(input, groups):
    return torch.empty_like(input, memory_format=torch.channels_last)


register("channel_shuffle", fake=_fake, autograd=_channel_shuffle)


def shuffle_takes(input, groups):
    """Whether :func:`channel_shuffle` of such arguments is the op."""
    return (
        type(groups) is int
        and plain(input)
        and input.device.type in SHUFFLE_ON
        and input.dim() == 4
        and input.shape[1] > 1
        and groups > 0
        and input.shape[1] % groups == 0
        and is_channels_last(input)
    )


def channel_shuffle(input, groups):
    """Channels dealt out anew: those of `groups` groups, one of each in turn. As
    ``torch.nn.functional.channel_shuffle``, but what is channels_last stays so, also on a GPU,
    where torch's result is contiguous and every layer behind it copies.

    X. Zhang et al., ShuffleNet: An extremely efficient convolutional neural network for mobile
    devices (2018).

    Args:
        input: [N, C, H, W], channels_last and on a GPU; float64, float32, bfloat16 or float16. All
            else is torch's.
        groups: a divisor of C.

    Returns:
        Same shape, channels_last. Differentiable any number of times.

    Raises:
        TypeError: input is not a tensor.
        RuntimeError: as torch.
    """
    check_tensor("channel_shuffle", "input", 1, input)
    if not shuffle_takes(input, groups):
        return torch.nn.functional.channel_shuffle(input, groups)
    if torch.compiler.is_compiling():
        return _ops.channel_shuffle(input, groups)
    return _channel_shuffle(input, groups)
