"""The activations beside ReLU: functions and layers."""

import pytest
import torch
import torch.nn.functional as stock

import braze.nn.functional as F
from braze import nn
from braze._ops.activations import ActivationFunction
from common import assert_by_rule, check_against_stock, compile, layouts


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


# name -> settings, layer
ACTIVATIONS = {
    "celu": ({"alpha": 2.0}, "CELU"),
    "elu": ({"alpha": 0.7}, "ELU"),
    "gelu": ({}, "GELU"),
    "gelu, tanh": ({"approximate": "tanh"}, "GELU"),
    "hardsigmoid": ({}, "Hardsigmoid"),
    "hardswish": ({}, "Hardswish"),
    "hardtanh": ({"min_val": -0.5, "max_val": 0.75}, "Hardtanh"),
    "leaky_relu": ({"negative_slope": 0.2}, "LeakyReLU"),
    "mish": ({}, "Mish"),
    "relu6": ({}, "ReLU6"),
    "sigmoid": ({}, "Sigmoid"),
    "silu": ({}, "SiLU"),
    "tanh": ({}, "Tanh"),
}
IN_PLACE = [n for n in ACTIVATIONS if n not in ("gelu", "gelu, tanh", "sigmoid", "tanh")]


def call(api, name, x, **more):
    return getattr(api, name.partition(",")[0])(x, **ACTIVATIONS[name][0], **more)


def theirs(name, x):
    # torch's own kernels have 1/6 of fp32's accuracy in float64
    if name == "hardsigmoid":
        return stock.relu6(x + 3) / 6
    if name == "hardswish" and x.dtype == torch.float64:
        return x * stock.relu6(x + 3) / 6
    return call(stock, name, x)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 5, 7), (3, 8, 16, 16)], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_matches_stock(device, dtype, name, shape):
    x = (4 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    check_against_stock(lambda t: call(F, name, t), lambda t: theirs(name, t), [x], ulps=8, terms=2)


@pytest.mark.parametrize("name", ["hardtanh", "silu"])
def test_layouts(device, dtype, name):
    for kind, x in layouts((3, 16, 6, 9), device, dtype):
        x = x.detach().requires_grad_()
        y = check_against_stock(
            lambda t: call(F, name, t), lambda t: theirs(name, t), [x], ulps=8, terms=2
        )
        assert y.stride() == call(stock, name, x).stride(), kind


@pytest.mark.parametrize("name", ["hardtanh", "silu"])
def test_unaligned_storage_offset(device, dtype, name):
    x = torch.randn(1001, device=device).to(dtype)[1:].requires_grad_()
    check_against_stock(lambda t: call(F, name, t), lambda t: theirs(name, t), [x], ulps=8, terms=2)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "hardswish"])
def test_every_finite_value_of_16_bits(device, name, half):
    """Window by window, so that large values do not hide the errors of small ones."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half)
    for window in x[x.isfinite()].sort().values.split(1024):
        inputs = [window.to(device).requires_grad_()]
        ones = torch.ones_like(inputs[0])
        check_against_stock(
            lambda t: call(F, name, t),
            lambda t: theirs(name, t),
            inputs,
            ulps=8,
            terms=2,
            grad_output=ones,
        )


@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_where_the_exponential_is_huge(device, name):
    """1 + exp(-x) beyond 2^126, of which a fast division makes 0."""
    x = torch.linspace(-89, -80, 2048, device=device).requires_grad_()
    check_against_stock(lambda t: call(F, name, t), lambda t: theirs(name, t), [x], ulps=8, terms=2)
    tail = x.detach()[x < -87.4][:256]
    exact = call(stock, name, tail.double())
    assert_by_rule(call(F, name, tail), call(stock, name, tail), exact, ulps=128)


@pytest.mark.parametrize("name", ["hardtanh", "relu6", "leaky_relu", "hardswish", "elu"])
def test_special_values(device, name):
    inf = float("inf")
    values = [0.0, -0.0, inf, -inf, 3.0, 6.0, -0.5, 0.75, float("nan"), 1e-30]
    values = [v for v in values if name != "hardswish" or v != -inf]
    x = torch.tensor(values, device=device)
    exact = call(stock, name, x.double().cpu()).to(device)
    assert_by_rule(call(F, name, x), call(stock, name, x), exact)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives(device, name):
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: call(F, name, t), x)
    assert torch.autograd.gradgradcheck(lambda t: call(F, name, t), x)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(device, name):
    x = torch.randn(3, 4, device=device)
    expected = call(stock, name, x)
    assert call(F, name, x, inplace=True) is x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layers(device, name):
    arguments, kind = ACTIVATIONS[name]
    ours, theirs = (getattr(api, kind)(**arguments) for api in (nn, torch.nn))
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    x = torch.randn(2, 3, 4, 5, device=device)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["relu", "hardtanh", "silu"])
def test_opcheck(device, dtype, name):
    x = torch.randn(3, 4, 5, device=device).to(dtype)
    act = name, -0.5, 0.5
    torch.library.opcheck(torch.ops.braze.activation.default, (x.requires_grad_(), *act))
    x = x.detach()
    torch.library.opcheck(torch.ops.braze.activation_backward.default, (x, x, *act))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_compiles(device, name):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    y, expected = compile(lambda t: call(F, name, t))(x), call(F, name, x)
    assert torch.equal(y, expected)
    grads = (torch.autograd.grad(t.sum(), x)[0] for t in (y, expected))
    assert torch.equal(*grads)


def test_what_goes_to_torch(device):
    x = torch.arange(-3, 3, device=device)
    assert torch.equal(F.hardtanh(x, -1, 1), stock.hardtanh(x, -1, 1))
    complex_x = torch.randn(3, dtype=torch.complex64, device=device)
    assert torch.equal(F.sigmoid(complex_x), torch.sigmoid(complex_x))
    with pytest.raises(ValueError, match="min_val cannot be greater than max_val"):
        F.hardtanh(torch.randn(3, device=device), 1.0, 0.0)
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        F.gelu(torch.randn(3, device=device), approximate="sine")
    y = torch.randn(3, device=device)
    for op in (torch.func.vmap(F.silu), torch.func.grad(lambda t: F.silu(t).sum())):
        assert op(y).shape == (3,)


def test_bad_input(device):
    x = torch.randn(3, device=device)
    with pytest.raises(RuntimeError, match="expected activation to be one of identity, relu, "):
        torch.ops.braze.activation(x, "sine", 0.0, 0.0)
    with pytest.raises(RuntimeError, match="grad_output to have the same shape"):
        torch.ops.braze.activation_backward(x[:2], x, "silu", 0.0, 0.0)
    with pytest.raises(RuntimeError, match="expected input of dtype float64"):
        torch.ops.braze.activation(x.long(), "silu", 0.0, 0.0)


def test_the_tests_reject_a_wrong_kernel(device):
    """The gradient of another activation: the comparison must fail."""

    class Wrong(ActivationFunction):
        @staticmethod
        def backward(ctx, grad_output):
            ctx.act = "hardswish", 0.0, 0.0
            return ActivationFunction.backward(ctx, grad_output)

    x = torch.randn(3, 40, device=device, requires_grad=True)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(lambda t: Wrong.apply(t, "silu", 0.0, 0.0), stock.silu, [x])
