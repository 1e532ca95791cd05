"""braze.convert on squeeze-and-excitation as torchvision and timm write it, and on what is like
it."""

import copy
import pickle

import pytest
import torch
from convert_common import assert_trains_alike, replaced
from torch import nn
from torch.nn import functional as F

import braze
from convert_models import ops_run


class OfPool(nn.Module):
    """By a pooling layer, in a method of its own."""

    def __init__(self, channels=6, inner=3, size=1):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(size)
        self.fc1 = nn.Conv2d(channels, inner, 1)
        self.fc2 = nn.Conv2d(inner, channels, 1)
        self.activation, self.scale_activation = nn.ReLU(), nn.Hardsigmoid()

    def _scale(self, input):
        scale = self.avgpool(input)
        scale = self.fc1(scale)
        scale = self.activation(scale)
        scale = self.fc2(scale)
        return self.scale_activation(scale)

    def forward(self, input):
        scale = self._scale(input)
        return scale * input


class OfMean(nn.Module):
    """By a mean, with a norm and a way that settings lead to."""

    def __init__(self, channels=6, inner=3, add_maxpool=False):
        super().__init__()
        self.add_maxpool = add_maxpool
        self.fc1 = nn.Conv2d(channels, inner, 1)
        self.bn, self.act = nn.BatchNorm2d(inner), nn.ReLU(inplace=True)
        self.fc2, self.gate = nn.Conv2d(inner, channels, 1), nn.Sigmoid()

    def forward(self, x):
        x_se = x.mean((2, 3), keepdim=True)
        if self.add_maxpool:
            x_se = 0.5 * x_se + 0.5 * x.amax((2, 3), keepdim=True)
        x_se = self.fc1(x_se)
        x_se = self.act(self.bn(x_se))
        x_se = self.fc2(x_se)
        return x * self.gate(x_se)


class InOneLine(nn.Module):
    def __init__(self, channels=6):
        super().__init__()
        self.fc, self.gate = nn.Conv2d(channels, channels, 1), nn.Sigmoid()

    def forward(self, x):
        return self.gate(self.fc(x.mean(keepdim=True, dim=[-1, 2]))) * x


class OfLinear(nn.Module):
    """As it is mostly written: linear layers between views."""

    def __init__(self, channels=6, inner=3, size=1):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(size)
        self.fc = nn.Sequential(
            nn.Linear(channels, inner, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(inner, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class OfNeighbours(nn.Module):
    """A convolution over the channels (ECA-Net)."""

    def __init__(self, padded=False):
        super().__init__()
        self.conv, self.padded = nn.Conv1d(1, 1, 3, padding=1, bias=False), padded

    def forward(self, x):
        y = x.mean((2, 3)).view(x.shape[0], 1, -1)
        if self.padded:
            y = F.pad(y, (0, 0))
        y = self.conv(y)
        y = torch.sigmoid(y).view(x.shape[0], -1, 1, 1)
        return x * y.expand_as(x)


class OfFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, 1, 1))

    def forward(self, x):
        pooled = F.adaptive_avg_pool2d(x, (1, 1))
        return torch.sigmoid(F.conv2d(pooled, self.weight)) * x


class TwoMeans(nn.Module):
    def forward(self, x):
        return x * (x.mean((2, 3), keepdim=True) - x.mean((2, 3), True).square())


class ReadsPixels(nn.Module):
    def forward(self, x):
        return x * (x.mean((2, 3), keepdim=True) + x[:, :, :1, :1])


class Loops(nn.Module):
    def forward(self, x):
        y = x.mean((2, 3), keepdim=True)
        for _ in range(2):
            y = y * y
        return x * y


class Overrides(OfPool):
    def _scale(self, input):
        return torch.sigmoid(super()._scale(input))


class Reassigns(InOneLine):
    def forward(self, x):
        y = self.gate(self.fc(x.mean((2, 3), keepdim=True)))
        x = x.relu()
        return x * y


class OfOneDimension(InOneLine):
    def forward(self, x):
        return x * self.gate(self.fc(x.mean((3,), keepdim=True)))


class OfTwoInputs(InOneLine):
    def forward(self, x, y=None):
        return x * self.gate(self.fc(x.mean((2, 3), keepdim=True)))


class Adds(InOneLine):
    def forward(self, x):
        return x + self.gate(self.fc(x.mean((2, 3), keepdim=True)))


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.conv, self.block = nn.Conv2d(6, 6, 3, padding=1), block

    def forward(self, x):
        return self.block(self.conv(x))


def images():
    return torch.randn(3, 6, 8, 8)


def times(model, x):
    """How often a squeeze-and-excitation runs as one; the model still does what it did."""
    found = ops_run(lambda: model(x)).count("channel_scale")
    assert_trains_alike(model, braze.unconvert(copy.deepcopy(model)), x)
    return found


GATES = [OfPool, OfMean, InOneLine, OfLinear, OfNeighbours, OfFunctions]


@pytest.mark.parametrize("kind", GATES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_squeeze_and_excitation(kind, fmt):
    x = images().contiguous(memory_format=fmt)
    original = Net(kind())
    entries = [e for e in braze.convert_report(original).fused if e.name == "block"]
    assert [e.after for e in entries] == ["braze.nn.functional.squeeze_excite"]
    model = braze.convert(copy.deepcopy(original))
    assert_trains_alike(model, original, x)
    assert_trains_alike(model.eval(), original.eval(), x)
    assert times(model.train(), x) == 1
    assert braze.convert_report(model).entries == braze.convert_report(original).entries
    assert times(pickle.loads(pickle.dumps(model)), x) == 1
    assert times(copy.deepcopy(model), x) == 1


@pytest.mark.parametrize(
    "kind",
    [Overrides, Reassigns, OfOneDimension, OfTwoInputs, Adds, TwoMeans, ReadsPixels, Loops],
    ids=lambda kind: kind.__name__,
)
def test_what_is_like_it(kind):
    assert times(braze.convert(Net(kind())), images()) == 0


def test_settings():
    x, model = images(), braze.convert(Net(OfMean(add_maxpool=True)))
    assert times(model, x) == 0
    model.block.add_maxpool = False
    assert times(model, x) == 1
    model.block.add_maxpool = torch.tensor(0.0)  # whose truth is asked for by code of its class
    assert times(model, x) == 0
    del model.block.add_maxpool
    with pytest.raises(AttributeError, match="add_maxpool"):
        model(x)
    model = braze.convert(Net(OfPool()))
    model.block.avgpool.output_size = (2, 1)
    assert times(model, x[..., :1, :1]) == 0
    model = braze.convert(Net(OfNeighbours()))
    model.block.padded = True
    assert times(model, x) == 1
    model = braze.convert(Net(OfLinear(size=(2, 1))))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        model(x)
    model.block.avg_pool.output_size = 1
    assert times(model, x) == 1
    handle = model.block.avg_pool.register_forward_hook(lambda *_: None)
    assert times(model, x) == 0
    handle.remove()
    assert times(model, x) == 1
    model.block.avg_pool = nn.AdaptiveMaxPool2d(1)
    assert times(model, x) == 0


def test_changes_after_the_conversion():
    x, model = images(), braze.convert(Net(OfPool()))
    seen = []
    handle = model.block.avgpool.register_forward_hook(lambda *_: seen.append(1))
    assert times(model, x) == 0
    assert seen
    handle.remove()
    assert times(model, x) == 1
    model.block.fc1.register_forward_hook(lambda *_: seen.append(2))
    seen.clear()
    assert times(model, x) == 1, "children are called as they were"
    assert 2 in seen
    model.block.activation = nn.Tanh()
    assert times(model, x) == 1
    model.block._scale = lambda input: input
    assert torch.equal(model(x), model.conv(x) ** 2)
    del model.block._scale
    with replaced(OfPool, "_scale", lambda self, input: input):
        assert ops_run(lambda: model(x)).count("channel_scale") == 0
        assert torch.equal(model(x), model.conv(x) ** 2)
    assert times(model, x) == 1
    model.block.fc2 = None
    with pytest.raises(TypeError, match="not callable"):
        model(x)


def test_who_watches_sees_torchs_calls():
    seen, model = [], braze.convert(Net(InOneLine()))

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        model(images())
    assert torch.Tensor.mean in seen
    assert torch.Tensor.mul in seen or torch.Tensor.__mul__ in seen


def test_other_inputs():
    """Of other dtypes, without a batch, and under autocast, as the plain forward."""
    original = Net(OfPool())
    model = braze.convert(copy.deepcopy(original))
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x := images()), original(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(model(x[0]), original(x[0]))
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(model.double()(x), original.double()(x))
    with pytest.raises(AttributeError, match="'list' object"):
        InOneLine()([1])
    with pytest.raises(AttributeError, match="'list' object"):
        braze.convert(InOneLine())([1])


@pytest.mark.parametrize("kind", GATES, ids=lambda kind: kind.__name__)
def test_compile(kind):
    torch._dynamo.reset()
    original = Net(kind()).eval()
    model = braze.convert(copy.deepcopy(original))
    x = images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), original(x))


def test_hooks_of_all_modules():
    seen, model = [], braze.convert(Net(OfPool()))
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    model(images())
    handle.remove()
    assert braze.nn.AdaptiveAvgPool2d in seen


def test_attributes_that_the_class_gets(monkeypatch):
    original = Net(OfPool())
    model, x = braze.convert(copy.deepcopy(original)), images()
    for new in (property(lambda self: torch.tanh), nn.Tanh()):
        monkeypatch.setattr(OfPool, "activation", new, raising=False)
        torch.testing.assert_close(model(x), original(x))
    monkeypatch.undo()
    assert times(model, x) == 1


class Detaches(InOneLine):
    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(nn.Sigmoid(), Detach())


class Detach(nn.Module):
    def forward(self, x):
        return x.detach()


def test_inputs_that_no_gradient_needs():
    """They may be written to before the backward."""
    original = Detaches()
    model, grads = braze.convert(copy.deepcopy(original)), []
    x = images().requires_grad_()
    for m in (model, original):
        h = x * 1
        y = m(h)
        with torch.no_grad():
            h.zero_()
        grads += torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "kind", [OfPool, InOneLine, OfLinear, OfNeighbours], ids=lambda kind: kind.__name__
)
def test_other_strides(kind):
    original = kind()
    model, x = braze.convert(copy.deepcopy(original)), images()
    for order in ((0, 2, 1, 3), (1, 0, 2, 3), (3, 1, 2, 0)):
        moved = x.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        y, expected = model(moved), original(moved)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("kind", [InOneLine, OfLinear, OfFunctions], ids=lambda k: k.__name__)
def test_modes_see_nothing_more(capsys, kind):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            print(getattr(function, "__name__", function))
            return function(*args, **(kwargs or {}))

    original, x, seen = Net(kind()), images(), []
    for model in (braze.convert(copy.deepcopy(original)), original):
        with Mode():
            model(x)
        seen.append(capsys.readouterr().out)
    assert seen[0] == seen[1]
