"""Forwards of every form, forwards that ask for their class, and calls that torch refuses."""

import copy
import functools
import importlib.util
import textwrap

import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_same, call
from torch import nn

import braze


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.seen = None

    def forward(self, x):
        return self.last(x)


def compare(kind, *args, **kwargs):
    """Calls both models; what the classes hold afterwards has to be the same, too."""
    original = kind()
    model = copy.deepcopy(original)
    report = braze.convert_report(braze.convert(model))
    assert type(model.fc) is braze.nn.Linear
    held = []
    for m in (original, model):
        classes = [c for c in kind.__mro__ if c.__module__ == __name__]
        before = [dict(vars(c)) for c in classes]
        results = [call(m, *args, **kwargs) for _ in range(2)]
        held.append((results, m.seen, [repr(m.__dict__["seen"])]))
        held[-1] += ([sorted((k, repr(v)) for k, v in vars(c).items() if k in COUNTED)
                      for c in classes],)  # fmt: skip
        for c, attributes in zip(classes, before, strict=True):
            for name in COUNTED & set(vars(c)):
                delattr(c, name)
                if name in attributes:
                    setattr(c, name, attributes[name])
    assert_same(held[1], held[0])
    return model, report


COUNTED = {"count", "total"}


# Forms of a forward.


class Static(Net):
    @staticmethod
    def forward(x):
        return stock.relu(x)


class OfTheClass(Net):
    @classmethod
    def forward(cls, x):
        return stock.relu(x)


class Assigned(Net):
    forward = lambda self, x: self.act(self.fc(x))  # noqa: E731


class Callable:
    def __call__(self, x):
        return stock.relu(x)


class AnObject(Net):
    forward = Callable()


class APartialMethod(Net):
    def scaled(self, scale, x):
        return self.act(self.fc(x)) * scale

    forward = functools.partialmethod(scaled, 3)


class APartial(Net):
    forward = functools.partial(stock.relu)


class ABuiltin(Net):
    forward = torch.relu


class ADescriptor:
    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(stock.relu)


class HasADescriptor(Net):
    forward = ADescriptor()


FORMS = Static, OfTheClass, Assigned, AnObject, APartialMethod, APartial, ABuiltin, HasADescriptor


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_forwards_that_are_no_plain_functions(kind):
    model, report = compare(kind, torch.randn(2, 4))
    assert type(model) is kind
    (entry,) = report.left_alone
    assert entry.before == f"{kind.__name__}.forward"
    assert "function" in entry.reason


def prints(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        print("before")
        return function(self, *args, **kwargs)

    return wrapper


def as_is(function):
    return function


class Wrapped(Net):
    @prints
    def forward(self, x):
        return self.act(self.fc(x))


class DecoratedTwice(Net):
    @prints
    @torch.enable_grad()
    def forward(self, x):
        return stock.relu(self.fc(x))


class DecoratedAsItIs(Net):
    @as_is
    def forward(self, x):
        return self.act(self.fc(x))


class NamedOtherwise(Net):
    def forward(this, x, /, self=1, *, cls=2):
        return this.act(this.fc(x)) * self + cls


@pytest.mark.parametrize("kind", [Wrapped, DecoratedTwice, DecoratedAsItIs, NamedOtherwise])
def test_decorated_forwards(kind):
    compare(kind, torch.randn(2, 4))
    if kind is NamedOtherwise:
        compare(kind, torch.randn(2, 4), self=3, cls=4)


# What a forward asks of its class.


class SuperOfItsType(Net):
    def forward(self, x):
        return self.act(self.fc(super(type(self), self).forward(x)))


class SuperOfItsClass(Net):
    def forward(self, x):
        return self.act(self.fc(super(self.__class__, self).forward(x)))


class ComparesItsType(Net):
    def forward(self, x):
        self.seen = type(self) is ComparesItsType, self.__class__ is ComparesItsType
        return self.act(self.fc(x))


class CountsInItsClass(Net):
    total = 0

    def forward(self, x):
        type(self).total += 1
        self.__class__.count = self.total
        return self.act(self.fc(x))


class AsksElsewhere(Net):
    @property
    def is_it(self):
        return [type(m) for m in (self,)] == [AsksElsewhere] and type(self) is AsksElsewhere

    def forward(self, x):
        self.seen = self.is_it
        return self.act(self.fc(x))


class AsksInAWrappedMethod(Net):
    @functools.wraps(print)
    def helper(self):
        return self.__class__ is AsksInAWrappedMethod

    def forward(self, x):
        self.seen = self.helper()
        return self.act(self.fc(x))


STAY = SuperOfItsType, SuperOfItsClass, ComparesItsType, CountsInItsClass, AsksElsewhere
STAY += (AsksInAWrappedMethod,)


@pytest.mark.parametrize("kind", STAY, ids=lambda kind: kind.__name__)
def test_classes_that_are_asked_for(kind):
    model, report = compare(kind, torch.randn(2, 4))
    assert type(model) is kind
    (entry,) = report.left_alone
    assert "asks for the class of its module" in entry.reason


class ClassCell(Net):
    count = 0

    def forward(self, x):
        __class__.count += 1
        self.seen = __class__ is ClassCell, ClassCell.count
        return self.act(self.fc(super().forward(x)))


class ClassMethods(Net):
    count = 0

    @classmethod
    def register(cls):
        cls.count += 1
        return cls is ClassMethods, cls.__name__

    def forward(self, x):
        self.seen = self.register(), ClassMethods.count, self.count
        return self.act(self.fc(x))


class InheritsClassMethods(ClassMethods):
    @classmethod
    def register(cls):
        cls.total = 1
        return super().register(), cls is InheritsClassMethods


class OnlyItsName(Net):
    def forward(self, x):
        self.seen = type(self).__name__, self.__class__.__qualname__, isinstance(self, OnlyItsName)
        return self.act(self.fc(x)) if type(x) is torch.Tensor else x


REWRITTEN = ClassCell, ClassMethods, InheritsClassMethods, OnlyItsName


@pytest.mark.parametrize("kind", REWRITTEN, ids=lambda kind: kind.__name__)
def test_classes_that_are_seen_as_they_were(kind):
    model, report = compare(kind, torch.randn(2, 4))
    assert type(model) is not kind
    assert [e.name for e in report.fused] == ["fc, act"]


def test_a_class_method_replaced_later():
    class Later(ClassMethods):
        pass

    model = braze.convert(Later())
    Later.register = lambda self: self is model
    model(torch.randn(2, 4))
    assert model.seen[0] is True


# Calls that torch refuses.

BN = "self.bn(self.conv(x))"
HEAD = """
import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.x = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), torch.ones(3)
"""
FORMS_OF_CALLS = """
torch.relu({}, inplace=True) | {}.relu(inplace=True) | {}.relu(True) | {}.relu(1, 2)
F.sigmoid({}, inplace=True) | F.sigmoid({}, True) | F.tanh({}, inplace=True)
torch.tanh({}, True) | F.gelu({}, inplace=True) | F.gelu({}, 'none')
F.gelu({}, approximate='foo') | F.gelu({}, approximate=3) | torch.sigmoid({}, out=None)
F.relu({}, True, 3) | F.relu() | torch.relu() | torch.relu(3) | torch.sigmoid(3) | F.sigmoid(3)
F.tanh('a') | F.relu(None) | F.linear({}) | F.conv2d({}) | F.leaky_relu({}, 'a')
F.leaky_relu({}, None) | F.hardtanh({}, 2, 1) | F.elu({}, 1j) | F.celu({}, 0) | F.max_pool2d({})
F.max_pool2d({}, 'a') | F.max_pool2d({}, 2, ceil_mode=1) | F.max_pool2d(F.relu({}), 0)
F.max_pool2d(F.relu({}), 9) | F.max_pool2d(F.relu({}), 2, 0) | F.max_pool2d(F.relu({}), 2, 1, 2)
F.max_pool2d(F.relu({}), (2, 2, 2)) | F.max_pool2d(F.relu({}), 2.0)
F.max_pool2d(F.relu({}), True) | F.max_pool2d(F.relu({}), 2, ceil_mode=1)
F.max_pool2d(F.relu({})) | F.max_pool2d(F.relu({}), 2, foo=3) | F.max_pool2d({}, 2, 2, None)
{}.relu_(3) | torch.relu_({}, 3) | F.relu_({}, inplace=True) | {}.flatten(1, 2, 3)
torch.flatten({}, 1, out=3) | F.softmax({}, 9) | F.avg_pool2d({}) | F.nll_loss({})
F.cross_entropy({}, 3) | torch.relu({}, out={}) | F.relu(*[{}], 1, 2) | F.relu(**dict(inputs={}))
F.relu(input={}) | torch.relu(input={}) | F.leaky_relu({}, True) | F.silu({}, inplace=3)
F.relu({}, inplace='a') | torch.sigmoid({}, out=self.x) | F.softmax({}, dim=1)
F.softmax({}, 1, 3) | F.relu(torch.ones(2, dtype=torch.int32))
torch.sigmoid(torch.ones(2, dtype=torch.int32)) | F.linear({}, self.x, foo=1) | F.hardtanh({}, -1)
F.celu({}, alpha=2) | F.mish({}, True)
"""
CALLS = [c.strip() for line in FORMS_OF_CALLS.strip().splitlines() for c in line.split(" | ")]


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """A class for each call: by name, with the call nested and after an assignment."""
    code = [HEAD]
    for i, form in enumerate(CALLS):
        nested = f"class Nested{i}(Base):\n    def forward(self, x):\n        return {form}\n"
        stated = nested.replace("Nested", "Stated")
        stated = stated.replace("        return", f"        y = {BN}\n        return")
        code += [nested.replace("{}", BN), stated.replace("{}", "y")]
    path = tmp_path_factory.mktemp("calls") / "nets.py"
    path.write_text(textwrap.dedent("\n".join(code)))
    spec = importlib.util.spec_from_file_location("nets", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(len(CALLS)), ids=CALLS)
def test_calls_that_torch_refuses_or_takes(nets, index):
    for form in ("Nested", "Stated"):
        original = getattr(nets, f"{form}{index}")()
        model = braze.convert(copy.deepcopy(original))
        x = torch.randn(2, 1, 8, 8)
        ours, theirs = call(model, x), call(original, x)
        if isinstance(theirs[0], tuple) and not issubclass(theirs[0][0], TypeError):
            ours, theirs = (ours[0][0], *ours[1:]), (theirs[0][0], *theirs[1:])
        assert_same(ours, theirs, rtol=1e-4, atol=1e-5)
        assert_same(list(model.buffers()), list(original.buffers()))


class TakesTwo(Net):
    def forward(self, x, y):
        return self.act(self.fc(x)) + y


WRONG = [((), {}), ((1, 2, 3), {}), ((1,), {"z": 1}), ((1, 2), {"x": 1}), ((1, 2), {"self": 1})]


@pytest.mark.parametrize(("args", "kwargs"), WRONG)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        TakesTwo,
        nn.ReLU,
        lambda: nn.Linear(2, 2),
        lambda: nn.BatchNorm2d(2),
        lambda: nn.Conv2d(1, 1, 1),
        lambda: nn.MaxPool2d(2),
        lambda: nn.Softmax(1),
        lambda: nn.NLLLoss(),
    ],
)
def test_wrong_arguments_of_a_forward(make, args, kwargs):
    original = make()
    model = braze.convert(copy.deepcopy(original))
    ours, theirs = call(model, *args, **kwargs)[0], call(original, *args, **kwargs)[0]
    if theirs[0] is TypeError:
        assert_same(ours, theirs)
    else:
        assert ours[0] is theirs[0]


def test_the_implicit_dimension_warns_where_it_is_called():
    class Implicit(Net):
        def forward(self, x):
            return stock.softmax(stock.relu(self.fc(x)))

    for model in (Implicit(), braze.convert(Implicit())):
        with pytest.warns(UserWarning, match="Implicit dimension") as caught:
            model(torch.randn(2, 4))
        assert caught[0].filename == __file__
