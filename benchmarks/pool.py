"""Max and average pooling: bound by memory, a quarter of the input is written."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(shape, kernel, stride=None, padding=0, **kwargs):
    def inputs(device, dtype):
        return [torch.randn(shape, device=device).to(dtype).requires_grad_()]

    settings = {"kernel_size": kernel, "stride": stride, "padding": padding}
    name = f"{'x'.join(map(str, shape))}, {kernel}x{kernel}/{stride or kernel}"
    return Case(name, inputs, settings, **kwargs)


def adaptive(shape, size):
    name = f"{'x'.join(map(str, shape))} to {size}x{size}"

    def inputs(device, dtype):
        return [torch.randn(shape, device=device).to(dtype).requires_grad_()]

    return Case(name, inputs, {"output_size": size}, gpu_only=True)


SQUARES = [
    case((64, 32, 28, 28), 2),
    case((64, 64, 14, 14), 2),
    case((1024, 32, 28, 28), 2),
    case((1024, 64, 14, 14), 2),
    case((8192, 32, 28, 28), 2, gpu_only=True),
    case((8192, 64, 14, 14), 2, gpu_only=True),
]
CASES = {
    "max_pool2d": [*SQUARES, case((32, 64, 112, 112), 3, 2, 1)],
    # Not padded: stock's gradient of padded windows is wrong in channels_last on CUDA.
    "avg_pool2d": [
        *SQUARES,
        case((32, 64, 112, 112), 3, 2),
        case((64, 64, 56, 56), 3, 1, gpu_only=True),
    ],
    "adaptive_avg_pool2d": [
        adaptive((64, 2048, 7, 7), 1),
        adaptive((128, 1280, 7, 7), 1),
        adaptive((64, 512, 14, 14), 7),
        adaptive((16, 512, 60, 60), 6),
    ],
}

BENCHMARKS = [
    Benchmark(
        op=name,
        braze=getattr(F, name),
        stock=getattr(torch.nn.functional, name),
        layouts=("contiguous", "channels_last"),
        # Max pool reads window indices, which implementations store in 1 to 8 bytes: not counted.
        saved=None,
        cases=cases,
    )
    for name, cases in CASES.items()
]
