"""NVTX ranges around braze's ops and steps, for Nsight Systems: ``BRAZE_NVTX=1`` before import.

A range covers what the CPU does for an op. The replay of a captured step is one range: what is
within it has been launched as a whole, and `python -m braze mnist --profile` says which kernel
belongs to which op.
"""

import functools
import os

import torch

ENABLED = os.environ.get("BRAZE_NVTX") == "1" and torch.version.cuda is not None


def ranged(name, function):
    """`function` with an NVTX range around each call; `function` itself where they are off."""
    if not ENABLED:
        return function

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        torch.cuda.nvtx.range_push(f"braze::{name}")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.nvtx.range_pop()

    return call
