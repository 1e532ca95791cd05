"""What a population's graph does concurrently: its members, and what belongs to all of them."""

import contextlib
from typing import NamedTuple

import torch

from braze import _lib
from braze.step.branches import LOSSES, Slots
from braze.step.prefetch import Prefetch

#: Streams that the members' chains of kernels are dealt out to. Each member on a stream of its own
#: would take all members' memory at once; on one stream, its members share it.
STREAMS = 8
_MOST_LOSSES = 1 << 26  # of a graph's buffer: 256 MiB in float32


class Chains:
    """The members' streams. A member is always on the same one, so that what libraries and
    allocators keep for a stream is there when a step is captured.

    Args:
        device: of the members.
        n: number of members.
    """

    def __init__(self, device, n):
        self.device, self.streams = device, []
        if device.type == "cuda":
            urgent = _lib.limits["urgent_priority"]
            self.streams = [
                torch.cuda.Stream(device, priority=urgent) for _ in range(min(n, STREAMS))
            ]
        # indices of streams that have been given something, that wait for the main one's latest
        self._used, self._behind = set(), set()

    @contextlib.contextmanager
    def forked(self):
        """Members may run within this block; at its end all of them are joined."""
        self._used, self._behind = set(), set()
        try:
            yield
        finally:
            for index in sorted(self._used):
                torch.cuda.current_stream(self.device).wait_stream(self.streams[index])

    def refork(self):
        """Members that begin from now on wait for what the main stream has been given."""
        self._behind = set()

    @contextlib.contextmanager
    def of(self, i):
        """Member `i` runs within this block."""
        if not self.streams:
            yield
            return
        index = i % len(self.streams)
        stream = self.streams[index]
        # Only where there is something to wait for: a kernel that waits for two cannot start early.
        if index not in self._behind:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            self._behind.add(index)
            self._used.add(index)
        with torch.cuda.stream(stream):
            yield

    def waves(self, n):
        """Members in groups that run at the same time."""
        size = len(self.streams) or STREAMS
        return [range(first, min(first + size, n)) for first in range(0, n, size)]


class MemberLosses(Slots):
    """The losses of each replay, a row of as many as there are members.

    Copied on a branch that waits for all forward passes, and no backward pass for it.
    """

    def __init__(self, dtype, device, n):
        super().__init__(dtype, device, n, min(LOSSES, _MOST_LOSSES // n))
        self._stream, self._kept = torch.cuda.Stream(device), []

    def keep(self, loss):
        """Within a capture: the next member's, on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(loss.device))
        self._kept.append(loss.detach())

    def copy(self):
        """Within a capture, behind the last member's: the row."""
        with torch.cuda.stream(self._stream):
            self.write(torch.stack(self._kept).unsqueeze(0))

    def join(self):
        """What the current stream is given from now on waits for the branch."""
        if self._kept:
            torch.cuda.current_stream(self._kept[0].device).wait_stream(self._stream)
        self._kept = []  # until here nothing else may be in their memory


class MembersPrefetch(Prefetch):
    """The batches of the next replay, gathered from the beginning of a step on; in their place when
    all members' backward passes are done."""

    def __init__(self, loader, place, size, filters):
        super().__init__(loader, place, size, filters, torch.cuda.Stream(loader.images.device))
        self._started = False

    def start(self):
        super().start()
        self._started = True

    def wait(self):
        """Within a capture: a member no longer reads its batch, on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))

    def join(self):
        """What the current stream is given from now on waits for the branch."""
        if self._started:
            torch.cuda.current_stream(self._memory.device).wait_stream(self._stream)
        self._started = False


class PopulationBranches(NamedTuple):
    """Of one graph."""

    losses: MemberLosses
    prefetch: MembersPrefetch | None
    side_streams: list  # of each member a SideStream, or None
    casts: dict


class MemberBranches(NamedTuple):
    """A member's, as :class:`braze.step.branches.Branches`."""

    stream: None
    losses: MemberLosses
    prefetch: None
    side_stream: object
    casts: dict
