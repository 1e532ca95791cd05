"""ReLU: bound by memory, two accesses per element forward, three backward."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(shape, **kwargs):
    def inputs(device, dtype):
        return [torch.randn(shape, device=device).to(dtype).requires_grad_()]

    return Case("x".join(map(str, shape)), inputs, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="relu",
        braze=F.relu,
        stock=torch.nn.functional.relu,
        cases=[
            case((64, 32, 28, 28)),
            case((1024, 32, 28, 28)),
            case((8192, 32, 28, 28), gpu_only=True),
            case((8192, 128)),
            case((32, 256, 56, 56), gpu_only=True),
        ],
        layouts=("contiguous", "channels_last"),
        saved="output",
    )
]
