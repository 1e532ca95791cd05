import pytest
import torch

import braze
from common import layouts

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
    (3, 40, 72),
    (2, 3, 17, 65),
    (0, 4, 4),
    (200, 3, 3),
]


def expected(x):
    return x.transpose(-2, -1).contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype)
    y = braze.transpose_copy(x)
    assert torch.equal(y, expected(x))
    assert y.is_contiguous()
    assert y.data_ptr() != x.data_ptr() or y.numel() == 0


def test_layouts_and_unaligned_offset(device, dtype):
    for name, x in layouts((2, 3, 40, 24), device, dtype):
        assert torch.equal(braze.transpose_copy(x), expected(x)), name
    x = torch.randn(1 + 64 * 72, device=device).to(dtype)[1:].view(64, 72)
    assert torch.equal(braze.transpose_copy(x), expected(x))
    x = torch.randn(64, 72, device=device).to(dtype).t()
    assert torch.equal(braze.transpose_copy(x), expected(x))


def test_special_values_keep_their_bits(device):
    x = torch.randint(-(2**31), 2**31 - 1, (70, 80), device=device, dtype=torch.int32)
    y = braze.transpose_copy(x.view(torch.float32))
    assert torch.equal(y.view(torch.int32), expected(x))


def test_gradcheck(device):
    x = torch.randn(2, 3, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(braze.transpose_copy, x)
    assert torch.autograd.gradcheck(torch.ops.braze.transpose_copy, x)
    assert torch.autograd.gradgradcheck(braze.transpose_copy, x)


def test_opcheck(device, dtype):
    x = torch.randn(2, 3, 4, device=device).to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.braze.transpose_copy.default, (x,))


def test_compile(device):
    x = torch.randn(5, 7, device=device)
    compiled = torch.compile(lambda t: braze.transpose_copy(t + 1) * 2, fullgraph=True)
    assert torch.equal(compiled(x), expected(x + 1) * 2)


def test_bad_input(device):
    with pytest.raises(RuntimeError, match="expected input of 2 or more dimensions, but got 1"):
        braze.transpose_copy(torch.randn(3, device=device))
    with pytest.raises(RuntimeError, match="expected input of dtype float64"):
        braze.transpose_copy(torch.ones(3, 3, device=device, dtype=torch.int64))


def test_the_tests_reject_a_wrong_kernel(device):
    x = torch.randn(6, 6, device=device)
    assert not torch.equal(x, expected(x))
    assert not torch.equal(x.flip(0), expected(x))
