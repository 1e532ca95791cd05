"""The graphs of captured work: one for each kind of call, found by what it has frozen."""

import torch
from torch.utils import _pytree as pytree

from braze import _config, _lib
from braze.step.host_state import HostState
from braze.step.rates import AllRates
from braze.step.recording import record

# Calls that run eagerly, as true ones, before their kind is captured: they create what the
# libraries, autograd and the optimizer create lazily.
_EAGER_CALLS = 2
# Kinds whose graphs are kept; the one that has waited longest goes first.
_MAX_ENTRIES = 32
_NOT_CAPTURED = (
    "{}: this {} cannot be captured in a CUDA graph; model and optimizer are unchanged. "
    "The usual cause is code in the model, the loss, a hook or the optimizer that waits for the "
    "GPU: .item(), .cpu(), printing a tensor, `if` on a tensor's value, indexing by a mask. "
    "The cause here: {}"
)


def stream_number(device):
    """What tells the current stream from others, in a tenth of the time of an object for it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def load(places, leaves):
    """Copies the tensors of `leaves` to those of `places`."""
    for place, given in zip(places, leaves, strict=True):
        if isinstance(place, torch.Tensor):
            place.copy_(given, non_blocking=True)


def tree(leaves, spec):
    """A call's arguments, in a list where they are no tree."""
    return leaves if spec is None else pytree.tree_unflatten(leaves, spec)


class Entry:
    """What belongs to one kind of call: one shape, one set of settings."""

    def __init__(self, call):
        self.spec = call.spec
        #: the arguments where the graph reads them, with tensors that :func:`load` fills; None as
        #: long as the work has no place for them
        self.leaves = None
        self.eager_calls = 0
        self.graph = None
        self.buffers = None  # addresses of the modules' that the graph reads and writes
        #: what the work keeps here of an eager call, of what replays leave, and of casts
        self.eager = self.kept = self.casts = None
        #: whether eager calls drew from :meth:`Work.generators`
        self.draws = False
        #: whether the last eager call left the arguments as they were
        self.unwritten = False
        #: whether a graph does without arguments that are cast: their casts are loaded
        self.takes_casts = True


class Work:
    """What graphs are made of, and what is done around them. ``call`` has ``leaves``, the arguments
    flattened, their ``spec`` (None where they are no tree) and ``copied``, whether tensors in them
    are copied to where the graph reads them."""

    noun = None  # in messages

    def key(self, call, kind):
        """What a graph freezes beside what `kind` has, which is hashable."""
        raise NotImplementedError

    def is_eager(self, entry, call):
        """Whether a call runs eagerly though its kind may have a graph."""
        return False

    def before_eager(self, call):
        """On the caller's stream."""

    def eager(self, entry, call):
        """Runs it, on the work's own stream, with copies of what is to be copied; returns what the
        call returns."""
        raise NotImplementedError

    def is_full(self, entry):
        """Whether a graph has to be made anew, since it has no place left for results."""
        raise NotImplementedError

    def ways(self, entry):
        """How to record it; where the first way proves unfit the next is tried."""
        return (None,)

    def before_capture(self, call):
        """Frees what nobody will read: a capture's memory lies beside that of eager calls."""

    def prepare(self, entry, call, way):
        """Before a capture: memory and streams that the graph needs. Returns what :meth:`record`
        and :meth:`finish` are given."""
        raise NotImplementedError

    def generators(self, entry):
        """``torch.Generator``s that it draws from beside the device's default one."""
        return ()

    def record(self, entry, call, prepared):
        """Runs it between the beginning and the end of the capture."""
        raise NotImplementedError

    def finish(self, entry, prepared, recorded):
        """Behind the capture: what `entry` keeps, or None where another way has to be tried.

        Raises:
            RuntimeError: a replay would not be what was recorded.
        """
        raise NotImplementedError

    def before_replay(self, entry, call):
        """On the caller's stream."""

    def after_replay(self, entry, call):
        """Returns what the call returns."""
        raise NotImplementedError


class Graphs:
    """Runs work on a GPU: the first calls of a kind eagerly, then captured, then replayed.

    Args:
        parts: the :class:`braze.step.watched.Watched` that it depends on, inspected.
        work: a :class:`Work`.
    """

    def __init__(self, parts, work):
        self._parts, self._work = parts, work
        self._entries = {}  # the youngest last
        # Of the last call, whose kind the next one mostly is: to compare takes a fraction of the
        # time to hash.
        self._kind = self._key = self._entry = None
        self._stream = self._last_stream = self._last_number = self._pool = None
        self._rates = AllRates([], None)

    def prepare(self):
        """After each inspection of the parts."""
        parts = self._parts
        if self._stream is None or self._stream.device != parts.device:
            # Blocks of its kernels go before those of the branches for gradients, and these before
            # those of the branch for losses and batches: csrc/launchers/graph.h.
            urgent = _lib.limits["urgent_priority"]
            self._stream = torch.cuda.Stream(parts.device, priority=urgent)
            self._last_number = None  # streams of two devices may have the same
        parts.ranks.accumulate_on(self._stream)
        self._rates = AllRates(parts.optimizers(), parts.device)
        for optimizer in parts.optimizers():
            # Its eager steps are meant: no need to warn of them.
            optimizer._warned_capturable_if_run_uncaptured = True

    def forget(self):
        """Drops all graphs."""
        if self._entries:
            torch.cuda.synchronize(self._parts.device)  # a graph may still be running
        self._entries.clear()
        self._kind = self._key = self._entry = None

    def run(self, call):
        """One call of the work."""
        parts, work = self._parts, self._work
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{parts.caller}: called inside another CUDA graph's capture")
        entry = self._find(call)
        number = stream_number(parts.device)
        if number != self._last_number:
            stream = torch.cuda.current_stream(parts.device)
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream, self._last_number = stream, number
        warms_up = entry.graph is None and entry.eager_calls < max(
            _EAGER_CALLS, parts.ranks.eager_calls()
        )
        if work.is_eager(entry, call) or warms_up:
            work.before_eager(call)
            return self._run_eagerly(entry, call, self._last_stream)
        if entry.graph is None or work.is_full(entry) or entry.buffers != parts.buffers:
            self._capture(entry, call)
        if call.copied:
            load(entry.leaves, call.leaves)
        work.before_replay(entry, call)
        self._rates.write()
        entry.graph.replay()
        return work.after_replay(entry, call)

    def _run_eagerly(self, entry, call, stream):
        self._stream.wait_stream(stream)
        try:
            with torch.cuda.stream(self._stream):
                result = self._work.eager(entry, call)
        finally:
            stream.wait_stream(self._stream)
        entry.eager_calls += 1
        return result

    def _find(self, call):
        """The entry of the call's kind, now the youngest."""
        parts = self._parts
        kind = self._kind_of(call)
        if kind == self._kind:
            kind = self._kind
        key = kind, self._work.key(call, kind)
        if key == self._key:
            return self._entry
        entry = self._entries.pop(key, None)
        if entry is None:
            parts.check_capturable()  # settings may have changed
            if len(self._entries) >= _MAX_ENTRIES:
                torch.cuda.synchronize(parts.device)
                del self._entries[next(iter(self._entries))]
            entry = Entry(call)
        self._entries[key] = entry
        self._kind, self._key, self._entry = kind, key, entry
        return entry

    def _kind_of(self, call):
        """All that a graph has frozen, but for what the work adds. Whatever differs needs another
        graph."""
        parts = self._parts
        return (
            call.spec and str(call.spec),
            tuple(
                [
                    (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x)
                    for x in call.leaves
                ]
            ),
            parts.key(),
            self._rates.key(),
            _config.settings(parts.device.type),
        )

    def _capture(self, entry, call):
        self._work.before_capture(call)
        for way in self._work.ways(entry):
            if self._record(entry, call, way):
                return

    def _record(self, entry, call, way):
        """One capture; False where `way` has proved unfit."""
        parts, work = self._parts, self._work
        before = HostState(parts)
        if not any(other.graph for other in self._entries.values()):
            # torch retires a memory pool with the last graph that uses it.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            prepared = work.prepare(entry, call, way)
            with self._rates.on_device():
                graph, recorded = record(
                    lambda: work.record(entry, call, prepared),
                    self._stream,
                    self._pool,
                    work.generators(entry),
                )
            kept = work.finish(entry, prepared, recorded)
            if kept is None:
                before.restore()
                return False
            before.verify()
        except BaseException as error:
            before.restore()
            if isinstance(error, Exception):
                parts.ranks.agree(False)
            self._pool = torch.cuda.graph_pool_handle()  # the failed capture may hold the old one
            if isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(
                    f"{parts.caller}: out of memory while capturing; model and optimizer are "
                    f"unchanged. {error}"
                ) from error
            if isinstance(error, RuntimeError):
                raise RuntimeError(_NOT_CAPTURED.format(parts.caller, work.noun, error)) from error
            raise
        if not parts.ranks.agree(True):
            before.restore()
            cause = "another rank could not capture it"
            raise RuntimeError(_NOT_CAPTURED.format(parts.caller, work.noun, cause))
        parts.ranks.keep(self)
        entry.graph, entry.kept = graph, kept
        entry.buffers = parts.buffers
        return True
