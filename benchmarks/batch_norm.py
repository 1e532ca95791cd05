"""Batch norm in training, without running statistics as in the MNIST network, and with them."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(shape, **kwargs):
    def inputs(device, dtype):
        # The parameters stay float32 beside 16-bit activations, as in mixed-precision training.
        channels = shape[1]
        parameter = torch.float64 if dtype == torch.float64 else torch.float32
        return [
            torch.randn(shape, device=device).to(dtype).requires_grad_(),
            torch.rand(channels, device=device, dtype=parameter).requires_grad_(),
            torch.randn(channels, device=device, dtype=parameter).requires_grad_(),
        ]

    return Case("x".join(map(str, shape)), inputs, **kwargs)


def from_functional(functional):
    def batch_norm(x, weight, bias):
        return functional.batch_norm(x, None, None, weight, bias, training=True)

    return batch_norm


CASES = [
    case((64, 32, 28, 28)),
    case((64, 64, 14, 14)),
    case((1024, 32, 28, 28)),
    case((1024, 64, 14, 14)),
    case((8192, 32, 28, 28), gpu_only=True),
    case((8192, 64, 14, 14), gpu_only=True),
    case((32, 256, 56, 56)),
    case((32, 2048, 7, 7)),
]

BENCHMARKS = [
    Benchmark(
        op="batch_norm",
        braze=from_functional(F),
        stock=from_functional(torch.nn.functional),
        layouts=("contiguous", "channels_last"),
        cases=CASES,
    )
]

# The rungs take contiguous images; the first of them is too slow for the largest batches.
LADDER = [
    Benchmark(
        op="batch_norm",
        braze=from_functional(F),
        stock=from_functional(torch.nn.functional),
        passes=("forward",),
        cases=[c for c in CASES if not c.gpu_only],
    )
]
