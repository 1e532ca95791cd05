"""transpose_copy by every kernel that this device has."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import braze
from common import compile, layouts

# narrow, inside one tile, several tiles, whole vectors and not; odd, prime, 1, 0
SHAPES = [
    (1, 1),
    (0, 5),
    (5, 0),
    (3, 1000),
    (1000, 10),
    (64, 64),
    (67, 131),
    (128, 256),
    (8, 1040),
    (2, 72, 136),
    (2, 49, 64),
    (3, 40, 72),
    (2, 3, 17, 65),
    (0, 4, 4),
    (200, 3, 3),
]


def expected(x):
    return x.transpose(-2, -1).contiguous()


CUDA = ["01_naive", "02_shared_tile", "03_padded", "04_vectorized", "05_register_block"]


def rungs(device):
    """What braze.backend() takes for this device, the kernels' names last."""
    kernels = braze.kernels("transpose_copy")
    names = [k["name"] for k in kernels if (k["arch"] == "cpu") == (device == "cpu")]
    assert sorted(names) == (["01_naive", "02_blocked"] if device == "cpu" else CUDA)
    return ["auto", "braze", *names]


def takes(name, x):
    """Whether the kernel takes a contiguous copy of `x`, or `x` itself where it is contiguous."""
    if name != "05_register_block" or x.numel() == 0:
        return True
    aligned = not x.is_contiguous() or x.data_ptr() % 16 == 0
    return aligned and all(size * x.element_size() % 16 == 0 for size in x.shape[-2:])


def check(x, what=""):
    for name in rungs(x.device.type):
        with braze.backend(transpose_copy=name):
            if not takes(name, x):
                with pytest.raises(RuntimeError, match=f"{name} cannot take these arguments"):
                    braze.transpose_copy(x)
                continue
            y = braze.transpose_copy(x)
        assert torch.equal(y, expected(x)), f"{name} {what}"
        assert y.is_contiguous()
        assert y.data_ptr() != x.data_ptr() or y.numel() == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(device, dtype, shape):
    check(torch.randn(shape, device=device).to(dtype))


def test_layouts_and_unaligned_offset(device, dtype):
    for name, x in layouts((2, 3, 40, 24), device, dtype):
        check(x, name)
    check(torch.randn(1 + 64 * 72, device=device).to(dtype)[1:].view(64, 72))
    check(torch.randn(64, 72, device=device).to(dtype).t())


def test_special_values_keep_their_bits(device):
    for cols in (80, 77):
        x = torch.randint(-(2**31), 2**31 - 1, (72, cols), device=device, dtype=torch.int32)
        for name in rungs(device):
            if takes(name, x):
                y = torch.ops.braze.transpose_copy(x.view(torch.float32), name)
                assert torch.equal(y.view(torch.int32), expected(x)), name


class Backends(TorchDispatchMode):
    """Notes the backend of every transpose_copy; its default is not among the arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.braze.transpose_copy.default:
            self.seen.append(args[1] if len(args) > 1 else "auto")
        return func(*args, **(kwargs or {}))


def test_backward_uses_the_kernel_of_the_forward(device):
    x = torch.randn(5, 7, device=device, requires_grad=True)
    with Backends() as backends:
        with braze.backend(transpose_copy="01_naive"):
            y = braze.transpose_copy(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        assert backends.seen == ["01_naive", "01_naive"]
        braze.transpose_copy(x)
        assert backends.seen == ["01_naive", "01_naive", "auto"]
    assert torch.equal(grad, torch.ones_like(x))


def test_gradcheck(device):
    x = torch.randn(2, 3, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(braze.transpose_copy, x)
    assert torch.autograd.gradcheck(torch.ops.braze.transpose_copy, x)
    assert torch.autograd.gradgradcheck(braze.transpose_copy, x)


def test_opcheck(device, dtype):
    x = torch.randn(2, 3, 4, device=device).to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.braze.transpose_copy.default, (x,))
    torch.library.opcheck(torch.ops.braze.transpose_copy.default, (x, "01_naive"))


def test_compile(device):
    x = torch.randn(5, 7, device=device)
    compiled = compile(lambda t: braze.transpose_copy(t + 1) * 2)
    assert torch.equal(compiled(x), expected(x + 1) * 2)


def test_bad_input(device):
    with pytest.raises(TypeError, match=r"argument 'input' .* must be Tensor, not list"):
        braze.transpose_copy([[1.0]])
    with pytest.raises(RuntimeError, match="expected input of 2 or more dimensions, but got 1"):
        braze.transpose_copy(torch.randn(3, device=device))
    with pytest.raises(RuntimeError, match="expected input of dtype float64"):
        torch.ops.braze.transpose_copy(torch.ones(3, 3, device=device, dtype=torch.int64))


def test_unknown_kernels(device):
    x = torch.randn(3, 4, device=device)
    for name in ("no_such_kernel", "", "cublas", ":3"):
        with pytest.raises(ValueError, match="transpose_copy to be one of auto, braze, 01_naive"):
            braze.backend(transpose_copy=name)
        with pytest.raises(RuntimeError, match="backend to be one of auto, braze, 01_naive"):
            torch.ops.braze.transpose_copy(x, name)


def not_transposed(x):
    """A tile that is put in its new place as it was."""
    return x.clone()


def upside_down(x):
    return expected(x).flip(0)


def last_tile_left_out(x):
    out = expected(x)
    out[..., 64:, 64:] = 0
    return out


def swapped_vectors(x):
    """A swizzle that reads two vectors of a row in each other's place."""
    out = expected(x)
    out[3, :16] = out[3, :16].roll(8)
    return out


@pytest.mark.parametrize(
    "wrong", [not_transposed, upside_down, last_tile_left_out, swapped_vectors]
)
def test_the_tests_reject_a_wrong_kernel(device, monkeypatch, wrong):
    x = torch.randn(72, 72, device=device)
    check(x)
    monkeypatch.setattr(braze, "transpose_copy", wrong)
    with pytest.raises(AssertionError):
        check(x)
