"""The batch load of DeviceLoader: gather, normalise, cast and lay out in one launch, beside torch's
ops in a row. The data set is as large as the batch, so that what is read is what is counted."""

import torch

from benchmarks.harness import Benchmark, Case
from braze._ops.gather import gather_images
from braze.testing import assert_by_rule


def stock(images, labels, indices, scale, shift, dtype, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    batch = images.index_select(0, indices).to(dtype, memory_format=layout)
    scale, shift = scale.to(dtype).view(-1, 1, 1), shift.to(dtype).view(-1, 1, 1)
    return torch.addcmul(shift, batch, scale), labels.index_select(0, indices)


def case(batch, channels, size, channels_last=False, **kwargs):
    def inputs(device, dtype):
        images = torch.randint(256, (batch, channels, size, size), dtype=torch.uint8, device=device)
        acc = {"dtype": torch.float64 if dtype == torch.float64 else torch.float32}
        scale = torch.full((channels,), 1 / (255 * 0.3081), device=device, **acc)
        shift = torch.full((channels,), -0.1307 / 0.3081, device=device, **acc)
        order = torch.randperm(batch, device=device)
        return [images, order.clone(), order, scale, shift, dtype, channels_last]

    layout = " channels_last" if channels_last else ""
    return Case(f"{batch}x{channels}x{size}x{size}{layout}", inputs, **kwargs)


def check(_ours, _stock, inputs, kwargs):
    """Images and labels; what is timed returns the images alone, whose bytes are counted."""
    batch, labels = gather_images(*inputs)
    expected, expected_labels = stock(*inputs)
    *tensors, _dtype, channels_last = inputs
    scale, shift = (t.double() for t in tensors[3:])
    reference, _ = stock(*tensors[:3], scale, shift, torch.float64, channels_last)
    assert_by_rule(batch, expected, reference)
    assert torch.equal(labels, expected_labels)


BENCHMARKS = [
    Benchmark(
        op="gather_images",
        braze=lambda *inputs: gather_images(*inputs)[0],
        stock=lambda *inputs: stock(*inputs)[0],
        passes=("forward",),
        check=check,
        cases=[
            case(1024, 1, 28),
            case(64, 1, 28),
            case(8192, 1, 28),
            case(8192, 3, 32),
            case(8192, 3, 32, channels_last=True),
            case(256, 3, 224, channels_last=True, gpu_only=True),
        ],
    )
]
