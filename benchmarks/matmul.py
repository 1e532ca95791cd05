"""Matrix products: bound by arithmetic for the large ones, by latency for the small ones."""

import torch

import braze
from benchmarks.harness import Benchmark, Case


def case(m, n, k, batch=None, transposed=False, **kwargs):
    """[m, k] @ [k, n], batched if asked; `transposed`: the right-hand side is a transposed view."""
    lead = () if batch is None else (batch,)

    def inputs(device, dtype):
        a = torch.randn(*lead, m, k, device=device).to(dtype).requires_grad_()
        if transposed:
            b = torch.randn(*lead, n, k, device=device).to(dtype).transpose(-1, -2)
        else:
            b = torch.randn(*lead, k, n, device=device).to(dtype)
        return [a, b.requires_grad_()]

    name = f"{m}x{n}x{k}" + (f" batch {batch}" if batch else "") + (" NT" if transposed else "")
    # A sum of k terms in one chain of roundings, each half a rounding of a partial sum that grows
    # with its root: sqrt(k) / 4 roundings of the largest result.
    ulps = max(4, max(m, n, k) ** 0.5 / 4)
    return Case(name, inputs, flops=2 * m * n * k * (batch or 1), ulps=ulps, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="matmul",
        braze=braze.matmul,
        stock=torch.matmul,
        dtypes=("float32", "tf32", "bfloat16"),
        cases=[
            case(64, 128, 3136, transposed=True),
            case(1024, 128, 3136, transposed=True),
            case(8192, 128, 3136, transposed=True, gpu_only=True),
            case(512, 512, 512),
            case(1024, 1024, 1024),
            case(2048, 2048, 2048),
            case(4096, 4096, 4096, gpu_only=True),
            case(8192, 8192, 8192, gpu_only=True),
            case(128, 128, 64, batch=96),
            case(1000, 1000, 1000),
        ],
    )
]
