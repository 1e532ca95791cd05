"""What a converted model's own code does, it goes on doing: results, state, exceptions, effects."""

import abc
import collections
import contextlib
import copy
import importlib.util
import io
import logging
import pickle
import random
import textwrap
import threading
import typing
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import braze
from convert_models import ops_run

GLOBAL = []


class Small(nn.Module):
    """Two layers that run as one, and what the forwards below need."""

    def __init__(self):
        super().__init__()
        self.fc, self.relu, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.register_buffer("rm", torch.zeros(4))
        self.steps, self.log, self.seen = 0, [], {}
        self.generator, self.random = numpy.random.default_rng(0), random.Random(0)

    def block(self, x):
        return self.relu(self.fc(x))


class AssignsBuffers(Small):
    def forward(self, x):
        x = self.block(x)
        self.rm = 0.9 * self.rm + 0.1 * x.mean(0).detach()
        self.steps += 1
        return x


class Collects(Small):
    def forward(self, x):
        x = self.block(x)
        self.log.append(x.detach())
        self.seen[self.steps] = x.sum().item()
        return x


class RegistersLate(Small):
    def forward(self, x):
        x = self.block(x)
        if not hasattr(self, "late"):
            self.register_buffer("late", x.detach().mean(0))
        return x + self.late


class Freezes(Small):
    def forward(self, x):
        for p in self.last.parameters():
            p.requires_grad = False
        return self.last(self.block(x))


class Unpacks(Small):
    def forward(self, x):
        if not torch.is_tensor(x):
            x = x[0]
        return self.block(x)


class UnpacksInAHelper(Small):
    @staticmethod
    def first(x):
        try:
            return x.tensors
        except AttributeError:
            return getattr(x, "mask", None)

    def forward(self, x):
        found = self.first(x)
        x = found if found is not None else x if torch.is_tensor(x) else x[0]
        return self.block(x)


class WritesData(Small):
    def forward(self, x):
        self.fc.weight.data = stock.normalize(self.fc.weight.data)
        self.rm.data = self.rm + 1
        y = self.block(x)
        y.extra = self.steps
        return y


class ReadsProperties(Small):
    def forward(self, x):
        parameter = next(self.parameters())
        return self.block(x.to(parameter.dtype).to(parameter.device))


class DrawsFromGenerators(Small):
    def forward(self, x):
        x = self.block(x)
        return x + 1 if self.generator.random() + self.random.random() < 1 else x


class Checkpoints(Small):
    def forward(self, x):
        recompute = checkpoint
        x = recompute(self.block, x, use_reentrant=False)
        layers = nn.Sequential(self.last, self.relu)
        return checkpoint_sequential(layers, 2, x, use_reentrant=False)


class SavesTensorsElsewhere(Small):
    def forward(self, x):
        def pack(t):
            self.steps += 1
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x = x.sigmoid()
        return self.block(x)


class Logs(Small):
    def forward(self, x):
        logging.getLogger("braze.test").warning("at %d", self.steps)
        with torch.autograd.profiler.record_function("block"):
            x = self.block(x)
        GLOBAL.append(self.steps)
        return x


class SwitchesBackend(Small):
    def forward(self, x):
        with braze.backend(matmul="braze"):
            self.seen["backend"] = braze.backend._get() if hasattr(braze.backend, "_get") else 1
            return self.block(x)


class RaisesMidway(Small):
    def forward(self, x):
        try:
            y = self.fc(x)
            if len(self.log) == 1:
                raise ValueError("midway")
            y = self.relu(y)
        except ValueError as error:
            self.log.append(str(error))
            y = y - 1
        self.log.append(0)
        return y


class BindsInLoops(Small):
    def forward(self, x):
        for layer in (self.fc, self.relu, self.last):
            x = layer(x)
        self.log.append(type(layer).__name__)
        return x


class Captures(Small):
    def forward(self, x):
        x = self.fc(x)

        def middle():
            return x

        x = self.relu(x)
        return x + middle()


class UsesPrivateNames(Small):
    def __tail(self, x):
        return stock.relu(self.fc(x))

    def forward(self, x, *, scale: "float" = 2.0):
        """Has a docstring."""
        return self.__tail(x) * scale


FORWARDS = Small.__subclasses__()


def state(model):
    """What a model holds, in a form that can be compared."""
    held = {k: v.clone() for k, v in model.state_dict().items()}
    return held, model.steps, copy.deepcopy(model.log), dict(model.seen), [
        p.requires_grad for p in model.parameters()
    ]  # fmt: skip


def call(model, *args, **kwargs):
    """What a call returns, or its exception; what it printed; what torch's generator drew."""
    torch.manual_seed(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            result = model(*args, **kwargs)
        except Exception as error:
            result = type(error), str(error)
    return result, printed.getvalue(), torch.rand(1)


def assert_same(ours, theirs, **tolerance):
    """Compares tensors by value, in whatever holds them; everything else has to be equal."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, **tolerance or {"rtol": 1e-5, "atol": 1e-6})
        return
    assert type(ours) is type(theirs)
    if not isinstance(theirs, (list, tuple, dict)):
        assert ours == (pytest.approx(theirs, rel=1e-5) if isinstance(theirs, float) else theirs)
        return
    assert len(ours) == len(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        ours, theirs = ours.values(), theirs.values()
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b, **tolerance)


@pytest.mark.parametrize("kind", FORWARDS, ids=lambda kind: kind.__name__)
def test_forwards_do_what_they_did(kind):
    original = kind()
    model = copy.deepcopy(original)
    before = state(model)
    report = braze.convert_report(model)
    assert_same(state(model), before)
    braze.convert(model)
    assert_same(state(model), before)
    assert "left alone" not in str(report).replace("0 left alone", "")
    for dtype in (torch.float32, torch.float32, torch.float64):
        model.to(dtype)
        original.to(dtype)
        x = torch.randn(3, 4, dtype=dtype)
        if kind.__name__.startswith("Unpacks"):
            assert_same(call(model, [x])[0], call(original, [x])[0])
        x = x.float() if kind is ReadsProperties else x
        ours, seen = call(model, x), len(GLOBAL)
        theirs = call(original, x)
        assert_same(ours, theirs)
        assert len(GLOBAL) - seen == seen % 2 if kind is Logs else True
        assert_same(state(model), state(original))
        for p, q in zip(model.parameters(), original.parameters(), strict=True):
            p.grad = q.grad = None
        for y in (ours[0], theirs[0]):
            y.sum().backward()
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, original)]
        assert grads[0]
        assert_same(*grads)
    assert getattr(ours[0], "extra", None) == getattr(theirs[0], "extra", None)


def test_most_of_them_are_fused():
    """What the forwards above do has to be done by rewritten ones."""
    fused = {kind.__name__: bool(braze.convert_report(kind()).fused) for kind in FORWARDS}
    not_fused = {name for name, is_fused in fused.items() if not is_fused}
    assert not_fused == {"RaisesMidway", "BindsInLoops", "Captures", "Checkpoints"}


# Changes after the conversion.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()])

    def forward(self, x):
        y = self.front(x)
        for layer in self.layers:
            y = layer(y)
        return self.pool(y) if isinstance(y, torch.Tensor) else y

    def front(self, x):
        x = self.conv(x)
        x = self.bn(x)
        return stock.relu(x)


def untie(m):
    m.layers[0].weight = nn.Parameter(m.layers[0].weight.detach() * 2)


CHANGES = {
    "padding_mode": lambda m: setattr(m.conv, "padding_mode", "circular"),
    "return_indices": lambda m: setattr(m.pool, "return_indices", True),
    "no affine": lambda m: (setattr(m.bn, "weight", None), setattr(m.bn, "bias", None)),
    "no statistics": lambda m: (setattr(m.bn, "running_mean", None),
                                setattr(m.bn, "running_var", None)),
    "no weight": lambda m: setattr(m.conv, "weight", None),
    "no layer": lambda m: setattr(m, "bn", None),
    "deleted": lambda m: delattr(m, "bn"),
    "append": lambda m: m.layers.append(nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)),
    "slice": lambda m: setattr(m, "layers", m.layers[:2]),
    "delete": lambda m: m.layers.__delitem__(1),
    "untie": untie,
    "hook": lambda m: m.bn.register_forward_hook(lambda _, args, y: y + args[0]),
    "replaces the next layer": lambda m: m.conv.register_forward_hook(
        lambda *_: setattr(m, "bn", nn.Identity())
    ),
    "momentum": lambda m: setattr(m.bn, "momentum", None),
    "forward of an instance": lambda m: setattr(m, "forward", lambda x: x * 3),
    "method of an instance": lambda m: setattr(m, "front", lambda x: m.conv(x) * 3),
    "forward of a layer": lambda m: setattr(m.bn, "forward", lambda x: x * 3),
    "eval": lambda m: m.eval(),
    "float64": lambda m: m.double(),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name):
    original = Block()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(2, 1, 8, 8)
    assert_same(model(x), original(x))
    for m in (model, original):
        torch.manual_seed(0)
        CHANGES[name](m)
    x = x.to(next(p for p in original.parameters() if p is not None).dtype)
    for _ in range(2):
        ours, theirs = call(model, x)[0], call(original, x)[0]
        if isinstance(theirs, tuple) and isinstance(theirs[0], type):
            assert ours[0] is theirs[0]
        else:
            assert_same(ours, theirs)
    assert_same(list(model.buffers()), list(original.buffers()))


def test_another_forward_of_the_class_is_noticed():
    class Net(Block):
        def forward(self, x):
            return self.front(x)

    original, model = Net(), braze.convert(Net())
    model.load_state_dict(original.state_dict())
    x = torch.randn(2, 1, 8, 8)
    Net.front = lambda self, x: self.conv(x) * 2
    assert_same(model(x), original(x))
    Net.forward.__defaults__ = (x,)
    assert_same(model(), original())
    Net.forward.__code__ = (lambda self, x: self.conv(x) * 5).__code__
    assert_same(model(x), original(x))
    Net.forward = lambda self, x: self.conv(x) * 7
    assert_same(model(x), original(x))


def test_a_child_replaced_on_the_way_through_a_sequential():
    class Replaces(nn.Module):
        def forward(self, x):
            self.owner[0][2] = nn.Tanh()
            return x

    original = nn.Sequential(Replaces(), nn.Linear(4, 4), nn.ReLU())
    original[0].owner = [original]
    model = copy.deepcopy(original)
    braze.convert(model)
    x = torch.randn(3, 4)
    assert_same(model(x), original(x))


# Classes.


def test_registries_see_nothing():
    registry = {}

    class Base(nn.Module):
        def __init_subclass__(cls, *, key):
            if key in registry:
                raise KeyError(key)
            registry[key] = cls

    class Net(Base, key="net"):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return stock.relu(self.fc(x))

    model = braze.convert(Net())
    assert registry == {"net": Net}
    assert braze.convert_report(model).fused
    assert isinstance(model, Net)
    assert model(torch.randn(2, 4)).min() >= 0


def test_metaclasses_and_generics():
    class Makes(type):
        made: typing.ClassVar = []

        def __init__(cls, *args):
            super().__init__(*args)
            cls.made.append(cls)

    def forward(self, x):
        return stock.relu(self.fc(x))

    def init(self):
        nn.Module.__init__(self)
        self.fc = nn.Linear(4, 4)

    methods = {"__init__": init, "forward": forward, "__qualname__": "Net"}
    of_a_metaclass = Makes("Net", (nn.Module,), methods)
    model = braze.convert(of_a_metaclass())
    assert type(model) is of_a_metaclass
    assert Makes.made == [of_a_metaclass]
    (entry,) = braze.convert_report(model).left_alone
    assert "Makes, a metaclass" in entry.reason

    class Abstract(nn.Module, abc.ABC, typing.Generic[typing.TypeVar("T")]):
        @abc.abstractmethod
        def tail(self, x):
            raise AssertionError("never run")

        def forward(self, x):
            return self.tail(x)

    class Concrete(Abstract[int]):
        __init__ = init

        def tail(self, x):
            return stock.relu(self.fc(x))

    model = braze.convert(Concrete())
    assert braze.convert_report(model).fused
    assert isinstance(model, Abstract)
    assert model(torch.randn(2, 4)).min() >= 0


def test_names_that_are_keywords():
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()]
    names = ["in", "class", "global", "None"]
    model = nn.Sequential(collections.OrderedDict(zip(names, layers, strict=True)))
    original = copy.deepcopy(model)
    assert len(braze.convert_report(braze.convert(model)).fused) == 2
    x = torch.randn(3, 4)
    assert_same(model(x), original(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [
    torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 4))
], ids=["script", "trace"])  # fmt: skip
def test_compiled_children_are_left_alone(compiled):
    inner = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(inner, nn.Linear(4, 4), nn.ReLU())
    original = copy.deepcopy(model)
    report = braze.convert_report(braze.convert(model))
    assert [e.name for e in report.left_alone] == ["0"]
    assert "scripted or traced" in report.left_alone[0].reason
    x = torch.randn(3, 4)
    assert_same(model(x), original(x))


def test_default_device():
    make = Block
    with torch.device("meta"):
        assert braze.convert(make()).conv.weight.is_meta
    model = braze.convert(make())
    with torch.device("meta"):
        copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    x = torch.randn(2, 1, 8, 8)
    assert_same(copied(x), model(x))


def test_parametrizations_of_a_module_itself():
    class Weighted(Small):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return self.block(x) @ self.weight

    parametrize = nn.utils.parametrizations.weight_norm
    remove = nn.utils.parametrize.remove_parametrizations
    x = torch.randn(3, 4)
    model = parametrize(Weighted())
    y = model(x)
    braze.convert(model)
    assert_same(model(x), y)
    remove(model, "weight")
    assert type(model) is Weighted
    assert_same(model(x), y)
    braze.convert(model)
    kind = type(model)
    remove(parametrize(model), "weight")
    assert type(model) is kind
    assert_same(model(x), y)


def test_a_failure_leaves_the_model_as_it_was():
    class Slotted(Block):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise AssertionError("a class's own code has run")
            super().__setattr__(name, value)

    model = nn.Sequential(Slotted(), Block())
    kinds = [type(m) for m in model.modules()]
    real, calls = braze.convert.__globals__["_set_classes"], []

    def fails_midway(changes):
        calls.append(changes)
        real([*changes[: len(changes) // 2], (model[1], int)])

    braze.convert.__globals__["_set_classes"] = fails_midway
    try:
        with pytest.raises(TypeError, match="__class__"):
            braze.convert(model)
    finally:
        braze.convert.__globals__["_set_classes"] = real
    assert calls
    assert kinds == [type(m) for m in model.modules()]
    braze.convert(model)
    assert braze.convert_report(model).fused


def test_unknown_code_is_left_alone():
    scope = {"stock": stock, "nn": nn}
    code = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
        def forward(self, x):
            return stock.relu(self.fc(x))
    """
    exec(textwrap.dedent(code), scope)
    model = scope["Net"]()
    (entry,) = braze.convert_report(model).left_alone
    assert "source" in entry.reason
    kind = type(model)
    braze.convert(model)
    assert type(model) is kind
    assert type(model.fc) is braze.nn.Linear


class LooksAtLocals(Small):
    def forward(self, x):
        y = self.fc(x)
        z = self.relu(y)
        return z + len(locals())


class Yields(Small):
    def forward(self, x):
        yield stock.relu(self.fc(x))


class Decorated(Small):
    @torch.no_grad()
    def forward(self, x):
        return stock.relu(self.fc(x))


class AsksForItsFrame(Small):
    def forward(self, x):
        import sys

        return stock.relu(self.fc(x)) + len(sys._getframe().f_locals)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(LooksAtLocals, "locals"), (Yields, "generator"), (AsksForItsFrame, "_getframe")],
)
def test_forwards_that_stay(kind, reason):
    original = kind()
    model = copy.deepcopy(original)
    found = {e.before: e.reason for e in braze.convert_report(model).left_alone}
    assert reason in found[f"{kind.__name__}.forward"]
    braze.convert(model)
    assert type(model) is kind
    x = torch.randn(3, 4)
    result, expected = model(x), original(x)
    if kind is Yields:
        result, expected = next(result), next(expected)
    assert_same(result, expected)


def test_a_decorator_runs():
    model = braze.convert(Decorated())
    assert not model(torch.randn(3, 4)).requires_grad


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


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()
        self.convs = nn.ModuleList([nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1)])
        self.bns = nn.ModuleList([nn.BatchNorm2d(2), nn.BatchNorm2d(2)])
        self.layers = nn.ModuleList([nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Tanh()])
        self.block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
        self.register_buffer("rm", torch.zeros(2))
        self.count, self.log, self.seen = 0, [], {}

    def tail(self, x):
        x = self.bn(self.conv(x))
        return F.relu(x)


class Net(Base):
    def helper(self, x):
        self.log.append(len(self.log))
        return self.act(self.bn(self.conv(x)))

    def tail(self, x):
        return -x

    def forward(self, x):
"""

AFTERWARDS = [
    lambda m: None,
    lambda m: m.eval(),
    lambda m: m.bn.register_forward_hook(lambda module, args, y: y * 2),
    lambda m: setattr(m, "act", nn.Tanh()),
    lambda m: m.layers.append(nn.ReLU()),
    lambda m: setattr(m.conv, "padding_mode", "reflect"),
    lambda m: setattr(m.bns, "0", nn.Identity()),
]


def attributes(model):
    return list(model.state_dict().values()), model.count, model.log, model.seen


def gradients(model, result):
    """Of all parameters, or the type of the error."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return None
    weight = torch.linspace(0, 1, result.numel(), dtype=result.dtype).view_as(result)
    try:
        return torch.autograd.grad(result, list(model.parameters()), weight, allow_unused=True)
    except RuntimeError as error:
        return type(error)


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=7),
    afterwards=st.sampled_from(AFTERWARDS),
)
def test_any_forward(tmp_path_factory, lines, afterwards):
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
            result, *rest = call(m, x.clone())
            results.append((result, rest, list(net.GLOBAL), random.random(), attributes(m)))
            results[-1] += (gradients(m, result),)
        ours, theirs = results
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


# Back again, and what else is done with a model.


def test_unconvert():
    original = nn.Sequential(Block(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
    kinds = [type(m) for m in original.modules()]
    model = braze.convert(copy.deepcopy(original))
    assert [type(m) for m in model.modules()] != kinds
    assert braze.unconvert(model) is model
    assert [type(m) for m in model.modules()] == kinds
    assert b"braze" not in pickle.dumps(model.state_dict())
    x = torch.randn(2, 1, 8, 8)
    assert_same(model(x), original(x))
    assert braze.unconvert(model) is model
    with pytest.raises(TypeError, match=r"unconvert\(\): model must be a torch.nn.Module, not int"):
        braze.unconvert(3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_of_an_unconverted_model():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 1, 8, 8)
    y = braze.convert(model)(x)
    scripted = torch.jit.script(braze.unconvert(model))
    torch.testing.assert_close(scripted(x), y)


def test_a_hook_removed_before_converting_again():
    original = Block()
    model = copy.deepcopy(original)
    hook = model.bn.register_forward_hook(lambda *_: None)
    assert len(braze.convert_report(braze.convert(model)).fused) == 1
    hook.remove()
    report = braze.convert_report(braze.convert(model))
    assert {e.name for e in report.fused} == {"conv, bn, relu()", "layers.0, layers.1, layers.2"}
    x = torch.randn(2, 1, 8, 8)
    assert ops_run(lambda: model(x)).count("conv_bn_relu2d") == 2
    assert_same(model(x), (original(x), original(x))[1])


def test_a_replaced_layer_is_freed():
    model = braze.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Block()))
    alive = [weakref.ref(model[0].weight), weakref.ref(model[2].conv)]
    model[0], model[2].conv = nn.Linear(4, 4), nn.Conv2d(1, 4, 1)
    assert [a() for a in alive] == [None, None]


def test_other_threads_run_models_meanwhile():
    stock_model, model = nn.Sequential(Block(), nn.ReLU()), braze.convert(Block())
    x, stop, errors = torch.randn(2, 1, 8, 8), threading.Event(), []

    def work():
        while not stop.is_set():
            try:
                stock_model(x)
                nn.Linear(2, 2).register_buffer("b", x)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        copy.deepcopy(model)
        braze.convert_report(stock_model)
        braze.convert(copy.deepcopy(stock_model))
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_converting_patches_and_executes_nothing(monkeypatch):
    """Not even an attribute of a module is read through its class."""
    model = Unread()
    monkeypatch.setattr(Unread, "__getattribute__", Unread.forbidden)
    before = dict(vars(nn.Module)), torch.get_rng_state()
    report = braze.convert_report(model)
    monkeypatch.undo()
    assert dict(vars(nn.Module)) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert any(e.name == "inner.0, inner.1" for e in report.fused)


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    @property
    def late(self):
        raise AssertionError("executed")

    def forward(self, x):
        return stock.relu(self.inner(x)) * self.late

    def forbidden(self, name):
        if name in ("__dict__", "__class__"):
            return object.__getattribute__(self, name)
        raise AssertionError(name)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_batch(strict):
    torch.backends.cudnn.allow_tf32 = False  # export reads the older flag
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    original = nn.Sequential(*layers, nn.Linear(4 * 9, 5), nn.ReLU()).eval()
    model = braze.convert(copy.deepcopy(original))
    batch = torch.export.Dim("batch", min=1, max=4096)
    x = torch.randn(8, 1, 8, 8)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
    for n in (1, 3, 8, 100):
        x = torch.randn(n, 1, 8, 8)
        assert_same(exported.module()(x), original(x))


def test_compile_of_spliced_forwards():
    torch._dynamo.reset()
    original = Block()
    model = braze.convert(copy.deepcopy(original))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n in (2, 3, 4):
        x = torch.randn(n, 1, 8, 8)
        assert_same(compiled(x), original(x))


def test_gradient_penalty():
    """A second derivative through every kind of run."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), Tail()]
    original = nn.Sequential(*layers).double()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    grads = []
    for m in (model, original):
        (grad,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        penalty = (grad.square().sum((1, 2, 3)).sqrt() - 1).square().sum()
        grads.append(torch.autograd.grad(penalty, list(m.parameters()), allow_unused=True))
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 9, 3)

    def forward(self, x):
        x = stock.relu(self.bn(self.conv(x)))
        return stock.relu(self.fc(x.flatten(1)))


def test_functional_transforms():
    original = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(5, 4, dtype=torch.float64)
    results = []
    for m in (model, original):
        parameters = dict(m.named_parameters())

        def loss(p, x, m=m):
            return torch.func.functional_call(m, p, (x,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        jacobian = torch.func.jacrev(lambda x, m=m: m(x))(x[0])
        forward = torch.func.jvp(m, (x,), (torch.ones_like(x),))
        results.append((per_sample, jacobian, forward))
    assert_same(*results, rtol=1e-9, atol=1e-12)
