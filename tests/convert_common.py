"""What the tests of converted code share: models, and what a call is compared by."""

import contextlib
import copy
import functools
import io
import random

import numpy
import pytest
import torch
import torch.nn.functional as stock
from torch import nn

import braze
from braze.testing import WAYS, mover, moving_what_is_kept
from common import assert_by_rule


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


@contextlib.contextmanager
def replaced(owner, name, new):
    """`new` in the place of an attribute of a class or module, which may have inherited it."""
    had, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


def seen_by_a_mode(function):
    """The names of torch's functions that a mode of the user's sees while a function runs."""
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Mode():
        function()
    return seen


def _trained(model, x):
    """What a model returns, its gradients and its buffers."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(1)
    y = model(x * 1)  # no leaf, as within a network
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *torch.autograd.grad(y, [x, *model.parameters()], weight), *model.buffers()


def _trained_moved(wide, x, move):
    """The same with the input, the parameters and what is kept a rounding off."""
    model = copy.deepcopy(wide)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(move(p))
    with moving_what_is_kept(move):
        return _trained(model, move(x))


def assert_trains_alike(converted, original, x):
    """Results, gradients and buffers of a converted model against the original, by the rule of
    braze.testing, with the condition measured."""
    wide = copy.deepcopy(original).double()

    @functools.cache
    def moved():
        return [_trained_moved(wide, x, mover(way)) for way in WAYS]

    ours, theirs = _trained(converted, x), _trained(original, x)
    reference = _trained(copy.deepcopy(wide), x.double())
    for i, (a, b, c) in enumerate(zip(ours, theirs, reference, strict=True)):
        if a.is_floating_point():
            others = functools.partial(lambda i: [m[i] for m in moved()], i)
            assert_by_rule(a, b, c, ulps=64, what=str(i), moved=others)
        else:
            assert torch.equal(a, b)


def converted_pair(kind, device, channels):
    """A converted model, the same as it was, and images of so many channels, all channels_last."""
    torch.manual_seed(0)
    original = kind().to(device, memory_format=torch.channels_last)
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(2, channels, 6, 6, device=device).to(memory_format=torch.channels_last)
    return model, original, x
