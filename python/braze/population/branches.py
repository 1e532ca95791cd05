"""What a population's graph does concurrently: its members, and what belongs to all of them."""

import contextlib
from typing import NamedTuple

import torch

from braze import _lib, _multiprocessors
from braze.step.branches import LOSSES, Slots
from braze.step.prefetch import Prefetch

#: Streams that the members' chains of kernels are dealt out to, at most: of small members, and of
#: others, whose kernels fill more of the GPU. On one stream, its members share memory.
STREAMS, LARGE_STREAMS = 32, 8
_LARGE_BYTES = 8 << 20  # of a member's parameters
_WAVE = 8  # members whose weights are cast together, so that the first ones may begin
_MOST_LOSSES = 1 << 26  # of a graph's buffer: 256 MiB in float32


def chain_count(population):
    """How many chains there are for a population: of as many members each."""
    n = len(population)
    nbytes = sum(p.numel() * p.element_size() for p in population[0].parameters())
    most = LARGE_STREAMS if nbytes > _LARGE_BYTES else STREAMS
    return -(-n // -(-n // most))


def share_of(device, chains):
    """How many multiprocessors the kernels of one of so many chains count on: these share all of
    them. Of a single chain, and on the CPU, whatever is set."""
    count = _multiprocessors.current()
    if device.type == "cuda" and chains > 1:
        count = count or torch.cuda.get_device_properties(device).multi_processor_count
        count = max(1, count // chains)
    return count


class Chains:
    """The members' streams. A member is always on the same one, so that what libraries and
    allocators keep for a stream is there when a step is captured.

    Args:
        device: of the members.
        count: how many there are.
    """

    def __init__(self, device, count):
        self.device, self.streams, self._count = device, [], count
        if device.type == "cuda":
            # Not of the step's own stream's priority: torch would give that stream out again, and
            # all other chains would wait for the one that is on it.
            priority = _lib.limits["urgent_priority"] + 1
            self.streams = [torch.cuda.Stream(device, priority=priority) for _ in range(count)]
        # indices of streams that have been given something, that wait for the main one's latest
        self._used, self._behind = set(), set()

    def sharing(self):
        """Within this block kernels count on a chain's share of the device."""
        return _multiprocessors.multiprocessors(share_of(self.device, self._count))

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
        """Members in groups whose weights are cast together: few, that the first ones may begin."""
        size = min(len(self.streams) or STREAMS, _WAVE)
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
