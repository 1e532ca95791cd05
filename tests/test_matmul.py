import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from braze import _config
from common import assert_by_rule, assert_same_layer, check_against_stock, compile, fuzzed
from conftest import cuda_only

MATMUL_SHAPES = [
    ((3,), (3,)),
    ((4, 5), (5,)),
    ((5,), (5, 7)),
    ((3, 4, 5), (5,)),
    ((5,), (3, 5, 7)),
    ((1, 1), (1, 1)),
    ((64, 128), (128, 32)),
    ((127, 101), (101, 53)),
    ((33, 300), (300, 100)),
    ((6, 4, 5), (5, 7)),
    ((4, 5), (6, 5, 7)),
    ((6, 4, 5), (6, 5, 7)),
    ((2, 1, 3, 4, 5), (6, 1, 5, 2)),
    ((0, 5), (5, 7)),
    ((4, 0), (0, 7)),
    ((4, 5), (5, 0)),
    ((0, 4, 5), (0, 5, 7)),
    ((2, 0, 4, 5), (5, 6)),
    ((5, 4), (2, 0, 4, 6)),
    ((1, 0, 4, 5), (3, 0, 5, 6)),
    ((3, 0, 1, 4, 5), (5,)),
    ((0,), (0,)),
]
LINEAR_SHAPES = [
    ((5,), 3),
    ((1, 1), 1),
    ((7, 13), 10),
    ((64, 128), 10),
    ((33, 257), 129),
    ((2, 3, 5, 7), 11),
    ((0, 7), 3),
    ((2, 0, 4, 5), 3),
    ((4, 0), 3),
    ((4, 7), 0),
]


def randn(*shape, device, dtype, grad=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=str)
def test_matmul_matches_stock(device, dtype, shapes):
    a, b = (randn(*shape, device=device, dtype=dtype) for shape in shapes)
    check_against_stock(braze.matmul, torch.matmul, [a, b])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("shape", "n"), LINEAR_SHAPES, ids=str)
def test_linear_matches_stock(device, dtype, shape, n, bias):
    inputs = [randn(*shape, device=device, dtype=dtype)]
    inputs.append(randn(n, shape[-1], device=device, dtype=dtype))
    if bias:
        inputs.append(randn(n, device=device, dtype=dtype))
    check_against_stock(F.linear, stock.linear, inputs)


def test_linear_bias_of_one_element_and_vector_weight(device):
    x, w, b = (randn(*s, device=device, dtype=torch.float64) for s in [(4, 5), (3, 5), (1,)])
    check_against_stock(F.linear, stock.linear, [x, w, b])
    check_against_stock(F.linear, stock.linear, [x, randn(5, device=device, dtype=torch.float64)])


def strided(shape, device, dtype):
    """Tensors of one shape in many layouts."""
    *batch, rows, cols = shape
    r = lambda *s: torch.randn(s, device=device).to(dtype)  # noqa: E731
    yield "contiguous", r(*shape)
    yield "transposed", r(*batch, cols, rows).mT
    yield "permuted batch", r(rows, *batch, cols).movedim(0, -2)
    yield "batch innermost", r(rows, cols, *batch).permute(*range(2, 2 + len(batch)), 0, 1)
    yield "sliced rows", r(*batch, 2 * rows, cols + 3)[..., ::2, 1:-2]
    yield "sliced columns", r(*batch, rows, 2 * cols)[..., ::2]
    yield "expanded batch", r(rows, cols).expand(shape)
    yield "expanded rows", r(*batch, 1, cols).expand(shape)
    yield "expanded columns", r(*batch, rows, 1).expand(shape)
    yield "offset", r(1 + torch.Size(shape).numel())[1:].view(shape)
    yield "overlapping", r(4096).as_strided(shape, (3, 2, 1, 1)[-len(shape) :])


def test_strides(device, dtype):
    lefts, rights = list(strided((2, 3, 9, 7), device, dtype)), strided((2, 3, 7, 5), device, dtype)
    for i, (name, b) in enumerate(rights):
        for a_name, a in [lefts[0], lefts[i], lefts[(i + 3) % len(lefts)]]:
            out = braze.matmul(a, b)
            reference = torch.matmul(a.double(), b.double())
            assert out.is_contiguous()
            assert_by_rule(out, torch.matmul(a, b), reference, what=f"{a_name} x {name}")


def test_linear_strides(device, dtype):
    bias = randn(10, device=device, dtype=dtype)[::2]
    weights = list(strided((5, 7), device, dtype))
    for i, (name, x) in enumerate(strided((2, 3, 9, 7), device, dtype)):
        for w in (weights[0][1], weights[i % len(weights)][1]):
            inputs = [t.detach().requires_grad_() for t in (x, w, bias)]
            assert inputs[0].stride() == x.stride(), name
            g = torch.ones((), device=device, dtype=dtype).expand(2, 3, 9, 5)
            check_against_stock(F.linear, stock.linear, inputs, grad_output=g)


def test_special_values(device, dtype):
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([[1.0, inf, 2.0], [nan, 1.0, 1.0], [1.0, 2.0, 3.0]], device=device).to(dtype)
    b = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-inf, 1e-40]], device=device).to(dtype)
    check_against_stock(braze.matmul, torch.matmul, [a, b])
    big = torch.full((40, 40), torch.finfo(dtype).max, device=device, dtype=dtype)
    assert braze.matmul(big, big).isinf().all()


def fuzz_matmul(data, device):
    extent = st.integers(0, 70)
    m, k, n = data.draw(extent), data.draw(extent), data.draw(extent)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    batch_a, batch_b = data.draw(
        st.sampled_from([((), ()), ((3,), ()), ((), (3,)), ((2, 3), (3,)), ((2, 1), (1, 4))])
    )
    transposed = data.draw(st.booleans()), data.draw(st.booleans())
    operands = []
    for batch, (rows, cols), flip in zip(
        (batch_a, batch_b), ((m, k), (k, n)), transposed, strict=True
    ):
        t = torch.randn(*batch, *((cols, rows) if flip else (rows, cols)), device=device).to(dtype)
        operands.append((t.mT if flip else t).requires_grad_())
    check_against_stock(braze.matmul, torch.matmul, operands)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz_matmul)


def test_linear_with_relu(device, dtype):
    x, w, b = (randn(*s, device=device, dtype=dtype) for s in [(17, 33), (20, 33), (20,)])
    # Far from zero, where rounding would decide whether the gradient passes.
    x, w = x.abs(), torch.cat([w[:10].abs(), -w[10:].abs()])
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    check_against_stock(
        lambda *t: torch.ops.braze.linear(*t, True), lambda *t: stock.linear(*t).relu(), [x, w, b]
    )
    nan = torch.full((2, 33), float("nan"), device=device, dtype=dtype)
    assert torch.ops.braze.linear(nan, w, b, True).isnan().all()


def test_gradcheck(device):
    kw = {"device": device, "dtype": torch.float64}
    for a, b in [((3,), (3,)), ((2, 3), (3,)), ((2, 2, 3), (3, 4)), ((2, 3), (3, 3, 4))]:
        inputs = (randn(*a, **kw), randn(*b, **kw))
        assert torch.autograd.gradcheck(braze.matmul, inputs)
        assert torch.autograd.gradgradcheck(braze.matmul, inputs)
    inputs = (randn(2, 3, 4, **kw), randn(5, 4, **kw), randn(5, **kw))
    for relu in (False, True):
        function = lambda *t, relu=relu: torch.ops.braze.linear(*t, relu)  # noqa: E731
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(F.linear, inputs)
    # Only some gradients asked for.
    for mask in range(1, 8):
        some = tuple(t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(inputs))
        assert torch.autograd.gradgradcheck(F.linear, some)


def test_opcheck(device, dtype):
    x, w, b = (randn(*s, device=device, dtype=dtype) for s in [(2, 6, 7), (5, 7), (5,)])
    g = randn(2, 6, 5, device=device, dtype=dtype)
    torch.library.opcheck(torch.ops.braze.matmul.default, (x, w.mT))
    torch.library.opcheck(torch.ops.braze.linear.default, (x, w))
    torch.library.opcheck(torch.ops.braze.linear.default, (x, w, b, True))
    torch.library.opcheck(torch.ops.braze.linear_backward.default, (g, x, w, [True, True, True]))
    torch.library.opcheck(torch.ops.braze.linear_backward.default, (g, x, w, [False, True, False]))


def test_compile(device):
    inputs = [randn(*s, device=device, dtype=torch.float32) for s in [(4, 7), (5, 7), (5,)]]

    def function(linear, matmul):
        return lambda x, w, b: matmul(linear(x, w, b) * 2, w).sum()

    compiled = compile(function(F.linear, braze.matmul))
    check_against_stock(compiled, function(stock.linear, torch.matmul), inputs)


def test_autocast(device):
    x, w, b = (randn(*s, device=device, dtype=torch.float32) for s in [(4, 7), (5, 7), (5,)])
    with torch.autocast(device, dtype=torch.bfloat16):
        out = F.linear(x, w, b)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, torch.ops.braze.linear(x, w, b))
        assert braze.matmul(x, w.mT).dtype == torch.bfloat16
        assert torch.ops.braze.matmul(x, w.mT).dtype == torch.bfloat16
        assert braze.matmul(x.double(), w.mT.double()).dtype == torch.float64
        assert_by_rule(out, stock.linear(x, w, b), stock.linear(x.double(), w.double(), b.double()))
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (x, w, b))


def test_module(device):
    layer = braze.nn.Linear(7, 5, device=device)
    plain = torch.nn.Linear(7, 5, device=device)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, device=device)
    for clone in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_layer(clone, plain, x)
    assert isinstance(layer, torch.nn.Linear)
    model = braze.nn.Sequential(braze.nn.Flatten(), layer, braze.nn.ReLU())
    assert_same_layer(
        model, torch.nn.Sequential(torch.nn.Flatten(), plain, torch.nn.ReLU()), x.view(3, 7, 1)
    )


def test_repeatable(device, dtype):
    a, b = randn(257, 1000, device=device, dtype=dtype), randn(1000, 65, device=device, dtype=dtype)
    first = braze.matmul(a, b)
    assert all(torch.equal(first, braze.matmul(a, b)) for _ in range(3))


def own_kernels(device):
    wanted = (lambda arch: arch == "cpu") if device == "cpu" else (lambda arch: "sm_" in arch)
    vendor = _config.backend._VENDORS["matmul"]
    return [k for k in braze.kernels("matmul") if wanted(k["arch"]) and k["name"] not in vendor]


ROUND_TO_TF32 = ("09_wmma", "mma_sync", "wgmma", "stream_k")


def test_every_kernel_by_name(device, dtype):
    kernels = own_kernels(device)
    assert kernels
    for kernel in kernels:
        # TMA takes rows of multiples of 16 bytes, wgmma for TF32 a depth of a multiple of 4.
        tma = kernel["arch"] == "sm_90a" and kernel["name"] != "wgmma_split"
        m, k, n = (80, 136, 96) if tma else (67, 130, 71)
        if kernel["name"] in ("gemv", "outer"):
            continue  # each's gradients are for the other: test_matmul_thin.py
        if kernel["name"] == "thin":  # no depth, in the gradients either, above 128
            k = 120
        a, b = randn(m, k, device=device, dtype=dtype), randn(k, n, device=device, dtype=dtype)
        if str(dtype).removeprefix("torch.") not in kernel["dtypes"].split():
            continue
        if kernel["arch"] == "sm_90a" and torch.cuda.get_device_capability() != (9, 0):
            continue
        with braze.backend(matmul=kernel["name"]):
            if dtype == torch.float32 and kernel["name"] in ROUND_TO_TF32:
                with pytest.raises(RuntimeError, match="rounded to TF32, which is not allowed"):
                    braze.matmul(a, b)
                torch.backends.cuda.matmul.fp32_precision = "tf32"
            check_against_stock(braze.matmul, torch.matmul, [a, b])
            torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_backend_is_honoured_on_cpu():
    """Kernels that add in different orders give different bits: that shows which one ran."""
    a, b = torch.randn(16, 3000), torch.randn(3000, 16)
    results = {}
    for name in ("auto", "braze", "blocked", "01_naive"):
        with braze.backend(matmul=name):
            results[name] = braze.matmul(a, b)
    assert torch.equal(results["auto"], results["blocked"])
    assert torch.equal(results["braze"], results["blocked"])
    assert not torch.equal(results["01_naive"], results["blocked"])


# Odd and even extents, rows and columns that fill a tile of 16 or not, sums longer than a block is
# deep, batches.
AMX_SHAPES = [
    (1, 1, 1, 1),
    (1, 16, 16, 32),
    (1, 17, 33, 31),
    (1, 100, 47, 513),
    (1, 300, 1100, 64),
    (1, 515, 96, 1030),
    (5, 33, 20, 70),
    (2, 0, 8, 8),
    (2, 8, 8, 0),
]


def has_amx():
    return "amx" in {kernel["name"] for kernel in own_kernels("cpu")}


@pytest.mark.parametrize("shape", AMX_SHAPES, ids=str)
def test_amx(shape):
    if not has_amx():
        a = torch.ones(2, 2, dtype=torch.bfloat16)
        with braze.backend(matmul="braze"):
            assert torch.equal(braze.matmul(a, a), 2 * a)  # "blocked" serves
        pytest.skip("the processor has no AMX")
    batch, m, n, k = shape
    for transposed_a, transposed_b in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        a = majors(batch, m, k, transposed_a, "cpu", torch.bfloat16)
        b = majors(batch, k, n, transposed_b, "cpu", torch.bfloat16)
        with braze.backend(matmul="amx"):
            out = braze.matmul(a, b)
            assert torch.equal(out, braze.matmul(a, b))
            if batch > 1:  # one B for the whole batch
                assert torch.equal(braze.matmul(a, b[0])[0], out[0])
        assert_by_rule(out, torch.matmul(a, b), torch.matmul(a.double(), b.double()))
        if m * n * k > 1:
            nan = a.clone()
            nan[..., 0, 0] = float("nan")
            with braze.backend(matmul="amx"):
                bad = braze.matmul(nan, b)
            assert bad[..., 0, :].isnan().all()
            assert torch.equal(bad[..., 1:, :], out[..., 1:, :])


def test_amx_takes_bfloat16_only():
    if not has_amx():
        pytest.skip("the processor has no AMX")
    with braze.backend(matmul="amx"), pytest.raises(RuntimeError, match="amx takes bfloat16"):
        braze.matmul(torch.ones(3, 3), torch.ones(3, 3))


def test_backend_is_kept_for_backward(device):
    a = torch.randn(16, 3000, device=device, requires_grad=True)
    b, g = torch.randn(3000, 16, device=device), torch.randn(16, 16, device=device)
    with braze.backend(matmul="braze"):
        out = braze.matmul(a, b)
        expected = braze.matmul(g, b.mT)
    assert torch.equal(torch.autograd.grad(out, a, g)[0], expected)


def cuda_kernels_of(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


def test_which_library_runs_on_cuda(device):
    if device == "cpu":
        return
    a, b = torch.randn(256, 256, device=device), torch.randn(256, 256, device=device)
    for name, own in (("braze", True), ("cublas", False)):
        with braze.backend(matmul=name):
            braze.matmul(a, b)
            names = cuda_kernels_of(lambda: braze.matmul(a, b))
        assert names
        assert ("braze" in names) == own, names
    with braze.backend(matmul="braze"):
        assert "MmaKernel" in cuda_kernels_of(lambda: braze.matmul(a.double(), b.double()))


def test_bad_backend(device):
    a = torch.randn(3, 3, device=device)
    with pytest.raises(ValueError, match="expected matmul to be one of auto, braze, cublas"):
        braze.backend(matmul="fastest")
    with pytest.raises(ValueError, match=r"auto, braze, cublas.*but got None"):
        braze.backend(matmul=None)
    with pytest.raises(RuntimeError, match=r"expected backend to be one of auto, braze.*fastest"):
        torch.ops.braze.matmul(a, a, backend="fastest")
    if device == "cpu":
        with braze.backend(matmul="cublas"), pytest.raises(RuntimeError, match="for CPU tensors"):
            braze.matmul(a, a)
    else:
        with pytest.raises(RuntimeError, match="for CUDA tensors"):
            torch.ops.braze.matmul(a, a, backend="blocked")


@pytest.mark.parametrize("backend", ["auto", "braze"])
def test_tf32(device, backend):
    a, b = torch.randn(512, 512, device=device), torch.randn(512, 512, device=device)
    reference = a.double() @ b.double()
    scale = reference.abs().max()

    def error():
        with braze.backend(matmul=backend):
            return ((braze.matmul(a, b) - reference).abs().max() / scale).item()

    assert error() < 2e-6
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    if device == "cpu":
        assert error() < 2e-6
    else:
        # Ten bits of mantissa: the products' errors add up like a random walk.
        assert 1e-5 < error() < 2e-3


def test_bad_input(device):
    r = lambda *s: torch.randn(s, device=device)  # noqa: E731
    with pytest.raises(RuntimeError, match="need to be at least 1D, but they are 0D and 2D"):
        braze.matmul(r(), r(2, 3))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 4x5\)"):
        braze.matmul(r(2, 3), r(4, 5))
    with pytest.raises(RuntimeError, match=r"tensor a \(2\) must match.*tensor b \(3\).*on 0"):
        braze.matmul(r(2, 2, 3), r(3, 3, 5))
    with pytest.raises(RuntimeError, match="same dtype as input, but got float64 and float32"):
        braze.matmul(r(2, 3), r(3, 4).double())
    with pytest.raises(RuntimeError, match="float64, float32, bfloat16 or float16, but got int64"):
        torch.ops.braze.matmul(r(2, 3).long(), r(3, 4).long())
    with pytest.raises(TypeError, match=r"argument 'other' .* must be Tensor, not int"):
        braze.matmul(r(2, 3), 3)
    with pytest.raises(TypeError, match=r"argument 'input' .* must be Tensor, not float"):
        F.linear(3.0, r(2, 3))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 5x4\)"):
        F.linear(r(2, 3), r(4, 5))
    with pytest.raises(RuntimeError, match=r"expected bias to have shape \[4\], but got \[5\]"):
        F.linear(r(2, 3), r(4, 3), r(5))
    with pytest.raises(RuntimeError, match="to linear need to be at least 1D"):
        F.linear(r(), r(4, 3))
    with pytest.raises(RuntimeError, match="expected weight to be 2D, but got 3D"):
        F.linear(r(2, 3), r(2, 4, 3))
    with pytest.raises(RuntimeError, match="expected grad_output of the forward's output shape"):
        torch.ops.braze.linear_backward(r(2, 5), r(2, 3), r(4, 3), [True, True, True])


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A product that drops the last step of the reduction, as a wrong loop bound would."""

    def wrong(a, b):
        return braze.matmul(a[:, :-1], b[:-1])

    a, b = randn(20, 500, device=device, dtype=dtype), randn(500, 20, device=device, dtype=dtype)
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, torch.matmul, [a, b])


HOPPER_SHAPES = [
    (1, 512, 512, 512),
    (1, 2048, 1536, 640),
    (1, 1000, 1000, 1000),
    (1, 136, 264, 72),
    (1, 64, 1024, 3136),
    (1, 1024, 8, 256),
    (3, 200, 136, 200),
    (2, 520, 72, 1024),
    (1, 8, 8, 8),
    # Sizes for which the plan takes, in 16 bits, tiles of 128 x 192, of the product and of the
    # transposed one, and of 64 x 192; of 256, 128 and 64 x 144, where A is K-major, else of
    # 128 x 144 for the former two; 128 x 192 with the depth split over clusters of 2 and 4; and
    # 128 x 128 over 2 and 4.
    (2, 2040, 760, 264),
    (1, 3048, 1000, 264),
    (1, 760, 1504, 264),
    (1, 1576, 3000, 264),
    (2, 1576, 760, 264),
    (1, 1576, 768, 3080),
    (1, 1000, 1504, 8200),
    (1, 760, 760, 8200),
    (1, 1576, 600, 8200),
    (1, 392, 600, 8200),
]


def hopper_only(device):
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs a GPU of compute capability 9.0")


def majors(batch, rows, cols, transposed, device, dtype):
    """Matrices in memory as they are, or as their transposes."""
    shape = (batch, cols, rows) if transposed else (batch, rows, cols)
    t = torch.randn(shape, device=device).to(dtype)
    t = t.mT if transposed else t
    return t[0] if batch == 1 else t


@pytest.mark.parametrize(
    "name", ["wgmma", "stream_k", "10_wgmma", "11_warp_specialized", "12_cluster"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", HOPPER_SHAPES, ids=str)
@cuda_only
def test_hopper_kernels(device, dtype, shape, name):
    hopper_only(device)
    if name not in ("wgmma", "stream_k") and dtype == torch.float32:
        pytest.skip("the rungs below are for 16-bit types")
    batch, m, n, k = shape
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for transposed_a, transposed_b in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        a = majors(batch, m, k, transposed_a, device, dtype)
        b = majors(batch, k, n, transposed_b, device, dtype)
        with braze.backend(matmul=name):
            out = braze.matmul(a, b)
            assert torch.equal(out, braze.matmul(a, b))
        assert_by_rule(out, torch.matmul(a, b), torch.matmul(a.double(), b.double()))
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4080, 759, 264), (1576, 3001, 264), (3152, 759, 264)], ids=str)
@cuda_only
def test_hopper_results_of_odd_rows(device, dtype, shape):
    """Rows of C that TMA cannot store: from registers, of tiles that are swapped and others."""
    hopper_only(device)
    m, n, k = shape
    a, b = majors(1, m, k, False, device, dtype), majors(1, k, n, True, device, dtype)
    with braze.backend(matmul="wgmma"):
        out = braze.matmul(a, b)
    assert_by_rule(out, torch.matmul(a, b), torch.matmul(a.double(), b.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@cuda_only
def test_hopper_kernel_in_linear(device, dtype):
    """Forward with bias and ReLU, and both gradients, of odd and of round sizes."""
    hopper_only(device)
    # The latter three: tiles of 64, 128 and 256 x 144.
    for rows, features, outputs in [
        (512, 768, 1024),
        (200, 264, 136),
        (1024, 3136, 128),
        (1576, 520, 760),
        (3152, 264, 760),
        (1576, 264, 3000),
    ]:
        inputs = [
            torch.randn(s, device=device).to(dtype).requires_grad_()
            for s in [(rows, features), (outputs, features), (outputs,)]
        ]
        with braze.backend(matmul="wgmma"):
            check_against_stock(F.linear, stock.linear, inputs)
            x, w, b = inputs
            out = torch.ops.braze.linear(x, w, b, True, backend="wgmma")
            wide = stock.linear(*(t.double() for t in inputs)).relu()
            assert_by_rule(out, stock.linear(*inputs).relu(), wide)
            nan = torch.full_like(x, float("nan"))
            assert torch.ops.braze.linear(nan, w, b, True, backend="wgmma").isnan().all()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@cuda_only
def test_stream_k_shares_out_the_depth(device, dtype):
    """Fewer tiles than multiprocessors and more: tiles in many parts, in two, and whole."""
    hopper_only(device)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with braze.backend(matmul="stream_k"):
        for m, n, k in [(64, 72, 5000), (256, 1024, 8200), (2560, 1032, 264), (4096, 3000, 72)]:
            a = torch.randn(m, k, device=device).to(dtype)
            b, bias = torch.randn(n, k, device=device).to(dtype), torch.randn(n, device=device)
            bias = bias.to(dtype)
            out = torch.ops.braze.linear(a, b, bias, True, True, backend="stream_k")
            assert torch.equal(
                out, torch.ops.braze.linear(a, b, bias, True, True, backend="stream_k")
            )
            wide = stock.linear(a.double(), b.double(), bias.double()).relu()
            assert_by_rule(out, stock.linear(a, b, bias).relu(), wide)
            names = cuda_kernels_of(lambda a=a, b=b: braze.matmul(a, b.mT))
            assert "stream_k_kernel" in names
            assert "stream_k_sum_kernel" in names
    torch.backends.cuda.matmul.fp32_precision = "ieee"


SPLIT_KERNELS = ["wgmma_split", "mma_split"]


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
    reference = a.double() @ b.double()
    assert torch.equal(out.isnan(), reference.isnan())
    assert torch.equal(out.isposinf(), reference.isposinf())
    assert torch.equal(out.isneginf(), reference.isneginf())
    finite = reference.isfinite()
    torch.testing.assert_close(out[finite], reference[finite].float(), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("wgmma", torch.bfloat16),
        ("stream_k", torch.bfloat16),
        ("wgmma_split", torch.float32),
        ("simt_tma", torch.float32),
        ("dmma_tma", torch.float64),
    ],
    ids=str,
)
@cuda_only
def test_hopper_kernels_in_a_graph(device, backend, dtype):
    """Captured behind a copy, a fill and another stream, and one product behind the other."""
    hopper_only(device)
    source = torch.randn(512, 512, device=device).to(dtype)
    a, b = torch.empty_like(source), torch.zeros_like(source)
    side = torch.cuda.Stream()

    def step():
        a.copy_(source)
        first = braze.matmul(a, source)
        b.zero_()
        second = braze.matmul(b, first)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            third = braze.matmul(first, source)
        torch.cuda.current_stream().wait_stream(side)
        return first, second, braze.matmul(third, source)

    with braze.backend(matmul=backend):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        source.normal_()
        graph.replay()
        expected = step()
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert not results[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cuda_only
def test_operands_made_in_a_graph(device, dtype):
    """In a graph a product may read its second operand before the kernels ahead of it are done; not
    where the one right before it wrote that operand, or where something else came between."""
    source, x, fixed = (
        torch.randn(s, device=device).to(dtype) for s in [(64, 256), (48, 64), (256, 128)]
    )

    def step():
        made = braze.matmul(source, fixed)
        from_the_last = braze.matmul(x, made)
        behind_another = braze.matmul(x, made)
        twice = braze.matmul(from_the_last.mT, behind_another)
        written = torch.empty_like(twice).copy_(twice)
        behind_a_copy = braze.matmul(twice, written)
        return behind_another, twice, behind_a_copy, braze.matmul(behind_a_copy, fixed.mT)

    with braze.backend(matmul="braze"):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for _ in range(50):
            source.normal_()
            graph.replay()
            for actual, wanted in zip(results, step(), strict=True):
                assert torch.equal(actual, wanted)


@cuda_only
def test_first_call_of_a_thread(device):
    """Tensor maps are made by the driver, to which a new thread has no device yet."""
    hopper_only(device)
    a = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    results = []

    def run():
        with braze.backend(matmul="wgmma"):
            results.append(braze.matmul(a, a))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_by_rule(results[0], a @ a, a.double() @ a.double())


@cuda_only
def test_hopper_kernel_runs_where_expected(device):
    hopper_only(device)

    def names(backend, *operands):
        with braze.backend(matmul=backend):
            braze.matmul(*operands)
            return cuda_kernels_of(lambda: braze.matmul(*operands))

    def randn16(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    a, b = randn16(1024, 512), randn16(512, 768)
    for x, y in [(a, b), (a, b.mT.contiguous().mT), (a.mT.contiguous().mT, b)]:
        assert "persistent_kernel" in names("wgmma", x, y)
        assert "persistent_kernel" in names("braze", x, y)
        assert "persistent_kernel" not in names("mma_sync", x, y)
    # A row of 1030 bytes is not a multiple of 16.
    assert "persistent_kernel" not in names("braze", randn16(1024, 515), randn16(515, 768))
    # A large result of short sums: storing it is what takes time.
    assert "persistent_kernel" in names("braze", randn16(8192, 8), randn16(8, 1024))
    assert "persistent_kernel" in names("braze", randn16(2048, 16), randn16(16, 512))
    assert "thin_kernel" in names("braze", randn16(2048, 8), randn16(8, 512))
    assert "persistent_kernel" not in names("braze", randn16(1024, 32, 16), randn16(1024, 16, 32))
    with pytest.raises(RuntimeError, match=r"wgmma cannot take these arguments.*multiples of 16"):
        names("wgmma", randn16(64, 515), randn16(515, 64))
    with pytest.raises(RuntimeError, match="rounded to TF32, which is not allowed"):
        names("wgmma", a.float(), b.float())
    big = randn16(4096, 4096)
    assert "persistent_kernel" in names("braze", big, big)
    assert "simt_tma_kernel" in names("simt_tma", a.float(), b.float())
    # A long sum for a small result is split over clusters.
    assert "cluster_split_kernel" in names("wgmma", randn16(64, 3136), randn16(128, 3136).mT)
    # These sizes stand for tile shapes in HOPPER_SHAPES.
    for (m, n, k), kernel, tile in [
        ((4080, 760, 264), "persistent_kernel", "128, 192"),
        ((3048, 1000, 264), "persistent_kernel", "128, 192, 4, 2, 2, 192>, 1, 0, true"),
        ((760, 1504, 264), "persistent_kernel", "64, 192"),
        ((1576, 3000, 264), "persistent_kernel", "256, 144"),
        ((3152, 760, 264), "persistent_kernel", "128, 144"),
        ((1576, 768, 3080), "persistent_kernel", "64, 144"),
        ((1000, 1504, 8200), "cluster_split_kernel", "128, 192"),
        ((760, 760, 8200), "cluster_split_kernel", "128, 192"),
        ((1576, 600, 8200), "cluster_split_kernel", "128, 128"),
        ((392, 600, 8200), "cluster_split_kernel", "128, 128"),
    ]:
        ran = names("wgmma", randn16(m, k), randn16(k, n))
        assert kernel in ran, ran
        assert tile in ran, ran
    # Of A by columns, which come by 64, a tile of 144 loads 192.
    assert "128, 144, 5, 2, 2, 192" in names("wgmma", randn16(264, 3152).mT, randn16(264, 760))
    # fp32 with TF32 off
    assert "split_planes_kernel" in names("braze", big[:2048].float(), big.float())
    wide = big[:1024, :1024].float()
    assert "split_planes_kernel" in names("braze", wide, wide)
    assert "split_planes_kernel" not in names("braze", wide[:, :128], wide[:128])  # too short sums
