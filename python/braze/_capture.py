"""Recording work in a CUDA graph so that a failure leaves torch and the model as they were."""

import contextlib
import gc

import torch

from braze.optim import SGD

# Graphs whose capture CUDA refused to end. torch's allocators keep a callback into them, so that
# they must never be destroyed.
_failed_graphs = []
_NOT_READ_IN_A_STEP = ("params", "param_names", "initial_lr", "max_lr", "min_lr")


def capture(work, stream, pool):
    """Records what ``work()`` launches; nothing runs.

    Other threads may go on using the GPU ("thread_local"). An exception of `work` ends the capture
    and is raised again.

    Args:
        work: called once.
        stream: the side stream to record on.
        pool: from ``torch.cuda.graph_pool_handle()``; unusable after an exception.

    Returns:
        The graph, and what `work` returned.
    """
    # The graph's memory comes from a pool of its own: give back what earlier eager steps cached.
    # Cycles are collected now, because destroying another graph would break the capture.
    torch.cuda.synchronize(stream.device)
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one that says why
                _end(graph, stream, pool)
            raise
        _end(graph, stream, pool)
    # Beginning the capture has queued a reset of the random number generator's offset on `stream`,
    # which must not come after that of the first replay.
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return graph, result


def _end(graph, stream, pool):
    try:
        graph.capture_end()
    except RuntimeError:
        # What capture_end() leaves undone where CUDA reports the capture as invalid: allocations
        # go to the graph's pool, and the random number generator believes that it is captured.
        with contextlib.suppress(RuntimeError):  # raises where capture_end() got further
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
            torch._C._cuda_releasePool(stream.device.index, pool)
            _failed_graphs.append(graph)
        scratch = torch.zeros(1, device=stream.device)
        valid = torch.cuda.CUDAGraph()  # a whole capture frees the generator
        valid.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        scratch.zero_()  # an empty graph gives a warning
        valid.capture_end()
        raise


class Rates:
    """Learning rates on the device, so that a graph follows their changes.

    The optimizer's groups keep their numbers, which schedulers and users change; only while a step
    is captured a tensor stands in their place. Rates that the optimizer cannot read there are part
    of :meth:`key`: a change needs another graph.
    """

    def __init__(self, optimizer, device):
        self.device = device
        self._optimizer = optimizer
        self._held = {}  # index of the group, dtype -> [tensor, the number in it]

    def _dtype(self, group):
        if isinstance(group.get("lr"), torch.Tensor) or "lr" not in group:
            return None
        if isinstance(self._optimizer, SGD):
            return torch.float64
        # torch's optimizers compute with the unrounded number, but take float32 tensors only.
        exact = torch.are_deterministic_algorithms_enabled()
        follows = group.get("capturable") or group.get("fused")
        return torch.float32 if follows and not exact else None

    def key(self):
        """The hyper-parameters that a graph freezes."""
        frozen = []
        for group in self._optimizer.param_groups:
            lr_dtype = self._dtype(group)
            for name, value in group.items():
                if name == "lr" and lr_dtype is not None:
                    frozen.append(lr_dtype)
                elif name not in _NOT_READ_IN_A_STEP:
                    frozen.append(_frozen(value))
        return tuple(frozen)

    @contextlib.contextmanager
    def on_device(self):
        """Groups hold tensors within this block."""
        replaced = []
        for index, group in enumerate(self._optimizer.param_groups):
            dtype = self._dtype(group)
            if dtype is not None:
                number = group["lr"]
                held = self._held.get((index, dtype))
                if held is None:
                    tensor = torch.full((), number, dtype=dtype, device=self.device)
                    held = self._held[index, dtype] = [tensor, number]
                replaced.append((group, number))
                group["lr"] = held[0]
        try:
            yield
        finally:
            for group, number in replaced:
                group["lr"] = number

    def write(self):
        """Brings the tensors up to date, before a replay."""
        groups = self._optimizer.param_groups
        for (index, _), held in self._held.items():
            lr = groups[index]["lr"]
            if not isinstance(lr, torch.Tensor) and held[1] != lr:
                held[0].fill_(lr)
                held[1] = lr


def _frozen(value):
    """A hashable stand-in: of a GPU tensor its place, of all else the value."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.is_cuda else tuple(value.flatten().tolist())
    if isinstance(value, dict):
        value = list(value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


class HostState:
    """What Python code can change while a step is captured: all but the contents of GPU memory.

    :meth:`verify` refuses a step that a graph would not repeat; :meth:`restore` undoes it.
    """

    def __init__(self, model, optimizer, params):
        self._optimizer = optimizer
        self._params = [(p, p.data_ptr(), p.grad) for p in params]
        self._buffers = [(m, dict(m._buffers)) for m in model.modules()]
        self._buffer_addresses = {
            id(b): b.data_ptr() for _, held in self._buffers for b in held.values() if b is not None
        }
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

    def restore(self):
        """Undoes all changes."""
        for p, _, grad in self._params:
            p.grad = grad
        for module, held in self._buffers:
            module._buffers.clear()
            module._buffers.update(held)
        state = self._optimizer.state
        for p in [p for p in state if p not in self._state]:
            del state[p]
        for p, held in self._state.items():
            state[p].clear()
            state[p].update(held)
        for (p, name), value in self._host_values.items():
            if isinstance(value, torch.Tensor):
                state[p][name].copy_(value)
        torch.set_rng_state(self._rng)


def _equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
