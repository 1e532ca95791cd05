"""What the tests of matrix products share: operands, and the kernels that there are."""

import torch

import braze
from braze import _config


def randn(*shape, device, dtype, grad=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def strided(shape, device, dtype):
    """Tensors of one shape in many layouts."""
    *batch, rows, cols = shape
    r = lambda *s: torch.randn(s, device=device).to(dtype)  # noqa: E731
    yield "contiguous", r(*shape)
    yield "transposed", r(*batch, cols, rows).mT
    yield "permuted batch", r(rows, *batch, cols).movedim(0, -2)
    yield "batch innermost", r(rows, cols, *batch).permute(*range(2, 2 + len(batch)), 0, 1)
    yield "sliced rows", r(*batch, 2 * rows, cols + 3)[..., ::2, 1:-2]
    yield "sliced columns", r(*batch, rows, 2 * cols)[..., ::2]
    yield "expanded batch", r(rows, cols).expand(shape)
    yield "expanded rows", r(*batch, 1, cols).expand(shape)
    yield "expanded columns", r(*batch, rows, 1).expand(shape)
    yield "offset", r(1 + torch.Size(shape).numel())[1:].view(shape)
    yield "overlapping", r(4096).as_strided(shape, (3, 2, 1, 1)[-len(shape) :])


def own_kernels(device):
    wanted = (lambda arch: arch == "cpu") if device == "cpu" else (lambda arch: "sm_" in arch)
    vendor = _config.backend._VENDORS["matmul"]
    return [k for k in braze.kernels("matmul") if wanted(k["arch"]) and k["name"] not in vendor]


def majors(batch, rows, cols, transposed, device, dtype):
    """Matrices in memory as they are, or as their transposes."""
    shape = (batch, cols, rows) if transposed else (batch, rows, cols)
    t = torch.randn(shape, device=device).to(dtype)
    t = t.mT if transposed else t
    return t[0] if batch == 1 else t


def assert_same_where_special(out, reference, atol=1e-4):
    """Infinities and NaN of a product are those of the exact one, and the rest is close to it."""
    assert torch.equal(out.isnan(), reference.isnan())
    assert torch.equal(out.isposinf(), reference.isposinf())
    assert torch.equal(out.isneginf(), reference.isneginf())
    finite = reference.isfinite()
    torch.testing.assert_close(out[finite], reference[finite].float(), rtol=1e-4, atol=atol)
