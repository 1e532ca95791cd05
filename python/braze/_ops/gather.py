"""The gather of a batch from a data set; used by braze.data.DeviceLoader. Kernels:
csrc/cuda/gather/."""

import torch

from braze import _lib
from braze._nvtx import ranged
from braze._ops._common import below_autograd, empty_image, overwrite, register

_ops = torch.ops.braze
_MOST_SETS = _lib.limits["patch_moment_sets"]


def _fake_gather_images(images, labels, indices, scale, shift, dtype, channels_last):
    return _empty_batch(images, labels, indices.shape[0], dtype, channels_last)


def _empty_batch(images, labels, batch, dtype, channels_last):
    batch_images = empty_image(images, (batch, *images.shape[1:]), channels_last, dtype)
    return batch_images, labels.new_empty(batch)


def _gather_next_autograd(
    images, labels, order, position, scale, shift, batch_images, batch_labels, moments=None,
    filters=(),
):  # fmt: skip
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (scale, shift, batch_images, moments)
    ):
        raise RuntimeError("braze::gather_next is not differentiable")
    inputs, outputs = (images, labels, order), (batch_images, batch_labels, moments)
    with below_autograd():
        overwrite(
            (position, *outputs), _ops.gather_next.default,
            *inputs, position, scale, shift, *outputs, filters,
        )  # fmt: skip


register("gather_images", fake=_fake_gather_images)
register("gather_next", fake=lambda *args: None, autograd=_gather_next_autograd)


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


def empty_batch(images, labels, batch, dtype, channels_last, filters=()):
    """What :func:`gather_next` writes `batch` images to: images, labels, and the patches' moments
    (float64, for ``torch.ops.braze.conv_bn_relu_max_pool2d``) or, without `filters`, None."""
    moments = None
    if filters:
        taps = images.shape[1] * filters[0] * filters[1]
        sums = taps + taps * (taps + 1) // 2
        moments = torch.empty(_MOST_SETS, sums, dtype=torch.float64, device=images.device)
    return *_empty_batch(images, labels, batch, dtype, channels_last), moments


def gather_next(images, labels, order, position, scale, shift, batch, filters=()):
    """:func:`gather_images` of the next indices in `order`; the device keeps count.

    So each replay of a CUDA graph that holds the call draws another batch.

    Args:
        order: int64 ``[count]``: indices into the data set.
        position: int64 ``[2]`` on the same device, contiguous: where in `order` the batch begins,
            moved on to its end in the same launch; and 0, the kernel's own. Calls that share it
            must not run at the same time.
        batch: what is written, of :func:`empty_batch`: images, contiguous or channels_last, whose
            dtype decides as there; labels; and, unless None, moments. Moments with a dimension for
            groups in front are those of as many parts of the batch, each like a batch of its own.
        filters: height, width, vertical and horizontal padding of a convolution whose patches'
            moments are wanted; in the same launch where that is possible.

    Raises:
        IndexError: on the CPU, an index or a place in `order` out of bounds; nothing is written.
            On CUDA those images are NaN, their labels -1, and `position` moves on.
        RuntimeError: another dtype, shape or device; filters that the op has no kernel for.
    """
    arguments = images, labels, order, position, scale, shift, *batch, filters
    if torch.compiler.is_compiling():
        _ops.gather_next(*arguments)
        return
    try:
        _gather_next_autograd(*arguments)
    except RuntimeError as error:
        raise _as_torch_error(error) from None


class GatheredMoments:
    """A name that pickles of a :class:`braze.TrainStep` of version 0.1.0 load; they make no use of
    what it was."""


gather_images = ranged("gather_images", gather_images)
gather_next = ranged("gather_next", gather_next)
