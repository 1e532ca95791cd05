"""SGD with one kernel launch for all parameters of a device and dtype."""

import torch

from braze._ops.sgd import sgd_
from braze.optim import _sharded
from braze.optim._multi_tensor import MultiTensor


class SGD(MultiTensor, torch.optim.SGD):
    """``torch.optim.SGD``, its update one launch per parameter group, device and dtype.

    Constructor, state dict, hooks and learning-rate schedulers are torch's. A 1-element float32 or
    float64 tensor as `lr` on the parameters' device is read by the kernel: a captured CUDA graph
    follows its changes. 16-bit parameters are computed in float32 and rounded once. Works with
    ``torch.amp.GradScaler`` without waiting for the GPU; the gradients themselves stay scaled.
    Bitwise repeatable. Parameters that are DTensors (FSDP2's ``fully_shard``, tensor parallelism)
    are updated on each rank's shard; their momentum buffers are DTensors as torch's are.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as torch.
        foreach, fused: accepted; the update is always fused.
        differentiable: only False.
        max_grad_norm: clips the norm of all gradients together, as
            ``torch.nn.utils.clip_grad_norm_`` before each step would; gradients themselves stay as
            they are. The norm is then `grad_norm`, a tensor that the next step may overwrite.

    Raises:
        ValueError: settings out of range, as torch; a tensor as `weight_decay`.
        RuntimeError: ``differentiable=True``; from ``step()``, a sparse gradient, a parameter
            that is not float64, float32, bfloat16 or float16, or a momentum buffer of another dtype
            than its parameter (after ``model.bfloat16()``, for example), an inference tensor
            outside of inference mode, a DTensor together with a plain tensor or one of another
            mesh. Nothing has been updated then.
    """

    _kinds = ("momentum_buffer",)
    # Parameter -> a tensor that is not 0 while its momentum buffer holds zeros in place of nothing:
    # a GradScaler may have the launch skip the first step, of which the host learns nothing. With
    # dampening zeros would not do. Not in `state`, which is torch's.
    _unwritten = {}  # noqa: RUF012

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
        max_grad_norm=None,
    ):
        self._refuse(
            differentiable=differentiable, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
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
        self.max_grad_norm = max_grad_norm

    def state_dict(self):
        """As torch's. A first step that a GradScaler skips leaves no momentum buffer: to find out,
        this waits for the GPU where `dampening` is used."""
        result = super().state_dict()
        if self._unwritten:
            owners = [p for group in self.param_groups for p in group["params"]]
            for index, p in enumerate(owners):
                if p in self._unwritten and self._unwritten[p].item() and index in result["state"]:
                    kept = result["state"][index].copy()
                    kept.pop("momentum_buffer", None)
                    result["state"][index] = kept
        return result

    def __getstate__(self):
        return {**super().__getstate__(), "_unwritten": self._unwritten}

    def __setstate__(self, state):
        self._unwritten = {}  # of the state that is replaced
        super().__setstate__(state)

    def _wanted(self, group):
        return (group["momentum"] != 0,)

    def _state_of(self, group, p, wanted):
        buffer = self.state[p].get("momentum_buffer") if wanted[0] else None
        first_step = wanted[0] and buffer is None
        unwritten = None if buffer is None else self._unwritten.get(p)
        return [buffer], None, (first_step, id(unwritten))

    def _repeats(self, launch):
        first_step, _ = launch.shared
        return not first_step and not self._unwritten

    def _update(self, group, launch, shared):
        params, owners, (buffers,) = launch.params, launch.owners, launch.states
        first_step = launch.shared[0]
        unwritten = self._unwritten.get(owners[0]) if buffers else None
        device = params[0].device
        grad_scale, found_inf, *rest, _ = shared
        made = None
        if first_step:
            # Zeros where the launch may find that it must not write.
            make = torch.empty_like if found_inf is None else torch.zeros_like
            made = [make(p, requires_grad=False) for p in owners]
            buffers = _sharded.locals_of(made)
            if found_inf is not None and group["dampening"] != 0:
                unwritten = torch.ones((), device=device)
        elif unwritten is not None:
            unwritten = self._own_flag(owners, unwritten)
        lr, lr_tensor = self._rate(group, device)
        sgd_(
            params,
            launch.grads,
            buffers,
            *self._casts(launch),
            lr,
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
            first_step,
            lr_tensor,
            grad_scale,
            found_inf,
            unwritten,
            *rest,
        )
        if made is not None:
            # Only now: a launch that was refused leaves no buffers that nobody has written.
            for p, buffer in zip(owners, made, strict=True):
                self.state[p]["momentum_buffer"] = buffer
            self._keep_unwritten(owners, unwritten)
        if unwritten is None:
            return
        if found_inf is None:
            unwritten.zero_()
        else:
            torch.minimum(unwritten, found_inf, out=unwritten)

    def _own_flag(self, owners, unwritten):
        """`unwritten`, or a copy where other parameters, which have no gradient now, share it."""
        if sum(flag is unwritten for flag in self._unwritten.values()) == len(owners):
            return unwritten
        if unwritten.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "braze.optim.SGD: a step is captured in a CUDA graph that updates other parameters "
                "than the step before did; take one like it outside of the graph first"
            )
        unwritten = unwritten.clone()
        self._keep_unwritten(owners, unwritten)
        return unwritten

    def _keep_unwritten(self, owners, unwritten):
        if unwritten is not None:
            self._unwritten = {**self._unwritten, **dict.fromkeys(owners, unwritten)}
        elif self._unwritten:
            gone = set(owners)
            self._unwritten = {p: flag for p, flag in self._unwritten.items() if p not in gone}
