"""Group norm with 32 groups, as of diffusion models' U-Nets and of ResNets, with one, as of
MetaFormers, and instance norm."""

import torch

import braze
import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(shape, **kwargs):
    def inputs(device, dtype):
        # The parameters have the activations' dtype, as stock wants them on CUDA.
        return [
            torch.randn(shape, device=device).to(dtype).requires_grad_(),
            torch.rand(shape[1], device=device).to(dtype).requires_grad_(),
            torch.randn(shape[1], device=device).to(dtype).requires_grad_(),
        ]

    return Case("x".join(map(str, shape)), inputs, **kwargs)


def group_norm(functional, groups=32):
    def run(x, weight, bias):
        with braze.backend(group_norm="braze"):
            return functional.group_norm(x, groups, weight, bias)

    return run


def instance_norm(functional):
    def run(x, weight, bias):
        with braze.backend(group_norm="braze"):
            return functional.instance_norm(x, weight=weight, bias=bias)

    return run


CASES = [
    case((8, 320, 32, 32)),
    case((32, 256, 14, 14)),
    case((8, 320, 64, 64), gpu_only=True),
    case((8, 640, 32, 32), gpu_only=True),
    case((8, 1280, 16, 16), gpu_only=True),
    case((64, 256, 56, 56), gpu_only=True),
    case((64, 1024, 14, 14), gpu_only=True),
    case((4, 128, 256, 256), gpu_only=True),
]

BENCHMARKS = [
    Benchmark(
        op="group_norm",
        braze=group_norm(F),
        stock=group_norm(torch.nn.functional),
        layouts=("contiguous", "channels_last"),
        cases=CASES,
    ),
    Benchmark(
        op="group_norm_of_one",
        braze=group_norm(F, 1),
        stock=group_norm(torch.nn.functional, 1),
        layouts=("contiguous", "channels_last"),
        cases=[
            case((8, 64, 56, 56)),
            case((32, 320, 14, 14), gpu_only=True),
            case((64, 64, 56, 56), gpu_only=True),
            case((16, 64, 112, 112), gpu_only=True),
        ],
    ),
    Benchmark(
        op="instance_norm",
        braze=instance_norm(F),
        stock=instance_norm(torch.nn.functional),
        cases=[
            case((8, 64, 64, 64)),
            case((8, 64, 128, 128), gpu_only=True),
            case((32, 256, 32, 32), gpu_only=True),
        ],
    ),
]
