"""Concatenations along channels in converted forwards, and which of them stay torch's."""

import copy
import io

import pytest
import torch
import torch.nn.functional as stock
from convert_common import (
    assert_same,
    assert_trains_alike,
    call,
    converted_pair,
    replaced,
    seen_by_a_mode,
)
from torch import nn

import braze
from braze._ops import cat as ops
from convert_models import ops_run


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(ops, "CAT_ON", ("cpu", "cuda"))
    monkeypatch.setattr(ops, "CAT_BYTES", 0)


class Base(nn.Module):
    """Two branches of 8 channels each, which a forward joins."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.last, self.dim = nn.Conv2d(16, 4, 1), 1


class InOneExpression(Base):
    def forward(self, x):
        return self.last(torch.cat([self.one(x), self.other(x)], 1))


class ByName(Base):
    def forward(self, x):
        joined = torch.cat((self.one(x), self.other(x)), dim=-3)
        return self.last(stock.relu(joined))


class OfAList(Base):
    """As DenseNet's layers."""

    def join(self, inputs):
        return self.last(torch.concatenate(inputs, self.dim))

    def forward(self, x):
        inputs = [self.one(x)]
        inputs.append(self.other(x))
        return self.join(inputs)


class Halves(Base):
    """As ShuffleNet's units: one half of the channels as they are."""

    def forward(self, x):
        one, other = torch.cat([self.one(x), self.other(x)], 1).chunk(2, dim=1)
        return self.last(torch.concat((one, stock.silu(other)), 1))


TAKEN = [InOneExpression, ByName, OfAList, Halves]


def pair(kind, device):
    return converted_pair(kind, device, channels=4)


def train(model, x):
    y = model(x)
    return y, torch.autograd.grad(y.square().sum(), list(model.parameters()))


def swapped(model):
    return [e.after for e in braze.convert_report(model).swapped]


@pytest.mark.parametrize("kind", TAKEN)
def test_taken(kind, device):
    model, original, x = pair(kind, device)
    assert "braze.nn.functional.cat" in swapped(model)
    assert_trains_alike(model, original, x)
    assert model(x).stride() == original(x).stride()
    ran = ops_run(lambda: train(model, x))
    assert ran.count("cat_channels") == ran.count("cat_channels_backward") == 1 + (kind is Halves)
    if device == "cpu":  # where convolutions of contiguous tensors give such
        for m in (model, original):
            m.to(memory_format=torch.contiguous_format)
        x = x.contiguous()
        assert_trains_alike(model, original, x)
        assert "cat_channels" not in ops_run(lambda: model(x))


class AlongTheBatch(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], 0)


class AlongTheWidth(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], dim=-1)


class WithoutADimension(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)])


class Axis(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], axis=1)


class Tensors(Base):
    def forward(self, x):
        return torch.cat(tensors=[self.one(x), self.other(x)], dim=1)


class Open(Base):
    def forward(self, x):
        arguments = [self.one(x), self.other(x)], 1
        return torch.cat(*arguments)


class Out(Base):
    def forward(self, x):
        one, other = self.one(x).detach(), self.other(x).detach()
        return torch.cat([one, other], 1, out=torch.empty(0, device=x.device))


class ABool(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], True)


class OfNothing(Base):
    def forward(self, x):
        return torch.cat([], 1)


class ATensor(Base):
    def forward(self, x):
        return torch.cat(self.one(x), 1)


class Several(list):
    pass


class ASubclass(Base):
    def forward(self, x):
        return torch.cat(Several([self.one(x), self.other(x)]), 1)


class AnIterator(Base):
    def forward(self, x):
        return torch.cat((f(x) for f in (self.one, self.other)), 1)


class NotOnlyTensors(Base):
    def forward(self, x):
        return torch.cat([self.one(x), None], 1)


class OtherSizes(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x[:, :, 1:])], 1)


class OtherDtypes(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x).double()], 1)


NEVER = [AlongTheBatch, AlongTheWidth, WithoutADimension, Axis, Tensors, Open, Out]
NOT_NOW = [
    ABool,
    OfNothing,
    ATensor,
    ASubclass,
    AnIterator,
    NotOnlyTensors,
    OtherSizes,
    OtherDtypes,
]


@pytest.mark.parametrize("kind", [*NEVER, *NOT_NOW])
def test_what_stays_torchs(kind, device):
    model, original, x = pair(kind, device)
    assert ("braze.nn.functional.cat" in swapped(model)) is (kind in NOT_NOW)
    assert type(model) is kind or kind in NOT_NOW
    assert_same(call(model, x), call(original, x), rtol=1e-4, atol=1e-5)
    assert "cat_channels" not in ops_run(lambda: call(model, x))


class AlongAnyDimension(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], self.dim)


def test_a_dimension_that_changes(device):
    model, original, x = pair(AlongAnyDimension, device)
    for dim in (1, 0, -3, 2, -1, 7, "C", None, True):
        model.dim = original.dim = dim
        assert_same(call(model, x), call(original, x), rtol=1e-4, atol=1e-5)
        ran = "cat_channels" in ops_run(lambda: call(model, x))
        assert ran is (dim in (1, -3) and dim is not True)


def test_torchs_replaced_by_another_function(device):
    model, _, x = pair(InOneExpression, device)
    expected, known, seen = model(x), torch.cat, []

    def other(*args, **kwargs):
        seen.append(len(args[0]))
        return known(*args, **kwargs)

    with replaced(torch, "cat", other):
        assert torch.equal(model(x), expected)
        assert "cat_channels" not in ops_run(lambda: model(x))
    assert seen == [2, 2]
    assert "cat_channels" in ops_run(lambda: model(x))


@pytest.mark.parametrize("kind", TAKEN)
def test_modes_see_torchs_function(kind, device):
    model, _, x = pair(kind, device)
    seen = seen_by_a_mode(lambda: model(x))
    assert {"cat", "concat", "concatenate"} & set(seen)


def test_subclasses_see_torchs_function(device):
    names = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    model, original, x = pair(InOneExpression, device)
    expected = original(x)
    y = model(x.as_subclass(Seen))
    assert type(y) is Seen
    assert "cat" in names
    torch.testing.assert_close(y.as_subclass(torch.Tensor), expected, rtol=1e-4, atol=1e-5)


class Ordered(Base):
    """What happens in which order, with an exception in the end where it is asked for."""

    def __init__(self):
        super().__init__()
        self.seen, self.raises = [], False

    def note(self, what, value):
        self.seen.append(what)
        return value

    def forward(self, x):
        return self.note("cat", torch).cat(
            [self.note("one", self.one)(x), self.note("other", self.other(x))],
            self.note("dim", 1 / 0 if self.raises else 1),
        )


class OrderedByName(Ordered):
    def forward(self, x):
        return torch.cat(
            [self.note("one", self.one)(x), self.note("other", self.other(x))],
            dim=self.note("dim", 1 / 0 if self.raises else 1),
        )


@pytest.mark.parametrize("kind", [Ordered, OrderedByName])
def test_order_and_exceptions(kind, device):
    model, original, x = pair(kind, device)
    for raises in (False, True):
        model.raises = original.raises = raises
        assert_same(call(model, x), call(original, x), rtol=1e-4, atol=1e-5)
        assert model.seen == original.seen


@pytest.mark.parametrize("kind", TAKEN)
def test_compiles(kind, device):
    model, _, x = pair(kind, device)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), model(x))
    assert any("cat_channels" in target for target in targets)


def test_export_and_trace(device):
    torch.backends.cudnn.allow_tf32 = False  # as in test_dynamic_batch.py
    model, original, x = pair(InOneExpression, device)
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        assert any("cat_channels" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(x), model(x))
    traced = torch.jit.trace(model, (x,))
    assert "aten::cat" in str(traced.inlined_graph)
    assert "cat_channels" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), original(x), rtol=1e-4, atol=1e-5)


class ASettledForward(Base):
    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], len(locals()) - 1)


def test_a_forward_that_stays_as_it_is_is_no_loss(device):
    model, original, x = pair(ASettledForward, device)
    assert type(model) is ASettledForward
    assert not braze.convert_report(original).left_alone
    assert model(x).shape == original(x).shape


def test_copies_pickles_and_back(device):
    model, original, x = pair(InOneExpression, device)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))
        assert "cat_channels" in ops_run(lambda other=other: other(x))
    braze.unconvert(model)
    assert type(model) is InOneExpression
    assert torch.equal(model(x), original(x))
