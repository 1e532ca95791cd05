"""braze.convert: convolutions with a ReLU and no batch norm, in the forms in which networks have
them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as stock
import torch.nn.utils.prune
from convert_common import assert_same, call, seen_by_a_mode
from test_convert_mlp import assert_alike, gradients, pair
from torch import nn

import braze
from braze.convert import blocks
from common import compile
from convert_models import LeNet, ops_run


class Network(nn.Module):
    def input(self):
        return torch.randn(2, 3, 24, 24)


class VGG(Network):
    """The first layers of torchvision's VGG-11."""

    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for width in (8, "M", 16, "M", 24, 24, "M"):
            if width == "M":
                layers += [nn.MaxPool2d(kernel_size=2, stride=2)]
                continue
            conv2d = nn.Conv2d(channels, width, kernel_size=3, padding=1)
            layers += [conv2d, nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(24 * 2 * 2, 16), nn.ReLU(True), nn.Dropout(p=0.0), nn.Linear(16, 5)
        )

    def forward(self, x):
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


class AlexNet(Network):
    """As torchvision's, with fewer filters."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(8, 12, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(12, 10, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(nn.Dropout(p=0.0), nn.Linear(40, 5))

    def forward(self, x):
        x = self.features(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


class Fire(nn.Module):
    """As torchvision's."""

    def __init__(self, inplanes, squeeze_planes, expand1x1_planes, expand3x3_planes):
        super().__init__()
        self.squeeze = nn.Conv2d(inplanes, squeeze_planes, kernel_size=1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeeze_planes, expand1x1_planes, kernel_size=1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeeze_planes, expand3x3_planes, kernel_size=3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.squeeze_activation(self.squeeze(x))
        return torch.cat(
            [
                self.expand1x1_activation(self.expand1x1(x)),
                self.expand3x3_activation(self.expand3x3(x)),
            ],
            1,
        )


class SqueezeNet(Network):
    """As torchvision's, with two of its modules."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=3, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
            Fire(16, 4, 8, 8),
            Fire(16, 4, 8, 8),
        )
        final_conv = nn.Conv2d(16, 5, kernel_size=1)
        self.classifier = nn.Sequential(
            nn.Dropout(p=0.0), final_conv, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))
        )

    def forward(self, x):
        x = self.features(x)
        x = self.classifier(x)
        return torch.flatten(x, 1)


class Functional(Network):
    """Every form of a ReLU, with what hands on its input between the two."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 8, 4)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.conv3 = nn.Conv2d(8, 12, 3, padding="same", padding_mode="reflect")
        self.conv4 = nn.Conv2d(12, 6, (1, 2), dilation=(1, 2))
        self.relu, self.drop = nn.ReLU(), nn.Dropout(0.0)

    def forward(self, x):
        x = stock.relu(self.conv1(x))
        x = self.conv2(x).relu()
        x = torch.relu(self.drop(self.conv3(x)))
        x = self.conv4(x)
        x = stock.relu(x, inplace=True)
        return self.relu(self.conv1(x.expand(-1, 6, -1, -1)[:, :3].repeat(1, 1, 3, 3)))


class Two(Network):
    def __init__(self):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.conv(x))


#: By class, how many convolutions have a ReLU.
MODELS = {VGG: 4, AlexNet: 3, SqueezeNet: 8, Functional: 5, Two: 1}
FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_values_gradients_and_ops(kind, fmt, device, monkeypatch):
    model, original, x = pair(kind, device, fmt)
    fused = [e.after for e in braze.convert_report(model).fused]
    assert fused.count("ConvReLU2d") == MODELS[kind]
    for training in (True, False):
        assert_alike(model.train(training), original.train(training), x)
    monkeypatch.setattr(blocks, "RELU_POOL_ON", ())
    ran = ops_run(lambda: gradients(model, x))
    assert ran.count("conv2d_relu") == ran.count("conv2d_relu_backward") == MODELS[kind]
    assert not {"conv2d", "conv2d_backward", "relu", "relu_", "relu_backward"} & set(ran)
    assert model(x).stride() == original(x).stride()


def test_pooling_stays_an_op_of_its_own(device):
    model = braze.convert(LeNet().to(device).eval())
    ran = ops_run(lambda: model(torch.randn(4, 1, 16, 16, device=device)))
    assert ran[:4] == ["conv2d_relu", "max_pool2d"] * 2


class Pooled(Network):
    """Every kind of pooling behind a ReLU: with a bias and without, of windows that the op has and
    of others."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1, bias=False)
        self.conv3, self.conv4 = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 8, 2)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)

    def forward(self, x):
        x = self.pool(stock.relu(self.conv1(x)))
        x = stock.max_pool2d(torch.relu(self.conv2(x)), (3, 2), stride=2, padding=(1, 0))
        x = stock.max_pool2d(self.relu(self.conv3(x)), 2, ceil_mode=True)
        return stock.max_pool2d(self.conv4(x).relu(), 2, 1)


class Classifier(Network):
    """A network that ends as LeNet and tutorials' do, of a batch smaller and larger than its linear
    layer."""

    def __init__(self, batch=2):
        super().__init__()
        self.batch = batch
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 11 * 11, 8), nn.ReLU(), nn.Linear(8, 4)
        )

    def input(self):
        return torch.randn(self.batch, 3, 24, 24)

    def forward(self, x):
        return self.classifier(self.features(x))


@pytest.fixture
def pools_everywhere(monkeypatch):
    monkeypatch.setattr(blocks, "RELU_POOL_ON", ("cpu", "cuda"))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("kind", [Pooled, AlexNet, SqueezeNet, VGG, Classifier])
def test_pooling_behind_relu(kind, fmt, device, pools_everywhere):
    model, original, x = pair(kind, device, fmt)
    for training in (True, False):
        assert_alike(model.train(training), original.train(training), x)
    ran = ops_run(lambda: gradients(model, x))
    pooled = {Pooled: 3, AlexNet: 1, SqueezeNet: 1, VGG: 3, Classifier: 1}[kind]
    if fmt == torch.contiguous_format:
        pooled = 0
    assert ran.count("relu_max_pool2d") == ran.count("relu_max_pool2d_backward") == pooled
    assert ran.count("conv2d") == ran.count("conv2d_backward") == pooled
    assert not {"relu", "relu_", "relu_backward"} & set(ran)
    if kind is Classifier and pooled:
        assert "transpose_copy" not in ran
    assert model(x).stride() == original(x).stride()


def test_pooling_before_a_smaller_weight(device, pools_everywhere):
    model, original, x = pair(lambda: Classifier(batch=9), device, torch.channels_last)
    assert_alike(model, original, x)
    ran = ops_run(lambda: gradients(model, x))
    assert "relu_max_pool2d" in ran


def test_pooling_under_autocast(device, pools_everywhere):
    model, original, x = pair(Classifier, device, torch.channels_last)
    with torch.autocast(device, torch.bfloat16):
        ran = ops_run(lambda: model(x).sum().backward())
        expected = original(x)
        torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
    assert "relu_max_pool2d_backward" in ran
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_pooling_refuses_as_torch_does(device, pools_everywhere):
    model, original, x = pair(Classifier, device, torch.channels_last)
    for change in (
        lambda m: setattr(m.features[0], "bias", nn.Parameter(torch.zeros(1, device=device))),
        lambda m: setattr(m.features[0], "bias", nn.Parameter(torch.zeros(16).double())),
        lambda m: setattr(m.features[2], "padding", 2),
        lambda m: setattr(m.features[2], "stride", 0),
    ):
        for m in (copy.deepcopy(model), copy.deepcopy(original)):
            change(m)
            with pytest.raises((RuntimeError, ValueError)):
                m(x)


def test_pooling_compiles(device, pools_everywhere):
    model, original, x = pair(Classifier, device, torch.channels_last)
    torch.testing.assert_close(compile(model)(x), original(x), rtol=1e-4, atol=1e-4)


def test_batch_norm_takes_its_convolution(device):
    """A convolution and a ReLU with batch norm between them or behind them."""
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()
    original = nn.Sequential(*layers, nn.BatchNorm2d(4)).to(device)
    model = braze.convert(copy.deepcopy(original))
    fused = [e.after for e in braze.convert_report(model).fused]
    assert fused == ["ConvBnReLU2d", "ConvReLU2d"]
    assert_alike(model, original, torch.randn(2, 3, 9, 9, device=device))


def other_activation(m):
    m.relu = nn.LeakyReLU()


CHANGES = {
    "hook of the convolution": lambda m: m.conv.register_forward_hook(lambda _, args, y: y - 1),
    "hook of the ReLU": lambda m: m.relu.register_forward_pre_hook(lambda _, args: (-args[0],)),
    "backward hook": lambda m: m.relu.register_full_backward_hook(lambda _, g, __: (g[0] * 2,)),
    "forward of the convolution": lambda m: setattr(m.conv, "forward", lambda x: x * 3),
    "method of the convolution": lambda m: setattr(m.conv, "_conv_forward", lambda x, *_: x * 3),
    "forward of the ReLU": lambda m: setattr(m.relu, "forward", lambda x: x * 3),
    "padding_mode": lambda m: setattr(m.conv, "padding_mode", "circular"),
    "settings": lambda m: setattr(m.conv, "stride", (2, 1)),
    "other activation": other_activation,
    "no ReLU": lambda m: setattr(m, "relu", nn.Identity()),
    "no bias": lambda m: setattr(m.conv, "bias", None),
    "no weight": lambda m: setattr(m.conv, "weight", None),
    "parametrization": lambda m: nn.utils.parametrizations.weight_norm(m.conv),
    "pruning": lambda m: torch.nn.utils.prune.l1_unstructured(m.conv, "weight", amount=0.5),
    "float64": lambda m: m.double(),
    "frozen": lambda m: m.conv.weight.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name, device):
    def trained(model):
        own = x.clone().requires_grad_()
        y = model(own)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return y, torch.autograd.grad(y.sum(), [own, *parameters], allow_unused=True)

    model, original, x = pair(Two, device, torch.contiguous_format)
    for m in (model, original):
        CHANGES[name](m)
    x = x.to(next(p for p in original.parameters() if p is not None).dtype)
    for _ in range(2):
        ours, theirs = call(lambda: trained(model)), call(lambda: trained(original))
        if isinstance(theirs[0][0], type):  # raised
            assert ours[0][0] is theirs[0][0]
        else:
            assert_same(ours[0], theirs[0], rtol=1e-4, atol=1e-5)


def test_subclasses_run_their_own_code(device):
    class Doubles(nn.Conv2d):
        def forward(self, input):
            return super().forward(input) * 2

    class Shifts(nn.ReLU):
        def forward(self, input):
            return super().forward(input - 1)

    for layers in ((Doubles(3, 4, 3), nn.ReLU()), (nn.Conv2d(3, 4, 3), Shifts())):
        original = nn.Sequential(*layers).to(device)
        model = braze.convert(copy.deepcopy(original))
        x = torch.randn(2, 3, 8, 8, device=device)
        assert_alike(model, original, x)
        assert "conv2d_relu" not in ops_run(lambda model=model, x=x: model(x))


def test_layers_that_are_looked_at(device):
    """A result between the two that something else reads too."""

    class Looks(Two):
        def forward(self, x):
            y = self.conv(x)
            return stock.relu(y) + y

    model, original, x = pair(Looks, device, torch.contiguous_format)
    assert not braze.convert_report(model).fused
    assert_alike(model, original, x)


def test_where_dropout_drops(device):
    class Drops(Two):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.relu(self.drop(self.conv(x)))

    model, original, x = pair(Drops, device, torch.contiguous_format)
    assert_same(call(model, x), call(original, x))
    assert "conv2d_relu" not in ops_run(lambda: model(x))
    assert_alike(model.eval(), original.eval(), x)
    assert "conv2d_relu" in ops_run(lambda: model(x))


def test_modes_see_torchs_functions(device):
    model, _, x = pair(Two, device, torch.contiguous_format)
    assert {"conv2d", "relu"} <= set(seen_by_a_mode(lambda: model(x)))


def test_replaced_functions_are_called(device, monkeypatch):
    model, _, x = pair(Two, device, torch.contiguous_format)
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda input, *_: input * 0 - 1)
    assert model(x).eq(0).all()


def test_result_changed_in_place(device):
    model, original, x = pair(Two, device, torch.contiguous_format)
    for m in (model, original):
        y = m(x)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (3, 8, 8), (1, 3, 3, 3)], ids=str)
def test_shapes(shape, device):
    model, original, _ = pair(Two, device, torch.contiguous_format)
    x = torch.randn(shape, device=device)
    assert_alike(model, original, x)


def test_bad_input(device):
    model, original, _ = pair(Two, device, torch.contiguous_format)
    for x in (torch.randn(2, 4, 8, 8, device=device), torch.randn(8, device=device), None, [1]):
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            original(x)
        with pytest.raises(theirs.type):
            model(x)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype, fmt, device):
    model, original, x = pair(Two, device, fmt)
    model, original, x = model.to(dtype), original.to(dtype), x.to(dtype)
    assert_alike(model, original, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    model, original, x = pair(VGG, device, torch.channels_last)
    with torch.autocast(device, dtype):
        y, expected = model(x), original(x)
    assert y.dtype == expected.dtype == dtype
    torch.testing.assert_close(y, expected, atol=0.05, rtol=0.05)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_second_derivatives(device):
    model, original, x = pair(AlexNet, device, torch.contiguous_format)

    def penalty(model):
        own = x.double().requires_grad_()
        (grad,) = torch.autograd.grad(model(own).square().sum(), own, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [own, *model.parameters()])

    assert_same(penalty(model.double()), penalty(original.double()))


def test_compile_and_export(device):
    model, original, x = pair(SqueezeNet, device, torch.channels_last)
    torch._dynamo.reset()
    compiled = compile(model)(x)
    assert_same(compiled, original(x))
    grads = torch.autograd.grad(compiled.sum(), list(model.parameters()))
    assert_same(grads, torch.autograd.grad(original(x).sum(), list(original.parameters())))
    torch.backends.cudnn.allow_tf32 = False  # export reads the older flag
    exported = torch.export.export(model, (x,))
    ran = [str(node.target) for node in exported.graph.nodes]
    # On GPUs the one in front of a pooling leaves its ReLU to that.
    made = ("braze.conv2d_relu", "braze.relu_max_pool2d")
    assert sum(name.startswith(made) for name in ran) == MODELS[SqueezeNet]
    torch.testing.assert_close(exported.module()(x), original(x), atol=1e-5, rtol=1e-5)


def test_copies_and_state(device):
    model, original, x = pair(Two, device, torch.contiguous_format)
    assert list(model.state_dict()) == list(original.state_dict())
    assert_alike(copy.deepcopy(model), original, x)
    assert_alike(braze.unconvert(copy.deepcopy(model)), original, x)
    net = braze.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(device))
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(again(x), net(x))
    assert ops_run(lambda: again(x)) == ["conv2d_relu"]


def test_comparison_rejects_a_wrong_model(device):
    model, original, x = pair(Two, device, torch.contiguous_format)
    model.conv.padding = (1, 1)
    original.conv.padding = (1, 0)
    with pytest.raises(AssertionError):
        assert_alike(model, original, x)
