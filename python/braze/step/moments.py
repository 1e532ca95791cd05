"""The moments of a batch's patches, summed in the launch that gathers the batch."""


def _version(tensor):
    return None if tensor.is_inference() else tensor._version


class GatheredMoments:
    """Learns in one forward pass that a fused block convolves the gathered batch as it is, and has
    the moments of its patches made in the launch that gathers in the next ones. The results are
    those of the block's own launch, bit for bit."""

    def __init__(self):
        self.filters = ()  # what gather_next() is to be asked for
        self._batch = None  # images, their version, filters and the moments made for them

    def gathered(self, images, moments, filters):
        """In a forward pass, which ends with :meth:`drop`: the batch that is about to be used, and
        the moments, if any, made for `filters`."""
        self._batch = images, _version(images), filters, moments

    def drop(self):
        """Forgets the batch."""
        self._batch = None

    def take(self, input, weight, padding):
        """The moments of the patches of `input` under the weight's filters, or None."""
        images, version, made_for, moments = self._batch or (None,) * 4
        if input is not images or _version(input) != version:
            return None  # another tensor, or this one has been written to
        self.filters = *weight.shape[2:], *padding
        return moments if made_for == self.filters else None
