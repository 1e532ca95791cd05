"""Convolutions: the MNIST network's two, and ResNet's."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(batch, channels_in, channels_out, size, kernel, stride=1, input_grad=True, **kwargs):
    """A square convolution with "same"-like padding and a bias."""
    padding = kernel // 2
    out_size = (size + 2 * padding - kernel) // stride + 1

    def inputs(device, dtype):
        bound = (channels_in * kernel * kernel) ** -0.5
        weight = torch.randn(channels_out, channels_in, kernel, kernel, device=device) * bound
        x = torch.randn(batch, channels_in, size, size, device=device).to(dtype)
        return [
            x.requires_grad_(input_grad),
            weight.to(dtype).requires_grad_(),
            torch.randn(channels_out, device=device).to(dtype).requires_grad_(),
        ]

    name = f"{batch}x{channels_in}x{size}x{size} to {channels_out}, {kernel}x{kernel}/{stride}"
    flops = 2 * batch * channels_out * out_size**2 * channels_in * kernel**2
    return Case(name, inputs, {"stride": stride, "padding": padding}, flops, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="conv2d",
        braze=F.conv2d,
        stock=torch.nn.functional.conv2d,
        dtypes=("float32", "tf32", "bfloat16"),
        layouts=("contiguous", "channels_last"),
        cases=[
            case(64, 1, 32, 28, 3, input_grad=False),
            case(64, 32, 64, 14, 3),
            case(1024, 1, 32, 28, 3, input_grad=False),
            case(1024, 32, 64, 14, 3),
            case(8192, 1, 32, 28, 3, input_grad=False, gpu_only=True),
            case(8192, 32, 64, 14, 3, gpu_only=True),
            case(32, 3, 64, 224, 7, stride=2, input_grad=False, gpu_only=True),
            # cuDNN's Winograd rounds less than plain sums of 576 products, which are off by 9 ulp.
            case(32, 64, 64, 56, 3, ulps=6),
            case(32, 256, 128, 28, 1),
            case(32, 128, 256, 28, 3, stride=2),
        ],
    )
]
