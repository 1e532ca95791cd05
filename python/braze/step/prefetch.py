"""The batch of a captured step's next replay, gathered while this one runs."""

import math

import torch

from braze._ops.cast import cast_

#: Bytes of images in a batch that is gathered so. A larger one takes from the step before it as
#: much time as it would take from its own (H200: batch 512 in bf16 5 us gained, batch 1024 nothing,
#: in TF32 12 us lost).
MAX_BYTES = 1 << 20
_ALIGNMENT = 256  # bytes, as the allocator's


class Prefetch:
    """Two batches of one size: that of the coming replay, and the one behind it.

    Nothing in a step waits for its batch then, and the gather for nothing: it runs in a branch of
    the graph. When nobody reads the old batch any more, the new one is copied to its place,
    concurrently with the update.

    Args:
        loader: a :class:`braze.data.DeviceLoader`.
        place: the epoch's order and the position in it that the device counts.
        size: images per batch.
        filters: of the convolution whose patches' moments belong to the batch.
        stream: of the branch, which has to be joined before the capture ends.
    """

    def __init__(self, loader, place, size, filters, stream):
        self.filters = filters
        self._gather = lambda batch: loader.gather_next(*place, batch, filters)
        with torch.inference_mode(False):  # whose tensors could not be written outside of it
            wanted = loader.empty_batch(size, filters)
            self.batch, self._memory = _in_one(wanted)
            self._next, self._next_memory = _in_one(wanted)
        self._stream = stream

    def fill(self):
        """Gathers the coming replay's batch now: the one at the position."""
        self._gather(self.batch)

    def start(self):
        """Within a capture: gathers the batch behind it, in the branch."""
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._stream):
            self._gather(self._next)

    def finish(self):
        """Behind the backward pass: makes it the coming one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        # By a kernel: the end of a graph waits longer for a copy engine.
        with torch.cuda.stream(self._stream):
            cast_([self._memory], [self._next_memory])


def _in_one(tensors):
    """Tensors like those given, or None where there is none, and the memory they lie in as one."""
    begins, end = [], 0
    for t in tensors:
        begins.append(end)
        if t is not None:
            end += math.ceil(t.nbytes / _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end // 8, dtype=torch.float64, device=tensors[0].device)
    inside = [
        t
        if t is None
        else memory.view(t.dtype).as_strided(t.shape, t.stride(), begin // t.itemsize)
        for t, begin in zip(tensors, begins, strict=True)
    ]
    return inside, memory
