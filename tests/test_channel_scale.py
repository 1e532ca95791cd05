import functools

import pytest
import torch

import braze.nn.functional as F
from braze._ops import channel_scale as ops
from common import check_against_stock, compile, layouts

# Vectors of channels or of pixels, and such as none divides; one and many columns of a block; more
# channels than a block has threads; long sums, one pixel, one channel; most images of a grid row
SHAPES = [
    (2, 8, 5, 6),
    (3, 16, 7, 7),
    (2, 7, 9, 5),
    (4, 1, 3, 3),
    (1, 64, 1, 1),
    (2, 1152, 7, 7),
    (1, 2100, 2, 2),
    (1, 300, 3, 1),
    (2, 32, 56, 57),
    (1, 3, 200, 161),
    (70000, 2, 1, 2),
]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def inputs(shape, device, dtype, fmt):
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=fmt)
    scale = torch.rand(*shape[:2], 1, 1, device=device).to(dtype)
    return x.requires_grad_(), scale.requires_grad_()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, fmt):
    x, scale = inputs(shape, device, dtype, fmt)
    y = check_against_stock(F.channel_scale, torch.mul, [x, scale])
    assert y.stride() == torch.empty_like(x).stride()
    assert y.grad_fn.name() == "ChannelScaleBackward"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_ops_match_stock(device, dtype, shape, fmt):
    """With something spread over the pixels, and sums of products, in every order of derivative."""
    x, scale = inputs(shape, device, dtype, fmt)
    spread = torch.randn_like(scale).requires_grad_()
    op = torch.ops.braze.channel_scale
    check_against_stock(op, lambda x, s, b: x * s + b / x[0, 0].numel(), [x, scale, spread])
    other = torch.randn_like(x).requires_grad_()
    check_against_stock(torch.ops.braze.channel_dot, ops._dot_formula, [x, other])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_means(device, dtype, shape, fmt):
    x, _ = inputs(shape, device, dtype, fmt)
    check_against_stock(torch.ops.braze.channel_mean, ops._mean_formula, [x])


def test_layouts(device, dtype):
    scale = torch.rand(4, 5, 1, 1, device=device).to(dtype)
    wide = torch.rand(5, 4, 1, 2, device=device).to(dtype).transpose(0, 1)[..., :1]
    for name, x in layouts((4, 5, 6, 7), device, dtype):
        for factors in (scale, wide):
            torch.testing.assert_close(F.channel_scale(x, factors), x * factors, msg=name)
        mean = x.double().mean((2, 3), keepdim=True).to(dtype)
        torch.testing.assert_close(torch.ops.braze.channel_mean(x), mean, msg=name)
        for other, y in layouts((4, 5, 6, 7), device, dtype):
            sums = torch.ops.braze.channel_dot(x, y)
            expected = (x.double() * y).sum((2, 3), keepdim=True)
            tolerance = {"rtol": 0.01, "atol": 0.1} if dtype.itemsize == 2 else {}
            torch.testing.assert_close(sums, expected.to(dtype), msg=f"{name} {other}", **tolerance)


def test_unaligned_memory(device, dtype):
    x = torch.randn(2 * 8 * 16 + 1, device=device).to(dtype)[1:]
    for fmt in FORMATS.values():
        image = x.view(2, 16, 2, 4)
        if fmt is torch.channels_last:
            image = x.view(2, 2, 4, 16).permute(0, 3, 1, 2)
        scale = torch.rand(2, 16, 1, 1, device=device).to(dtype)
        assert torch.equal(F.channel_scale(image, scale), image * scale)
        check_against_stock(torch.ops.braze.channel_dot, ops._dot_formula, [image, image])
        check_against_stock(torch.ops.braze.channel_mean, ops._mean_formula, [image])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values(device, dtype, value):
    x, scale = inputs((2, 16, 3, 5), device, dtype, torch.channels_last)
    with torch.no_grad():
        x[0, 3, 1, 1], scale[1, 2] = value, value
    check_against_stock(F.channel_scale, torch.mul, [x, scale])
    check_against_stock(torch.ops.braze.channel_mean, ops._mean_formula, [x])


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4)], ids=str)
def test_empty(device, shape):
    x, scale = inputs(shape, device, torch.float32, torch.contiguous_format)
    check_against_stock(F.channel_scale, torch.mul, [x, scale])
    sums = torch.ops.braze.channel_dot(x, x)
    assert torch.equal(sums, torch.zeros_like(sums))
    if x[0:0].shape[2:].numel():
        assert torch.ops.braze.channel_mean(x).shape == (*shape[:2], 1, 1)
    else:
        with pytest.raises(RuntimeError, match="expected pixels"):
            torch.ops.braze.channel_mean(x)


def test_what_torch_multiplies(device):
    """By its own rules of dtypes and of broadcasting."""
    x = torch.randn(2, 3, 4, 5, device=device)
    for a, b in (
        (x, torch.rand(2, 3, 1, 1, device=device, dtype=torch.float64)),
        (x, torch.rand(1, 3, 1, 1, device=device)),
        (x, 2.5),
        (x[0], torch.rand(3, 1, 1, device=device)),
        (torch.ones(2, 3, 4, 5, device=device, dtype=torch.int64), x[..., :1, :1]),
    ):
        result, expected = F.channel_scale(a, b), a * b
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    with pytest.raises(TypeError, match="argument 'input'"):
        F.channel_scale(None, x)


def test_gradcheck(device):
    x, scale = inputs((2, 3, 2, 4), device, torch.float64, torch.contiguous_format)
    spread = torch.randn_like(scale).requires_grad_()
    for function, args in (
        (torch.ops.braze.channel_scale, (x, scale, spread)),
        (torch.ops.braze.channel_dot, (x, torch.randn_like(x).requires_grad_())),
        (torch.ops.braze.channel_mean, (x,)),
    ):
        assert torch.autograd.gradcheck(function, args)
        assert torch.autograd.gradgradcheck(function, args)


def test_opcheck(device):
    x, scale = inputs((2, 3, 2, 4), device, torch.float32, torch.channels_last)
    torch.library.opcheck(torch.ops.braze.channel_scale, (x, scale, scale.detach()))
    torch.library.opcheck(torch.ops.braze.channel_scale, (x, scale, None))
    torch.library.opcheck(torch.ops.braze.channel_dot, (x, x.detach()))
    torch.library.opcheck(torch.ops.braze.channel_mean, (x,))


def test_compile(device):
    x, scale = inputs((2, 3, 2, 4), device, torch.float32, torch.channels_last)
    torch.testing.assert_close(compile(F.channel_scale)(x, scale), x * scale)
    x, gate = x.detach(), SmallGate(3, 2).to(device)
    compiled = compile(lambda x: F.squeeze_excite(x, gate))
    torch.testing.assert_close(compiled(x), composed(x, gate))


class SmallGate(torch.nn.Sequential):
    """What torchvision's and timm's blocks have there."""

    def __init__(self, channels, inner, gate=torch.nn.Sigmoid):
        super().__init__(
            torch.nn.Conv2d(channels, inner, 1),
            torch.nn.SiLU(),
            torch.nn.Conv2d(inner, channels, 1),
            gate(),
        )


def composed(x, gate):
    return x * gate(x.mean((2, 3), keepdim=True))


def squeezed(block, gate, x, *parameters):
    return block(
        x,
        lambda mean: torch.func.functional_call(
            gate, dict(zip(names(gate), parameters, strict=True)), mean
        ),
    )


def names(gate):
    return [name for name, _ in gate.named_parameters()]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(2, 16, 7, 9), (3, 5, 4, 4), (1, 96, 30, 31)], ids=str)
def test_squeeze_excite_matches_stock(device, dtype, shape, fmt):
    x, _ = inputs(shape, device, dtype, fmt)
    gate = SmallGate(shape[1], 4).to(device, dtype)
    check_against_stock(
        functools.partial(squeezed, F.squeeze_excite, gate),
        functools.partial(squeezed, composed, gate),
        [x, *gate.parameters()],
        ulps=8,
    )


def test_squeeze_excite_takes_two_passes(device):
    """Not four tensors of the input's size in its backward, but one."""
    x, _ = inputs((2, 8, 6, 6), device, torch.float32, torch.channels_last)
    gate = SmallGate(8, 4).to(device)
    y = F.squeeze_excite(x, gate)
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == x.shape:
                made.append(func.name())
            return result

    with Watch():
        y.sum().backward()
    assert made.count("braze::channel_scale") == 1
    assert not {"aten::mul.Tensor", "aten::add.Tensor"} & set(made)


@pytest.mark.parametrize("wanted", ["input", "gate", "neither", "both"])
def test_squeeze_excite_of_what_is_wanted(device, wanted):
    x = torch.randn(2, 8, 3, 3, device=device, requires_grad=wanted in ("input", "both"))
    gate = SmallGate(8, 4).to(device).requires_grad_(wanted in ("gate", "both"))
    tensors = [t for t in (x, *gate.parameters()) if t.requires_grad]
    results = []
    for block in (F.squeeze_excite, composed):
        y = block(x, gate)
        grads = torch.autograd.grad(y.square().sum(), tensors) if tensors else ()
        results.append((y, *grads))
    torch.testing.assert_close(*results)


def test_squeeze_excite_again_and_twice(device):
    """A graph that is kept, second derivatives in between, and gates that do not see the mean."""
    x = torch.randn(2, 4, 3, 3, device=device, dtype=torch.float64, requires_grad=True)
    gate = SmallGate(4, 2).to(device).double()
    assert torch.autograd.gradgradcheck(lambda x: F.squeeze_excite(x, gate), x)
    results = []
    for block in (F.squeeze_excite, composed):
        loss = block(x, gate).pow(3).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x, create_graph=True)[0]
        third = torch.autograd.grad(second.square().sum(), x, retain_graph=True)[0]
        again = torch.autograd.grad(loss, x)[0]
        results.append((first, second, third, again))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(results[0][0], results[0][3])
    for gate in (lambda m: torch.ones_like(m) * 2, lambda m: m.detach(), lambda m: m.float()):
        pair = [torch.autograd.grad(b(x, gate).sum(), x)[0] for b in (F.squeeze_excite, composed)]
        torch.testing.assert_close(*pair)


def test_squeeze_excite_under_autocast(device):
    x = torch.randn(2, 8, 5, 5, device=device, requires_grad=True)
    gate = SmallGate(8, 4).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for block in (F.squeeze_excite, composed):
            with torch.autocast(device, torch.bfloat16):
                y = block(x.to(dtype), gate)
            grads = torch.autograd.grad(y.float().square().sum(), [x, *gate.parameters()])
            results.append((y, *grads))
        torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


def test_the_tests_reject_a_wrong_gradient(device):
    """Without the part that comes through the mean."""
    x, _ = inputs((2, 8, 4, 4), device, torch.float32, torch.channels_last)
    gate = SmallGate(8, 4).to(device)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(
            lambda x: F.channel_scale(x, gate(x.detach().mean((2, 3), keepdim=True))),
            lambda x: composed(x, gate.to(x.dtype)),
            [x],
        )
