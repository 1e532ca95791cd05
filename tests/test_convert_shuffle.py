"""Channel shuffles that are written out, in converted forwards."""

import io
import types

import pytest
import torch
from convert_common import assert_trains_alike, converted_pair, replaced, seen_by_a_mode
from torch import nn

import braze
from braze._ops import channel_shuffle as ops
from braze.convert.shuffles import is_shuffle
from convert_models import ops_run


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(ops, "SHUFFLE_ON", ("cpu", "cuda"))


def as_torchvisions(x, groups):
    """Shuffles."""
    batchsize, num_channels, height, width = x.size()
    channels_per_group = num_channels // groups

    # reshape
    x = x.view(batchsize, groups, channels_per_group, height, width)

    x = torch.transpose(x, 1, 2).contiguous()

    # flatten
    x = x.view(batchsize, num_channels, height, width)

    return x


def in_one(x, g):
    n, c, h, w = x.shape
    return x.view(n, g, c // g, h, w).permute(0, 2, 1, 3, 4).contiguous().view(n, c, h, w)


def by_reshape(x, groups=2):
    n, h = x.size(0), x.shape[2]
    w = x.size(3)
    y = x.reshape((n, groups, -1, h, w)).transpose(2, 1)
    return y.reshape(n, -1, h, w)


def of_other_channels(x, groups):
    n, c, h, w = x.size()
    x = x.view(n, c // groups, groups, h, w)
    return x.transpose(1, 2).contiguous().view(n, c, h, w)


def scaled(x, groups):
    n, c, h, w = x.size()
    x = x.view(n, groups, c // groups, h, w) * 2
    return x.transpose(1, 2).contiguous().view(n, c, h, w)


def of_rows(x, groups):
    n, c, h, w = x.size()
    x = x.view(n, groups, c // groups, h, w)
    return x.transpose(1, 3).contiguous().view(n, c, h, w)


def swapped_image(x, groups):
    n, c, w, h = x.size()
    x = x.view(n, groups, c // groups, h, w)
    return x.transpose(1, 2).contiguous().view(n, c, h, w)


def with_a_branch(x, groups):
    n, c, h, w = x.size()
    if groups > 1:
        x = x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)
    return x


def not_the_result(x, groups):
    n, c, h, w = x.size()
    _ = x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)
    return x


FUNCTIONS = [as_torchvisions, in_one, by_reshape]
OTHERS = [of_other_channels, scaled, of_rows, swapped_image, with_a_branch, not_the_result]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_known(function):
    assert is_shuffle(function)
    x = torch.randn(2, 12, 3, 4)
    assert torch.equal(function(x, 3), torch.nn.functional.channel_shuffle(x, 3))


@pytest.mark.parametrize("function", OTHERS)
def test_not_known(function):
    assert not is_shuffle(function)


def test_code_that_changes():
    """What was one is none any more."""

    def function(x, groups):
        n, c, h, w = x.size()
        return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)

    assert is_shuffle(function)
    function.__code__ = scaled.__code__
    assert not is_shuffle(function)


class Unit(nn.Module):
    """As ShuffleNetV2's."""

    function = staticmethod(as_torchvisions)

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Conv2d(16, 4, 1)

    def shuffled(self, x):
        return as_torchvisions(x, 2)

    def forward(self, x):
        one, other = x.chunk(2, dim=1)
        out = torch.cat((one, self.branch(other)), dim=1)
        return self.last(self.shuffled(out))


class ByKeyword(Unit):
    def shuffled(self, x):
        return in_one(x, g=2)


class ByDefault(Unit):
    def shuffled(self, x):
        return by_reshape(x, groups=2)


class Torchs(Unit):
    def shuffled(self, x):
        return torch.nn.functional.channel_shuffle(x, 2)


def pair(kind, device):
    return converted_pair(kind, device, channels=16)


@pytest.mark.parametrize("kind", [Unit, ByKeyword, ByDefault, Torchs])
def test_taken(kind, device):
    model, original, x = pair(kind, device)
    assert "braze.nn.functional.channel_shuffle" in [
        e.after for e in braze.convert_report(model).swapped
    ]
    assert_trains_alike(model, original, x)
    y = lambda: model(x).sum().backward()  # noqa: E731
    assert ops_run(y).count("channel_shuffle") == 2
    model.to(memory_format=torch.contiguous_format)
    assert "channel_shuffle" not in ops_run(lambda: model(x.contiguous()))


def test_asked_at_each_call(device, monkeypatch):
    """Another function in its place, or another one of torch's; and who watches torch's calls."""
    model, original, x = pair(Unit, device)
    ran = lambda: "channel_shuffle" in ops_run(lambda: model(x))  # noqa: E731
    assert ran()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "as_torchvisions", lambda x, groups: x)
        assert not ran()
        torch.testing.assert_close(model(x), original(x))
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "torch", types.SimpleNamespace(**vars(torch)))
        assert not ran()
    with replaced(torch, "transpose", lambda *args: torch.swapaxes(*args)):
        assert not ran()
    assert "transpose" in seen_by_a_mode(lambda: model(x))
    assert ran()


def test_saved_compiled_exported(device):
    model, _, x = pair(Unit, device)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert "channel_shuffle" in ops_run(lambda: loaded(x))
    assert torch.equal(loaded(x), model(x))
    y = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
    torch.backends.cudnn.allow_tf32 = False  # export reads the older flag
    program = torch.export.export(model, (x,))
    assert any("channel_shuffle" in str(node.target) for node in program.graph.nodes)
    assert type(braze.unconvert(model)) is Unit
