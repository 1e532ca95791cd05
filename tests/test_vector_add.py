"""vector_add by every kernel that this device has."""

import pytest
import torch

import braze
from common import check_against_stock, compile, layouts

# 16-byte vectors hold 2 to 8 elements, a block of the widest kernel takes 8192.
SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (8,),
    (1023,),
    (8192,),
    (8195,),
    (3, 0, 5),
    (2, 3, 5, 7, 11),
    (40007,),
]


def rungs(device):
    """What braze.backend() takes for this device, the kernels' names last."""
    names = [
        k["name"] for k in braze.kernels("vector_add") if (k["arch"] == "cpu") == (device == "cpu")
    ]
    cuda = ["01_naive", "02_grid_stride", "03_vectorized", "04_loads_in_flight"]
    assert sorted(names) == (["01_naive", "02_threaded"] if device == "cpu" else cuda)
    return ["auto", "braze", *names]


def randn(shape, device, dtype):
    return torch.randn(shape, device=device).to(dtype)


def check(a, b, device):
    for name in rungs(device):
        with braze.backend(vector_add=name):
            assert torch.equal(braze.vector_add(a, b), a + b), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape):
    a, b = (randn(shape, device, dtype).requires_grad_() for _ in range(2))
    for name in rungs(device):
        with braze.backend(vector_add=name):
            out = check_against_stock(braze.vector_add, torch.add, [a, b], terms=1)
        assert torch.equal(out, a + b), name


def test_layouts(device, dtype):
    shape = (4, 5, 6, 7)
    for left, a in layouts(shape, device, dtype):
        for right, b in layouts(shape, device, dtype):
            check(a, b, device)
            strides = torch.empty_like(a).stride()
            assert braze.vector_add(a, b).stride() == strides, (left, right)


def test_unaligned_storage_offsets(device, dtype):
    a, b = (randn(8200, device, dtype) for _ in range(2))
    check(a[1:], b[1:], device)
    check(a[1:], b[:-1], device)
    check(a[:-1], b[1:], device)


def test_special_values(device, dtype):
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 65504.0, 3e38]
    a = torch.tensor(values, device=device).to(dtype).repeat(8)
    b = torch.tensor(values, device=device).to(dtype).repeat_interleave(8)
    for name in rungs(device):
        with braze.backend(vector_add=name):
            check_against_stock(braze.vector_add, torch.add, [a, b], terms=1)
            sums = braze.vector_add(a, b)
        signs = torch.signbit(sums) == torch.signbit(a + b)
        assert (signs | sums.isnan()).all(), name


def test_the_same_tensor_twice(device, dtype):
    a = randn(1001, device, dtype).requires_grad_()
    check_against_stock(lambda t: braze.vector_add(t, t), lambda t: t + t, [a], terms=1)


def test_gradcheck(device):
    a, b = (randn((4, 5), device, torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(braze.vector_add, (a, b))
    assert torch.autograd.gradcheck(torch.ops.braze.vector_add, (a, b))
    assert torch.autograd.gradgradcheck(braze.vector_add, (a, b))


def test_opcheck(device, dtype):
    a, b = (randn((4, 5), device, dtype).requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.braze.vector_add.default, (a, b))
    torch.library.opcheck(torch.ops.braze.vector_add.default, (a, b, "01_naive"))
    torch.library.opcheck(torch.ops.braze.vector_add.default, (a.mT, b.mT))


def test_compile(device):
    a, b = (randn((4, 5), device, torch.float32) for _ in range(2))
    compiled = compile(lambda x, y: braze.vector_add(x + 1, y) * 2)
    assert torch.equal(compiled(a, b), (a + 1 + b) * 2)


def test_bad_input(device):
    a = torch.randn(3, device=device)
    with pytest.raises(TypeError, match=r"argument 'b' \(position 2\) must be Tensor, not float"):
        braze.vector_add(a, 1.0)
    with pytest.raises(
        RuntimeError, match=r"b to have the same shape as a, but got \[1\] and \[3\]"
    ):
        braze.vector_add(a, a[:1])
    with pytest.raises(RuntimeError, match="same dtype as a, but got float64 and float32"):
        braze.vector_add(a, a.double())
    with pytest.raises(RuntimeError, match=r"expected a of dtype float64.*but got int64"):
        torch.ops.braze.vector_add(a.long(), a.long())
    if device == "cuda":
        with pytest.raises(RuntimeError, match="on the same device, but b is on cpu"):
            braze.vector_add(a, a.cpu())


def test_unknown_kernels(device):
    a = torch.randn(3, device=device)
    for name in ("no_such_kernel", "", "cublas", ":3"):
        with pytest.raises(ValueError, match="vector_add to be one of auto, braze, 01_naive, 02_"):
            braze.backend(vector_add=name)
        with pytest.raises(RuntimeError, match="backend to be one of auto, braze, 01_naive, 02_"):
            torch.ops.braze.vector_add(a, a, name)


def test_transforms(device):
    a = torch.randn(3, 4, device=device)
    assert torch.equal(torch.func.vmap(braze.vector_add)(a, a), a + a)


def no_tail(a, b):
    """A wrong bound: what no whole vector holds is left out."""
    out = a + b
    out[out.numel() // 8 * 8 :] = 0
    return out


def bits_lost(a, b):
    """Arithmetic with a few bits less."""
    return (a + b) * (1 + 16 * torch.finfo(a.dtype).eps)


def skipped_vectors(a, b):
    """A grid's stride that is too long."""
    out = a + b
    out[512:520] = a[512:520]
    return out


@pytest.mark.parametrize("wrong", [no_tail, bits_lost, skipped_vectors])
def test_the_tests_reject_a_wrong_kernel(device, dtype, wrong):
    a, b = (randn(1023, device, dtype) for _ in range(2))
    check_against_stock(torch.add, torch.add, [a, b], terms=1)
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, torch.add, [a, b], terms=1)
