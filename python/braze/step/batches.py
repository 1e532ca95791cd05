"""Batches that a step takes from a :class:`braze.data.DeviceLoader` by itself."""

import torch

from braze.step.moments import GatheredMoments


class Batches:
    """Where a step is in an epoch's order, on the device and as the host knows it; the batch there.

    Args:
        parts: the step's :class:`braze.step.parts.StepParts`.
    """

    def __init__(self, parts):
        self._parts = parts
        self.moments = GatheredMoments()
        #: the order and the position that the graphs read, on the device
        self.place = None
        self._order, self._begin = None, 0  # the order that was copied there, the position
        self._fetched = None, None, 0  # a graph's Prefetch, and where its batch begins in an order

    def bind(self, loader):
        with torch.inference_mode(False):  # whose tensors could not be written outside of it
            zeros = torch.zeros(2, dtype=torch.int64, device=self._parts.device)
            self.place = loader.empty_order(), zeros

    def relearn(self):
        """Forgets which moments are wanted, and the place."""
        self.moments = GatheredMoments()
        self.forget_place()

    def forget_place(self):
        """After a step that may have stopped anywhere."""
        self._order, self._fetched = None, (None, None, 0)

    def seek(self, order, begin):
        """Brings an epoch's order to where the graphs read it, and the position to `begin`."""
        if order is not self._order:
            self.place[0].copy_(order)
        if order is not self._order or begin != self._begin:
            self.place[1].zero_()
            self.place[1][0] = begin
        self._order, self._begin = order, begin

    def advance(self, size):
        """After a step, which has moved the position on by itself."""
        self._begin += size

    def gather(self, size, prefetch):
        """The loader's next batch, or, while a step is captured, that which a replay will find."""
        if prefetch:
            batch, filters = prefetch.batch, prefetch.filters
        else:
            filters = self.moments.filters
            batch = self._parts.loader.empty_batch(size, filters)
            self._parts.loader.gather_next(*self.place, batch, filters)
        *batch, moments = batch
        self.moments.gathered(batch[0], moments, filters)
        return batch

    def prepare_replay(self, prefetch, order, begin, size):
        """Before a replay: its batch, or the position from which it gathers."""
        if prefetch is None:
            self.seek(order, begin)
            return
        held, held_order, held_begin = self._fetched
        if held is not prefetch or held_order is not order or held_begin != begin:
            self.seek(order, begin)
            prefetch.fill()
            self._begin += size
        self._fetched = prefetch, order, begin + size
