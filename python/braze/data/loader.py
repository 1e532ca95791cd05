"""A loader for data sets that fit in device memory."""

import math
import numbers

import torch

from braze._ops._common import FLOAT_DTYPES
from braze._ops.gather import empty_batch, gather_images, gather_next


class _OrderAhead:
    """An epoch's order that a stream is making.

    It waits for the current stream first: for what made the data that `draw` reads, and for who
    reads an earlier order whose memory this one may get.

    Args:
        state: of the generator, before.
        draw: makes the order.
        stream: does nothing else.
    """

    def __init__(self, state, draw, stream):
        self.state, self._stream = state, stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.inference_mode(False), torch.cuda.stream(stream):
            self._order = draw()

    def take(self, out):
        """The order, or a copy in `out`, for the current stream."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return self._order if out is None else out.copy_(self._order)


class DeviceLoader:
    """Iterates over batches of a data set that lives whole, as uint8, in device memory.

    Shuffling, gathering, normalising and casting happen on the device: no worker processes, no
    host-to-device copy and no synchronisation in the loop. Each ``for`` over it is one epoch with a
    permutation of its own; a batch is one kernel launch, whose values are computed in float32
    (float64 for a float64 `dtype`) and rounded once.

    In a CUDA graph, :meth:`next_batch` draws a new batch at each replay. On a GPU the permutation
    of the next epoch is made while this one goes on, on a stream of its own.

    Args:
        images: uint8 ``[N, H, W]`` (one channel) or ``[N, C, H, W]``.
        labels: integers ``[N]``.
        batch_size: images per batch.
        shuffle: permute anew in every epoch; False keeps the order.
        seed: equal seeds give equal sequences of permutations on the same kind of device.
        drop_last: leave out the last batch of an epoch where it is smaller.
        device: where the data set lives.
        dtype: of the image batches: float64, float32, bfloat16 or float16.
        mean, std: a batch is ``(image / 255 - mean) / std``; numbers, or one per channel.
        memory_format: of the image batches.
        num_replicas, rank: of a distributed training, as ``torch.utils.data.DistributedSampler``
            has them: all ranks draw the same permutation (equal `seed`), and this one takes every
            `num_replicas`-th image of it from `rank` on. So that all have as many, the first images
            of the permutation are taken twice where the number does not divide, or, with
            `drop_last`, the last left out. `batch_size` is that of one rank.

    Yields:
        ``(images, labels)``: `dtype` ``[batch, C, H, W]`` and int64 ``[batch]``.

    Raises:
        TypeError: `images` are no uint8 tensor, `labels` no integer tensor, `batch_size`,
            `num_replicas` or `rank` is no integer, or another `dtype`.
        ValueError: `images` of another number of dimensions, different counts, `batch_size` below
            1, `std` of 0, `mean` or `std` not finite, or neither one number nor one per channel,
            another `memory_format`, or `rank` not from 0 to `num_replicas` - 1.

    Example:
        >>> digits = braze.data.load_mnist()
        >>> loader = DeviceLoader(digits.train_images, digits.train_labels, 64, device="cuda")
        >>> for images, labels in loader: ...
    """

    def __init__(
        self,
        images,
        labels,
        batch_size,
        *,
        shuffle=True,
        seed=0,
        drop_last=False,
        device="cpu",
        dtype=torch.float32,
        mean=0.0,
        std=1.0,
        memory_format=torch.contiguous_format,
        num_replicas=1,
        rank=0,
    ):
        for name, given in (("images", images), ("labels", labels)):
            if not isinstance(given, torch.Tensor):
                raise TypeError(
                    f"DeviceLoader: expected {name} to be a tensor, but got {type(given).__name__}"
                )
        if images.dtype != torch.uint8:
            raise TypeError(f"DeviceLoader: expected images of dtype uint8, but got {images.dtype}")
        if labels.dtype.is_floating_point or labels.dtype.is_complex:
            raise TypeError(f"DeviceLoader: expected integer labels, but got {labels.dtype}")
        if dtype not in FLOAT_DTYPES:
            raise TypeError(
                "DeviceLoader: expected dtype to be float64, float32, bfloat16 or float16, but got "
                f"{dtype}"
            )
        if images.dim() not in (3, 4):
            raise ValueError(
                f"DeviceLoader: expected images [N, H, W] or [N, C, H, W], got {[*images.shape]}"
            )
        if labels.shape != images.shape[:1]:
            raise ValueError(
                f"DeviceLoader: expected one label per image, but got images {[*images.shape]} and "
                f"labels {[*labels.shape]}"
            )
        for name, given in (
            ("batch_size", batch_size), ("num_replicas", num_replicas), ("rank", rank)
        ):  # fmt: skip
            if isinstance(given, bool) or not isinstance(given, numbers.Integral):
                raise TypeError(f"DeviceLoader: expected {name} to be an int, but got {given!r}")
        if batch_size < 1:
            raise ValueError(f"DeviceLoader: expected batch_size of at least 1, got {batch_size}")
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"DeviceLoader: expected rank from 0 to num_replicas - 1, but got rank {rank} of "
                f"{num_replicas}"
            )
        if memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ValueError(
                "DeviceLoader: expected memory_format to be torch.contiguous_format or "
                f"torch.channels_last, but got {memory_format!r}"
            )
        images = images.unsqueeze(1) if images.dim() == 3 else images
        mean, std = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (mean, std))
        if not (std.all() and std.isfinite().all() and mean.isfinite().all()):
            raise ValueError("DeviceLoader: expected a finite mean and a finite std other than 0")
        mean = _per_channel("mean", mean, images.size(1))
        std = _per_channel("std", std, images.size(1))
        self.images = images.to(device).contiguous()
        self.labels = labels.to(device, torch.int64).contiguous()
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.dtype = dtype
        self.memory_format = memory_format
        computed_in = torch.float64 if dtype == torch.float64 else torch.float32
        self._scale = (1 / (255 * std)).to(device, computed_in)
        self._shift = (-mean / std).to(device, computed_in)
        self._order = self._position = None
        self._ahead = self._stream = None
        self.num_replicas, self.rank = num_replicas, rank
        self._mine = None if num_replicas == 1 else self._part(num_replicas, rank)
        self.restart(seed)

    def _part(self, num_replicas, rank):
        """Where in an epoch's permutation the images of one rank are."""
        count = len(self.labels)
        own = count // num_replicas if self.drop_last else math.ceil(count / num_replicas)
        part = torch.arange(own, device=self.labels.device)
        return (part * num_replicas + rank) % max(1, count)

    def restart(self, seed):
        """Begins the sequence of permutations that belongs to `seed`."""
        self._generator = torch.Generator(self.images.device).manual_seed(seed)
        self._ahead = None

    def __copy__(self):
        """A loader that shares the data set, and goes on by itself from where this one is."""
        other = object.__new__(type(self))
        vars(other).update(self.__getstate__())
        if self._order is not None:
            other._order, other._position = self._order.clone(), self._position.clone()
        return other

    def __getstate__(self):
        """Of a pickle or a deep copy: without the order that a stream is making, as before it."""
        generator = self._generator.clone_state()
        generator.set_state(self.get_state())
        return vars(self) | {"_generator": generator, "_ahead": None, "_stream": None}

    def get_state(self):
        """The state that decides the coming epochs' permutations, for :meth:`set_state`."""
        return self._generator.get_state() if self._ahead is None else self._ahead.state

    def set_state(self, state):
        """Goes on from where :meth:`get_state` was called."""
        self._generator.set_state(state)
        self._ahead = None

    def __len__(self):
        return len(self.batch_sizes())

    def batch_sizes(self):
        """The number of images in each batch of an epoch, as a list."""
        count = len(self.labels if self._mine is None else self._mine)
        full, rest = divmod(count, self.batch_size)
        return [self.batch_size] * full + [rest] * (rest > 0 and not self.drop_last)

    def __iter__(self):
        return map(self.gather, self.index_batches())

    def index_batches(self):
        """The next epoch as indices: int64 ``[batch]`` on the device, one tensor per batch."""
        return iter(self.draw().split(self.batch_size)[: len(self)])

    def draw(self, out=None):
        """The order of the next epoch: int64 ``[N]`` on the device, or this rank's part of it.

        Args:
            out: a tensor to write it into: of :meth:`empty_order`.
        """
        if not self.shuffle or not self.images.is_cuda:
            return self._draw(out)
        if torch.cuda.is_current_stream_capturing():
            return self._draw(out)  # which torch refuses: replays would repeat an order
        order = self._draw(out) if self._ahead is None else self._ahead.take(out)
        self._draw_ahead()
        return order

    def _draw_ahead(self):
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.images.device)
        self._ahead = _OrderAhead(self._generator.get_state(), self._draw, self._stream)

    def _draw(self, out=None):
        if self._mine is not None:
            return torch.index_select(self._permutation(), 0, self._mine, out=out)
        return self._permutation(out)

    def _permutation(self, out=None):
        count, device = len(self.labels), self.images.device
        if self.shuffle:
            return torch.randperm(count, generator=self._generator, device=device, out=out)
        return torch.arange(count, device=device, out=out)

    def empty_order(self):
        """Memory for :meth:`draw`."""
        return torch.empty_like(self.labels if self._mine is None else self._mine)

    def gather(self, indices):
        """The batch of these indices, as iterating yields it. Can be captured in a CUDA graph.

        Args:
            indices: int64 ``[batch]`` on the loader's device.

        Raises:
            IndexError: on the CPU, an index out of bounds. On CUDA that image is NaN and its label
                -1, which braze's losses report (:func:`braze.check_errors`).
            RuntimeError: another dtype, shape or device.
        """
        return gather_images(self.images, self.labels, indices, *self._settings())

    def start_epoch(self):
        """Draws the next epoch's order for :meth:`next_batch`, which begins at its start.

        The permutations are those that iterating would draw. Queues work on the device and waits
        for nothing; call it between replays of a CUDA graph, not inside.
        """
        if self._order is None:
            with torch.inference_mode(False):  # whose tensors could not be refilled outside of it
                self._order = self.empty_order()
                self._position = torch.zeros(2, dtype=torch.int64, device=self.labels.device)
        self.draw(out=self._order)
        self._position.zero_()

    def next_batch(self, size=None):
        """The next batch of the epoch that :meth:`start_epoch` began, for captured steps.

        The device keeps count, so a captured call draws a new batch at every replay. The number of
        images is part of the graph: an epoch whose last batch is smaller takes a second graph.
        A graph reads the loader's memory: keep the loader as long as the graph.

        Args:
            size: how many images; `batch_size` unless given. See :meth:`batch_sizes`.

        Returns:
            ``(images, labels)`` as iterating yields them.

        Raises:
            RuntimeError: before the first :meth:`start_epoch`.
            IndexError: on the CPU, past the end of the epoch. On CUDA the images past it are NaN
                and their labels -1, which braze's losses report (:func:`braze.check_errors`).

        Example:
            >>> loader.start_epoch()
            >>> with torch.cuda.graph(graph):
            ...     loss = step(*loader.next_batch())
            >>> for _ in range(epochs):
            ...     loader.start_epoch()
            ...     for _ in range(len(loader)):  # of full batches: drop_last=True
            ...         graph.replay()
        """
        if self._order is None:
            raise RuntimeError("DeviceLoader: expected start_epoch() before next_batch()")
        batch = self.empty_batch(self.batch_size if size is None else size)
        self.gather_next(self._order, self._position, batch)
        return batch[:2]

    def empty_batch(self, size, filters=()):
        """Memory for :meth:`gather_next`: images, labels, and the moments or None."""
        return empty_batch(self.images, self.labels, size, *self._settings()[2:], filters)

    def nbytes(self, size):
        """Bytes of a batch's images."""
        return size * math.prod(self.images.shape[1:]) * self.dtype.itemsize

    def gather_next(self, order, position, batch, filters=()):
        """Writes into `batch` the next one of an epoch that the caller keeps.

        Args:
            order: as :meth:`draw` makes it.
            position: int64 ``[2]`` on the device: where in `order` the batch begins, and 0.
            batch: of :meth:`empty_batch`.
            filters: of a convolution whose patches' moments are wanted, as given there.
        """
        data, factors = (self.images, self.labels), (self._scale, self._shift)
        gather_next(*data, order, position, *factors, batch, filters)

    def _settings(self):
        return self._scale, self._shift, self.dtype, self.memory_format == torch.channels_last


def _per_channel(name, value, channels):
    if value.numel() not in (1, channels):
        raise ValueError(
            f"DeviceLoader: expected {name} to be one number or {channels}, one per channel, but "
            f"got {value.numel()}"
        )
    return value.reshape(-1).expand(channels)
