"""Casts of many tensors in one launch. Kernels: csrc/cuda/cast/."""

import torch

from braze._nvtx import ranged
from braze._ops._common import below_autograd, register

_op = torch.ops.braze.cast_.default


def cast_(outputs, inputs):
    """Writes `inputs` (dense, of one dtype) into `outputs` (of one dtype, with their strides);
    where both have the same, bit by bit."""
    with below_autograd():
        _op(outputs, inputs)
    torch.autograd.graph.increment_version(outputs)


def _autograd(outputs, inputs):
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*outputs, *inputs)):
        raise RuntimeError("braze::cast_ is not differentiable; call it under torch.no_grad()")
    cast_(outputs, inputs)


cast_ = ranged("cast", cast_)
register("cast_", fake=lambda outputs, inputs: None, autograd=_autograd)


class SharedCasts:
    """A name that pickles of a :class:`braze.TrainStep` of version 0.1.0 load; they make no use of
    what it was."""
