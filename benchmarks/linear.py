"""Linear layers of the MNIST network and of classifiers: a product with a bias; and layers of a
transformer, fused with a residual and with each other."""

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


def residual_case(batch, features_in, features_out, **kwargs):
    plain = case(batch, features_in, features_out, **kwargs)

    def inputs(device, dtype):
        residual = torch.randn(batch, features_out, device=device).to(dtype).requires_grad_()
        return [*plain.inputs(device, dtype), residual]

    return Case(f"{plain.name} + residual", inputs, flops=plain.flops, **kwargs)


def perceptron_case(batch, features, hidden, outputs, **kwargs):
    """The hidden layer is made of multiples of 1/32, and an odd one of 1/64: exact in every
    precision and never zero, so that rounding does not decide where its gradient passes."""

    def inputs(device, dtype):
        integers = lambda low, high, *shape: torch.randint(  # noqa: E731
            low, high + 1, shape, device=device
        )
        tensors = [
            integers(-2, 2, batch, features),
            integers(-1, 1, hidden, features) / 32,
            (2 * integers(-8, 8, hidden) + 1) / 64,
            torch.randn(outputs, hidden, device=device) * hidden**-0.5,
            torch.randn(outputs, device=device),
        ]
        return [t.to(dtype).requires_grad_() for t in tensors]

    name = f"{batch}x{features} to {hidden} to {outputs}"
    return Case(name, inputs, flops=2 * batch * hidden * (features + outputs), **kwargs)


def linear_add(input, weight, bias, residual):
    return torch.nn.functional.linear(input, weight, bias) + residual


def linear_relu_linear(input, weight1, bias1, weight2, bias2):
    linear = torch.nn.functional.linear
    return linear(linear(input, weight1, bias1).relu(), weight2, bias2)


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
    ),
    Benchmark(
        op="linear_add",
        braze=F.linear_add,
        stock=linear_add,
        dtypes=("float32", "tf32", "bfloat16"),
        cases=[residual_case(8192, 768, 3072, gpu_only=True)],
    ),
    Benchmark(
        op="linear_relu_linear",
        braze=F.linear_relu_linear,
        stock=linear_relu_linear,
        dtypes=("float32", "tf32", "bfloat16"),
        cases=[perceptron_case(8192, 768, 3072, 768, gpu_only=True)],
    ),
]
