"""Forwards made of random lines do what they did, whatever happens to the model afterwards."""

import contextlib
import copy
import importlib.util
import random
import textwrap

import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_same, call, replaced, state
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert_code import AssignsBuffers
from torch import nn
from torch.overrides import TorchFunctionMode

import braze
from braze.convert import blocks

# Forwards put together at random.

LINES = [
    # What may be fused.
    "x = self.conv(x)",
    "x = self.bn(x)",
    "x = self.act(x)",
    "x = F.relu(x)",
    "x = torch.relu(x)",
    "x = x.relu()",
    "x = F.relu(self.bn(self.conv(x)), inplace=True)",
    "y = self.conv(x)\ny = self.bn(y)\nx = self.act(y)",
    "y = self.bn(self.conv(x))\nx = F.relu(y) * 2",
    "y = self.conv(x)\nz = self.bn(y)\nx = F.relu(z) + y",
    "x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 3, stride=1, padding=1)",
    "for layer in self.layers:\n    x = layer(x)",
    "for conv, bn in zip(self.convs, self.bns):\n    x = F.relu(bn(conv(x)))",
    "for i in range(2):\n    x = self.convs[i](x)\n    x = self.bns[i](x)\n    x = F.relu(x)",
    "x = self.block(x)",
    "x = self.helper(x)",
    "x = helper(x)",
    "x = super().tail(x)",
    "conv = self.conv\nx = self.act(self.bn(conv(x)))",
    # What does other things.
    "self.count += 1",
    "self.log.append(round(float(x.detach().sum()), 6))",
    "print(tuple(x.shape))",
    "self.rm = 0.9 * self.rm + 0.1 * x.detach().mean((0, 2, 3))",
    "if self.count % 2:\n    x = x + 1",
    "if x.detach().mean() > 0.3:\n    x = 0.5 - x",
    "x = x * random.random()",
    "x = F.dropout(x, 0.3, self.training)",
    "with torch.no_grad():\n    y = self.bn(x)\n    x = x + F.relu(y)",
    "try:\n    x = self.conv(x)\n    if self.count == 1:\n        raise ValueError\n"
    "    x = F.relu(self.bn(x))\nexcept ValueError:\n    x = x * 2\nfinally:\n    self.count += 1",
    "x = (lambda t: F.relu(self.bn(t)))(x)",
    "def inner(t):\n    return F.relu(self.bn(self.conv(t)))\nx = inner(x)",
    "x = [self.act(t) for t in (x, -x)][self.count % 2]",
    "x += F.relu(self.bn(self.conv(x)))",
    "GLOBAL.append(self.count)",
    "self.bn.momentum = self.bn.momentum * 0.5",
    "self.conv.weight.data = self.conv.weight.data * 0.9",
    "self.act.inplace = not self.act.inplace",
    "assert x.dim() == 4, 'not an image'",
    "if (y := self.bn(x)).detach().mean() > -9:\n    x = F.relu(y)",
    "x = self.act(self.bn(x)) if self.count < 2 else self.bn(x)",
    "if self.count == 3:\n    raise KeyError(self.count)",
    "x = getattr(self, 'conv')(x)",
    "x = {'a': self.act}['a'](x)",
    "self.seen.setdefault(type(x).__name__, []).append(isinstance(x, torch.Tensor))",
    "return F.relu(self.bn(self.conv(x)))",
    "del self.seen\nself.seen = {}",
    # What the order of calls, loads and exceptions shows.
    "x = self.act(self.bn(x) + self.conv(x))",
    "x = self.act(self.conv(x) + self.bn(self.swap(x)))",
    "y = self.bn(self.swap(x))\nif self.block is not None:\n    x = self.conv(x)\ny += x\n"
    "x = self.act(y)",
    "x = self.conv(self.swap(x))\nx = self.bn(x)\nx = self.act(x)",
    "x = self.act(self.bn(self.helper(x)) + self.block(x))",
    "if self.count == 1:\n    z = x[:, :, 1:]\n    x = F.relu(self.bn(x) + z)",
    "y = self.bn(x)\nif self.act is not None:\n    z = self.conv(x[:, :1] if self.count else x)\n"
    "y += z\nx = F.relu(y)",
    "y = self.bn(x)\nif self.act is not None:\n    x = self.one(x)\ny += x\nx = F.relu(y)",
    "if self.count == 2:\n    x = x.relu(inplace=True)",
    "if self.count == 2:\n    x = F.relu(torch.sigmoid(x, 1))",
    "try:\n    for layer in self.layers:\n        x = layer(x)\n"
    "finally:\n    self.log.append(round(float(x.detach().sum()), 6))",
    "self.seen['class'] = type(self).__name__, isinstance(self, Base)",
    "x = F.leaky_relu(self.bn(x), 0.2) + F.hardtanh(x, -1)",
    "x = F.softmax(x, dim=1)",
    "x = self.act(self.bn(self.helper(x)) + self.block(x))\nx = self.conv(x)",
    "x = x + self.bn(self.helper(x))\nx = self.conv(x)\nx = self.act(x)",
    # Layer scales, squeeze-and-excitation, modules that stand for others.
    "x = x + self.gamma * self.conv(x)",
    "y = self.conv(x)\ny = y * self.gamma\ny = self.drop(y)\nx = y + x",
    "y = self.gamma * self.block(x)\ny += x\nx = y",
    "z = None if self.count == 3 else x\ny = self.conv(x) * self.gamma\nx = z + self.drop(y)",
    "x = self.squeeze(self.conv(x))",
    "x = self.squeeze(x)\nx += 1",
    "x = self.mixed(x)\nx = self.normed(self.conv(x))",
    "x = self.normed(self.mixed(x)) + self.squeeze(x)",
    "x = self.fc(torch.tanh(self.fc(self.norm(x))))",
    "x = self.norm(x)\nx = self.fc(x)\nx = F.gelu(x)\nx = self.fc(x)",
]
HEAD = """
import random
import torch
import torch.nn.functional as F
from torch import nn

GLOBAL = []


def helper(t):
    t = F.relu(t)
    return F.max_pool2d(t, 3, 1, 1)


class Squeeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.gate = nn.Conv2d(2, 2, 1), nn.Dropout(0.3), nn.Sigmoid()

    def forward(self, x):
        y = self.fc(x.mean((2, 3), keepdim=True))
        return x * self.gate(self.drop(y))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.SiLU(True)

    def forward(self, x):
        x = self.conv(x)
        x = self.bn(x)
        return self.act(x)


class NormAct(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(2)
        self.act = nn.ELU()

    def forward(self, x):
        return self.act(super().forward(x))


class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = 0.5

    def forward(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        return x * torch.empty((len(x), 1, 1, 1), dtype=x.dtype).bernoulli_(1 - self.rate)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()
        self.convs = nn.ModuleList([nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1)])
        self.bns = nn.ModuleList([nn.BatchNorm2d(2), nn.BatchNorm2d(2)])
        self.layers = nn.ModuleList([nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Tanh()])
        self.block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
        self.one = nn.Conv2d(1, 2, 1)
        self.gamma = nn.Parameter(torch.tensor([0.5, 1.5]).view(2, 1, 1))
        self.squeeze, self.mixed, self.normed = Squeeze(), Mixed(), NormAct()
        self.drop, self.norm, self.fc = StochasticDepth(), nn.LayerNorm(4), nn.Linear(4, 4)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):  # ReLU of 0 would depend on rounding
                nn.init.uniform_(module.bias, 0.1, 0.5)
        self.register_buffer("rm", torch.zeros(2))
        self.count, self.log, self.seen = 0, [], {}

    def tail(self, x):
        x = self.bn(self.conv(x))
        return F.relu(x)

    def swap(self, x):
        self.bn, self.bns[0] = self.bns[0], self.bn
        self.count += 1
        return x


class Net(Base):
    def helper(self, x):
        self.log.append(len(self.log))
        return self.act(self.bn(self.conv(x)))

    def tail(self, x):
        return -x

    def forward(self, x):
"""


def set_again(model):
    """As torch.nn.utils.prune leaves parameters."""
    for norm in (model.bn, model.mixed.bn, model.normed):
        weight = norm.weight
        del norm.weight
        norm.weight = weight


AFTERWARDS = [
    lambda m: None,
    lambda m: m.eval(),
    lambda m: m.bn.register_forward_hook(lambda module, args, y: y * 2),
    lambda m: setattr(m, "act", nn.Tanh()),
    lambda m: m.layers.append(nn.ReLU()),
    lambda m: setattr(m.conv, "padding_mode", "reflect"),
    lambda m: setattr(m.bns, "0", nn.Identity()),
    lambda m: setattr(m.bn, "_check_input_dim", lambda x: print("checked")),
    lambda m: setattr(m.conv, "_conv_forward", lambda x, w, b: stock.conv2d(x, -w, b, padding=1)),
    lambda m: setattr(m.act, "_call_impl", lambda x: x * 0.5),
    lambda m: setattr(m, "gamma", None),
    lambda m: setattr(m, "gamma", nn.Parameter(m.gamma.detach().mean())),
    lambda m: setattr(m.drop, "rate", 0.0),
    lambda m: setattr(m.squeeze, "gate", nn.Hardsigmoid(inplace=True)),
    lambda m: m.mixed.bn.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    lambda m: m.squeeze.fc.requires_grad_(False),
    set_again,
]


class Prints(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        print(getattr(function, "__name__", function), len(args))
        return function(*args, **(kwargs or {}))


#: What may be around a call.
AROUND = [
    contextlib.nullcontext,
    contextlib.nullcontext,
    contextlib.nullcontext,
    Prints,
    lambda: replaced(stock, "relu", lambda x, inplace=False: x.clamp(0) * 2),
    lambda: replaced(nn.BatchNorm2d, "forward", lambda self, x: x * self.weight[0]),
    lambda: replaced(torch, "batch_norm", lambda x, *args: x - 1),
]


def attributes(model):
    return list(model.state_dict().values()), model.count, model.log, model.seen


def gradients(model, result):
    """Of all parameters, or the type of the error."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return None
    weight = torch.linspace(0, 1, result.numel(), dtype=result.dtype).view_as(result)
    wanted = [p for p in model.parameters() if p.requires_grad]
    try:
        return torch.autograd.grad(result, wanted, weight, allow_unused=True)
    except RuntimeError as error:
        return type(error)


@pytest.fixture(autouse=True, scope="module")
def _on_every_device():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ACTIVATION_WITH_BIAS_ON", "CONV_BN_ACT_ON", "SCALE_ADD_ON"):
            patch.setattr(blocks, name, ("cpu", "cuda"))
        yield


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=7),
    afterwards=st.sampled_from(AFTERWARDS),
    around=st.sampled_from(AROUND),
)
def test_any_forward(tmp_path_factory, lines, afterwards, around):
    body = "\n".join([*lines, "return x"])
    path = tmp_path_factory.mktemp("forward") / "net.py"
    path.write_text(HEAD + textwrap.indent(body, " " * 8) + "\n")
    spec = importlib.util.spec_from_file_location("net", path)
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    torch.manual_seed(0)
    original = net.Net().double()
    model = copy.deepcopy(original)
    report = braze.convert_report(braze.convert(model))
    assert not report.left_alone or str(report.left_alone[0]).endswith("braze has no such layer")
    for i in range(4):
        if i == 2:
            afterwards(model)
            afterwards(original)
        x = torch.randn(2, 2, 5, 4, dtype=torch.float64)
        results = []
        for m in (model, original):
            random.seed(i)
            net.GLOBAL.clear()
            copied = x.clone()
            with around() if i in (1, 3) else contextlib.nullcontext():
                result, *rest = call(m, copied)
            results.append((result, rest, list(net.GLOBAL), random.random(), attributes(m)))
            results[-1] += (gradients(m, result),)
        ours, theirs = results
        if theirs[-1] is RuntimeError:  # torch's tanh keeps a result that is overwritten
            ours = *ours[:-1], RuntimeError
        assert_same(ours, theirs, rtol=1e-6, atol=1e-8)


def test_any_forward_can_fail(tmp_path):
    """The comparison above rejects a conversion that drops an effect."""
    original = AssignsBuffers()
    model = braze.convert(copy.deepcopy(original))
    type(model).forward = lambda self, x: self.block(x)
    x = torch.randn(3, 4)
    assert_same(call(model, x)[0], call(original, x)[0])
    with pytest.raises(AssertionError):
        assert_same(state(model), state(original))
