"""conv_bn_act, and blocks whose input's gradients are one sum: what braze.convert makes of residual
blocks on GPUs, here on both devices."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_trains_alike
from test_convert_residual import BasicBlock, Bottleneck
from torch import nn

import braze
from braze._ops import bn_relu
from braze._ops._common import below_autograd
from braze._ops.again import Again
from braze._ops.conv_bn_act import ForkedConvBnAct, conv_bn_act
from braze._step_scope import StepScope
from common import (
    assert_by_rule,
    check_against_stock,
    cuda_kernels_of,
    hopper_only,
    runs_hopper_kernels,
)

op = torch.ops.braze.conv_bn_act.default
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
ACTIVATIONS = {"identity": lambda v: v, "relu": torch.relu, "silu": stock.silu, "gelu": stock.gelu}
GEOMETRY = (1, 1), (1, 1), (1, 1), 1


@pytest.fixture(autouse=True)
def _on_every_device(monkeypatch):
    blocks = importlib.import_module("braze.convert.blocks")
    for name in ("CONV_BN_ACT_ON", "FORKED_ON"):
        monkeypatch.setattr(blocks, name, ("cpu", "cuda"))


def inputs(device, dtype, form, residual=True, n=3, c=8, k=12, size=7):
    """Of small integers, as test_conv_bn_relu has them."""

    def draw(*shape):
        return torch.randint(-2, 3, shape, device=device).to(dtype).requires_grad_()

    def image(channels):
        images = draw(n, channels, size, size).detach()
        return images.contiguous(memory_format=FORMATS[form]).requires_grad_()

    weight = draw(k, c, 3, 3).detach().contiguous(memory_format=FORMATS[form]).requires_grad_()
    gamma, beta = (torch.rand(k, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    return image(c), weight, draw(k), image(k) if residual else None, gamma, beta


def ours(name, tensors, mean=None, var=None, batches=None):
    norm = mean, var, batches
    return conv_bn_act(*tensors, *norm, *GEOMETRY, True, 0.1, 1e-5, name, ())


def reference(name, x, w, b, residual, gamma, beta, mean=None, var=None):
    z = stock.conv2d(x, w, b, padding=1)
    y = stock.batch_norm(z, mean, var, gamma, beta, True)
    return ACTIVATIONS[name](y if residual is None else y + residual)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_stock(device, dtype, name, residual, form):
    tensors = list(inputs(device, dtype, form, residual))
    tensors[2] = tensors[2].detach()  # whose gradient is zero, but for roundings
    given = [t for t in tensors if t is not None]

    def placed(t):
        return t if residual else (*t[:3], None, *t[3:])

    check_against_stock(
        lambda *t: ours(name, placed(t)), lambda *t: reference(name, *placed(t)), given, ulps=16
    )


def test_buffers(device, dtype):
    tensors = [t.detach() for t in inputs(device, dtype, "channels_last")]
    batches = torch.zeros((), dtype=torch.int64, device=device)
    buffers = [[torch.full((12,), v, device=device, dtype=dtype) for v in (0.5, 2)] for _ in "abc"]
    version = buffers[0][0]._version
    ours("relu", tensors, *buffers[0], batches)
    assert buffers[0][0]._version > version
    assert batches == 1
    reference("relu", *tensors, *buffers[1])
    wide = [t.double() for t in buffers[2]]
    reference("relu", *(t.double() for t in tensors), *wide)
    for actual, theirs, exact in zip(*buffers[:2], wide, strict=True):
        assert_by_rule(actual, theirs, exact, ulps=8, terms=147)


@pytest.mark.parametrize("name", ["identity", "relu", "silu"])
def test_derivatives(device, name):
    for residual in (True, False):
        tensors = inputs(device, torch.float64, "channels_last", residual, 2, 2, 2, 3)
        # Away from the kinks.
        moved = [None if t is None else (t + torch.rand_like(t) / 4).detach() for t in tensors]
        given = [t.requires_grad_() for t in moved if t is not None]

        def run(*t, residual=residual):
            return ours(name, t if residual else (*t[:3], None, *t[3:]))

        assert torch.autograd.gradcheck(run, given)
        assert torch.autograd.gradgradcheck(run, given)


def test_opcheck(device, dtype):
    for residual in (True, False):
        tensors = inputs(device, dtype, "channels_last", residual)
        rest = [[1, 1]] * 3, 1, True, 0.1, 1e-5, "relu", 0.0, 0.0
        torch.library.opcheck(op, (*tensors, None, None, None, *rest[0], *rest[1:]))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t[:3] + [t[3][:, :, :1]] + t[4:], "a residual that is broadcast"),
        (lambda t: t[:3] + [t[3].contiguous()] + t[4:], "one of another memory format"),
        (lambda t: t[:3] + [t[3].double()] + t[4:], "one of another dtype"),
        (lambda t: [t[0], t[1].double(), *t[2:]], "a weight of another dtype"),
        (lambda t: [t[0][:, :3], *t[1:]], "other channels"),
        (lambda t: [*t[:4], t[4][:3], *t[5:]], "a parameter of another size"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_is_left_to_others(device, change, what):
    tensors = [t.detach() for t in inputs(device, torch.float32, "channels_last")]
    assert ours("relu", tensors) is not None
    assert ours("relu", change(tensors)) is None, what


class Identity(Bottleneck):
    """As most of ResNet-50's."""

    def __init__(self):
        super().__init__(8, 4)
        self.downsample = None


class Nested(nn.Module):
    """A block whose layers are within others: the batch norm that is added to is not, or is."""

    def __init__(self, channels, out, stride=1, norm_outside=True):
        super().__init__()
        layers = [nn.Conv2d(channels, 4, 1), nn.BatchNorm2d(4), nn.ReLU()]
        layers += [nn.Conv2d(4, out, 3, stride, 1), nn.BatchNorm2d(out)]
        self.norm = layers.pop() if norm_outside else nn.Identity()
        self.body = nn.Sequential(*layers)
        self.shortcut = nn.Identity()
        if stride > 1:
            projection = nn.Conv2d(channels, out, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out))

    def forward(self, x):
        return torch.relu(self.norm(self.body(x)) + self.shortcut(x))


def network():
    # As many channels as rows that TMA takes.
    return nn.Sequential(nn.Conv2d(6, 8, 1), BasicBlock(8, 8), Identity(), BasicBlock(8, 16, 2))


def nested_network():
    blocks = Nested(8, 8), Nested(8, 8, 1, False), Nested(8, 16, 2)
    return nn.Sequential(nn.Conv2d(6, 8, 1), *blocks)


def blocks_run(monkeypatch):
    """A list that grows with every block whose input's gradients become one sum."""
    found, function = [], bn_relu.forked_conv_bn_relu2d

    def counted(*args):
        found.append(args)
        return function(*args)

    monkeypatch.setattr(bn_relu, "forked_conv_bn_relu2d", counted)
    return found


def shortcuts_run(monkeypatch):
    """A list that grows with every shortcut whose input's other gradient comes to it."""
    found, function = [], ForkedConvBnAct.backward

    def counted(ctx, grad_output, grad_alias, *rest):
        if grad_alias is not None:
            found.append(grad_alias.shape)
        return function(ctx, grad_output, grad_alias, *rest)

    monkeypatch.setattr(ForkedConvBnAct, "backward", staticmethod(counted))
    return found


def made_again(monkeypatch):
    """A list that grows with every result that a backward pass makes again; all may be."""
    blocks = importlib.import_module("braze.convert.blocks")
    monkeypatch.setattr(blocks, "AGAIN_ON", ("cpu", "cuda"))
    monkeypatch.setattr(blocks, "AGAIN_BYTES", 0)
    monkeypatch.setattr(blocks, "AGAIN_DTYPES", (torch.float32, torch.float64))
    found, function = [], Again.tensor

    def counted(self):
        found.append(self._kept is None)
        return function(self)

    monkeypatch.setattr(Again, "tensor", counted)
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_results_made_again(device, form, monkeypatch):
    """Within bottlenecks, in a step: two of each, that nobody keeps; but for one that is as large
    as the block's result, before a stride."""
    found = made_again(monkeypatch)
    original = nn.Sequential(nn.Conv2d(6, 8, 1), Identity(), Bottleneck(8, 8, 2)).to(device)
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(3, 6, 8, 8, device=device).contiguous(memory_format=FORMATS[form])
    assert_trains_alike(model, original, x)
    assert not found  # outside of a step
    with StepScope():
        assert_trains_alike(model, original, x)
    assert found == [True] * 3


def test_result_made_again_is_the_result(device, dtype):
    """Bit for bit; and of the second reader on it is kept."""
    x, weight, bias, _, gamma, beta = inputs(device, dtype, "channels_last")
    norm = gamma, beta, None, None, None, (1, 1), (1, 1), (1, 1), 1, True, 0.1, 1e-5, False, False
    y, z, _, statistics = bn_relu.ConvBnReLU2d.apply(x, weight, bias, *norm)
    with torch.no_grad():
        assert torch.equal(torch.ops.braze.bn_relu2d_again(z, statistics), y)
    again = Again(y.grad_fn)
    again.claim(y)
    with torch.no_grad():
        first = again.tensor()
    assert first is not y
    assert torch.equal(first, y)
    again.claim(y)
    assert again.tensor() is y
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again.tensor()
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.ops.braze.bn_relu2d_again(z.detach().requires_grad_(), statistics)
    torch.library.opcheck(torch.ops.braze.bn_relu2d_again, (z, statistics))


@pytest.mark.parametrize("make", [network, nested_network])
@pytest.mark.parametrize("form", FORMATS)
def test_converted_blocks(device, form, make, monkeypatch):
    found, shortcuts = blocks_run(monkeypatch), shortcuts_run(monkeypatch)
    original = make().to(device)
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(3, 6, 8, 8, device=device).contiguous(memory_format=FORMATS[form])
    assert_trains_alike(model, original, x)
    assert not found  # outside of a step
    assert not shortcuts
    with StepScope():
        assert_trains_alike(model, original, x)
    assert len(found) == 2
    assert len(shortcuts) == 1


@pytest.mark.parametrize("again", [False, True])
def test_what_sees_the_gradient_of_a_forked_input(device, again, monkeypatch):
    """Hooks, retained gradients and second derivatives are those of all of the input's uses."""
    found, shortcuts = blocks_run(monkeypatch), shortcuts_run(monkeypatch)
    remade = made_again(monkeypatch) if again else []
    original = network().to(device).double()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(3, 6, 8, 8, device=device, dtype=torch.float64)

    def run(model):
        seen, inputs = [], [x.clone().requires_grad_()]
        for layer in model:
            inputs.append(layer(inputs[-1]))
            inputs[-1].register_hook(lambda g: seen.append(g.clone()))
            inputs[-1].retain_grad()
        loss = inputs[-1].pow(3).sum()
        firsts = torch.autograd.grad(loss, [*inputs, *model.parameters()], create_graph=True)
        penalty = sum(g.square().sum() for g in firsts)
        seconds = torch.autograd.grad(penalty, [inputs[0], *model.parameters()], retain_graph=True)
        loss.backward()
        return [*firsts, *seconds, *seen, *(t.grad for t in (*inputs, *model.parameters()))]

    with StepScope():
        results = run(model)
    assert len(found) == 2
    assert shortcuts
    assert bool(remade) == again
    for actual, expected in zip(results, run(original), strict=True):
        most = expected.detach().abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8 * most)


# n, c, k, h, w, filter, kernels that add on the way in TF32
ADDED = [
    (3, 64, 32, 9, 7, 3, ("implicit_gemm_wgmma",)),
    (2, 72, 40, 13, 11, 3, ("implicit_gemm_wgmma",)),
    (8, 320, 64, 20, 20, 3, ("implicit_gemm_wgmma",)),
    (5, 256, 64, 14, 14, 1, ("implicit_gemm_wgmma", "pointwise", "halo_wgmma")),
    (3, 40, 136, 8, 12, 1, ("implicit_gemm_wgmma", "pointwise")),
    (16, 1024, 256, 14, 14, 1, ("implicit_gemm_wgmma", "pointwise")),
    (3, 5, 6, 7, 8, 3, ()),
]


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", ADDED, ids=str)
def test_added(device, dtype, case, form, tf32):
    """The backward's argument `added`, on the way out of the kernel or behind it."""
    n, c, k, h, w, size, kernels = case
    in_tf32 = tf32 and device == "cuda" and dtype == torch.float32
    if tf32 and not in_tf32:
        pytest.skip("as without TF32")
    if device == "cpu" and n * c * k * h * w > 1 << 26:
        pytest.skip("takes the CPU seconds")
    hopper = runs_hopper_kernels(device)
    forward = torch.ops.braze.conv_bn_relu2d.default
    backward = torch.ops.braze.conv_bn_relu2d_backward.default
    x, weight, _, _, gamma, beta = inputs(device, dtype, form, True, n, c, k, h)
    x, gamma, beta = (
        x.detach()[..., :w].contiguous(memory_format=FORMATS[form]),
        *(t.detach() for t in (gamma, beta)),
    )
    weight = weight.detach()[..., :size, :size].contiguous(memory_format=FORMATS[form])
    where, norm = ([1, 1], [size // 2] * 2, [1, 1], 1), (None,) * 3
    with torch.no_grad(), below_autograd():
        y, *saved = forward(
            x, weight, None, gamma, beta, *norm, *where, True, 0.1, 1e-5, False, False
        )
        dy, added = torch.randn_like(y), torch.randn_like(x)
        mask = [True, False, False, False, False]

        def run(convert, settings, added):
            z, codes, statistics = saved
            tensors = map(convert, (dy, x, weight, gamma, beta, z))
            kept = codes, statistics.double() if convert is torch.Tensor.double else statistics
            return backward(*tensors, *kept, *where, True, False, mask, *settings, added)[0]

        own = kernels if in_tf32 and hopper and form == "channels_last" else ()
        alone = run(torch.Tensor.double, (False, False, "auto"), None)
        for backend in ("auto", *own):
            settings = in_tf32, False, backend
            actual = run(lambda t: t, settings, added)
            assert actual.is_contiguous(memory_format=FORMATS[form])
            separate = run(lambda t: t, settings, None) + added
            ulps = 2**13 if in_tf32 else 16
            assert_by_rule(actual, separate, alone + added.double(), ulps, backend, k * size**2)
            for other in (added.contiguous(), added.permute(0, 1, 3, 2).clone().mT):
                again = run(lambda t: t, settings, other)
                assert_by_rule(again, separate, alone + added.double(), ulps, backend, k * size**2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_in_16_bits_add_on_the_way(gpu, dtype):
    """Also where cuDNN would make the gradient alone."""
    hopper_only("cuda")
    x, added = (
        torch.randn(64, 256, 14, 14, device="cuda").to(dtype, memory_format=torch.channels_last)
        for _ in range(2)
    )
    weight = torch.randn(64, 256, 1, 1, device="cuda").to(dtype)
    gamma, beta = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    where = ([1, 1], [0, 0], [1, 1], 1)
    y, *saved = torch.ops.braze.conv_bn_relu2d(
        x, weight, None, gamma, beta, None, None, None, *where, True, 0.1, 1e-5, False, False
    )

    def gradient():
        torch.ops.braze.conv_bn_relu2d_backward(
            *(torch.ones_like(y), x, weight, gamma, beta, *saved, *where, True, False),
            *([True, False, False, False, False], False, False, "auto", added),
        )

    with below_autograd():
        gradient()
        names = cuda_kernels_of(gradient)
    assert "persistent" in names or "gemm" in names
    assert "add_" not in names
    assert "_add" not in names


# n, c, k, h, w, stride: shortcuts
STRIDED = [
    (3, 64, 128, 9, 12, 2),
    (16, 72, 64, 14, 14, 2),
    (2, 64, 64, 7, 11, 3),
    (3, 5, 6, 7, 8, 2),
]


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", STRIDED, ids=str)
def test_added_behind_strides(device, dtype, case, form, tf32):
    """What is added lies between the pixels of a gradient that has a stride."""
    n, c, k, h, w, stride = case
    in_tf32 = tf32 and device == "cuda" and dtype == torch.float32
    if tf32 and not in_tf32:
        pytest.skip("as without TF32")
    x, added = (
        torch.randn(n, c, h, w, device=device).to(dtype, memory_format=FORMATS[form])
        for _ in range(2)
    )
    weight = torch.randn(k, c, 1, 1, device=device).to(dtype)
    where = [stride] * 2, [0, 0], [1, 1], 1
    dy = torch.randn_like(stock.conv2d(x, weight, None, stride))
    backward = torch.ops.braze.conv2d_backward.default

    def run(convert, settings, added):
        mask = [True, False, False]
        return backward(*map(convert, (dy, x, weight)), *where, mask, *settings, added)[0]

    with torch.no_grad(), below_autograd():
        alone = run(torch.Tensor.double, (False, False, "auto"), None)
        for backend in ("auto", "pointwise") if device == "cuda" else ("auto",):
            settings = in_tf32, False, backend
            actual = run(lambda t: t, settings, added)
            assert actual.is_contiguous(memory_format=FORMATS[form])
            separate = run(lambda t: t, settings, None) + added
            ulps = 2**13 if in_tf32 else 16
            assert_by_rule(actual, separate, alone + added.double(), ulps, backend, k)


def test_strided_products_add_on_the_way(gpu):
    """A gradient between whose pixels the other one lies is one pass more, not two."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    for dtype in (torch.bfloat16, torch.float32):
        x, added = (
            torch.randn(16, 128, 28, 28, device="cuda").to(dtype, memory_format=torch.channels_last)
            for _ in range(2)
        )
        weight = torch.randn(256, 128, 1, 1, device="cuda").to(dtype)
        dy = torch.ones_like(stock.conv2d(x, weight, None, 2))
        where = [2, 2], [0, 0], [1, 1], 1, [True, False, False], True, False, "auto"
        with below_autograd():
            names = cuda_kernels_of(
                lambda: torch.ops.braze.conv2d_backward(dy, x, weight, *where, added)  # noqa: B023
            )
        assert "add_pixels" in names
        assert "vector_add" not in names


def test_added_has_derivatives(device):
    """Of the raw op."""
    tensors = inputs(device, torch.float64, "channels_last", True, 2, 2, 3, 4)
    x, weight, _, _, gamma, beta = tensors
    where, norm = ([1, 1], [1, 1], [1, 1], 1), (None,) * 3
    y, *saved = torch.ops.braze.conv_bn_relu2d(
        x, weight, None, gamma, beta, *norm, *where, True, 0.1, 1e-5, False, False
    )
    dy, added = torch.randn_like(y), torch.randn_like(x)

    def run(dy, added):
        args = x, weight, gamma, beta, *saved, *where, True, False, [True] * 5
        return torch.ops.braze.conv_bn_relu2d_backward(dy, *args, added=added)[0]

    given = dy.detach().requires_grad_(), added.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, given)
