"""The ops of braze.optim.Muon: momentum of all parameters, their matrices into batches and out of
them, and the polynomial of a Newton-Schulz iteration. Kernels: csrc/cuda/muon/."""

import torch

from braze import _lib
from braze._nvtx import ranged
from braze._ops._common import below_autograd, overwrite, register
from braze._ops._update import update_op

muon_momentum_ = update_op("muon_momentum_", states=1, averages=None)

_normalize = torch.ops.braze.muon_normalize_.default
_polynomial = torch.ops.braze.muon_polynomial_.default
_unpad = torch.ops.braze.muon_unpad_.default


def squares_for(updates):
    """Memory for the sums of squares that :func:`muon_momentum_` leaves of each of its updates, of
    which there is at least one: float64, one behind the other."""
    count = sum(-(-u.numel() // _lib.limits["muon_squares"]) for u in updates)
    return torch.empty(count, dtype=torch.float64, device=updates[0].device)


def muon_normalize_(outputs, inputs, eps, squares=None):
    """Writes inputs / max(norm, eps) into the upper left corners of `outputs`, and zeros elsewhere.

    Args:
        outputs: contiguous matrices in bfloat16, at least as large as the inputs.
        inputs: of one dtype, dense, each index of the first dimension (a row) in its own part of
            memory.
        squares: as :func:`squares_for` has it of the inputs, with the sums that
            :func:`muon_momentum_` has left; else a pass over the inputs makes them.
    """
    with below_autograd():
        overwrite(outputs, _normalize, outputs, inputs, eps, squares)


def muon_unpad_(outputs, inputs):
    """The inverse but for the norm: the corners of the contiguous matrices `inputs`; all of it is
    in bfloat16."""
    with below_autograd():
        overwrite(outputs, _unpad, outputs, inputs)


def muon_polynomial_(gram, square, a, b, c):
    """Overwrites `square` with a I + b gram + c square; both are contiguous batches of matrices."""
    with below_autograd():
        overwrite([square], _polynomial, gram, square, a, b, c)


def _register(function, tensors):
    """tensors: a function of the op's arguments, which returns a list."""
    name = function.__name__
    function = ranged(name.removesuffix("_"), function)

    def autograd(*args):
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors(*args)):
            raise RuntimeError(
                f"braze::{name} is not differentiable; call it under torch.no_grad()"
            )
        function(*args)

    register(name, fake=lambda *args: None, autograd=autograd)
    return function


muon_normalize_ = _register(muon_normalize_, lambda outputs, inputs, *_: [*outputs, *inputs])
muon_polynomial_ = _register(muon_polynomial_, lambda gram, square, *_: [gram, square])
muon_unpad_ = _register(muon_unpad_, lambda outputs, inputs: [*outputs, *inputs])
