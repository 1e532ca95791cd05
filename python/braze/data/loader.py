"""A loader for data sets that fit in device memory."""

import torch


class DeviceLoader:
    """Iterates over batches of a data set that lives whole, as uint8, in device memory.

    Shuffling, gathering, normalising and casting happen on the device: no worker processes, no
    host-to-device copy and no synchronisation in the loop. Each ``for`` over it is one epoch with a
    permutation of its own.

    Args:
        images: uint8 ``[N, H, W]`` (one channel) or ``[N, C, H, W]``.
        labels: integers ``[N]``.
        batch_size: images per batch.
        shuffle: permute anew in every epoch; False keeps the order.
        seed: equal seeds give equal sequences of permutations on the same kind of device.
        drop_last: leave out the last batch of an epoch where it is smaller.
        device: where the data set lives.
        dtype: of the image batches.
        mean, std: a batch is ``(image / 255 - mean) / std``; numbers, or one per channel.
        memory_format: of the image batches.

    Yields:
        ``(images, labels)``: `dtype` ``[batch, C, H, W]`` and int64 ``[batch]``.

    Raises:
        TypeError: `images` are not uint8, or `labels` are not integers.
        ValueError: another rank, different counts, `batch_size` below 1, or `std` of 0.

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
    ):
        if images.dtype != torch.uint8:
            raise TypeError(f"DeviceLoader: expected images of dtype uint8, but got {images.dtype}")
        if labels.dtype.is_floating_point or labels.dtype.is_complex:
            raise TypeError(f"DeviceLoader: expected integer labels, but got {labels.dtype}")
        if images.dim() not in (3, 4):
            raise ValueError(
                f"DeviceLoader: expected images [N, H, W] or [N, C, H, W], got {[*images.shape]}"
            )
        if labels.shape != images.shape[:1]:
            raise ValueError(
                f"DeviceLoader: expected one label per image, but got images {[*images.shape]} and "
                f"labels {[*labels.shape]}"
            )
        if batch_size < 1:
            raise ValueError(f"DeviceLoader: expected batch_size of at least 1, got {batch_size}")
        std = torch.as_tensor(std, dtype=torch.float64).reshape(-1, 1, 1)
        mean = torch.as_tensor(mean, dtype=torch.float64).reshape(-1, 1, 1)
        if not std.all():
            raise ValueError("DeviceLoader: expected std other than 0")
        self.images = (images.unsqueeze(1) if images.dim() == 3 else images).to(device)
        self.labels = labels.to(device, torch.int64)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.dtype = dtype
        self.memory_format = memory_format
        self._scale = (1 / (255 * std)).to(device, dtype)
        self._shift = (-mean / std).to(device, dtype)
        self.restart(seed)

    def restart(self, seed):
        """Begins the sequence of permutations that belongs to `seed`."""
        self._generator = torch.Generator(self.images.device).manual_seed(seed)

    def get_state(self):
        """The state that decides the coming epochs' permutations, for :meth:`set_state`."""
        return self._generator.get_state()

    def set_state(self, state):
        """Goes on from where :meth:`get_state` was called."""
        self._generator.set_state(state)

    def __len__(self):
        full, rest = divmod(len(self.labels), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self):
        return map(self.gather, self.index_batches())

    def index_batches(self):
        """The next epoch as indices: int64 ``[batch]`` on the device, one tensor per batch."""
        count, device = len(self.labels), self.images.device
        if self.shuffle:
            order = torch.randperm(count, generator=self._generator, device=device)
        else:
            order = torch.arange(count, device=device)
        return iter(order.split(self.batch_size)[: len(self)])

    def gather(self, indices):
        """The batch of these indices, as iterating yields it. Can be captured in a CUDA graph."""
        images = self.images.index_select(0, indices)
        images = images.to(self.dtype, memory_format=self.memory_format)
        return torch.addcmul(self._shift, images, self._scale), self.labels.index_select(0, indices)
