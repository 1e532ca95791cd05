"""Group norms and layer norms of images in converted forwards: with an activation, and in front of
convolutions."""

import copy

import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_trains_alike, converted_pair, replaced, seen_by_a_mode
from test_weight_standardization import Scaled
from torch import nn

import braze
from common import assert_by_rule
from convert_models import ops_run

pytestmark = pytest.mark.usefixtures("own_norms")


class Layers(nn.Module):
    """Convolutions, group norms and activations, as diffusion models' blocks have them."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, 8), nn.Conv2d(8, 16, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3, padding=1)
        self.act = nn.SiLU()

    def forward(self, x):
        h = self.norm1(x)
        h = self.act(h)
        h = self.conv1(h)
        return x + self.conv2(stock.relu(self.norm2(h)))


class BetweenBranches(Layers):
    """As diffusers' ResnetBlock2D: between norm and convolution something else may happen."""

    def __init__(self):
        super().__init__()
        self.upsample, self.downsample, self.dropout = None, None, nn.Dropout(0.0)

    def forward(self, input):
        h = input
        h = self.norm1(h)
        h = self.act(h)
        if self.upsample is not None:
            if h.shape[0] >= 64:
                h = h.contiguous()
            input = self.upsample(input)
            h = self.upsample(h)
        elif self.downsample is not None:
            input = self.downsample(input)
            h = self.downsample(h)
        h = self.conv1(h)
        h = self.norm2(h)
        h = self.act(h)
        h = self.dropout(h)
        h = self.conv2(h)
        return input + h


class NormAct(nn.GroupNorm):
    """As timm's GroupNormAct."""

    def __init__(self, channels, groups=4, act=None):
        super().__init__(groups, channels)
        self.drop, self.act = nn.Identity(), act or nn.ReLU(inplace=True)
        self._fast_norm = False

    def forward(self, x):
        if self._fast_norm:
            x = stock.group_norm(x.float(), self.num_groups, self.weight, self.bias, self.eps)
        else:
            x = stock.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        x = self.act(x)
        return x


class PreAct(nn.Module):
    """As timm's ResNetV2: one norm is read by two convolutions, if there is a shortcut's."""

    def __init__(self, shortcut=True):
        super().__init__()
        self.norm1, self.conv1 = NormAct(8), Scaled(8, 8, 1)
        self.norm2, self.conv2 = NormAct(8, act=nn.SiLU()), Scaled(8, 16 if shortcut else 8, 1)
        self.downsample = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Identity()) if shortcut else None

    def forward(self, x):
        x_preact = self.norm1(x)
        shortcut = x
        if self.downsample is not None:
            shortcut = self.downsample(x_preact)
        x = self.conv1(x_preact)
        x = self.conv2(self.norm2(x))
        return x + shortcut


class Identity(PreAct):
    def __init__(self):
        super().__init__(shortcut=False)


class ReadElsewhere(PreAct):
    """Something else reads the norm's result, too."""

    def forward(self, x):
        y = self.norm1(x)
        return self.conv2(self.norm2(self.conv1(y))) + self.downsample(y) + y.mean()


class UnderAnotherAutocast(PreAct):
    """One reader wants float32."""

    def forward(self, x):
        y = self.norm1(x)
        with torch.autocast(x.device.type, enabled=False):
            shortcut = self.downsample(y)
        return self.conv2(self.norm2(self.conv1(y))) + shortcut


class LayerNorm2d(nn.LayerNorm):
    """As torchvision's and timm's."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = stock.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        x = x.permute(0, 3, 1, 2)
        return x


class GELU(nn.Module):
    """As timm's."""

    def __init__(self, inplace=False):
        super().__init__()

    def forward(self, input):
        return stock.gelu(input)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Conv2d(8, 16, 1), GELU(), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        return self.fc2(x)


class ConvMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = LayerNorm2d(8), Mlp()
        self.down = nn.Sequential(LayerNorm2d(8), nn.Conv2d(8, 8, 2, 2))

    def forward(self, x):
        shortcut = x
        x = self.norm(x)
        x = self.mlp(x)
        return self.down(x + shortcut)


class PoolFormer(nn.Module):
    """As timm's blocks of it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv = nn.GroupNorm(1, 8), nn.Conv2d(8, 8, 1)
        self.norm2, self.mlp, self.drop = nn.GroupNorm(1, 8), Mlp(), nn.Identity()

    def forward(self, x):
        x = x + self.drop(self.conv(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


KINDS = [Layers, BetweenBranches, PreAct, Identity, PoolFormer, ConvMlp]
NORMS = dict.fromkeys((Layers, BetweenBranches, PreAct, Identity, PoolFormer), "group_norm_act")


def pair(kind, device):
    return converted_pair(kind, device, channels=8)


def norms_run(model, x):
    return [name for name in ops_run(lambda: model(x)) if "norm" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_taken(device, kind):
    model, original, x = pair(kind, device)
    assert {e.before for e in braze.convert_report(model).left_alone} <= {"Dropout"}
    assert_trains_alike(model, original, x)
    assert norms_run(model, x) == [NORMS.get(kind, "layer_norm")] * 2
    assert type(braze.unconvert(model)) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(device, kind):
    """Nothing is float32 that only convolutions read."""
    model, original, x = pair(kind, device)
    if device == "cpu" and kind in NORMS:
        pytest.skip("torch's backward of group norm ends the process where dtypes are mixed")
    x = x.bfloat16()

    def trained(m, x):
        with torch.autocast(device, torch.bfloat16, enabled=x.dtype != torch.float64):
            y = m(x)
        return y, *torch.autograd.grad(y.square().sum(), list(m.parameters()))

    exact = trained(copy.deepcopy(original).double(), x.double())
    for i, (a, b, c) in enumerate(zip(trained(model, x), trained(original, x), exact, strict=True)):
        assert a.dtype == b.dtype
        what = f"{i}"
        assert_by_rule(a.bfloat16(), b.bfloat16(), c, 64, what, arithmetic=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        names = norms_run(model, x)
    if device == "cuda":
        assert names == [NORMS.get(kind, "layer_norm")] * 2


@pytest.mark.parametrize("kind", [ReadElsewhere, UnderAnotherAutocast])
def test_what_else_reads_the_result_sees_torchs(device, kind):
    model, original, x = pair(kind, device)
    assert_trains_alike(model, original, x)
    x = x.bfloat16() if kind is ReadElsewhere or device == "cuda" else x
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = model(x), original(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_readers_that_change(device):
    """A norm whose result something else reads now leaves it as torch does."""
    model, original, x = pair(PreAct, device)
    seen = []

    class Watching(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x.repeat(1, 2, 1, 1)

    for m in (model, original):
        m.downsample = Watching()
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = model(x.bfloat16()), original(x.bfloat16())
    assert seen[0] == seen[1]
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", ["upsample", "downsample"])
def test_another_way_between_norm_and_convolution(device, name):
    model, original, x = pair(BetweenBranches, device)
    for m in (model, original):
        setattr(m, name, nn.AvgPool2d(2))
    assert_trains_alike(model, original, x)
    with torch.autocast(device, torch.bfloat16):
        assert model(x).dtype == original(x).dtype
    for m in (model, original):
        setattr(m, name, None)
    assert_trains_alike(model, original, x)
    assert norms_run(model, x) == ["group_norm_act"] * 2


@pytest.mark.parametrize("name", ["conv1", "conv2", "downsample", "downsample.0"])
def test_hooks_of_readers_see_what_they_saw(device, name):
    """A convolution's, in the dtype that the norm has for everybody else."""
    model, original, x = pair(PreAct, device)
    seen = []
    for m in (model, original):
        m.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = model(x.bfloat16()), original(x.bfloat16())
    assert seen[0] == seen[1]
    assert ours.dtype == theirs.dtype
    if name == "conv2":
        assert norms_run(model, x) == ["group_norm_act", "group_norm"]


def test_asked_at_each_call(device):
    model, original, x = pair(PreAct, device)
    ran = lambda: norms_run(model, x) == ["group_norm_act"] * 2  # noqa: E731
    assert ran()
    with replaced(stock, "group_norm", lambda *args, **kwargs: known(*args, **kwargs)):
        assert norms_run(model, x) == []
    assert "group_norm" in seen_by_a_mode(lambda: model(x))
    hook = model.norm1.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.allclose(model(x), original(x))
    hook.remove()
    assert ran()
    for m in (model, original):
        m.norm1._fast_norm = True
        m.norm2.act = nn.Tanh()
    assert norms_run(model, x) == ["group_norm", "group_norm"]
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)


known = stock.group_norm


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(device, kind):
    model, original, x = pair(kind, device)
    torch._dynamo.reset()
    y = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(y, original(x), rtol=1e-3, atol=1e-4)


def test_an_activation_of_its_own_code(device):
    """Counts as the function that it calls."""
    model = nn.Sequential(nn.Linear(4, 4), GELU(), nn.Linear(4, 2)).to(device)
    x = torch.randn(3, 4, device=device)
    expected = model(x)
    braze.convert(model)
    torch.testing.assert_close(model(x), expected)
    with replaced(stock, "gelu", torch.relu):
        assert not torch.allclose(model(x), expected)
    torch.testing.assert_close(model(x), expected)


class Kept(nn.Conv2d):
    """Somebody else sees its result."""

    def forward(self, x):
        y = stock.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        self.seen = y
        return y


class Returned(nn.Conv2d):
    def forward(self, x):
        return stock.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class InPlace(nn.Module):
    conv_class = Returned

    def __init__(self):
        super().__init__()
        self.conv1, self.act = self.conv_class(8, 8, 3, padding=1), nn.SiLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = self.conv1(x)
        y = self.act(y)
        return self.conv2(y)


class KeptInPlace(InPlace):
    conv_class = Kept


@pytest.mark.parametrize("kind", [InPlace, KeptInPlace])
def test_overwriting_what_a_convolution_returns(device, kind):
    """Autograd would copy it: an activation that does not overwrite it is as good where nobody else
    sees it."""
    model, original, x = pair(kind, device)
    assert_trains_alike(model, original, x)
    names = seen_by_profiler(lambda: model(x))
    if kind is InPlace:
        assert "aten::silu_" not in names
    else:
        assert "aten::silu_" in names
        torch.testing.assert_close(model.conv1.seen, original.conv1.seen)
    hook = model.conv1.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.allclose(model(x), original(x))
    hook.remove()


def seen_by_profiler(function):
    with torch.profiler.profile() as profile:
        function()
    return {event.name for event in profile.events()}
