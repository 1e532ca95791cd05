"""Transposed convolutions: U-Nets' of base 32 and 64, DCGAN's generator."""

import torch

import braze.nn.functional as F
from benchmarks.harness import Benchmark, Case


def case(batch, channels_in, channels_out, size, kernel, stride, padding=0, bias=True, **kwargs):
    """A square one."""

    def inputs(device, dtype):
        # As many terms as a result has on average.
        bound = (channels_in * max(1, kernel / stride) ** 2) ** -0.5
        weight = torch.randn(channels_in, channels_out, kernel, kernel, device=device) * bound
        x = torch.randn(batch, channels_in, size, size, device=device).to(dtype)
        tensors = [x.requires_grad_(), weight.to(dtype).requires_grad_()]
        if bias:
            tensors.append(torch.randn(channels_out, device=device).to(dtype).requires_grad_())
        return tensors

    name = f"{batch}x{channels_in}x{size}x{size} to {channels_out}, {kernel}x{kernel}/{stride}"
    flops = 2 * batch * size**2 * channels_in * channels_out * kernel**2
    return Case(name, inputs, {"stride": stride, "padding": padding}, flops, **kwargs)


BENCHMARKS = [
    Benchmark(
        op="conv_transpose2d",
        braze=F.conv_transpose2d,
        stock=torch.nn.functional.conv_transpose2d,
        dtypes=("float32", "tf32", "bfloat16"),
        layouts=("contiguous", "channels_last"),
        cases=[
            case(1, 64, 32, 64, 2, 2),
            # A U-Net of base 32 on images of 256 x 256.
            *(
                case(16, 64 << level, 32 << level, 128 >> level, 2, 2, gpu_only=True)
                for level in range(3)
            ),
            # The original's widths, base 64, on images of 512 x 512.
            *(
                case(4, 128 << level, 64 << level, 256 >> level, 2, 2, gpu_only=True)
                for level in range(4)
            ),
            # DCGAN's generator (Radford et al., 2016) for 64 x 64, without biases.
            case(128, 100, 512, 1, 4, 1, bias=False),
            case(128, 512, 256, 4, 4, 2, 1, bias=False, gpu_only=True),
            case(128, 256, 128, 8, 4, 2, 1, bias=False, gpu_only=True),
            case(128, 128, 64, 16, 4, 2, 1, bias=False, gpu_only=True),
            case(128, 64, 3, 32, 4, 2, 1, bias=False),
        ],
    )
]
