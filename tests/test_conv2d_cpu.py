"""The CPU's kernels of convolutions by name: products of pixels, Winograd's algorithm, im2col."""

import math

import pytest
import torch
from conv2d_common import FORMATS, PASSES, check, reference, run
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import fuzzed

# n, c, h, w, k, (r, s), stride, padding, dilation, groups
POINTWISE = [
    (1, 1, 1, 1, 1, (1, 1), (1, 1), (0, 0), 1, 1),
    (3, 64, 14, 14, 48, (1, 1), (1, 1), (0, 0), 1, 1),
    (2, 17, 9, 5, 13, (1, 1), (1, 1), (0, 0), 1, 1),  # an odd number of channels: half a pair
    (2, 40, 7, 7, 33, (1, 1), (2, 2), (0, 0), 1, 1),
    (2, 16, 11, 6, 8, (1, 1), (3, 1), (0, 0), 1, 1),  # inputs that no filter reaches
    (2, 24, 6, 5, 36, (1, 1), (1, 1), (0, 0), 1, 3),
    (1, 2048, 3, 3, 40, (1, 1), (1, 1), (0, 0), 1, 1),  # pixels a page apart
    (4, 300, 17, 19, 150, (1, 1), (1, 1), (0, 0), 1, 1),  # several blocks of everything
]
WINOGRAD = [
    (1, 1, 3, 3, 1, (3, 3), (1, 1), (0, 0), 1, 1),
    (3, 16, 8, 8, 32, (3, 3), (1, 1), (1, 1), 1, 1),
    (2, 17, 9, 5, 13, (3, 3), (1, 1), (1, 1), 1, 1),  # half tiles at the edges
    (2, 33, 4, 301, 20, (3, 3), (1, 1), (1, 0), 1, 1),  # rows of several segments
    (2, 12, 5, 6, 18, (3, 3), (1, 1), (1, 1), 1, 3),
    (2, 8, 4, 3, 8, (3, 3), (1, 1), (3, 5), 1, 1),  # padding over the filter
    (9, 100, 7, 7, 70, (3, 3), (1, 1), (1, 1), 1, 1),
    # Whole vectors, read where they lie: half tiles at the edges, several segments and groups.
    (2, 32, 9, 5, 48, (3, 3), (1, 1), (1, 1), 1, 1),
    (1, 16, 4, 301, 16, (3, 3), (1, 1), (2, 0), 1, 1),
    (2, 48, 6, 7, 96, (3, 3), (1, 1), (0, 1), 1, 3),
]
IM2COL = [
    (2, 3, 11, 9, 10, (3, 2), (2, 1), (1, 2), 2, 1),
    (3, 8, 7, 7, 12, (3, 3), (1, 1), (1, 1), 1, 2),
    (2, 5, 8, 8, 6, (2, 2), (3, 3), (0, 0), 1, 1),
]
BLOCKED = [
    *IM2COL,
    (2, 3, 30, 31, 64, (7, 7), (2, 2), (3, 3), 1, 1),  # rows of taps as one run, pairs across taps
    (3, 33, 15, 13, 40, (3, 3), (2, 2), (1, 1), 1, 1),
    (2, 48, 9, 9, 72, (3, 3), (2, 2), (1, 1), 1, 3),  # less than a vector of channels
    (5, 64, 6, 7, 96, (3, 3), (2, 1), (1, 1), 1, 1),  # several images of a task
    (1, 20, 37, 70, 24, (3, 3), (1, 1), (1, 1), 1, 1),  # several tasks of an image
    (2, 6, 12, 12, 9, (2, 2), (3, 3), (1, 0), 1, 1),  # inputs that no filter reaches
    (2, 300, 5, 5, 290, (3, 3), (1, 1), (2, 2), 2, 1),  # several blocks of filters and channels
    (2, 8, 3, 3, 8, (3, 3), (1, 1), (4, 5), 1, 1),  # windows of nothing but padding
    (2, 16, 3, 40, 32, (3, 3), (1, 1), (9, 2), 2, 1),  # rows of nothing but padding
    (2, 32, 33, 33, 40, (3, 3), (1, 1), (12, 12), 12, 1),  # taps far apart, some in the padding
    (1, 256, 20, 31, 48, (3, 3), (1, 1), (24, 24), 24, 1),  # of whole rows and tiles
    (2, 24, 29, 31, 40, (3, 3), (2, 1), (9, 10), 5, 1),
    (1, 18, 24, 26, 33, (2, 3), (3, 2), (0, 11), 11, 1),
]
DEPTHWISE = [
    (2, 24, 9, 11, 24, (3, 3), (1, 1), (1, 1), 1, 24),  # a vector and a part of one
    (1, 130, 8, 7, 130, (5, 5), (2, 2), (2, 2), 1, 130),  # several blocks of channels
    (3, 5, 12, 40, 5, (7, 7), (1, 1), (3, 3), 1, 5),
    (2, 64, 70, 70, 64, (3, 3), (1, 1), (1, 1), 1, 64),  # several blocks of rows
    (2, 17, 9, 8, 17, (2, 3), (3, 2), (0, 4), 2, 17),  # inputs that no filter reaches
    (2, 16, 5, 6, 16, (1, 1), (1, 1), (0, 0), 1, 16),
    (2, 40, 30, 33, 40, (3, 3), (1, 1), (9, 9), 9, 40),  # taps far apart
]
NARROW = [
    (1, 1, 5, 6, 1, (1, 2), (1, 1), (0, 0), 1, 1),
    (3, 3, 20, 70, 32, (3, 3), (1, 1), (1, 1), 1, 1),
    (2, 1, 9, 11, 16, (5, 5), (1, 1), (2, 2), 1, 1),
    (2, 3, 31, 30, 64, (7, 7), (2, 2), (3, 3), 1, 1),
    (1, 4, 12, 300, 24, (4, 4), (4, 1), (0, 1), 1, 1),  # half a vector of filters, pieces of rows
    (2, 16, 9, 8, 6, (2, 3), (3, 2), (0, 4), 2, 1),
    (1, 3, 130, 120, 48, (3, 3), (1, 1), (1, 1), 1, 1),  # several blocks of rows
]
AMX = [
    *POINTWISE,
    *BLOCKED,
    *NARROW,
    (3, 32, 7, 7, 48, (3, 3), (1, 1), (1, 1), 1, 1),  # rows that share their zeros
    (40, 16, 2, 3, 40, (3, 3), (1, 1), (1, 1), 1, 1),  # images one behind the other
    (2, 512, 6, 5, 64, (3, 3), (2, 2), (1, 1), 1, 1),  # pixels half a page apart
    (2, 64, 60, 61, 32, (3, 3), (2, 1), (2, 0), 1, 1),  # several tasks of an image
    (2, 8, 11, 12, 70, (3, 2), (1, 3), (2, 1), 2, 2),
    (2, 4, 1, 9, 6, (1, 3), (1, 1), (2, 7), 3, 1),  # padding over filter and image
    # channels in several passes, the last one a part of a step
    (5, 101, 9, 8, 70, (3, 3), (1, 1), (1, 1), 1, 1),
    (2, 200, 7, 9, 132, (3, 3), (2, 1), (1, 1), 1, 2),
    (2, 40, 9, 10, 33, (5, 5), (1, 1), (2, 2), 1, 1),
    (3, 832, 13, 14, 40, (1, 1), (1, 1), (0, 0), 1, 1),  # read in place
]
# Groups of few channels and filters, as channels of several of which lie in a line of memory.
GROUPED = [
    (3, 12, 9, 11, 12, (3, 3), (1, 1), (1, 1), 1, 6),
    (2, 15, 7, 30, 10, (3, 3), (1, 1), (1, 1), 1, 5),
    (1, 64, 24, 25, 64, (3, 3), (1, 1), (1, 1), 1, 16),  # rows of groups of a single image
    (5, 24, 8, 19, 48, (3, 2), (2, 1), (1, 0), 1, 24),
    (1, 40, 3, 9, 80, (3, 3), (1, 2), (2, 1), 1, 5),
    (4, 320, 6, 8, 160, (3, 3), (1, 1), (1, 1), 1, 40),
    (2, 96, 10, 9, 512, (3, 3), (1, 1), (1, 1), 1, 4),  # more sums than the cache keeps
]
BY_NAME = {
    "amx": AMX,
    "implicit_gemm": GROUPED,
    "depthwise": DEPTHWISE,
    "narrow_input": NARROW,
    "pointwise": POINTWISE,
    "winograd": WINOGRAD,
    "im2col": IM2COL,
    "blocked_im2col": BLOCKED,
    "torch": [*GROUPED, *BLOCKED[:4], *NARROW[:4]],
}
CASES = [(name, case) for name, cases in BY_NAME.items() for case in cases]


def drawn(case, dtype, form="nchw"):
    n, c, h, w, k, size, *_, groups = case
    shapes = (n, c, h, w), (k, c // groups, *size)
    x, weight = (torch.randn(s).to(dtype, memory_format=FORMATS[form]) for s in shapes)
    dy = torch.randn_like(reference("fprop", case, x, weight, None, None))
    return x, weight, torch.randn(k).to(dtype), dy.to(memory_format=FORMATS[form])


# Against AVX2's products transformations and copies pay for fewer filters.
IS_AVX2 = braze.info()["loaded"]["cpu_isa"] == "avx2"
HAS_AMX = any(kernel["name"] == "amx" for kernel in braze.kernels("conv2d"))


def takes(name, dtype):
    if name == "amx":
        return HAS_AMX and dtype == torch.bfloat16
    return name != "winograd" or dtype != torch.float64


def dtype_of(name):
    """One that it takes."""
    return torch.bfloat16 if name == "amx" else torch.float32


def passes_of(name):
    return ["wgrad"] if name == "narrow_input" else PASSES


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_by_name(dtype, name, case, form):
    if not takes(name, dtype):
        pytest.skip("not for this dtype, or not on this processor")
    tensors = drawn(case, dtype, form)
    for which in passes_of(name):
        actual = check(which, case, tensors, name)
        assert actual.is_contiguous(memory_format=FORMATS[form])
        assert torch.equal(actual, run(which, case, *tensors, name))


def check_fuzzed(data, device):
    name = data.draw(st.sampled_from([n for n in sorted(BY_NAME) if takes(n, dtype_of(n))]))
    number = st.integers
    n, groups = data.draw(number(1, 4)), data.draw(st.sampled_from([1, 1, 2, 5]))
    c, k = groups * data.draw(number(1, 40)), groups * data.draw(number(1, 40))
    if name == "narrow_input":
        groups, c = 1, data.draw(number(1, 16))
    h, w = data.draw(number(7, 20)), data.draw(number(7, 40))
    size, stride, padding, dilation = (1, 1), (1, 1), (0, 0), 1
    if name != "winograd":
        stride = data.draw(number(1, 3)), data.draw(number(1, 3))
    if name == "depthwise":
        groups = k = c
    if name not in ("pointwise", "winograd"):
        size, dilation = (data.draw(number(1, 3)), data.draw(number(1, 4))), data.draw(number(1, 2))
    if name == "winograd":
        size = 3, 3
    if name != "pointwise":
        padding = data.draw(number(0, 4)), data.draw(number(0, 4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    dtype = dtype if takes(name, dtype) else dtype_of(name)
    case = n, c, h, w, k, size, stride, padding, dilation, groups
    tensors = drawn(case, dtype, data.draw(st.sampled_from(sorted(FORMATS))))
    for which in passes_of(name):
        check(which, case, tensors, name)


test_fuzzed_on_cpu, _ = fuzzed(check_fuzzed)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_strides_of_views(name):
    """Every second image, and a few of the channels, of a larger tensor."""
    if not takes(name, dtype_of(name)):
        pytest.skip("not on this processor")
    n, c, h, w, k, *rest = BY_NAME[name][1]
    x, weight, b, dy = drawn((n, c, h, w, k, *rest), dtype_of(name))
    for form in FORMATS.values():
        wide = torch.randn(2 * n, c + 3, h, w).to(x.dtype, memory_format=form)
        wide[::2, 2:-1] = x
        for which in passes_of(name):
            check(which, (n, c, h, w, k, *rest), (wide[::2, 2:-1], weight, b, dy), name)


@pytest.mark.parametrize("name", [*sorted(BY_NAME), "implicit_gemm"])
@pytest.mark.parametrize("forms", [("nchw", "nhwc"), ("nhwc", "nchw")], ids="-".join)
def test_formats_may_differ(name, forms):
    """The gradients of a convolution whose result has another format than its input."""
    if not takes(name, dtype_of(name)):
        pytest.skip("not on this processor")
    case = BY_NAME.get(name, IM2COL)[1]
    x, weight, b, dy = drawn(case, dtype_of(name), forms[0])
    dy = dy.contiguous(memory_format=FORMATS[forms[1]])
    for which in passes_of(name)[-2:]:
        actual = check(which, case, (x, weight, b, dy), name)
        assert actual.is_contiguous(memory_format=FORMATS[forms[0]])


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("name", "channels", "dtype"),
    [
        ("winograd", 20, torch.float32),
        ("blocked_im2col", 20, torch.float32),
        ("blocked_im2col", 21, torch.bfloat16),  # an odd number of values: half a pair
        ("narrow_input", 3, torch.float32),
        ("amx", 20, torch.bfloat16),  # a part of a step
        ("amx", 32, torch.bfloat16),
    ],
)
def test_specials_stay_where_they_belong(form, where, special, name, channels, dtype):
    """A transformed tile would spread them over all of its results, half a pair to a neighbour."""
    if not takes(name, dtype):
        pytest.skip("not on this processor")
    case = (3, channels, 9, 10, 24, (3, 3), (1, 1), (1, 1), 1, 1)
    x, w, b, dy = drawn(case, dtype, form)
    {"x": x, "w": w, "dy": dy}[where][1, 0, 1, 2] = special
    for which in passes_of(name):
        actual = run(which, case, x, w, b, dy, name)
        read = {"fprop": "xw", "dgrad": "dyw", "wgrad": "xdy"}[which]
        assert actual.isfinite().all() == (where not in read)
        assert actual.isfinite().any()
        # (Of a weight stock keeps it away from padding, and an infinity times padding is NaN here.)
        plain = run(which, case, x, w, b, dy, "implicit_gemm")
        assert torch.equal(actual.isnan(), plain.isnan())
        assert torch.equal(actual.isinf(), plain.isinf())
        # (Stock's in bfloat16 multiply what is beside it by zero.)
        if where != "w" and dtype == torch.float32:
            check(which, case, (x, w, b, dy), name)


def test_winograd_overflows_where_the_sum_does():
    """Sums of transformed values overflow earlier."""
    case = (2, 16, 8, 8, 16, (3, 3), (1, 1), (1, 1), 1, 1)
    x, w, *_ = drawn(case, torch.float32)
    x[1] = 2e38  # a transformed input is four times as large
    w = torch.zeros_like(w)
    w[:, 3, 1, 1] = 0.5
    out = run("fprop", case, x, w, None, None, "winograd")
    assert torch.equal(out[1], torch.full_like(out[1], 1e38))
    x[1] = 3e38
    w[:, 4, 1, 1] = 1
    assert run("fprop", case, x, w, None, None, "winograd")[1].isinf().all()


@pytest.mark.parametrize(
    ("name", "why", "case", "dtype"),
    [
        ("pointwise", "1 x 1 filters", WINOGRAD[1], torch.float32),
        ("winograd", "3 x 3 filters", POINTWISE[1], torch.float32),
        ("winograd", "float32, bfloat16 and float16", WINOGRAD[1], torch.float64),
        ("depthwise", "one filter a channel", WINOGRAD[1], torch.float32),
        ("narrow_input", "up to 16 channels", WINOGRAD[2], torch.float32),
        ("narrow_input", "one group", WINOGRAD[4], torch.float32),
        ("amx", "bfloat16", WINOGRAD[1], torch.float32),
    ],
)
def test_refusals(name, why, case, dtype):
    if name == "amx" and not HAS_AMX:
        pytest.skip("not on this processor")
    tensors = drawn(case, dtype)
    for which in passes_of(name):
        with pytest.raises(RuntimeError, match=f"{name} cannot take these arguments: .*{why}"):
            run(which, case, *tensors, name)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (
            (1, 256, 17, 19, 64, (1, 1), (1, 1), (0, 0), 1, 1),  # whose rows collide
            {"fprop": "pointwise", "dgrad": "pointwise", "wgrad": "blocked_im2col"},
        ),
        (POINTWISE[-1], {"fprop": "pointwise", "dgrad": "pointwise", "wgrad": "implicit_gemm"}),
        (
            (1, 64, 6, 6, 128, (3, 3), (1, 1), (1, 1), 1, 1),
            dict.fromkeys(PASSES, "blocked_im2col") | {"wgrad": "implicit_gemm"},
        ),
        ((4, 64, 6, 6, 128, (3, 3), (1, 1), (1, 1), 1, 1), dict.fromkeys(PASSES, "winograd")),
        (
            (2, 16, 9, 30, 32, (3, 3), (1, 1), (1, 1), 1, 1),
            dict.fromkeys(PASSES, "winograd") | {"wgrad": "implicit_gemm"},
        ),
        (
            WINOGRAD[1],
            dict.fromkeys(PASSES, "winograd") | {"wgrad": "implicit_gemm"},
        ),
        (
            (2, 8, 8, 8, 16, (3, 3), (1, 1), (1, 1), 1, 1),
            dict.fromkeys(PASSES, "implicit_gemm")
            | ({"fprop": "blocked_im2col"} if IS_AVX2 else {}),
        ),
        (
            (2, 32, 8, 8, 32, (3, 3), (2, 2), (1, 1), 1, 1),
            dict.fromkeys(PASSES, "blocked_im2col") | {"wgrad": "implicit_gemm"},
        ),
        (
            (2, 3, 70, 70, 64, (7, 7), (2, 2), (3, 3), 1, 1),  # a first layer
            {"fprop": "blocked_im2col", "dgrad": "implicit_gemm", "wgrad": "narrow_input"},
        ),
        (
            (2, 32, 20, 40, 32, (5, 5), (1, 1), (2, 2), 1, 1),
            {"fprop": "blocked_im2col", "dgrad": "blocked_im2col", "wgrad": "implicit_gemm"},
        ),
        (DEPTHWISE[3], {"wgrad": "depthwise"}),  # (The others add in one order.)
    ],
    ids=str,
)
def test_what_auto_takes(case, names):
    """Which shows in the bits: the kernels add in different orders."""
    tensors = drawn(case, torch.float32, "nhwc")
    kernels = [k["name"] for k in braze.kernels("conv2d") if k["arch"] == "cpu" and k["shipped"]]
    for which, name in names.items():
        results = {}
        for kernel in kernels:
            try:
                results[kernel] = run(which, case, *tensors, kernel)
            except RuntimeError:
                continue
        auto = run(which, case, *tensors, "auto")
        # (Of 1 x 1 filters some kernels add in one order.)
        same = [k for k, result in results.items() if torch.equal(result, auto)]
        assert name in same, which
        assert len(same) < len(results), which


@pytest.mark.skipif(not HAS_AMX, reason="not on this processor")
def test_amx_judges_what_it_has_computed():
    """Few filters leave columns of the sums as they were in memory: here NaN, of the call before.
    They are no reason to make the result again by another kernel."""
    few, many = ((1, 48, 130, 120, k, (3, 3), (1, 1), (1, 1), 1, 1) for k in (3, 32))
    tensors, others = (drawn(case, torch.bfloat16, "nhwc") for case in (few, many))
    others[0].fill_(math.nan)
    expected = run("fprop", few, *tensors, "amx")
    for _ in range(5):
        assert run("fprop", many, *others, "amx").isnan().all()
        assert torch.equal(run("fprop", few, *tensors, "amx"), expected)


@pytest.mark.skipif(not HAS_AMX, reason="not on this processor")
@pytest.mark.parametrize("case", [BLOCKED[6], POINTWISE[1], NARROW[1]], ids=str)
def test_auto_takes_amx(case):
    tensors = drawn(case, torch.bfloat16, "nhwc")
    for which in PASSES:
        actual, by_name = (run(which, case, *tensors, name) for name in ("auto", "amx"))
        assert torch.equal(actual, by_name)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_no_images(name):
    if not takes(name, dtype_of(name)):
        pytest.skip("not on this processor")
    case = (0, *BY_NAME[name][1][1:])
    x, w, b, dy = drawn(case, dtype_of(name))
    for which, like in (("fprop", dy), ("dgrad", x)):
        if which in passes_of(name):
            assert run(which, case, x, w, b, dy, name).shape == like.shape
    assert torch.equal(run("wgrad", case, x, w, b, dy, name), torch.zeros_like(w))


def test_narrow_input_has_one_pass():
    tensors = drawn(NARROW[1], torch.float32)
    for which in PASSES[:2]:
        with pytest.raises(RuntimeError, match="narrow_input has weight gradients only"):
            run(which, NARROW[1], *tensors, "narrow_input")


@pytest.mark.parametrize("name", ["winograd", "im2col"])
def test_a_training_step_by_name(name):
    """The forward's choice holds for the backward."""
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    w = torch.randn(16, 16, 3, 3, requires_grad=True)
    with braze.backend(conv2d=name):
        out = F.conv2d(x, w, padding=1)
    g = torch.randn_like(out)
    case = (2, 16, 8, 8, 16, (3, 3), (1, 1), (1, 1), 1, 1)
    grads = torch.autograd.grad(out, (x, w), g)
    for which, grad in zip(PASSES[1:], grads, strict=True):
        assert torch.equal(grad, run(which, case, x.detach(), w.detach(), None, g, name))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        cases = [("winograd", WINOGRAD[-1]), ("pointwise", POINTWISE[-1])]
        cases += [("implicit_gemm", case) for case in GROUPED]
        for name, case in cases:
            tensors = drawn(case, torch.float32, "nhwc")
            for which in PASSES:
                check(which, case, tensors, name)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("which", "case", "dtype"),
    [
        ("fprop", (32, 96, 28, 28, 96, (3, 3), (2, 2), (1, 1), 1, 4), torch.float32),
        ("fprop", (16, 96, 28, 28, 96, (3, 3), (1, 1), (1, 1), 1, 4), torch.float32),
        ("dgrad", (16, 96, 28, 28, 96, (3, 3), (1, 1), (1, 1), 1, 4), torch.float32),
        ("wgrad", (16, 320, 28, 28, 64, (1, 1), (1, 1), (0, 0), 1, 1), torch.float32),
        ("wgrad", (3, 3, 224, 224, 32, (3, 3), (1, 1), (1, 1), 1, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_auto_takes_torch_where_that_is_ahead(which, case, dtype):
    if braze.info()["loaded"]["cpu_isa"] != "avx512" or not takes("amx", dtype_of("amx")):
        pytest.skip("measured with AVX-512 and AMX")
    tensors = drawn(case, dtype, "nhwc")
    auto, by_torch, own = (run(which, case, *tensors, name) for name in ("auto", "torch", "braze"))
    assert torch.equal(auto, by_torch)
    assert auto.stride() == own.stride()
    if dtype == torch.float32:  # bfloat16's results are rounded to the same values
        assert not torch.equal(own, by_torch)
    few = (1, *case[1:])  # for which the call takes longer
    tensors = drawn(few, dtype, "nhwc")
    if which != "wgrad":
        assert torch.equal(run(which, few, *tensors, "auto"), run(which, few, *tensors, "braze"))


def test_torch_with_what_follows():
    """Bias, ReLU, an addition to a gradient, and a transposed convolution."""
    case = (2, 24, 9, 11, 16, (3, 3), (2, 1), (1, 1), 1, 4)
    x, w, b, dy = drawn(case, torch.float32, "nhwc")
    geometry = [2, 1], [1, 1], [1, 1], 4
    settings = False, False
    ops = torch.ops.braze
    added = torch.randn_like(x)
    for name, args in (
        ("conv2d", (x, w, b, *geometry, *settings)),
        ("conv2d_relu", (x, w, b, *geometry, *settings)),
        ("conv2d_backward", (dy, x, w, *geometry, [True] * 3, *settings)),
    ):
        more = (added,) if name == "conv2d_backward" else ()
        actual, expected = (getattr(ops, name)(*args, by, *more) for by in ("torch", "braze"))
        torch.testing.assert_close(actual, expected)
    with braze.backend(conv2d="torch"):
        actual = braze.nn.functional.conv_transpose2d(dy, w, torch.ones(24), (2, 1), 1, groups=4)
    expected = torch.nn.functional.conv_transpose2d(dy, w, torch.ones(24), (2, 1), 1, groups=4)
    torch.testing.assert_close(actual, expected)
