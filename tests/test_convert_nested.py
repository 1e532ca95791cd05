"""braze.convert through Sequentials within others, and in forwards."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from convert_common import assert_trains_alike, replaced
from torch import nn

import braze
from braze.convert import recognise
from common import assert_by_rule, compile
from convert_models import ops_run

POOLED, BLOCK, ACT = "ConvBnReLUMaxPool2d", "ConvBnReLU2d", "BatchNormAct2d"


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def conv(cin=4, cout=4, size=3, **settings):
    return nn.Conv2d(cin, cout, size, padding=size // 2, bias=False, **settings)


def layers(cin=4, cout=4):
    return [conv(cin, cout), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)]


def block(cin=4, cout=4):
    return nn.Sequential(*layers(cin, cout))


class Plain(nn.Sequential):
    """A subclass that does what torch's does."""

    def __init__(self):
        super().__init__(*layers())
        self.out_channels = 4


class Residual(nn.Module):
    def __init__(self, *children):
        super().__init__()
        self.layers = nn.Sequential(*children)

    def forward(self, x):
        return x + self.layers(x)


class Pooled(nn.Module):
    """A Sequential in a forward, followed by pooling as a layer."""

    def __init__(self):
        super().__init__()
        self.block, self.pool = block(), nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.block(x))


class PooledByFunction(Pooled):
    def forward(self, x):
        x = self.block(x)
        return F.max_pool2d(x, 2)


class Stem(nn.Module):
    """timm's deep stems end in a convolution, behind which the network has its batch norm."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Sequential(*layers(), *layers(), conv())
        self.bn1, self.act1, self.pool = nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.act1(x)
        x = self.pool(x)
        return x


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.pool = nn.ModuleList([block(), block()]), nn.MaxPool2d(2)
        self.layers = nn.ModuleList([block(), nn.MaxPool2d(2)])

    def forward(self, x):
        for block in self.blocks:
            x = self.pool(block(x))
        for layer in self.layers:
            x = layer(x)
        return x


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(*layers(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class Shortcut(nn.Module):
    """The addition behind one Sequential, of what another one makes."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(block(), conv(), nn.BatchNorm2d(4))
        self.shortcut, self.act = nn.Sequential(conv(size=1), nn.BatchNorm2d(4)), nn.ReLU(True)

    def forward(self, x):
        return self.act(self.block(x) + self.shortcut(x))


def resnet9():
    return nn.Sequential(
        *(block(), block(), nn.MaxPool2d(2), Residual(block(), block())),
        *(block(4, 6), nn.MaxPool2d(2), block(6, 8), nn.MaxPool2d(2), Residual(block(8, 8))),
        *(nn.Flatten(), nn.Linear(8, 10)),
    )


def named():
    inner = nn.Sequential()
    inner.add_module("conv", conv())
    inner.add_module("norm", nn.BatchNorm2d(4))
    outer = nn.Sequential()
    outer.add_module("inner", inner)
    outer.add_module("act", nn.ReLU())
    outer.add_module("pool", nn.MaxPool2d(2))
    return outer


#: Models, and the names and the kind of each fused run.
MODELS = {
    "ResNet-9": (
        resnet9,
        {
            "1.0, 1.1, 1.2, 2": POOLED,
            "4.0, 4.1, 4.2, 5": POOLED,
            "6.0, 6.1, 6.2, 7": POOLED,
            "0.0, 0.1, 0.2": BLOCK,
            "3.layers.0.0, 3.layers.0.1, 3.layers.0.2": BLOCK,
            "3.layers.1.0, 3.layers.1.1, 3.layers.1.2": BLOCK,
            "8.layers.0.0, 8.layers.0.1, 8.layers.0.2": BLOCK,
        },
    ),
    "at any depth": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Sequential(nn.Sequential(conv()), nn.BatchNorm2d(4)), nn.ReLU()),
            nn.Sequential(nn.Sequential(nn.Sequential(nn.MaxPool2d(2)))),
        ),
        {"0.0.0.0, 0.0.1, 0.1, 1.0.0.0": POOLED},
    ),
    "begins behind others": (
        lambda: nn.Sequential(nn.Sequential(*layers(), *layers()), nn.MaxPool2d(2)),
        {"0.0, 0.1, 0.2": BLOCK, "0.3, 0.4, 0.5, 1": POOLED},
    ),
    "ends before others": (
        lambda: nn.Sequential(conv(), nn.Sequential(*layers()[1:], nn.MaxPool2d(2), *layers())),
        {"0, 1.0, 1.1, 1.2": POOLED, "1.3, 1.4, 1.5": BLOCK},
    ),
    "two in a chain": (
        lambda: nn.Sequential(
            nn.Sequential(conv()),
            nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), conv()),
            nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        ),
        {"0.0, 1.0, 1.1": BLOCK, "1.2, 2.0, 2.1, 2.2": POOLED},
    ),
    "behind what is a program": (
        lambda: nn.Sequential(nn.MaxPool2d(1), conv(), nn.Sequential(*layers()[1:])),
        {"1, 2.0, 2.1": BLOCK},
    ),
    "with what computes nothing": (
        lambda: nn.Sequential(
            nn.Sequential(conv(), nn.Sequential(), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU()),
            *(nn.Sequential(nn.Identity()), nn.Dropout(0.0), nn.MaxPool2d(2)),
        ),
        {"0.0, 0.2, 0.4, 3": POOLED},
    ),
    "a subclass": (
        lambda: nn.Sequential(Plain(), nn.MaxPool2d(2)),
        {"0.0, 0.1, 0.2, 1": POOLED},
    ),
    "braze's": (
        lambda: nn.Sequential(braze.nn.Sequential(*layers()), nn.MaxPool2d(2)),
        {"0.0, 0.1, 0.2, 1": POOLED},
    ),
    "named": (named, {"inner.conv, inner.norm, act, pool": POOLED}),
    "linear": (
        lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(256, 4)), nn.ReLU()),
        {"1.0, 2": "LinearReLU"},
    ),
    "pooled": (Pooled, {"block.0, block.1, block.2, pool": POOLED}),
    "pooled by a function": (
        PooledByFunction,
        {"block.0, block.1, block.2, max_pool2d()": POOLED},
    ),
    "stem": (
        Stem,
        {
            "conv1.0, conv1.1, conv1.2": BLOCK,
            "conv1.3, conv1.4, conv1.5": BLOCK,
            "conv1.6, bn1, act1, pool": POOLED,
        },
    ),
    "loops": (
        Loop,
        {
            "blocks.0.0, blocks.0.1, blocks.0.2, pool": POOLED,
            "blocks.1.0, blocks.1.1, blocks.1.2, pool": POOLED,
            "layers.0.0, layers.0.1, layers.0.2, layers.1": POOLED,
        },
    ),
    "classifier": (
        Classifier,
        {
            "features.0, features.1, features.2, features.3": POOLED,
            "classifier.0, classifier.1": "LinearReLU",
        },
    ),
    "shortcut": (
        Shortcut,
        {"block.0.0, block.0.1, block.0.2": BLOCK, "block.2, add(), act": ACT},
    ),
    "residual": (lambda: Residual(conv(), nn.BatchNorm2d(4)), {"layers.1, add()": ACT}),
}
OPS = {POOLED: "conv_bn_relu2d", BLOCK: "conv_bn_relu2d", ACT: "batch_norm_act"}


def images(n=3, dtype=torch.float32):
    return torch.randn(n, 4, 8, 8).to(dtype)


def fused(model):
    return {e.name: e.after for e in braze.convert_report(model).fused}


def ran(model, x=None):
    """The ops that a copy's call runs."""
    x = images() if x is None else x
    return ops_run(lambda: copy.deepcopy(model)(x))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_and_report(device, name, training):
    make, expected = MODELS[name]
    original = make().to(device).train(training)
    keys, x = list(original.state_dict()), images().to(device)
    report = str(braze.convert_report(original))
    assert fused(original) == expected
    assert len(braze.convert_report(original).fused) == len(expected)
    model = braze.convert(copy.deepcopy(original))
    assert str(braze.convert_report(model)) == report
    assert list(model.state_dict()) == keys
    for _ in range(4):  # op by op, and as programs
        assert_trains_alike(model, original, x)
    for what in set(OPS.values()):
        count = sum(OPS.get(kind) == what for kind in expected.values())
        assert sum(op.startswith(what) for op in ran(model, x)) == count
    if POOLED in expected.values() and name != "stem":
        assert "max_pool2d" not in ran(model, x)[1:] or device == "cuda"
    again = pickle.loads(pickle.dumps(model))
    assert str(braze.convert_report(again)) == report
    assert ran(again, x) == ran(model, x)
    assert_trains_alike(again, original, x)
    back = braze.unconvert(again)
    kinds = [getattr(nn, type(m).__name__, type(m)) for m in original.modules()]
    assert [getattr(nn, type(m).__name__, type(m)) for m in back.modules()] == kinds
    assert not any(hasattr(m, "_class_before_convert") for m in back.modules())
    assert_trains_alike(back, original, x)


@pytest.mark.parametrize("name", ["at any depth", "ends before others", "stem", "shortcut"])
def test_compiles_and_exports(device, name):
    original = MODELS[name][0]().to(device).eval()
    model, x = braze.convert(copy.deepcopy(original)), images().to(device)
    wide = copy.deepcopy(original).double()(x.double())
    assert_by_rule(compile(model)(x), original(x), wide)
    # It reads a legacy flag, which torch refuses while the newer ones differ.
    torch.backends.cudnn.allow_tf32 = False
    exported = torch.export.export(model, (x,))
    assert_by_rule(exported.module()(x), original(x), wide)
    assert sum("braze.conv_bn_relu" in str(n.target) for n in exported.graph.nodes) > 0


def test_second_derivatives(device):
    original = nn.Sequential(block(), nn.MaxPool2d(2)).to(device).double()
    model = braze.convert(copy.deepcopy(original))
    x = images(dtype=torch.float64).to(device)
    found = []
    for m in (model, original):
        y = x.clone().requires_grad_()
        for _ in range(3):
            (first,) = torch.autograd.grad(m(y * 1).pow(2).sum(), y, create_graph=True)
            found.append(torch.autograd.grad(first.pow(2).sum(), [y, *m.parameters()]))
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_parts_by_themselves():
    original = nn.Sequential(nn.Sequential(*layers(), *layers()), nn.MaxPool2d(2))
    model, x = braze.convert(copy.deepcopy(original)), images()
    for take in (lambda m: m[0], lambda m: m[0][3:], lambda m: m[:1], lambda m: m[0][3]):
        assert_trains_alike(take(model), take(original), x)
    assert ran(model[0]).count("conv_bn_relu2d") == 2
    assert ran(model[0][3:]).count("conv_bn_relu2d") == 1
    assert list(map(type, original)) == [nn.Sequential, nn.MaxPool2d]
    assert isinstance(model[0], nn.Sequential)


def without_fusion(model, x):
    """That a model does what it does without braze."""
    assert_trains_alike(model, braze.unconvert(copy.deepcopy(model)), x)


# What changes after the conversion.


def test_changes_of_the_layers():
    for make in (lambda: nn.Sequential(nn.Sequential(*layers()), nn.MaxPool2d(2)), Pooled):
        model, x = braze.convert(make()), images()
        inner = model[0] if isinstance(model, nn.Sequential) else model.block
        changes = [
            lambda m: m.append(nn.Tanh()),
            lambda m: m.append(nn.Dropout2d(0.5)),
            lambda m: m.insert(0, nn.MaxPool2d(1)),
            lambda m: m.pop(0),
            lambda m: m.__delitem__(-1),
            lambda m: m.__setitem__(-1, nn.LeakyReLU()),
            lambda m: m.extend([conv(), braze.nn.BatchNorm2d(4), braze.nn.ReLU()]),
            lambda m: m.eval(),
            lambda m: m.append(nn.Sequential(nn.Identity(), nn.Sequential())),
            lambda m: m.append(nn.Sequential(nn.Softplus())),
            lambda m: setattr(m, "1", nn.Identity()),
        ]
        for change in changes:
            change(inner)
            without_fusion(model, x)
        while len(inner):
            inner.pop(0)
        without_fusion(model, x)


def test_what_is_appended_runs_in_the_run():
    model = braze.convert(nn.Sequential(block(), nn.MaxPool2d(2), nn.Sequential(conv())))
    model.append(nn.MaxPool2d(2))
    braze.convert(model[3])
    assert ran(model) == ["conv_bn_relu2d", "conv2d", "max_pool2d"]
    model[2].extend([braze.nn.BatchNorm2d(4), braze.nn.ReLU()])
    assert ran(model) == ["conv_bn_relu2d"] * 2
    without_fusion(model, images())


def watch(model, seen):
    """Hooks that note who is called, and change what is handed on."""
    model.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.register_forward_hook(lambda module, args, y: seen.append("forward") or y * 2)
    model.register_full_backward_hook(lambda *_: seen.append("backward"))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", ["pooled", "at any depth", "ends before others"])
def test_hooks(name, before):
    """On the inner Sequentials and on every layer; those that are there at conversion are also left
    out of the report."""
    plain, x = MODELS[name][0](), images()
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # which backward hooks do not go with
    expected = fused(plain)
    for part in [n for n, _ in plain.named_modules()]:
        found = []
        for converted in (True, False):
            model, seen = copy.deepcopy(plain), []
            if before:
                watch(model.get_submodule(part), seen)
            if converted:
                braze.convert(model)
                through = [n for n in expected if before and part and f"{part}." in f"{n}."]
                assert not through or fused(model) != expected
            if not before:
                watch(model.get_submodule(part), seen)
            y = model(x * 1)
            gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()))
            found.append((seen, y, gradients, list(model.buffers())))
        assert found[0][0] == found[1][0] == ["pre", "forward", "backward"]
        torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-4, atol=1e-4)


class Other(nn.Module):
    """No layer that is known."""

    def forward(self, x):
        return x + 1


def test_hooks_behind_other_modules():
    """Where a longer stretch gives way, what comes behind is still looked for in its place."""
    torch.manual_seed(0)
    groups = [[Other(), *layers()], layers(), [*layers(), Other()], layers(), layers()]
    original = nn.Sequential(*(layer for group in groups for layer in group)).eval()
    converted = braze.convert(copy.deepcopy(original))
    x = torch.randn(2, 4, 6, 6)
    for model in (original, converted):
        model[5].register_forward_hook(lambda module, args, output: output * 2)
    with torch.no_grad():
        ran = []
        found = [converted(x) for _ in range(3)]
        for i, layer in enumerate(converted):
            layer.register_forward_pre_hook(lambda module, args, i=i: ran.append(i))
        found.append(converted(x))
        expected = original(x)
    for actual in found:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert ran == list(range(len(converted)))


def test_hooks_can_be_missed():
    """The comparison above rejects a run that goes past a hook."""
    model, seen = braze.convert(Pooled()), []
    watch(model.block, seen)
    model.block._forward_hooks, hooks = {}, model.block._forward_hooks
    model.eval()(images())
    model.block._forward_hooks = hooks
    assert seen == ["pre"]


def test_hooks_of_all_modules():
    model, seen = braze.convert(resnet9()), []
    hook = nn.modules.module.register_module_forward_pre_hook(lambda m, _: seen.append(m))
    try:
        model(images())
    finally:
        hook.remove()
    assert seen == list(model.modules())


@pytest.mark.parametrize("name", ["pooled", "begins behind others"])
def test_forwards_of_instances(name):
    plain, x = MODELS[name][0](), images()
    model = braze.convert(copy.deepcopy(plain).eval())
    for method in ("forward", "_call_impl"):
        inner = model.block if name == "pooled" else model[0]
        before = model(x)
        setattr(inner, method, lambda y: torch.zeros_like(y))
        assert not model(x).any()
        delattr(inner, method)
        assert torch.equal(model(x), before)


def doubled(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def test_forwards_of_classes():
    original = nn.Sequential(Plain(), nn.MaxPool2d(2), block(), nn.MaxPool2d(2)).eval().double()
    model, x = braze.convert(copy.deepcopy(original)), images(dtype=torch.float64)
    expected = original(x)
    places = [(Plain, "forward"), (nn.Sequential, "forward"), (nn.Module, "__call__")]
    for owner, name in [*places, (nn.Module, "_call_impl"), (nn.Sequential, "__call__")]:
        with replaced(owner, name, doubled(getattr(owner, name))):
            torch.testing.assert_close(model(x), original(x))
            assert not torch.allclose(model(x), expected)
    with replaced(nn.Sequential, "__iter__", lambda self: iter([*self._modules.values()][::-1])):
        assert not torch.allclose(original(x), expected)
        torch.testing.assert_close(model(x), original(x))
    for inner in (model[0], model[2]):
        with replaced(type(inner), "forward", lambda self, x: x[:, :, 1:]):
            assert model(x).shape != expected.shape
    torch.testing.assert_close(model(x), expected)


def test_the_inner_class_of_one_that_is_replaced():
    """The class that a converted Sequential has, changed."""
    model, x = braze.convert(nn.Sequential(Plain(), nn.MaxPool2d(2))).eval(), images()
    before = model(x)
    with replaced(type(model[0]), "forward", lambda self, x: x):
        torch.testing.assert_close(model(x), F.max_pool2d(x, 2))
    with replaced(type(model[0]), "__call__", lambda self, x: x):
        torch.testing.assert_close(model(x), F.max_pool2d(x, 2))
    assert torch.equal(model(x), before)


# What is not gone through.


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


class Backwards(nn.Sequential):
    def __iter__(self):
        return iter([*self._modules.values()][::-1])


class OwnCall(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x) * 2


class OwnLookUp(nn.Sequential):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


NOT_TAKEN = [OwnForward, Backwards, OwnCall, OwnLookUp]


@pytest.mark.parametrize("kind", NOT_TAKEN, ids=lambda kind: kind.__name__)
def test_sequentials_that_only_seem_to(kind):
    assert recognise.part_of(kind) is None
    original = nn.Sequential(kind(*layers()), nn.MaxPool2d(2))
    model = braze.convert(copy.deepcopy(original))
    assert POOLED not in fused(model).values()
    assert_trains_alike(model, original, images())


def test_one_that_is_used_twice():
    shared = block()
    original = nn.Sequential(shared, nn.MaxPool2d(2), shared, nn.MaxPool2d(2))
    model = braze.convert(copy.deepcopy(original))
    assert not fused(model)
    assert_trains_alike(model, original, images())
    model = braze.convert(nn.Sequential(block(), nn.MaxPool2d(2), nn.Tanh(), nn.MaxPool2d(2)))
    model[2] = model[0]
    without_fusion(model, images())


def test_one_that_holds_itself():
    class Net(Pooled):
        def __init__(self):
            super().__init__()
            self.loop = nn.Sequential(block())
            self.loop.append(self.loop)

    original = Net()
    model = braze.convert(copy.deepcopy(original))
    assert fused(model)["block.0, block.1, block.2, pool"] == POOLED
    torch.testing.assert_close(model(images(1) * 0), original(images(1) * 0))
    with pytest.raises(RecursionError):
        model.loop(images())


def test_long_ones():
    """They run by themselves, and what follows by itself."""
    original = nn.Sequential(nn.Sequential(*(layer for _ in range(6) for layer in layers())))
    original.append(nn.MaxPool2d(2))
    model = braze.convert(copy.deepcopy(original))
    assert list(fused(model).values()) == [BLOCK] * 6
    assert_trains_alike(model.double(), original.double(), images().double())


def test_settings_that_no_run_has():
    strange = nn.Sequential(conv(padding_mode="reflect"), *layers()[1:])
    original = nn.Sequential(strange, nn.MaxPool2d(2), nn.MaxPool2d(2, return_indices=True))
    model = braze.convert(copy.deepcopy(original))
    assert not fused(model).keys() & {"0.0, 0.1, 0.2, 1"}
    for ours, theirs in zip(model(images()), original(images()), strict=True):
        assert ours.shape == theirs.shape


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_inside(p):
    """Where it drops, the parts run as they did."""
    original = nn.Sequential(nn.Sequential(*layers(), nn.Dropout(p)), nn.MaxPool2d(2))
    model, x = braze.convert(copy.deepcopy(original)), images()
    for training in (True, False):
        assert_trains_alike(model.train(training), original.train(training), x)
        assert "conv_bn_relu2d" in ran(model)
    assert (POOLED in fused(model).values()) is (p == 0)


# Order and effects.


class Changing(nn.Module):
    """Changes what comes behind it, while it runs."""

    def __init__(self, change):
        super().__init__()
        self.change = [change]

    def forward(self, x):
        self.change[0]()
        return x


CHANGES = {
    "a hook": lambda inner: inner.register_forward_hook(lambda m, args, y: y * 2),
    "another layer": lambda inner: inner.append(nn.Tanh()),
    "fewer": lambda inner: inner.pop(-1),
    "evaluation": lambda inner: inner.eval(),
    "a forward": lambda inner: setattr(inner, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_while_it_runs(name):
    x, results = images(), []
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Identity(), block(), nn.MaxPool2d(2), block(), nn.MaxPool2d(2))
    for converted in (True, False):
        model = copy.deepcopy(plain)
        if converted:
            braze.convert(model)
        model[0] = Changing(lambda inner=model[3]: CHANGES[name](inner))
        results.append((model(x), list(model.buffers())))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


class InPlaceFirst(nn.Module):
    """What the addition adds is made of what the first layer has overwritten."""

    def __init__(self, nested=True):
        super().__init__()
        chain = [nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(4)]
        self.block = nn.Sequential(nn.Sequential(*chain)) if nested else None
        self.act, self.conv, self.bn = chain
        self.shortcut = conv(size=1)

    def forward(self, x):
        x = x * 1
        return self.block(x) + self.shortcut(x)


class InPlaceFirstFlat(InPlaceFirst):
    def __init__(self):
        super().__init__(nested=False)

    def forward(self, x):
        x = x * 1
        y = self.act(x)
        y = self.conv(y)
        y = self.bn(y)
        if self.shortcut is not None:
            x = self.shortcut(x)
        y += x
        return y


class InPlaceFirstFunction(InPlaceFirstFlat):
    def forward(self, x):
        x = x * 1
        return self.bn(self.conv(F.relu(x, inplace=True))) + self.shortcut(x)


class NotInPlace(InPlaceFirstFlat):
    def forward(self, x):
        return self.bn(self.conv(F.relu(x))) + self.shortcut(x)


def test_what_is_overwritten_before_an_addition():
    for make in (InPlaceFirst, InPlaceFirstFlat, InPlaceFirstFunction, NotInPlace):
        original = make()
        if make is InPlaceFirst:
            del original.act, original.conv, original.bn
        model = braze.convert(copy.deepcopy(original))
        assert_trains_alike(model, original, images())
        assert ("batch_norm_act" in ran(model)) is (make is NotInPlace)


def test_exceptions_leave_what_was_done():
    class Raising(nn.Module):
        def forward(self, x):
            raise ValueError("mine")

    for last in (Raising(), conv(3, 4)):
        original = nn.Sequential(nn.Sequential(*layers(), conv()), nn.BatchNorm2d(4), nn.ReLU())
        original.append(nn.Sequential(last))
        model, found = braze.convert(copy.deepcopy(original)), []
        for m in (model, original):
            for _ in range(2):
                with pytest.raises((RuntimeError, ValueError)) as error:
                    m(images())
            found.append((type(error.value), [b.item() for b in m.buffers() if b.dim() == 0]))
        assert found[0] == found[1] == (found[0][0], [2, 2])
    model = braze.convert(nn.Sequential(block(), nn.MaxPool2d(2)))
    for x in (torch.randn(2, 3, 8, 8), torch.randn(8, 8), "text"):
        found = []
        for m in (model, braze.unconvert(copy.deepcopy(model))):
            with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
                m(x)
            found.append(type(error.value))
        assert found[0] is found[1]


def test_a_child_that_is_none():
    model = braze.convert(nn.Sequential(block(), nn.MaxPool2d(2)))
    model[0].register_module("3", None)
    with pytest.raises(TypeError, match="NoneType"):
        model(images())


def test_tracers_see_the_modules():
    model, x = braze.convert(nn.Sequential(block(), nn.MaxPool2d(2))).eval(), images()

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return type(module).__module__.startswith("braze.") or super().is_leaf_module(
                module, name
            )

    graph = Tracer().trace(model)
    targets = [n.target for n in graph.nodes if n.op == "call_module"]
    assert targets == ["0.0", "0.1", "0.2", "1"]
    torch.testing.assert_close(torch.fx.GraphModule(model, graph)(x), model(x))
    traced = torch.jit.trace(model, x)
    assert "braze::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), model(x))


def test_pickles_without_the_model():
    """Loaded where no model has been converted before: by another class of the same name."""
    model, x = braze.convert(Pooled().eval()), images()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(x), model(x))
    assert ran(again) == ["conv_bn_relu2d"]
