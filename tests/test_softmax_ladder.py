"""softmax by every kernel that this device has: the ladder's rungs and what ships."""

import pytest
import torch
import torch.nn.functional as stock

import braze
import braze.nn.functional as F
from common import check_against_stock, compile, layouts

CUDA = [
    "01_thread_per_row",
    "02_block_per_row",
    "03_warp_per_row",
    "04_online",
    "05_vectorized",
    "06_registers",
    "online",
]
NAMES = {"cpu": ["simd"], "cuda": CUDA}
#: the kernels that take rows along any dimension, and float32 results of 16-bit inputs
SHIPPED = ("auto", "braze", "online", "simd")
# Rows and their lengths: fewer than a warp, than a block; whole vectors and not; what the teams of
# 06_registers and of the shipped kernel end at; more rows than a block of 01_thread_per_row takes.
SHAPES = [
    (7,),
    (1, 1),
    (5, 0),
    (0, 5),
    (300, 1),
    (64, 10),
    (33, 128),
    (9, 257),
    (5, 1000),
    (3, 1024),
    (3, 1031),
    (2, 4096),
    (2, 8191),
    (1, 16384),
    (2, 3, 4, 40),
]


def rungs(device):
    """What braze.backend() takes for this device, the kernels' names last."""
    kernels = braze.kernels("softmax")
    names = [k["name"] for k in kernels if (k["arch"] == "cpu") == (device == "cpu")]
    assert names == NAMES[device]
    return ["auto", "braze", *names]


def by(name):
    """softmax along `dim` by that kernel, whichever backward follows."""

    def softmax(t, dim=-1, **kwargs):
        with braze.backend(softmax=name):
            return F.softmax(t, dim, **kwargs)

    return softmax


def longest(dtype, aligned):
    """The longest row that 06_registers takes."""
    return (32768 if aligned else 16384) // (2 if dtype == torch.float64 else 1)


def check(softmax, x, dim=-1):
    return check_against_stock(
        lambda t: softmax(t, dim), lambda t: stock.softmax(t, dim), [x.detach().requires_grad_()]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape):
    x = (4 * torch.randn(shape, device=device)).to(dtype)
    for name in rungs(device):
        y = check(by(name), x)
        assert y.stride() == x.stride(), name


def test_unaligned_storage_offset(device, dtype):
    x = torch.randn(8 * 64 + 1, device=device).to(dtype)[1:].view(8, 64)
    for name in rungs(device):
        check(by(name), x)


def test_layouts(device, dtype):
    """Strided inputs, whose results are laid out as they are, along the dimension that is innermost
    in memory; other dimensions are refused."""
    for layout, x in layouts((4, 5, 6, 7), device, dtype):
        like = torch.empty_like(x)
        for dim in range(4):
            for name in rungs(device):
                if name not in SHIPPED and like.stride(dim) != 1:
                    with pytest.raises(RuntimeError, match=f"{name} cannot take these arguments"):
                        by(name)(x, dim)
                    continue
                y = check(by(name), x, dim)
                assert y.stride() == like.stride(), layout


def test_special_values(device, dtype):
    inf, nan = float("inf"), float("nan")
    pairs = [(inf, 1.0), (-inf, 1.0), (-inf, -inf), (nan, 1.0), (1e-40, 0.0), (1e4, -1e4)]
    for size in (2, 40, 300):
        x = torch.empty(len(pairs), size, device=device)
        for row, (one, others) in zip(x, pairs, strict=True):
            row.fill_(others)
            row[size // 3] = one
        for name in rungs(device):
            check(by(name), x.to(dtype))


def test_row_lengths_that_registers_hold(device, dtype):
    if "06_registers" not in rungs(device):
        return  # a kernel of GPUs
    for aligned in (True, False):
        most = longest(dtype, aligned)
        x = torch.randn(2 * most + 1, device=device).to(dtype)[not aligned :]
        check(by("06_registers"), x[:most].view(1, -1))
        with pytest.raises(RuntimeError, match=f"takes rows of up to {most} elements"):
            by("06_registers")(x[: 2 * most].view(1, -1))


def test_results_of_another_dtype(device):
    x = torch.randn(3, 8, device=device, dtype=torch.bfloat16)
    for name in rungs(device):
        if name in SHIPPED:
            y = by(name)(x, dtype=torch.float32)
            assert torch.equal(y, F.softmax(x, -1, dtype=torch.float32))
        else:
            with pytest.raises(RuntimeError, match=f"{name} cannot .* results of the input's dt"):
                by(name)(x, dtype=torch.float32)


def test_gradcheck(device):
    x = torch.randn(4, 5, device=device, dtype=torch.float64, requires_grad=True)
    for name in rungs(device):
        assert torch.autograd.gradcheck(by(name), x)
        assert torch.autograd.gradcheck(
            lambda t, n=name: torch.ops.braze.softmax_rung(t, 1, backend=n), x
        )
        assert torch.autograd.gradgradcheck(by(name), x)


def test_opcheck(device, dtype):
    x = torch.randn(2, 5, 3, 4, device=device).to(dtype)
    op, name = torch.ops.braze.softmax_rung.default, NAMES[device][0]
    torch.library.opcheck(op, (x.clone().requires_grad_(), -1, None, name))
    torch.library.opcheck(op, (x.to(memory_format=torch.channels_last), 1, None, name))


def test_compile(device):
    x = torch.randn(4, 5, device=device)
    compiled = compile(lambda t: F.softmax(t * 2, dim=-1) + 1)
    ops = []

    def noting(graph, _):
        ops.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with braze.backend(softmax=NAMES[device][0]):
        assert torch.equal(compiled(x), F.softmax(x * 2, -1) + 1)
        torch.compile(lambda t: F.softmax(t, -1), fullgraph=True, backend=noting)(x)
    assert any("softmax_rung" in op for op in ops)
    assert torch.equal(compiled(x), F.softmax(x * 2, -1) + 1)


def test_func_transforms_and_log_softmax_take_no_rung(device):
    x = torch.randn(3, 4, device=device)
    expected = F.log_softmax(x, 1)
    with braze.backend(softmax=NAMES[device][0]):
        assert torch.equal(F.log_softmax(x, 1), expected)
        mapped = torch.func.vmap(lambda t: F.softmax(t, 0))(x)
    torch.testing.assert_close(mapped, stock.softmax(x, 1))


def test_unknown_kernels(device):
    x = torch.randn(3, 4, device=device)
    for name in ("no_such_kernel", "", "cudnn", "log"):
        with pytest.raises(ValueError, match="expected softmax to be one of auto, braze, "):
            braze.backend(softmax=name)
        with pytest.raises(RuntimeError, match="expected backend to be one of auto, braze, "):
            torch.ops.braze.softmax_rung(x, 1, backend=name)


def merged_without_rescaling(t, dim):
    """An online sum whose halves are added as they are, though their maxima differ."""
    sums = [(p - p.amax(dim, keepdim=True)).exp().sum(dim, keepdim=True) for p in t.chunk(2, dim)]
    return (t - t.amax(dim, keepdim=True)).exp() / sum(sums)


def last_warp_left_out(t, dim):
    """A reduction over a block that forgets its last warp."""
    total = t.softmax(dim)[..., : t.size(-1) // 8 * 7].sum(dim, keepdim=True)
    return t.softmax(dim) / total


@pytest.mark.parametrize("wrong", [merged_without_rescaling, last_warp_left_out])
def test_the_tests_reject_a_wrong_kernel(device, dtype, wrong):
    x = torch.randn(5, 1000, device=device).to(dtype)
    check(stock.softmax, x)
    with pytest.raises(AssertionError, match="error"):
        check(wrong, x)
