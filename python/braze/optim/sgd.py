"""SGD with one kernel launch for all parameters of a device and dtype."""

import operator
from typing import NamedTuple

import torch

from braze._ops._common import FLOAT_DTYPES
from braze._ops.sgd import sgd_
from braze._step_scope import current
from braze.optim import _sharded

_PLAIN = (torch.nn.Parameter, torch.Tensor)
_dtype = operator.attrgetter("dtype")


class _Launch(NamedTuple):
    """What one launch updates. The lists are parallel, but that `buffers` is empty without momentum
    and where the buffers are still to be made."""

    params: list
    grads: list
    buffers: list
    first_step: bool
    unwritten: torch.Tensor | None  # as the op takes it
    owners: list  # of `params`: the same list, but for parts of DTensors


class SGD(torch.optim.SGD):
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

    Raises:
        ValueError: settings out of range, as torch; a tensor as `weight_decay`.
        RuntimeError: ``differentiable=True``; from ``step()``, a sparse gradient, a parameter
            that is not float64, float32, bfloat16 or float16, or a momentum buffer of another dtype
            than its parameter (after ``model.bfloat16()``, for example), an inference tensor
            outside of inference mode, a DTensor together with a plain tensor or one of another
            mesh. Nothing has been updated then.
    """

    # GradScaler leaves unscaling and the check for infinities to step().
    _step_supports_amp_scaling = True
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
            (group, launch) for group in self.param_groups for launch in self._launches(group)
        ]
        for _, launch in launches[1:]:  # the op checks its own launch before it writes
            _check(launch)
        for group, launch in launches:
            self._update(group, launch, found_inf)
        return loss

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

    def _launches(self, group):
        """The group's :class:`_Launch` for each device and dtype, checked."""
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
            owner, sharded = p, type(p) not in _PLAIN and _sharded.is_sharded(p)
            if sharded:
                p, grad, buffer = _sharded.local(p, grad, buffer)
            unwritten = None
            if self._unwritten and buffer is not None:
                unwritten = self._unwritten.get(owner)
            key = (p.device, p.dtype, first_step, sharded, id(unwritten))
            launch = launches.get(key)
            if launch is None:
                params = []
                owners = [] if sharded else params
                launch = launches[key] = _Launch(params, [], [], first_step, unwritten, owners)
            launch[0].append(p)
            launch[1].append(grad)
            if buffer is not None:
                launch[2].append(buffer)
            if sharded:
                launch.owners.append(owner)
        return launches.values()

    def _update(self, group, launch, found_inf):
        params, grads, buffers, first_step, unwritten, owners = launch
        device = params[0].device
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
        lr, lr_tensor = group["lr"], None
        if isinstance(lr, torch.Tensor):
            if lr.device == device and lr.dtype in (torch.float32, torch.float64):
                lr, lr_tensor = 0.0, lr
            else:
                lr = lr.item()
        grad_scale = getattr(self, "grad_scale", None)
        casts, scope = ((), ()), current.scope
        sources = None if scope is None else scope.sources_of(self)
        if sources:
            cast = [g for g in grads if g.data_ptr() in sources]
            casts = cast, [sources[g.data_ptr()] for g in cast]
        found_inf = None if found_inf is None else found_inf.to(device)
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
            found_inf,
            unwritten,
        )
        if owners is not params:  # their own counters know nothing of what the op has written
            torch.autograd.graph.increment_version(owners)
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


def _check(launch):
    """Raises where the op would refuse what this optimizer's errors promise to find beforehand."""
    wanted = launch.params[0].dtype
    others = set(map(_dtype, launch.grads + launch.buffers)) - {wanted}
    if others:
        raise RuntimeError(
            "braze.optim.SGD: expected gradients and momentum buffers of the parameters' dtype "
            f"{wanted}, but got {', '.join(map(str, others))}"
        )
    written = launch.params + launch.buffers
    if any(map(torch.Tensor.is_inference, written)) and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "braze.optim.SGD would overwrite an inference tensor outside of inference mode"
        )
