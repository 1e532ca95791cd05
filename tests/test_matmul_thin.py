"""The kernels for a matrix and a vector (gemv), for little depth (thin) and for a depth of 1
(outer), by name and chosen."""

import itertools

import pytest
import torch
import torch.nn.functional as stock
from test_matmul_ladder import LAYOUTS, check, in_memory, running

import braze
from common import assert_by_rule, cuda_kernels_of
from conftest import cuda_only

# Batch, m, n, k: one output, few and many; sums of one round of loads and of several.
GEMV_SHAPES = [
    (1, 1, 1, 1),
    (1, 1, 64, 9000),
    (1, 1, 2048, 1000),
    (1, 1, 100, 1024),
    (1, 1, 10, 9001),
    (1, 1, 37, 5),
    (1, 1000, 1, 2048),
    (1, 1024, 1, 100),
    (1, 5000, 1, 8),
    (1, 3, 1, 3136),
    (3, 1, 70, 33),
    (200, 1, 40, 64),
    (4, 33, 1, 257),
]
# The last four fill a GPU with wide tiles.
THIN_SHAPES = [
    (1, 1, 1, 1),
    (1, 7, 10, 100),
    (1, 128, 100, 10),
    (1, 33, 130, 128),
    (1, 17, 31, 65),
    (2, 65, 67, 31),
    (200, 31, 33, 20),
    (1, 1000, 2048, 1),
    (1, 515, 1030, 7),
    (1, 512, 1032, 8),
    (1, 640, 1024, 32),
]
OUTER_SHAPES = [(1, 1, 1, 1), (1, 128, 3136, 1), (1, 5, 33, 1), (70, 67, 2, 1), (3, 1030, 515, 1)]
CASES = [("gemv", shape) for shape in GEMV_SHAPES] + [("thin", shape) for shape in THIN_SHAPES]
CASES += [("outer", shape) for shape in OUTER_SHAPES]


pytestmark = cuda_only


def shifted(t):
    """The same matrix, with the same strides, an element further on in memory."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    out = torch.empty(span + 1, device=t.device, dtype=t.dtype)[1:].as_strided(t.shape, t.stride())
    return out.copy_(t)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_sizes_and_layouts(device, dtype, name, shape):
    batch, m, n, k = shape
    with running(name) as matmul:
        for left, right in itertools.product(LAYOUTS, LAYOUTS):
            a = in_memory(batch, m, k, left, device, dtype)
            b = in_memory(batch, k, n, right, device, dtype)
            check(matmul, a, b, name)
            if left == right:
                check(matmul, shifted(a), b, name)
                check(matmul, a, shifted(b), name)


@pytest.mark.parametrize("name", ["gemv", "thin", "outer"])
def test_strides_and_broadcasts(device, dtype, name):
    n, k = 1 if name == "gemv" else 24, 1 if name == "outer" else 64
    r = lambda *s: torch.randn(s, device=device).to(dtype)  # noqa: E731
    lefts = [r(5, 40, k), r(40, k).expand(5, 40, k), r(5, 80, 2 * k)[:, ::2, ::2]]
    lefts += [r(40, 5, k).movedim(0, 1), r(40, k, 5).permute(2, 0, 1)]
    rights = [r(5, k, n), r(k, n).expand(5, k, n), r(5, 2 * k, 2 * n)[:, ::2, ::2], r(5, n, k).mT]
    with running(name) as matmul:
        for a, b in itertools.product(lefts, rights):
            check(matmul, a, b, name)
            # One matrix for a batch of rows is a product of several rows.
            if name == "gemv" and (a.stride(0) != 0 or b.stride(0) == 0):
                check(matmul, b.mT, a.mT, name)


@pytest.mark.parametrize("relu", [False, True], ids=["no_relu", "relu"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gemv", (1, 64, 1000)),
        ("gemv", (1, 37, 65)),
        ("gemv", (70, 1, 128)),
        ("thin", (37, 140, 64)),
        ("thin", (37, 33, 65)),
        ("thin", (512, 1024, 4)),
        ("thin", (512, 1030, 3)),
        ("outer", (37, 140, 1)),
        ("outer", (37, 33, 1)),
    ],
    ids=str,
)
def test_epilogue(device, dtype, name, shape, bias, relu):
    m, n, k = shape
    x, w, b = (torch.randn(s, device=device).to(dtype) for s in [(m, k), (n, k), (n,)])
    b = b if bias else None
    wide = stock.linear(x.double(), w.double(), None if b is None else b.double())
    expected = stock.linear(x, w, b)
    if relu:
        wide, expected = wide.relu(), expected.relu()
    for weight in (w, w.mT.contiguous().mT):
        out = torch.ops.braze.linear(x, weight, b, relu, False, backend=name)
        assert_by_rule(out, expected, wide, what=f"{name} {weight.stride()}")
        nan = torch.full_like(x, float("nan"))
        out = torch.ops.braze.linear(nan, weight, b, relu, False, backend=name)
        assert out.isnan().all()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("gemv", (1, 70, 33)), ("gemv", (65, 1, 33)), ("thin", (65, 70, 33)), ("outer", (65, 70, 1))],
)
def test_special_values(device, dtype, name, shape):
    """Infinities and NaN reach their row and column, and meet no zero that fills up a load."""
    m, n, k = shape
    with running(name) as matmul:
        for left, right in itertools.product(LAYOUTS[:2], LAYOUTS[:2]):
            a = in_memory(1, m, k, left, device, dtype)
            b = in_memory(1, k, n, right, device, dtype)
            a[m - 1, k - 1], b[k - 1, n - 1] = float("inf"), float("-inf")
            if m > 3:
                a[3, 0] = float("nan")
            check(matmul, a, b, name)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_repeatable(device, dtype, name, shape):
    batch, m, n, k = shape
    a = in_memory(batch, m, k, "dense", device, dtype)
    b = in_memory(batch, k, n, "dense", device, dtype)
    with running(name) as matmul:
        first = matmul(a, b)
        assert all(torch.equal(first, matmul(a, b)) for _ in range(3))


def test_what_they_do_not_take(device, dtype):
    r = lambda *s: torch.randn(s, device=device).to(dtype)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"gemv cannot take .*: it takes one row or one column"):
        torch.ops.braze.matmul(r(2, 8), r(8, 2), backend="gemv")
    with pytest.raises(RuntimeError, match=r"thin cannot take .*: it takes depths up to 128"):
        torch.ops.braze.matmul(r(2, 129), r(129, 2), backend="thin")
    for name in ("gemv", "thin"):
        with pytest.raises(RuntimeError, match=f"{name} cannot take .*: there is nothing to multi"):
            torch.ops.braze.matmul(r(1, 0), r(0, 2), backend=name)
    for k in (0, 2):
        with pytest.raises(RuntimeError, match=r"outer cannot take .*: it takes a depth of 1"):
            torch.ops.braze.matmul(r(1, k), r(k, 2), backend="outer")


def test_they_run_where_expected(device, dtype):
    r = lambda *s: torch.randn(s, device=device).to(dtype)  # noqa: E731

    def kernels(a, b):
        with braze.backend(matmul="braze"):
            braze.matmul(a, b)
            return cuda_kernels_of(lambda: braze.matmul(a, b))

    assert "gemv_columns_kernel" in kernels(r(1, 1000), r(1000, 2048))
    assert "gemv_dot_kernel" in kernels(r(1, 3136), r(128, 3136).mT)
    assert "gemv_dot_kernel" in kernels(r(1024, 100), r(100, 1))
    assert "gemv_columns_kernel" in kernels(r(1024, 100).mT, r(1024, 1))
    assert "outer_kernel" in kernels(r(128, 1), r(1, 3136))
    for m, n, k in [(1000, 2048, 2), (7, 10, 100), (3072, 768, 8), (64, 128, 10), (128, 100, 100)]:
        assert "thin_kernel" in kernels(r(m, k), r(k, n))
    # Few outputs of a very long sum, much work, and a depth that is not little.
    for m, n, k in [(1, 1, 1 << 20), (1024, 1024, 64), (32, 32, 200)]:
        names = kernels(r(m, k), r(k, n))
        assert names
        assert "gemv" not in names
        assert "thin" not in names


def test_in_a_graph(device, dtype):
    """Each product waits for the one before, though its kernel may start earlier."""
    source = torch.randn(300, 300, device=device).to(dtype) / 16
    column = torch.empty(300, 1, device=device, dtype=dtype)

    def step():
        column.copy_(source[:, :1])
        with braze.backend(matmul="gemv"):
            v = braze.matmul(source, column)
            v = braze.matmul(source.mT, v)
        with braze.backend(matmul="thin"):
            product = braze.matmul(v, column.mT)
        with braze.backend(matmul="outer"):
            product = product + braze.matmul(v, v.mT)
        with braze.backend(matmul="gemv"):
            return braze.matmul(product, v), product

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    source.normal_()
    source /= 16
    graph.replay()
    for actual, expected in zip(results, step(), strict=True):
        assert torch.equal(actual, expected)
