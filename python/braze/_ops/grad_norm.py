"""The norm of all gradients together. Kernels: csrc/cuda/grad_norm/."""

import torch

from braze._nvtx import ranged
from braze._ops._common import below_autograd, register

_op = torch.ops.braze.grad_norm.default


def grad_norm(grads, grad_scale, tickets):
    """The 2-norm of the tensors as one vector, divided by `grad_scale`: a float64 scalar."""
    with below_autograd():
        return _op(grads, grad_scale, tickets)


def _fake(grads, grad_scale=None, tickets=None):
    return grads[0].new_empty((), dtype=torch.float64)


def _autograd(grads, *settings):
    if torch.is_grad_enabled() and any(g.requires_grad for g in grads):
        raise RuntimeError("braze::grad_norm is not differentiable; call it under torch.no_grad()")
    with below_autograd():
        return _op(grads, *settings)


grad_norm = ranged("grad_norm", grad_norm)
register("grad_norm", fake=_fake, autograd=_autograd)
