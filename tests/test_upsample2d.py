"""Upsampling against torch's. On CPUs, where torch's runs else, by the op as well."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as stock
from torch import nn

import braze
import braze.nn.functional as F
from braze._ops import upsample2d as ops
from common import check_against_stock, layouts
from convert_models import ops_run

# shape, size, scale_factor, recompute_scale_factor
CASES = [
    ((2, 8, 4, 5), None, 2, None),
    ((3, 5, 7, 7), (8, 8), None, None),
    ((2, 16, 7, 6), None, (3, 1.5), None),
    ((2, 16, 9, 4), None, 1.7, True),
    ((2, 3, 9, 14), None, 1.7, None),
    ((2, 3, 5, 6), 13, None, None),
    ((2, 8, 9, 9), (4, 5), None, None),
    ((1, 8, 1, 1), (9, 17), None, None),
    ((2, 16, 2, 3), (31, 40), None, None),
    ((1, 2, 6, 1), (1, 6), None, None),
    ((2, 4, 5, 5), 5, None, None),
    ((0, 3, 6, 6), None, 2, None),
    ((1, 1, 1, 1), 1, None, None),
    ((2, 3, 30, 20), None, 0.3, None),
    ((1, 72, 33, 11), (64, 23), None, None),
]
# mode, align_corners
MODES = [("nearest", None), ("nearest-exact", None), ("bilinear", None), ("bilinear", True)]
every_mode = pytest.mark.parametrize("mode", MODES, ids=str)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(ops, "UPSAMPLE_ON", ("cpu", "cuda"))


def check(x, *args, mode, corners):
    theirs = picked if mode == "nearest-exact" else stock.interpolate
    return check_against_stock(
        lambda t: F.interpolate(t, *args[:2], mode, corners, *args[2:]),
        lambda t: theirs(nchw(t), *args[:2], mode, corners, *args[2:]),
        [x],
    )


def picked(t, *args):
    """stock.interpolate, which picks elements, with the gradient of that: torch's on CUDA may go to
    the element beside the one that was picked, where two are as near."""
    places = torch.arange(t.shape[2] * t.shape[3], device=t.device).view(1, 1, *t.shape[2:])
    places = stock.interpolate(places.double(), *args)
    return t.flatten(2)[:, :, places.long().flatten()].unflatten(2, places.shape[2:])


def nchw(t):
    return t.clone(memory_format=torch.contiguous_format)


@every_mode
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_stock(device, dtype, case, mode):
    shape, *args = case
    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(shape, device=device).to(dtype).to(memory_format=fmt).requires_grad_()
        with_ours = check(x, *args, mode=mode[0], corners=mode[1])
        assert with_ours.shape == stock.interpolate(x, *args[:2], *mode, *args[2:]).shape


def near_a_tie(extent, out, factor):
    """Which results have a place so close to a whole number that rounding decides on which side it
    is: torch's CPU kernels for the two memory formats differ there."""
    step = 1 / factor if factor else extent / out
    places = (torch.arange(out, dtype=torch.float64) + 0.5) * step
    return (places - places.round()).abs() < 1e-5


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_same_elements(device, mode):
    """Nearest elements are torch's, whatever the sizes and factors."""
    draw = random.Random(1)
    for _ in range(300):
        extents = [draw.randint(1, 70) for _ in range(2)]
        if draw.random() < 0.5:
            size, factors = [draw.randint(1, 200) for _ in range(2)], (None, None)
        else:
            factors = [draw.choice((draw.uniform(1.1 / n, 5), 1.0, 2.0, 3.0)) for n in extents]
            size = None
        x = torch.arange(extents[0] * extents[1], device=device).float().view(1, 1, *extents)
        args = size, None if size else factors, mode
        expected = stock.interpolate(x, *args)
        differ = F.interpolate(x, *args) != expected
        if device == "cpu" and mode == "nearest-exact":
            rows, columns = map(near_a_tie, extents, expected.shape[2:], factors)
            differ &= ~(rows[:, None] | columns)
        assert not differ.any(), (extents, args)


@every_mode
@pytest.mark.parametrize("channels", [5, 16])
def test_layouts(device, dtype, mode, channels):
    for layout, x in layouts((3, channels, 6, 8), device, dtype):
        x = x.detach().requires_grad_()
        y = check(x, (9, 19), None, None, mode=mode[0], corners=mode[1])
        fmt = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        assert y.is_contiguous(memory_format=fmt), layout
        (grad,) = torch.autograd.grad(F.interpolate(x, (9, 19), None, *mode).sum(), x)
        assert grad.is_contiguous(memory_format=fmt), layout


def test_unaligned_storage_offset(device, dtype):
    for shape in [(2, 3, 8, 8), (1, 8, 6, 14)]:
        x = torch.randn(torch.Size(shape).numel() + 1, device=device).to(dtype)[1:]
        check(x.view(shape).requires_grad_(), None, 2, None, mode="bilinear", corners=None)


@every_mode
def test_special_values(device, dtype, mode):
    """A weight of zero does not hide an infinity, as in torch."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1e-40])
    x = values[torch.randint(len(values), (2, 8, 6, 6))].to(device, dtype).requires_grad_()
    check(x, None, 2, None, mode=mode[0], corners=mode[1])


@every_mode
def test_gradcheck(device, mode):
    x = torch.randn(2, 3, 3, 4, device=device, dtype=torch.float64, requires_grad=True)
    for args in [(None, 2), ((7, 3), None), (None, (1.4, 2.6))]:
        function = lambda t, args=args: F.interpolate(t, *args, *mode)  # noqa: E731
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


@every_mode
@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, mode, channels_last):
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 3, 4, 5, device=device).to(dtype, memory_format=fmt)
    op, backward = torch.ops.braze.upsample2d.default, torch.ops.braze.upsample2d_backward.default
    for scales, of in itertools.product([(None, None), (2.1, 1.9)], ["own", "float32"]):
        if of == "float32" and dtype not in (torch.bfloat16, torch.float16):
            continue
        own, other = (None, None) if of == "own" else (dtype, torch.float32)
        args = mode[0], bool(mode[1]), *scales
        y = op(x, [8, 9], *args, other)
        torch.library.opcheck(op, (x.clone().requires_grad_(), [8, 9], *args, other))
        torch.library.opcheck(
            backward, (y.detach().requires_grad_(), x.shape, *args, channels_last, own)
        )


@every_mode
def test_autocast(device, mode):
    """The dtype and the values of torch's: float32 on a GPU, made of 16 bits as they are."""
    x = torch.randn(2, 16, 5, 6, device=device, dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = (f.interpolate(x, (11, 9), None, *mode) for f in (F, stock))
        raw = torch.ops.braze.upsample2d(x, [11, 9], mode[0], bool(mode[1]), None, None)
        again = torch.func.vjp(lambda t: F.interpolate(t, (11, 9), None, *mode), x)[0]
    assert ours.dtype == theirs.dtype == raw.dtype == again.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)
    assert torch.equal(raw, ours)
    grad = torch.randn_like(ours)
    ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@every_mode
def test_compile(device, mode):
    f = lambda of, t: of.interpolate(t + 1, (9, 7), None, *mode) * 2  # noqa: E731
    for x in [torch.randn(2, 3, 8, 8, device=device), torch.randn(3, 3, 10, 8, device=device)]:
        for t in (x, x.to(memory_format=torch.channels_last)):
            t = t.requires_grad_()
            actual, expected = torch.compile(f, fullgraph=True)(F, t), f(stock, t)
            torch.testing.assert_close(actual, expected)
            assert actual.stride() == f(F, t).stride()
            grad = torch.autograd.grad(actual.square().sum(), t)
            torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), t))


class Doubles(nn.Module):
    def forward(self, x):
        return F.interpolate(x, scale_factor=2, mode="bilinear")


def test_export_of_a_dynamic_batch(device):
    torch.backends.cudnn.allow_tf32 = False  # as in test_dynamic_batch.py
    x = torch.randn(4, 3, 5, 6, device=device).to(memory_format=torch.channels_last)
    batch = {0: torch.export.Dim("batch", min=2)}
    program = torch.export.export(Doubles(), (x,), dynamic_shapes=(batch,))
    assert any("upsample2d" in str(node.target) for node in program.graph.nodes)
    more = torch.randn(7, 3, 5, 6, device=device).to(memory_format=torch.channels_last)
    assert torch.equal(program.module()(more), Doubles()(more))


def test_transforms(device):
    """What the op has no formula for is torch's."""
    x = torch.randn(3, 2, 4, 5, device=device)
    of = lambda f: lambda t: f.interpolate(t, scale_factor=2, mode="bilinear")  # noqa: E731
    ours = torch.vmap(torch.func.grad(lambda t: of(F)(t[None]).square().sum()))(x)
    theirs = torch.vmap(torch.func.grad(lambda t: of(stock)(t[None]).square().sum()))(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.func.jvp(of(F), (x,), (x,)), torch.func.jvp(of(stock), (x,), (x,))
    )


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("Upsample", dict(scale_factor=2, mode="nearest")),
        ("Upsample", dict(size=(7, 9), mode="bilinear", align_corners=True)),
        ("Upsample", dict(scale_factor=1.5, mode="bicubic")),
        ("UpsamplingNearest2d", dict(scale_factor=2)),
        ("UpsamplingBilinear2d", dict(size=(9, 8))),
    ],
    ids=str,
)
def test_modules(device, name, args):
    x = torch.randn(2, 3, 5, 6, device=device)
    ours, theirs = getattr(braze.nn, name)(**args), getattr(nn, name)(**args)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    torch.testing.assert_close(ours(x), theirs(x))
    converted = braze.convert(nn.Sequential(theirs))
    assert type(converted[0]) is type(ours)
    assert ("upsample2d" in ops_run(lambda: converted(x))) == (args.get("mode") != "bicubic")


class Functional(nn.Module):
    def forward(self, x, skip):
        x = stock.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
        return x + stock.interpolate(skip, scale_factor=1.0, mode="nearest")


def test_convert_of_functions(device):
    model, x, skip = Functional(), *(torch.randn(2, 3, n, n, device=device) for n in (5, 8))
    expected = model(x, skip)
    converted = braze.convert(model)
    torch.testing.assert_close(converted(x, skip), expected)
    assert ops_run(lambda: converted(x, skip)).count("upsample2d") == 2


X = (2, 3, 6, 6)
BAD = [
    (X, dict()),
    (X, dict(size=4, scale_factor=2)),
    (X, dict(size=(4, 4, 4))),
    (X, dict(size=0)),
    (X, dict(size=2.5)),
    (X, dict(size="a")),
    (X, dict(scale_factor=(2, 2, 2))),
    (X, dict(scale_factor=0.1)),
    (X, dict(scale_factor=-1.0)),
    (X, dict(size=4, mode="linear")),
    (X, dict(size=4, mode="none")),
    (X, dict(size=4, align_corners=True)),
    (X, dict(size=4, recompute_scale_factor=True)),
    (X, dict(size=4, antialias=True)),
    ((2, 0, 6, 6), dict(size=4)),
    ((2, 3, 0, 6), dict(size=4)),
    ((6, 6), dict(size=4)),
]


@pytest.mark.parametrize(("shape", "kwargs"), BAD, ids=str)
def test_bad_settings(device, shape, kwargs):
    """torch's exceptions."""
    x = torch.randn(shape, device=device)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        stock.interpolate(x, **kwargs)
    with pytest.raises(theirs.type) as ours:
        F.interpolate(x, **kwargs)
    assert str(ours.value) == str(theirs.value)


def test_bad_input(device):
    op, x = torch.ops.braze.upsample2d, torch.randn(X, device=device)
    backward = torch.ops.braze.upsample2d_backward
    args = "nearest", False, None, None
    with pytest.raises(RuntimeError, match="expected input of dtype float64"):
        op(x.int(), [4, 4], *args)
    with pytest.raises(RuntimeError, match="nearest, nearest-exact or bilinear, but got cubic"):
        op(x, [4, 4], "cubic", False, None, None)
    with pytest.raises(RuntimeError, match="align_corners belongs to mode bilinear alone"):
        op(x, [4, 4], "nearest", True, None, None)
    with pytest.raises(RuntimeError, match="sizes should be greater than 0"):
        op(x, [4, 0], *args)
    with pytest.raises(RuntimeError, match="output_size to have 2 elements, but got 3"):
        op(x, [4, 4, 4], *args)
    with pytest.raises(RuntimeError, match=r"expected input of shape \[N, C, H, W\]"):
        op(x[0], [4, 4], *args)
    with pytest.raises(RuntimeError, match="float32 for a 16-bit one, but got float64"):
        op(x, [4, 4], *args, torch.float64)
    with pytest.raises(RuntimeError, match="as many images and channels as the input"):
        backward(x, [2, 4, 6, 6], *args, False)


def test_repeatable(device):
    x = torch.randn(4, 16, 9, 9, device=device).to(memory_format=torch.channels_last)
    x.requires_grad_()
    y = F.interpolate(x, (40, 31), mode="bilinear")
    grad = torch.randn_like(y)
    first = torch.autograd.grad(y, x, grad, retain_graph=True)[0]
    for _ in range(4):
        assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], first)


def test_registered():
    assert any(k["shipped"] for k in braze.kernels("upsample2d"))


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """Corners in other places, and the gradient of another size."""
    x = torch.randn(2, 8, 5, 5, device=device).to(dtype).requires_grad_()
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(
            lambda t: F.interpolate(t, (9, 9), mode="bilinear", align_corners=True),
            lambda t: stock.interpolate(t, (9, 9), mode="bilinear"),
            [x],
        )

    def wrong(t):
        return F.interpolate(t.detach(), scale_factor=2) + (t - t.detach()).repeat(1, 1, 2, 2)

    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(wrong, lambda t: stock.interpolate(t, scale_factor=2), [x])
