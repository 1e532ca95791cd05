"""The graphs of a step: one for each kind of call, found by what it has frozen."""

import torch
from torch.utils import _pytree as pytree

from braze import _config, _lib
from braze.step import prefetch
from braze.step.branches import Branches, Losses
from braze.step.capture import capture
from braze.step.host_state import HostState
from braze.step.rates import Rates
from braze.step.side_stream import SideStream

# Steps that run eagerly, as true training steps, before their shape is captured: they create what
# the libraries, autograd and the optimizer create lazily.
_EAGER_CALLS = 2
# Shapes and settings whose graphs are kept; the one that has waited longest goes first.
_MAX_ENTRIES = 32
_NOT_CAPTURED = (
    "TrainStep: this step cannot be captured in a CUDA graph; model and optimizer are unchanged. "
    "The usual cause is code in the model, the loss, a hook or the optimizer that waits for the "
    "GPU: .item(), .cpu(), printing a tensor, `if` on a tensor's value, indexing by a mask. "
    "The cause here: {}"
)


class _Entry:
    """What belongs to one kind of call: one shape, one set of settings."""

    def __init__(self, leaves, spec, device):
        self.spec = spec
        self.leaves = [
            torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x for x in leaves
        ]
        self.eager_calls = 0
        self.graph = self.losses = self.loss_dtype = self.prefetch = None
        self.buffers = []  # addresses of the model's that the graph reads and writes
        # What a replay leaves, in memory of the graph or of the accumulation buffers.
        self.grad_norm = None
        self.grads = []

    def load(self, leaves):
        for mine, given in zip(self.leaves, leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(given, non_blocking=True)

    def batch(self):
        return self.leaves if self.spec is None else pytree.tree_unflatten(self.leaves, self.spec)


class Graphs:
    """Runs a step on a GPU: the first calls of a kind eagerly, then captured, then replayed.

    Args:
        parts: the step's :class:`braze.step.parts.StepParts`, inspected.
        body: its :class:`braze.step.body.Body`.
    """

    def __init__(self, parts, body):
        self._parts, self._body = parts, body
        self._entries = {}  # the youngest last
        self._stream = self._last_stream = self._rates = self._pool = None

    def prepare(self):
        """After each inspection of the parts."""
        parts = self._parts
        if self._stream is None or self._stream.device != parts.device:
            # Blocks of its kernels go before those of the branches for gradients, and these before
            # those of the branch for losses and batches: csrc/launchers/graph.h.
            urgent = _lib.limits["urgent_priority"]
            self._stream = torch.cuda.Stream(parts.device, priority=urgent)
        self._rates = Rates(parts.optimizer, parts.device)
        # Its eager steps are meant: no need to warn of them.
        parts.optimizer._warned_capturable_if_run_uncaptured = True

    def forget(self):
        """Drops all graphs."""
        if self._entries:
            torch.cuda.synchronize(self._parts.device)  # a graph may still be running
        self._entries.clear()

    def run(self, batch, order, first, last):
        """One step, or one micro-step: as :meth:`braze.step.body.Body.run`.

        Args:
            order: of a batch of the loader: its epoch's order, and where in it the batch begins.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("TrainStep: called inside another CUDA graph's capture")
        parts, body = self._parts, self._body
        leaves, spec, gather = batch, None, order is not None
        if not gather and not all(isinstance(x, torch.Tensor) for x in batch):
            leaves, spec = pytree.tree_flatten(batch)
        key = self._key(leaves, spec, gather, first, last)
        entry = self._entries.pop(key, None)
        if entry is None:
            parts.check_capturable()  # settings may have changed
            if len(self._entries) >= _MAX_ENTRIES:
                torch.cuda.synchronize(parts.device)
                del self._entries[next(iter(self._entries))]
            entry = _Entry(leaves, spec, parts.device)
        self._entries[key] = entry  # now the youngest
        stream = torch.cuda.current_stream(parts.device)
        if self._last_stream not in (None, stream):
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        if not gather:
            entry.load(leaves)
        eager_calls = max(_EAGER_CALLS, parts.ranks.eager_calls())
        if entry.graph is None and entry.eager_calls < eager_calls:
            if gather:
                body.batches.seek(*order)
            return self._run_eagerly(entry, stream, gather, first, last)
        graph = entry.graph
        if graph is None or entry.losses.full() or entry.buffers != parts.buffer_addresses():
            graph = self._capture(entry, gather, first, last)
        if gather:
            body.batches.prepare_replay(entry.prefetch, *order, batch[0])
        self._rates.write()
        graph.replay()
        grads = entry.grads
        if body.window_grads is not grads:  # the last call ran another graph
            for p in parts.params:
                p.grad = None
            body.window_grads = grads
        for p, grad in grads:
            p.grad = grad
        if last:
            torch.autograd.graph.increment_version(parts.params)
        return entry.losses.next(), entry.grad_norm

    def _run_eagerly(self, entry, stream, gather, first, last):
        self._stream.wait_stream(stream)
        try:
            with torch.cuda.stream(self._stream):
                loss, norm = self._body.run(entry.batch(), gather, first, last)
        finally:
            stream.wait_stream(self._stream)
        entry.eager_calls += 1
        entry.loss_dtype = loss.dtype
        self._body.window_grads = self._parts.gradients()
        return loss, norm

    def _key(self, leaves, spec, gather, first, last):
        """All that a graph has frozen. Whatever differs needs another graph."""
        parts = self._parts
        return (
            gather,
            first,
            last,
            parts.accumulate,
            parts.max_grad_norm,
            spec and str(spec),
            tuple(
                (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x)
                for x in leaves
            ),
            tuple([(p.data_ptr(), p.requires_grad) for p in parts.params]),
            () if first else tuple(id(p) for p, _ in self._body.window_grads),
            tuple([m.training for m in parts.modules]),
            self._rates.key(),
            _config.settings(parts.device.type),
        )

    def _capture(self, entry, gather, first, last):
        side_stream = None
        if self._parts.accumulate == 1 and not self._parts.ranks.read_gradients():
            side_stream = SideStream(self._parts.update_takes_casts())
        if not self._record(entry, gather, first, last, side_stream):
            self._record(entry, gather, first, last, None)
        return entry.graph

    def _record(self, entry, gather, first, last, side_stream):
        """One capture; False where a gradient of the side stream was read too early."""
        parts, body, batch = self._parts, self._body, entry.batch()
        before = HostState(parts.model, parts.optimizer, parts.params)
        if not any(other.graph for other in self._entries.values()):
            # torch retires a memory pool with the last graph that uses it.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            branches = self._branches(entry, gather, batch, side_stream)
            with self._rates.on_device():
                graph, (_, norm) = capture(
                    lambda: body.run(batch, gather, first, last, branches),
                    self._stream,
                    self._pool,
                )
            if side_stream and not side_stream.all_arrived():
                before.restore()
                return False
            grads = parts.gradients()
            before.verify()
        except BaseException as error:
            before.restore()
            if isinstance(error, Exception):
                parts.ranks.agree(False)
            self._pool = torch.cuda.graph_pool_handle()  # the failed capture may hold the old one
            if isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(
                    "TrainStep: out of memory while capturing; model and optimizer are unchanged. "
                    f"{error}"
                ) from error
            if isinstance(error, RuntimeError):
                raise RuntimeError(_NOT_CAPTURED.format(error)) from error
            raise
        if not parts.ranks.agree(True):
            before.restore()
            raise RuntimeError(_NOT_CAPTURED.format("another rank could not capture its step"))
        entry.graph, entry.losses, entry.prefetch = graph, branches.losses, branches.prefetch
        entry.grad_norm, entry.grads = norm, grads
        entry.buffers = parts.buffer_addresses()
        return True

    def _branches(self, entry, gather, batch, side_stream):
        parts, batches = self._parts, self._body.batches
        stream, fetched = torch.cuda.Stream(parts.device), None
        losses = Losses(entry.loss_dtype, parts.device, stream)
        ahead = gather and parts.accumulate == 1
        if ahead and parts.loader.nbytes(*batch) <= prefetch.MAX_BYTES:
            filters = batches.moments.filters
            fetched = prefetch.Prefetch(parts.loader, batches.place, *batch, filters, stream)
        return Branches(stream, losses, fetched, side_stream)
