"""A complete op of one's own: the activation a x^3 + b x^2 + c x with its derivative.

Needs torch 2.10 or newer, a C++ compiler and ninja; with nvcc and a CUDA build of torch it has CUDA
kernels too. The first import compiles it (about 20 s), later ones load it.
"""

from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
#: whether the CUDA kernels are built
WITH_CUDA = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
# Only what torch keeps stable from 2.10 on: one build serves all later versions.
STABLE_ABI = ["-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000"]

cpp_extension.load(
    name="custom_op",
    sources=[str(HERE / f"polynomial.{ending}") for ending in ["cpp"] + ["cu"] * WITH_CUDA],
    extra_cflags=STABLE_ABI,
    extra_cuda_cflags=STABLE_ABI,
    is_python_module=False,
)
ops = torch.ops.custom_op
library = torch.library.Library("custom_op", "IMPL")


class Polynomial(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, c):
        ctx.save_for_backward(x)
        ctx.coefficients = a, b, c
        with torch._C._AutoDispatchBelowAutograd():
            return ops.polynomial.default(x, a, b, c)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ops.polynomial_backward.default(grad, x, *ctx.coefficients), None, None, None


# As the op's Autograd kernel, the Function also serves torch.ops.custom_op.polynomial(...).
library.impl("polynomial", Polynomial.apply, "Autograd")


# Fake kernels compute shapes without data: torch.compile and torch.export trace with them.
@torch.library.register_fake("custom_op::polynomial", lib=library)
def _(x, a, b, c):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("custom_op::polynomial_backward", lib=library)
def _(grad, x, a, b, c):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def polynomial(x, a, b, c):
    """a x^3 + b x^2 + c x element by element.

    Args:
        x: any shape and strides; float64, float32, bfloat16 or float16.
        a, b, c: Python numbers; they get no gradient.

    Returns:
        A contiguous tensor of the same shape and dtype, differentiable once.
    """
    return ops.polynomial(x, a, b, c)
