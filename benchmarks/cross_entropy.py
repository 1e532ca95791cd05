"""Cross-entropy with class indices: log-softmax and the loss in one pass over the logits."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(rows, classes, label_smoothing=0.0, **kwargs):
    def inputs(device, dtype):
        return [
            torch.randn(rows, classes, device=device).to(dtype).requires_grad_(),
            torch.randint(classes, (rows,), device=device),
        ]

    name = f"{rows}x{classes}" + (f", smoothing {label_smoothing}" if label_smoothing else "")
    return Case(name, inputs, {"label_smoothing": label_smoothing}, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="cross_entropy",
        braze=F.cross_entropy,
        stock=torch.nn.functional.cross_entropy,
        cases=[
            case(64, 10),
            case(1024, 10),
            case(8192, 10),
            case(1024, 1000),
            case(1024, 1000, label_smoothing=0.1),
            case(4096, 32768, gpu_only=True),
        ],
    )
]
