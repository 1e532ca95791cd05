"""Where ``auto`` takes our kernels of layer norm and group norm (instance norm's too), and where
torch's function.

The rules are made from the committed rows of ``python -m braze bench layer_norm`` and
``group_norm`` (``benchmarks/results/``). What has no rows goes to torch's. A rule asks for the
device, the dtype and the length of a row. While torch.compile traces, torch's function is taken in
any case: the compiler fuses it with what stands beside it.
"""

import torch

from braze import _config

#: By op and device: from how many elements of a row on, and up to how many, ours was measured to be
#: faster in each dtype, forward and backward together; for example {torch.float32: (64, 8192)}.
FASTER = {
    ("layer_norm", "cuda"): {},
    ("layer_norm", "cpu"): {},
    ("group_norm", "cuda"): {},
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


def takes_ours(op, input, size):
    """Whether a public function gives its arguments to braze's op.

    Args:
        op: the name of the op, as :class:`braze.backend` has it.
        input: the tensor that is normalised.
        size: how many elements of it are normalised together.
    """
    if _config.chosen_backend(op) != "auto":
        return True
    if torch.compiler.is_compiling():
        return False
    measured = FASTER.get((op, input.device.type), {}).get(input.dtype)
    return measured is not None and measured[0] <= size <= measured[1]


def parameters_fit(input, weight, bias):
    """Whether the ops take these dtypes together."""
    found = {p.dtype for p in (weight, bias) if p is not None}
    if not found:
        return True
    is_half = input.dtype in (torch.bfloat16, torch.float16)
    allowed = (input.dtype, torch.float32) if is_half else (input.dtype,)
    return len(found) == 1 and found.pop() in allowed
