"""Every kernel of matmul that any device runs, by name: sizes around the tiles' edges, all ways
that operands lie in memory, the epilogue, special values. The Hopper ones are in
test_matmul_hopper.py."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as stock
from matmul_common import own_kernels, strided

import braze
from common import assert_by_rule
from conftest import cuda_only

# Batch, m, n, k; tiles of C are 32 to 128 wide, tiles of the operands 8 to 64 deep.
SHAPES = [
    (1, 1, 1, 1),
    (1, 37, 41, 130),
    (1, 128, 128, 16),
    (1, 130, 129, 9),
    (1, 260, 140, 24),
    (1, 1, 70, 3),
    (1, 64, 8, 40),
    (3, 33, 65, 31),
    (2, 5, 200, 33),
    (1, 3, 2, 0),
    (0, 3, 2, 4),
    (1, 0, 2, 4),
    (1, 3, 0, 4),
]


def rungs(device, dtype):
    """The names of the kernels for the dtype that take any strides and any sizes."""
    names = [
        kernel["name"]
        for kernel in own_kernels(device)
        if kernel["arch"] != "sm_90a"
        # Sums of at least 64 products: test_matmul_accuracy.py. One row or column, little depth:
        # test_matmul_thin.py.
        and kernel["name"] not in ("mma_split", "gemv", "thin", "outer")
        and str(dtype).removeprefix("torch.") in kernel["dtypes"].split()
    ]
    assert {"01_naive", "02_reordered" if device == "cpu" else "02_coalesced"} <= set(names)
    return names


TENSOR_CORES = ("09_wmma", "mma_sync")


@contextlib.contextmanager
def running(name):
    """A product by the kernel of that name; those on tensor cores may round fp32 to TF32."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if name in TENSOR_CORES else "ieee"
    try:
        with braze.backend(matmul=name):
            yield braze.matmul
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def stock_matmul(a, b, name):
    """torch.matmul; of operands rounded to TF32 where the kernel rounds them: torch's own choice
    between TF32 and fp32 depends on sizes and alignment. 16-bit operands on a CPU are widened: on
    some, torch's own product of bfloat16 lets a NaN into the row above."""
    if not a.is_cuda and a.element_size() == 2:
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    if a.dtype == torch.float32 and a.is_cuda and name in TENSOR_CORES:
        a, b = (((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (a, b))
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    out = torch.matmul(a, b)
    torch.backends.cuda.matmul.fp32_precision = precision
    return out


def check(matmul, a, b, name):
    # A sum of k terms one after the other: its rounding errors, each half a unit of a partial sum
    # that grows with its root, add up like a random walk.
    ulps = max(4, a.shape[-1] ** 0.5 / 2)
    reference = torch.matmul(a.double(), b.double())
    what = f"{name}: {tuple(a.shape)}, {a.stride()} x {tuple(b.shape)}, {b.stride()}"
    assert_by_rule(matmul(a, b), stock_matmul(a, b, name), reference, ulps, what)


def in_memory(batch, rows, cols, layout, device, dtype):
    """A random matrix, or a batch: dense, its transpose, with padded rows (to 16 bytes or not)."""
    r = lambda *s: torch.randn(s, device=device).to(dtype)  # noqa: E731
    lead = () if batch == 1 else (batch,)
    pad = {"dense": 0, "padded": 3, "aligned": -cols % 8 + 8}[layout.removesuffix(" transposed")]
    if layout.endswith("transposed"):
        pad = -rows % 8 + 8 if pad > 3 else pad
        return r(*lead, cols, rows + pad)[..., :rows].mT
    return r(*lead, rows, cols + pad)[..., :cols]


LAYOUTS = [k + t for k in ("dense", "padded", "aligned") for t in ("", " transposed")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_and_transpositions(device, dtype, shape):
    batch, m, n, k = shape
    for name in rungs(device, dtype):
        with running(name) as matmul:
            for left, right in itertools.product(LAYOUTS, LAYOUTS):
                if left.split()[0] != right.split()[0] and left != "dense":
                    continue  # all transpositions, but not all pairs of paddings
                a = in_memory(batch, m, k, left, device, dtype)
                check(matmul, a, in_memory(batch, k, n, right, device, dtype), name)


def test_strides(device, dtype):
    lefts, rights = (
        [t for _, t in strided(shape, device, dtype)] for shape in [(2, 3, 9, 7), (2, 3, 7, 5)]
    )
    for name in rungs(device, dtype):
        with running(name) as matmul:
            for i, b in enumerate(rights):
                for a in (lefts[0], lefts[i], lefts[(i + 3) % len(lefts)]):
                    check(matmul, a, b, name)


def test_broadcast_batch(device, dtype):
    a, b = (torch.randn(s, device=device).to(dtype) for s in [(5, 1, 34, 40), (3, 40, 33)])
    for name in rungs(device, dtype):
        with running(name) as matmul:
            check(matmul, a, b, name)
            check(matmul, a[0, 0], b, name)
            check(matmul, a, b[0], name)


@pytest.mark.parametrize("relu", [False, True], ids=["no_relu", "relu"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_epilogue(device, dtype, bias, relu):
    # 140 outputs are a multiple of 4, 33 are not.
    for outputs in (140, 33):
        shapes = (37, 64), (outputs, 64), (outputs,)
        x, w, b = (torch.randn(s, device=device).to(dtype) for s in shapes)
        b = b if bias else None
        wide = stock.linear(x.double(), w.double(), None if b is None else b.double())
        wide = wide.relu() if relu else wide
        for name in rungs(device, dtype):
            with running(name):
                out = torch.ops.braze.linear(x, w, b, relu, name in TENSOR_CORES, backend=name)
                expected = stock_matmul(x, w.mT, name).to(dtype)
            expected = expected if b is None else expected + b
            assert_by_rule(out, expected.relu() if relu else expected, wide, what=name)
            nan = torch.full_like(x, float("nan"))
            with running(name):
                out = torch.ops.braze.linear(nan, w, b, relu, name in TENSOR_CORES, backend=name)
            assert out.isnan().all(), name


def test_special_values_stay_in_their_rows_and_columns(device, dtype):
    """Infinities next to a tile's edge meet no zero that pads it."""
    a, b = (torch.randn(s, device=device).to(dtype) for s in [(65, 33), (33, 70)])
    a[64, 32], a[3, 0], b[32, 69] = float("inf"), float("nan"), float("-inf")
    for name in rungs(device, dtype):
        with running(name) as matmul:
            check(matmul, a, b, name)


def test_repeatable(device, dtype):
    a, b = (torch.randn(s, device=device).to(dtype) for s in [(130, 300), (300, 65)])
    for name in rungs(device, dtype):
        with running(name) as matmul:
            assert torch.equal(matmul(a, b), matmul(a, b)), name


@cuda_only
def test_rungs_say_what_they_do_not_take(device):
    a = torch.randn(8, 8, device=device)
    for name in ("06_vectorized", "07_warp_tile", "08_double_buffered"):
        with pytest.raises(RuntimeError, match=f"{name} cannot take these arguments: it takes fl"):
            torch.ops.braze.matmul(a.double(), a.double(), backend=name)
    with pytest.raises(RuntimeError, match=r"09_wmma .*rounded to TF32, which is not allowed"):
        torch.ops.braze.matmul(a, a, backend="09_wmma")


def no_last_tile(a, b):
    """A wrong bound: the depth's last, partial tile is left out."""
    k = a.shape[-1] // 8 * 8
    return torch.matmul(a[..., :k], b[..., :k, :])


def no_bounds_check(a, b):
    """Where a tile overhangs A, the dense matrix's next row is read instead of zeros."""
    rows, depth = a.shape
    flat = torch.cat([a.flatten(), a.flatten()])
    a = flat.as_strided((rows, -(-depth // 8) * 8), (depth, 1))
    b = torch.cat([b, b[: a.shape[1] - depth]])
    return torch.matmul(a, b)


def swapped_pieces(a, b):
    """Two columns of a thread's piece of C end up in each other's place."""
    out = torch.matmul(a, b)
    out[:, [4, 5]] = out[:, [5, 4]]
    return out


@pytest.mark.parametrize("wrong", [no_last_tile, no_bounds_check, swapped_pieces])
def test_the_tests_reject_a_wrong_rung(device, dtype, wrong):
    a, b = (torch.randn(s, device=device).to(dtype) for s in [(37, 130), (130, 41)])
    check(torch.matmul, a, b, "stock")
    with pytest.raises(AssertionError, match="error"):
        check(wrong, a, b, "wrong")
