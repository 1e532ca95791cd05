"""Average pooling to a given size, of windows that are equal: means of channels
(csrc/cuda/channel_scale/) or avg_pool2d (csrc/cuda/pool/)."""

import operator

import torch

from braze._ops._common import plain
from braze._ops.channel_scale import channel_mean
from braze._ops.pool import avg_pool2d


def adaptive_avg_pool2d(input, output_size):
    """Means of windows that cover the image, so many along each axis. As
    ``torch.nn.functional.adaptive_avg_pool2d``.

    Args:
        input: [N, C, H, W]; float64, float32, bfloat16 or float16. Other ranks are torch's.
        output_size: an int or (height, width), each of them an int or None, for the input's own.
            Where it does not divide the input's, windows overlap, and torch's kernels run.

    Returns:
        [N, C, P, Q] in the input's dtype and memory format; sums are kept in fp32 for 16-bit input.
        Bitwise repeatable, forward and backward. Differentiable any number of times.

    Raises:
        as torch.
    """
    window = _window(input, output_size)
    if window is None:
        return torch.nn.functional.adaptive_avg_pool2d(input, output_size)
    if window == tuple(input.shape[2:]):
        return channel_mean(input)
    return avg_pool2d(input, window)


def _window(input, output_size):
    """The extents of the windows where all are equal, or None."""
    if not plain(input) or input.dim() != 4:
        return None
    extents = input.shape[2:]
    sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,) * 2
    if len(sizes) != 2 or 0 in input.shape[1:]:
        return None
    window = []
    for extent, size in zip(extents, sizes, strict=True):
        try:
            size = extent if size is None else operator.index(size)
        except TypeError:
            return None
        if size <= 0 or extent % size != 0:
            return None
        window.append(extent // size)
    return None if window == [1, 1] else tuple(window)
