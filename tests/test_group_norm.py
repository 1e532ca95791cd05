import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from braze._norm_rules import FASTER, Faster
from common import (
    assert_by_rule,
    assert_same_layer,
    check_against_stock,
    compile,
    cuda_kernels_of,
    fuzzed,
    layouts,
)

pytestmark = pytest.mark.usefixtures("own_norms")

# (shape, groups): rows of each kind that tests/test_layer_norm.py names, planes short and long,
# such as no vector divides, and of one element
CASES = [
    ((3, 6), 2),
    ((5, 32, 1, 1), 4),
    ((2, 6, 7), 3),
    ((4, 8, 5, 6), 4),
    ((3, 32, 8, 8), 32),
    ((2, 64, 14, 14), 8),
    ((2, 24, 28, 28), 1),
    ((1, 64, 32, 32), 32),
    ((2, 10, 33, 31), 5),
    ((1, 16, 64, 65), 2),
    ((3, 16, 3, 3), 2),
    ((2, 64, 7, 7), 8),
    ((1, 4, 128, 96), 1),
    ((2, 3, 200, 210), 1),
    ((2, 6, 3, 4, 5), 2),
]


def parameters(channels, device, dtype):
    weight = torch.rand(channels, device=device).add_(0.5).to(dtype)
    return weight.requires_grad_(), torch.randn(channels, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
def test_matches_stock(device, dtype, shape, groups):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    tensors = [x, *parameters(shape[1], device, dtype)]
    check_against_stock(
        lambda x, w, b: F.group_norm(x, groups, w, b),
        lambda x, w, b: stock.group_norm(x, groups, w, b),
        tensors,
    )
    assert F.group_norm(x, groups).grad_fn.name() == "GroupNormBackward"


@pytest.mark.parametrize("shape", [(6, 4, 256, 256), (160, 4, 128, 256), (2, 6, 160, 252)], ids=str)
def test_groups_that_clusters_hold(hopper, dtype, shape):
    """Several blocks have a group, and some more than one, one after the other."""
    x = torch.randn(shape, device="cuda").add_(3).to(dtype)
    weight, bias = (t.detach() for t in parameters(shape[1], "cuda", dtype))
    names = cuda_kernels_of(lambda: F.group_norm(x, 2, weight, bias))
    assert dtype == torch.float64 or "stream_row_kernel<true" in names
    y, mean, rstd = torch.ops.braze.group_norm(x, weight, bias, 2, 1e-5)
    exact = stock.group_norm(x.double(), 2, weight.double(), bias.double())
    assert_by_rule(y, stock.group_norm(x, 2, weight, bias), exact)
    rows = x.double().view(shape[0], 2, -1)
    rtol = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(mean.double(), rows.mean(2), rtol=rtol, atol=0)
    expected = (rows.var(2, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("shape", [(3, 4, 30), (2, 5, 9, 9), (2, 3, 64, 64), (2, 3, 4, 5, 6)])
def test_instance_norm_matches_stock(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    tensors = [x, *parameters(shape[1], device, dtype)]
    check_against_stock(
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        lambda x, w, b: stock.instance_norm(x, weight=w, bias=b),
        tensors,
    )
    check_against_stock(F.instance_norm, stock.instance_norm, [x])
    assert F.instance_norm(x).grad_fn.name() == "GroupNormBackward"


def test_instance_norm_with_running_statistics_is_torchs(device):
    x = torch.randn(3, 4, 5, 5, device=device)
    results = []
    for f in (F, stock):
        mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
        results.append((f.instance_norm(x, mean, var), mean, var))
        results[-1] += (f.instance_norm(x, mean, var, use_input_stats=False),)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_float32_parameters_beside_16_bit_input(device, half):
    x = torch.randn(3, 8, 10, 10, device=device).to(half).requires_grad_()

    def in_float32(x, weight, bias):  # stock has no kernel of such a mixture on CUDA
        result = stock.group_norm(x.to(weight.dtype), 4, weight, bias)
        return result if x.dtype == torch.float64 else result.to(half)

    tensors = [x, *parameters(8, device, torch.float32)]
    check_against_stock(lambda x, w, b: F.group_norm(x, 4, w, b), in_float32, tensors)


def test_layouts(device, dtype):
    for name, x in layouts((4, 6, 5, 7), device, dtype):
        weight, bias = parameters(6, device, dtype)
        leaf = x.detach().requires_grad_()
        y = F.group_norm(leaf, 3, weight, bias)
        expected = stock.group_norm(x, 3, weight, bias)
        reference = stock.group_norm(*(x.double(), 3, weight.double(), bias.double()))
        assert_by_rule(y, expected, reference, what=name)
        channels_last = name == "channels_last"
        fmt = torch.channels_last if channels_last else torch.contiguous_format
        assert y.is_contiguous(memory_format=fmt), name
        (grad,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        assert grad.is_contiguous(memory_format=fmt), name


# (shape, groups): groups of whole vectors of channels and not, of one channel, all channels as one;
# parts of one image, images in plenty; single elements, and channels in tiles
CHANNELS_LAST = [
    ((3, 8, 6, 6), 2),
    ((2, 40, 9, 12), 4),
    ((2, 320, 7, 9), 32),
    ((2, 16, 14, 14), 16),
    ((1, 264, 20, 31), 1),
    ((1, 96, 64, 65), 8),
    ((150, 24, 3, 4), 3),
    ((2, 7, 10, 11), 7),
    ((1, 2056, 5, 3), 8),
]


def channels_last(shape, device, dtype):
    x = torch.randn(shape, device=device).to(dtype)
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("shape", "groups"), CHANNELS_LAST, ids=str)
def test_channels_last(device, dtype, shape, groups):
    check_against_stock(
        lambda x, w, b: F.group_norm(x, groups, w, b),
        lambda x, w, b: stock.group_norm(x, groups, w, b),
        [
            channels_last(shape, device, dtype).requires_grad_(),
            *parameters(shape[1], device, dtype),
        ],
    )


def test_channels_last_without_parameters(device, dtype):
    x = channels_last((2, 24, 8, 9), device, dtype).requires_grad_()
    check_against_stock(lambda x: F.group_norm(x, 3), lambda x: stock.group_norm(x, 3), [x])
    check_against_stock(F.instance_norm, stock.instance_norm, [x])


def test_channels_last_beside_a_contiguous_gradient(device, dtype):
    x = channels_last((2, 24, 8, 9), device, dtype).requires_grad_()
    grad = torch.randn(x.shape, device=device).to(dtype)
    check_against_stock(
        lambda x: F.group_norm(x, 3), lambda x: stock.group_norm(x, 3), [x], grad_output=grad
    )


def test_unaligned_channels_last(device, dtype):
    memory = torch.randn(2 * 8 * 64 + 1, device=device).to(dtype)
    x = memory[1:].view(2, 8, 8, 8).permute(0, 3, 1, 2)
    assert x.is_contiguous(memory_format=torch.channels_last)
    check_against_stock(
        lambda x: F.group_norm(x, 2), lambda x: stock.group_norm(x, 2), [x.requires_grad_()]
    )


def test_channels_last_is_repeatable(device):
    x = channels_last((2, 64, 33, 31), device, torch.bfloat16).requires_grad_()
    weight, bias = parameters(64, device, torch.bfloat16)
    grad = torch.randn_like(x)

    def run():
        y = F.group_norm(x, 8, weight, bias)
        return y, *torch.autograd.grad(y, (x, weight, bias), grad)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_unaligned_storage_offset(device, dtype):
    x = torch.randn(2 * 8 * 64 + 1, device=device).to(dtype)[1:].view(2, 8, 8, 8)
    check_against_stock(
        lambda x: F.group_norm(x, 2), lambda x: stock.group_norm(x, 2), [x.requires_grad_()]
    )


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("extent", [4, 30, 200])
def test_large_mean(device, extent, fmt):
    x = torch.randn(2, 6, extent, extent, device=device) + 1e4
    x = x.to(memory_format=fmt).requires_grad_()
    check_against_stock(lambda x: F.group_norm(x, 3), lambda x: stock.group_norm(x, 3), [x])
    _, mean, rstd = torch.ops.braze.group_norm(x, None, None, 3, 1e-5)
    rows = x.detach().double().reshape(2, 3, -1)
    torch.testing.assert_close(mean.double(), rows.mean(2), rtol=3e-7, atol=1e-6)
    expected = (rows.var(2, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
def test_special_values(device, dtype, fmt):
    x = torch.randn(6, 4, 5, 5, device=device)
    x[0, 0, 0, 0], x[1, 1, 0, 0], x[2, 3, 1, 1] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.5  # no variance
    x[4] = 1e-40
    x = x.to(dtype).to(memory_format=fmt)
    actual, expected = F.group_norm(x, 2), stock.group_norm(x, 2)
    exact = stock.group_norm(x.double().contiguous(), 2)
    for a, e, r in zip(actual, expected, exact, strict=True):
        assert_by_rule(a, e, r)


def check_fuzzed(data, device):
    draw_int = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    groups, channels = draw_int(1, 12), draw_int(1, 12)
    torch.manual_seed(draw_int(0, 99))
    extents = [draw_int(3, 40) for _ in range(draw_int(1, 2))]  # of few values dx is all rounding
    x = torch.randn(draw_int(1, 5), groups * channels, *extents, device=device).requires_grad_()
    check_against_stock(
        lambda x, w, b: F.group_norm(x, groups, w, b),
        lambda x, w, b: stock.group_norm(x, groups, w, b),
        [x, *parameters(groups * channels, device, torch.float32)],
    )


test_fuzz_cpu, test_fuzz_cuda = fuzzed(check_fuzzed)


def test_gradcheck(device):
    x = torch.randn(2, 6, 2, 3, device=device, dtype=torch.float64, requires_grad=True)
    inputs = x, *parameters(6, device, torch.float64)

    def run(x, w, b):
        return F.group_norm(x, 2, w, b)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(F.instance_norm, x)


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_by_mask(device, dtype, fmt):
    """Each subset of gradients equals that part of all of them."""
    x = torch.randn(3, 6, 5, 6, device=device).to(dtype).to(memory_format=fmt)
    weight, bias = (p.detach() for p in parameters(6, device, dtype))
    y, mean, rstd = torch.ops.braze.group_norm(x, weight, bias, 3, 1e-5)
    backward = torch.ops.braze.group_norm_backward
    full = backward(y, x, weight, mean, rstd, 3, [True, True, True])
    for mask in [(True, False, False), (False, True, False), (False, False, True)]:
        part = backward(y, x, weight, mean, rstd, 3, list(mask))
        for wanted, got, expected in zip(mask, part, full, strict=True):
            assert torch.equal(got, expected if wanted else expected.new_empty(0))


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("shape", "groups"), [((3, 40, 9, 12), 4), ((2, 7, 5, 6), 7)], ids=str)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_float32_results_of_16_bit_inputs(device, half, shape, groups, fmt):
    """As under autocast, whose rounding would show: y and dy are float32, dx is not."""
    x = torch.randn(shape, device=device).to(half).to(memory_format=fmt).requires_grad_()

    def ours(x, weight, bias):
        return torch.ops.braze.group_norm(x, weight, bias, groups, 1e-5, torch.float32)[0]

    def wide(x, weight, bias):
        to = torch.float64 if x.dtype == torch.float64 else torch.float32
        return stock.group_norm(x.to(to), groups, weight.to(to), bias.to(to))

    for dtype in (torch.float32, half):
        check_against_stock(ours, wide, [x, *parameters(shape[1], device, dtype)])
    y = ours(x, *parameters(shape[1], device, torch.float32))
    assert y.dtype == torch.float32
    assert y.is_contiguous(memory_format=fmt)
    with pytest.raises(RuntimeError, match="dtype to be the input's, or float32 for a 16-bit"):
        torch.ops.braze.group_norm(x, None, None, groups, 1e-5, torch.float64)
    empty = torch.empty(0, *shape[1:], device=device, dtype=half)
    assert ours(empty, None, None).dtype == torch.float32


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_converts_nothing_first(device, half):
    x = torch.randn(4, 32, 16, 16, device=device).to(half).to(memory_format=torch.channels_last)
    weight, bias = parameters(32, device, torch.float32)
    with torch.autocast(device, dtype=half):
        y = F.group_norm(x.requires_grad_(), 8, weight, bias)
    assert y.dtype == (torch.float32 if device == "cuda" else half)
    assert y.grad_fn.saved_tensors[0].dtype == half


def test_autocast_follows_torch(device):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(2, 4, 5, device=device, dtype=dtype, requires_grad=True)
        weight, bias = parameters(4, device, dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            y = F.group_norm(x, 2, weight, bias)
            raw = torch.ops.braze.group_norm(x, weight, bias, 2, 1e-5)[0]
            assert y.dtype == raw.dtype == stock.group_norm(x, 2, weight, bias).dtype
            z = F.instance_norm(x)
            assert z.dtype == stock.instance_norm(x).dtype
        (y.sum() + z.sum()).backward()
        assert x.grad.dtype == weight.grad.dtype == dtype


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, channels_last):
    op, opcheck = torch.ops.braze.group_norm.default, torch.library.opcheck
    x = torch.randn(3, 4, 5, 6, device=device).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = parameters(4, device, dtype)
    opcheck(op, (x.clone().requires_grad_(), weight, bias, 2, 1e-5))
    opcheck(op, (x.clone().requires_grad_(), None, None, 4, 1e-5))
    if dtype in (torch.bfloat16, torch.float16):
        opcheck(op, (x.clone().requires_grad_(), weight, bias, 2, 1e-5, torch.float32))
    y, mean, rstd = op(x, weight, bias, 2, 1e-5)
    args = y.detach(), x, weight.detach(), mean, rstd, 2
    for mask in ([True, True, True], [True, False, False], [False, True, False]):
        opcheck(torch.ops.braze.group_norm_backward.default, (*args, mask))


def test_compile(device):
    x = torch.randn(2, 6, 4, 5, device=device, requires_grad=True)
    check_against_stock(
        compile(lambda t, w, b: F.group_norm(t * 2, 3, w, b) + 1),
        lambda t, w, b: stock.group_norm(t * 2, 3, w, b) + 1,
        [x, *parameters(6, device, torch.float32)],
    )


def test_bad_input(device):
    x, weight = torch.randn(3, 4, 5, device=device), torch.ones(4, device=device)
    cases = [(x[0, 0], 1), (x, 3), (x, 2, weight[:3]), (x, 2, None, weight[:3]), (x.long(), 2)]
    for args in [*cases, (x[:1, :, :1], 4), (x, 2, weight.double()), (x, -1)]:
        outcomes = []
        for function in (stock.group_norm, F.group_norm):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                function(*args)
            outcomes.append((type(raised.value), str(raised.value)))
        assert outcomes[0] == outcomes[1]
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        F.instance_norm(x[:, :, :1])
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        torch.ops.braze.group_norm(x, None, None, 3, 1e-5)
    with pytest.raises(RuntimeError, match="greater than 0"):
        torch.ops.braze.group_norm(x, None, None, 0, 1e-5)
    y, mean, rstd = torch.ops.braze.group_norm(x, None, None, 2, 1e-5)
    with pytest.raises(RuntimeError, match="same shape as input"):
        torch.ops.braze.group_norm_backward(y[:2], x, None, mean, rstd, 2, [True] * 3)
    with pytest.raises(RuntimeError, match="expected rstd of 6 elements"):
        torch.ops.braze.group_norm_backward(y, x, None, mean, rstd[:2], 2, [True] * 3)


def test_empty(device, dtype):
    for shape in [(0, 4, 5), (3, 4, 0)]:
        x = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
        y, *_ = torch.ops.braze.group_norm(x, None, None, 2, 1e-5)
        assert y.shape == x.shape
        assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize(
    "make",
    [
        lambda n: n.GroupNorm(2, 4, 1e-3),
        lambda n: n.GroupNorm(2, 4, affine=False),
        lambda n: n.InstanceNorm2d(4),
        lambda n: n.InstanceNorm2d(4, affine=True, track_running_stats=True),
    ],
    ids=lambda make: repr(make(torch.nn)),
)
def test_layers(device, make):
    ours, theirs = make(braze.nn).to(device), make(torch.nn).to(device)
    assert isinstance(ours, type(theirs))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 4, 5, 5, device=device)
    assert_same_layer(ours, theirs, x)
    if isinstance(ours, torch.nn.InstanceNorm2d):
        assert_same_layer(ours, theirs, x[0])
        with pytest.raises(ValueError, match="expected 3D or 4D input"):
            ours(x[0, 0])


def test_auto_takes_ours_where_it_was_measured(device, monkeypatch):
    x = torch.randn(2, 4, 8, device=device, requires_grad=True)
    torchs = "NativeGroupNormBackward0"
    with braze.backend(group_norm="auto"):
        for sizes, expected in [
            ({}, torchs),
            ({torch.float32: Faster(16, 16)}, "GroupNormBackward"),
        ]:
            monkeypatch.setitem(FASTER, ("group_norm", device), sizes)
            assert F.group_norm(x, 2).grad_fn.name() == expected
            assert F.group_norm(x, 1).grad_fn.name() == torchs


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """One that gives a group's parameters to its channels in another order, and one whose gradient
    is that of instance norm."""
    x = torch.randn(3, 4, 5, 5, device=device).to(dtype).requires_grad_()
    weight = torch.tensor([1.0, 2, 3, 4], device=device, dtype=dtype)

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            y, *_ = torch.ops.braze.group_norm(x, weight, None, 2, 1e-5)
            _, *ctx.statistics = torch.ops.braze.group_norm(x, None, None, 4, 1e-5)
            ctx.save_for_backward(x, weight)
            return y

        @staticmethod
        def backward(ctx, grad):
            args = (grad, *ctx.saved_tensors, *ctx.statistics, 4, [True, False, False])
            return torch.ops.braze.group_norm_backward(*args)[0], None

    def expected(x, weight):
        return stock.group_norm(x, 2, weight)

    for wrong, what in [
        (lambda x, w: F.group_norm(x, 2, w.flip(0)), "output"),
        (WrongGradient.apply, "gradient 0"),
    ]:
        with pytest.raises(AssertionError, match=what):
            check_against_stock(wrong, expected, [x, weight])
