"""conv2d_norm_backward and batch_norm_backward_of_sums, and steps whose convolutions do the first
half of the backward of the batch norm before them."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as stock
from test_conv2d_products import set_tf32
from test_convert_residual import Bottleneck
from torch import nn
from torch.utils.checkpoint import checkpoint

import braze
import braze.nn.functional as F
from braze._ops import norm_grads
from braze._ops._common import below_autograd
from braze._step_scope import StepScope
from common import assert_by_rule, cuda_kernels_of, hopper_only, runs_hopper_kernels

CHANNELS_LAST = torch.channels_last
# n, c (the norm's), k, h, w, filter, stride: whole tiles, parts of tiles, more than one column of
# tiles; strides, whose gradient is added to another one
SHAPES = [
    (3, 64, 32, 9, 7, 1, 1),
    (8, 256, 64, 14, 14, 1, 1),
    (5, 128, 72, 13, 11, 3, 1),
    (2, 192, 40, 31, 10, 1, 1),
    (64, 512, 128, 14, 14, 1, 1),
    (1, 64, 64, 2, 2, 3, 1),
    (40, 64, 64, 28, 28, 3, 1),
]
STRIDED = [(3, 64, 128, 9, 12, 1, 2), (16, 72, 64, 14, 14, 1, 2), (2, 64, 64, 7, 11, 1, 3)]
ACTIVATIONS = [("relu", 0.0, 0.0), ("hardtanh", -0.5, 0.75), ("identity", 0.0, 0.0)]
KERNEL = "implicit_gemm_wgmma"


def tensors(case, dtype, activation, residual, device):
    """What the backward of a convolution behind batch norm, an addition and an activation reads."""
    n, c, k, h, w, size, stride = case

    def draw(*shape, scale=1.0, shift=0.0):
        t = torch.randn(shape, device=device) * scale + shift
        return t.to(dtype, memory_format=CHANNELS_LAST if len(shape) == 4 else None)

    z = draw(n, c, h, w, scale=2.0, shift=3.0)
    gamma, beta = torch.randn(c, device=device), torch.randn(c, device=device) / 2
    other = draw(n, c, h, w) if residual else None
    with torch.no_grad(), below_autograd():
        x, mask, statistics = torch.ops.braze.batch_norm_act(
            z, other, gamma, beta, None, None, None, True, 0.1, 1e-5, *activation
        )
    weight = draw(k, c, size, size, scale=(c * size * size) ** -0.5)
    dy = draw(n, k, (h - 1) // stride + 1, (w - 1) // stride + 1)
    added = draw(n, c, h, w)
    return (dy, x, weight, added), (z, mask, statistics), (gamma, beta), other


def before_activation(grad, z, gamma, beta, other, activation):
    """The gradient before the activation, in float64."""
    v = stock.batch_norm(z.double(), None, None, gamma.double(), beta.double(), True)
    v = v.requires_grad_(False) + (0 if other is None else other.double())
    name, low, high = activation
    if name == "identity":
        return grad, torch.ones_like(v, dtype=torch.bool)
    low, high = (0.0, float("inf")) if name == "relu" else (low, high)
    # Near a bound the rounding of v decides.
    sure = ((v - low).abs() > 1e-3 * v.abs().clamp(1)) & (
        (v - high).abs() > 1e-3 * v.abs().clamp(1)
    )
    return grad * ((v > low) & (v < high)), sure


def geometry(case):
    size, stride = case[-2:]
    return [stride] * 2, [size // 2] * 2, [1, 1], 1


def run(case, dtype, activation, residual, adds):
    tf32 = dtype == torch.float32
    backend = "pointwise" if case[-1] > 1 else KERNEL
    given, norm, affine, other = tensors(case, dtype, activation, residual, "cuda")
    dy, x, weight, added = given
    where, mask = geometry(case), [True, True, False]
    with torch.no_grad(), below_autograd():
        dx, dw, _, sums = torch.ops.braze.conv2d_norm_backward(
            dy, x, weight, *where, mask, tf32, False, backend, added if adds else None,
            *norm, *activation,
        )  # fmt: skip
        plain, plain_dw, _ = torch.ops.braze.conv2d_backward(
            dy, x, weight, *where, mask, tf32, False, backend
        )
    assert torch.equal(dw, plain_dw)
    return given, norm, affine, other, dx, sums, plain


def check(case, dtype, activation, residual, adds):
    given, norm, affine, other, dx, sums, plain = run(case, dtype, activation, residual, adds)
    dy, _, weight, added = given
    z, mask, statistics = norm
    by_tiles = case[-1] == 1
    if by_tiles and mask.numel() > 0 and case[1] * z.element_size() % 128 != 0:
        assert sums.shape[1] == 0  # masks are read by eight bytes
        return
    assert sums.shape[1] > 0
    assert dx.is_contiguous(memory_format=CHANNELS_LAST)
    stride, padding, *_ = geometry(case)
    full = torch.nn.grad.conv2d_input(z.shape, weight.double(), dy.double(), stride, padding)
    separate = plain
    if adds:
        full, separate = full + added.double(), plain + added
    g, sure = before_activation(full, z, *affine, other, activation)
    ulps = 2**13 if dtype == torch.float32 else 16
    separate = torch.where(g == 0, 0, separate)
    terms = case[2] * case[5] ** 2
    assert_by_rule(torch.where(sure, dx, separate), separate, g, ulps, terms=terms)
    # The sums are those of what is returned.
    mean = statistics[0].double().view(1, -1, 1, 1)
    for i, values in enumerate((dx.double(), dx.double() * (z.double() - mean))):
        actual, exact = sums[..., i].double().sum(1), values.sum((0, 2, 3))
        most = values.abs().sum((0, 2, 3))
        assert ((actual - exact).abs() <= 2**-20 * most + 1e-30).all(), i


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a[0])
@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradient_and_sums(gpu, dtype, case, activation, residual, adds):
    hopper_only("cuda")
    check(case, dtype, activation, residual, adds)


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a[0])
@pytest.mark.parametrize("case", STRIDED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_strided(gpu, dtype, case, activation, residual):
    check(case, dtype, activation, residual, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeatable(gpu, dtype):
    hopper_only("cuda")
    torch.manual_seed(1)
    first = run(SHAPES[4], dtype, ACTIVATIONS[0], True, True)
    torch.manual_seed(1)
    second = run(SHAPES[4], dtype, ACTIVATIONS[0], True, True)
    assert torch.equal(first[4], second[4])
    assert torch.equal(first[5], second[5])


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_values_that_are_not_finite(gpu, value):
    """They reach the sums of their channel, and no other."""
    hopper_only("cuda")
    case = SHAPES[1]
    given, norm, *_ = tensors(case, torch.bfloat16, ACTIVATIONS[2], False, "cuda")
    dy, x, weight, added = given
    added[1, 7, 3, 2] = value
    where = geometry(case)
    with torch.no_grad(), below_autograd():
        dx, _, _, sums = torch.ops.braze.conv2d_norm_backward(
            dy, x, weight, *where, [True, False, False], False, False, KERNEL, added,
            *norm, *ACTIVATIONS[2],
        )  # fmt: skip
    bad = ~sums.isfinite().all(-1).all(-1)
    assert bad.nonzero().flatten().tolist() == [7]
    assert (~dx.isfinite()).sum() == 1


def test_without_a_kernel_it_is_the_plain_gradient(device):
    given, norm, _, _ = tensors((2, 5, 6, 7, 8, 3, 1), torch.float32, ACTIVATIONS[0], True, device)
    dy, x, weight, added = given
    where, mask = ([1, 1], [1, 1], [1, 1], 1), [True] * 3
    settings = False, False, "auto"
    args = dy, x, weight, *where, mask, *settings, added, *norm, *ACTIVATIONS[0]
    torch.library.opcheck(torch.ops.braze.conv2d_norm_backward, args)
    with torch.no_grad(), below_autograd():
        *grads, sums = torch.ops.braze.conv2d_norm_backward(*args)
        plain = torch.ops.braze.conv2d_backward(dy, x, weight, *where, mask, *settings, added)
    assert sums.shape == (5, 0, 2)
    for actual, expected in zip(grads, plain, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4, 8, 6, 5), (3, 5, 7, 7), (64, 130, 9, 9)], ids=str)
@pytest.mark.parametrize("form", ["channels_last", "contiguous"])
def test_backward_of_sums(device, form, shape, dtype, affine):
    """It is the backward of batch norm alone, of sums in any number of sets."""
    form = getattr(torch, form if form == "channels_last" else "contiguous_format")
    z, dy = (
        torch.randn(shape, device=device).mul(2).add(1).to(dtype, memory_format=form)
        for _ in range(2)
    )
    c, sets = shape[1], 5
    gamma = torch.randn(c, device=device) if affine != "none" else None
    beta = torch.randn(c, device=device) if affine == "weight and bias" else None
    with torch.no_grad(), below_autograd():
        _, mask, statistics = torch.ops.braze.batch_norm_act(
            z, None, gamma, beta, None, None, None, True, 0.1, 1e-5, "identity", 0.0, 0.0
        )
        separate = torch.ops.braze.batch_norm_act_backward(
            dy, z, None, gamma, beta, mask, statistics, True, "identity", 0.0, 0.0,
            [True, False, True, True],
        )  # fmt: skip
        mean = statistics[0].double().view(1, -1, 1, 1)
        g, deviation = dy.double(), z.double() - mean
        total = torch.stack([g.sum((0, 2, 3)), (g * deviation).sum((0, 2, 3))], -1)
        share = torch.rand(c, sets, 1, device=device, dtype=torch.float64)
        sums = (total.unsqueeze(1) * share / share.sum(1, keepdim=True)).float()
        args = dy, z, gamma, beta, statistics, sums
        dx, dweight, dbias, constant = torch.ops.braze.batch_norm_backward_of_sums(
            *args, [True] * 4
        )
    x = z.double().requires_grad_()
    w, b = (
        (torch.full((c,), start, device=device) if t is None else t).double().requires_grad_()
        for t, start in ((gamma, 1.0), (beta, 0.0))
    )
    exact = torch.autograd.grad(stock.batch_norm(x, None, None, w, b, True), (x, w, b), dy.double())
    assert_by_rule(dx, separate[0], exact[0], 8)
    assert_by_rule(dweight, separate[2], exact[1], 8)
    assert_by_rule(dbias, separate[3], exact[2], 8)
    assert torch.equal(constant, torch.zeros(c, device=device, dtype=dtype))
    torch.library.opcheck(
        torch.ops.braze.batch_norm_backward_of_sums, (*args, [True, True, False, True])
    )


def test_what_the_ops_refuse(device):
    case = 2, 8, 6, 7, 8, 1, 1
    given, norm, *_ = tensors(case, torch.float32, ACTIVATIONS[0], False, device)
    dy, x, weight, added = given
    z, mask, statistics = norm
    where = [1, 1], [0, 0], [1, 1], 1
    rest = [True] * 3, False, False, "auto"

    def conv(z=z, mask=mask, statistics=statistics, activation="relu"):
        return torch.ops.braze.conv2d_norm_backward(
            dy, x, weight, *where, *rest, added, z, mask, statistics, activation, 0.0, 0.0
        )

    def norm_backward(sums, dtype=torch.float32):
        return torch.ops.braze.batch_norm_backward_of_sums(
            x.to(dtype), z.to(dtype), None, None, statistics.to(dtype), sums, [True] * 4
        )

    good = torch.zeros(8, 3, 2, device=device)
    with torch.no_grad():
        for match, call in {
            "norm_input": lambda: conv(z=z[:, :4]),
            "expected a mask of": lambda: conv(mask=torch.ones(3, device=device).byte()),
            "expected statistics of shape": lambda: conv(statistics=statistics[:3]),
            "an activation that bounds": lambda: conv(activation="silu"),
            r"float32 sums of shape \[8, sets, 2\]": lambda: norm_backward(good[:7]),
            "does not take float64": lambda: norm_backward(good, torch.float64),
        }.items():
            with pytest.raises(RuntimeError, match=match):
                call()
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.ops.braze.batch_norm_backward_of_sums(
            x.requires_grad_(), z, None, None, statistics, good, [True] * 4
        )


@pytest.fixture
def used(monkeypatch):
    """How often each node of a norm found sums of its gradient, and did not."""
    counts = {True: 0, False: 0}
    for name in ("batch_norm_act", "bn_relu", "conv_bn_act"):
        module = importlib.import_module(f"braze._ops.{name}")
        function = module.sums_of

        def counted(*args, function=function):
            sums = function(*args)
            counts[sums is not None] += 1
            return sums

        monkeypatch.setattr(module, "sums_of", counted)
    return counts


def network(device):
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        Bottleneck(64, 64), Bottleneck(128, 64), Bottleneck(128, 64, 2), Bottleneck(128, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    ).to(device, memory_format=CHANNELS_LAST)  # fmt: skip


def losses(model, autocast, device, steps=2):
    torch.manual_seed(0)
    x = torch.randn(16, 3, 16, 16, device=device).contiguous(memory_format=CHANNELS_LAST)
    target = torch.randint(0, 10, (16,), device=device)
    step = braze.TrainStep(
        model, stock.cross_entropy, braze.optim.SGD(model.parameters(), lr=0.05), autocast=autocast
    )
    return torch.stack([step(x, target).clone() for _ in range(steps)])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["tf32", "bf16"])
def test_steps_use_them(gpu, autocast, used, monkeypatch):
    hopper_only("cuda")
    set_tf32("cuda", True)
    original = network("cuda")
    model, other = (braze.convert(copy.deepcopy(original)) for _ in range(2))
    with_sums = losses(model, autocast, "cuda")
    assert used[True] > 0
    monkeypatch.setattr(norm_grads, "NORM_GRADS_ON", ())
    before = used[True]
    without = losses(other, autocast, "cuda")
    assert used[True] == before
    torch.testing.assert_close(with_sums, without, rtol=2e-2, atol=0)
    for (name, a), b, start in zip(
        model.named_parameters(), other.parameters(), original.parameters(), strict=True
    ):
        change = (b - start).norm()
        assert (a - b).norm() <= (0.4 if autocast else 0.2) * change, name


def test_gradients_are_those_of_torch(gpu, used):
    """Of a step in TF32, against float64, beside torch's own in TF32."""
    hopper_only("cuda")
    set_tf32("cuda", True)
    original = network("cuda")
    x = torch.randn(16, 3, 16, 16, device="cuda").contiguous(memory_format=CHANNELS_LAST)
    target = torch.randint(0, 10, (16,), device="cuda")

    def gradients(model, x):
        stock.cross_entropy(model(x), target).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    model = braze.convert(copy.deepcopy(original))
    step = braze.TrainStep(model, stock.cross_entropy, braze.optim.SGD(model.parameters(), lr=0.0))
    step(x, target)
    assert used[True] > 0
    ours = {n: p.grad for n, p in model.named_parameters()}
    theirs = gradients(copy.deepcopy(original), x)
    exact = gradients(copy.deepcopy(original).double(), x.double())
    for name, expected in exact.items():
        scale = expected.norm()
        error = (ours[name].double() - expected).norm() / scale
        stock_error = (theirs[name].double() - expected).norm() / scale
        assert error <= 3 * stock_error + 1e-3, name


def test_who_looks_at_the_gradient_sees_it(gpu, used):
    """A hook on a block's result, and a retained gradient, are of the result."""
    hopper_only("cuda")
    set_tf32("cuda", True)
    seen = []

    class Watched(nn.Sequential):
        def forward(self, x):
            for i, layer in enumerate(self):
                x = layer(x)
                if i == 3:
                    x.register_hook(lambda g: seen.append(g.clone()))
                if i == 4:
                    x.retain_grad()
                    self.kept = x
            return x

    original = network("cuda")
    watched = Watched(*braze.convert(copy.deepcopy(original)))
    x = torch.randn(16, 3, 16, 16, device="cuda").contiguous(memory_format=CHANNELS_LAST)
    target = torch.randint(0, 10, (16,), device="cuda")
    optimizer = braze.optim.SGD(watched.parameters(), lr=0.0)
    step = braze.TrainStep(watched, stock.cross_entropy, optimizer)
    step(x, target)
    assert used[True] > 0
    ours = [seen.pop(), watched.kept.grad]

    def of_torch(dtype):
        plain = Watched(*copy.deepcopy(original)).to(dtype)
        stock.cross_entropy(plain(x.to(dtype)), target).backward()
        return seen.pop(), plain.kept.grad

    results = zip(ours, of_torch(torch.float32), of_torch(torch.float64), strict=True)
    for actual, theirs, exact in results:
        # Of values near 0 rounding decides whether a ReLU lets the gradient through.
        assert (actual - exact).norm() <= 3 * (theirs - exact).norm() + 1e-3 * exact.norm()
        assert (actual == 0).float().mean() < 0.01  # a ReLU stops half of what goes on


def layers(device, form=CHANNELS_LAST):
    """What comes before a batch norm, and weights of convolutions behind it."""
    z = torch.randn(16, 64, 16, 16, device=device).contiguous(memory_format=form)
    weight = torch.randn(64, 64, 1, 1, device=device) / 8
    return z.requires_grad_(), weight.requires_grad_()


def gradients_in_a_step(function, *tensors):
    """Of the sum of squares of function(*tensors), within what a step does."""
    with StepScope() as scope:
        loss = function(*tensors).square().sum()
    with scope.backward():
        return torch.autograd.grad(loss, tensors)


def normed(z):
    return F.batch_norm_act(z, None, None, training=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_batch_norm_before_a_convolution_alone(device, used, monkeypatch, in_place):
    """What an operation in place makes of the result is not the result: its gradient goes on to
    other tensors, too."""
    set_tf32(device, True)
    monkeypatch.setattr(norm_grads, "NORM_GRADS_ON", ("cpu", "cuda"))
    z, weight = layers(device)

    def work(z, weight):
        y = normed(z)
        return F.conv2d(y.add_(z) if in_place else y, weight)

    def plain(z, weight):
        y = stock.batch_norm(z, None, None, training=True).relu()
        return stock.conv2d(y + z if in_place else y, weight)

    ours = gradients_in_a_step(work, z, weight)
    hopper = runs_hopper_kernels(device)
    assert (used[True] > 0) == (hopper and not in_place)
    wide = [t.detach().double().requires_grad_() for t in (z, weight)]
    exact = torch.autograd.grad(plain(*wide).square().sum(), wide)
    for actual, expected in zip(ours, exact, strict=True):
        assert (actual - expected).norm() <= 1e-2 * expected.norm()


def test_whose_norm_a_reader_finds(device, monkeypatch):
    monkeypatch.setattr(norm_grads, "NORM_GRADS_ON", ("cpu", "cuda"))
    z, _ = layers(device)

    def found(change):
        with StepScope():
            return norm_grads.norm_before(change(normed(z))) is not None

    def hooked(y):
        y.register_hook(lambda g: None)
        return y

    def retained(y):
        y.retain_grad()
        return y

    assert found(lambda y: y)
    assert not found(lambda y: y.add_(z))
    assert not found(lambda y: y.relu())
    assert not found(hooked)
    assert not found(retained)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not found(lambda y: y)
    assert not hasattr(normed(z), "_braze_norm")  # outside of a step


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(device, monkeypatch, reentrant):
    """Which gives what was saved once."""
    monkeypatch.setattr(norm_grads, "NORM_GRADS_ON", ("cpu", "cuda"))
    tensors = layers(device)

    def block(z, weight):
        return F.conv2d(normed(z), weight)

    def recomputed(*tensors):
        return checkpoint(block, *tensors, use_reentrant=reentrant)

    def gradients(function):
        with StepScope() as scope:
            loss = function(*tensors).square().sum()
        with scope.backward():
            loss.backward()
        return [t.grad.clone() for t in tensors if t.grad is not None]

    expected = gradients(block)
    for t in tensors:
        t.grad = None
    for a, b in zip(gradients(recomputed), expected, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


def test_kernels(gpu):
    """Nobody reads a block's gradient again for the sums."""
    hopper_only("cuda")

    def names(sums):
        given, norm, affine, _ = tensors(SHAPES[4], torch.bfloat16, ACTIVATIONS[0], True, "cuda")
        dy, x, weight, added = given
        where = [1, 1], [0, 0], [1, 1], 1
        rest = [True, False, False], False, False, "auto", added
        z, mask, statistics = norm

        def work():
            with torch.no_grad(), below_autograd():
                if not sums:
                    dx, *_ = torch.ops.braze.conv2d_backward(dy, x, weight, *where, *rest)
                    torch.ops.braze.batch_norm_act_backward(
                        dx, z, None, *affine, mask, statistics, True, *ACTIVATIONS[0], [True] * 4
                    )
                    return
                dx, *_, sets = torch.ops.braze.conv2d_norm_backward(
                    dy, x, weight, *where, *rest, *norm, *ACTIVATIONS[0]
                )
                torch.ops.braze.batch_norm_backward_of_sums(
                    dx, z, *affine, statistics, sets, [True, True, True, False]
                )

        work()
        return cuda_kernels_of(work)

    of_sums = "row_grad_sums", "resident_backward", "held_rows_backward"
    assert any(name in names(False) for name in of_sums)
    assert not any(name in names(True) for name in of_sums)
