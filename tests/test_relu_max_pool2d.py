"""relu_max_pool2d: max_pool2d(relu(input + bias)), and its gradients in one pass."""

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st
from test_scale_add import HALF

import braze.nn.functional as F
from braze.testing import DTYPES
from common import check_against_stock, compile, fuzzed

#: kernel_size, stride, padding, ceil_mode
WINDOWS = [
    (2, None, 0, False),
    (2, 2, 1, False),
    (2, 2, 0, True),
    (3, 2, 0, False),
    (3, 2, 1, False),
    (3, 2, 0, True),
    ((3, 2), 2, (1, 0), True),
    ((1, 2), (2, 2), 0, False),
]
SHAPES = [(3, 6, 8, 8), (2, 16, 7, 9), (1, 1, 5, 4), (4, 5, 3, 3), (2, 40, 6, 5), (5, 264, 4, 6)]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def functions(windows, contiguous=False):
    """Ours and torch's."""
    *geometry, ceil_mode = windows

    def ours(x, bias=None):
        return F.relu_max_pool2d(x, bias, *geometry, ceil_mode, contiguous)

    def theirs(x, bias=None):
        if bias is not None:
            x = x + bias.to(x.dtype).view(-1, 1, 1)
        return stock.max_pool2d(torch.relu(x), *geometry, ceil_mode=ceil_mode)

    return ours, theirs


def inputs(shape, device, dtype, bias=None):
    made = torch.randn(shape), torch.randn(shape[1])
    x, b = [t.to(device, d) for t, d in zip(made, (dtype, bias or dtype), strict=True)]
    x = x.contiguous(memory_format=torch.channels_last)
    return [x.requires_grad_(), b.requires_grad_()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("contiguous", [False, True])
def test_matches_stock(device, dtype, windows, shape, contiguous):
    ours, theirs = functions(windows, contiguous)
    y = check_against_stock(ours, theirs, inputs(shape, device, dtype), ulps=8)
    wanted = torch.contiguous_format if contiguous else torch.channels_last
    assert y.is_contiguous(memory_format=wanted)


@pytest.mark.parametrize(
    "shape", [(64, 6, 28, 28), (64, 16, 10, 10), (32, 64, 56, 56), (256, 3, 64, 64)], ids=str
)
def test_gradients_of_many_windows(device, dtype, shape):
    """As many as sums are shared out for, by clusters and by parts."""
    for windows in ((2, None, 0, False), (3, 2, 1, False)):
        check_against_stock(*functions(windows), inputs(shape, device, dtype), ulps=8)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_float32_bias(device, dtype):
    ours, theirs = functions(WINDOWS[0])
    for shape in ((3, 16, 8, 8), (64, 64, 32, 32)):
        tensors = inputs(shape, device, dtype, torch.float32)
        check_against_stock(ours, theirs, tensors, ulps=8)
        assert torch.autograd.grad(ours(*tensors).sum(), tensors[1])[0].dtype == torch.float32


def test_without_bias(device, dtype):
    x, _ = inputs((3, 16, 9, 8), device, dtype)
    for windows in WINDOWS:
        check_against_stock(*functions(windows), [x], ulps=8)


def _check_fuzzed(data, device):
    shape = [data.draw(st.integers(1, n)) for n in (4, 40, 12, 12)]
    shape[2:] = [max(3, n) for n in shape[2:]]
    windows = data.draw(st.sampled_from(WINDOWS))
    dtype = data.draw(st.sampled_from(DTYPES))
    torch.manual_seed(0)
    ours, theirs = functions(windows, data.draw(st.booleans()))
    check_against_stock(ours, theirs, inputs(shape, device, dtype), ulps=8)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(_check_fuzzed)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_special_values_and_ties(device, dtype, windows):
    """Values and gradients bit for bit: of equal elements the first wins, NaN passes, zero does
    not."""
    values = torch.tensor([0.0, -0.0, 1.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan")])
    generator = torch.Generator().manual_seed(0)
    for count in (3, 5, 7, 8):  # the last are rare
        at = torch.randint(count, (4, 8, 9, 8), generator=generator)
        x = values[at].to(device, dtype).contiguous(memory_format=torch.channels_last)
        ours, theirs = functions(windows)
        results = []
        for function in (ours, theirs):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            grad = torch.arange(y.numel(), device=device).view(y.shape) % 7 + 1
            results.append((y, *torch.autograd.grad(y, leaf, grad.to(dtype))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_other_layouts(device, dtype):
    wide = torch.randn(4, 32, 12, 10, device=device).to(dtype)
    bias = torch.randn(33, device=device).to(dtype)
    last = wide.contiguous(memory_format=torch.channels_last)
    ours, theirs = functions(WINDOWS[0])
    for x in (
        wide,
        wide[:, 1:17],
        last[:, ::2],
        last[:, :, 1:],
        wide[:1, :, :1, :1].expand_as(wide),
    ):
        tensors = [x.detach().requires_grad_(), bias[1 : 1 + x.shape[1]].detach().requires_grad_()]
        check_against_stock(ours, theirs, tensors, ulps=8)


@pytest.mark.parametrize("windows", [(2, 1, 0), (4, 2, 0), (3, 3, 0), (3, 2, 0, 2)], ids=str)
def test_other_windows_fall_back(device, windows):
    x, bias = inputs((2, 8, 9, 9), device, torch.float32)
    geometry = [*windows, 1][:4]
    if geometry[3] == 2:
        with pytest.raises(RuntimeError):
            torch.ops.braze.relu_max_pool2d(x, bias, [4], [2], [0], False)
        return
    ours, theirs = functions((*geometry[:3], False))
    check_against_stock(ours, theirs, [x, bias], ulps=8)


@pytest.mark.parametrize("wanted", [0, 1])
def test_partial_gradients(device, wanted):
    tensors = [t.detach() for t in inputs((3, 8, 6, 6), device, torch.float32)]
    tensors[wanted].requires_grad_()
    check_against_stock(*functions(WINDOWS[4]), tensors, ulps=8)


@pytest.mark.parametrize("shape", [(64, 6, 28, 28), (64, 64, 56, 56)], ids=str)
def test_repeatable(device, shape):
    tensors = inputs(shape, device, torch.bfloat16, torch.float32)
    y = F.relu_max_pool2d(*tensors, 2)
    grad = torch.randn_like(y)
    runs = [torch.autograd.grad(F.relu_max_pool2d(*tensors, 2), tensors, grad) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_empty_batch(device):
    tensors = inputs((0, 8, 6, 6), device, torch.float32)
    y = F.relu_max_pool2d(*tensors, 2)
    assert y.shape == (0, 8, 3, 3)
    dx, dbias = torch.autograd.grad(y.sum(), tensors)
    assert dx.shape == (0, 8, 6, 6)
    assert torch.equal(dbias, torch.zeros(8, device=device))


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_derivatives(device, windows):
    torch.manual_seed(0)
    ours, _ = functions(windows)
    tensors = inputs((2, 3, 5, 4), device, torch.float64)
    assert torch.autograd.gradcheck(ours, tensors)
    assert torch.autograd.gradgradcheck(ours, tensors)


def test_opcheck(device, dtype):
    for bias in {dtype, torch.float32 if dtype in HALF else dtype}:
        x, b = inputs((2, 6, 7, 8), device, dtype, bias)
        for windows in (([3], [2], [1], False), ([2, 2], [2], [0], True)):
            for contiguous in (False, True):
                args = x, b, *windows, contiguous
                torch.library.opcheck(torch.ops.braze.relu_max_pool2d.default, args)
            y, taps = torch.ops.braze.relu_max_pool2d(x, b, *windows)
            for of_bias in (None, bias):
                args = y.detach().requires_grad_(), taps, x.shape, *windows, of_bias
                torch.library.opcheck(torch.ops.braze.relu_max_pool2d_backward.default, args)


def test_compiles(device):
    ours, theirs = functions(WINDOWS[4])
    tensors = inputs((2, 8, 6, 6), device, torch.float32)
    check_against_stock(compile(ours), theirs, tensors, ulps=8)


def test_refuses(device):
    x, bias = inputs((2, 8, 6, 6), device, torch.float32)
    op = torch.ops.braze.relu_max_pool2d
    windows = [2], [2], [0], False
    with pytest.raises(RuntimeError, match="bias"):
        op(x, bias[:3], *windows)
    with pytest.raises(RuntimeError, match="dtype"):
        op(x, bias.double(), *windows)
    with pytest.raises(RuntimeError, match="4D"):
        op(x[0], bias, *windows)
    with pytest.raises(RuntimeError, match="3 x 3"):
        op(x, bias, [4], [2], [0], False)
    with pytest.raises(RuntimeError, match="Output size is too small"):
        op(x[:, :, :1], bias, *windows)
