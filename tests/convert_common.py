"""What the tests of converted code share: models, and what a call is compared by."""

import contextlib
import copy
import io
import random

import numpy
import pytest
import torch
import torch.nn.functional as stock
from torch import nn


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
