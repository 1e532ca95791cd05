"""Squeeze-and-excitation as EfficientNet-B0 has it, with its two small convolutions."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(n, channels, size, inner, **kwargs):
    def inputs(device, dtype):
        def draw(*shape):
            return torch.randn(shape, device=device).to(dtype).requires_grad_()

        return [
            draw(n, channels, size, size),
            draw(inner, channels, 1, 1),
            draw(inner),
            draw(channels, inner, 1, 1),
            draw(channels),
        ]

    return Case(f"{n}x{channels}x{size}x{size}", inputs, **kwargs)


def gate(functional):
    def run(mean, weight1, bias1, weight2, bias2):
        inner = functional.silu(functional.conv2d(mean, weight1, bias1))
        return functional.sigmoid(functional.conv2d(inner, weight2, bias2))

    return run


def ours(x, *parameters):
    return F.squeeze_excite(x, lambda mean: gate(F)(mean, *parameters))


def stock(x, *parameters):
    return x * gate(torch.nn.functional)(x.mean((2, 3), keepdim=True), *parameters)


BENCHMARKS = [
    Benchmark(
        op="squeeze_excite",
        braze=ours,
        stock=stock,
        layouts=("contiguous", "channels_last"),
        cases=[
            case(8, 96, 56, 4),
            case(128, 32, 112, 8, gpu_only=True),
            case(128, 96, 56, 4, gpu_only=True),
            case(128, 144, 56, 6, gpu_only=True),
            case(128, 240, 28, 10, gpu_only=True),
            case(128, 480, 14, 20, gpu_only=True),
            case(128, 1152, 7, 48, gpu_only=True),
        ],
    ),
]
