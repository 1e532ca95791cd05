"""What Python code changes while a step is captured, which a graph would not repeat."""

import torch


class HostState:
    """What Python code can change while a step is captured: all but the contents of GPU memory.

    :meth:`verify` refuses a step that a graph would not repeat; :meth:`restore` undoes it.
    """

    def __init__(self, parts):
        self._params = [(p, p.data_ptr(), p.grad) for p in parts.params]
        self._buffers = [(m, dict(m._buffers)) for m in parts.modules]
        self._buffer_addresses = {
            id(b): b.data_ptr() for _, held in self._buffers for b in held.values() if b is not None
        }
        self._optimizers = [_OptimizerState(optimizer) for optimizer in parts.optimizers()]
        self._more = parts.host_states()
        self._rng = torch.get_rng_state()

    def verify(self):
        """Raises RuntimeError where the captured code did what a replay cannot repeat."""
        if any(p.data_ptr() != address for p, address, _ in self._params):
            raise RuntimeError("the step gives a parameter new memory instead of writing into it")
        for module, held in self._buffers:
            for name, buffer in module._buffers.items():
                if buffer is not held.get(name) or (
                    buffer is not None and buffer.data_ptr() != self._buffer_addresses[id(buffer)]
                ):
                    raise RuntimeError(
                        f"{type(module).__name__} replaces its buffer {name!r} in every step "
                        "instead of writing into it"
                    )
        for state in (*self._optimizers, *self._more):
            state.verify()

    def restore(self):
        """Undoes all changes."""
        for p, _, grad in self._params:
            p.grad = grad
        for module, held in self._buffers:
            module._buffers.clear()
            module._buffers.update(held)
        for state in (*self._optimizers, *self._more):
            state.restore()
        torch.set_rng_state(self._rng)


class _OptimizerState:
    """An optimizer's: :meth:`verify` and :meth:`restore` as above."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self._state = {p: dict(state) for p, state in optimizer.state.items()}
        self._addresses, self._host_values = {}, {}
        for p, state in self._state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    self._addresses[p, name] = value.data_ptr()
                elif isinstance(value, torch.Tensor):
                    self._host_values[p, name] = value.clone()
                elif isinstance(value, (int, float)):
                    self._host_values[p, name] = value
        self._settings = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for group in optimizer.param_groups
        ]

    def verify(self):
        kind = type(self._optimizer).__name__
        for p, state in self._optimizer.state.items():
            for name, value in state.items():
                if (p, name) in self._host_values:
                    if not _equal(value, self._host_values[p, name]):
                        raise RuntimeError(
                            f"{kind} counts {name!r} on the CPU, where a graph cannot; use an "
                            "optimizer with capturable=True"
                        )
                elif isinstance(value, torch.Tensor) and (
                    value.data_ptr() != self._addresses.get((p, name))
                ):
                    raise RuntimeError(
                        f"{kind} replaces its state {name!r} instead of writing into it"
                    )
        for group, held in self._settings:
            for name, value in held.items():
                if group.get(name) is not value and not _equal(group.get(name), value):
                    raise RuntimeError(
                        f"{name!r} of {kind} is changed by Python code, which a graph would not "
                        "repeat; change it between calls: learning rates are followed then"
                    )

    def restore(self):
        state = self._optimizer.state
        for p in [p for p in state if p not in self._state]:
            del state[p]
        for p, held in self._state.items():
            state[p].clear()
            state[p].update(held)
        for (p, name), value in self._host_values.items():
            if isinstance(value, torch.Tensor):
                state[p][name].copy_(value)
        for group, held in self._settings:
            group.update(held)


def _equal(a, b):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a == b
