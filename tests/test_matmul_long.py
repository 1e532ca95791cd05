"""matmul's wgmma_long: fp32, long sums of few results, of operands along C's rows and columns."""

import pytest
import torch
from matmul_common import assert_same_where_special

import braze
from common import assert_by_rule, hopper_only
from conftest import cuda_only

NAME = "wgmma_long"
# A size for each tile, and others that fill neither a tile nor vectors.
SIZES = [
    (32, 2), (24, 64), (20, 100), (24, 512), (64, 64), (60, 128), (64, 256), (128, 128), (132, 300),
    (3, 5), (30, 33), (37, 129), (70, 65), (1, 1),
]  # fmt: skip
DEPTHS = [1, 63, 1000, 5000]


def operands(m, n, k, device):
    """A lies along C's rows, B along its columns."""
    return torch.randn(k, m, device=device).mT, torch.randn(k, n, device=device)


def check(a, b):
    with braze.backend(matmul=NAME):
        out = braze.matmul(a, b)
        assert torch.equal(out, braze.matmul(a, b))
    assert_by_rule(out, torch.matmul(a, b), a.double() @ b.double())


@pytest.mark.parametrize("kind", ["normal", "positive", "wide"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@cuda_only
def test_long_sums(device, size, turned, kind):
    hopper_only(device)
    m, n = size[::-1] if turned else size
    for k in DEPTHS:
        a, b = operands(m, n, k, device)
        if kind == "positive":
            a, b = a.abs(), b.abs()
        elif kind == "wide":
            a = a * torch.randint_like(a, -60, 61).exp2()
            b = b * torch.randint_like(b, -60, 61).exp2()
        check(a, b)


@pytest.mark.parametrize("size", [(14, 20), (30, 100), (64, 256), (128, 128)], ids=str)
@cuda_only
def test_long_sums_of_values_far_apart(device, size):
    """Errors in units of |A| |B|, entry by entry, with depths and results far apart in scale."""
    hopper_only(device)
    m, n = size
    a, b = operands(m, n, 3000, device)
    powers = torch.randint(-10, 11, (3000,), device=device).float().exp2()
    a = a * powers * torch.randint(-50, 51, (m, 1), device=device).float().exp2()
    b = b / powers[:, None]
    with braze.backend(matmul=NAME):
        out = braze.matmul(a, b)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    own, stock = (((x.double() - exact).abs() / size).max() for x in (out, torch.matmul(a, b)))
    assert own <= 2 * stock + 4 * torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize(
    "size", [(32, 20), (32, 14), (20, 100), (60, 64), (60, 300), (130, 140)], ids=str
)
@cuda_only
def test_long_sums_of_special_values(device, size):
    """Infinities and NaN give what fp32 arithmetic gives, and only where they reach."""
    hopper_only(device)
    m, n = size
    a, b = operands(m, n, 2000, device)
    a[3, 7], a[17, 1999], b[100, 11] = float("inf"), float("nan"), float("-inf")
    a[5, 100] = 0.0  # times infinity
    with braze.backend(matmul=NAME):
        out = braze.matmul(a, b)
    assert_same_where_special(out, a.double() @ b.double(), atol=1e-3)


@cuda_only
def test_long_sums_of_views(device):
    hopper_only(device)
    a, b = torch.randn(2000, 200, device=device), torch.randn(2000, 300, device=device)
    check(a[:, 4:68].mT, b[:, 100:200])
    check(a[:, 3:67].mT, b[:, 1:100])  # not aligned
    check(a[::2, :64].mT, b[:1000])


@cuda_only
def test_long_sums_refuse(device):
    hopper_only(device)
    a, b = operands(64, 64, 2000, device)
    refused = [
        (a.contiguous(), b, "its operands lie along the rows and columns of C"),
        (a, b.mT.contiguous().mT, "its operands lie along the rows and columns of C"),
        (a.expand(2, -1, -1), b.expand(2, -1, -1), "it takes one matrix"),
        (a.double(), b.double(), "it takes float32"),
    ]
    for left, right, why in refused:
        with pytest.raises(RuntimeError, match=f"{NAME} cannot take.*{why}"):
            torch.ops.braze.matmul(left, right, backend=NAME)


@pytest.mark.parametrize("size", [(64, 20), (20, 64), (2, 40), (40, 1)], ids=str)
@cuda_only
def test_long_sums_with_bias_and_relu(device, size):
    hopper_only(device)
    m, n = size
    a, b = operands(m, n, 1500, device)
    bias = 40 * torch.randn(n, device=device)
    a[0, 7] = float("nan")
    out = torch.ops.braze.linear(a, b.mT, bias, True, backend=NAME)
    wide = torch.nn.functional.linear(a.double(), b.mT.double(), bias.double()).relu()
    stock = torch.nn.functional.linear(a, b.mT, bias).relu()
    assert out[0].isnan().all()
    assert_by_rule(out[1:], stock[1:], wide[1:])
