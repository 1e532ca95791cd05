"""Transposing copies: bound by memory, one read and one write, both coalesced through a tile."""

import torch

from benchmarks.harness import Benchmark, Case


def case(shape, dims, **kwargs):
    def inputs(device, dtype):
        return [torch.randn(shape, device=device).to(dtype)]

    name = f"{'x'.join(map(str, shape))}, {dims[0]} with {dims[1]}"
    return Case(name, inputs, {"dim0": dims[0], "dim1": dims[1]}, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="transpose_copy",
        braze=torch.ops.braze.transpose_copy,
        stock=torch.transpose_copy,
        passes=("forward",),
        cases=[
            case((1024, 1024), (0, 1)),
            case((4096, 4096), (0, 1)),
            case((8192, 3136), (0, 1)),
            case((64, 784, 32), (1, 2)),
            case((1000, 1000), (0, 1)),
        ],
    )
]
