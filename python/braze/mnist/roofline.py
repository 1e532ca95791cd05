"""What an op cannot avoid: bytes to and from memory, floating-point operations, and so its floor.

Counted from the shapes that the profiler records: every input read once, every result written once,
the operations of the direct algorithm. Statistics that have to be known before they are used cost a
second reading of the same tensor, which is not counted: it may come from the cache.
"""

import math

_BYTES = {
    "double": 8,
    "float": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "unsigned char": 1,
    "bool": 1,
    "int": 4,
    "long int": 8,
    "long": 8,
}


def cost(op, shapes, types):
    """(bytes, operations) of a call of ``braze::*``, or None where the op is not known.

    Args:
        op: its name, ``"braze::conv2d"``.
        shapes: of its arguments, as torch.profiler records them: [] for those that are no tensors.
        types: of its arguments, likewise.
    """
    name = op.removeprefix("braze::")
    tensors = [
        (tuple(shape), _BYTES[kind])
        for shape, kind in zip(shapes, types, strict=False)
        if kind in _BYTES and shape and not isinstance(shape[0], (list, tuple))
    ]
    read = sum(math.prod(shape) * size for shape, size in tensors)
    found = _find(name, tensors, shapes)
    if found is None:
        return None
    written, operations = found
    return read + written, operations


def _find(name, tensors, shapes):
    """(bytes written, operations) of an op."""
    if name.startswith("sgd"):
        # Parameters, gradients and perhaps momentum buffers, as lists; what the profiler shows of a
        # list differs between versions of torch.
        sizes = [
            sum(math.prod(shape) for shape in item)
            for item in shapes
            if item and isinstance(item[0], (list, tuple))
        ]
        if not sizes:
            return None
        # read as well: a list is not among `tensors`
        return 4 * (sum(sizes) + sizes[0] * max(1, len(sizes) - 1)), 2 * sizes[0]
    if not tensors:
        return None
    shape, size = tensors[0]
    elements = math.prod(shape)
    if name.startswith("gather"):
        images, labels, indices = (t[0] for t in tensors[:3])
        next_ones = name == "gather_next"  # which are among `tensors`, but for the position's end
        batch = tensors[6][0][0] if next_ones else indices[0]
        drawn = batch * math.prod(images[1:])
        unread = math.prod(images) - drawn + 8 * (labels[0] - batch) + 8 * (indices[0] - batch)
        written = 16 if next_ones else 4 * drawn + 8 * batch
        moments = 8 * math.prod(tensors[8][0]) if tensors[8:] else 0  # of sets that stay empty
        return written - unread - moments, 2 * drawn
    if name in ("relu", "relu_backward"):
        return elements * size, elements
    if name == "transpose_copy":
        return elements * size, 0
    if name.startswith("cross_entropy"):
        grad = elements * size if name != "cross_entropy" else 0
        loss = 12 * shape[0] if "backward" not in name else 0
        return grad + loss, 5 * elements * (2 if grad and loss else 1)
    if name.startswith("bn_relu"):
        result, small = _pooled(name, tensors)
        return result * size + small // 2, 8 * max(result, small)
    if name.startswith("linear"):
        return _linear(name, tensors)
    if name.startswith("conv"):
        return _convolution(name, tensors)
    return None


def _pooled(name, tensors):
    """Elements of the result and of the smaller side of batch norm, ReLU and 2x2 pooling."""
    big = max(math.prod(shape) for shape, _ in tensors)
    small = big // 4
    return (big if "backward" in name else small), small


def _linear(name, tensors):
    matrices = [t for t in tensors if len(t[0]) == 2]
    size = matrices[0][1]
    if "backward" in name:
        # gradient of the result (and perhaps the result itself), input, weight
        (rows, columns), (features, _) = matrices[-2][0], matrices[-1][0]
        return (rows * columns + features * columns) * size, 4 * rows * columns * features
    (rows, columns), (features, _) = matrices[0][0], matrices[1][0]
    if name == "linear_relu_linear":
        outputs = matrices[2][0][0]
        written = rows * (features + outputs) * size
        return written, 2 * rows * features * (columns + outputs)
    return rows * features * size, 2 * rows * columns * features


def _convolution(name, tensors):
    """A convolution with 'same' padding and stride 1, perhaps with what follows it."""
    images = [t for t in tensors if len(t[0]) == 4]
    if len(images) < 2:
        return None
    backward = "backward" in name
    (n, channels, h, w), size = images[1 if backward else 0]
    filters, per_group, r, s = images[2 if backward else 1][0]
    result = n * filters * h * w
    operations = 2 * result * per_group * r * s
    first_block = name.startswith("conv_bn_relu_max_pool2d")
    if backward:
        if first_block:  # only the pixels of the maxima, and no gradient of the input
            return filters * per_group * r * s * size, operations // 4
        return (n * channels * h * w + filters * per_group * r * s) * size, 2 * operations
    if first_block:
        return result // 4 * size + result // 8, operations
    if name.startswith("conv_bn_relu"):
        return result * size + result // 4 * size + result // 8, operations
    return result * size, operations


def floor(bytes_moved, operations, device, precision):
    """Seconds that a device needs at least, from its page in ``braze.info()``; None without peaks.

    fp32 on tensor cores takes three TF32 products: where that is faster, it is the peak.
    """
    if not device.get("bandwidth") or not device.get("peak"):
        return None
    return max(bytes_moved / device["bandwidth"], operations / peak_rate(device, precision))


def peak_rate(device, precision):
    """FLOP/s of a device's fastest units at a precision."""
    peak = device["peak"]
    if precision == "fp32":
        return max(peak["fp32"], peak.get("tf32", 0) / 3)
    return peak[precision]
