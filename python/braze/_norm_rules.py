"""Where ``auto`` takes our kernels of layer norm and group norm (instance norm's too), and where
torch's function.

The rules are made from the committed rows of ``python -m braze bench layer_norm`` and
``group_norm`` (``benchmarks/results/``). What has no rows goes to torch's. A rule asks for the
device, the dtype, the length of a row and the size of the tensor. While torch.compile traces,
torch's function is taken in any case: the compiler fuses it with what stands beside it.
"""

import typing

import torch

from braze import _config
from braze._ops._common import HALF_DTYPES


class Faster(typing.NamedTuple):
    """Where ours was measured to be faster, forward and backward together.

    Attributes:
        shortest, longest: rows, in elements.
        least: elements of the whole tensor; smaller ones wait for launches.
        shortest_uncast: rows, where torch's function casts before and behind, and ours does not.
    """

    shortest: int
    longest: int
    least: int = 0
    shortest_uncast: int = 0


#: By op and device, and by dtype; float16's kernels are bfloat16's with another conversion.
FASTER = {
    # On an H200 1.2 to 7 times torch's speed. Of 64 rows of 768 elements level with it.
    ("layer_norm", "cuda"): dict.fromkeys(
        (*HALF_DTYPES, torch.float32), Faster(96, 1 << 16, 1 << 21, 32)
    ),
    ("layer_norm", "cpu"): {},
    # On an H200, groups of 1024 to 2^18 elements 1.2 to 7.9 times torch's speed, whichever layout
    # (backward of single channels, instance norm, from 1.1 on), of 800,000 elements 6 to 10 times.
    ("group_norm", "cuda"): dict.fromkeys(
        (*HALF_DTYPES, torch.float32), Faster(1024, 1 << 20, 1 << 21, 128)
    ),
    ("group_norm", "cpu"): {},
}


def may_take_ours(op, input):
    """Whether to ask :func:`takes_ours` at all: cheap, for calls that go to torch's in any case.

    Args:
        op: the name of the op, as :class:`braze.backend` has it.
        input: what is to be normalised, a tensor or not.
    """
    if _config.chosen_backend(op) != "auto":
        return True
    return bool(FASTER[op, "cuda" if getattr(input, "is_cuda", False) else "cpu"])


def takes_ours(op, input, size, saves_casts=False, of_any_size=False):
    """Whether a public function gives its arguments to braze's op.

    Args:
        op: the name of the op, as :class:`braze.backend` has it.
        input: the tensor that is normalised.
        size: how many elements of it are normalised together.
        saves_casts: whether torch's function casts before and behind.
        of_any_size: whether the launches of these cost more than small tensors wait for ours.
    """
    if _config.chosen_backend(op) != "auto":
        return True
    if torch.compiler.is_compiling():
        return False
    measured = FASTER.get((op, input.device.type), {}).get(input.dtype)
    if measured is None:
        return False
    shortest = measured.shortest_uncast if saves_casts else measured.shortest
    return shortest <= size <= measured.longest and (of_any_size or input.numel() >= measured.least)


def parameters_fit(input, weight, bias):
    """Whether the ops take these dtypes together."""
    found = {p.dtype for p in (weight, bias) if p is not None}
    if not found:
        return True
    is_half = input.dtype in HALF_DTYPES
    allowed = (input.dtype, torch.float32) if is_half else (input.dtype,)
    return len(found) == 1 and found.pop() in allowed
