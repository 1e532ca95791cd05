"""Layer norm over the last dimension, rows as of ConvNeXt, ViT, GPT and longer ones, and over the
channels of images."""

import torch

import braze
import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def inputs_of(shape, size):
    def inputs(device, dtype):
        # The parameters have the activations' dtype, as stock wants them on CUDA.
        return [
            torch.randn(shape, device=device).to(dtype).requires_grad_(),
            torch.rand(size, device=device).to(dtype).requires_grad_(),
            torch.randn(size, device=device).to(dtype).requires_grad_(),
        ]

    return inputs


def case(shape, **kwargs):
    return Case("x".join(map(str, shape)), inputs_of(shape, shape[-1]), **kwargs)


def ours(x, weight, bias):
    with braze.backend(layer_norm="braze"):
        return F.layer_norm(x, weight.shape, weight, bias)


def stock(x, weight, bias):
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)


def over_channels(function):
    def layer_norm(x, weight, bias):
        return function(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)

    return layer_norm


BENCHMARKS = [
    Benchmark(
        op="layer_norm",
        braze=ours,
        stock=stock,
        cases=[
            case((64, 768)),
            case((25088, 96)),
            case((200704, 96), gpu_only=True),
            case((50176, 192), gpu_only=True),
            case((12544, 384), gpu_only=True),
            case((12608, 768), gpu_only=True),
            case((16384, 1024), gpu_only=True),
            case((8192, 2048), gpu_only=True),
            case((8192, 4096), gpu_only=True),
            case((4096, 8192), gpu_only=True),
            case((2048, 16384), gpu_only=True),
            case((1024, 32768), gpu_only=True),
            case((16384, 1023), gpu_only=True),
        ],
    ),
    Benchmark(
        op="layer_norm",
        braze=over_channels(ours),
        stock=over_channels(stock),
        layouts=("contiguous", "channels_last"),
        cases=[
            Case("32x96x56x56 channels", inputs_of((32, 96, 56, 56), 96)),
            Case("32x384x14x14 channels", inputs_of((32, 384, 14, 14), 384)),
        ],
    ),
]
