"""A population's step as work for graphs."""

from braze.population.branches import MemberLosses, MembersPrefetch, PopulationBranches
from braze.step import prefetch
from braze.step.side_stream import SideStream
from braze.step.step_work import Kept, StepWork


class PopulationWork(StepWork):
    """Runs and records a step on a GPU: each member's is a chain of kernels on one of a few
    branches of the graph.

    Gradients are on no side stream: while other members' kernels fill the device there is nothing
    to gain, a join keeps the kernel behind it from starting early, and a device has one.

    Args:
        parts: the step's :class:`braze.population.parts.PopulationParts`.
        body: its :class:`braze.population.body.PopulationBody`.
    """

    def key(self, call, kind):
        return *super().key(call, kind), self._body.each

    def eager(self, entry, call):
        random = self._body.random
        random.drew = False
        result = super().eager(entry, call)
        entry.draws |= random.drew
        return result

    def generators(self, entry):
        """Only where members draw: a graph with generators has each write its state to the GPU
        before every replay."""
        return self._body.random.generators(self._parts.device) if entry.draws else ()

    def ways(self, entry):
        """With casts of gradients left to the updates, and without, for where they are read."""
        takes_casts = self._parts.update_takes_casts()
        if any(takes_casts):
            yield [SideStream(takes, forks=False) for takes in takes_casts]
        yield [None] * len(takes_casts)

    def prepare(self, entry, call, way):
        parts, batches = self._parts, self._body.batches
        losses, fetched = MemberLosses(entry.eager, parts.device, len(way)), None
        batch = call.leaves
        if call.gather and parts.loader.nbytes(*batch) <= prefetch.MAX_BYTES:
            fetched = MembersPrefetch(parts.loader, batches.place, *batch, batches.filters())
        return PopulationBranches(losses, fetched, way, {})

    def before_replay(self, entry, call):
        with self._body.sharing():
            super().before_replay(entry, call)

    def finish(self, entry, prepared, recorded):
        if not all(side is None or side.all_arrived() for side in prepared.side_streams):
            return None
        entry.leaves, norms, _ = recorded
        return Kept(prepared.losses, prepared.prefetch, norms, self._parts.gradients())
