"""Which kernel of matmul runs, by name and by choice; AMX; TF32."""

import pytest
import torch
from matmul_common import majors, own_kernels, randn

import braze
from braze import _config
from common import assert_by_rule, check_against_stock, cuda_kernels_of, runs_hopper_kernels

ROUND_TO_TF32 = ("09_wmma", "mma_sync", "wgmma", "stream_k")


def test_every_kernel_by_name(device, dtype):
    kernels = own_kernels(device)
    assert kernels
    for kernel in kernels:
        # TMA takes rows of multiples of 16 bytes, wgmma for TF32 a depth of a multiple of 4.
        tma = kernel["arch"] == "sm_90a" and kernel["name"] not in ("wgmma_split", "wgmma_scaled")
        m, k, n = (80, 136, 96) if tma else (67, 130, 71)
        if kernel["name"] in ("gemv", "outer"):
            continue  # each's gradients are for the other: test_matmul_thin.py
        if kernel["name"] == "wgmma_long":
            continue  # its operands lie as a weight gradient's do: test_matmul_long.py
        if kernel["name"] == "thin":  # no depth, in the gradients either, above 128
            k = 120
        a, b = randn(m, k, device=device, dtype=dtype), randn(k, n, device=device, dtype=dtype)
        if str(dtype).removeprefix("torch.") not in kernel["dtypes"].split():
            continue
        if kernel["arch"] == "sm_90a" and not runs_hopper_kernels():
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
PAIR_SHAPES = [
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


#: the kernels that multiply pairs of bf16, where the processor has the instructions
PAIRS = ["amx", "dot_bf16"]


def has(name):
    return name in {kernel["name"] for kernel in own_kernels("cpu")}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", PAIR_SHAPES, ids=str)
def test_products_of_pairs(name, shape):
    if not has(name):
        a = torch.ones(2, 2, dtype=torch.bfloat16)
        with braze.backend(matmul="braze"):
            assert torch.equal(braze.matmul(a, a), 2 * a)  # "blocked" serves
        pytest.skip(f"the processor has no {name}")
    batch, m, n, k = shape
    for transposed_a, transposed_b in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        a = majors(batch, m, k, transposed_a, "cpu", torch.bfloat16)
        b = majors(batch, k, n, transposed_b, "cpu", torch.bfloat16)
        with braze.backend(matmul=name):
            out = braze.matmul(a, b)
            assert torch.equal(out, braze.matmul(a, b))
            if batch > 1:  # one B for the whole batch
                assert torch.equal(braze.matmul(a, b[0])[0], out[0])
        assert_by_rule(out, torch.matmul(a, b), torch.matmul(a.double(), b.double()))
        if m * n * k > 1:
            nan = a.clone()
            nan[..., 0, 0] = float("nan")
            with braze.backend(matmul=name):
                bad = braze.matmul(nan, b)
            assert bad[..., 0, :].isnan().all()
            assert torch.equal(bad[..., 1:, :], out[..., 1:, :])


def test_pairs_are_taken_where_they_pay():
    """Two products in fp32 take an Intel processor less than one of its instructions for pairs."""
    if not has("dot_bf16") or has("amx"):
        pytest.skip("a processor with AVX512_BF16 and no AMX")
    torch.manual_seed(0)
    a, b = torch.randn(64, 300).bfloat16(), torch.randn(300, 96).bfloat16()
    products = {}
    for name in ("braze", "blocked", "dot_bf16"):
        with braze.backend(matmul=name):
            products[name] = braze.matmul(a, b)
    intel = braze.info()["cpu"]["name"].startswith("Intel")
    assert torch.equal(products["braze"], products["blocked" if intel else "dot_bf16"])


@pytest.mark.parametrize("name", PAIRS)
def test_products_of_pairs_take_bfloat16_only(name):
    if not has(name):
        pytest.skip(f"the processor has no {name}")
    with braze.backend(matmul=name), pytest.raises(RuntimeError, match=f"{name} takes bfloat16"):
        braze.matmul(torch.ones(3, 3), torch.ones(3, 3))


def test_backend_is_kept_for_backward(device):
    a = torch.randn(16, 3000, device=device, requires_grad=True)
    b, g = torch.randn(3000, 16, device=device), torch.randn(16, 16, device=device)
    with braze.backend(matmul="braze"):
        out = braze.matmul(a, b)
        expected = braze.matmul(g, b.mT)
    assert torch.equal(torch.autograd.grad(out, a, g)[0], expected)


def test_a_choice_may_be_entered_again():
    chosen = _config.chosen_backend
    ours = braze.backend(matmul="braze")
    for _ in range(2):
        with ours, braze.backend(conv2d="braze"):
            with ours:
                assert (chosen("matmul"), chosen("conv2d")) == ("braze", "braze")
            assert (chosen("matmul"), chosen("conv2d")) == ("braze", "braze")
        assert (chosen("matmul"), chosen("conv2d")) == ("auto", "auto")


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
