import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, layouts

# shape, kernel_size, stride, padding, dilation, ceil_mode
MAX_CASES = [
    ((4, 8, 16, 16), 2, None, 0, 1, False),
    ((3, 5, 28, 28), 2, None, 0, 1, False),
    ((2, 16, 14, 14), 2, 2, 0, 1, False),
    ((2, 3, 7, 9), 2, 2, 0, 1, False),
    ((2, 3, 7, 9), 3, 2, 1, 1, True),
    ((2, 3, 7, 9), (3, 2), (1, 3), (1, 0), (2, 1), False),
    ((1, 1, 1, 1), 1, None, 0, 1, False),
    ((3, 1, 5, 5), 5, 1, 2, 1, False),
    ((5, 7, 11), 3, 2, 1, 1, False),
    ((2, 3, 17, 17), 17, 1, 8, 1, False),
    ((0, 3, 6, 6), 2, None, 0, 1, False),
    ((2, 8, 12, 10), 4, 2, 1, 1, True),
    ((2, 16, 12, 11), 3, 2, 1, 1, False),
    ((3, 16, 10, 9), 3, 2, 0, 1, True),
    ((2, 24, 9, 13), (2, 3), 2, (1, 0), 1, False),
    ((1, 8, 15, 7), 2, 2, 0, 1, False),
    ((1, 2, 6, 6), 2, 3, 1, 3, False),
]
# shape, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
AVG_CASES = [
    ((4, 8, 16, 16), 2, None, 0, False, True, None),
    ((3, 5, 28, 28), 2, None, 0, False, True, 3),
    ((2, 16, 14, 14), 2, 2, 0, False, False, None),
    ((2, 3, 7, 9), 3, 2, 1, True, True, None),
    ((2, 3, 7, 9), 3, 2, 1, True, False, None),
    ((2, 3, 7, 9), (3, 2), (1, 3), (1, 0), False, False, -2),
    ((1, 1, 1, 1), 1, None, 0, False, True, None),
    ((5, 7, 11), 3, 2, 1, False, True, None),
    ((2, 8, 12, 10), 4, 3, 2, True, True, None),
    ((0, 3, 6, 6), 2, None, 0, False, True, None),
]


def draw(shape, device, dtype, grad=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def nchw(t):
    """A copy in NCHW order for stock, whose CUDA kernels for channels_last differ from its others.

    avg_pool2d's backward leaves out the padding (pytorch issue 188344). max_pool2d takes element 0
    of the plane where a window is all -inf and faults in float64 with one channel and one window:
    its doubles in shared memory follow a single 4-byte index. A copy, since contiguous() keeps the
    strides of channels_last where there is one channel.
    """
    return t.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("case", MAX_CASES, ids=str)
def test_max_matches_stock(device, dtype, case):
    shape, *args = case
    x = draw(shape, device, dtype)
    check_against_stock(
        lambda t: F.max_pool2d(t, *args), lambda t: stock.max_pool2d(t, *args), [x], terms=1
    )
    actual, indices = F.max_pool2d(x, *args, return_indices=True)
    expected, expected_indices = stock.max_pool2d(x, *args, return_indices=True)
    assert torch.equal(actual, expected)
    assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize("case", AVG_CASES, ids=str)
def test_avg_matches_stock(device, dtype, case):
    shape, *args = case
    x = draw(shape, device, dtype)
    check_against_stock(lambda t: F.avg_pool2d(t, *args), lambda t: stock.avg_pool2d(t, *args), [x])


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
@pytest.mark.parametrize("args", [(2,), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("channels", [5, 16])
def test_layouts(device, dtype, name, args, channels):
    ours, theirs = getattr(F, name), getattr(stock, name)
    for layout, x in layouts((3, channels, 6, 8), device, dtype):
        x = x.detach().requires_grad_()
        y = check_against_stock(lambda t: ours(t, *args), lambda t: theirs(nchw(t), *args), [x])
        fmt = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        assert y.is_contiguous(memory_format=fmt), layout
        (grad,) = torch.autograd.grad(ours(x, *args).sum(), x)
        assert grad.is_contiguous(memory_format=fmt), layout


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
def test_unaligned_storage_offset(device, dtype, name):
    for shape in [(2, 3, 8, 8), (1, 4, 6, 14)]:
        numel = torch.Size(shape).numel()
        x = draw(numel + 1, device, dtype, grad=False)[1:].view(shape).requires_grad_()
        check_against_stock(
            lambda t: getattr(F, name)(t, 2), lambda t: getattr(stock, name)(t, 2), [x]
        )


@pytest.mark.parametrize("args", [(2,), (3, 2, 1)], ids=str)
def test_max_special_values(device, dtype, args):
    """NaN wins, ties go to the first element, and a window of -inf still has a winner."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1.0, 1e-40])
    for _ in range(4):
        x = values[torch.randint(len(values), (2, 8, 8, 8))].to(device, dtype)
        x[0, :2] = -float("inf")
        x[0, 2] = 3
        for fmt in (torch.contiguous_format, torch.channels_last):
            t = x.to(memory_format=fmt).requires_grad_()
            check_against_stock(
                lambda t: F.max_pool2d(t, *args), lambda t: stock.max_pool2d(nchw(t), *args), [t]
            )
            actual = F.max_pool2d(t, *args, return_indices=True)[1]
            expected = stock.max_pool2d(nchw(t), *args, return_indices=True)[1]
            assert torch.equal(actual, expected)


def test_max_window_without_an_element_inside(device):
    x = torch.randn(1, 1, 2, 2, device=device, requires_grad=True)
    y = F.max_pool2d(x, 2, 1, 1, 3)
    assert torch.equal(y, torch.full_like(y, -float("inf")))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_max_window_of_more_than_256_elements(device, dtype):
    x = draw((2, 3, 20, 21), device, dtype)
    y, taps = torch.ops.braze.max_pool2d(x, [17], [2], [8], [1], False)
    assert taps.dtype == torch.int32
    assert torch.ops.braze.max_pool2d(x, [16], [], [0], [1], False)[1].dtype == torch.uint8
    assert torch.equal(y, stock.max_pool2d(x, 17, 2, 8))
    check_against_stock(
        lambda t: F.max_pool2d(t, 17, 2, 8), lambda t: stock.max_pool2d(t, 17, 2, 8), [x]
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fuzz(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw_int = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    kernel = draw_int(1, 4), draw_int(1, 4)
    stride = draw_int(1, 4), draw_int(1, 4)
    padding = draw_int(0, kernel[0] // 2), draw_int(0, kernel[1] // 2)
    dilation = draw_int(1, 2), draw_int(1, 2)
    # Smaller planes have windows without any element, where stock's backward writes out of bounds.
    low = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    shape = draw_int(0, 3), draw_int(1, 9), low[0] + draw_int(0, 9), low[1] + draw_int(0, 9)
    ceil_mode, include = data.draw(st.booleans()), data.draw(st.booleans())
    torch.manual_seed(draw_int(0, 99))
    x = torch.randn(shape, device=device, dtype=torch.float64)
    if data.draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    check_against_stock(
        lambda t: F.max_pool2d(t, kernel, stride, padding, dilation, ceil_mode),
        lambda t: stock.max_pool2d(nchw(t), kernel, stride, padding, dilation, ceil_mode),
        [x],
    )
    check_against_stock(
        lambda t: F.avg_pool2d(t, kernel, stride, padding, ceil_mode, include),
        lambda t: stock.avg_pool2d(nchw(t), kernel, stride, padding, ceil_mode, include),
        [x],
    )


def test_gradcheck(device):
    x = torch.randn(2, 3, 5, 6, device=device, dtype=torch.float64, requires_grad=True)
    for args in [(2,), (3, 2, 1), ((3, 2), 1, (1, 0))]:
        assert torch.autograd.gradcheck(lambda t, args=args: F.max_pool2d(t, *args), x)
        assert torch.autograd.gradcheck(lambda t, args=args: F.avg_pool2d(t, *args), x)
        assert torch.autograd.gradgradcheck(lambda t, args=args: F.avg_pool2d(t, *args), x)


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, channels_last):
    x = draw((2, 3, 6, 7), device, dtype, grad=False)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    args = [3], [2], [1], [1], True
    ops = torch.ops.braze
    y, taps = ops.max_pool2d(x, *args)
    opcheck = torch.library.opcheck
    opcheck(ops.max_pool2d.default, (x.clone().requires_grad_(), *args))
    opcheck(ops.max_pool2d_backward.default, (y, taps, x.shape, *args, channels_last))
    opcheck(ops.max_pool2d_indices.default, (taps, x.shape, *args))
    args = [3], [2], [1], True, False, None
    opcheck(ops.avg_pool2d.default, (x.clone().requires_grad_(), *args))
    opcheck(ops.avg_pool2d_backward.default, (y.requires_grad_(), x.shape, *args, channels_last))


def test_compile(device):
    def f(pool, t):
        y, indices = pool.max_pool2d(t + 1, 2, return_indices=True)
        return pool.avg_pool2d(y, 3, 1, 1) * 2, indices

    for x in [torch.randn(2, 3, 8, 8, device=device), torch.randn(3, 3, 10, 8, device=device)]:
        for t in (x, x.to(memory_format=torch.channels_last)):
            t = t.requires_grad_()
            compiled = torch.compile(f, fullgraph=True)
            actual, expected = compiled(F, t), f(stock, nchw(t))
            torch.testing.assert_close(actual, expected)
            assert [v.stride() for v in actual] == [v.stride() for v in f(F, t)]
            grad = torch.autograd.grad(actual[0].square().sum(), t)
            torch.testing.assert_close(grad, torch.autograd.grad(expected[0].square().sum(), t))


def test_modules(device):
    x = torch.randn(2, 3, 9, 9, device=device)
    for name, args in [("MaxPool2d", (3, 2, 1, 1, True, True)), ("AvgPool2d", (3, 2, 1, True))]:
        ours, theirs = getattr(braze.nn, name)(*args), getattr(torch.nn, name)(*args)
        assert isinstance(ours, type(theirs))
        assert repr(ours) == repr(theirs)
        torch.testing.assert_close(ours(x), theirs(x))


X = (2, 3, 6, 6)
BAD_BOTH = [
    (X, dict(kernel_size=2, padding=2), "pad should be at most half of effective kernel size"),
    (X, dict(kernel_size=2, padding=-1), "pad must be non-negative, but got pad: -1"),
    (X, dict(kernel_size=2, stride=0), "stride should not be zero"),
    (X, dict(kernel_size=2, stride=-1), "stride should be greater than zero"),
    (X, dict(kernel_size=0), "stride should not be zero"),
    (X, dict(kernel_size=-1), "kernel size should be greater than zero"),
    (X, dict(kernel_size=[2, 2, 2]), "kernel_size must either be a single int, or a tuple of two"),
    (X, dict(kernel_size=2, stride=[1, 1, 1]), "stride must either be omitted, a single int"),
    (X, dict(kernel_size=2, padding=[1, 1, 1]), "padding must either be a single int, or a tuple"),
    (X, dict(kernel_size=9), r"\(3x6x6\). Calculated output size: \(3x0x0\). Output size is too"),
    (X, dict(kernel_size=None), "argument 'kernel_size' .position 2. must be tuple of ints, not N"),
    (X, dict(kernel_size=2.0), "argument 'kernel_size' .position 2. must be tuple of ints, not fl"),
    (X, dict(kernel_size="a"), "argument 'kernel_size' .position 2. must be tuple of ints, not s"),
    ((2, 0, 6, 6), dict(kernel_size=2), "with optional 0 dim batch size for input"),
    ((2, 3, 0, 6), dict(kernel_size=2, padding=1), "with optional 0 dim batch size for input"),
    ((1, 2, 3, 6, 6), dict(kernel_size=2), "3D or 4D .batch mode. tensor"),
]


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
@pytest.mark.parametrize(("shape", "kwargs", "message"), BAD_BOTH, ids=str)
def test_bad_settings(device, name, shape, kwargs, message):
    """torch's exception type and wording."""
    x = torch.randn(shape, device=device)
    with pytest.raises(Exception, match=message) as ours:
        getattr(F, name)(x, **kwargs)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        getattr(stock, name)(x, **kwargs)
    assert ours.type is theirs.type


def test_bad_input(device):
    x = torch.randn(X, device=device)
    with pytest.raises(RuntimeError, match="dilation should be greater than zero"):
        F.max_pool2d(x, 2, dilation=0)
    with pytest.raises(RuntimeError, match="smaller than or equal to half of kernel size"):
        F.max_pool2d(x, 3, padding=2, dilation=2)
    with pytest.raises(RuntimeError, match="divisor must be not zero"):
        F.avg_pool2d(x, 2, divisor_override=0)
    with pytest.raises(TypeError, match="'divisor_override' must be int, not float"):
        F.avg_pool2d(x, 2, divisor_override=2.5)
    ops = torch.ops.braze
    for dtype in (torch.int32, torch.int64, torch.complex64, torch.bool):
        with pytest.raises(RuntimeError, match="max_pool2d: expected input of dtype float64"):
            ops.max_pool2d(x.to(dtype), [2], [], [0], [1], False)
        with pytest.raises(RuntimeError, match="avg_pool2d: expected input of dtype float64"):
            ops.avg_pool2d(x.to(dtype), [2], [], [0], False, True, None)
    for name in ("max_pool2d", "avg_pool2d"):
        with pytest.raises(RuntimeError, match="3D or 4D"):
            getattr(F, name)(x[0, 0], 2)
    y, taps = torch.ops.braze.max_pool2d(x, [2], [], [0], [1], False)
    backward = torch.ops.braze.max_pool2d_backward
    with pytest.raises(RuntimeError, match=r"grad_output of shape \[2, 3, 3, 3\], but got \[2, 3"):
        backward(y[..., :2], taps, x.shape, [2], [], [0], [1], False, False)
    with pytest.raises(RuntimeError, match="expected taps of dtype uint8, but got int32"):
        backward(y, taps.int(), x.shape, [2], [], [0], [1], False, False)


def test_registered():
    for op in ("max_pool2d", "avg_pool2d"):
        assert any(k["shipped"] for k in braze.kernels(op))


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A max pool whose ties go to the last element, and an average over the valid elements."""
    x = torch.ones(1, 1, 4, 4, device=device, dtype=dtype, requires_grad=True)
    last = lambda t: F.max_pool2d(t.flip(-1, -2), 2).flip(-1, -2)  # noqa: E731
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(last, lambda t: stock.max_pool2d(t, 2), [x], terms=1)
    args = 3, 1, 1, False
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(
            F.avg_pool2d(x, *args, False),
            stock.avg_pool2d(x, *args),
            stock.avg_pool2d(x.double(), *args),
        )
