"""SGD over all parameters of a model in one launch, beside torch's fused SGD."""

import functools

import torch

import braze
from benchmarks.harness import Benchmark, Case
from braze.testing import assert_by_rule

MNIST = [(32, 1, 3, 3), (32,), (32,), (32,), (64, 32, 3, 3), (64,), (64,), (64,)]
MNIST += [(128, 3136), (128,), (10, 128), (10,)]
RESNET_LIKE = [(256, 256, 3, 3), (256,), (256,)] * 40


def case(name, shapes, **kwargs):
    def inputs(device, dtype):
        draws = [torch.randn(shape, device=device).to(dtype) for shape in shapes * 2]
        return draws  # the parameters, then their gradients

    return Case(name, inputs, {"lr": 0.01, **kwargs})


def make_step(optimizer, inputs, kwargs):
    half = len(inputs) // 2
    parameters = [torch.nn.Parameter(t.clone()) for t in inputs[:half]]
    for parameter, grad in zip(parameters, inputs[half:], strict=True):
        parameter.grad = grad.clone()
    instance = optimizer(parameters, **kwargs)

    def step():
        instance.step()
        return parameters

    return step


def check(ours, stock, inputs, kwargs):
    """Three steps: momentum begins with the second."""

    def after(optimizer, tensors):
        step = make_step(optimizer, tensors, kwargs)
        return [step() for _ in range(3)][-1]

    reference = after(torch.optim.SGD, [t.double() for t in inputs])
    for a, s, r in zip(after(ours, inputs), after(stock, inputs), reference, strict=True):
        assert_by_rule(a, s, r)


BENCHMARKS = [
    Benchmark(
        op="sgd",
        braze=braze.optim.SGD,
        stock=functools.partial(torch.optim.SGD, fused=True),
        dtypes=("float32",),
        passes=("step",),
        bind=make_step,
        check=check,
        cases=[
            case("MNIST network, plain", MNIST),
            case("MNIST network, momentum", MNIST, momentum=0.9, weight_decay=1e-4),
            case("120 tensors, 24 M, plain", RESNET_LIKE),
            case("120 tensors, 24 M, momentum", RESNET_LIKE, momentum=0.9, weight_decay=1e-4),
        ],
    )
]
