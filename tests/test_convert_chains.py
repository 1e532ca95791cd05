"""braze.convert across modules whose forward hands its input through children: blocks of networks
that are built of such ones, written out here."""

import copy

import pytest
import torch
from convert_common import assert_trains_alike
from test_convert_parts import NormAct, check_converted, conv, fused, images, ops_run
from torch import nn

import braze
from braze.convert import recognise
from common import compile


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


class ConvNormAct(nn.Module):
    def __init__(self, cin, cout, size=3, act=None, aa=None):
        super().__init__()
        self.conv, self.bn, self.aa = conv(cin, cout, size), NormAct(cout, act), aa

    def forward(self, x):
        x = self.conv(x)
        x = self.bn(x)
        aa = getattr(self, "aa", None)
        if aa is not None:
            x = self.aa(x)
        return x


class ConvNorm(nn.Module):
    def __init__(self, cin, cout, size=3, norm=True):
        super().__init__()
        self.c, self.norm = conv(cin, cout, size), nn.BatchNorm2d(cout) if norm else None

    def forward(self, input):
        y = self.c(input)
        if self.norm is None:
            return y
        return self.norm(y)


class Nested(nn.Module):
    """Chains of one expression, of which one ends in a branch that leads nowhere."""

    def __init__(self, cin, cout, size=3):
        super().__init__()
        self.inner, self.drop, self.more = ConvNormAct(cin, cout, size), nn.Dropout(0.0), None

    def forward(self, x):
        if not self.more is None:  # noqa: E714
            x = self.more(x)
        return self.drop(self.inner(x))


class Bottleneck(nn.Module):
    def __init__(self, kind=ConvNormAct, shortcut=True):
        super().__init__()
        self.conv1 = ConvNormAct(6, 8, 1, nn.ReLU(inplace=True))
        self.conv2, self.drop_path = kind(8, 8), nn.Identity()
        self.downsample = kind(6, 8, 1) if shortcut else conv(6, 8, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        shortcut = x
        x = self.conv1(x)
        x = self.conv2(x)
        if self.downsample is not None:
            x = self.drop_path(x) + self.downsample(shortcut)
        x = self.act(x)
        return x


class Branches(nn.Module):
    """As RepVGG's while it trains."""

    def __init__(self, identity=True):
        super().__init__()
        self.identity = nn.BatchNorm2d(6) if identity else None
        self.kxk, self.one, self.act = ConvNormAct(6, 6), ConvNormAct(6, 6, 1), nn.SiLU()

    def forward(self, x):
        if self.identity is None:
            x = self.one(x) + self.kxk(x)
        else:
            identity = self.identity(x)
            x = self.one(x) + self.kxk(x)
            x += identity
        return self.act(x)


class Separable(nn.Module):
    """Two convolutions without anything in between."""

    def __init__(self, cin, cout):
        super().__init__()
        self.deep, self.wide = conv(cin, cin, groups=cin), conv(cin, cout, 1)

    def forward(self, x):
        x = self.deep(x)
        x = self.wide(x)
        return x


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool = ConvNormAct(6, 8, act=nn.ReLU()), nn.MaxPool2d(2)
        self.separable, self.bn, self.act = Separable(8, 6), nn.BatchNorm2d(6), nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.separable(self.pool(self.conv(x)))))


MODELS = {
    "bottleneck": (Bottleneck, ["ConvBnReLU2d", "BatchNormAct2d"]),
    "other chains": (lambda: Bottleneck(ConvNorm), ["ConvBnReLU2d"]),
    "nested": (lambda: Bottleneck(Nested), ["ConvBnReLU2d", "BatchNormAct2d"]),
    "a convolution beside": (
        lambda: Bottleneck(shortcut=False),
        ["ConvBnReLU2d", "BatchNormAct2d"],
    ),
    "branches": (Branches, ["BatchNormAct2d"]),
    "two branches": (lambda: Branches(identity=False), ["BatchNormAct2d"]),
    "stem": (Stem, ["ConvBnReLUMaxPool2d", "ConvBnReLU2d"]),
    "sequence": (
        lambda: nn.Sequential(ConvNormAct(6, 8), nn.SiLU(), Separable(8, 8), nn.BatchNorm2d(8)),
        ["BatchNormAct2d"],
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_and_report(device, name, training):
    make, expected = MODELS[name]
    check_converted(make().to(device).train(training), expected, images().to(device))


@pytest.mark.parametrize("name", ["bottleneck", "two branches", "stem"])
def test_compiles(device, name):
    model = braze.convert(MODELS[name][0]().to(device).eval())
    x = images().to(device)
    torch.testing.assert_close(compile(model)(x), model(x))


def names(model):
    return [e.name for e in braze.convert_report(model).fused]


def test_the_report_names_what_computes():
    assert names(Bottleneck()) == [
        "conv2.bn, add(), act",
        "conv1.conv, conv1.bn, conv1.bn.act",
    ]
    assert names(Branches()) == ["one.bn, add()"]
    assert names(Stem()) == [
        "conv.conv, conv.bn, conv.bn.act, pool",
        "separable.wide, bn, act",
    ]


# What changes after the conversion.


def without_fusion(model, x, runs=0):
    assert ops_run(lambda: model(x)).count("batch_norm_act") == runs  # of a copy others are found
    original = braze.unconvert(copy.deepcopy(model))
    assert_trains_alike(model, original, x)


def test_what_changes():
    x, model = images(), braze.convert(Bottleneck())
    without_fusion(model, x, 1)
    model.conv2.aa = nn.AvgPool2d(3, 1, 1)
    without_fusion(model, x)
    del model.conv2.aa  # the code asks for it with a default
    without_fusion(model, x, 1)
    model.downsample.bn.act = braze.nn.ReLU(inplace=True)
    without_fusion(model, x, 1)  # its own is part of conv_bn_relu2d
    model.downsample = nn.Sequential(nn.ReLU(inplace=True), conv(6, 8))  # overwrites its input
    with torch.no_grad():
        assert "batch_norm_act" not in ops_run(lambda: model(x.clone()))
    model.downsample = conv(6, 8)
    without_fusion(model, x)  # torch's may be patched
    braze.convert(model)
    without_fusion(model, x, 1)
    model.conv2.forward = torch.tanh
    expected = torch.relu(torch.tanh(model.conv1(x)) + model.downsample(x))
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    "part",
    ["conv2", "conv2.conv", "conv2.bn", "conv2.bn.act", "downsample", "downsample.conv", "act"],
)
def test_hooks_see_what_they_would_see(part):
    """In the order of the code: the batch norm before the shortcut."""
    x, seen = images(), []
    for model in (Bottleneck(), braze.convert(Bottleneck())):
        found = []

        def look(*_, model=model, found=found):
            found.append((model.conv2.bn.num_batches_tracked.item(),
                          model.downsample.bn.num_batches_tracked.item()))  # fmt: skip

        model.get_submodule(part).register_forward_hook(look)
        model(x), model(x)
        seen.append(found)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2


def test_exceptions_find_the_model_as_it_was():
    counted = []
    for convert in (False, True):
        model = Bottleneck()
        if convert:
            braze.convert(model)
        for shortcut in (conv(6, 7), conv(5, 8)):  # cannot be added; cannot be computed
            model.downsample = braze.convert(shortcut) if convert else shortcut
            with pytest.raises(RuntimeError):
                model(images())
        counted.append([b.item() for n, b in model.named_buffers() if "batches" in n])
    assert counted[0] == counted[1] == [2, 2]


# What is not taken for what it seems.


class Printing(ConvNorm):
    def forward(self, x):
        x = self.c(x)
        print("between")
        return self.norm(x)


class Reused(ConvNorm):
    def forward(self, x):
        y = self.c(x)
        y = self.norm(x)
        return y


class Clobbered(ConvNormAct):
    def forward(self, x):
        x = self.conv(x)
        x = getattr(self, "aa", None)
        if x is not None:
            x = self.aa(x)
        return x


class ByTheInput(ConvNormAct):
    def forward(self, x):
        if x is not None:
            x = self.conv(x)
        return self.bn(x)


class Guarded(ConvNormAct):
    def forward(self, x):
        try:
            return self.bn(self.conv(x))
        except RuntimeError:
            return x


@pytest.mark.parametrize("kind", [Printing, Reused, Clobbered, ByTheInput, Guarded])
def test_classes_that_only_seem_to(kind):
    assert recognise.part_of(kind) is None


def test_the_comparison_rejects_another_order():
    original = Bottleneck()
    wrong = braze.convert(copy.deepcopy(original))
    wrong.conv2.bn.weight.data *= 1.1
    with pytest.raises(AssertionError):
        assert_trains_alike(wrong, original, images())
    assert fused(wrong)
