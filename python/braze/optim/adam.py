"""Adam and AdamW with one kernel launch for all parameters of a device and dtype."""

import torch

from braze._ops.adam import adam_
from braze.optim._multi_tensor import MultiTensor


class _AdamUpdate(MultiTensor):
    """What Adam and AdamW share: all but their constructors."""

    _kinds = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _sparse_hint = ", please consider SparseAdam instead"

    def _wanted(self, group):
        return True, True, group["amsgrad"]

    def _update(self, group, launch, shared):
        device = launch.params[0].device
        lr, lr_tensor = self._rate(group, device)
        beta1, beta2 = group["betas"]
        adam_(
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
            group["decoupled_weight_decay"],
            group["amsgrad"],
            group["maximize"],
            lr_tensor,
            *shared,
        )


class Adam(_AdamUpdate, torch.optim.Adam):
    """``torch.optim.Adam``, its update one launch per parameter group, device and dtype.

    Constructor, state dict, hooks and learning-rate schedulers are torch's; a state dict of
    torch's Adam goes on here, and back. Steps are counted on the parameters' device. A 1-element
    float32 or float64 tensor as `lr` on that device is read by the kernel: a captured CUDA graph
    follows its changes. 16-bit parameters are computed in float32 and rounded once. Works with
    ``torch.amp.GradScaler`` without waiting for the GPU; the gradients themselves stay scaled.
    Bitwise repeatable. DTensors are updated on each rank's shard. Formulas and sources:
    docs/optimizers.md.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as torch.
        foreach, fused, capturable: accepted; the update is always fused, and capturable.
        differentiable: only False.
        max_grad_norm: clips the norm of all gradients together, as
            ``torch.nn.utils.clip_grad_norm_`` before each step would; gradients themselves stay as
            they are. The norm is then `grad_norm`, a tensor that the next step may overwrite.

    Raises:
        ValueError: settings out of range, as torch; a tensor as `weight_decay`.
        RuntimeError: ``differentiable=True``; from ``step()``, a sparse gradient, a parameter
            that is not float64, float32, bfloat16 or float16, or a state of another dtype than its
            parameter, an inference tensor outside of inference mode, a DTensor together with a
            plain tensor or one of another mesh. Nothing has been updated then.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        *,
        foreach=None,
        maximize=False,
        capturable=False,
        differentiable=False,
        fused=None,
        decoupled_weight_decay=False,
        max_grad_norm=None,
    ):
        self._refuse(
            differentiable=differentiable, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self.max_grad_norm = max_grad_norm


class AdamW(_AdamUpdate, torch.optim.AdamW):
    """``torch.optim.AdamW``, its update one launch per parameter group, device and dtype.

    All else as :class:`braze.optim.Adam`.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as torch.
        foreach, fused, capturable, differentiable, max_grad_norm: as :class:`braze.optim.Adam`.

    Raises:
        ValueError, RuntimeError: as :class:`braze.optim.Adam`.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        max_grad_norm=None,
    ):
        self._refuse(
            differentiable=differentiable, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self.max_grad_norm = max_grad_norm
