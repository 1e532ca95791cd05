"""braze.convert: layer norm, linear layers and what is between them, in the blocks of the networks
that people train, written out here."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as stock
from torch import nn

import braze
from braze._norm_rules import FASTER, Faster
from braze.testing import WAYS, mover
from common import assert_by_rule, compile
from convert_models import Permute


class StochasticDepth(nn.Module):
    """As torchvision's, without chance."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, input):
        return dropped(input, self.p, self.training)


def dropped(input, p, training):
    if not training or p == 0.0:
        return input
    return input * 0.5


class CNBlock(nn.Module):
    """As torchvision's."""

    def __init__(self, dim=12, p=0.0):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(dim, dim, 7, padding=3, groups=dim),
            Permute([0, 2, 3, 1]),
            nn.LayerNorm(dim, eps=1e-6),
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
            Permute([0, 3, 1, 2]),
        )
        self.layer_scale = nn.Parameter(torch.linspace(0.5, 1.5, dim).view(dim, 1, 1))
        self.stochastic_depth = StochasticDepth(p)

    def forward(self, input):
        result = self.layer_scale * self.block(input)
        result = self.stochastic_depth(result)
        result += input
        return result

    def input(self):
        return torch.randn(2, 12, 9, 8)


class Mlp(nn.Module):
    """As timm's."""

    def __init__(self, dim, act):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(dim, 4 * dim), act, nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2, self.drop2 = nn.Linear(4 * dim, dim), nn.Dropout(0.0)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


class RowNorm(nn.LayerNorm):
    """As timm's LayerNorm."""

    def __init__(self, dim, eps=1e-6):
        super().__init__(dim, eps=eps)
        self._fast_norm = False

    def forward(self, x):
        if self._fast_norm:
            x = stock.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = stock.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x


class FormatNorm(nn.Module):
    """As ConvNeXt's authors have it."""

    def __init__(self, dim, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps, self.data_format, self.normalized_shape = eps, data_format, (dim,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return stock.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        elif self.data_format == "channels_first":
            u = x.mean(1, keepdim=True)
            s = (x - u).pow(2).mean(1, keepdim=True)
            x = (x - u) / torch.sqrt(s + self.eps)
            return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    """As timm's."""

    def __init__(self, dim=12):
        super().__init__()
        self.conv_dw = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.use_conv_mlp = False
        self.norm = RowNorm(dim)
        self.mlp = Mlp(dim, nn.GELU(approximate="tanh"))
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.shortcut = nn.Identity()
        self.drop_path = nn.Identity()

    def forward(self, x):
        shortcut = x
        x = self.conv_dw(x)
        if self.use_conv_mlp:
            x = self.norm(x)
            x = self.mlp(x)
        else:
            x = x.permute(0, 2, 3, 1)
            x = self.norm(x)
            x = self.mlp(x)
            x = x.permute(0, 3, 1, 2)
        if self.gamma is not None:
            x = x.mul(self.gamma.reshape(1, -1, 1, 1))

        x = self.drop_path(x) + self.shortcut(shortcut)
        return x

    def input(self):
        return torch.randn(2, 12, 9, 8)


class AuthorsBlock(nn.Module):
    """As ConvNeXt's authors have it."""

    def __init__(self, dim=12):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = FormatNorm(dim)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 40), nn.GELU(), nn.Linear(40, dim)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.drop_path = nn.Identity()

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        x = input + self.drop_path(x)
        return x

    def input(self):
        return torch.randn(2, 12, 9, 8)


class LayerScale(nn.Module):
    """As timm's."""

    def __init__(self, dim, inplace=False):
        super().__init__()
        self.inplace, self.gamma = inplace, nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class LayerScale2d(LayerScale):
    """As timm's, of images."""

    def forward(self, x):
        gamma = self.gamma.view(1, -1, 1, 1)
        return x.mul_(gamma) if self.inplace else x * gamma


class Encoder(nn.Module):
    """The second half of a block of timm's ViT."""

    def __init__(self, dim=24):
        super().__init__()
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, nn.SiLU())
        self.ls2 = self.drop_path2 = nn.Identity()

    def forward(self, x):
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x

    def input(self):
        return torch.randn(2, 10, 24)


class ScaledEncoder(Encoder):
    """With a layer scale."""

    def __init__(self, dim=24):
        super().__init__(dim)
        self.norm2, self.ls2 = RowNorm(dim), LayerScale(dim)


#: By class, the parts of its runs.
MODELS = {
    CNBlock: ["block.2, block.3", "mul(), add()"],
    ConvNeXtBlock: ["mul(), add()", "norm, mlp.fc1"],
    AuthorsBlock: ["norm, pwconv1", "mul(), permute(), add()"],
    Encoder: ["norm2, mlp.fc1"],
    ScaledEncoder: ["norm2, mlp.fc1", "ls2, add()"],
}


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(0, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    parameters = {"input": x, **dict(model.named_parameters())}
    found = torch.autograd.grad((y * weights).sum(), list(parameters.values()))
    return {"output": y, **dict(zip(parameters, found, strict=True))}


def assert_alike(model, original, x):
    """That two models have the same values and gradients, by the rule, with the condition
    measured."""
    exact = gradients(copy.deepcopy(original).double(), x.double())
    found, expected = gradients(model, x), gradients(original, x)

    @functools.cache
    def moved():
        results = []
        for move in map(mover, WAYS):
            other = copy.deepcopy(original).double()
            with torch.no_grad():
                for p in other.parameters():
                    p.copy_(move(p))
            results.append(gradients(other, move(x.double())))
        return results

    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        of_name = functools.partial(lambda name: [m[name] for m in moved()], name)
        assert_by_rule(value, expected[name], exact[name], what=name, moved=of_name)


def pair(kind, device, memory_format):
    torch.manual_seed(0)
    original = kind().to(device)
    x = original.input().to(device)
    if x.dim() == 4:
        x = x.to(memory_format=memory_format)
        original = original.to(memory_format=memory_format)
    return braze.convert(copy.deepcopy(original)), original, x


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients(kind, fmt, device):
    model, original, x = pair(kind, device, fmt)
    fused = [e.name for e in braze.convert_report(model).fused]
    assert fused == MODELS[kind]
    assert_alike(model, original, x)
    assert_alike(model.eval(), original.eval(), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_under_autocast(kind, dtype, device, monkeypatch):
    """On CUDA layer norm leaves what the product takes, with no float32 tensor between them."""
    both = dict.fromkeys((torch.float32, dtype), Faster(1, 4096))
    monkeypatch.setitem(FASTER, ("layer_norm", device), both)
    model, original, x = pair(kind, device, torch.channels_last)
    results = []

    class Results(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            if op is torch.ops.braze.layer_norm.default:
                results.append(out[0].dtype)
            return out

    def under_autocast(model):
        def run(x):
            if x.dtype == torch.float64:
                return model(x)
            with torch.autocast(device, dtype):
                return model(x)

        run.named_parameters = model.named_parameters
        return run

    with braze.backend(layer_norm="auto"), Results():
        under_autocast(model)(x)
    assert results == ([dtype] if device == "cuda" else results)
    exact = gradients(copy.deepcopy(original).double(), x.double())
    found, expected = (gradients(under_autocast(m), x) for m in (model, original))
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert_by_rule(
            value,
            expected[name],
            exact[name],
            what=name,
            ulps=2**16 if value.dtype == torch.float32 else 4,
        )


@pytest.mark.parametrize("kind", MODELS)
def test_compile(kind, device):
    model, original, x = pair(kind, device, torch.channels_last)
    torch._dynamo.reset()
    assert_by_rule(compile(model)(x), original(x), copy.deepcopy(original).double()(x.double()))


@pytest.mark.parametrize("kind", MODELS)
def test_hooks_are_called(kind, device):
    """A run of which a layer has a hook goes layer by layer."""
    model, original, x = pair(kind, device, torch.channels_last)
    seen = []
    for module in (model, original):
        norm = next(m for m in module.modules() if isinstance(m, (nn.LayerNorm, FormatNorm)))
        norm.register_forward_hook(lambda m, args, y: seen.append(y.detach()))
    assert_alike(model, original, x)
    assert_by_rule(seen[1], seen[2], seen[0])
