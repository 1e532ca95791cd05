"""The loaders of a population's members as one."""

import torch


class Loaders:
    """Loaders of one data set, or of as many as there are members, as one loader: its batch *k* is
    every member's batch *k*, one behind the other.

    Of one data set all members' batches are gathered in one launch: the orders that the members'
    loaders draw are put together so that what belongs to one step is consecutive. Otherwise each
    member's batch is a launch of its own, which finds its place in the same order.

    Args:
        loaders: a :class:`braze.data.DeviceLoader` of each member.
        n: number of members.

    Raises:
        TypeError: others.
        ValueError: not one for each member, the same one twice, or loaders whose batches differ in
            number, size, shape, dtype, memory format or device.
    """

    num_replicas = 1

    def __init__(self, loaders, n):
        if hasattr(loaders, "gather_next"):
            raise TypeError(
                "Population: expected a list with a braze.data.DeviceLoader for each member, but "
                "got one loader; copy.copy(loader) shares its data set"
            )
        loaders = list(loaders)
        for loader in loaders:
            if not hasattr(loader, "gather_next"):
                raise TypeError(
                    "Population: expected braze.data.DeviceLoaders, but got "
                    f"{type(loader).__name__}"
                )
        if len(loaders) != n:
            raise ValueError(f"Population: expected {n} loaders, but got {len(loaders)}")
        if len({id(loader) for loader in loaders}) != n:
            raise ValueError(
                "Population: expected a loader for each member, but one is there twice; "
                "copy.copy(loader) shares its data set"
            )
        first = _described(loaders[0])
        for i, loader in enumerate(loaders):
            for what, value in _described(loader).items():
                if value != first[what]:
                    raise ValueError(
                        f"Population: expected loaders of equal {what}, but got {first[what]} of "
                        f"member 0 and {value} of member {i}"
                    )
        self._loaders, self._first = loaders, loaders[0]
        self._are_one = all(_same_source(loader, loaders[0]) for loader in loaders)

    # ---- as a DeviceLoader has it ----

    @property
    def images(self):
        return self._first.images

    @property
    def dtype(self):
        return self._first.dtype

    @property
    def memory_format(self):
        return self._first.memory_format

    @property
    def batch_size(self):
        return len(self._loaders) * self._first.batch_size

    def __len__(self):
        return len(self._first)

    def batch_sizes(self):
        return [len(self._loaders) * size for size in self._first.batch_sizes()]

    def nbytes(self, size):
        """Bytes of a member's images in a batch."""
        return self._first.nbytes(size // len(self._loaders))

    def get_state(self):
        """A state of each member's loader, in a list."""
        return [loader.get_state() for loader in self._loaders]

    def set_state(self, states):
        for loader, state in zip(self._loaders, states, strict=True):
            loader.set_state(state)

    def empty_order(self):
        order = self._first.empty_order()
        return order.new_empty(len(self._loaders) * len(order))

    def draw(self):
        """The order of the next epoch: of each step one member's indices behind the other's."""
        orders = torch.stack([loader.draw() for loader in self._loaders])
        n, count = orders.shape
        whole = count // self._first.batch_size * self._first.batch_size
        steps = orders[:, :whole].view(n, -1, self._first.batch_size).transpose(0, 1)
        return torch.cat([steps.reshape(-1), orders[:, whole:].reshape(-1)])

    def empty_batch(self, size, filters=()):
        """Memory for :meth:`gather_next`: images, labels, and the moments or None, with a dimension
        for the members."""
        images, labels, _ = self._first.empty_batch(size)
        moments = None
        if filters:
            of_one = self._first.empty_batch(0, filters)[2]
            moments = of_one.new_empty(len(self._loaders), *of_one.shape)
        return images, labels, moments

    def gather_next(self, order, position, batch, filters=()):
        if self._are_one:
            self._first.gather_next(order, position, batch, filters)
            return
        images, labels, moments = batch
        n = len(self._loaders)
        moments = [None] * n if moments is None else moments
        parts = zip(self._loaders, images.chunk(n), labels.chunk(n), moments, strict=True)
        for loader, *part in parts:
            loader.gather_next(order, position, part, filters)


def _described(loader):
    return {
        "images' shape": [*loader.images.shape[1:]],
        "number of images": len(loader.empty_order()),
        "batch size": loader.batch_size,
        "drop_last": loader.drop_last,
        "dtype": loader.dtype,
        "memory format": loader.memory_format,
        "device": loader.images.device,
    }


def _same_source(a, b):
    """Whether the same index means the same image, and that the same values."""
    return (
        a.images.data_ptr() == b.images.data_ptr()
        and a.labels.data_ptr() == b.labels.data_ptr()
        and len(a.labels) == len(b.labels)
        and torch.equal(a._scale, b._scale)
        and torch.equal(a._shift, b._shift)
    )
