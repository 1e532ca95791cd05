"""A GPU made of CPU tensors, for what a captured step does around its kernels.

Within ``with FakeCuda() as fake:`` tensors made on "cuda" are CPU tensors that say they are on a
GPU. Streams and graphs are objects that note what they are told; ops run on the CPU at once, but
while a graph is captured they leave no trace in memory that existed before, and each replay runs
them again on the memory that they had. So a captured step has to give the numbers of the plain
loop, as on a GPU, and what CUDA refuses in a capture is refused. `fake.events` has what a GPU would
have been given, in order.

It knows nothing of concurrency: that branches are joined, and memory kept until then, only a GPU
shows.
"""

import contextlib
import gc
import types
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from braze.step import places

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_aten = torch.ops.aten
_WAITS = {
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default,
    _aten.masked_select.default, _aten.is_nonzero.default,
}  # fmt: skip

_INDEXES = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
_EMPTY = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip
# It is opened, and nobody uses it.
_SIDE_STREAM = {"braze.open_side_stream.default": True, "braze.join_side_stream.default": []}

_PROPERTIES = types.SimpleNamespace(multi_processor_count=132)


class Stream:
    def __init__(self, fake, number, priority):
        self.fake, self.number, self.priority, self.device = fake, number, priority, CUDA

    def wait_stream(self, other):
        self.fake.note("wait", self.number, other.number)

    def synchronize(self):
        self.fake.wait("stream")


def _leaves(tree):
    """What is in lists, tuples and dicts; pytree takes longer than the ops."""
    if isinstance(tree, (list, tuple)):
        return [leaf for x in tree for leaf in _leaves(x)]
    return _leaves([*tree.values()]) if isinstance(tree, dict) else [tree]


def _tensors(tree):
    return [t for t in _leaves(tree) if isinstance(t, torch.Tensor)]


def _alias(tree):
    if isinstance(tree, (list, tuple)):
        return [_alias(x) for x in tree]
    if isinstance(tree, dict):
        return {name: _alias(x) for name, x in tree.items()}
    return _aten.alias.default(tree) if isinstance(tree, torch.Tensor) else tree


def _is_view(func):
    return getattr(func, "is_view", False) or func is _aten.detach.default


def _run(func, args, kwargs):
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        # A GPU gathers nothing behind an epoch's end, for a batch that nobody takes.
        if "out of bounds for an order" not in str(error):
            raise
        return None


class Graph:
    """What has been run between ``capture_begin`` and ``capture_end``."""

    def __init__(self, fake):
        self.fake, self.tape, self.replays = fake, [], 0
        self.generators = []  # beside the default one
        self.invalid, self._before, self._own = False, {}, {}

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.fake.note("capture_begin", pool, capture_error_mode)
        if self.fake.graph is not None:
            raise RuntimeError("CUDA error: the stream is being captured already")
        self.fake.graph, self._rng = self, torch.get_rng_state()
        self._states = [generator.get_state() for generator in self.generators]

    def register_generator_state(self, generator):
        self.generators.append(generator)

    def capture_end(self):
        self.fake.note("capture_end", len(self.tape))
        self.fake.graph = None
        for storage, contents in self._before.values():
            storage.copy_(contents)
        self._before = {}
        torch.set_rng_state(self._rng)
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)
        if self.invalid:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    def own(self, tensors):
        """Notes memory that is made within the capture."""
        for storage in (t.untyped_storage() for t in _tensors(tensors)):
            if storage._cdata not in self._before:
                self._own[storage._cdata] = storage

    def record(self, func, args, kwargs):
        """Runs an op; memory of before gets its contents back at the end of the capture."""
        for storage in (t.untyped_storage() for t in _tensors((args, kwargs))):
            key = storage._cdata
            if key not in self._own and key not in self._before:
                self._before[key] = storage, storage.clone()
        result = _run(func, args, kwargs)
        self.own(result)
        # Aliases: autograd takes a gradient over as it is where nobody else has the tensor.
        self.tape.append((func, _alias(args), _alias(kwargs), _alias(result)))
        return result

    def holders(self, memory):
        """How many tensors of the tape share that memory."""
        storage = memory.untyped_storage()._cdata
        noted = (t for _, *rest in self.tape for t in _tensors(rest))
        return sum(t.untyped_storage()._cdata == storage for t in noted)

    def mentions(self, memory):
        storage = memory.untyped_storage()._cdata
        given = (t for func, *rest in self.tape if not _is_view(func) for t in _tensors(rest))
        return any(t.untyped_storage()._cdata == storage for t in given)

    def replay(self):
        self.fake.note("replay")
        self.replays += 1
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch._C._AutoDispatchBelowADInplaceOrView(),
            torch.inference_mode(False),
        ):
            for func, args, kwargs, results in self.tape:
                again = _run(func, args, kwargs)
                for old, new in zip(_tensors(results), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Devices(TorchFunctionMode):
    """Which tensors are on the GPU, and what is made there."""

    def __init__(self, fake):
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func, types, args=(), kwargs=None):
        fake, kwargs = self.fake, kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("to", "cuda", "cpu") and args and isinstance(args[0], torch.Tensor):
            return self._moved(name, *args, **kwargs)
        if func is torch.Tensor.backward:  # which has nothing of this mode inside otherwise
            with self:
                return _backward(*args, **kwargs)
        if func is torch.autograd.grad:
            with self, mock.patch("torch.autograd.has_torch_function", return_value=False):
                return func(*args, **kwargs)
        if name in ("tolist", "numpy") and fake.has(args[0]):
            fake.wait(name)
        device = kwargs.get("device")
        target = None if device is None else torch.device(device)
        if target is None:
            return func(*args, **kwargs)
        if target.type != "cuda":
            with fake.made(False):
                return func(*args, **kwargs)
        if name in ("tensor", "as_tensor") and fake.graph is not None:
            fake.refuse("a copy from memory of the host that is not pinned")
        with fake.made(True):
            try:
                result = func(*args, **{**kwargs, "device": "cpu"})
            except RuntimeError as error:
                if "can't allocate memory" in str(error):
                    raise torch.OutOfMemoryError("CUDA out of memory") from error
                raise
        fake.tag(result)
        return result

    def _moved(self, name, tensor, *args, **kwargs):
        fake, was = self.fake, self.fake.has(tensor)
        if name == "to" and args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if name == "to":
            copy = kwargs.pop("copy", False)
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        else:
            copy, device, dtype, layout = False, torch.device(name), None, None
        on_gpu = was if device is None else device.type == "cuda"
        if device is not None and device.type not in ("cpu", "cuda"):
            return tensor.to(device)
        if on_gpu != was:
            fake.refuse_in_capture("a copy between host and GPU")
        options = {} if layout is None else {"memory_format": layout}
        with fake.made(on_gpu):
            result = tensor.to(dtype or tensor.dtype, copy=copy or on_gpu != was, **options)
        if on_gpu != was and result.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            (fake.tag if on_gpu else fake.untag)(result)
        return result


def _any_mask(indices):
    return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(indices))


class _Ops(TorchDispatchMode):
    """Notes ops on the GPU, and records them while a graph is captured."""

    def __init__(self, fake):
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():  # subclasses do not see what is noted
            return self._run(func, args, kwargs or {})

    def _run(self, func, args, kwargs):
        fake = self.fake
        leaves = _leaves((args, kwargs))
        on_gpu = [fake.has(t) for t in leaves if isinstance(t, torch.Tensor)]
        if not (any(on_gpu) or fake.making):
            return func(*args, **kwargs)
        if str(func) in _SIDE_STREAM:
            fake.note(str(func), *args[1:])
            return _SIDE_STREAM[str(func)]
        if str(func) == "braze.capture_mentions.default":
            return fake.graph.mentions(args[0])
        if func in _WAITS or (func in _INDEXES and _any_mask(args[1])):
            fake.wait(str(func))
        if func is _aten.copy_.default and not all(on_gpu):
            fake.refuse_in_capture("a copy between host and GPU")
        fake.note(str(func), fake.stream.number, *map(_brief, leaves))
        if func in _EMPTY:
            result = func(*args, **kwargs).zero_()  # labels, for example, have to be valid
            if fake.graph is not None:
                fake.graph.own(result)
        elif fake.graph is not None:
            result = fake.graph.record(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        fake.tag(result)
        return result


def _backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _brief(x):
    """An argument of an op as it is noted."""
    if isinstance(x, torch.Tensor):
        return (str(x.dtype).removeprefix("torch."), *x.shape, *x.stride())
    plain = (int, float, str, type(None), torch.dtype, torch.memory_format)
    return x if isinstance(x, plain) else type(x).__name__


class _Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls)


class _DefaultGenerator:
    """The GPU's default generator: that of the CPU, whose state another generator's takes the place
    of, in a graph at each replay too."""

    def __init__(self, fake):
        self._fake, self._own, self._held = fake, _Generator(), None

    def manual_seed(self, seed):
        return torch.default_generator.manual_seed(seed)

    def graphsafe_get_state(self):
        return self._own if self._held is None else self._held

    def graphsafe_set_state(self, generator):
        self._change(generator)
        if self._fake.graph is not None:
            self._fake.graph.tape.append((self._change, (generator,), {}, None))

    def _change(self, generator):
        state = torch.get_rng_state()
        graph, held = self._fake.graph, self._held
        foreign = held is not None and graph is not None and held not in graph.generators
        if foreign and not torch.equal(held.get_state(), state):
            self._fake.refuse("a generator that the graph does not know of")
        self.graphsafe_get_state().set_state(state)
        torch.set_rng_state(generator.get_state())
        self._held = None if generator is self._own else generator


class FakeCuda(contextlib.ExitStack):
    """See the module. ``events``: tuples, the first element says of what."""

    def __init__(self):
        super().__init__()
        self.events, self.graph, self.making, self.warned = [], None, False, []
        self._on_gpu, self._streams, self._pools = {}, 0, 0
        self.stream = self.default_stream = self._new_stream()

    def __enter__(self):
        super().__enter__()
        patches = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "is_bf16_supported": lambda including_emulation=True: True,
            "Stream": self._new_stream,
            "CUDAGraph": lambda: Graph(self),
            "current_stream": lambda device=None: self.stream,
            "get_device_properties": lambda device=None: _PROPERTIES,
            "stream": self._on_stream,
            "synchronize": lambda device=None: self.wait("device"),
            "empty_cache": lambda: self.note("empty_cache"),
            "graph_pool_handle": self._new_pool,
            "is_current_stream_capturing": lambda: self.graph is not None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "get_rng_state_all": lambda: [torch.get_rng_state()],
            "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
            "default_generators": (_DefaultGenerator(self),),
        }
        for name, value in patches.items():
            self.enter_context(mock.patch.object(torch.cuda, name, value))
        self.enter_context(mock.patch.object(torch.cuda.random, "device_count", return_value=1))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            noted = lambda *args, name=name: self.note(name, *args[1:])  # noqa: E731
            self.enter_context(mock.patch.object(torch._C, name, noted, create=True))

        def number(_):
            return self.stream.number

        raw = "_cuda_getCurrentRawStream"
        self.enter_context(mock.patch.object(torch._C, raw, number, create=True))
        known = torch._C.TensorBase.device.__get__
        where = lambda t: CUDA if self.has(t) else known(t)  # noqa: E731
        attributes = {
            "device": property(where),
            "is_cuda": property(self.has),
            "is_cpu": property(lambda t: where(t).type == "cpu"),
        }
        for name, value in attributes.items():
            self.enter_context(mock.patch.object(torch.Tensor, name, value))
        used = lambda t, stream: self.note("record_stream", stream.number)  # noqa: E731
        self.enter_context(mock.patch.object(torch.Tensor, "record_stream", used))
        self.enter_context(mock.patch.object(torch, "Generator", _Generator))
        self.enter_context(mock.patch.object(gc, "collect"))  # takes longer than a capture
        # CPU memory has no pool that would hold what a captured step has freed.
        self.enter_context(mock.patch.object(places, "_alias", lambda t: t))
        holders = places.holders
        beside = lambda t: holders(t) - (self.graph.holders(t) if self.graph else 0)  # noqa: E731
        self.enter_context(mock.patch.object(places, "holders", beside))
        group = torch._C._group_tensors_by_device_and_dtype
        self.enter_context(
            mock.patch.object(
                torch._C,
                "_group_tensors_by_device_and_dtype",
                lambda lists, *args: {
                    (found[0][0].device, dtype): (found, indices)
                    for (_, dtype), (found, indices) in group(lists, *args).items()
                },
            )
        )
        self.enter_context(_Devices(self))
        self.enter_context(_Ops(self))
        return self

    # ---- what the GPU is given ----

    def note(self, *event):
        self.events.append(event)

    def wait(self, what):
        self.refuse_in_capture(what)
        self.note("synchronize", what)

    def refuse_in_capture(self, what):
        if self.graph is not None:
            self.refuse(what)

    def refuse(self, what):
        self.graph.invalid = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def _new_stream(self, device=None, priority=0):
        self._streams += 1
        self.note("stream", self._streams, priority)
        return Stream(self, self._streams, priority)

    def _new_pool(self):
        self._pools += 1
        self.note("pool", self._pools)
        return 0, self._pools

    @contextlib.contextmanager
    def _on_stream(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    # ---- which tensors are on it ----

    def has(self, tensor):
        with torch._C.DisableTorchFunction():
            dense = tensor.layout is torch.strided
            return dense and tensor.untyped_storage()._cdata in self._on_gpu

    def tag(self, tensors):
        for t in _tensors(tensors):
            if t.layout is torch.strided:
                storage = t.untyped_storage()
                # A reference that keeps the address from becoming another storage's.
                self._on_gpu[storage._cdata] = StorageWeakRef(storage)

    def untag(self, tensor):
        self._on_gpu.pop(tensor.untyped_storage()._cdata, None)

    @contextlib.contextmanager
    def made(self, on_gpu):
        """Whether tensors that are made in this block are on the GPU whatever they are made of."""
        before, self.making = self.making, on_gpu
        try:
            yield
        finally:
            self.making = before
