"""Transposing copies: bound by memory, one read and one write, both coalesced through a tile."""

import torch

import braze
from benchmarks.harness import Benchmark, Case


def stock(x):
    return x.transpose(-2, -1).contiguous()


def case(shape, **kwargs):
    def inputs(device, dtype):
        return [torch.randn(shape, device=device).to(dtype)]

    return Case("x".join(map(str, shape)), inputs, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="transpose_copy",
        braze=braze.transpose_copy,
        stock=stock,
        passes=("forward",),
        cases=[
            case((1024, 1024)),
            case((4096, 4096)),
            case((8192, 3136)),
            case((64, 784, 32)),
            case((1000, 1000)),
        ],
    )
]
