"""What happens in which order in converted models, and what is there after an exception."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_same, call
from torch import nn

import braze
from convert_models import ops_run


class Net(nn.Module):
    """Layers, and what has effects: `log` of what ran, and children that are exchanged."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        self.bn2, self.shortcut = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()])
        self.counter = Counts()
        self.log, self.times = [], 0

    def next_args(self):
        self.log.append("args")
        return ()

    def note(self, x, text="note"):
        self.log.append(text)
        return x

    @property
    def last(self):
        self.log.append("last")
        return self.act

    def exchange(self, x):
        """Puts other layers where those are that come next."""
        self.times += 1
        self.log.append(type(self.bn).__name__)
        self.bn, self.bn2 = self.bn2, self.bn
        if self.times % 2:
            self.act = nn.Tanh()
        else:
            self.act = nn.ReLU()
        return x

    def hook(self, x):
        self.times += 1
        hook = self.bn.register_forward_hook(lambda *_: self.log.append("hook"))
        self.hooks = [*getattr(self, "hooks", [])[-1:], hook]
        return x


class Counts(nn.Module):
    """A child that counts, and changes what comes after it."""

    def __init__(self):
        super().__init__()
        self.calls, self.owner = 0, []

    def forward(self, x):
        self.calls += 1
        for owner in self.owner:
            owner.exchange(x)
        return x


class StarredArguments(Net):
    def forward(self, x):
        return self.act(self.bn(self.conv(x), *self.next_args()))


class KeywordArguments(Net):
    def forward(self, x):
        return stock.relu(self.bn(self.note(self.conv(x))), inplace=bool(self.note(1, "inplace")))


class Walrus(Net):
    def forward(self, x):
        x = self.conv(y := self.exchange(x))
        x = self.bn(x)
        return self.act(x) + y


class Properties(Net):
    def forward(self, x):
        x = self.bn(self.conv(x))
        return self.last(x)


class ExchangesInTheInput(Net):
    def forward(self, x):
        x = self.conv(self.exchange(x))
        x = self.bn(x)
        return self.act(x)


class ExchangesInTheNestedInput(Net):
    def forward(self, x):
        return self.act(self.bn(self.conv(self.exchange(x))))


class HooksInTheInput(Net):
    def forward(self, x):
        x = self.bn(self.conv(self.hook(x)))
        return stock.relu(x)


class ExchangesBeforeAnAddition(Net):
    def forward(self, x):
        return self.act(self.bn(self.exchange(x)) + self.shortcut(x))


class ExchangesBeforeAnAdditionOverStatements(Net):
    def forward(self, x):
        y = self.bn(self.exchange(x))
        if self.shortcut is not None:
            x = self.shortcut(x)
        y += x
        return self.act(y)


class AddsFromTheLeft(Net):
    def forward(self, x):
        return self.act(self.shortcut(x) + self.bn(self.exchange(x)))


class AChildExchangesFromTheLeft(Net):
    def forward(self, x):
        y = self.counter(x) + self.bn(x)
        return self.act(y)


class AChildExchanges(Net):
    def forward(self, x):
        y = self.bn(x) + self.counter(x)
        return self.act(y)


class ChainsOfMethods(Net):
    def forward(self, x):
        x = self.conv(self.note(x)).relu()
        x = self.bn(self.note(x, "again"))
        x = torch.relu(x)
        return x


class LoopsOver(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.note(x)


class HoldsInALoop(Net):
    def forward(self, x):
        for i in range(2):
            x = self.conv(self.note(x, i))
            x = self.bn(x)
            x = self.act(x)
        return x


KINDS = [kind for kind in Net.__subclasses__() if kind.__module__ == __name__]


def compare(model, original, *args, rounds=4):
    for _ in range(rounds):
        ours, theirs = call(model, *args), call(original, *args)
        if isinstance(theirs[0], tuple):
            ours, theirs = (ours[0][0], ours[1:]), (theirs[0][0], theirs[1:])
        assert_same(ours, theirs, rtol=1e-7, atol=1e-9)
        assert model.log == original.log
        assert_same(list(model.buffers()), list(original.buffers()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_effects_in_their_order(kind):
    original = kind().double()
    model = copy.deepcopy(original)
    for m in (model, original):
        m.counter.owner.append(m)
    braze.convert(model)
    compare(model, original, torch.randn(2, 4, 3, 3, dtype=torch.float64))


def test_most_of_them_are_fused():
    fused = {kind.__name__ for kind in KINDS if braze.convert_report(kind()).fused}
    left = {"KeywordArguments", "Properties", "StarredArguments"}
    assert {kind.__name__ for kind in KINDS} - fused == left


def test_what_a_run_is_applied_to_is_not_kept():
    """The names of a rewritten forward keep no tensor alive that the forward did not keep."""

    class Two(Net):
        def forward(self, x):
            y = self.act(self.bn(torch.exp(x)) + self.shortcut(x))
            z = self.conv(torch.exp(y))
            z = self.bn2(z)
            z = self.act(z)
            return self.counter(z)

    held = []

    class Looks(nn.Module):
        def forward(self, x):
            import gc

            tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
            held.append(sum(o.shape == x.shape for o in tensors))
            return x

    counts = []
    for convert in (False, True):
        model = Two().eval()
        model.counter = Looks()
        if convert:
            assert len(braze.convert_report(braze.convert(model)).fused) == 2
        held.clear()
        with torch.no_grad():
            model(torch.randn(2, 4, 7, 5))
        counts.append(held[0])
    assert counts[1] <= counts[0]


# Exceptions.


class Raises(Net):
    """What is added raises, or cannot be added, after batch norm has counted."""

    def forward(self, x, y):
        return self.act(self.bn(x) + y)


class RaisesInTheShortcut(Net):
    def forward(self, x, y):
        return self.act(self.bn(x) + self.shortcut(y))


class RaisesInBetween(Net):
    def forward(self, x, y):
        x = self.bn(x)
        if self.shortcut is not None:
            y = self.shortcut(y)
        x += y
        return self.act(x)


class RaisesOnTheLeft(Net):
    def forward(self, x, y):
        return self.act(self.shortcut(y) + self.bn(x))


class RaisesInPooling(Net):
    def forward(self, x, y):
        return stock.max_pool2d(self.act(self.bn(self.conv(x))), 5) + y


ADDED = [
    torch.randn(2, 4, 5, 5), torch.randn(2, 3, 3, 3), torch.randn(4, 1, 1), torch.randn(3), None,
    "a", 3, torch.randn(2, 4, 3, 3).double(), torch.randn(2, 4, 3, 3),
]  # fmt: skip


RAISE = Raises, RaisesInTheShortcut, RaisesInBetween, RaisesOnTheLeft, RaisesInPooling


@pytest.mark.parametrize("kind", RAISE, ids=lambda kind: kind.__name__)
def test_an_addition_that_raises(kind):
    original = kind()
    model = braze.convert(copy.deepcopy(original))
    assert braze.convert_report(model).fused
    for y in ADDED:
        x = torch.randn(2, 4, 3, 3)
        assert_same_or_same_error(model, original, x, y)
    assert_same_or_same_error(model, original, torch.randn(2, 3, 3, 3), ADDED[-1])


def assert_same_or_same_error(model, original, *args):
    ours, theirs = call(model, *args)[0], call(original, *args)[0]
    if isinstance(theirs, tuple):
        assert ours[0] is theirs[0]
    else:
        assert_same(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_same(list(model.buffers()), list(original.buffers()))


def refuse(m, **settings):
    for name, value in settings.items():
        setattr(m.bn, name, value)


REFUSED = {
    "eps": lambda m: refuse(m, eps=-1.0),
    "momentum": lambda m: refuse(m, momentum="a"),
    "no mean": lambda m: refuse(m, running_mean=None),
    "mean": lambda m: m.bn.running_mean.resize_(3),
    "weight": lambda m: refuse(m, weight=nn.Parameter(torch.ones(3))),
    "nothing": lambda m: None,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("run", ["conv", "norm", "alone"])
def test_a_batch_that_batch_norm_refuses_is_counted(name, run):
    class Run(Net):
        def forward(self, x):
            x = self.conv(x) if run == "conv" else x
            return self.bn(x) if run == "alone" else self.act(self.bn(x))

        def extra_repr(self):
            return run

    original = Run()
    model = braze.convert(copy.deepcopy(original))
    for m in (model, original):
        REFUSED[name](m)
    shapes = [(2, 4, 3, 3), (1, 4, 1, 1), (2, 4, 3)]
    for shape in [*shapes, (2, 3, 3, 3), (0, 4, 3, 3)] if name == "nothing" else shapes:
        assert_same_or_same_error(model, original, torch.randn(shape))
    if name == "nothing":
        assert original.bn.num_batches_tracked > 1


class LoopInTry(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.ReLU(), nn.Linear(5, 6), nn.ReLU()])

    def forward(self, x):
        try:
            for layer in self.layers:
                x = layer(x)
        except RuntimeError:
            self.log.append(type(layer).__name__)
        return x


class LoopInFinally(LoopInTry):
    def forward(self, x):
        try:
            for layer in self.layers:
                x = layer(x)
        finally:
            self.log.append(round(float(x.detach().sum()), 4))
        return x


class LoopInWith(LoopInTry):
    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            for layer in self.layers:
                x = layer(x)
        return x


class LoopWhereBatchNormRaises(LoopInTry):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()])

    def forward(self, x):
        with contextlib.suppress(ValueError):
            for layer in self.layers:
                x = layer(x)
        return x


class StatementsInFinally(Net):
    def forward(self, x):
        try:
            x = self.conv(x)
        finally:
            x = self.bn(x)
            x = self.act(x)
        return x


class StatementsInWith(Net):
    def forward(self, x):
        with contextlib.suppress(ValueError):
            x = self.conv(x)
            x = self.bn(x)
            x = self.act(x)
        return x


class ReturnsInTry(Net):
    def forward(self, x):
        try:
            return self.act(self.bn(self.conv(x)))
        except ValueError:
            return -x
        finally:
            self.log.append(1)


TRIES = LoopInTry, LoopInFinally, LoopInWith, LoopWhereBatchNormRaises
TRIES += StatementsInFinally, StatementsInWith, ReturnsInTry


@pytest.mark.parametrize("kind", TRIES, ids=lambda kind: kind.__name__)
def test_where_exceptions_are_seen(kind):
    original = kind()
    model = braze.convert(copy.deepcopy(original))
    linear = type(model.layers[0]) is braze.nn.Linear
    for shape in [(2, 6)] if linear else [(2, 4, 3, 3), (1, 4, 1, 1)]:
        for _ in range(2):
            x = torch.randn(shape)
            assert_same_or_same_error(model, original, x)
            assert_same(model.log, original.log)


def test_changes_in_a_loop_are_seen_when_they_happen():
    """A child that changes the list that runs: what comes next is what the list says by then."""

    class Changes(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.change, self.owner = change, []

        def forward(self, x):
            for owner in self.owner:
                self.change(owner)
            return x

    def layers(change):
        run = nn.Linear(4, 4), nn.ReLU()
        return [Changes(change), *run, nn.Identity(), nn.Linear(4, 4), nn.ReLU()]

    changes = {
        "another": lambda m: m.__setitem__(2, nn.Tanh()),
        "hook": lambda m: m[5].register_forward_hook(lambda _, args, y: y + 1),
        "append": lambda m: m.append(nn.ReLU()),
        "delete": lambda m: m.__delitem__(5),
    }
    for change in changes.values():
        original = nn.Sequential(*layers(change))
        model = copy.deepcopy(original)
        for m in (model, original):
            m[0].owner.append(m)
        braze.convert(model)
        assert "linear" in ops_run(lambda model=model: model[4:](torch.randn(3, 4)))
        x = torch.randn(3, 4)
        assert_same_or_same_error(model, original, x)
        assert_same_or_same_error(model, original, x)
