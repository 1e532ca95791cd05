"""braze.convert: batch norm with the addition and the activation behind it, in the blocks of the
networks that people train, written out here."""

import copy

import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_trains_alike
from torch import nn

import braze
from common import assert_by_rule, compile
from convert_models import ops_run


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def conv(cin, cout, size=3, stride=1):
    return nn.Conv2d(cin, cout, size, stride, size // 2, bias=False)


def shortcut(cin, cout, stride):
    return nn.Sequential(conv(cin, cout, 1, stride), nn.BatchNorm2d(cout))


class BasicBlock(nn.Module):
    """As torchvision's."""

    def __init__(self, cin=6, cout=6, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv(cin, cout, stride=stride), nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv(cout, cout), nn.BatchNorm2d(cout)
        self.downsample = shortcut(cin, cout, stride) if stride > 1 or cin != cout else None

    def forward(self, x):
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class Bottleneck(nn.Module):
    """As torchvision's."""

    def __init__(self, cin=6, width=4, stride=1):
        super().__init__()
        cout = width * 2
        self.conv1, self.bn1 = conv(cin, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, stride=stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, cout, 1), nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(cin, cout, stride)

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Functional(nn.Module):
    """As in many repositories for CIFAR."""

    def __init__(self, cin=6, cout=6, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv(cin, cout, stride=stride), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = conv(cout, cout), nn.BatchNorm2d(cout)
        changes = stride > 1 or cin != cout
        self.shortcut = shortcut(cin, cout, stride) if changes else nn.Sequential()

    def forward(self, x):
        out = stock.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = stock.relu(out)
        return out


class OneExpression(Functional):
    def forward(self, x):
        y = self.conv2(stock.relu(self.bn1(self.conv1(x))))
        return torch.relu(self.bn2(y) + self.shortcut(x))


class TheOtherWayRound(Functional):
    def forward(self, x):
        h = self.shortcut(x)
        y = stock.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y = h + y
        return y.relu()


class NoActivation(Functional):
    def forward(self, x):
        h = self.shortcut(x)
        return h + self.bn2(self.conv2(stock.relu(self.bn1(self.conv1(x)))))


class PreActivation(Functional):
    """Batch norm before the convolution."""

    def forward(self, x):
        out = self.conv1(torch.relu(self.bn1(x)))
        out = self.conv2(torch.relu(self.bn2(out)))
        return out


class InvertedResidual(nn.Module):
    """As torchvision's MobileNetV2: the addition is outside of the sequence with the batch norm,
    into which a run reaches."""

    def __init__(self, act=nn.ReLU6):
        super().__init__()
        depthwise = nn.Conv2d(12, 12, 3, 1, 1, groups=12, bias=False)
        self.conv = nn.Sequential(
            nn.Sequential(conv(6, 12, 1), nn.BatchNorm2d(12), act(inplace=True)),
            nn.Sequential(depthwise, nn.BatchNorm2d(12), act(inplace=True)),
            conv(12, 6, 1),
            nn.BatchNorm2d(6),
        )

    def forward(self, x):
        return x + self.conv(x)


class SqueezeExcitation(nn.Module):
    """As torchvision's."""

    def __init__(self, channels):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        self.activation, self.scale_activation = nn.SiLU(inplace=True), nn.Sigmoid()

    def _scale(self, input):
        scale = self.avgpool(input)
        scale = self.fc1(scale)
        scale = self.activation(scale)
        scale = self.fc2(scale)
        return self.scale_activation(scale)

    def forward(self, input):
        scale = self._scale(input)
        return scale * input


class MBConv(nn.Module):
    """As torchvision's EfficientNet, without stochastic depth."""

    def __init__(self):
        super().__init__()
        depthwise = nn.Conv2d(12, 12, 3, 1, 1, groups=12, bias=False)
        self.block = nn.Sequential(
            nn.Sequential(conv(6, 12, 1), nn.BatchNorm2d(12), nn.SiLU(inplace=True)),
            nn.Sequential(depthwise, nn.BatchNorm2d(12), nn.SiLU(inplace=True)),
            SqueezeExcitation(12),
            nn.Sequential(conv(12, 6, 1), nn.BatchNorm2d(6)),
        )

    def forward(self, input):
        result = self.block(input)
        result += input
        return result


class Functions(nn.Module):
    """Batch norm in front of each activation as a function."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(6)

    def forward(self, x):
        x = stock.silu(self.bn(x), inplace=True)
        x = stock.leaky_relu(self.bn(x), 0.3, True)
        x = stock.gelu(self.bn(x), approximate="tanh")
        x = stock.hardtanh(self.bn(x), max_val=0.5)
        x = torch.sigmoid(self.bn(x))
        y = self.bn(x)
        y = y.tanh()
        y = stock.elu(self.bn(y) + x, 0.5)
        return stock.celu(self.bn(y), alpha=2.0)


NORMS = {
    "MobileNetV2": (InvertedResidual, ["BatchNorm2d, Add", *["BatchNorm2d, ReLU6"] * 2]),
    "MobileNetV3": (
        lambda: InvertedResidual(nn.Hardswish),
        ["BatchNorm2d, Add", *["BatchNorm2d, Hardswish"] * 2],
    ),
    "EfficientNet": (MBConv, ["BatchNorm2d, Add", *["BatchNorm2d, SiLU"] * 2]),
    "functions": (
        Functions,
        [
            *("BatchNorm2d, SiLU", "BatchNorm2d, LeakyReLU", "BatchNorm2d, GELU"),
            *("BatchNorm2d, Hardtanh", "BatchNorm2d, Sigmoid", "BatchNorm2d, Tanh"),
            *("BatchNorm2d, Add, ELU", "BatchNorm2d, CELU"),
        ],
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NORMS)
def test_other_activations(device, name, training):
    make, runs = NORMS[name]
    original = make().to(device).train(training)
    model = braze.convert(copy.deepcopy(original))
    report = braze.convert_report(model)
    others = [e for e in report.fused if e.after != "BatchNormAct2d"]
    assert [e.before for e in others] == ["SqueezeExcitation"] * (name == "EfficientNet")
    assert sorted(e.before for e in report.fused if e not in others) == sorted(runs)
    assert report.left_alone == ()
    x = images().to(device)
    assert ops_run(lambda: copy.deepcopy(model)(x)).count("batch_norm_act") == len(runs)
    assert_trains_alike(model, original, x)
    compiled = compile(model.eval())(x)
    assert_by_rule(compiled, model(x), copy.deepcopy(model).double()(x.double()))


NAMES = {
    BasicBlock: ("bn2, add(), relu", "BatchNorm2d, Add, ReLU"),
    Bottleneck: ("bn3, add(), relu", "BatchNorm2d, Add, ReLU"),
    Functional: ("bn2, add(), relu()", "BatchNorm2d, Add, ReLU"),
    OneExpression: ("bn2, add(), relu()", "BatchNorm2d, Add, ReLU"),
    TheOtherWayRound: ("bn2, add(), relu()", "BatchNorm2d, Add, ReLU"),
    NoActivation: ("bn2, add()", "BatchNorm2d, Add"),
    PreActivation: ("bn1, relu()", "BatchNorm2d, ReLU"),
}
BLOCKS = {
    **{kind.__name__: kind for kind in NAMES},
    **{
        f"{kind.__name__}, stride 2": lambda kind=kind: kind(8, 8, 2)
        for kind in NAMES
        if kind is not PreActivation
    },
}


def images(channels=6, fmt=torch.contiguous_format):
    return torch.randn(3, channels, 8, 8).contiguous(memory_format=fmt)


def images_for(name, fmt=torch.contiguous_format):
    """Of 8 channels where a block has strides: limited to AVX2, oneDNN 3.12 writes behind the end
    of a gradient where such 1 x 1 convolutions have 6."""
    return images(8 if "stride" in name else 6, fmt)


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", BLOCKS)
def test_results_and_gradients(device, name, training, fmt):
    original = BLOCKS[name]().to(device).train(training)
    model = braze.convert(copy.deepcopy(original), strict=True)
    x = images_for(name, fmt).to(device)
    ran = ops_run(lambda: copy.deepcopy(model)(x))
    assert ran.count("batch_norm_act") == 1
    assert ran.count("batch_norm") == ("stride" in name or name == "Bottleneck")  # the shortcut's
    assert "relu" not in ran
    for _ in range(2):
        assert_trains_alike(model, original, x)


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_the_report_says_what_a_run_became(kind):
    model = kind()
    before = str(braze.convert_report(model))
    entries = [e for e in braze.convert_report(model).fused if e.after == "BatchNormAct2d"]
    assert [(e.name, e.before) for e in entries] == [NAMES[kind]]
    assert str(braze.convert_report(braze.convert(model))) == before


@pytest.mark.parametrize("name", BLOCKS)
def test_compiles(device, name):
    model = braze.convert(BLOCKS[name]().to(device))
    x = images_for(name).to(device)
    assert_by_rule(compile(model)(x), model(x), copy.deepcopy(model).double()(x.double()))


def test_autocast(device):
    original = BasicBlock(6, 8, 2).to(device)
    model = braze.convert(copy.deepcopy(original))
    x = images().to(device)
    with torch.autocast(device, torch.bfloat16):
        y, expected = model(x), original(x)
    assert_by_rule(y, expected, copy.deepcopy(original).double()(x.double()))


def without_fusion(model, x):
    """That a model, whose run does not hold at present, does what it does without braze."""
    original = braze.unconvert(copy.deepcopy(model))
    assert "batch_norm_act" not in ops_run(lambda: copy.deepcopy(model)(x))
    assert_trains_alike(model, original, x)


@pytest.mark.parametrize("part", ["bn2", "relu", "downsample", "downsample.0", "downsample.1"])
def test_hooks_see_what_they_would_see(part):
    """In the order of the code: batch norm before the shortcut."""
    x, seen = images(), []
    for model in (BasicBlock(6, 8, 2), braze.convert(BasicBlock(6, 8, 2))):
        found = []
        model.get_submodule(part).register_forward_hook(
            lambda *_, model=model, found=found: found.append(model.bn2.num_batches_tracked.item())
        )
        model(x), model(x)
        seen.append(found)
    assert "batch_norm_act" not in ops_run(lambda: model(x))
    assert seen[0] == seen[1][: len(seen[0])]


def test_layers_that_are_replaced():
    x = images(8)
    model = braze.convert(BasicBlock(8, 8, 2))
    model.downsample.append(nn.ReLU(inplace=True))
    without_fusion(model, x)
    model.downsample[2] = nn.Identity()
    assert "batch_norm_act" in ops_run(lambda: model(x))
    model.downsample = nn.Conv2d(8, 8, 1, 2)  # torch's: it may be patched
    without_fusion(model, x)
    model = braze.convert(BasicBlock(8, 8))
    model.downsample = model.bn2  # updated twice, in this order
    without_fusion(model, x)
    model.downsample = None
    assert "batch_norm_act" in ops_run(lambda: model(x))
    model.bn2 = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    without_fusion(model, x)


class InPlaceShortcut(Functional):
    """The shortcut overwrites what batch norm has read before."""

    def __init__(self):
        super().__init__()
        self.shortcut = nn.Sequential(nn.ReLU(inplace=True))

    def forward(self, x):
        out = self.bn2(x)
        out += self.shortcut(x)
        return stock.relu(out)


def test_a_shortcut_that_overwrites_its_input():
    original = InPlaceShortcut()
    model = braze.convert(copy.deepcopy(original))
    x = images()
    with torch.no_grad():
        expected = original(x.clone())
        assert "batch_norm_act" not in ops_run(lambda: copy.deepcopy(model)(x.clone()))
        torch.testing.assert_close(model(x.clone()), expected)


class Promotes(nn.Module):
    """An addition that changes the dtype, or the shape, or fails, each in its own way."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(6)

    def forward(self, x, other, in_place):
        y = self.bn(x)
        if in_place:
            z = self.bn(x)
            z += other
            return torch.relu(z)
        return torch.relu(self.bn(y) + other)


@pytest.mark.parametrize("in_place", [True, False])
def test_additions_by_torchs_rules(in_place):
    original = Promotes()
    model = braze.convert(copy.deepcopy(original))
    x = images()
    for other in (
        torch.randn(3, 6, 8, 8).double(),
        torch.randn(6, 1, 1),
        2,
        torch.tensor(3.0),
        torch.randn(3, 6, 8, 8).contiguous(memory_format=torch.channels_last),
    ):
        y, expected = model(x, other, in_place), original(x, other, in_place)
        assert (y.dtype, y.stride()) == (expected.dtype, expected.stride())
        torch.testing.assert_close(y.float(), expected.float())
    wide = torch.randn(2, 3, 6, 8, 8)
    if in_place:
        for m in (model, original):
            with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
                m(x, wide, in_place)
    else:
        torch.testing.assert_close(model(x, wide, False), original(x, wide, False))


class SeenElsewhere(nn.Module):
    """What batch norm returns is used again, under its own name or another."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(6)

    def forward(self, x):
        out = self.bn(x)
        kept = out
        out += x
        late = self.bn(x)
        y = late + x
        return torch.relu(out), kept, torch.relu(y), late


def test_what_is_seen_elsewhere():
    original = SeenElsewhere()
    model = braze.convert(copy.deepcopy(original))
    x = images()
    assert "batch_norm_act" not in ops_run(lambda: copy.deepcopy(model)(x))
    for a, b in zip(model(x), original(x), strict=True):
        torch.testing.assert_close(a, b)


class OtherStatements(nn.Module):
    """What lies between does more than to compute, or knows the variable."""

    def __init__(self):
        super().__init__()
        self.bn, self.downsample, self.calls = nn.BatchNorm2d(6), None, []

    def forward(self, x):
        identity = x
        out = self.bn(x)
        if self.downsample is None:
            self.calls.append(self.bn.num_batches_tracked.item())
        out += identity
        out = torch.relu(out)
        out = self.bn(out)
        if self.downsample is None:
            identity = out
        out += identity
        return torch.relu(out)


def test_statements_that_do_more():
    original = OtherStatements()
    model = braze.convert(copy.deepcopy(original))
    x = images()
    assert "batch_norm_act" not in ops_run(lambda: model(x))
    original(x)
    torch.testing.assert_close(model(x), original(x))
    assert model.calls == original.calls == [1, 3]


class SetsWhatItAdds(nn.Module):
    """A statement sets the variable that it adds, and another one goes on with it."""

    def __init__(self):
        super().__init__()
        self.bn, self.conv, self.act = nn.BatchNorm2d(6), conv(6, 6), nn.ELU()
        self.norm, self.one = nn.GroupNorm(2, 6), conv(6, 6, 1)


class AddsInput(SetsWhatItAdds):
    def forward(self, x):
        x = x + self.bn(self.norm(x))
        x = self.conv(x)
        return self.act(x) + self.one(x)


class AddsShortcut(SetsWhatItAdds):
    def forward(self, x):
        x = self.act(self.bn(self.norm(x)) + self.one(x))
        x = self.conv(x)
        return x


class AddsBeforeOthers(SetsWhatItAdds):
    def forward(self, x):
        y = self.conv(self.norm(x))
        x = self.bn(y) + self.one(x)
        if self.norm is not None:
            z = self.one(y)
        x = self.act(x)
        return x + z


@pytest.mark.parametrize(
    "kind", [AddsInput, AddsShortcut, AddsBeforeOthers], ids=lambda kind: kind.__name__
)
def test_what_is_added_is_read_before_it_is_set(kind):
    original = kind()
    assert_trains_alike(braze.convert(copy.deepcopy(original)), original, images())


def test_in_a_comprehension():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.shortcut = nn.BatchNorm2d(6), nn.Sequential(conv(6, 6))

        def forward(self, xs):
            first = [torch.relu(self.bn(x) + self.shortcut(x)) for x in xs]
            return [torch.relu(self.bn(x) + y) for x, y in zip(xs, first, strict=True)]

    original = Many()
    model = braze.convert(copy.deepcopy(original))
    xs = [images(), images()]
    for a, b in zip(model(xs), original(xs), strict=True):
        torch.testing.assert_close(a, b)


def test_the_comparison_rejects_a_wrong_block():
    original = BasicBlock()
    wrong = braze.convert(copy.deepcopy(original))
    wrong.bn2.bias.data += 0.1
    with pytest.raises(AssertionError):
        assert_trains_alike(wrong, original, images())
