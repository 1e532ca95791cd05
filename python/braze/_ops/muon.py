"""The ops of braze.optim.Muon: momentum of all parameters, and the polynomial of a Newton-Schulz
iteration. Kernels: csrc/cuda/muon/."""

import torch

from braze._nvtx import ranged
from braze._ops._common import below_autograd, overwrite, register
from braze._ops._update import update_op

muon_momentum_ = update_op("muon_momentum_", states=1, averages=None)

_polynomial = torch.ops.braze.muon_polynomial_.default


def muon_polynomial_(gram, square, a, b, c):
    """Overwrites `square` with a I + b gram + c square; both are contiguous batches of matrices."""
    with below_autograd():
        overwrite([square], _polynomial, gram, square, a, b, c)


def _autograd(gram, square, *coefficients):
    if torch.is_grad_enabled() and (gram.requires_grad or square.requires_grad):
        raise RuntimeError(
            "braze::muon_polynomial_ is not differentiable; call it under torch.no_grad()"
        )
    muon_polynomial_(gram, square, *coefficients)


muon_polynomial_ = ranged("muon_polynomial", muon_polynomial_)
register("muon_polynomial_", fake=lambda *args: None, autograd=_autograd)
