"""Linear layers of the MNIST network and of classifiers: a product with a bias."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(batch, features_in, features_out, **kwargs):
    def inputs(device, dtype):
        bound = features_in**-0.5
        return [
            torch.randn(batch, features_in, device=device).to(dtype).requires_grad_(),
            (torch.randn(features_out, features_in, device=device) * bound)
            .to(dtype)
            .requires_grad_(),
            torch.randn(features_out, device=device).to(dtype).requires_grad_(),
        ]

    name = f"{batch}x{features_in} to {features_out}"
    return Case(name, inputs, flops=2 * batch * features_in * features_out, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="linear",
        braze=F.linear,
        stock=torch.nn.functional.linear,
        dtypes=("float32", "tf32", "bfloat16"),
        cases=[
            case(64, 3136, 128),
            case(64, 128, 10),
            case(1024, 3136, 128),
            case(1024, 128, 10),
            case(8192, 3136, 128, gpu_only=True),
            case(8192, 128, 10),
            case(256, 2048, 1000),
            case(4096, 4096, 4096, gpu_only=True),
        ],
    )
]
