"""LAMB in three kernel launches for all parameters of a device and dtype."""

import math

import torch

from braze._ops.lamb import lamb_
from braze.optim import _sharded
from braze.optim._multi_tensor import MultiTensor


class LAMB(MultiTensor, torch.optim.Optimizer):
    """You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (2020),
    algorithm 2: Adam's direction with decoupled weight decay, its length for each parameter set to
    phi of that parameter's norm, phi(z) = min(max(z, lower), upper).

    Where one of the two norms is 0, the direction's length stays as it is. The paper leaves biases
    and normalisations out of weight decay: give them a parameter group of their own. All else as
    :class:`braze.optim.Adam`.

    Args:
        params, lr, betas, eps, weight_decay: as ``torch.optim.AdamW``; eps as in the paper.
        norm_bounds: phi's (lower, upper).
        maximize: as ``torch.optim.AdamW``.
        max_grad_norm: as :class:`braze.optim.Adam`.

    Raises:
        ValueError, RuntimeError: as :class:`braze.optim.Adam`. RuntimeError for a DTensor: the
            norms have to be of whole parameters.
    """

    _kinds = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=1e-2,
        norm_bounds=(0.0, math.inf),
        *,
        maximize=False,
        max_grad_norm=None,
    ):
        self._refuse(weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        # torch's checks.
        torch.optim.AdamW([torch.zeros(1)], lr, betas, eps, weight_decay)
        low, high = norm_bounds
        if not 0 <= low <= high:
            raise ValueError(f"Invalid norm_bounds: {norm_bounds}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_bounds": norm_bounds,
            "maximize": maximize,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.max_grad_norm = max_grad_norm

    def _wanted(self, group):
        return True, True

    def _state_of(self, group, p, wanted):
        if _sharded.is_sharded(p):
            raise RuntimeError(
                "braze.optim.LAMB does not support DTensor parameters: it needs whole norms"
            )
        return super()._state_of(group, p, wanted)

    def _update(self, group, launch, shared):
        lr, lr_tensor = self._rate(group, launch.params[0].device)
        beta1, beta2 = group["betas"]
        lamb_(
            launch.params,
            launch.grads,
            *launch.states,
            launch.steps,
            *self._casts(launch),
            lr,
            float(beta1),
            float(beta2),
            group["eps"],
            group["weight_decay"],
            *map(float, group["norm_bounds"]),
            group["maximize"],
            lr_tensor,
            *shared,
        )
