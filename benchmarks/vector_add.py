"""a + b: bound by memory, two reads and one write."""

import torch

import braze
from benchmarks.harness import Benchmark, Case


def case(name, n, **kwargs):
    def inputs(device, dtype):
        return [torch.randn(n, device=device).to(dtype) for _ in range(2)]

    return Case(name, inputs, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="vector_add",
        braze=braze.vector_add,
        stock=torch.add,
        passes=("forward",),
        cases=[
            case("2^20", 1 << 20),
            case("2^24", 1 << 24),
            case("2^24 + 1", (1 << 24) + 1),
            case("2^28", 1 << 28, gpu_only=True),
        ],
    )
]
