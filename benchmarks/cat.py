"""Concatenation along channels as networks have it: two tensors (U-Net), many (DenseNet), four
(GoogLeNet), and a half that is part of another tensor's channels (ShuffleNet). Bound by memory."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(batch, channels, size, part=False, **kwargs):
    """Args:
    part: the first tensor is the first half of another one's channels.
    """

    def inputs(device, dtype):
        return [
            torch.randn(batch, c * (1 + (part and i == 0)), size, size, device=device)
            .to(dtype)
            .requires_grad_()
            for i, c in enumerate(channels)
        ]

    name = "+".join(map(str, channels))
    if len(channels) > 4:
        name = f"{channels[0]}+{len(channels) - 1}x{channels[-1]}"
    name = f"{batch}x({name})x{size}x{size}{', half of more' * part}"
    return Case(name, inputs, **kwargs)


def joined(cat, part):
    def call(*tensors):
        first, *others = tensors
        return cat([first.chunk(2, 1)[0] if part else first, *others], 1)

    return call


def benchmark(part, cases):
    return Benchmark(
        op="cat",
        braze=joined(F.cat, part),
        stock=joined(torch.cat, part),
        cases=cases,
        layouts=("channels_last",),
    )


UNET = [(64, 128), (128, 64), (256, 32), (512, 16)]
DENSENET = [((64, *[32] * 6), 56), ((128, *[32] * 12), 28), ((256, *[32] * 24), 14)]
GOOGLENET = [((64, 128, 32, 32), 28), ((192, 208, 48, 64), 14)]
SHUFFLENET = [((58, 58), 28), ((116, 116), 14)]  # accesses of 4 and 8 bytes in 16 bits
BENCHMARKS = [
    benchmark(
        False,
        [
            *(case(4, (c, c), s) for c, s in UNET),
            *(case(32, (c, c), s, gpu_only=True) for c, s in UNET),
            *(case(8, c, s) for c, s in (*DENSENET[1:], *GOOGLENET)),
            *(case(128, c, s, gpu_only=True) for c, s in (*DENSENET, *GOOGLENET, *SHUFFLENET)),
        ],
    ),
    benchmark(True, [case(32, (88, 88), 28), case(256, (88, 88), 28, gpu_only=True)]),
]
