"""Means of many pairs of tensors in one launch. Kernels: csrc/cuda/mean/."""

import torch

from braze._nvtx import ranged
from braze._ops._common import below_autograd, register

_op = torch.ops.braze.mean_.default


def mean_(outputs, first, second):
    """Writes (first + second) / 2, rounded once, of pairs of dense tensors (of one dtype each) into
    `outputs` (all of one dtype, with their strides)."""
    with below_autograd():
        _op(outputs, first, second)
    torch.autograd.graph.increment_version(outputs)


def _autograd(outputs, first, second):
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*outputs, *first, *second)):
        raise RuntimeError("braze::mean_ is not differentiable; call it under torch.no_grad()")
    mean_(outputs, first, second)


mean_ = ranged("mean", mean_)
register("mean_", fake=lambda outputs, first, second: None, autograd=_autograd)
