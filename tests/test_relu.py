import pytest
import torch
import torch.nn.functional as stock

import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, compile, layouts

SHAPES = [(), (0,), (1,), (7,), (8,), (1023,), (64, 32, 14, 14), (3, 0, 5), (2, 3, 5, 7, 11)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    check_against_stock(F.relu, stock.relu, [x], terms=1)


def test_layouts(device, dtype):
    for name, x in layouts((4, 5, 6, 7), device, dtype):
        y = F.relu(x)
        assert torch.equal(y, stock.relu(x)), name
        assert y.stride() == torch.empty_like(x).stride(), name


def test_unaligned_storage_offset(device, dtype):
    x = torch.randn(1001, device=device).to(dtype)[1:]
    assert torch.equal(F.relu(x), stock.relu(x))


def test_special_values(device, dtype):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40], device=device)
    x = x.to(dtype).requires_grad_()
    check_against_stock(F.relu, stock.relu, [x], terms=1)


def test_inplace(device, dtype):
    x = torch.randn(5, 7, device=device).to(dtype).requires_grad_()
    y = x.clone()
    version = y._version
    result = F.relu(y, inplace=True)
    assert result is y
    assert y._version > version
    assert torch.equal(y, stock.relu(x))
    sliced = x.detach().clone()[:, ::2]
    F.relu(sliced, inplace=True)
    assert torch.equal(sliced, stock.relu(x.detach()[:, ::2]))


def test_inplace_on_saved_tensor_is_refused(device):
    x = torch.randn(5, device=device, requires_grad=True)
    y = x * 2
    z = y * y
    F.relu(y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_gradcheck(device):
    x = torch.randn(4, 5, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(F.relu, x)
    assert torch.autograd.gradcheck(torch.ops.braze.relu, x)
    assert torch.autograd.gradgradcheck(F.relu, x)


def test_opcheck(device, dtype):
    x = torch.randn(4, 5, device=device).to(dtype)
    torch.library.opcheck(torch.ops.braze.relu.default, (x.clone().requires_grad_(),))
    torch.library.opcheck(torch.ops.braze.relu_.default, (x.clone(),))
    torch.library.opcheck(torch.ops.braze.relu_backward.default, (x, x))


@pytest.mark.parametrize("inplace", [False, True])
def test_compile(device, inplace):
    x = torch.randn(4, 5, device=device)
    compiled = compile(lambda t: F.relu(t + 1, inplace) * 2)
    assert torch.equal(compiled(x), stock.relu(x + 1) * 2)


def test_bad_input(device):
    with pytest.raises(RuntimeError, match=r"expected input of dtype float64.*but got int64"):
        torch.ops.braze.relu(torch.arange(3, device=device))
    x = torch.randn(3, device=device)
    with pytest.raises(RuntimeError, match=r"same shape as result, but got \[2\] and \[3\]"):
        torch.ops.braze.relu_backward(x[:2], x)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.ops.braze.relu_backward(x.double(), x)


def test_transforms(device):
    """Of the raw op; those of the function are in test_composability.py."""
    x = torch.randn(3, 4, device=device)
    assert torch.equal(torch.func.vmap(torch.ops.braze.relu.default)(x), x.relu())


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A ReLU whose gradient passes at zero: the comparison must fail."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.ops.braze.relu(x)

        @staticmethod
        def backward(ctx, grad):
            return torch.where(ctx.saved_tensors[0] >= 0, grad, 0)

    x = torch.tensor([-1.0, 0.0, 1.0], device=device, dtype=dtype, requires_grad=True)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(Wrong.apply, stock.relu, [x], terms=1)
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(x, stock.relu(x), stock.relu(x.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_on_cpu(dtype):
    """There the sign and the magnitude are told from the bits."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype).requires_grad_()
    results = []
    for relu in (F.relu, torch.relu):
        y = relu(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        results.append((y, grad))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
