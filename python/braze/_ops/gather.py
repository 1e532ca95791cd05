"""The gather of a batch from a data set; used by braze.data.DeviceLoader. Kernels:
csrc/kernels/gather/."""

import contextlib

import torch

from braze._nvtx import ranged
from braze._ops._common import below_autograd, current, mark_written, register

_ops = torch.ops.braze
_MOST_SETS = 512  # of moments: kSmallKMostSets in csrc/kernels/fused/small_k.h


def _fake_batch(images, labels, batch, dtype, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = (batch, *images.shape[1:])
    batch_images = torch.empty(shape, dtype=dtype, device=images.device, memory_format=layout)
    return batch_images, labels.new_empty(batch)


def _fake_gather_images(images, labels, indices, scale, shift, dtype, channels_last):
    return _fake_batch(images, labels, indices.shape[0], dtype, channels_last)


def _fake_gather_next(
    images, labels, order, position, batch, scale, shift, dtype, channels_last, outputs, inputs,
    filters=(),
):  # fmt: skip
    made = _fake_batch(images, labels, batch, dtype, channels_last)
    sets = _MOST_SETS if filters and batch > 0 else 0
    taps = images.shape[1] * filters[0] * filters[1] if sets else 0
    moments = images.new_empty((sets, taps + taps * (taps + 1) // 2), dtype=torch.float64)
    return *made, moments


def _gather_next_autograd(
    images, labels, order, position, batch, scale, shift, dtype, channels_last, outputs, inputs,
    filters=(),
):  # fmt: skip
    if torch.is_grad_enabled() and (scale.requires_grad or shift.requires_grad):
        raise RuntimeError("braze::gather_next is not differentiable")
    with below_autograd():
        tail = scale, shift, dtype, channels_last, outputs, inputs, filters
        result = _ops.gather_next.default(images, labels, order, position, batch, *tail)
    mark_written(position, *outputs)
    return result


register("gather_images", fake=_fake_gather_images)
register("gather_next", fake=_fake_gather_next, autograd=_gather_next_autograd)


def _as_torch_error(error):
    """IndexError where the stable ABI, which only has RuntimeError, says "out of bounds"."""
    return IndexError(str(error).splitlines()[0]) if "is out of bounds for" in str(error) else error


def gather_images(images, labels, indices, scale, shift, dtype, channels_last):
    """``(images[indices] * scale + shift, labels[indices])`` in one launch.

    Args:
        images: uint8 ``[N, C, H, W]``; copied first unless contiguous.
        labels: int64 ``[N]``.
        indices: int64 ``[batch]``, of 0 to N - 1.
        scale, shift: ``[C]``, float64 for a float64 `dtype`, else float32.
        dtype: of the batch: float64, float32, bfloat16 or float16. Computed in the dtype of `scale`
            (the product rounded or fused into the sum) and rounded once.
        channels_last: whether the batch is; else it is contiguous.

    Returns:
        Images ``[batch, C, H, W]`` and int64 labels ``[batch]``. Bitwise repeatable; not
        differentiable. Can be captured in a CUDA graph.

    Raises:
        IndexError: on the CPU, an index out of bounds. On CUDA that image is NaN and its label -1,
            which a loss reports (see :func:`braze.check_errors`).
        RuntimeError: another dtype, shape or device.
    """
    if torch.compiler.is_compiling():
        return _ops.gather_images(images, labels, indices, scale, shift, dtype, channels_last)
    try:
        with below_autograd():
            return _ops.gather_images.default(
                images, labels, indices, scale, shift, dtype, channels_last
            )
    except RuntimeError as error:
        raise _as_torch_error(error) from None


def gather_next(
    images,
    labels,
    order,
    position,
    batch,
    scale,
    shift,
    dtype,
    channels_last,
    casts=((), ()),
    filters=(),
):
    """:func:`gather_images` of the next `batch` indices in `order`; the device keeps count.

    So each replay of a CUDA graph that holds the call draws another batch.

    Args:
        order: int64 ``[count]``: indices into the data set.
        position: int64 ``[2]`` on the same device, contiguous: where in `order` the batch begins,
            moved on by `batch` in the same launch; and 0, the kernel's own. Calls that share it
            must not run at the same time.
        batch: how many images.
        casts: outputs and inputs of a :func:`braze._ops.cast.cast_` to be done in the same launch,
            where that is possible.
        filters: height, width, vertical and horizontal padding of a convolution whose patches'
            moments are wanted; likewise.

    Returns:
        Images and labels as there, and the moments for
        ``torch.ops.braze.conv_bn_relu_max_pool2d``: float64, empty without `filters`.

    Raises:
        IndexError: on the CPU, an index or a place in `order` out of bounds; `position` stays as
            it was. On CUDA those images are NaN, their labels -1, and `position` moves on.
        RuntimeError: another dtype, shape or device; filters that the op has no kernel for.
    """
    arguments = images, labels, order, position, batch, scale, shift, dtype, channels_last, *casts
    if torch.compiler.is_compiling():
        return _ops.gather_next(*arguments, filters)
    try:
        return _gather_next_autograd(*arguments, filters)
    except RuntimeError as error:
        raise _as_torch_error(error) from None


def _version(tensor):
    return None if tensor.is_inference() else tensor._version


class GatheredMoments:
    """Learns in one forward pass that a fused block convolves the gathered batch as it is, and has
    the moments of its patches made in the launch that gathers in the next ones. The results are
    those of the block's own launch, bit for bit."""

    def __init__(self):
        self.filters = ()  # what gather_next() is to be asked for
        self._batch = None  # with its version, and the filters and moments that were made for it

    @contextlib.contextmanager
    def active(self):
        """The scope of a gather and the forward pass behind it."""
        outer, current.moments = current.moments, self
        try:
            yield
        finally:
            self._batch = None
            current.moments = outer

    def gathered(self, batch, moments):
        self._batch = batch, _version(batch), self.filters, moments

    def take(self, input, weight, padding):
        """The moments of the patches of `input` under the weight's filters, or None."""
        batch, version, made_for, moments = self._batch or (None,) * 4
        if input is not batch or _version(input) != version:
            return None  # another tensor, or this one has been written to
        self.filters = *weight.shape[2:], *padding
        return moments if made_for == self.filters else None


gather_images = ranged("gather_images", gather_images)
gather_next = ranged("gather_next", gather_next)
