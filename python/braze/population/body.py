"""The step of a population, as it runs eagerly and as it is recorded."""

import contextlib

import torch
from torch.utils import _pytree as pytree

from braze.population.branches import Chains, MemberBranches, chain_count
from braze.step.batches import Batches
from braze.step.body import Body
from braze.step.casts import cast_ahead
from braze.step.side_stream import none_but

_ALIGNMENT = 16  # bytes, of what kernels load at once
_INPUT = (
    "the model or the loss writes to the batch, which all members share; give each a batch of its "
    "own: step.each(...)"
)
_LOSS = (
    "loss_fn writes to a tensor of its own, which all members share; give a list with a loss "
    "function for each member"
)


class MemberBatches(Batches):
    """The members' batches, of their loaders as one.

    Args:
        parts: the step's :class:`braze.population.parts.PopulationParts`.
        members: the members' :class:`braze.step.body.Body`.
    """

    def __init__(self, parts, members):
        super().__init__(parts)
        self._members = members

    def filters(self):
        """Of the convolution whose patches' moments are wanted: members are alike."""
        return self._members[0].batches.moments.filters

    def gather(self, size, prefetch):
        """As :class:`Batches` has it; a batch of each member, in a list."""
        if prefetch:
            batch, filters = prefetch.batch, prefetch.filters
        else:
            filters = self.filters()
            batch = self._parts.loader.empty_batch(size, filters)
            self._parts.loader.gather_next(*self.place, batch, filters)
        images, labels, moments = batch
        n, batches = len(self._members), []
        moments = [None] * n if moments is None else moments
        shares = zip(self._members, images.chunk(n), labels.chunk(n), moments, strict=True)
        for member, own_images, own_labels, sums in shares:
            own_images = _aligned(own_images)
            member.batches.moments.gathered(own_images, sums, filters)
            batches.append([own_images, own_labels])
        return batches


def _aligned(tensor):
    """The tensor, or a copy where a member's part does not begin where a tensor of its own would,
    so that other kernels might take it."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


class PopulationBody:
    """Runs one step of all members.

    Args:
        parts: the step's :class:`braze.population.parts.PopulationParts`.
    """

    def __init__(self, parts):
        self._parts = parts
        self.members = [Body(member) for member in parts.members]
        self.random = parts.population._random
        self.batches = MemberBatches(parts, self.members)
        #: (parameter, gradient) as the last step left them
        self.window_grads = []
        #: as :class:`Body` has it; members share a batch, and refuse to write to it
        self.wrote_inputs = True
        #: whether the tensors of a batch have a dimension for the members in front
        self.each = False
        self._chains = None

    def relearn(self):
        self.batches.relearn()
        for member in self.members:
            member.relearn()

    def keep_gradients_of(self, params):
        """After each inspection of the parts."""
        kept = set(params)
        self.window_grads = [(p, grad) for p, grad in self.window_grads if p in kept]
        if self._chains is None or self._chains.device != self._parts.device:
            self._chains = Chains(self._parts.device, chain_count(self._parts.population))

    def sharing(self):
        """Within this block kernels count on a chain's share of the device: also those that fill
        the first batch of a graph, whose moments are as many sums as there are blocks."""
        return self._chains.sharing()

    def clean_scaler(self):
        """There is none."""

    def drop_gradients(self):
        """As :meth:`braze.step.body.Body.drop_gradients`."""
        self.window_grads = []
        for member in self.members:
            member.drop_gradients()

    def run(self, batch, gather, first, last, branches=None):
        """One step, as :meth:`braze.step.body.Body.run` of each member.

        Returns:
            The losses ``[n]``, and the norms of the gradients ``[n]`` or None.
        """
        self.drop_gradients()
        n, norms, kept = len(self.members), [], []
        losses, prefetch, side_streams, _ = branches or (None, None, [None] * n, {})
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sharing())
            if branches:
                stack.enter_context(none_but(self._parts.params[0]))
                stack.callback(losses.join)
            batches = self._batches(batch, gather, prefetch)
            watched = [] if branches else self._shared(() if gather else batch)
            if prefetch:
                stack.callback(prefetch.join)
                prefetch.start()
            stack.enter_context(self._chains.forked())
            found = []
            for wave in self._chains.waves(n):
                # On the main stream, beside the chains of the wave before.
                casts = cast_ahead([self.members[i].casts for i in wave])
                if casts:
                    self._chains.refork()
                    kept.append(casts)  # until the chains are joined
                for i in wave:
                    own = branches and MemberBranches(None, losses, None, side_streams[i], {})
                    found.append(self._gradients(i, batches[i], own, prefetch))
                    if branches:
                        norms.append(self._update(i, side_streams[i]))
                    else:
                        _check_unwritten(watched)
            if branches:
                losses.copy()
                if prefetch:
                    prefetch.finish()
            else:
                # Only when all gradients are there: what raises before leaves all weights alone.
                norms = [self._update(i) for i in range(n)]
        norms = None if self._parts.max_grad_norm is None else torch.stack(norms)
        return None if branches else torch.stack(found), norms

    def _gradients(self, i, batch, branches, prefetch):
        with self._chains.of(i), self.random.of(i, self._parts.device):
            loss = self.members[i].gradients(batch, False, True, True, branches)
            if prefetch:
                prefetch.wait()
            return loss

    def _update(self, i, side_stream=None):
        with self._chains.of(i), self.random.of(i, self._parts.device):
            return self.members[i].update(side_stream)

    # ---- batches ----

    def _batches(self, batch, gather, prefetch):
        """A batch for each member."""
        if gather:
            return self.batches.gather(*batch, prefetch)
        n = len(self.members)
        if not self.each:
            return [[*batch] for _ in range(n)]
        return [pytree.tree_map(lambda x, i=i: _of_member(x, i), batch) for i in range(n)]

    def _shared(self, batch):
        """Tensors that all members read, their versions, and what to say where one is written."""
        if len(self.members) == 1:
            return []
        inputs = [] if self.each else pytree.tree_leaves(batch)
        shared = [(t, _INPUT) for t in inputs if isinstance(t, torch.Tensor)]
        shared += [(t, _LOSS) for t in self._parts.tensors_of_loss()]
        return [(t, t._version, what) for t, what in shared if not t.is_inference()]


def _check_unwritten(watched):
    for tensor, version, what in watched:
        if tensor._version != version:
            raise RuntimeError(f"Population: {what}")


def _of_member(leaf, i):
    return _aligned(leaf[i]) if isinstance(leaf, torch.Tensor) else leaf
