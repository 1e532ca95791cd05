"""cuBLASLt and cuDNN behind matmul, linear and conv2d: the same rule as for our own kernels."""

import threading

import pytest
import torch
import torch.nn.functional as stock

import braze
import braze.nn.functional as F
from braze import _config, _lib
from common import assert_by_rule, check_against_stock
from conftest import REQUIRE_CUDA

OPS = {"cublas": "matmul", "cudnn": "conv2d"}


def require_library(name):
    """Skips the test where the library is missing; fails it under BRAZE_REQUIRE_CUDA=1."""
    missing = _lib.cuda_library.vendor()[name]["missing"]
    if missing:
        (pytest.fail if REQUIRE_CUDA else pytest.skip)(f"{name}: {missing}")


@pytest.fixture
def cublas(gpu):
    require_library("cublas")
    with braze.backend(matmul="cublas"):
        yield "cuda"


@pytest.fixture
def cudnn(gpu):
    require_library("cudnn")
    with braze.backend(conv2d="cudnn"):
        yield "cuda"


@pytest.fixture(params=["ieee", "tf32"])
def fp32_precision(request, dtype):
    if request.param == "tf32":
        if dtype != torch.float32:
            pytest.skip("TF32 is a precision of float32")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "tf32"
    return request.param


def randn(*shape, dtype, grad=True):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


# --- choosing ---


def test_candidate_names():
    for choice in ("cublas", "cublas:0", "cublas:31"):
        with braze.backend(matmul=choice):
            assert _config.chosen_backend("matmul") == choice
    with braze.backend(conv2d="cudnn:3"):
        assert _config.chosen_backend("conv2d") == "cudnn:3"
    assert _config.chosen_backend("matmul") == "auto"
    for choices in ({"matmul": "cudnn"}, {"conv2d": "cublas:1"}, {"matmul": "cublas:"}):
        with pytest.raises(ValueError, match=r"expected .* to be one of auto, braze, "):
            braze.backend(**choices)


def test_cpu_tensors_are_refused():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with braze.backend(matmul="cublas"), pytest.raises(RuntimeError, match=r"backend.*cublas"):
        braze.matmul(a, b)
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    with braze.backend(conv2d="cudnn"), pytest.raises(RuntimeError, match=r"backend.*cudnn"):
        F.conv2d(x, w)


def test_status(gpu):
    status = _lib.cuda_library.vendor()
    assert status.keys() == OPS.keys()
    for library in status.values():
        assert bool(library["version"]) != bool(library["missing"])


@pytest.mark.parametrize("name", list(OPS))
def test_missing_library_is_named(gpu, name):
    missing = _lib.cuda_library.vendor()[name]["missing"]
    if not missing:
        pytest.skip(f"{name} is there")
    x = torch.randn(1, 4, 4, 4, device="cuda")
    with braze.backend(**{OPS[name]: name}), pytest.raises(RuntimeError, match="cannot be used"):
        F.conv2d(x, x) if name == "cudnn" else braze.matmul(x, x)


# --- cuBLASLt ---


@pytest.mark.parametrize("mkn", [(64, 96, 48), (17, 13, 29), (1, 300, 9), (9, 300, 1), (5, 0, 6)])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_matmul(cublas, dtype, fp32_precision, mkn, transposed):
    m, k, n = mkn
    a = randn(k, m, dtype=dtype) if transposed[0] else randn(m, k, dtype=dtype)
    b = randn(n, k, dtype=dtype) if transposed[1] else randn(k, n, dtype=dtype)

    def product(matmul):
        return lambda a, b: matmul(a.T if transposed[0] else a, b.T if transposed[1] else b)

    check_against_stock(product(braze.matmul), product(torch.matmul), [a, b])


@pytest.mark.parametrize(
    "shapes",
    [((4, 8, 5), (4, 5, 7)), ((4, 8, 5), (5, 7)), ((8, 5), (4, 5, 7)), ((2, 1, 8, 5), (3, 5, 7))],
)
def test_batched_matmul(cublas, dtype, shapes):
    a, b = (randn(*shape, dtype=dtype) for shape in shapes)
    check_against_stock(braze.matmul, torch.matmul, [a, b])


def test_leading_dimensions(cublas, dtype):
    """Slices of wider matrices: no copy is needed, only a leading dimension."""
    a, b = randn(40, 64, dtype=dtype), randn(64, 40, dtype=dtype)
    slices = [(a[:, :24], b[3:27]), (a[1:, 1:25], b[:24, 1:]), (a.T[:24].T, b.T[:, :24].T)]
    for x, y in slices:
        args = [x.detach().requires_grad_(), y.detach().requires_grad_()]
        check_against_stock(braze.matmul, torch.matmul, args)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_linear(cublas, dtype, fp32_precision, bias, offset):
    """An offset of one element leaves the pointers aligned to that element alone."""

    def at_offset(*shape):
        n = torch.Size(shape).numel()
        return randn(n + offset, dtype=dtype, grad=False)[offset:].view(shape).requires_grad_()

    inputs = [at_offset(33, 20), at_offset(24, 20)] + ([at_offset(24)] if bias else [])
    check_against_stock(F.linear, stock.linear, inputs)


@pytest.mark.parametrize("mkn", [(64, 64, 64), (64, 3136, 128), (300, 1000, 100), (1, 8000, 10)])
@pytest.mark.parametrize("bias", [False, True])
def test_relu_epilogue(cublas, dtype, fp32_precision, mkn, bias):
    m, k, n = mkn
    x, w = randn(m, k, dtype=dtype, grad=False), randn(n, k, dtype=dtype, grad=False)
    b = randn(n, dtype=dtype, grad=False) if bias else None

    def linear_relu(x, w, b):
        return torch.ops.braze.linear(x, w, b, True, fp32_precision == "tf32", False, "cublas")

    def reference(dtype=None):
        return stock.linear(*(t if t is None or dtype is None else t.to(dtype) for t in (x, w, b)))

    expected = reference(torch.float64).relu()
    assert_by_rule(linear_relu(x, w, b), reference().relu(), expected, terms=k)
    x[0, 5] = float("nan")
    out = linear_relu(x, w, b)
    assert out[0].isnan().all(), "NaN has to pass ReLU"
    assert not out[1:].isnan().any()


@pytest.mark.parametrize("i", [1, 2, 5, 31])
def test_matmul_candidates(cublas, dtype, i):
    a, b = randn(96, 64, dtype=dtype), randn(64, 80, dtype=dtype)
    with braze.backend(matmul=f"cublas:{i}"):
        try:
            out = braze.matmul(a, b)
        except RuntimeError as error:
            assert "does not take" in str(error)  # noqa: PT017
            return
    assert_by_rule(out, a @ b, a.double() @ b.double())


def test_the_tests_reject_tf32(cublas):
    """Where TF32 is off, a result computed with it has to be noticed."""
    a, b = (randn(256, 256, dtype=torch.float32, grad=False) for _ in range(2))
    wrong = torch.ops.braze.matmul(a, b, True, False, "cublas")
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(wrong, a @ b, a.double() @ b.double())


# --- cuDNN ---

# input, weight, and conv2d's arguments
CONVOLUTIONS = [
    ((2, 8, 9, 9), (16, 8, 3, 3), {"padding": 1}),
    ((3, 1, 14, 14), (32, 1, 3, 3), {"padding": 1}),
    ((2, 16, 12, 10), (8, 16, 3, 3), {"stride": 2}),
    ((2, 8, 10, 10), (8, 4, 3, 3), {"padding": 2, "dilation": 2, "groups": 2}),
    ((1, 6, 8, 8), (6, 1, 3, 3), {"padding": 1, "groups": 6}),
    ((2, 32, 7, 7), (64, 32, 1, 1), {}),
    ((2, 5, 11, 11), (7, 5, 5, 5), {"stride": (3, 2), "padding": (2, 1)}),
    ((2, 4, 9, 7), (6, 4, 2, 4), {"padding": "same"}),
    ((2, 3, 1, 1), (5, 3, 1, 1), {}),
]


@pytest.mark.parametrize(("x", "w", "args"), CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_conv2d(cudnn, dtype, fp32_precision, x, w, args, channels_last, bias):
    format = torch.channels_last if channels_last else torch.contiguous_format
    inputs = [t.to(memory_format=format) for t in (torch.randn(x), torch.randn(w))]
    inputs += [torch.randn(w[0])] if bias else []
    inputs = [t.to("cuda", dtype).requires_grad_() for t in inputs]
    # Stock may run a small convolution in fp32 where TF32 is allowed.
    tf32 = dtype == torch.float32 and fp32_precision == "tf32"
    out = check_against_stock(
        lambda *t: F.conv2d(*t, **args),
        lambda *t: stock.conv2d(*t, **args),
        inputs,
        ulps=2**13 if tf32 else 4,
    )
    assert out.is_contiguous(memory_format=format)


def test_conv2d_empty_batch(cudnn, dtype):
    x, w = randn(0, 4, 8, 8, dtype=dtype), randn(6, 4, 3, 3, dtype=dtype)
    check_against_stock(F.conv2d, stock.conv2d, [x, w])


def test_conv2d_misaligned(cudnn, dtype):
    """Views with an offset of one element, for the input, the weight and the bias."""

    def offset(*shape):
        n = torch.Size(shape).numel()
        return randn(n + 1, dtype=dtype, grad=False)[1:].view(shape).requires_grad_()

    inputs = [offset(2, 8, 9, 9), offset(16, 8, 3, 3), offset(16)]
    check_against_stock(F.conv2d, stock.conv2d, inputs)


@pytest.mark.parametrize("i", [1, 3, 31])
def test_conv2d_candidates(cudnn, dtype, i):
    x, w = randn(4, 8, 12, 12, dtype=dtype), randn(8, 8, 3, 3, dtype=dtype)
    with braze.backend(conv2d=f"cudnn:{i}"):
        try:
            out = F.conv2d(x, w)
        except RuntimeError as error:
            assert "cudnn" in str(error)  # noqa: PT017
            return
    # Not by twice stock's error: Winograd and FFT engines are less accurate than the favourite.
    reference = stock.conv2d(x.double(), w.double())
    error = (out.double() - reference).abs().max() / reference.abs().max()
    assert error < 64 * torch.finfo(dtype).eps


def test_conv2d_deterministic(cudnn):
    x, w = randn(16, 8, 20, 20, dtype=torch.float32), randn(8, 8, 3, 3, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(F.conv2d(x, w).square().sum(), (x, w)) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


# --- both ---


def test_graph_capture_of_first_use(cublas, cudnn, dtype):
    """Shapes that nothing else uses: heuristics are asked and plans built inside the capture."""
    x, w = randn(3, 8, 13, 11, dtype=dtype), randn(8, 8, 3, 3, dtype=dtype)
    v, b = randn(21, 8 * 11 * 9, dtype=dtype), randn(21, dtype=dtype)

    def step(x):
        out = F.linear(F.conv2d(x, w).flatten(1), v, b)
        return out, *torch.autograd.grad(out.sum(), (x, w, v, b))

    step(x[:2])  # a warm-up for the kernels that are not the libraries'
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    with torch.no_grad():
        x.normal_()
    graph.replay()
    for actual, expected in zip(captured, step(x), strict=True):
        assert_by_rule(actual, expected, expected.double())


def test_threads_and_streams(cublas, cudnn):
    x, w = randn(4, 8, 12, 12, dtype=torch.float32), randn(8, 8, 3, 3, dtype=torch.float32)
    v = randn(16, 800, dtype=torch.float32)

    def step():
        with torch.no_grad():
            return F.linear(F.conv2d(x, w).flatten(1), v)

    expected = step()
    torch.cuda.synchronize()
    results = []

    def worker():
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [step() for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        results.extend(outs)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for result in results:
        assert torch.equal(result, expected)
