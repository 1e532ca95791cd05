"""braze.convert across modules that hand on their input behind checks and notes of their use, as
torchvision's stochastic depth does."""

import copy
from types import FunctionType

import pytest
import torch
from convert_common import assert_trains_alike
from torch import nn

import braze
from braze.convert import recognise
from braze.convert.parts import Pass
from convert_models import ops_run

SEEN = []


def noted(thing):
    module, name = thing.__module__, thing.__class__.__name__
    if not module.startswith("net"):
        module = f"internal.{module}"
    if isinstance(thing, FunctionType):
        name = thing.__name__
    torch._C._log_api_usage_once(f"{module}.{name}")


def noted_here(thing):
    SEEN.append(thing)
    torch._C._log_api_usage_once("here")


def dropped(x, p, mode, training=True):
    """Halves what it does not hand on."""
    if not torch.jit.is_scripting() and not torch.jit.is_tracing():
        noted(dropped)
    if p < 0.0 or p > 1.0:
        raise ValueError(f"between 0 and 1, not {p}")
    if mode not in ["batch", "row"]:
        raise ValueError(f"no mode {mode}")
    if not training or p == 0.0:
        return x
    return x * 0.5


def dropped_and_seen(x, p, mode, training=True):
    if not torch.jit.is_scripting():
        noted_here(dropped)
    if not training or p == 0.0:
        return x
    return x * 0.5


class Drop(nn.Module):
    def __init__(self, p=0.0, mode="row"):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, input):
        return dropped(input, self.p, self.mode, self.training)


class DropAndSee(Drop):
    def forward(self, input):
        return dropped_and_seen(input, self.p, self.mode, self.training)


class Net(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU()
        self.drop = drop

    def forward(self, x):
        y = self.bn(self.conv(x))
        y = self.drop(y)
        y += x
        return self.act(y)


def fused(model, x):
    """Whether batch norm, addition and activation run as one; the model does what it did."""
    found = "batch_norm_act" in ops_run(lambda: model(x))
    assert_trains_alike(model, braze.unconvert(copy.deepcopy(model)), x)
    return found


def test_hands_on_behind_checks_and_notes():
    assert isinstance(recognise.part_of(Drop), Pass)
    x, model = torch.randn(3, 6, 8, 8), braze.convert(Net(Drop()))
    assert fused(model, x)
    model.drop.p = 0.5
    assert not fused(model, x)
    assert fused(model.eval(), x)
    model.drop.mode = "column"
    with pytest.raises(ValueError, match="no mode column"):
        model(x)
    model.drop.mode, model.drop.p = "batch", 2
    with pytest.raises(ValueError, match="between 0 and 1, not 2"):
        model(x)
    model.drop.p = torch.tensor(0.0)  # whose comparison may do anything
    assert not fused(model, x)


def test_notes_that_do_more():
    assert recognise.part_of(DropAndSee) is None
    x, model = torch.randn(3, 6, 8, 8), braze.convert(Net(DropAndSee()))
    SEEN.clear()
    assert not fused(model, x)
    assert SEEN


def test_changed_notes(monkeypatch):
    x, model = torch.randn(3, 6, 8, 8), braze.convert(Net(Drop()))
    assert fused(model, x)
    monkeypatch.setitem(globals(), "noted", SEEN.append)
    SEEN.clear()
    assert not fused(model, x)
    assert SEEN
