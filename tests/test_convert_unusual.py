"""Models of unusual classes, and code that convert leaves as it is."""

import abc
import collections
import copy
import textwrap
import typing

import pytest
import torch
import torch.nn.functional as stock
from convert_common import Block, Small, assert_same
from torch import nn

import braze

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
