import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from braze._norm_rules import FASTER, Faster
from common import assert_by_rule, assert_same_layer, check_against_stock, compile, fuzzed, layouts

# (shape, normalised dimensions): teams of lanes and of warps with 2, 3, 4, 8 and 16 vectors a
# thread, scalar ones, and rows too long to be held; one row
CASES = [
    ((7,), 1),
    ((5, 3), 1),
    ((300, 8), 1),
    ((257, 96), 1),
    ((64, 100), 1),
    ((33, 192), 1),
    ((130, 768), 1),
    ((9, 1000), 1),
    ((5, 1031), 1),
    ((40, 1024), 1),
    ((6, 1536), 1),
    ((150, 2048), 1),
    ((3, 4099), 1),
    ((4, 4096), 1),
    ((3, 12288), 1),
    ((2, 16384), 1),
    ((150, 12288), 1),
    ((90, 20000), 1),
    ((2, 24000), 1),
    ((2, 40000), 1),
    ((3, 5, 7, 11), 2),
    ((4, 6, 10), 3),
    ((0, 5), 1),
]


pytestmark = pytest.mark.usefixtures("own_norms")


def parameters(shape, device, dtype):
    weight = torch.rand(shape, device=device).add_(0.5).to(dtype)
    return weight.requires_grad_(), torch.randn(shape, device=device).to(dtype).requires_grad_()


def ours_of(*args):
    return F.layer_norm(args[0], args[1].shape, *args[1:])


def stock_of(*args):
    return stock.layer_norm(args[0], args[1].shape, *args[1:])


@pytest.mark.parametrize(("shape", "dims"), CASES, ids=str)
def test_matches_stock(device, dtype, shape, dims):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight, bias = parameters(shape[len(shape) - dims :], device, dtype)
    result = check_against_stock(ours_of, stock_of, [x, weight, bias])
    assert result.is_contiguous()
    assert ours_of(x, weight, bias).grad_fn.name() == "LayerNormBackward"


@pytest.mark.parametrize(
    ("rows", "size"), [(40011, 33), (27001, 96), (2601, 1024), (1201, 2048), (301, 8192)]
)
def test_more_rows_than_a_gpu_has_at_once(device, dtype, rows, size):
    """Where a team has asked for its next row."""
    x = torch.randn(rows, size, device=device).to(dtype).requires_grad_()
    check_against_stock(ours_of, stock_of, [x, *parameters((size,), device, dtype)])


def test_rows_of_one_element(device, dtype):
    """Whose gradient is 0, but for rounding."""
    x = torch.randn(5, 1, device=device).to(dtype)
    weight, bias = parameters(1, device, dtype)
    assert_by_rule(ours_of(x, weight, bias), stock_of(x, weight, bias), bias.expand(5, 1))


@pytest.mark.parametrize("given", ["none", "weight", "bias"])
def test_parameters_that_are_not_there(device, dtype, given):
    x = torch.randn(6, 40, device=device).to(dtype).requires_grad_()
    weight, bias = parameters(40, device, dtype)
    given = {"none": [], "weight": [weight], "bias": [bias]}[given]
    names = {id(weight): "weight", id(bias): "bias"}

    def run(f):
        return lambda t, *p: f(t, (40,), **{names[id(g)]: q for g, q in zip(given, p, strict=True)})

    check_against_stock(run(F.layer_norm), run(stock.layer_norm), [x, *given])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_float32_parameters_beside_16_bit_input(device, half):
    x = torch.randn(50, 96, device=device).to(half).requires_grad_()
    weight, bias = parameters(96, device, torch.float32)

    def in_float32(x, weight, bias):  # stock has no kernel of such a mixture on CUDA
        if x.dtype == torch.float64:
            return stock_of(x, weight, bias)
        return stock_of(x.float(), weight, bias).to(half)

    check_against_stock(ours_of, in_float32, [x, weight, bias])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 96, 1536, 40000])
def test_float32_result_of_16_bit_input(device, half, size):
    """What CUDA's autocast asks for: forward and backward of the raw op."""
    x = torch.randn(9, size, device=device).to(half).requires_grad_()
    weight, bias = parameters(size, device, torch.float32)

    def raw(x, weight, bias):
        return torch.ops.braze.layer_norm(x, weight, bias, [size], 1e-5, torch.float32)[0]

    def cast(x, weight, bias):
        return stock_of(x.to(weight.dtype), weight, bias)

    check_against_stock(raw, cast, [x, weight, bias])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 96, 1536, 40000])
def test_16_bit_result_of_float32_input(device, half, size):
    """What a product behind it takes under CUDA's autocast, rounded once."""
    x = torch.randn(9, size, device=device).requires_grad_()
    weight, bias = parameters(size, device, torch.float32)

    def raw(x, weight, bias):
        dtype = half if x.dtype == torch.float32 else x.dtype
        return torch.ops.braze.layer_norm(x, weight, bias, [size], 1e-5, dtype)[0]

    def cast(x, weight, bias):
        return stock_of(x, weight, bias).to(half if x.dtype == torch.float32 else x.dtype)

    check_against_stock(raw, cast, [x, weight, bias])
    with pytest.raises(RuntimeError, match="of 16 bits for a float32 input"):
        torch.ops.braze.layer_norm(x.double(), None, None, [size], 1e-5, half)


def test_layouts(device, dtype):
    for name, x in layouts((4, 5, 6, 7), device, dtype):
        for dims in (1, 2):
            shape = x.shape[4 - dims :]
            weight, bias = parameters(shape, device, dtype)
            y = F.layer_norm(x, shape, weight, bias)
            expected = stock.layer_norm(x, shape, weight, bias)
            double = (t.double() for t in (weight, bias))
            reference = stock.layer_norm(x.double(), shape, *double)
            assert_by_rule(y, expected, reference, what=f"{name} {dims}")
            assert y.stride() == expected.stride(), name


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 24, 5, 6),
        (2, 96, 14, 16),
        (2, 1, 9, 8),
        (2, 768, 7, 7),
        (1, 1501, 4, 4),
        (1, 4000, 4, 4),
    ],
    ids=str,
)
def test_channels_of_images(device, dtype, shape, fmt):
    """As ConvNeXt's LayerNorm2d has them: moved to the end, normalised, and moved back."""
    x = torch.randn(shape, device=device).to(dtype)
    x = x.to(memory_format=fmt).requires_grad_(shape[1] > 1)  # of one channel it is all rounding
    weight, bias = parameters(shape[1], device, dtype)

    def moved(f):
        return lambda x, w, b: f(x.permute(0, 2, 3, 1), w.shape, w, b).permute(0, 3, 1, 2)

    y = check_against_stock(moved(F.layer_norm), moved(stock.layer_norm), [x, weight, bias])
    assert y.stride() == moved(stock.layer_norm)(x, weight, bias).stride()


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (2, 3, 0, 1), (3, 2, 0, 1), (0, 3, 2, 1)], ids=str)
@pytest.mark.parametrize("shape", [(2, 17, 3, 40), (2, 20, 1, 32), (1, 17, 33, 1)], ids=str)
def test_other_orders_of_dimensions(device, shape, order):
    """Some of which the transposing kernels bring into rows."""
    x = torch.randn(shape, device=device).permute(order).requires_grad_()
    size = x.shape[-1]
    check_against_stock(
        lambda x: F.layer_norm(x, (size,)), lambda x: stock.layer_norm(x, (size,)), [x]
    )


def test_unaligned_storage_offset(device, dtype):
    x = torch.randn(8 * 64 + 1, device=device).to(dtype)[1:].view(8, 64).requires_grad_()
    weight, bias = (torch.randn(65, device=device).to(dtype)[1:].requires_grad_() for _ in "wb")
    check_against_stock(ours_of, stock_of, [x, weight, bias])


def ill_conditioned(kind, size, device):
    x = torch.randn(4, size, device=device)
    if kind == "large_mean":
        x += 1e4
    elif kind == "outlier_first":
        x[:, 0] = 1e4
    else:
        x[:, size // 2 :] += 1e3
    return x


def check_rows(x):
    size = x.shape[1]
    check_against_stock(
        lambda t: F.layer_norm(t, (size,)), lambda t: stock.layer_norm(t, (size,)), [x]
    )
    # Independent of stock: the statistics themselves are right to fp32's last bits, the mean to
    # those of the deviation too.
    _, mean, rstd = torch.ops.braze.layer_norm(x, None, None, [size], 1e-5)
    d = x.detach().double()
    atol = 1e-6 * d.std(1).max().item()
    torch.testing.assert_close(mean.double(), d.mean(1, keepdim=True), rtol=3e-7, atol=atol)
    expected = (d.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=3e-6, atol=0)


KINDS = ["large_mean", "outlier_first", "halves_far_apart"]


@pytest.mark.parametrize("size", [64, 700, 5000, 50000])
@pytest.mark.parametrize("kind", KINDS)
def test_ill_conditioned_rows(device, kind, size):
    """The statistics where the mean dwarfs the deviation or the first values are no guide."""
    check_rows(ill_conditioned(kind, size, device).requires_grad_())


@pytest.mark.parametrize("size", [40, 64, 700, 1024, 5000, 32768, 50000])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_ill_conditioned_rows_of_16_bits(device, half, kind, size):
    x = ill_conditioned(kind, size, device)
    if kind == "large_mean":
        x = (x - 1e4) * 4 + 1e3  # of half a dozen different values
    check_rows(x.to(half).requires_grad_())


def test_special_values(device, dtype):
    x = torch.randn(8, 40, device=device)
    x[0, 3], x[1, 0], x[2, 39] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.5  # no variance
    x[4] = 1e-40
    x[5] *= 1e4
    x[7] = 5e36  # nor here
    weight, bias = parameters(40, device, dtype)
    x = x.to(dtype)
    actual, expected = ours_of(x, weight, bias), stock_of(x, weight, bias)
    reference = stock_of(*(t.double() for t in (x, weight, bias)))
    for a, e, r in zip(actual, expected, reference, strict=True):
        assert_by_rule(a, e, r)


def check_fuzzed(data, device):
    draw_int = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size = draw_int(1, 2048)
    torch.manual_seed(draw_int(0, 99))
    x = torch.randn(draw_int(1, 40), size, device=device).requires_grad_()
    if size > 8:  # of few values dx is all rounding
        check_against_stock(ours_of, stock_of, [x, *parameters(size, device, torch.float32)])


test_fuzz_cpu, test_fuzz_cuda = fuzzed(check_fuzzed)


def test_gradcheck(device):
    x = torch.randn(3, 4, 5, device=device, dtype=torch.float64, requires_grad=True)
    for dims in (1, 2, 3):
        inputs = x, *parameters(x.shape[3 - dims :], device, torch.float64)
        assert torch.autograd.gradcheck(ours_of, inputs)
        assert torch.autograd.gradgradcheck(ours_of, inputs)
    assert torch.autograd.gradgradcheck(lambda x: F.layer_norm(x, (5,)), x)


def test_gradients_by_mask(device, dtype):
    """Each subset of gradients equals that part of all of them."""
    for size in (48, 700, 40000):
        x = torch.randn(7, size, device=device).to(dtype)
        weight, bias = (p.detach() for p in parameters(size, device, dtype))
        y, mean, rstd = torch.ops.braze.layer_norm(x, weight, bias, [size], 1e-5)
        backward = torch.ops.braze.layer_norm_backward
        full = backward(y, x, weight, mean, rstd, [size], [True, True, True])
        for mask in [(True, False, False), (False, True, False), (False, False, True)]:
            part = backward(y, x, weight, mean, rstd, [size], list(mask))
            for wanted, got, expected in zip(mask, part, full, strict=True):
                if wanted and expected.dim() == 2:  # blocks of other numbers of rows
                    assert torch.equal(got, expected)
                assert got.shape == (expected.shape if wanted else (0,))


def test_repeatable(device, dtype):
    x = torch.randn(500, 96, device=device).to(dtype).requires_grad_()
    tensors = x, *parameters(96, device, dtype)
    runs = []
    for _ in range(2):
        y = ours_of(*tensors)
        runs.append((y, *torch.autograd.grad(y, tensors, torch.ones_like(y))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_same_for_any_number_of_threads():
    tensors = torch.randn(700, 96, requires_grad=True), *parameters(96, "cpu", torch.float32)
    runs, threads = [], torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            y = ours_of(*tensors)
            runs.append((y, *torch.autograd.grad(y, tensors, torch.ones_like(y))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_autocast_follows_torch(device):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(4, 5, device=device, dtype=dtype, requires_grad=True)
        weight, bias = parameters(5, device, dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            y = ours_of(x, weight, bias)
            raw = torch.ops.braze.layer_norm(x, weight, bias, [5], 1e-5)[0]
            assert y.dtype == raw.dtype == stock_of(x, weight, bias).dtype
        y.sum().backward()
        assert x.grad.dtype == weight.grad.dtype == dtype


def test_opcheck(device, dtype):
    op, opcheck = torch.ops.braze.layer_norm.default, torch.library.opcheck
    x = torch.randn(3, 4, 5, device=device).to(dtype)
    weight, bias = parameters((4, 5), device, dtype)
    opcheck(op, (x.clone().requires_grad_(), weight, bias, [4, 5], 1e-5))
    opcheck(op, (x.clone().requires_grad_(), None, None, [5], 1e-5))
    opcheck(op, (x.transpose(0, 1).detach().requires_grad_(), None, None, [5], 1e-5))
    if dtype == torch.bfloat16:
        opcheck(op, (x.clone().requires_grad_(), weight, bias, [4, 5], 1e-5, torch.float32))
    if dtype == torch.float32:
        opcheck(op, (x.clone().requires_grad_(), weight, bias, [4, 5], 1e-5, torch.bfloat16))
    y, mean, rstd = op(x, weight, bias, [4, 5], 1e-5)
    args = y.detach(), x, weight.detach(), mean, rstd, [4, 5]
    for mask in ([True, True, True], [True, False, False], [False, True, False]):
        opcheck(torch.ops.braze.layer_norm_backward.default, (*args, mask))


def test_compile(device):
    x = torch.randn(4, 5, device=device, requires_grad=True)
    inputs = x, *parameters(5, device, torch.float32)
    compiled = compile(lambda t, w, b: F.layer_norm(t * 2, (5,), w, b) + 1)
    check_against_stock(
        compiled, lambda t, w, b: stock.layer_norm(t * 2, (5,), w, b) + 1, list(inputs)
    )


def test_bad_input(device):
    x, weight = torch.randn(3, 4, device=device), torch.ones(4, device=device)
    cases = [(x, ()), (x, (5,)), (x, (3, 4, 1)), (x, (4,), weight[:3]), (x, (4,), None, weight[:3])]
    for args in [*cases, (x.long(), (4,)), (x, (4,), weight.double())]:
        with pytest.raises(RuntimeError) as expected:
            stock.layer_norm(*args)
        with pytest.raises(RuntimeError) as actual:
            F.layer_norm(*args)
        assert str(actual.value) == str(expected.value)
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[5\]"):
        torch.ops.braze.layer_norm(x, None, None, [5], 1e-5)
    with pytest.raises(RuntimeError, match="at least 1-dimensional"):
        torch.ops.braze.layer_norm(x, None, None, [], 1e-5)
    with pytest.raises(RuntimeError, match="expected dtype to be the input's"):
        torch.ops.braze.layer_norm(x, None, None, [4], 1e-5, torch.float64)
    with pytest.raises(RuntimeError, match="weight of dtype float32 or float32"):
        torch.ops.braze.layer_norm(x, weight.double(), None, [4], 1e-5)
    y, mean, rstd = torch.ops.braze.layer_norm(x, None, None, [4], 1e-5)
    with pytest.raises(RuntimeError, match="same shape as input"):
        torch.ops.braze.layer_norm_backward(y[:2], x, None, mean, rstd, [4], [True] * 3)
    with pytest.raises(RuntimeError, match="expected mean of 3 elements"):
        torch.ops.braze.layer_norm_backward(y, x, None, mean[:2], rstd, [4], [True] * 3)


@pytest.mark.parametrize("affine", [True, False])
def test_layer(device, affine):
    arguments = (5,), 1e-3, affine
    ours, theirs = braze.nn.LayerNorm(*arguments), torch.nn.LayerNorm(*arguments)
    assert isinstance(ours, torch.nn.LayerNorm)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert_same_layer(ours.to(device), theirs.to(device), torch.randn(2, 3, 5, device=device))


def test_auto_takes_ours_where_it_was_measured(device, monkeypatch):
    def took(size, dtype=torch.float32):
        x = torch.randn(4, size, device=device, dtype=dtype, requires_grad=True)
        names = {"NativeLayerNormBackward0": False, "LayerNormBackward": True}
        y = F.layer_norm(x, (size,))  # a node of Python's has its name while the result lives
        return names[y.grad_fn.name()]

    assert took(8)
    with braze.backend(layer_norm="auto"):
        monkeypatch.setitem(FASTER, ("layer_norm", device), {})
        assert not took(8)
        monkeypatch.setitem(FASTER, ("layer_norm", device), {torch.float32: Faster(8, 16)})
        assert [took(n) for n in (7, 8, 16, 17)] == [False, True, True, False]
        assert not took(8, torch.float64)
        monkeypatch.setitem(FASTER, ("layer_norm", device), {torch.float32: Faster(8, 16, 64)})
        assert [took(n) for n in (8, 16)] == [False, True]


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """One whose variance is unbiased, and whose gradient forgets that it depends on x."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            _, mean, rstd = torch.ops.braze.layer_norm(x, None, None, [6], 1e-5)
            ctx.rstd = rstd.to(x.dtype)
            return (x - mean.to(x.dtype)) * ctx.rstd * (5 / 6) ** 0.5

        @staticmethod
        def backward(ctx, grad):
            return (grad - grad.mean(1, keepdim=True)) * ctx.rstd

    class WrongGradient(Wrong):
        @staticmethod
        def forward(ctx, x):
            y, _, rstd = torch.ops.braze.layer_norm(x, None, None, [6], 1e-5)
            ctx.rstd = rstd.to(x.dtype)
            return y

    x = torch.randn(9, 6, device=device).to(dtype).requires_grad_()
    for wrong, what in [(Wrong, "output"), (WrongGradient, "gradient 0")]:
        with pytest.raises(AssertionError, match=what):
            check_against_stock(wrong.apply, lambda t: stock.layer_norm(t, (6,)), [x])


class Converted(torch.nn.Module):
    """Layers of both norms, and a call of each function."""

    def __init__(self):
        super().__init__()
        self.layer, self.group = torch.nn.LayerNorm(5), torch.nn.GroupNorm(2, 4)

    def forward(self, x):
        x = self.group(self.layer(x))
        return stock.layer_norm(x, (5,)) + stock.group_norm(x, 4)


def test_convert(device):
    model = Converted().to(device)
    x = torch.randn(2, 4, 5, device=device, requires_grad=True)
    expected = model(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    keys = model.state_dict().keys()
    model = braze.convert(model)
    assert type(model.layer) is braze.nn.LayerNorm
    assert type(model.group) is braze.nn.GroupNorm
    assert model.state_dict().keys() == keys
    result = model(x)
    functions = {n.name() for n, _ in result.grad_fn.next_functions}
    assert functions == {"LayerNormBackward", "GroupNormBackward"}
    (grad,) = torch.autograd.grad(result.square().sum(), x)
    torch.testing.assert_close((result, grad), (expected, expected_grad))
