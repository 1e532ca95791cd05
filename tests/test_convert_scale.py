"""braze.convert: a layer scale and the addition behind it, and linear layers whose activation takes
the bias."""

import pytest
import torch
from convert_common import seen_by_a_mode
from test_convert_mlp import (
    AuthorsBlock,
    CNBlock,
    ConvNeXtBlock,
    LayerScale,
    LayerScale2d,
    StochasticDepth,
    assert_alike,
    gradients,
    pair,
)
from torch import nn

import braze
from braze._norm_rules import FASTER, Faster
from braze.convert import blocks
from convert_models import Permute, ops_run


@pytest.fixture(autouse=True)
def _on_every_device(monkeypatch):
    for name in ("ACTIVATION_WITH_BIAS_ON", "SCALE_ADD_ON"):
        monkeypatch.setattr(blocks, name, ("cpu", "cuda"))


class Base(nn.Module):
    def __init__(self, dim=12, p=0.0):
        super().__init__()
        self.block = nn.Linear(dim, dim)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.drop = StochasticDepth(p)

    def input(self):
        return torch.randn(5, 4, 12)


class OneExpression(Base):
    def forward(self, x):
        return x + self.drop(self.gamma * self.block(x))


class InTurn(Base):
    def forward(self, x):
        y = self.block(x)
        y = y * self.gamma
        y = self.drop(y)
        return y + x


class InPlace(Base):
    def forward(self, x):
        y = self.gamma * self.block(x)
        y += x
        return y


class Dropping(OneExpression):
    def __init__(self):
        super().__init__(p=0.5)


class Number(Base):
    """As residual blocks of networks without norms."""

    def __init__(self):
        super().__init__()
        self.gamma, self.alpha = None, 0.3

    def forward(self, x):
        y = self.block(x)
        y = self.drop(y)
        return y * self.alpha + x


class Constant(Number):
    """As blocks of super-resolution."""

    def forward(self, x):
        y = self.block(x).mul(0.2)
        y += x
        return y


class Factor(Number):
    """A number that is no attribute of its own, and one that is a flag."""

    def __init__(self):
        super().__init__()
        self.alpha = True

    def forward(self, x):
        return x + self.alpha * self.block(x) + (1 + 1) * self.block(x)


class OneNumber(Base):
    """As ReZero's."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return x + self.gamma * self.block(x)


class AnotherParameter(OneExpression):
    """With a shape of the parameter that is no scale, after conversion."""

    def grow(self):
        self.gamma = nn.Parameter(torch.rand(5, 4, 12).to(self.gamma))


class ByMethod(Base):
    """Behind tests that lead one way, the first of which the run begins in."""

    def __init__(self):
        super().__init__()
        self.final, self.shortcut = None, nn.Identity()

    def forward(self, x):
        y = self.block(x)
        if self.gamma is not None:
            y = y.mul(self.gamma[None, :])
        if self.final is not None:
            y = self.final(y)
        else:
            y = self.drop(y)
            y = y + self.shortcut(x)
        return y


class Module(Base):
    """As timm's ViT has it."""

    def __init__(self):
        super().__init__()
        self.gamma = None
        self.ls1 = LayerScale(12)

    def forward(self, x):
        return x + self.drop(self.ls1(self.block(x)))


class ImageModule(Base):
    def __init__(self):
        super().__init__()
        self.gamma, self.ls = None, LayerScale2d(12)
        self.block = nn.Conv2d(12, 12, 3, padding=1)

    def forward(self, x):
        y = self.block(x)
        y = self.ls(y)
        y = self.drop(y)
        y += x
        return y

    def input(self):
        return torch.randn(2, 12, 5, 6)


class Shaped(nn.Module):
    """As timm's Scale of MetaFormer."""

    def __init__(self, dim):
        super().__init__()
        self.shape, self.scale = (dim, 1, 1), nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x):
        return x * self.scale.view(self.shape)


class Residual(ImageModule):
    def __init__(self):
        super().__init__()
        self.ls, self.res_scale = Shaped(12), nn.Identity()

    def forward(self, x):
        x = self.res_scale(x) + self.ls(self.drop(self.block(x)))
        return x


#: By class, the run that there has to be.
FUSED = {
    **dict.fromkeys((OneExpression, InTurn, InPlace, CNBlock), "mul(), add()"),
    **dict.fromkeys((ByMethod, ConvNeXtBlock), "mul(), add()"),
    AuthorsBlock: "mul(), permute(), add()",
    Module: "ls1, add()",
    ImageModule: "ls, add()",
    Residual: "ls, add()",
}


@pytest.mark.parametrize("kind", FUSED)
def test_fused(kind, device):
    model, original, x = pair(kind, device, torch.channels_last)
    assert FUSED[kind] in [e.name for e in braze.convert_report(model).fused]
    assert_alike(model, original, x)
    assert_alike(model.eval(), original.eval(), x)
    assert "scale_add" in ops_run(lambda: model(x))
    assert "scale_add_backward" in ops_run(lambda: gradients(model, x))


def test_where_it_drops_layer_by_layer(device):
    model, original, x = pair(Dropping, device, torch.contiguous_format)
    assert_alike(model, original, x)
    assert "scale_add" not in ops_run(lambda: model(x))
    assert_alike(model.eval(), original.eval(), x)
    assert "scale_add" in ops_run(lambda: model(x))


@pytest.mark.parametrize("kind", [Factor, OneNumber])
def test_numbers_are_left_alone(device, kind):
    model, original, x = pair(kind, device, torch.contiguous_format)
    assert not braze.convert_report(model).fused
    assert_alike(model, original, x)


@pytest.mark.parametrize("kind", [Number, Constant])
def test_numbers_are_factors_of_the_addition(device, kind):
    model, original, x = pair(kind, device, torch.contiguous_format)
    assert [e.name for e in braze.convert_report(model).fused] == ["mul(), add()"]
    assert_alike(model, original, x)
    ran = aten_ops(lambda: model(x))
    assert ("mul" in ran, "add" in ran) == (False, True)
    for m in (model, original):  # which another type has to be asked about
        m.alpha = torch.tensor(0.3, device=device)
    assert_alike(model, original, x)
    # In place, into a narrower type: what torch's product has.
    with torch.autocast(device, torch.bfloat16):
        assert model(x).dtype == original(x).dtype


def aten_ops(function):
    """The names of torch's ops that a call runs."""
    ran = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran.append(op.overloadpacket.__name__.rstrip("_"))
            return op(*args, **(kwargs or {}))

    with Names():
        function()
    return ran


def test_another_parameter(device):
    model, original, x = pair(AnotherParameter, device, torch.contiguous_format)
    torch.manual_seed(1)
    model.grow()
    original.gamma = nn.Parameter(model.gamma.detach().clone())
    assert_alike(model, original, x)
    assert "scale_add" not in ops_run(lambda: model(x))
    for m in (model, original):
        m.gamma = None
    for m in (model, original):
        with pytest.raises(TypeError, match="unsupported operand"):
            m(x)


def test_added_in_place_to_a_narrower_type(device):
    """The sum is of the product's dtype then."""
    model, _, x = pair(InPlace, device, torch.contiguous_format)
    model.bfloat16()
    y = model.block(x.bfloat16()).detach()
    model.block = nn.Identity()
    expected = model.gamma * y
    expected += y
    assert model(y).dtype == expected.dtype == torch.bfloat16


def test_a_module_that_scales_in_place(device):
    model, original, x = pair(Module, device, torch.contiguous_format)
    for m in (model, original):
        m.ls1.inplace = True
    assert_alike(model, original, x)
    assert "scale_add" not in ops_run(lambda: model(x))
    assert not braze.convert_report(braze.convert(original)).fused


def test_the_other_way(device):
    """A test that leads elsewhere at a later call, and one over a parameter that is gone."""
    model, original, x = pair(ByMethod, device, torch.contiguous_format)
    for m in (model, original):
        m.final = nn.ReLU()
    assert_alike(model, original, x)
    for m in (model, original):
        m.final, m.gamma = None, None
    assert_alike(model, original, x)
    assert "scale_add" not in ops_run(lambda: model(x))


@pytest.mark.parametrize("shape", [(12, 1), (4, 3), (1, 1)])
def test_parameters_of_other_shapes(device, shape):
    """Of which a view is no scale, or none at all: torch says what they are."""
    model, original, x = pair(ByMethod, device, torch.contiguous_format)
    for m in (model, original):
        m.gamma = nn.Parameter(torch.ones(shape).to(x))
        m.drop = nn.Identity()
    results = []
    for m in (model, original):
        try:
            results.append(m(x))
        except RuntimeError as error:
            results.append(str(error))
    assert type(results[0]) is type(results[1])
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results)


class Aside(Base):
    """What is set on the way into the run is read behind it."""

    def forward(self, x):
        y = self.block(x)
        if self.gamma is not None:
            z = y.abs()
            y = y.mul(self.gamma)
        y = self.drop(y) + x
        return y * z


class Named(Base):
    """A layer called `mul`, which gets the parameter."""

    def __init__(self):
        super().__init__()
        self.mul = nn.Linear(12, 12)

    def forward(self, x):
        return self.block(x) + self.mul(self.gamma)


@pytest.mark.parametrize("kind", [Aside, Named])
def test_not_fused(device, kind):
    model, original, x = pair(kind, device, torch.contiguous_format)
    assert not braze.convert_report(model).fused
    assert_alike(model, original, x)


def test_modes_see_torchs_product(device):
    model, _, x = pair(OneExpression, device, torch.contiguous_format)
    seen = seen_by_a_mode(lambda: model(x))
    assert {"mul", "add"} <= {name.strip("_") for name in seen}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_stream_under_autocast(device, dtype):
    model, original, x = pair(CNBlock, device, torch.channels_last)
    with torch.autocast(device, dtype):
        y, expected = model(x), original(x)
        assert "scale_add" in ops_run(lambda: model(x))
    assert y.dtype == expected.dtype == torch.float32
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, atol=0.05, rtol=0.05)


class Perceptron(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim)
        self.act, self.fc2 = nn.GELU(), nn.Linear(4 * dim, dim)
        self.last = Permute([1, 0])

    def forward(self, x):
        return self.last(self.fc2(self.act(self.fc1(self.norm(x)))))

    def input(self):
        return torch.randn(20, 12)


def test_activation_takes_the_bias(device, monkeypatch):
    monkeypatch.setitem(
        FASTER, ("layer_norm", device), dict.fromkeys((torch.float32,), Faster(1, 4096))
    )
    model, original, x = pair(Perceptron, device, torch.contiguous_format)
    assert_alike(model, original, x)
    ran = ops_run(lambda: gradients(model, x))
    assert {"bias_activation", "bias_activation_backward"} <= set(ran)
    assert "activation" not in ran


def test_activation_without_a_bias(device):
    model, original, x = pair(Perceptron, device, torch.contiguous_format)
    for m in (model, original):
        m.fc1.bias = None
    assert_alike(model, original, x)


class AddsWhatItGets(Base):
    def forward(self, x, added):
        y = self.block(x)
        return added + self.gamma * y


def test_nothing_to_add(device):
    model, original, x = pair(AddsWhatItGets, device, torch.contiguous_format)
    for m in (model, original):
        with pytest.raises(TypeError, match="unsupported operand"):
            m(x, None)
        torch.testing.assert_close(m(x, 1.0), 1 + m.gamma * m.block(x))


def test_a_frozen_scale(device):
    """Nothing needs what it scales, which may be written to before the backward."""
    model, _, x = pair(AddsWhatItGets, device, torch.contiguous_format)
    model.gamma.requires_grad_(False)
    model.block = nn.Identity()
    x.requires_grad_()
    h = x * 1
    y = model(h, torch.zeros_like(x))
    with torch.no_grad():
        h.zero_()
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, model.gamma.expand_as(x))


def test_activation_of_other_biases(device, monkeypatch):
    monkeypatch.setitem(
        FASTER, ("layer_norm", device), dict.fromkeys((torch.float32,), Faster(1, 4096))
    )
    model, original, x = pair(Perceptron, device, torch.contiguous_format)
    for shape in ((1, 48), (20, 48), (1,)):
        for m in (model, original):
            m.fc1.bias = nn.Parameter(torch.linspace(0, 1, shape[-1], device=device).expand(shape))
        torch.testing.assert_close(model(x), original(x), atol=1e-4, rtol=1e-4)
    for m in (model, original):
        m.fc1.bias = nn.Parameter(torch.zeros(48, dtype=torch.bfloat16, device=device))
        with pytest.raises(RuntimeError):
            m(x)
