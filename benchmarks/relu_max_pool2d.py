"""A bias, ReLU and max pooling behind convolutions: LeNet-5's, VGG's and AlexNet's."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(n, c, h, window, **kwargs):
    def inputs(device, dtype):
        x = torch.randn(n, c, h, h, device=device).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        return x, torch.randn(c, device=device).to(dtype).requires_grad_(), window, 2

    return Case(f"{n}x{c}x{h}x{h}, {window}x{window}", inputs, **kwargs)


def stock(input, bias, kernel_size, stride):
    output = torch.relu(input + bias.view(-1, 1, 1))
    return torch.nn.functional.max_pool2d(output, kernel_size, stride)


BENCHMARKS = [
    Benchmark(
        op="relu_max_pool2d",
        braze=F.relu_max_pool2d,
        stock=stock,
        cases=[
            case(64, 6, 28, 2, ulps=8),
            case(64, 16, 10, 2, ulps=8),
            *(
                case(*shape, gpu_only=True, ulps=8)
                for shape in (
                    (64, 64, 224, 2),
                    (64, 256, 56, 2),
                    (64, 512, 14, 2),
                    (128, 64, 55, 3),
                )
            ),
        ],
    )
]
