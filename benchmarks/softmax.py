"""Softmax and log-softmax over rows, short as a classifier's and long as a language model's."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(shape, dim=-1, **kwargs):
    def inputs(device, dtype):
        return [torch.randn(shape, device=device).to(dtype).requires_grad_()]

    name = "x".join(map(str, shape)) + ("" if dim == -1 else f" dim {dim}")
    return Case(name, inputs, {"dim": dim}, **kwargs)


CASES = [
    case((64, 10)),
    case((1024, 10)),
    case((8192, 10)),
    case((1024, 1000)),
    case((4096, 32768), gpu_only=True),
    case((32, 64, 56, 56), dim=1),
]

BENCHMARKS = [
    Benchmark(
        op=name,
        braze=getattr(F, name),
        stock=getattr(torch.nn.functional, name),
        saved="output",
        cases=CASES,
    )
    for name in ("softmax", "log_softmax")
]

# The rungs take rows along the innermost dimension.
LADDER = [
    Benchmark(
        op="softmax",
        braze=F.softmax,
        stock=torch.nn.functional.softmax,
        saved="output",
        passes=("forward",),
        cases=[c for c in CASES if c.kwargs["dim"] == -1],
    )
]
