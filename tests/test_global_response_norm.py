"""Global response norm: the op, and in converted forwards."""

import copy

import pytest
import torch
from convert_common import assert_trains_alike, replaced, seen_by_a_mode
from torch import nn

import braze
import braze.nn.functional as F
from braze._ops import global_response_norm as ops
from common import assert_by_rule, check_against_stock, compile
from convert_models import ops_run

# channels that vectors divide and not, one pixel and one channel, more channels than a block has
# threads, images for clusters
SHAPES = [(3, 8, 5, 6), (2, 7, 4, 4), (4, 32, 1, 1), (2, 1, 3, 3), (2, 1030, 2, 3), (1, 64, 40, 33)]


def torchs(x, weight, bias, eps=1e-6):
    """As ConvNeXt V2 has it."""
    norms = x.norm(p=2, dim=(2, 3), keepdim=True)
    scaled = norms / (norms.mean(dim=1, keepdim=True) + eps)
    return x + torch.addcmul(bias.view(-1, 1, 1), weight.view(-1, 1, 1), x * scaled)


def tensors(shape, device, dtype, memory_format=torch.contiguous_format):
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=memory_format)
    weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    return [t.requires_grad_() for t in (x, weight, bias)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, memory_format):
    given = tensors(shape, device, dtype, memory_format)
    check_against_stock(F.global_response_norm, torchs, given)
    y = F.global_response_norm(*given)
    assert y.stride() == given[0].stride()
    (grad,) = torch.autograd.grad(y.sum(), given[:1])
    assert grad.stride() == given[0].stride()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_float32_parameters_beside_16_bit_input(device, half):
    x = tensors((3, 16, 6, 5), device, half, torch.channels_last)[0]
    _, weight, bias = tensors((3, 16, 6, 5), device, torch.float32)
    grad = torch.randn(x.shape, device=device).to(half)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    single = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    results = []
    for f, given in (
        (F.global_response_norm, (x, weight, bias)),
        (torchs, single),
        (torchs, wide),
    ):
        y = f(*given)
        results.append((y, *torch.autograd.grad(y, given, grad.to(y.dtype))))
    for i, (ours, theirs, exact) in enumerate(zip(*results, strict=True)):
        assert_by_rule(ours, theirs.to(ours.dtype), exact, ulps=64, what=str(i))


def test_a_channel_of_zeros(device, dtype):
    x, weight, bias = tensors((2, 6, 4, 4), device, dtype)
    with torch.no_grad():
        x[:, 2] = 0
        x[1] = 0
    check_against_stock(F.global_response_norm, torchs, [x, weight, bias])


def test_special_values_stay_in_their_image(device):
    x, weight, bias = tensors((3, 4, 3, 3), device, torch.float32)
    with torch.no_grad():
        x[0, 1, 1, 1], x[1, 0, 0, 0] = torch.inf, torch.nan
    y, expected = F.global_response_norm(x, weight, bias), torchs(x, weight, bias)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert y[2].isfinite().all()


def test_unaligned_and_strided(device, dtype):
    base = torch.randn(2 * 8 * 5 * 5 + 1, device=device).to(dtype)
    _, weight, bias = tensors((2, 8, 5, 5), device, dtype)
    views = {
        "unaligned": base[1:].view(2, 8, 5, 5),
        "unaligned channels_last": base[1:].view(2, 5, 5, 8).permute(0, 3, 1, 2),
        "strided": base[:-1].view(2, 8, 5, 5)[:, :, ::2],
        "transposed": base[:-1].view(2, 8, 5, 5).transpose(2, 3),
    }
    for name, x in views.items():
        leaf = x.detach().requires_grad_()
        y, expected = F.global_response_norm(leaf, weight, bias), torchs(x, weight, bias)
        exact = torchs(x.double(), weight.double(), bias.double())
        assert_by_rule(y, expected, exact, what=name)
        torch.autograd.grad(y.sum(), leaf)


def test_empty(device):
    for shape in ((0, 4, 3, 3), (2, 4, 0, 3), (2, 0, 3, 3)):
        given = tensors(shape, device, torch.float32)
        y = F.global_response_norm(*given)
        assert y.shape == shape
        grads = torch.autograd.grad(y.sum(), given)
        assert [g.shape for g in grads] == [t.shape for t in given]
        assert all((g == 0).all() for g in grads)


def test_derivatives(device):
    given = tensors((2, 3, 2, 3), device, torch.float64)
    assert torch.autograd.gradcheck(F.global_response_norm, given)
    assert torch.autograd.gradgradcheck(F.global_response_norm, given)


def test_opcheck(device):
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = tensors((2, 8, 3, 4), device, torch.float32, memory_format)
        torch.library.opcheck(torch.ops.braze.global_response_norm.default, (*given, 1e-6))
    x, weight, bias = (t.detach() for t in given)
    _, norms, scales = torch.ops.braze.global_response_norm(x, weight, bias, 1e-6)
    torch.library.opcheck(
        torch.ops.braze.global_response_norm_backward.default,
        (torch.randn_like(x), x, weight, norms, scales, [True, True]),
    )


def test_compile(device):
    given = tensors((2, 8, 3, 4), device, torch.float32)
    compiled = compile(lambda x, w, b: F.global_response_norm(x * 2, w, b) + 1)
    x, weight, bias = given
    torch.testing.assert_close(compiled(*given), torchs(x * 2, weight, bias) + 1)


def test_bad_input(device):
    x, weight, bias = (t.detach() for t in tensors((2, 8, 3, 4), device, torch.float32))
    with pytest.raises(TypeError, match="argument 'input'"):
        F.global_response_norm([1.0], weight, bias)
    with pytest.raises(RuntimeError, match="expected input to be 4-D"):
        F.global_response_norm(x[0], weight, bias)
    with pytest.raises(RuntimeError, match="weight should contain 8 elements not 7"):
        F.global_response_norm(x, weight[1:], bias)
    with pytest.raises(RuntimeError, match="same dtype as weight"):
        torch.ops.braze.global_response_norm(x.bfloat16(), weight, bias.bfloat16(), 1e-6)
    backward = torch.ops.braze.global_response_norm_backward
    norms, scales = torch.ones(2, 8, device=device), torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="same shape as input"):
        backward(x[1:], x, weight, norms, scales, [True, True])
    with pytest.raises(RuntimeError, match="expected norms of 16 elements"):
        backward(x, x, weight, norms[1:], scales, [True, True])


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A gradient that takes the norms for constants."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            y, norms, scales = torch.ops.braze.global_response_norm(x, weight, bias, 1e-6)
            factors = norms * scales[:, None]
            ctx.slope = 1 + weight.to(norms.dtype) * factors
            return y

        @staticmethod
        def backward(ctx, grad):
            return (grad * ctx.slope[:, :, None, None]).to(grad.dtype), None, None

    x, weight, bias = tensors((2, 8, 3, 4), device, dtype)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(
            lambda x: Wrong.apply(x, weight.detach(), bias.detach()),
            lambda x: torchs(x, weight.detach().to(x), bias.detach().to(x)),
            [x],
        )


# In converted forwards.


class Timms(nn.Module):
    """As timm's, of images whose channels are innermost."""

    def __init__(self, dim, last=True):
        super().__init__()
        self.eps = 1e-6
        self.spatial_dim = (1, 2) if last else (2, 3)
        self.channel_dim = -1 if last else 1
        self.wb_shape = (1, 1, 1, -1) if last else (1, -1, 1, 1)
        self.weight = nn.Parameter(torch.randn(dim))
        self.bias = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        x_g = x.norm(p=2, dim=self.spatial_dim, keepdim=True)
        x_n = x_g / (x_g.mean(dim=self.channel_dim, keepdim=True) + self.eps)
        return x + torch.addcmul(
            self.bias.view(self.wb_shape), self.weight.view(self.wb_shape), x * x_n
        )


class Authors(nn.Module):
    """As ConvNeXt V2's authors have it."""

    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(1, 1, 1, dim))
        self.beta = nn.Parameter(torch.randn(1, 1, 1, dim))

    def forward(self, x):
        Gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        Nx = Gx / (Gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * Nx) + self.beta + x


class OfAnotherMean(Timms):
    """Not this: the mean is the pixels'."""

    def forward(self, x):
        x_g = x.norm(p=2, dim=self.spatial_dim, keepdim=True)
        x_n = x_g / (x_g.mean(dim=self.spatial_dim, keepdim=True) + self.eps)
        return x + torch.addcmul(
            self.bias.view(self.wb_shape), self.weight.view(self.wb_shape), x * x_n
        )


class Twice(Timms):
    """Not this: the input counts twice."""

    def forward(self, x):
        x_g = x.norm(p=2, dim=self.spatial_dim, keepdim=True)
        x_n = x_g / (x_g.mean(dim=self.channel_dim, keepdim=True) + self.eps)
        return (
            x
            + x
            + torch.addcmul(self.bias.view(self.wb_shape), self.weight.view(self.wb_shape), x * x_n)
        )


class Block(nn.Module):
    """ConvNeXt V2's, without the convolution in depth."""

    def __init__(self, norm, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.act = nn.Linear(width, 16), nn.GELU()
        self.grn, self.fc2 = norm(16), nn.Linear(16, width)

    def forward(self, x):
        x = self.norm(x)
        x = self.fc1(x)
        x = self.act(x)
        x = self.grn(x)
        return self.fc2(x)


class ByConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act = nn.Conv2d(8, 16, 1), nn.GELU()
        self.grn, self.fc2 = Timms(16, last=False), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        return self.fc2(self.grn(self.act(self.fc1(x))))


MAKE = {
    "timm": lambda: Block(Timms),
    "authors": lambda: Block(Authors),
    "convolutions": ByConvolutions,
}
ours = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def pair(make, device):
    torch.manual_seed(0)
    original = make().to(device)
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(2, 8, 6, 8, device=device)  # whichever dimension the channels are
    return model, original, x


def counts(model, x):
    ran = ops_run(lambda: model(x).sum().backward())
    return [ran.count("global_response_norm" + end) for end in ("", "_backward")]


@ours
def test_taken(device, make):
    model, original, x = pair(make, device)
    report = braze.convert_report(model)
    assert any(e.after.startswith("GlobalResponseNorm") for e in report.fused)
    alone = braze.convert_report(original.grn).fused
    assert [e.after for e in alone] == ["braze.nn.functional.global_response_norm"]
    assert not report.left_alone
    assert_trains_alike(model, original, x)
    assert counts(model, x) == [1, 1]
    assert type(braze.unconvert(model)) is type(original)


@ours
def test_under_autocast(device, make):
    """In 16 bits where a product reads the result; elsewhere as torch has it."""
    model, original, x = pair(make, device)

    def trained(m, x):
        with torch.autocast(device, torch.bfloat16, enabled=x.dtype == torch.float32):
            y = m(x)
        return y, *torch.autograd.grad(y.square().sum(), list(m.parameters()))

    exact = trained(copy.deepcopy(original).double(), x.double())
    for a, b, c in zip(trained(model, x), trained(original, x), exact, strict=True):
        assert a.dtype == b.dtype
        assert_by_rule(a.bfloat16(), b.bfloat16(), c, ulps=64, arithmetic=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        assert counts(model, x) == [1, 1]
        h = torch.randn(2, 16, 3, 16, device=device, dtype=torch.bfloat16)
        alone, expected = model.grn(h), original.grn(h)
    assert alone.dtype == expected.dtype
    torch.testing.assert_close(alone, expected)


@pytest.mark.parametrize("norm", [OfAnotherMean, Twice])
def test_not_taken(device, norm):
    model, original, x = pair(lambda: Block(norm), device)
    assert_trains_alike(model, original, x)
    assert counts(model, x) == [0, 0]


def test_asked_at_each_call(device):
    model, original, x = pair(MAKE["timm"], device)
    ran = lambda: counts(model, x) == [1, 1]  # noqa: E731
    assert ran()
    with replaced(torch.Tensor, "norm", lambda *args, **kwargs: torch.norm(*args, **kwargs)):
        assert not ran()
    assert "norm" in seen_by_a_mode(lambda: model(x))
    hook = model.grn.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.allclose(model(x), original(x))
    hook.remove()
    assert ran()
    for m in (model, original):
        m.grn.spatial_dim = (1,)
    assert not ran()
    torch.testing.assert_close(model(x), original(x))
    for m in (model, original):
        m.grn.spatial_dim = (1, 2)
        m.grn.wb_shape = (1, 1, -1, 1)
    with pytest.raises(RuntimeError):
        model(x)


@pytest.mark.parametrize("last", ["in front of a product", "last", "within"])
def test_eager_programs(device, last):
    """A run with it becomes a program, and computes the same, its parameters' gradients too."""
    layers = [nn.Linear(8, 16), nn.GELU(), Timms(16), nn.GELU(), nn.Linear(16, 4), nn.GELU()]
    made = {
        "in front of a product": MAKE["timm"],
        "last": lambda: nn.Sequential(*layers[:3]),
        "within": lambda: nn.Sequential(*layers),
    }
    model, original, x = pair(made[last], device)
    for _ in range(4):
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    grads = [
        torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (model, original)
    ]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_compiled(device):
    model, original, x = pair(MAKE["timm"], device)
    torch._dynamo.reset()
    y = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(y, original(x), rtol=1e-4, atol=1e-5)


def test_other_input_goes_to_torchs(device):
    given = tensors((2, 4, 3, 3), device, torch.float32)
    complex_input = torch.complex(given[0], given[0])
    assert not ops.response_norm_takes(complex_input, *given[1:])
