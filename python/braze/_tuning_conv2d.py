"""How :mod:`braze.tuning` runs a pass of a convolution: made-up tensors, the op, the reference."""

import torch


def operands(problem, device):
    """Random input, filters, gradient of the result and bias (or None), as the pass has them in
    memory."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if problem.dtype == "tf32" else getattr(torch, problem.dtype)
    form = torch.channels_last if problem.channels_last else torch.contiguous_format

    def randn(*shape):
        t = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        # Where both formats are the same memory, strides have to say which one is meant.
        return torch.empty_like(t, memory_format=form).copy_(t)

    p = problem
    x, w = randn(p.n, p.c, p.h, p.w), randn(p.k, p.c // p.groups, p.r, p.s)
    dy = randn(p.n, p.k, *p.out_size)
    bias = None
    if p.bias:
        bias = torch.randn(p.k, generator=generator, device=device, dtype=dtype)
    return x, w, dy, bias


def bound(problem, tensors):
    """A function of a backend's name that computes the pass of the :func:`operands`."""
    x, w, dy, bias = tensors
    fprop, backward = torch.ops.braze.conv2d.default, torch.ops.braze.conv2d_backward.default
    where = *problem.geometry, problem.groups
    tf32 = problem.dtype == "tf32"
    mask = [problem.pass_name == "dgrad", problem.pass_name == "wgrad", False]

    def run(backend):
        if problem.pass_name == "fprop":
            return fprop(x, w, bias, *where, tf32, False, backend)
        return backward(dy, x, w, *where, mask, tf32, False, backend)[mask.index(True)]

    return run


def reference(problem, tensors):
    """The pass in float64, by torch."""
    x, w, dy, bias = (t if t is None else t.double() for t in tensors)
    stride, padding, dilation = problem.geometry
    cudnn = torch.backends.cudnn
    tries_all, cudnn.benchmark = cudnn.benchmark, False  # that would take minutes in float64
    try:
        if problem.pass_name == "fprop":
            return torch.conv2d(x, w, bias, stride, padding, dilation, problem.groups)
        mask = [problem.pass_name == "dgrad", problem.pass_name == "wgrad", False]
        where = stride, padding, dilation, False, [0, 0], problem.groups
        return torch.ops.aten.convolution_backward(dy, x, w, None, *where, mask)[mask.index(True)]
    finally:
        cudnn.benchmark = tries_all
