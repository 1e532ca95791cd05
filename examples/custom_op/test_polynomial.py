"""Run with ``pytest examples/custom_op``."""

import pytest
import torch
from polynomial import WITH_CUDA, polynomial


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not (torch.cuda.is_available() and WITH_CUDA):
        pytest.skip("no GPU, or no nvcc to build the CUDA kernels with")
    return request.param


def reference(x, a, b, c):
    return a * x**3 + b * x**2 + c * x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 1000), (2, 3, 5, 7)], ids=str)
def test_value_and_gradient(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    y = polynomial(x, 0.5, -1.0, 2.0)
    y.sum().backward()
    exact = x.detach().double().requires_grad_()
    expected = reference(exact, 0.5, -1.0, 2.0)
    expected.sum().backward()
    # A few roundings of the dtype, and terms that cancel.
    size = 2 * exact.detach().abs() ** 3 + 4 * exact.detach().abs() + 2
    tolerance = 4 * torch.finfo(dtype).eps * size
    assert ((y.double() - expected).abs() <= tolerance).all()
    assert ((x.grad.double() - exact.grad).abs() <= 3 * tolerance).all()


def test_strides(device):
    x = torch.randn(4, 6, device=device)
    for view in (x.t(), x[1:, ::2], x[:1].expand(4, 6)):
        torch.testing.assert_close(polynomial(view, 1, 2, 3), reference(view, 1, 2, 3))


def test_gradcheck(device):
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: polynomial(t, 0.5, -1.0, 2.0), x)


def test_opcheck(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.custom_op.polynomial.default, (x, 0.5, -1.0, 2.0))
    # Strides other than x's, and a view: the fake kernel has to say what the kernel returns.
    torch.library.opcheck(torch.ops.custom_op.polynomial.default, (x.t(), 0.5, -1.0, 2.0))


def test_compile(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    compiled = torch.compile(lambda t: polynomial(t + 1, 1, 2, 3) * 2, fullgraph=True)
    y = compiled(x)
    torch.testing.assert_close(y, 2 * reference(x + 1, 1, 2, 3))
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, 2 * (3 * (x + 1) ** 2 + 4 * (x + 1) + 3))


def test_bad_input(device):
    with pytest.raises(RuntimeError, match="expected a floating-point tensor"):
        polynomial(torch.arange(3, device=device), 1, 2, 3)
    x = torch.randn(3, device=device)
    with pytest.raises(RuntimeError, match="expected grad to have the shape"):
        torch.ops.custom_op.polynomial_backward(x[:2], x, 1, 2, 3)
