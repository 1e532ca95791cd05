"""RMSprop with one kernel launch for all parameters of a device and dtype."""

import torch

from braze._ops.rmsprop import rmsprop_
from braze.optim._multi_tensor import MultiTensor


class RMSprop(MultiTensor, torch.optim.RMSprop):
    """``torch.optim.RMSprop``, its update one launch per parameter group, device and dtype.

    All else as :class:`braze.optim.Adam`.

    Args:
        params, lr, alpha, eps, weight_decay, momentum, centered, maximize: as torch.
        foreach, capturable, differentiable, max_grad_norm: as :class:`braze.optim.Adam`.

    Raises:
        ValueError, RuntimeError: as :class:`braze.optim.Adam`.
    """

    _kinds = ("square_avg", "momentum_buffer", "grad_avg")

    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.99,
        eps=1e-8,
        weight_decay=0,
        momentum=0,
        centered=False,
        capturable=False,
        foreach=None,
        maximize=False,
        differentiable=False,
        *,
        max_grad_norm=None,
    ):
        self._refuse(
            differentiable=differentiable, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        super().__init__(
            params,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
        )
        self.max_grad_norm = max_grad_norm

    def _wanted(self, group):
        return True, group["momentum"] > 0, group["centered"]

    def _update(self, group, launch, shared):
        lr, lr_tensor = self._rate(group, launch.params[0].device)
        rmsprop_(
            launch.params,
            launch.grads,
            *launch.states,
            launch.steps,
            *self._casts(launch),
            lr,
            group["alpha"],
            group["eps"],
            group["weight_decay"],
            group["momentum"],
            group["centered"],
            group["maximize"],
            lr_tensor,
            *shared[:-1],
        )
