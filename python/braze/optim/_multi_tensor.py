"""What braze's optimizers share: a launch per parameter group, device and dtype."""

import itertools
import operator

import torch

from braze._ops._common import FLOAT_DTYPES
from braze._ops.grad_norm import grad_norm
from braze._step_scope import current
from braze.optim import _sharded

_PLAIN = (torch.nn.Parameter, torch.Tensor)
_TICKETS = 1024  # as csrc/launchers/common/update.h has it
_device, _dtype, _grad, _layout = map(operator.attrgetter, ("device", "dtype", "grad", "layout"))


class Launch:
    """What one launch updates, in parallel lists: `states` has a list for each kind of state, which
    is empty where there are none."""

    def __init__(self, kinds, shared, sharded):
        self.params, self.grads, self.steps, self.averages = [], [], [], []
        self.states = [[] for _ in range(kinds)]
        #: of `params`: the same list, but for parts of DTensors
        self.owners = [] if sharded else self.params
        #: what the parameters of a launch have in common: see :meth:`MultiTensor._state_of`
        self.shared = shared

    def with_gradients(self, grads):
        """The same of another step; neither sharded nor with averages."""
        launch = Launch(len(self.states), self.shared, False)
        launch.params.extend(self.params)
        launch.grads, launch.steps, launch.states = grads, self.steps, self.states
        return launch


class MultiTensor:
    """A base beside torch's class: ``class Adam(MultiTensor, torch.optim.Adam)``.

    Works with ``torch.amp.GradScaler`` without waiting for the GPU. Nothing has been updated where
    ``step()`` refuses something.
    """

    # GradScaler leaves unscaling and the check for infinities to step().
    _step_supports_amp_scaling = True
    #: the states of a parameter, in the op's order
    _kinds = ()
    #: as part of an error
    _sparse_hint = ""

    #: see the constructors
    max_grad_norm = grad_norm = None
    _average = None  # of an EMA

    def _refuse(self, *, differentiable=False, weight_decay=0, max_grad_norm=None):
        """Raises for arguments out of range, and for what torch's class takes but this does not."""
        name = type(self).__name__
        if differentiable:
            raise RuntimeError(f"braze.optim.{name} does not support differentiable=True")
        if isinstance(weight_decay, torch.Tensor):
            raise ValueError(
                f"braze.optim.{name}: expected weight_decay to be a number, not a tensor"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"braze.optim.{name}: expected max_grad_norm above 0 or None, but got "
                f"{max_grad_norm}"
            )

    def state_dict(self):
        """As torch's, which counts steps on the CPU unless `capturable` or `fused` is set."""
        result = super().state_dict()
        states, steps = result["state"], {}
        for group in result["param_groups"]:
            if not group.get("capturable") and not group.get("fused"):
                for index in group["params"]:
                    step = states.get(index, {}).get("step")
                    if step is not None and step.is_cuda:
                        steps[index] = step
        if steps:
            for index, step in zip(steps, torch.stack([*steps.values()]).cpu(), strict=True):
                states[index] = {**states[index], "step": step.clone()}
        return result

    def __getstate__(self):
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    def frozen_settings(self):
        """What a captured step freezes beside the groups' settings."""
        average = self._average
        return self.max_grad_norm, None if average is None else (id(average), average.weight())

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
        average = self._average
        pairs = {} if average is None else average.pairs()
        launches = [
            (group, launch)
            for group in self.param_groups
            for launch in self._launches(group, pairs)
        ]
        for _, launch in launches[1:]:  # the op checks its own launch before it writes
            self._check(launch)
        norm = self.grad_norm = self._norm(launches)
        weight = 0.0 if average is None else average.weight()
        counts = next((launch for _, launch in reversed(launches) if launch.averages), None)
        for group, launch in launches:
            device = launch.params[0].device
            averages = launch.averages or None
            shared = (
                *self._scaler(device),
                averages,
                weight,
                average.ema.n_averaged if launch is counts else None,
                None if norm is None else norm.to(device),
                0.0 if norm is None else float(self.max_grad_norm),
                self._ticket_block(device),
            )
            self._update(group, launch, shared)
            if launch.owners is not launch.params:
                # Their own counters know nothing of what the op has written.
                torch.autograd.graph.increment_version(launch.owners)
            if averages:
                for p in launch.owners:
                    del pairs[p]
        if average is not None:
            average.finish(pairs, weight, counts is not None)
        return loss

    # ---- for subclasses ----

    def _wanted(self, group):
        """Which of `_kinds` the group's settings ask for."""
        raise NotImplementedError

    def _state_of(self, group, p, wanted):
        """The states of a parameter, made where they are missing; its step or None; and a key of
        what all parameters of a launch have to have in common."""
        state, states = self.state[p], []
        step = state.get("step")
        if type(step) is not torch.Tensor or step.dtype != torch.float32 or step.device != p.device:
            # New, or from torch's optimizer, which may count on the CPU.
            step = 0.0 if step is None else float(step)
            step = state["step"] = torch.full((), step, dtype=torch.float32, device=p.device)
        for name, is_wanted in zip(self._kinds, wanted, strict=True):
            tensor = state.get(name) if is_wanted else None
            if tensor is None and is_wanted:
                tensor = state[name] = torch.zeros_like(p, requires_grad=False)
            states.append(tensor)
        return states, step, None

    def _repeats(self, launch):
        """Whether a launch of the same parameters and states has the same in common."""
        return bool(launch.steps)

    def _update(self, group, launch, shared):
        """Launches.

        Args:
            shared: the op's arguments grad_scale, found_inf, averages, average_weight, averaged,
                grad_norm, max_grad_norm, tickets.
        """
        raise NotImplementedError

    # ---- shared ----

    def _launches(self, group, averages):
        """The group's :class:`Launch` for each device and dtype.

        Args:
            averages: parameter -> its average.
        """
        launches, wanted, name = {}, self._wanted(group), type(self).__name__
        if not averages and (again := self._as_before(group, wanted)) is not None:
            return [again]
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"braze.optim.{name} does not support sparse gradients{self._sparse_hint}"
                )
            if p.dtype not in FLOAT_DTYPES:
                raise RuntimeError(
                    f"braze.optim.{name}: expected parameters of dtype float64, float32, bfloat16 "
                    f"or float16, but got {p.dtype}"
                )
            states, step, shared = self._state_of(group, p, wanted)
            owner, sharded = p, type(p) not in _PLAIN and _sharded.is_sharded(p)
            average = averages.get(p) if averages else None
            if average is not None and (average.dtype, average.device) != (p.dtype, p.device):
                average = None  # left to EMA
            if sharded:
                kinds, kept = (*self._kinds, "average"), (*states, average)
                p, grad, (*states, average) = _sharded.local(name, p, grad, kinds, kept)
            key = (p.device, p.dtype, sharded, shared, average is None)
            launch = launches.get(key)
            if launch is None:
                launch = launches[key] = Launch(len(states), shared, sharded)
            launch.params.append(p)
            launch.grads.append(grad)
            if step is not None:
                launch.steps.append(step)
            for tensors, state in zip(launch.states, states, strict=True):
                if state is not None:
                    tensors.append(state)
            if average is not None:
                launch.averages.append(average.detach())
            if sharded:
                launch.owners.append(owner)
        launches = [*launches.values()]
        if not averages and len(launches) == 1:
            self._remember(group, wanted, launches[0])
        return launches

    def _remember(self, group, wanted, launch):
        """For the next step, if the launch is of all parameters and has nothing of its own."""
        before = self.__dict__.setdefault("_before", {})
        before.pop(id(group), None)
        if (
            launch.owners is launch.params
            and self._repeats(launch)
            and len(group["params"]) == len(launch.params)
        ):
            states = [self.state[p] for p in launch.params]
            # Nobody is to keep the memory of gradients that zero_grad() has dropped.
            before[id(group)] = group, wanted, states, launch.with_gradients([])

    def _as_before(self, group, wanted):
        """The launch of the step before with this one's gradients, if all else is the same object:
        looking at every parameter in Python would take longer than the update of a small one."""
        last_group, last_wanted, states, last = self.__dict__.get("_before", {}).get(
            id(group), (None,) * 4
        )
        params = group["params"]
        if last_group is not group or last_wanted != wanted or len(params) != len(last.params):
            return None
        if not self._repeats(last):
            return None
        kept = [("step", last.steps)] if last.steps else []
        kept += [pair for pair in zip(self._kinds, last.states, strict=True) if pair[1]]
        dtype = last.params[0].dtype
        grads = [*map(_grad, params)]
        beside = kept[0][1] if kept else itertools.repeat(params[0])
        same = (
            all(map(operator.eq, map(_device, params), map(_device, beside)))
            and all(map(operator.is_, params, last.params))
            and all(map(operator.is_, map(_dtype, params), itertools.repeat(dtype)))
            and all(map(operator.is_, map(self.state.get, params), states))
            and not any(map(operator.is_, grads, itertools.repeat(None)))
            and all(map(operator.is_, map(_layout, grads), itertools.repeat(torch.strided)))
            and all(
                all(map(operator.is_, (state.get(name) for state in states), tensors))
                for name, tensors in kept
            )
        )
        if not same:
            return None
        return last.with_gradients(grads)

    def _check(self, launch):
        """Raises where the op would refuse what these optimizers promise to find beforehand."""
        wanted = launch.params[0].dtype
        kept = [t for tensors in launch.states for t in tensors]
        others = set(map(_dtype, launch.grads + kept)) - {wanted}
        if others:
            names = " and ".join(name.replace("_", " ") + "s" for name in self._kinds)
            raise RuntimeError(
                f"braze.optim.{type(self).__name__}: expected gradients and {names} of the "
                f"parameters' dtype {wanted}, but got {', '.join(map(str, others))}"
            )
        written = launch.params + kept
        if any(map(torch.Tensor.is_inference, written)) and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"braze.optim.{type(self).__name__} would overwrite an inference tensor outside of "
                "inference mode"
            )

    def _norm(self, launches):
        """The norm of all gradients, divided by the scale; None where they are not clipped."""
        if self.max_grad_norm is None or not launches:
            return None
        scale = getattr(self, "grad_scale", None)
        grads = [g for _, launch in launches for g in launch.grads]
        device, sharded = grads[0].device, any(a.owners is not a.params for _, a in launches)
        if not sharded and all(g.device == device for g in grads):
            scale = None if scale is None else scale.to(device)
            return grad_norm(grads, scale, self._ticket_block(device))
        norm = torch.nn.utils.get_total_norm([p.grad for _, a in launches for p in a.owners])
        norm = (norm.full_tensor() if _sharded.is_sharded(norm) else norm).double()
        return norm if scale is None else norm / scale.to(norm.device)

    def _casts(self, launch):
        """Gradients of the launch that a step has left to it to cast, and of what they are cast."""
        scope = current.scope
        sources = None if scope is None else scope.sources_of(self)
        if not sources:
            return [], []
        cast = [g for g in launch.grads if g.data_ptr() in sources]
        return cast, [sources[g.data_ptr()] for g in cast]

    @staticmethod
    def _rate(group, device):
        """The learning rate as a number, or as a tensor that the kernel reads."""
        lr = group["lr"]
        if not isinstance(lr, torch.Tensor):
            return lr, None
        if lr.device == device and lr.dtype in (torch.float32, torch.float64):
            return 0.0, lr
        return lr.item(), None

    def _scaler(self, device):
        """What a GradScaler has left: the gradients' scale, and whether there were infinities."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return (
            None if scale is None else scale.to(device),
            None if found_inf is None else found_inf.to(device),
        )

    def _ticket_block(self, device):
        """What the kernels need to count steps: memory that is zero between launches."""
        if device.type != "cuda":
            return None
        blocks = self.__dict__.setdefault("_tickets", {})
        if device not in blocks:
            blocks[device] = torch.zeros(_TICKETS, dtype=torch.int32, device=device)
        return blocks[device]
