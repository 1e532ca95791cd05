"""A layer scale and the addition behind it, as in ConvNeXt-T's four stages and, under autocast, in
a float32 stream: bound by memory."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(batch, channels, size, stream=None, **kwargs):
    """Args:
    stream: the dtype of the scale and the residual where it is another one.
    """

    def inputs(device, dtype):
        shape = (batch, channels, size, size), (channels, 1, 1), (batch, channels, size, size)
        drawn = (torch.randn(s, device=device) for s in shape)
        dtypes = dtype, stream or dtype, stream or dtype
        return [t.to(d).requires_grad_() for t, d in zip(drawn, dtypes, strict=True)]

    name = f"{batch}x{channels}x{size}x{size}"
    return Case(f"{name}, fp32 stream" if stream else name, inputs, **kwargs)


def stock(input, scale, residual):
    return residual + scale * input


STAGES = [(96, 56), (192, 28), (384, 14), (768, 7)]
BENCHMARKS = [
    Benchmark(
        op="scale_add",
        braze=F.scale_add,
        stock=stock,
        cases=[
            *(case(8, c, s) for c, s in STAGES),
            *(case(128, c, s, torch.float32, gpu_only=True) for c, s in STAGES),
        ],
        layouts=("channels_last",),
    )
]
