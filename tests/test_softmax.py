import warnings

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import assert_by_rule, assert_same_layer, check_against_stock, compile, layouts

OPS = ["softmax", "log_softmax"]
# (shape, dim): lanes, block and column teams; odd, prime, 1 and 0
CASES = [
    ((), 0),
    ((1,), 0),
    ((7,), -1),
    ((0, 5), 1),
    ((5, 0), 1),
    ((3, 1), 1),
    ((64, 10), 1),
    ((33, 128), -1),
    ((5, 1000), 1),
    ((3, 1031), 1),
    ((2, 4096), 1),
    ((2, 9001), 1),
    ((10, 64), 0),
    ((2, 3, 5, 7), 1),
    ((2, 300, 130), 1),
    ((2, 17, 3), 0),
]


@pytest.fixture(params=OPS)
def op(request):
    return request.param


@pytest.mark.parametrize(("shape", "dim"), CASES, ids=str)
def test_matches_stock(device, dtype, op, shape, dim):
    x = (4 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    check_against_stock(
        lambda t: getattr(F, op)(t, dim),
        lambda t: getattr(stock, op)(t, dim),
        [x],
    )


def test_layouts(device, dtype, op):
    for name, x in layouts((4, 5, 6, 7), device, dtype):
        for dim in range(4):
            y = getattr(F, op)(x, dim)
            reference = getattr(stock, op)(x.double(), dim)
            assert_by_rule(y, getattr(stock, op)(x, dim), reference, what=f"{name} {dim}")
            assert y.stride() == torch.empty_like(x).stride(), name


def test_unaligned_storage_offset(device, dtype, op):
    x = torch.randn(8 * 64 + 1, device=device).to(dtype)[1:].view(8, 64).requires_grad_()
    check_against_stock(
        lambda t: getattr(F, op)(t, 1),
        lambda t: getattr(stock, op)(t, 1),
        [x],
    )


@pytest.mark.parametrize("dims", [(2, 40), (40, 2)], ids=str)
def test_special_values(device, dtype, op, dims):
    inf, nan = float("inf"), float("nan")
    rows = [
        [inf, 1.0],
        [-inf, 1.0],
        [-inf, -inf],
        [nan, 1.0],
        [1e-40, 0.0],
        [1e4, -1e4],
        [nan, -inf],
    ]
    for row in rows:
        x = torch.full((2, 40), row[1], device=device)
        x[0, 3], x[1, 0] = row[0], row[0]
        x = x.to(dtype).reshape(-1)[: dims[0] * dims[1]].reshape(dims).requires_grad_()
        for dim in (0, 1):
            check_against_stock(
                lambda t, d=dim: getattr(F, op)(t, d),
                lambda t, d=dim: getattr(stock, op)(t, d),
                [x],
            )


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_dtype_argument(device, op, half):
    x = (3 * torch.randn(6, 40, device=device)).to(half).requires_grad_()
    check_against_stock(
        lambda t: getattr(F, op)(t, 1, dtype=torch.float32),
        # The gradient is rounded to 16 bits once, as stock's is.
        lambda t: getattr(stock, op)(t, 1, dtype=torch.promote_types(t.dtype, torch.float32)),
        [x],
    )
    for wanted in (torch.float64, half):
        for y, api in ((x, F), (x.float(), F), (x.long(), stock)):  # integers are torch's
            result = getattr(F, op)(y, 1, dtype=wanted)
            assert result.dtype == wanted
            assert torch.equal(result, getattr(api, op)(y.to(wanted), 1))


def test_autocast_follows_torch(device, op):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(4, 5, device=device, dtype=dtype, requires_grad=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            y = getattr(F, op)(x, 1)
            raw = getattr(torch.ops.braze, op)(x, 1)
            assert y.dtype == raw.dtype == getattr(stock, op)(x, 1).dtype
        y.sum().backward()
        assert x.grad.dtype == dtype


def test_implicit_dim(device, op):
    for shape in [(), (4,), (4, 5), (4, 5, 6), (2, 3, 4, 5)]:
        x = torch.randn(shape, device=device)
        with pytest.warns(UserWarning, match=f"Implicit dimension choice for {op}"):
            y = getattr(F, op)(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_by_rule(y, getattr(stock, op)(x), getattr(stock, op)(x.double()))


def test_gradcheck(device, op):
    for shape, dim in [((4, 5), 1), ((3, 4, 2), 1), ((), 0)]:
        x = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t, d=dim: getattr(F, op)(t, d), x)
        assert torch.autograd.gradcheck(lambda t, d=dim: getattr(torch.ops.braze, op)(t, d), x)
        assert torch.autograd.gradgradcheck(lambda t, d=dim: getattr(F, op)(t, d), x)


def test_opcheck(device, dtype, op):
    x = torch.randn(2, 5, 3, 4, device=device).to(dtype).to(memory_format=torch.channels_last)
    forward = getattr(torch.ops.braze, op).default
    torch.library.opcheck(forward, (x.clone().requires_grad_(), 1))
    backward = getattr(torch.ops.braze, f"{op}_backward").default
    torch.library.opcheck(backward, (x, x, -1, dtype))
    if dtype == torch.bfloat16:
        torch.library.opcheck(forward, (x.clone().requires_grad_(), 1, torch.float32))
        torch.library.opcheck(backward, (x.float(), x.float(), -1, dtype))


def test_compile(device, op):
    x = torch.randn(4, 5, device=device, requires_grad=True)
    compiled = compile(lambda t: getattr(F, op)(t * 2, dim=-1) + 1)
    check_against_stock(compiled, lambda t: getattr(stock, op)(t * 2, dim=-1) + 1, [x])


def test_layers(device):
    x = torch.randn(2, 3, 4, device=device)
    for ours, theirs in [
        (braze.nn.Softmax(1), torch.nn.Softmax(1)),
        (braze.nn.LogSoftmax(-1), torch.nn.LogSoftmax(-1)),
    ]:
        assert isinstance(ours, type(theirs))
        assert_same_layer(ours, theirs, x)


def test_bad_input(device, op):
    x = torch.randn(3, 4, device=device)
    for dim in (2, -3):
        with pytest.raises(IndexError, match=rf"range of \[-2, 1\], but got {dim}"):
            getattr(F, op)(x, dim)
        with pytest.raises(RuntimeError, match="Dimension out of range"):
            getattr(torch.ops.braze, op)(x, dim)
    with pytest.raises(IndexError):
        getattr(F, op)(x.sum(), 1)
    for bad in (x.long(), x.cfloat()):
        with pytest.raises(RuntimeError, match="expected input of dtype float64"):
            getattr(torch.ops.braze, op)(bad, 1)
    with pytest.raises(RuntimeError, match="expected dtype to be the input's"):
        getattr(torch.ops.braze, op)(x, 1, torch.float64)
    backward = getattr(torch.ops.braze, f"{op}_backward")
    with pytest.raises(RuntimeError, match="same shape as output"):
        backward(x[:2], x, 1, torch.float32)
    with pytest.raises(RuntimeError, match="expected input_dtype"):
        backward(x, x, 1, torch.float64)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    dim=st.integers(-4, 3),
    step=st.integers(1, 2),
    log=st.booleans(),
)
def test_fuzzed_shapes(sizes, dim, step, log):
    dim, name = dim % len(sizes), OPS[log]
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        x = torch.randn(sizes, device=device)[..., ::step].transpose(0, -1).requires_grad_()
        check_against_stock(
            lambda t: getattr(F, name)(t, dim),
            lambda t: getattr(stock, name)(t, dim),
            [x],
        )


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A softmax without the maximum subtracted overflows; one over the wrong dimension differs."""

    def overflowing(t):
        e = t.exp()
        return e / e.sum(1, keepdim=True)

    x = (torch.randn(4, 9, device=device) * 300).to(dtype).requires_grad_()
    if dtype != torch.float64:
        with pytest.raises(AssertionError, match="non-finite"):
            check_against_stock(overflowing, lambda t: stock.softmax(t, 1), [x])
    x = torch.randn(9, 9, device=device).to(dtype).requires_grad_()
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(lambda t: F.softmax(t, 0), lambda t: stock.softmax(t, 1), [x])
