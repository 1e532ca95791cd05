"""SGD with one kernel launch for all parameters of a device and dtype."""

import torch

from braze._ops._common import FLOAT_DTYPES
from braze._ops.sgd import sgd_


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``, its update one launch per parameter group, device and dtype.

    Constructor, state dict, hooks and learning-rate schedulers are torch's. A 1-element float32 or
    float64 tensor as `lr` on the parameters' device is read by the kernel: a captured CUDA graph
    follows its changes. 16-bit parameters are computed in float32 and rounded once. Works with
    ``torch.amp.GradScaler`` without waiting for the GPU; the gradients themselves stay scaled.
    Bitwise repeatable.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as torch.
        foreach, fused: accepted; the update is always fused.
        differentiable: only False.

    Raises:
        ValueError: settings out of range, as torch; a tensor as `weight_decay`.
        RuntimeError: ``differentiable=True``; from ``step()``, a sparse gradient, a parameter
            that is not float64, float32, bfloat16 or float16, or a momentum buffer of another dtype
            than its parameter (after ``model.bfloat16()``, for example), an inference tensor
            outside of inference mode. Nothing has been updated then.
    """

    # GradScaler leaves unscaling and the check for infinities to step().
    _step_supports_amp_scaling = True
    # What TrainStep leaves to step(): address of a gradient -> tensor of which it is to be a cast.
    _sources = None

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        *,
        maximize=False,
        foreach=None,
        differentiable=False,
        fused=None,
    ):
        if differentiable:
            raise RuntimeError("braze.optim.SGD does not support differentiable=True")
        if isinstance(weight_decay, torch.Tensor):
            raise ValueError("braze.optim.SGD: expected weight_decay to be a number, not a tensor")
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        launches = [
            (group, *launch) for group in self.param_groups for launch in self._launches(group)
        ]
        for launch in launches:
            self._update(*launch, found_inf)
        return loss

    def _launches(self, group):
        """(params, grads, momentum buffers, whether those are still to be made), checked."""
        launches = {}
        with_momentum = group["momentum"] != 0
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError("braze.optim.SGD does not support sparse gradients")
            if p.dtype not in FLOAT_DTYPES:
                raise RuntimeError(
                    "braze.optim.SGD: expected parameters of dtype float64, float32, bfloat16 or "
                    f"float16, but got {p.dtype}"
                )
            buffer = self.state[p].get("momentum_buffer") if with_momentum else None
            first_step = with_momentum and buffer is None
            key = (p.device, p.dtype, first_step)
            launch = launches.get(key)
            if launch is None:
                launch = launches[key] = ([], [], [], first_step)
            launch[0].append(p)
            launch[1].append(grad)
            if buffer is not None:
                launch[2].append(buffer)
        return launches.values()

    def _update(self, group, params, grads, buffers, first_step, found_inf):
        device = params[0].device
        if first_step:
            # Zeros where the launch may find that it must not write.
            make = torch.empty_like if found_inf is None else torch.zeros_like
            buffers = [make(p, requires_grad=False) for p in params]
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer
        lr, lr_tensor = group["lr"], None
        if isinstance(lr, torch.Tensor):
            if lr.device == device and lr.dtype in (torch.float32, torch.float64):
                lr, lr_tensor = 0.0, lr
            else:
                lr = lr.item()
        grad_scale = getattr(self, "grad_scale", None)
        casts = (), ()
        if self._sources:
            cast = [g for g in grads if g.data_ptr() in self._sources]
            casts = cast, [self._sources[g.data_ptr()] for g in cast]
        sgd_(
            params,
            grads,
            buffers,
            casts,
            lr,
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
            first_step,
            lr_tensor,
            None if grad_scale is None else grad_scale.to(device),
            None if found_inf is None else found_inf.to(device),
        )
