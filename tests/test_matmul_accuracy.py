"""Products of fp64 and fp32 at their own accuracy."""

import pytest
import torch
import torch.nn.functional as stock
from matmul_common import assert_same_where_special, majors

import braze
from common import assert_by_rule, check_against_stock, hopper_only
from conftest import cuda_only

# For each tile shape of mma_sync in fp64, extents that are aligned and others that are not; some
# split the depth, the last one over two launches.
FP64_SHAPES = [
    (1, 512, 520, 512),
    (1, 1023, 1085, 129),
    (1, 64, 2000, 256),
    (1, 51, 2001, 255),
    (200, 30, 34, 20),
    (200, 31, 33, 19),
    (2, 10, 3, 1),
    (1, 60, 70, 3000),
    (1, 61, 71, 3001),
    (1, 30, 32, 60000),
]


def check_integers(name, device, transposed, shape):
    """Compares products of float64 integers, whose sums are exact in whatever order, with torch's;
    those of one matrix with bias and ReLU too. Returns the operands."""
    batch, m, n, k = shape
    a = (1000 * majors(batch, m, k, transposed[0], device, torch.float64)).round()
    b = (1000 * majors(batch, k, n, transposed[1], device, torch.float64)).round()
    with braze.backend(matmul=name):
        assert torch.equal(braze.matmul(a, b), torch.matmul(a, b))
    if batch == 1:
        bias = (1000 * torch.randn(n, device=device, dtype=torch.float64)).round()
        out = torch.ops.braze.linear(a, b.mT, bias, True, backend=name)
        assert torch.equal(out, stock.linear(a, b.mT, bias).relu())
    return a, b


@pytest.mark.parametrize("shape", FP64_SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@cuda_only
def test_fp64_on_tensor_cores(device, transposed, shape):
    check_integers("mma_sync", device, transposed, shape)


# Whole tiles and others, one and several waves of them, depths that end inside a stage.
DMMA_SHAPES = [(1, 128, 128, 16), (1, 2, 2, 2), (1, 130, 258, 70), (3, 384, 128, 200)]
DMMA_SHAPES += [(1, 2050, 1034, 34), (2, 126, 140, 1000), (1, 1024, 2176, 130)]


@pytest.mark.parametrize("shape", DMMA_SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@cuda_only
def test_fp64_by_tma(device, transposed, shape):
    hopper_only(device)
    a, b = check_integers("dmma_tma", device, transposed, shape)
    if a.dim() > 2:
        with braze.backend(matmul="dmma_tma"):
            assert torch.equal(braze.matmul(a, b[:1]), torch.matmul(a, b[:1]))


@cuda_only
def test_fp64_by_tma_refuses_odd_rows(device):
    hopper_only(device)
    a = torch.randn(64, 65, device=device, dtype=torch.float64)
    for left, right in [(a, a.mT), (a[:, 1:], a[:, 1:].mT)]:
        with pytest.raises(RuntimeError, match=r"dmma_tma cannot take these .* others even"):
            torch.ops.braze.matmul(left, right, backend="dmma_tma")


SPLIT_KERNELS = ["wgmma_split", "wgmma_scaled", "mma_split"]


@pytest.mark.parametrize("name", SPLIT_KERNELS)
@pytest.mark.parametrize("kind", ["normal", "positive", "wide"])
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@cuda_only
def test_split_fp32(device, transposed, kind, name):
    """Products of parts are as accurate as fp32, for every range and layout."""
    hopper_only(device)
    for batch, m, n, k in [(1, 300, 520, 1000), (1, 256, 128, 4096), (2, 130, 70, 515)]:
        a = majors(batch, m, k, transposed[0], device, torch.float32)
        b = majors(batch, k, n, transposed[1], device, torch.float32)
        if kind == "positive":
            a, b = a.abs(), b.abs()
        elif kind == "wide":
            a = a * torch.randint_like(a, -60, 61).exp2()
            b = b * torch.randint_like(b, -60, 61).exp2()
        with braze.backend(matmul=name):
            out = braze.matmul(a, b)
            assert torch.equal(out, braze.matmul(a, b))
        assert_by_rule(out, torch.matmul(a, b), torch.matmul(a.double(), b.double()))


def apart(count, bits, device):
    """Powers of two, the largest `bits` above the smallest."""
    return torch.randint(-bits // 2, bits // 2 + 1, (count,), device=device).float().exp2()


@pytest.mark.parametrize("name", SPLIT_KERNELS)
@pytest.mark.parametrize("what", ["rows", "columns", "channels", "zeros"])
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@cuda_only
def test_split_fp32_of_values_far_apart(device, transposed, what, name):
    """Each row, column and channel has fp32's accuracy by itself: errors in units of |A| |B|."""
    hopper_only(device)
    m, n, k = 300, 268, 500
    a = majors(1, m, k, transposed[0], device, torch.float32)
    b = majors(1, k, n, transposed[1], device, torch.float32)
    if what == "rows":
        a, b = a * apart(m, 120, device)[:, None], b * 2**40
    elif what == "columns":
        a, b = a * 2**-90, b * apart(n, 120, device)
    elif what == "channels":
        between = apart(k, 20, device)
        a, b = a * between, b / between[:, None]
    else:
        a[1::2], b[:, ::3] = 0, 0
    with braze.backend(matmul=name):
        out = braze.matmul(a, b)
    exact, size = a.double() @ b.double(), (a.double().abs() @ b.double().abs()).clamp_min(1e-300)
    own, stock = (((x.double() - exact).abs() / size).max() for x in (out, torch.matmul(a, b)))
    assert own <= 2 * stock + 4 * torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize(
    "powers", [(-140, 126), (-126, 100), (-60, -60), (-75, -75), (100, -126), (58, 62)]
)
@cuda_only
def test_scaled_fp16_at_the_ends_of_the_range(device, powers):
    """Inputs or results that are denormal, or nearly infinite."""
    hopper_only(device)
    powers = torch.tensor(powers, device=device)
    a = torch.ldexp(torch.randn(140, 300, device=device), powers[0])
    b = torch.ldexp(torch.randn(300, 130, device=device), powers[1])
    with braze.backend(matmul="wgmma_scaled"):
        out = braze.matmul(a, b)
    assert_by_rule(out, torch.matmul(a, b), a.double() @ b.double())


@cuda_only
def test_scaled_fp16_overflows_where_the_result_does(device):
    """Not before, of sums that are not split: they are scaled back at the end."""
    hopper_only(device)
    a, b = (torch.randn(s, device=device) for s in ((140, 100), (100, 130)))
    with braze.backend(matmul="wgmma_scaled"):
        out = braze.matmul(a * 2.0**62, b * 2.0**63)
    exact = (a.double() @ b.double()) * 2.0**125
    assert 0.2 < exact.float().isinf().float().mean() < 0.8
    assert (out.isinf() == exact.float().isinf()).float().mean() > 0.999
    assert not out.isnan().any()


@pytest.mark.parametrize("name", SPLIT_KERNELS)
@cuda_only
def test_split_fp32_special_values(device, name):
    """Infinities and NaN give what fp32 arithmetic gives, and only where they reach."""
    hopper_only(device)
    a, b = torch.randn(300, 512, device=device), torch.randn(512, 260, device=device)
    a[3, 7], a[200, 9], b[100, 250] = float("inf"), float("nan"), float("-inf")
    a[5, 100] = 0.0  # times infinity
    with braze.backend(matmul=name):
        out = braze.matmul(a, b)
    assert_same_where_special(out, a.double() @ b.double())


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 128, 128, 32), (1, 4, 8, 1), (1, 300, 516, 1000), (3, 132, 68, 77)], ids=str
)
@cuda_only
def test_simt_tma(device, shape, transposed):
    hopper_only(device)
    batch, m, n, k = shape
    a = majors(batch, m, k, transposed[0], device, torch.float32)
    b = majors(batch, k, n, transposed[1], device, torch.float32)
    special = a.clone()
    special[..., m - 1, k - 1] = float("inf")
    ulps = max(4, k**0.5 / 2)  # one sum of k terms
    with braze.backend(matmul="simt_tma"):
        check_against_stock(braze.matmul, torch.matmul, [a, b], ulps)
        check_against_stock(braze.matmul, torch.matmul, [special, b], ulps)
        assert torch.equal(braze.matmul(a, b), braze.matmul(a, b))
        # one matrix for the whole batch
        check_against_stock(braze.matmul, torch.matmul, [a, b[0] if batch > 1 else b], ulps)
    if batch == 1:
        bias = torch.randn(n, device=device)
        out = torch.ops.braze.linear(a, b.mT, bias, True, backend="simt_tma")
        wide = stock.linear(a.double(), b.mT.double(), bias.double()).relu()
        assert_by_rule(out, stock.linear(a, b.mT, bias).relu(), wide)


@cuda_only
def test_simt_tma_reads_strided_operands_in_place(device):
    hopper_only(device)
    a = torch.randn(200, 400, device=device)[:, :300].mT
    b = torch.randn(200, 260, device=device)[:, 4:164]
    with braze.backend(matmul="simt_tma"):
        check_against_stock(braze.matmul, torch.matmul, [a, b])
        with pytest.raises(
            RuntimeError, match=r"simt_tma cannot take.*along the depth have no gaps"
        ):
            braze.matmul(a.contiguous()[:, :100], b[:100])
        with pytest.raises(RuntimeError, match=r"simt_tma cannot take.*aligned to 16 bytes"):
            braze.matmul(a, b[:, 1:100])
