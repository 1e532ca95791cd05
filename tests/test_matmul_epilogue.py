"""Bias, residual, ReLU, ReLU gradient and sums in the epilogue of the matrix product, by every
kernel that has them: the raw op matmul_epilogue."""

import itertools

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st
from matmul_common import majors, own_kernels
from torch.autograd import DeviceType

from braze.testing import WAYS, mover
from common import assert_by_rule, cuda_kernels_of, fuzzed, hopper_only
from conftest import cuda_only

SIZES = [
    (1, 1, 1),
    (7, 33, 1),
    (33, 7, 65),
    (65, 130, 33),
    (130, 257, 300),
    (257, 65, 130),
    (5, 4, 0),
]
# For each tile shape, unsplit and with the depth split over a cluster or over two launches.
LARGE_SIZES = [
    (1500, 1200, 64),
    (1503, 1201, 40),
    (520, 392, 2056),
    (260, 300, 264),
    (200, 128, 520),
    (64, 72, 12000),
    (2056, 1160, 72),
    (1030, 780, 136),
    (64, 128, 3136),
    (1024, 8, 256),
]
WITH_FULL_EPILOGUE = {
    "cpu": ["blocked", "dot_bf16", "amx", "01_naive", "02_reordered"],
    "cuda": ["simt", "mma_sync", "mma_split", "wgmma", "wgmma_split", "wgmma_scaled"],
}
NAN = float("nan")
EXACT_BELOW = 1 << 24  # integers in fp32


def epilogue(input, other, *parts, **kwargs):
    return torch.ops.braze.matmul_epilogue(input, other, *parts, **kwargs)


def reference(input, other, bias=None, residual=None, relu_result=None, relu=False):
    """The formula in torch's ops, at the arguments' dtype."""
    out = input @ other
    out = out if bias is None else out + bias
    out = out if residual is None else out + residual
    out = out.relu() if relu else out
    return out if relu_result is None else out.masked_fill(relu_result <= 0, 0)


def integers(low, high, *shape, device, dtype):
    return torch.randint(low, high + 1, shape, device=device).to(dtype)


def integer_parts(m, n, device, dtype, transposed=(0, 0), k=1):
    """Operands, bias, residual and a ReLU's result whose every sum is exact in fp32."""
    kw = {"device": device, "dtype": dtype}
    a, b = (
        majors(1, rows, cols, t, device, torch.float32).mul(1.5).round().clamp(-3, 3).to(dtype)
        for rows, cols, t in ((m, k, transposed[0]), (k, n, transposed[1]))
    )
    result = integers(-1, 2, m, n, **kw).relu()
    if result.numel():
        result.view(-1)[:: max(1, m * n // 5)] = NAN
    return a, b, integers(-9, 9, n, **kw), integers(-99, 99, m, n, **kw), result


def assert_exact(a, b, bias, residual, result, relu, backend):
    """Every sum is one of integers: what fp32 rounds once is known to the last bit."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and a.is_cuda
    args = (a, b, bias, residual, result, relu, True, True, tf32, False, backend)
    out, columns, rows = epilogue(*args)
    wide = [None if t is None else t.double() for t in (a, b, bias, residual)]
    expected = reference(*wide, result, relu).to(a.dtype)
    assert torch.equal(out, expected), "output"
    total = expected.double()
    for name, actual, wanted in (
        ("column sums", columns, total.sum(0)),
        ("row sums", rows, total.sum(1)),
    ):
        assert not (wanted.abs() >= EXACT_BELOW).any(), name
        assert torch.equal(actual, wanted.to(a.dtype)), name


def takes(*args):
    """Whether the named kernel does; if so, it is checked."""
    try:
        assert_exact(*args)
    except RuntimeError as error:
        if f"{args[-1]} cannot take these arguments" not in str(error):
            raise
        return False
    return True


PARTS = [
    # bias, residual, relu_result, relu
    (1, 1, 1, 1),
    (1, 1, 0, 0),
    (0, 1, 0, 1),
    (0, 0, 1, 0),
    (0, 0, 0, 0),
]


def chosen(parts, present):
    return [t if p else None for t, p in zip(parts, present, strict=True)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "braze"])
def test_every_part(device, dtype, size, backend):
    m, n, k = size
    for transposed in itertools.product((0, 1), repeat=2):
        a, b, *parts = integer_parts(m, n, device, dtype, transposed, k)
        for present in PARTS:
            assert_exact(a, b, *chosen(parts, present[:3]), bool(present[3]), backend)


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("index", range(5))
def test_every_kernel_by_name(device, dtype, index, tf32):
    """Each takes what its obstacles let pass; how much that is at least is checked too."""
    names = WITH_FULL_EPILOGUE[device]
    if index >= len(names):
        return
    name = names[index]
    kernel = next((k for k in own_kernels(device) if k["name"] == name), None)
    if kernel is None or str(dtype).removeprefix("torch.") not in kernel["dtypes"].split():
        return
    if kernel["arch"] == "sm_90a":
        hopper_only(device)
    if tf32 and (dtype != torch.float32 or device == "cpu"):
        return
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    needs_tf32 = dtype == torch.float32 and name in ("mma_sync", "wgmma")
    sizes = SIZES if device == "cpu" else SIZES + LARGE_SIZES
    taken = 0
    for (m, n, k), transposed in itertools.product(sizes, itertools.product((0, 1), repeat=2)):
        a, b, *parts = integer_parts(m, n, device, dtype, transposed, k)
        for present in PARTS if m * n < 1 << 18 else PARTS[:3]:
            taken += takes(a, b, *chosen(parts, present[:3]), bool(present[3]), name)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    # wgmma wants rows of multiples of 16 bytes, mma_split depths of 64.
    least = {"wgmma": 80, "mma_split": 150}.get(name, 80 if device == "cpu" else 250)
    assert taken >= (0 if needs_tf32 and not tf32 else least), taken


def test_accuracy(device, dtype):
    """Of what is no integer, by the rule."""
    m, n, k = 257, 130, 300
    a, b, bias, residual, result = (
        torch.randn(s, device=device).to(dtype) for s in [(m, k), (k, n), (n,), (m, n), (m, n)]
    )
    for relu, mask in itertools.product((False, True), (None, result)):
        out, columns, rows = epilogue(a, b, bias, residual, mask, relu, True, True)
        wide = [t.double() for t in (a, b, bias, residual)]
        assert_by_rule(
            out,
            reference(a, b, bias, residual, mask, relu),
            reference(*wide, mask, relu),
            terms=k,
        )
        assert_sums(out, columns, rows)


def assert_sums(out, columns, rows):
    """Against torch's sums of the same, rounded, values."""
    for dim, actual in ((0, columns), (1, rows)):
        assert_by_rule(
            actual,
            out.sum(dim),
            out.double().sum(dim),
            what=f"sums over {dim}",
            terms=out.size(dim),
            moved=lambda dim=dim: [mover(way)(out).sum(dim) for way in WAYS],
        )


def test_special_values(device, dtype):
    """Infinities and NaN in C, and NaN in the ReLU's result, which lets pass what torch does."""
    kw = {"device": device, "dtype": dtype}
    inf = float("inf")
    a = torch.zeros(70, 40, **kw)
    a[1, 0], a[2, 0], a[3, 1] = inf, NAN, -inf
    b = torch.ones(40, 66, **kw)
    residual = torch.ones(70, 66, **kw)
    residual[5, 6], residual[7, 65] = NAN, -inf
    result = torch.ones(70, 66, **kw)
    result[:, 2], result[:, 3], result[:, 4], result[:, 5] = NAN, 0, -1, inf
    for relu in (False, True):
        out, columns, rows = epilogue(a, b, None, residual, result, relu, True, True)
        # In float64, where it does not matter how stock multiplies bfloat16 on this processor.
        expected = reference(*(t.double() for t in (a, b)), None, residual, result, relu).to(dtype)
        for actual, wanted in (
            (out, expected),
            (columns, expected.sum(0)),
            (rows, expected.sum(1)),
        ):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def test_strides(device, dtype):
    kw = {"device": device, "dtype": dtype}
    m, n, k = 9, 6, 7

    def layouts(rows, cols):
        x = integers(-3, 3, rows, cols, **kw)
        wide = torch.zeros(2 * rows, cols + 3, **kw)
        wide[::2, 1:-2] = x
        offset = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(rows, cols)
        yield from (x, x.mT.contiguous().mT, wide[::2, 1:-2], offset)
        yield x[:1].expand(rows, cols)
        yield x[:, :1].expand(rows, cols)

    bias = integers(-3, 3, 2 * n, **kw)[::2]
    layouts_of = (layouts(m, k), layouts(k, n), layouts(m, n), layouts(m, n))
    for a, b, residual, result in zip(*layouts_of, strict=True):
        for backend in ("auto", "braze"):
            assert_exact(a, b, bias, residual, result, True, backend)
            assert_exact(a, b, bias, residual.flip(0), None, False, backend)


def test_more_dimensions(device, dtype):
    kw = {"device": device, "dtype": dtype}
    x, w, bias = integers(-3, 3, 2, 3, 5, 7, **kw), integers(-3, 3, 7, 4, **kw), None
    residual = integers(-3, 3, 2, 3, 5, 4, **kw)
    out, columns, rows = epilogue(x, w, bias, residual, None, True, True, True)
    expected = (x.double() @ w.double() + residual).relu()
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(columns, expected.sum((0, 1, 2)).to(dtype))
    assert torch.equal(rows, expected.sum(-1).to(dtype))
    vector = epilogue(x[0, 0, 0], w, bias, residual[0, 0, 0], None, False, False, True)
    assert vector[0].shape == (4,)
    assert vector[1].shape == (0,)
    assert vector[2].shape == ()


@pytest.mark.parametrize("size", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)], ids=str)
def test_empty(device, dtype, size):
    m, n, k = size
    kw = {"device": device, "dtype": dtype}
    residual = integers(-3, 3, m, n, **kw)
    out, columns, rows = epilogue(
        torch.zeros(m, k, **kw),
        torch.zeros(k, n, **kw),
        None,
        residual,
        None,
        False,
        True,
        True,
    )
    assert torch.equal(out, residual)
    assert torch.equal(columns, residual.sum(0))
    assert torch.equal(rows, residual.sum(1))


def fuzz(data, device):
    m, n, k = (data.draw(st.integers(0, 300)) for _ in range(3))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    transposed = data.draw(st.booleans()), data.draw(st.booleans())
    a, b, *parts = integer_parts(m, n, device, dtype, transposed, k)
    present = [data.draw(st.booleans()) for _ in range(4)]
    backend = data.draw(st.sampled_from(["auto", "braze"]))
    assert_exact(a, b, *chosen(parts, present[:3]), present[3], backend)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


@pytest.mark.parametrize("size", [(257, 65, 130), (1500, 1200, 64), (64, 72, 12000)], ids=str)
def test_repeatable(device, dtype, size):
    m, n, k = size
    a, b, bias, residual, result = (
        torch.randn(s, device=device).to(dtype) for s in [(m, k), (k, n), (n,), (m, n), (m, n)]
    )
    first = epilogue(a, b, bias, residual, result, False, True, True)
    for _ in range(3):
        again = epilogue(a, b, bias, residual, result, False, True, True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_sums_do_not_depend_on_the_threads():
    a, b = torch.randn(700, 60), torch.randn(60, 90)
    threads = torch.get_num_threads()
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        results.append(epilogue(a, b, column_sums=True, row_sums=True))
    torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_gradcheck(device):
    kw = {"device": device, "dtype": torch.float64}
    shapes = [(2, 3, 4), (4, 5), (5,), (2, 3, 5)]
    inputs = tuple(torch.randn(s, **kw).requires_grad_() for s in shapes)
    result = torch.randn(2, 3, 5, **kw)
    for relu, mask, columns, rows in itertools.product((0, 1), (None, result), (0, 1), (0, 1)):
        flags = (bool(relu), bool(columns), bool(rows))

        def function(*t, mask=mask, flags=flags):
            outs = epilogue(*t, mask, *flags)
            return tuple(o for o, wanted in zip(outs, (True, *flags[1:]), strict=True) if wanted)

        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
    for needed in range(1, 16):
        some = [t.detach().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate(inputs)]
        assert torch.autograd.gradgradcheck(lambda *t: epilogue(*t, result, True)[0], some)


def test_opcheck(device, dtype):
    shapes = [(2, 6, 7), (7, 5), (5,), (2, 6, 5)]
    x, w, b, r = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes)
    result = torch.randn(2, 6, 5, device=device).to(dtype)
    op = torch.ops.braze.matmul_epilogue.default
    torch.library.opcheck(op, (x, w))
    torch.library.opcheck(op, (x, w, b, r, result, False, True, True))
    torch.library.opcheck(op, (x, w, None, r, None, True, True, False))
    torch.library.opcheck(op, (x, w, b, None, result, True, False, True))


def test_bad_input(device):
    r = lambda *s: torch.randn(s, device=device)  # noqa: E731
    a, b = r(2, 3), r(3, 4)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 5x4\)"):
        epilogue(a, r(5, 4))
    with pytest.raises(RuntimeError, match="expected input to be at least 1D, but got 0D"):
        epilogue(r(), b)
    with pytest.raises(RuntimeError, match="expected other to be 2D, but got 3D"):
        epilogue(a, r(1, 3, 4))
    with pytest.raises(RuntimeError, match=r"expected bias to have .* \[4\], but got \[5\]"):
        epilogue(a, b, r(5))
    for name in ("residual", "relu_result"):
        with pytest.raises(RuntimeError, match=rf"expected {name} to have .* \[2, 4\], but got"):
            epilogue(a, b, **{name: r(2, 5)})
        with pytest.raises(RuntimeError, match=rf"expected {name} to have .* \[2, 4\], but got"):
            epilogue(a, b, **{name: r(4)})
        with pytest.raises(RuntimeError, match=f"expected {name} to have the same dtype as input"):
            epilogue(a, b, **{name: r(2, 4).double()})
        if device == "cuda":
            with pytest.raises(RuntimeError, match=f"same device, but {name} is on cpu"):
                epilogue(a, b, **{name: torch.randn(2, 4)})
    with pytest.raises(RuntimeError, match="expected other to have the same dtype as input"):
        epilogue(a, b.double())


def test_kernels_without_the_epilogue_refuse_it(device):
    a, b = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    others = [k for k in own_kernels(device) if k["name"] not in WITH_FULL_EPILOGUE[device]]
    assert bool(others) == (device == "cuda")
    for kernel in others:
        with pytest.raises(RuntimeError, match=f"{kernel['name']} cannot take .* bias and ReLU"):
            epilogue(a, b, residual=a, backend=kernel["name"])
        with pytest.raises(RuntimeError, match=f"{kernel['name']} cannot take .* bias and ReLU"):
            epilogue(a, b, row_sums=True, backend=kernel["name"])
    if device == "cuda":
        with pytest.raises(RuntimeError, match="backend cublas has no ReLU gradient and no sums"):
            epilogue(a, b, relu_result=a, backend="cublas")


@pytest.mark.parametrize("relu", [False, True], ids=["no_relu", "relu"])
@pytest.mark.parametrize("size", [(33, 72, 65), (256, 512, 128), (3, 8, 5)], ids=str)
@cuda_only
def test_residual_by_cublas(device, dtype, size, relu):
    """The one part of the full epilogue that the vendor's library has, too."""
    m, n, k = size
    kw = {"device": device, "dtype": dtype}
    a, b = integers(-1, 1, m, k, **kw), integers(-1, 1, k, n, **kw)
    bias, residual = integers(-1, 1, n, **kw), integers(-1, 1, m + 1, n, **kw)
    expected = reference(a, b, bias, residual[:m], None, relu)
    out, columns, rows = epilogue(a, b, bias, residual[:m], None, relu, backend="cublas")
    assert torch.equal(out, expected)
    assert columns.numel() == rows.numel() == 0
    # Not aligned as fresh memory is: auto takes a kernel of ours.
    shifted = residual.flatten()[1 : 1 + m * n].view(m, n)
    expected = reference(a, b, bias, shifted, None, relu)
    with pytest.raises(RuntimeError, match="cublas does not take these shapes, strides and dtype"):
        epilogue(a, b, bias, shifted, None, relu, backend="cublas")
    assert torch.equal(epilogue(a, b, bias, shifted, None, relu)[0], expected)


@cuda_only
@cuda_only
def test_it_is_one_kernel_and_one_for_the_sums(device):
    """No pass over C remains."""
    hopper_only(device)
    a, b = (torch.randn(s, device=device).bfloat16() for s in [(2056, 72), (72, 1160)])
    residual = torch.randn(2056, 1160, device=device).bfloat16()

    def kernels(*operands, sums, backend="braze"):
        run = lambda: epilogue(  # noqa: E731
            *operands, None, residual, residual, True, sums, False, backend=backend
        )
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        on_device = [e for e in profile.events() if e.device_type == DeviceType.CUDA]
        return [e.name for e in on_device if "braze" in e.name]

    for backend, kind in (("braze", "persistent_kernel"), ("mma_sync", "gemm_kernel")):
        product = kernels(a, b, sums=False, backend=backend)
        assert len(product) == 1, product
        assert kind in product[0], product
        assert "Full" in product[0], product
        both = kernels(a, b, sums=True, backend=backend)
        assert len(both) == 2, both
        assert sum("ordered_sum_kernel" in name for name in both) == 1, both
    small = torch.randn(64, 3136, device=device).bfloat16()
    ran = cuda_kernels_of(
        lambda: epilogue(small, small.mT, residual=small[:, :64], backend="wgmma")
    )
    assert "cluster_split_kernel" in ran
    assert "FullArgs" in ran


@cuda_only
def test_in_a_graph(device):
    """Captured, one product behind the other, each reading what the last one wrote."""
    for dtype, backend in itertools.product((torch.float32, torch.bfloat16), ("auto", "braze")):
        source = torch.randn(256, 256, device=device).to(dtype) / 16
        x = torch.empty_like(source)

        def step(x=x, source=source, backend=backend):
            x.copy_(source)
            first, columns, rows = epilogue(
                x, source, source[0], x, source, False, True, True, backend=backend
            )
            second = epilogue(first, x, columns, first, rows.expand(256, 256), True, True, True)
            return first, columns, rows, *second

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for _ in range(10):
            source.normal_().div_(16)
            graph.replay()
            for actual, expected in zip(results, step(), strict=True):
                assert torch.equal(actual, expected)


def test_plain_products_keep_their_kernels(device):
    """Without any of the parts the op is the product itself, to the bit."""
    a, b, bias = (torch.randn(s, device=device) for s in [(65, 130), (130, 33), (33,)])
    plain = torch.ops.braze.linear(a, b.mT, bias, True, backend="braze")
    assert torch.equal(epilogue(a, b, bias, relu=True, backend="braze")[0], plain)


def wrong_epilogues():
    """(name, a wrong version of the op): what a slip in the kernels would do."""

    def residual_after_relu(a, b, bias, residual, result, relu, *sums):
        out = reference(a, b, bias, None, None, relu) + residual
        out = out.masked_fill(result <= 0, 0)
        return out, out.sum(0), out.sum(1)

    def zero_passes(a, b, bias, residual, result, relu, *sums):
        out = reference(a, b, bias, residual, None, relu).masked_fill(result < 0, 0)
        return out, out.sum(0), out.sum(1)

    def nan_does_not_pass(a, b, bias, residual, result, relu, *sums):
        out = reference(a, b, bias, residual, None, relu) * (result > 0)
        return out, out.sum(0), out.sum(1)

    def sums_without_the_last_tile(a, b, bias, residual, result, relu, *sums):
        out = reference(a, b, bias, residual, result, relu)
        return out, out[:-1].sum(0), out[:, :-1].sum(1)

    return [residual_after_relu, zero_passes, nan_does_not_pass, sums_without_the_last_tile]


@pytest.mark.parametrize("wrong", wrong_epilogues(), ids=lambda f: f.__name__)
def test_the_tests_reject_a_wrong_epilogue(device, monkeypatch, wrong):
    a, b, *parts = integer_parts(65, 33, device, torch.float64, (0, 0), 20)
    monkeypatch.setitem(globals(), "epilogue", wrong)
    with pytest.raises(AssertionError, match=r"output|sums"):
        assert_exact(a, b, *parts, True, "auto")


def test_reference_is_torchs_formula(device):
    """That the tests' formula has torch's gradient of a ReLU, NaN included."""
    x = torch.tensor([[-1.0, 0.0, 2.0, NAN]], device=device, requires_grad=True)
    grad = torch.tensor([[5.0, 6.0, 7.0, 8.0]], device=device)
    (expected,) = torch.autograd.grad(stock.relu(x), x, grad)
    one = torch.ones(1, 1, device=device)
    assert torch.equal(reference(one, grad, relu_result=x.detach()), expected)
    assert torch.equal(epilogue(one, grad, relu_result=x.detach())[0], expected)
