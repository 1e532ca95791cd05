"""GELU of a sum with a bias, as in ConvNeXt-T's and ViT-B's perceptrons: bound by memory."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(rows, channels, **kwargs):
    def inputs(device, dtype):
        shapes = (rows, channels), (channels,)
        return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]

    return Case(f"{rows}x{channels}", inputs, **kwargs)


def stock(input, bias):
    return torch.nn.functional.gelu(input + bias)


BENCHMARKS = [
    Benchmark(
        op="bias_activation",
        braze=F.bias_activation,
        stock=stock,
        cases=[
            case(1568, 768),
            *(
                case(rows, channels, gpu_only=True, ulps=8)
                for rows, channels in ((401408, 384), (100352, 768), (25088, 1536), (6272, 3072))
            ),
        ],
    )
]
