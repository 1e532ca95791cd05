"""What a captured step does concurrently with the chain of its kernels, on branches of a graph."""

from typing import NamedTuple

import torch

from braze.step.prefetch import Prefetch
from braze.step.side_stream import SideStream

#: replays whose losses a graph has room for; it is captured anew then, so that no loss is ever
#: overwritten
LOSSES = 1 << 19


class Slots:
    """Where a graph's replays leave scalars, each in a place of its own.

    Args:
        width: how many there are of a replay; None: one, which :meth:`next` returns as a scalar.
        rows: replays that there is room for; by default so many that there are LOSSES scalars.
    """

    def __init__(self, dtype, device, width=None, rows=None):
        shape = LOSSES if width is None else (rows or max(LOSSES // width, 1), width)
        with torch.inference_mode(False):  # whose tensors could not be written outside of it
            self._values = torch.empty(shape, dtype=dtype, device=device)
            self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self.width, self._count = width, 0

    def full(self):
        return self._count == len(self._values)

    def write(self, values):
        """Within a capture: copies `values`, with one dimension more in front."""
        self._values.index_copy_(0, self._place, values)
        self._place.add_(1)

    def next(self):
        """What the last replay has left."""
        self._count += 1
        return self._values[self._count - 1]


class Losses(Slots):
    """The loss of each replay.

    Copying it after each replay would make the GPU wait for two launches; the graph does it
    concurrently with the backward pass, on the branch of `stream`.
    """

    def __init__(self, dtype, device, stream):
        super().__init__(dtype, device)
        self._stream = stream

    def keep(self, loss):
        """Within a capture: copies `loss` on the branch, which has to be joined before it ends."""
        self._stream.wait_stream(torch.cuda.current_stream(loss.device))
        with torch.cuda.stream(self._stream):
            self.write(loss.detach().reshape(1))


class Branches(NamedTuple):
    """Of one graph."""

    stream: torch.cuda.Stream  # of the branch of `losses` and `prefetch`
    losses: Losses
    prefetch: Prefetch | None
    side_stream: SideStream | None  # of the gradients
    casts: dict  # of inputs that are cast already: which one -> its cast
