import pytest
import torch
import torch.nn.functional as stock
from torch import nn

import braze
import braze.nn.functional as F
from common import check_against_stock, layouts
from convert_models import ops_run

# shape, output_size, the op that it is made of
CASES = [
    ((3, 8, 7, 7), 1, "channel_mean"),
    ((2, 5, 4, 6), (1, 1), "channel_mean"),
    ((2, 16, 8, 6), (4, 3), "avg_pool2d"),
    ((2, 16, 8, 6), (None, 3), "avg_pool2d"),
    ((2, 3, 12, 5), [3, 1], "avg_pool2d"),
    ((0, 3, 4, 4), 2, "avg_pool2d"),
    ((2, 3, 5, 5), 5, None),
    ((2, 3, 7, 5), (3, 4), None),
    ((2, 3, 2, 2), 4, None),
    ((3, 6, 6), 2, None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_stock(device, dtype, case):
    shape, size, _ = case
    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(shape, device=device).to(dtype)
        x = (x.to(memory_format=fmt) if x.dim() == 4 else x).requires_grad_()
        check_against_stock(
            lambda t: F.adaptive_avg_pool2d(t, size),
            lambda t: stock.adaptive_avg_pool2d(t.contiguous(), size),
            [x],
        )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("channels", [5, 16])
def test_layouts(device, dtype, size, channels):
    for layout, x in layouts((3, channels, 6, 8), device, dtype):
        y = F.adaptive_avg_pool2d(x, size)
        theirs = stock.adaptive_avg_pool2d(x.clone(memory_format=torch.contiguous_format), size)
        torch.testing.assert_close(y, theirs, rtol=1e-2, atol=1e-2)
        if layout == "channels_last":
            assert y.stride() == torch.empty_like(y, memory_format=torch.channels_last).stride()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_takes_it(device, case):
    shape, size, op = case
    x = torch.randn(shape, device=device)
    ran = ops_run(lambda: F.adaptive_avg_pool2d(x, size))
    assert ran == [] if op is None else ran == [op]


def test_gradcheck(device):
    x = torch.randn(2, 3, 4, 6, device=device, dtype=torch.float64, requires_grad=True)
    for size in (1, 2):
        function = lambda t, size=size: F.adaptive_avg_pool2d(t, size)  # noqa: E731
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_compile(device, size):
    torch._dynamo.reset()
    f = lambda of, t: of.adaptive_avg_pool2d(t + 1, size) * 2  # noqa: E731
    x = torch.randn(2, 3, 6, 8, device=device).to(memory_format=torch.channels_last)
    x.requires_grad_()
    actual, expected = torch.compile(f, fullgraph=True)(F, x), f(stock, x)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == f(F, x).stride()
    grads = (torch.autograd.grad(y.square().sum(), x) for y in (actual, expected))
    torch.testing.assert_close(*grads)


def test_module(device):
    x = torch.randn(2, 3, 6, 6, device=device)
    for size in (1, (2, None), 4):
        ours, theirs = braze.nn.AdaptiveAvgPool2d(size), nn.AdaptiveAvgPool2d(size)
        assert isinstance(ours, type(theirs))
        assert repr(ours) == repr(theirs)
        torch.testing.assert_close(ours(x), theirs(x))
        assert type(braze.convert(nn.Sequential(theirs))[0]) is type(ours)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((2, 3, 6, 6), (1, 2, 3)), ((2, 3, 6, 6), "a"), ((2, 3, 6, 6), 2.0), ((2, 3, 6, 6), -1),
     ((6, 6), 2)],
    ids=str,
)  # fmt: skip
def test_bad_settings(device, shape, size):
    """torch's exceptions."""
    x = torch.randn(shape, device=device)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        stock.adaptive_avg_pool2d(x, size)
    with pytest.raises(theirs.type) as ours:
        F.adaptive_avg_pool2d(x, size)
    assert str(ours.value) == str(theirs.value)


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """Windows that end too early."""
    x = torch.randn(2, 3, 6, 6, device=device).to(dtype).requires_grad_()
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(
            lambda t: F.adaptive_avg_pool2d(t[:, :, :4, :4], 2),
            lambda t: stock.adaptive_avg_pool2d(t, 2),
            [x],
        )
