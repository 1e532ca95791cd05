"""braze.tune: what is recorded, measured and chosen."""

import pytest
import torch

import braze
import braze.nn.functional as F
from braze import _config, _tuned, tuning
from braze._tuned import Product
from common import assert_by_rule
from tune_common import PRODUCT, RUNG, by_name, factors, good_kernel, index_of, place, timed

pytestmark = pytest.mark.usefixtures("empty_tables")


def products_of(function, *args):
    return [product for _, product in tuning.products_of(function, *args)]


# --- recording ---


def test_recorded_products(device):
    a = torch.randn(4, 24, device=device, requires_grad=True)
    b = torch.randn(24, 8, device=device, requires_grad=True)
    asked = tuning.products_of(lambda: [braze.matmul(a, b).sum().backward() for _ in range(2)])
    assert {place for place, _ in asked} == {torch.empty(0, device=device).device}
    assert [product for _, product in asked] == [
        Product("float32", 1, 4, 8, 24),
        Product("float32", 1, 4, 24, 8, b_column_major=True),
        Product("float32", 1, 24, 8, 4, a_column_major=True),
    ]
    bias = torch.randn(8, device=device, dtype=torch.bfloat16)
    x, w = a.detach().bfloat16(), b.detach().bfloat16().mT.contiguous()
    assert products_of(F.linear, x[:, 1:], w[:, 1:], bias) == [
        Product("bfloat16", 1, 4, 8, 23, b_column_major=True, bias=True)._replace(
            a_aligned=False, b_aligned=False
        )
    ]
    assert products_of(torch.ops.braze.linear, x, w, bias, True) == [
        Product("bfloat16", 1, 4, 8, 24, b_column_major=True, bias=True, relu=True)
    ]
    assert products_of(braze.matmul, a.detach()[:, :10].contiguous(), b.detach()[:10]) == [
        Product("float32", 1, 4, 8, 10, a_aligned=False)  # 40 bytes from row to row
    ]
    batch = b.detach().expand(3, 24, 8).contiguous()
    assert products_of(braze.matmul, a.detach(), batch) == [
        Product("float32", 3, 4, 8, 24, b_shared=False)
    ]


def test_tf32_is_a_precision_of_its_own(device):
    a, b = factors(device)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    dtype = "float32" if device == "cpu" else "tf32"
    assert products_of(braze.matmul, a, b) == [PRODUCT._replace(dtype=dtype)]


def test_what_is_not_recorded(device):
    a, b = factors(device)
    assert products_of(by_name, "braze", a, b) == []
    assert products_of(braze.matmul, a[:0], b) == []
    assert products_of(braze.matmul, a[:, :0], b[:0]) == []
    assert products_of(braze.matmul, a[:, ::2], b[::2]) == []  # no stride of 1
    braze.matmul(a, b)
    assert products_of(lambda: None) == []


def test_recording_ends_with_an_error(device):
    a, b = factors(device)

    def failing():
        raise KeyError("no")

    with pytest.raises(KeyError):
        tuning.products_of(failing)
    braze.matmul(a, b)
    libraries = [lib for lib in (braze._lib.ops_library, braze._lib.cuda_library) if lib]
    assert not any(lib.recorded(op) for lib in libraries for op in ("matmul", "conv2d"))


def layouts(batch, rows, cols, device, dtype):
    """Matrices in the memory layouts that have a product of their own."""
    lead = [batch] * (batch > 1)
    r = lambda *s: torch.randn(s, device=device).to(dtype)  # noqa: E731
    yield r(*lead, rows, cols)
    yield r(*lead, cols, rows).mT
    yield r(*lead, rows, cols + 8)[..., :cols]
    yield r(*lead, cols, rows + 8)[..., :rows].mT
    yield r(batch * rows * cols + 1)[1:].view(*lead, rows, cols)
    if batch > 1:
        yield r(rows, cols)
        yield r(cols, rows).mT.expand(batch, rows, cols)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("extents", [(16, 24, 32), (5, 7, 9), (1, 16, 8), (8, 1, 1), (1, 1, 5)])
def test_operands_ask_for_the_product_that_they_are_for(device, dtype, extents, batch):
    m, n, k = extents
    different = set()
    for a in layouts(batch, m, k, device, dtype):
        for b in layouts(batch, k, n, device, dtype):
            for product in products_of(braze.matmul, a, b):
                matrices = tuning.operands(product, torch.device(device))
                assert products_of(tuning.bound(product, matrices), "auto") == [product]
                different.add(product)
                run = tuning.bound(product, matrices)("auto")
                reference = tuning._reference(product, matrices)
                assert_by_rule(run, reference.to(dtype), reference, what=str(product))
    assert len(different) > 1 or extents == (1, 1, 5)


# --- choosing ---


def test_a_choice_takes_effect_for_its_product_alone(device):
    a, b = factors(device)
    present, rung = braze.matmul(a, b), by_name(RUNG, a, b)
    assert not torch.equal(present, rung)
    before = _config.settings(device)
    _tuned.put(index_of(device), PRODUCT, RUNG, True)
    assert _config.settings(device) != before  # braze.TrainStep has to capture anew
    assert torch.equal(braze.matmul(a, b), rung)
    assert torch.equal(by_name(good_kernel(device), a, b), rung) is False
    transposed = a.mT.contiguous().mT
    assert not torch.equal(braze.matmul(transposed, b), by_name(RUNG, transposed, b))
    c, d = (t.double() for t in (a, b))
    assert not torch.equal(braze.matmul(c, d), by_name(RUNG, c, d))
    _tuned.forget()
    assert torch.equal(braze.matmul(a, b), present)


def test_linear_has_a_choice_of_its_own(device):
    x, w, bias = *(factors(device)[0] for _ in range(2)), torch.randn(16, device=device)
    with braze.backend(matmul=RUNG):
        rung = F.linear(x, w, bias)
    present = F.linear(x, w, bias)
    product = PRODUCT._replace(b_column_major=True)
    _tuned.put(index_of(device), product, RUNG, True)
    assert torch.equal(F.linear(x, w, bias), present)
    _tuned.put(index_of(device), product._replace(bias=True), RUNG, True)
    assert torch.equal(F.linear(x, w, bias), rung)
    assert not torch.equal(rung, present)


@pytest.mark.parametrize("choice", ["wgmma", "cublas:99", "no_such_kernel", "braze", "auto", ""])
def test_a_choice_that_is_refused_leaves_it_to_the_rules(device, choice):
    a, b = factors(device)
    present = braze.matmul(a, b)
    # (wgmma does not take fp32 as it is; there are at most 32 of cublas.)
    _tuned.put(index_of(device), PRODUCT, choice, True)
    assert torch.equal(braze.matmul(a, b), present)


def test_deterministic_ignores_measured_choices(device):
    a, b = factors(device)
    present, rung = braze.matmul(a, b), by_name(RUNG, a, b)

    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            return braze.matmul(a, b)
        finally:
            torch.use_deterministic_algorithms(False)

    _tuned.put(index_of(device), PRODUCT, RUNG, True)
    assert torch.equal(braze.matmul(a, b), rung)
    assert torch.equal(deterministic(), present)
    _tuned.forget()
    _tuned.put(index_of(device), PRODUCT, RUNG, False)  # built in
    assert torch.equal(deterministic(), rung)


def test_measured_goes_before_built_in(device):
    a, b = factors(device)
    other = "02_reordered" if device == "cpu" else "02_coalesced"
    _tuned.put(index_of(device), PRODUCT, other, True)
    _tuned.put(index_of(device), PRODUCT, RUNG, False)
    assert torch.equal(braze.matmul(a, b), by_name(other, a, b))
    assert [entry[1:] for entry in _tuned.entries()] == [
        (PRODUCT, RUNG, False),
        (PRODUCT, other, True),
    ]


# --- measuring ---


def test_tune_replaces_a_slow_choice(device):
    """All for real: the rung is many times slower than the kernel that wins."""
    a, b = torch.randn(256, 1024, device=device), torch.randn(1024, 256, device=device)
    product = Product("float32", 1, 256, 256, 1024)
    _tuned.put(index_of(device), product, RUNG, True)
    good = good_kernel(device)
    (result,) = braze.tune(braze.matmul, a, b, candidates=[good], seconds=0.2)
    assert (result.device.type, result.product, result.choice) == (device, product, good)
    assert result.after < result.before / 1.5
    assert torch.equal(braze.matmul(a, b), by_name(good, a, b))
    assert _tuned.read(_tuned.place_of(index_of(device)).user_file(), place(device)) == {
        product: {"choice": good, "us": [round(result.before, 2), round(result.after, 2)]}
    }


def test_default_candidates(device, monkeypatch):
    seen = timed(monkeypatch, {"auto": 10})
    a, b = factors(device)
    (result,) = braze.tune(braze.matmul, a, b)
    assert result.choice == "auto"
    assert good_kernel(device) in seen
    assert RUNG not in seen
    assert not place(device).user_file().exists()
    if device == "cuda" and not braze._lib.cuda_library.vendor()["cublas"]["missing"]:
        assert "cublas:0" in seen


@pytest.mark.parametrize(
    ("before", "after", "taken"),
    [(100, 97, True), (100, 99, False), (5, 4.85, False), (5, 4.7, True), (5, 6, False)],
)
def test_how_much_faster_a_choice_has_to_be(device, monkeypatch, before, after, taken):
    timed(monkeypatch, {"auto": before, RUNG: after})
    a, b = factors(device)
    present = braze.matmul(a, b)
    (result,) = braze.tune(braze.matmul, a, b, candidates=[RUNG], save=False)
    assert result.choice == (RUNG if taken else "auto")
    assert (result.before, result.after) == (before, after if taken else before)
    assert torch.equal(braze.matmul(a, b), by_name(RUNG, a, b) if taken else present)
    assert not place(device).user_file().exists()


def test_a_lucky_median_does_not_win():
    assert tuning._winner({"auto": [9, 9, 20, 20], "x": [10, 10, 10, 10]}) == "auto"
    assert tuning._winner({"auto": [20, 9, 20, 20], "x": [10, 10, 10, 10]}) == "x"


@pytest.mark.parametrize("fault", ["nan", "a term is missing"])
def test_a_wrong_kernel_is_rejected(device, monkeypatch, fault):
    bound = tuning.bound

    def wrong(product, matrices):
        a, b, bias = matrices
        run = bound(product, matrices)
        if fault == "nan":
            return lambda name: run(name) * (float("nan") if name == RUNG else 1)
        short = bound(product._replace(k=product.k - 1), (a[:, :-1], b[:-1], bias))
        return lambda name: (short if name == RUNG else run)(name)

    seen = timed(monkeypatch, {"auto": 10, RUNG: 1})
    a, b = factors(device)
    assert braze.tune(braze.matmul, a, b, candidates=[RUNG], save=False)[0].choice == RUNG
    _tuned.forget()
    monkeypatch.setattr(tuning, "bound", wrong)
    assert braze.tune(braze.matmul, a, b, candidates=[RUNG], save=False)[0].choice == "auto"
    assert seen == ["auto", RUNG, "auto"]


def test_refused_candidates_are_left_out(device, monkeypatch):
    seen = timed(monkeypatch, {"auto": 10, RUNG: 1})
    a, b = factors(device)
    braze.tune(braze.matmul, a, b, candidates=["cublas:99", RUNG], save=False)
    assert seen == ["auto", RUNG]


def test_tune_leaves_the_random_numbers_and_settings_alone(device):
    a, b = factors(device)
    torch.manual_seed(3)
    expected = torch.rand(2, device=device)
    torch.manual_seed(3)
    with torch.autocast(device, torch.bfloat16):
        (result,) = braze.tune(braze.matmul, a, b, seconds=0.01, save=False)
    assert result.product.dtype == "bfloat16"
    assert torch.equal(torch.rand(2, device=device), expected)


def test_tune_in_a_capture(device, monkeypatch):
    a, b = factors(device)
    message = "is being captured in a CUDA graph; call it before"
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=message):
            braze.tune(braze.matmul, a, b)
        return
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        a.add_(1)
        with pytest.raises(RuntimeError, match=message):
            braze.tune(braze.matmul, a, b)


def test_bad_arguments(device):
    a, b = factors(device)
    with pytest.raises(TypeError, match="expected fn to be callable, but got Tensor"):
        braze.tune(a, b)
    with pytest.raises(ValueError, match="expected seconds to be positive, but got 0"):
        braze.tune(braze.matmul, a, b, seconds=0)
    with pytest.raises(TypeError, match="a list of names, but got a str"):
        braze.tune(braze.matmul, a, b, candidates=RUNG)
    with pytest.raises(ValueError, match=r"expected matmul to be one of .* but got 'fastest'"):
        braze.tune(braze.matmul, a, b, candidates=["fastest"])
    with pytest.raises(ValueError, match=r"expected candidates to be single kernels.*'auto'"):
        braze.tune(braze.matmul, a, b, candidates=["auto"])
    with pytest.raises(RuntimeError, match="another call has not finished"):
        braze.tune(lambda: braze.tune(braze.matmul, a, b))
    assert braze.tune(lambda: None) == []
