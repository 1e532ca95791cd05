"""A :class:`braze.TrainStep` as work for graphs: its body, with branches where it is recorded."""

from typing import NamedTuple

import torch

from braze._C import have_gradients
from braze.step import places, prefetch
from braze.step.branches import Branches, Losses
from braze.step.graphs import Work, load, tree
from braze.step.side_stream import SideStream


class StepCall:
    """One step, or one micro-step: a batch, or of a loader's batch only the size.

    Args:
        leaves, spec: as :class:`braze.step.graphs.Work` has it.
        order: of a loader's batch its epoch's order, and where in it the batch begins; or None.
        first, last: whether it is the window's.
    """

    __slots__ = "copied", "first", "gather", "last", "leaves", "order", "spec"

    def __init__(self, leaves, spec, order, first, last):
        self.leaves, self.spec, self.order = leaves, spec, order
        self.first, self.last = first, last
        self.gather, self.copied = order is not None, order is None


class Kept(NamedTuple):
    """What a replay leaves, in memory of the graph or of the accumulation buffers."""

    losses: Losses
    prefetch: object
    grad_norm: torch.Tensor | None
    grads: list


class StepWork(Work):
    """Runs and records a step on a GPU.

    Args:
        parts: the step's :class:`braze.step.parts.StepParts`.
        body: its :class:`braze.step.body.Body`.
    """

    noun = "step"

    def __init__(self, parts, body):
        self._parts, self._body = parts, body

    def key(self, call, kind):
        parts = self._parts
        return (
            call.gather,
            call.first,
            call.last,
            parts.accumulate,
            parts.max_grad_norm,
            () if call.first else tuple(id(p) for p, _ in self._body.window_grads),
        )

    def before_eager(self, call):
        if call.gather:
            self._body.batches.seek(*call.order)

    def eager(self, entry, call):
        body = self._body
        given = self._inputs_alike(call) if entry.unwritten else []
        loss, norm = body.run(self._batch(call, given), call.gather, call.first, call.last)
        entry.eager, entry.unwritten = loss.dtype, not body.wrote_inputs
        body.window_grads = self._parts.gradients()
        return loss, norm

    def _inputs_alike(self, call):
        """Which of the call's tensors the model may be given in place of copies."""
        if call.spec is not None or call.gather:
            return []
        inputs = enumerate(call.leaves[:-1])
        return [i for i, x in inputs if places.is_alike(x, self._parts.device)]

    def _batch(self, call, given):
        """The call's, which the body alone holds: copies, but for `given` ones."""
        mine, leaves = self._memory(call, given)
        load(mine, call.leaves)
        return [*tree(leaves, call.spec)]

    def _memory(self, call, given):
        """New memory for the call's tensors, None in place of `given` ones; and the same with
        aliases of these: what a model sets on a tensor is not the caller's."""
        wanted = [None if i in given else x for i, x in enumerate(call.leaves)]
        mine = places.unfilled(wanted, self._parts.device)
        pairs = enumerate(zip(mine, call.leaves, strict=True))
        return mine, [x.detach() if i in given else place for i, (place, x) in pairs]

    def is_full(self, entry):
        return entry.kept.losses.full()

    def ways(self, entry):
        """With gradients on a side stream, and without, for where one of them is read too early;
        each again, with a copy of the batch, where it proves to read more of it than its casts."""
        parts = self._parts
        on_side = parts.accumulate == 1 and not parts.ranks.read_gradients()
        for aside in [True, False] if on_side else [False]:
            again = True
            while again:
                took_casts = entry.takes_casts
                yield SideStream(parts.update_takes_casts()) if aside else None
                again = took_casts and not entry.takes_casts

    def before_capture(self, call):
        if call.first:  # as the step itself begins
            self._body.drop_gradients()

    def prepare(self, entry, call, way):
        parts, batches = self._parts, self._body.batches
        batch = call.leaves
        stream, fetched = torch.cuda.Stream(parts.device), None
        losses = Losses(entry.eager, parts.device, stream)
        ahead = call.gather and parts.accumulate == 1
        if ahead and parts.loader.nbytes(*batch) <= prefetch.MAX_BYTES:
            filters = batches.moments.filters
            fetched = prefetch.Prefetch(parts.loader, batches.place, *batch, filters, stream)
        return Branches(stream, losses, fetched, way, self._casts(entry, call))

    def record(self, entry, call, prepared):
        casts = prepared.casts
        given = [call.leaves[i] for i in casts]
        held = [places.holders(x) for x in given]
        mine, leaves = self._memory(call, casts)
        aliases = [casts.get(i, x) for i, x in enumerate(places.aliases(mine))]
        batch = [*tree(leaves, call.spec)]
        del mine, leaves  # the body alone holds the batch
        _, norm = self._body.run(batch, call.gather, call.first, call.last, prepared)
        # A replay would find the batch of this call, and so would who reads what the model keeps.
        keeps = held != [places.holders(x) for x in given]
        reads = any(map(torch.ops.braze.capture_mentions.default, given))
        return aliases, norm, keeps or reads

    def _casts(self, entry, call):
        """Places for casts of the batch: which tensor -> its place."""
        if not entry.takes_casts:
            return {}
        wanted, alike = self._body.casts.wanted_inputs(), self._inputs_alike(call)
        return {
            i: torch.empty_like(call.leaves[i], dtype=dtype)
            for i, dtype in wanted.items()
            if i in alike
        }

    def finish(self, entry, prepared, recorded):
        leaves, norm, needs_batch = recorded
        if needs_batch:
            entry.takes_casts = False
            return None
        if prepared.side_stream and not prepared.side_stream.all_arrived():
            return None
        entry.leaves = leaves
        return Kept(prepared.losses, prepared.prefetch, norm, self._parts.gradients())

    def before_replay(self, entry, call):
        if call.gather:
            size = call.leaves[0]
            self._body.batches.prepare_replay(entry.kept.prefetch, *call.order, size)

    def after_replay(self, entry, call):
        parts, body, grads = self._parts, self._body, entry.kept.grads
        if body.window_grads is not grads:  # the last call ran another graph
            for p in parts.params:
                p.grad = None
            body.window_grads = grads
        if not have_gradients(grads):
            for p, grad in grads:
                p.grad = grad
        if call.last:
            torch.autograd.graph.increment_version(parts.params)
        return entry.kept.losses.next(), entry.kept.grad_norm
