"""Products that go through a large matrix once: those of a linear layer with a few samples, and of
images of one pixel. Small integers, whose products are exact in any order."""

import pytest
import torch

import braze
import braze.nn.functional as F

SHAPES = [(1, 1000, 2049), (2, 513, 257), (3, 700, 3000), (5, 1025, 1027), (8, 640, 1700)]


def integers(*shape, device, dtype):
    return torch.randint(-3, 4, shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["rows of B", "columns of B"])
def test_few_rows(device, dtype, m, n, k, turned):
    a = integers(2, m, k, device=device, dtype=dtype)
    b = integers(2, *((n, k) if turned else (k, n)), device=device, dtype=dtype)
    b = b.mT if turned else b
    exact = (a.double() @ b.double()).to(dtype)
    for one, other in ((a, b), (a.mT.contiguous().mT, b), (a.repeat(1, 1, 2)[..., k:], b)):
        assert torch.equal(braze.matmul(one, other), exact)
        assert torch.equal(braze.matmul(one[0], other[0]), exact[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("samples", [1, 3, 4, 7, 8, 9])
@pytest.mark.parametrize(("inputs", "outputs"), [(700, 1000), (3137, 515)], ids=str)
def test_linear_layer(device, dtype, samples, inputs, outputs):
    """All three passes, with a bias and a ReLU."""
    x = integers(samples, inputs, device=device, dtype=dtype).requires_grad_()
    w = integers(outputs, inputs, device=device, dtype=dtype).requires_grad_()
    b = integers(outputs, device=device, dtype=dtype).requires_grad_()
    y = F.linear_relu(x, w, b)
    dy = integers(*y.shape, device=device, dtype=dtype)
    y.backward(dy)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.nn.functional.linear(*wide).relu()
    exact.backward(dy.double())
    grads = [t.grad for t in wide]
    for actual, wanted in zip((y, x.grad, w.grad, b.grad), (exact, *grads), strict=True):
        assert torch.equal(actual.double(), wanted)


@pytest.mark.parametrize("images", [1, 4, 8])
@pytest.mark.parametrize(("channels", "filters"), [(2048, 1000), (257, 1025)], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["filters first", "channels first"])
def test_images_of_one_pixel(device, images, channels, filters, turned):
    x = integers(images, channels, 1, 1, device=device, dtype=torch.float32).requires_grad_()
    shape = (channels, filters) if turned else (filters, channels)
    w = integers(*shape, 1, 1, device=device, dtype=torch.float32)
    w = (w.transpose(0, 1) if turned else w).requires_grad_()
    b = integers(filters, device=device, dtype=torch.float32).requires_grad_()
    y = F.conv2d(x, w, b)
    dy = integers(*y.shape, device=device, dtype=torch.float32)
    grads = torch.autograd.grad(y, (x, w, b), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.nn.functional.conv2d(*wide)
    wanted = torch.autograd.grad(exact, wide, dy.double())
    for actual, double in zip((y, *grads), (exact, *wanted), strict=True):
        assert torch.equal(actual.double(), double)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("images", "channels", "filters"), [(4096, 1, 64), (64, 8, 512), (300, 5, 130)], ids=str
)
def test_few_channels(device, images, channels, filters, bias):
    """Sums of a few terms, with and without an epilogue: planned alike."""
    x = integers(images, channels, 1, 1, device=device, dtype=torch.float32)
    w = integers(channels, filters, 1, 1, device=device, dtype=torch.float32)
    b = integers(filters, device=device, dtype=torch.float32) if bias else None
    turned = w.transpose(0, 1)
    exact = torch.nn.functional.linear(x.flatten(1), turned.flatten(1), b)
    for y in (F.conv2d(x, turned, b), F.conv_transpose2d(x, w, b)):
        assert torch.equal(y.flatten(1), exact)
    assert torch.equal(F.linear(x.flatten(1), turned.flatten(1), b), exact)
    assert torch.equal(F.linear_relu(x.flatten(1), turned.flatten(1), b), exact.relu())


def test_infinities_and_nan_stay_where_they_are(device):
    a = torch.randn(2, 600, device=device)
    b = torch.randn(600, 2000, device=device)
    b[5, 7], b[9, 1999], a[1, 3] = float("inf"), float("nan"), float("nan")
    for other in (b, b.mT.contiguous().mT):
        c = braze.matmul(a, other)
        assert c[1].isnan().all()
        assert c[0, 7].isinf()
        assert c[0, 1999].isnan()
        rest = torch.ones(2000, dtype=torch.bool, device=device)
        rest[[7, 1999]] = False
        assert c[0][rest].isfinite().all()
