"""Upsampling: bound by memory; twice the size, as networks have it, and further."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(shape, **settings):
    def inputs(device, dtype):
        return [torch.randn(shape, device=device).to(dtype).requires_grad_()]

    to = "x".join(map(str, settings["size"]))
    corners = ", corners" if settings.get("align_corners") else ""
    name = f"{'x'.join(map(str, shape))} to {to}, {settings['mode']}{corners}"
    return Case(name, inputs, settings, gpu_only=True)


BENCHMARKS = [
    Benchmark(
        op="interpolate",
        braze=F.interpolate,
        stock=torch.nn.functional.interpolate,
        layouts=("contiguous", "channels_last"),
        saved=None,
        cases=[
            # of a feature pyramid, HRNet, a U-Net, MobileViT, DeepLab, an image's pooled context
            case((16, 256, 50, 50), size=(100, 100), mode="nearest"),
            case((64, 36, 28, 28), size=(56, 56), mode="nearest"),
            case((64, 144, 7, 7), size=(56, 56), mode="nearest"),
            case((16, 128, 128, 128), size=(256, 256), mode="bilinear", align_corners=True),
            case((16, 512, 32, 32), size=(64, 64), mode="bilinear"),
            case((64, 160, 7, 7), size=(8, 8), mode="bilinear"),
            case((8, 256, 33, 33), size=(129, 129), mode="bilinear"),
            case((8, 21, 65, 65), size=(513, 513), mode="bilinear"),
            case((16, 256, 1, 1), size=(33, 33), mode="bilinear"),
        ],
    )
]
