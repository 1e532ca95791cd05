"""Convolution by FFT, by name on both devices, and where "auto" takes it."""

import json
import math

import conv2d_common
import pytest
import torch
import torch.nn.functional as stock
from conv2d_common import FORMATS, PASSES, geometry, reference

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, compile, cuda_kernels_of, gpu_memory_left
from conftest import cuda_only

# n, c, h, w, k, (r, s), stride, padding, dilation, groups
SMALL = [
    (1, 1, 1, 1, 1, (1, 1), (1, 1), (0, 0), 1, 1),
    (2, 3, 31, 29, 11, (7, 7), (1, 1), (3, 3), 1, 1),
    (2, 5, 17, 13, 7, (11, 4), (1, 1), (0, 2), 1, 1),
    (2, 4, 5, 5, 6, (2, 2), (1, 1), (3, 3), 1, 1),  # padding over the filter
    (2, 6, 4, 3, 5, (4, 3), (1, 1), (0, 0), 1, 1),  # a filter as large as the image
    (1, 2, 9, 8, 3, (9, 8), (1, 1), (8, 7), 1, 1),  # "full"
    (1, 2, 14, 14, 3, (31, 31), (1, 1), (15, 15), 1, 1),  # a filter larger than the image
    (2, 3, 16, 18, 4, (5, 5), (2, 3), (2, 2), 1, 1),
    (2, 3, 8, 8, 4, (3, 3), (2, 2), (0, 0), 1, 1),  # inputs that no filter reaches
    (1, 3, 20, 21, 4, (5, 3), (1, 2), (4, 1), (3, 2), 1),
    (2, 12, 9, 11, 18, (5, 5), (1, 1), (2, 2), 1, 3),
    (2, 6, 10, 10, 12, (5, 5), (1, 1), (2, 2), 1, 6),  # several filters a channel
    (3, 16, 14, 14, 16, (13, 13), (1, 1), (6, 6), 1, 16),
    (3, 20, 12, 9, 24, (7, 7), (1, 1), (3, 3), 1, 1),  # products of matrices
]
TILED = [
    (1, 3, 150, 301, 5, (7, 5), (1, 1), (3, 2), 1, 1),
    (2, 8, 97, 101, 8, (9, 9), (1, 1), (0, 0), 1, 8),
    (1, 4, 300, 120, 6, (3, 3), (2, 3), (1, 1), 1, 2),
    (1, 2, 200, 190, 2, (5, 5), (1, 1), (8, 8), 4, 1),
]
# Which take several blocks: of groups; in float64 of filters; of filters, or of channels for dgrad.
MANY = [
    (1, 2600, 16, 16, 2600, (17, 17), (1, 1), (8, 8), 1, 2600),
    (1, 128, 6, 6, 96, (11, 11), (1, 1), (5, 5), 1, 1),
    (1, 250, 6, 6, 264, (11, 11), (1, 1), (5, 5), 1, 1),
]


def drawn(case, device, dtype, form="nchw"):
    n, c, h, w, k, size, *_, groups = case
    shapes = (n, c, h, w), (k, c // groups, *size)
    x, weight = (
        torch.randn(s, device=device).to(dtype, memory_format=FORMATS[form]) for s in shapes
    )
    out = stock.conv2d(x[:1, :, :, :].float(), weight.float(), None, *geometry(case), groups)
    dy = torch.randn((n, *out.shape[1:]), device=device).to(dtype, memory_format=FORMATS[form])
    return x, weight, torch.randn(k, device=device).to(dtype), dy


def run(which, case, x, w, b, dy, name="fft"):
    return conv2d_common.run(which, case, x, w, b, dy, name)


def check(which, case, tensors, name="fft"):
    return conv2d_common.check(which, case, tensors, name)


def transforms(function):
    """The shapes that are transformed when function() runs, with how often."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        function()
    events = profile.key_averages(group_by_input_shape=True)
    return [(tuple(e.input_shapes[0]), e.count) for e in events if e.key == "aten::fft_rfft2"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", SMALL + TILED, ids=str)
def test_matches_stock(device, dtype, case, form):
    tensors = drawn(case, device, dtype, form)
    for which in PASSES:
        actual = check(which, case, tensors)
        assert actual.is_contiguous(memory_format=FORMATS[form])
        assert torch.equal(actual, run(which, case, *tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_blocks_of_groups_and_of_filters(device, dtype, case):
    tensors = drawn(case, device, dtype)
    for which in PASSES:
        check(which, case, tensors)


@cuda_only
def test_blocks_beyond_the_bound_of_a_gpu():
    case = (1, 640, 6, 6, 512, (11, 11), (1, 1), (5, 5), 1, 1)
    tensors = drawn(case, "cuda", torch.float64)
    for which in PASSES:
        check(which, case, tensors)


def test_many_images_in_chunks(device):
    case = (700, 3, 40, 40, 2, (9, 9), (1, 1), (4, 4), 1, 1)
    tensors = drawn(case, device, torch.float32)
    for which in PASSES:
        check(which, case, tensors)
    if device == "cpu":  # (where the bound is smaller)
        seen = transforms(lambda: run("fprop", case, *tensors))
        assert sum(count for _, count in seen) > 2, seen


def test_tiles_and_one_transform(device):
    """Large images are cut into tiles, small ones are transformed whole."""
    for case, is_tiled in ((TILED[0], True), (SMALL[1], False)):
        tensors = drawn(case, device, torch.float32)
        for which in PASSES:
            seen = [shape for shape, _ in transforms(lambda: run(which, case, *tensors))]  # noqa: B023
            (images, *_) = [shape for shape in seen if shape[1] != case[4]]  # not the filters
            assert (images[1] > case[0]) == is_tiled, seen
            assert all(_is_smooth(length) for length in images[-2:])


def _is_smooth(length):
    for prime in (2, 3, 5, 7):
        while length % prime == 0:
            length //= prime
    return length == 1


def test_one_channel_formats_and_views(device):
    case = (2, 6, 21, 20, 4, (5, 7), (1, 1), (2, 3), 1, 1)
    x, w, b, dy = drawn(case, device, torch.float32)
    for form in FORMATS.values():
        wide = torch.randn(4, 9, 21, 20, device=device).to(memory_format=form)
        wide[::2, 2:-1] = x
        for which in PASSES:
            check(which, case, (wide[::2, 2:-1], w, b, dy))
    expanded = x[:1].expand_as(x)
    for which in PASSES:
        check(which, case, (expanded, w, b, dy))


def test_no_images(device):
    case = (0, *SMALL[1][1:])
    x, w, b, _ = drawn((1, *SMALL[1][1:]), device, torch.float32)
    out = run("fprop", case, x[:0], w, b, None)
    assert out.shape == (0, 11, 31, 29)
    assert torch.equal(run("wgrad", case, x[:0], w, b, out), torch.zeros_like(w))


@pytest.mark.parametrize(
    ("stride", "dilation", "size", "why"),
    [(5, 1, 3, "strides of up to 4"), (1, 2500, 3, "reach over up to 4096 rows and columns")],
)
def test_obstacles(device, stride, dilation, size, why):
    x, w = torch.randn(1, 1, 5001, 12, device=device), torch.randn(1, 1, size, 1, device=device)
    with (
        braze.backend(conv2d="fft"),
        pytest.raises(RuntimeError, match=f"fft cannot take these arguments: .*{why}"),
    ):
        F.conv2d(x, w, None, (stride, 1), 0, (dilation, 1))


def test_training_under_the_setting(device, dtype):
    """The choice holds for the backward; valid, same and full."""
    inputs = [
        torch.randn(s, device=device).to(dtype).requires_grad_()
        for s in ((2, 3, 20, 17), (4, 3, 7, 5), (4,))
    ]
    for padding in ("valid", "same", (6, 4)):
        with braze.backend(conv2d="fft"):
            check_against_stock(
                lambda x, w, b: F.conv2d(x, w, b, padding=padding),  # noqa: B023
                lambda x, w, b: stock.conv2d(x, w, b, padding=padding),  # noqa: B023
                inputs,
            )


def test_transposed_convolution(device, dtype):
    shapes = ((2, 4, 9, 8), (4, 3, 5, 7), (6,))
    inputs = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    with braze.backend(conv2d="fft"):
        check_against_stock(
            lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2),
            lambda x, w, b: stock.conv_transpose2d(x, w, b, 2, 1, 1, 2),
            inputs,
        )


def test_gradients_of_gradients(device):
    x = torch.randn(1, 2, 7, 6, device=device, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 5, 3, device=device, dtype=torch.float64, requires_grad=True)
    with braze.backend(conv2d="fft"):
        assert torch.autograd.gradcheck(lambda x, w: F.conv2d(x, w, padding=2), (x, w))
        assert torch.autograd.gradgradcheck(lambda x, w: F.conv2d(x, w, padding=2), (x, w))


def test_the_op(device):
    x = torch.randn(2, 3, 20, 21, device=device, requires_grad=True)
    w = torch.randn(4, 3, 7, 7, device=device, requires_grad=True)
    rest = [1, 1], [3, 3], [1, 1], 1, False, False, "fft"
    torch.library.opcheck(torch.ops.braze.conv2d.default, (x, w, None, *rest))


def test_compiled_and_autocast(device):
    x = torch.randn(2, 3, 20, 21, device=device).to(memory_format=torch.channels_last)
    w = torch.randn(4, 3, 7, 7, device=device)
    with braze.backend(conv2d="fft"):
        expected = F.conv2d(x, w, padding=3)
        assert torch.equal(compile(lambda x, w: F.conv2d(x, w, padding=3))(x, w), expected)
        assert expected.is_contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16):
            half = F.conv2d(x, w, padding=3)
        assert torch.equal(half, F.conv2d(x.bfloat16(), w.bfloat16(), padding=3))


def check_specials(which, case, tensors, name="fft"):
    """Against a kernel that adds term by term: the same infinities and NaN, the rest by the rule.
    Returns the result."""
    plain_name = "implicit_gemm" if tensors[0].device.type == "cpu" else "direct"
    actual, plain = run(which, case, *tensors, name), run(which, case, *tensors, plain_name)
    assert torch.equal(actual.isnan(), plain.isnan()), which
    infinite, finite = plain.isinf(), plain.isfinite()
    assert torch.equal(actual.isinf(), infinite), which
    assert torch.equal(actual[infinite], plain[infinite]), which
    exact = reference(which, case, *(t.double() for t in tensors))
    parts = [torch.where(finite, t, 0) for t in (actual, plain, exact)]
    terms = max(t.numel() for t in tensors)
    assert_by_rule(*parts, 8, f"{name} {which}", terms)
    return actual


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
@pytest.mark.parametrize("case", [SMALL[1], *((2, *case[1:]) for case in TILED)], ids=str)
def test_specials(device, case, where, special, form):
    """They would spread over their tile; it is made again directly."""
    x, w, b, dy = drawn(case, device, torch.float32, form)
    place = (1, 2) if where == "w" else (12, 13)
    {"x": x, "w": w, "dy": dy}[where][(1, 0, *place)] = special
    for which in PASSES:
        actual = check_specials(which, case, (x, w, b, dy))
        read = {"fprop": "xw", "dgrad": "dyw", "wgrad": "xdy"}[which]
        assert actual.isfinite().all() == (where not in read)
        if which != "wgrad" and where != "w":  # the other image
            assert actual[0].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", [SMALL[1], SMALL[7], SMALL[9], SMALL[11], *TILED[1:]], ids=str)
def test_specials_of_every_dtype(device, dtype, case, form):
    """Strides, dilations, groups; several at once, of both signs."""
    tensors = drawn(case, device, dtype, form)
    for which in PASSES:
        some = [t.clone(memory_format=torch.preserve_format) for t in tensors]
        for t in (some[0], some[3]):
            for value, where in ((math.inf, 0), (-math.inf, 0.4), (math.nan, 0.9)):
                t[(-1, -1, int(where * t.shape[2]), int(where * t.shape[3]))] = value
        check_specials(which, case, some)


def test_specials_of_views(device):
    """Elements that no convolution wrote down in one piece."""
    case = (2, 6, 21, 20, 4, (5, 7), (1, 1), (2, 3), 1, 1)
    x, w, b, dy = drawn(case, device, torch.float32)
    x[1, 3, 10, 11] = math.inf
    for form in FORMATS.values():
        wide = torch.randn(4, 9, 21, 20, device=device).to(memory_format=form)
        wide[::2, 2:-1] = x
        for which in PASSES:
            check_specials(which, case, (wide[::2, 2:-1], w, b, dy))
    for which in PASSES:
        check_specials(which, case, (x[1:].expand_as(x), w, b, dy))


def test_overflow_of_a_transform(device):
    """A transform sums all of a tile, and overflows where no result does."""
    x, w = torch.full((1, 1, 30, 30), 1e37, device=device), torch.zeros(1, 1, 5, 5, device=device)
    w[0, 0, 2, 2] = 1
    with braze.backend(conv2d="fft"):
        out = F.conv2d(x, w, padding=2)
    assert torch.equal(out, x)


def difficult(x, w):
    yield x + 100, w - w.mean((1, 2, 3), keepdim=True)
    yield x.abs(), w.abs()
    yield torch.where(torch.rand_like(x) < 0.001, 1e4, x), w
    yield torch.where(torch.arange(x.shape[-1], device=x.device) < 40, x, x * 1e-4), w
    yield torch.where(torch.rand_like(x) < 0.01, x, 0), w


def test_accuracy_of_values_of_all_sizes(device):
    """A transform's error is of the size of its largest values, and so is what the rule allows."""
    case = (1, 3, 90, 91, 4, (21, 21), (1, 1), (10, 10), 1, 1)
    x, w, b, dy = drawn(case, device, torch.float32)
    for images, filters in difficult(x, w):
        for which in PASSES:
            check(which, case, (images, filters, b, dy))
    for grads, filters in difficult(dy, w):
        check("dgrad", case, (x, filters, b, grads))


def memory_peak(function, folder):
    """The most bytes that function() had allocated through torch at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    "case",
    [
        (64, 16, 60, 60, 16, (15, 15), (1, 1), (7, 7), 1, 1),
        (1, 4, 500, 480, 4, (31, 31), (1, 1), (15, 15), 1, 1),
        (2, 600, 30, 30, 600, (21, 21), (1, 1), (10, 10), 1, 600),
        (2, 96, 20, 20, 96, (15, 15), (1, 1), (7, 7), 1, 1),
    ],
    ids=str,
)
def test_memory_is_bounded(case, tmp_path):
    """By 64 MiB on the CPU, beside the result."""
    tensors = drawn(case, "cpu", torch.float32)
    for which in PASSES:
        result = run(which, case, *tensors)
        peak = memory_peak(lambda: run(which, case, *tensors), tmp_path)  # noqa: B023
        assert peak <= (64 << 20) + 4 * result.numel(), which


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for case in (SMALL[-1], TILED[0]):
            tensors = drawn(case, "cpu", torch.float32)
            for which in PASSES:
                check(which, case, tensors)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        ((1, 16, 64, 64, 16, (31, 31), (1, 1), (15, 15), 1, 1), True),
        ((4, 32, 28, 28, 32, (21, 21), (1, 1), (10, 10), 1, 1), True),
        ((1, 16, 64, 64, 16, (7, 7), (1, 1), (3, 3), 1, 1), False),
        ((1, 16, 64, 64, 16, (31, 31), (2, 2), (15, 15), 1, 1), False),
        ((2, 128, 14, 14, 128, (15, 15), (1, 1), (7, 7), 1, 1), False),
    ],
    ids=str,
)
def test_what_auto_takes(case, takes):
    tensors = drawn(case, "cpu", torch.float32)
    for which in PASSES:
        auto = run(which, case, *tensors, "auto")
        assert torch.equal(auto, run(which, case, *tensors)) == takes, which
        if takes:
            check(which, case, tensors, "auto")
    in_double = [t.double() for t in tensors]
    auto = run("fprop", case, *in_double, "auto")
    assert not torch.equal(auto, run("fprop", case, *in_double))


# Of those that "auto" takes on a GPU.
LARGE = (1, 1, 512, 512, 1, (31, 31), (1, 1), (15, 15), 1, 1)


def takes_fft(function):
    function()  # what is only needed once
    return "fft_results" in cuda_kernels_of(function)


@cuda_only
@pytest.mark.parametrize("name", ["auto", "braze"])
@pytest.mark.parametrize(
    ("case", "takes"),
    [
        (LARGE, True),
        ((1, 1, 500, 530, 1, (40, 33), (1, 1), (0, 0), 1, 1), True),
        ((1, 1, 1024, 1024, 1, (63, 63), (1, 1), (31, 31), 1, 1), True),
        ((1, 1, 512, 512, 1, (15, 15), (1, 1), (7, 7), 1, 1), False),
        ((1, 1, 512, 512, 1, (3, 3), (1, 1), (1, 1), 1, 1), False),
        ((1, 1, 200, 200, 1, (31, 31), (1, 1), (15, 15), 1, 1), False),  # too little work
        ((1, 1, 1024, 1024, 1, (31, 31), (2, 2), (15, 15), 1, 1), False),
        ((1, 1, 1024, 1024, 1, (31, 31), (1, 1), (30, 30), 2, 1), False),
        ((4, 16, 64, 64, 16, (31, 31), (1, 1), (15, 15), 1, 1), False),  # not measured
        ((2, 128, 56, 56, 128, (31, 31), (1, 1), (15, 15), 1, 128), False),
    ],
    ids=str,
)
def test_what_auto_takes_on_a_gpu(case, takes, name):
    for dtype in (torch.bfloat16, torch.float32):
        tensors = drawn(case, "cuda", dtype)
        for which in PASSES:
            assert takes_fft(lambda: run(which, case, *tensors, name)) == takes, which  # noqa: B023
            if takes:
                assert torch.equal(run(which, case, *tensors, name), run(which, case, *tensors))
                check(which, case, tensors, name)
    in_double = drawn(case, "cuda", torch.float64)
    assert not takes_fft(lambda: run("fprop", case, *in_double, name))


@cuda_only
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("case", [LARGE, (3, *LARGE[1:])], ids=str)
def test_specials_under_auto_on_a_gpu(case, special):
    for dtype in (torch.bfloat16, torch.float32):
        tensors = drawn(case, "cuda", dtype)
        for t in (tensors[0], tensors[3]):
            t[-1, 0, 100, 200] = special
        for which in PASSES:
            assert takes_fft(lambda: run(which, case, *tensors, "auto"))  # noqa: B023
            actual = check_specials(which, case, tensors, "auto")
            spoilt = 1 - actual.isfinite().float().mean()
            assert spoilt > 0 if which == "wgrad" else 0 < spoilt < 0.01


@cuda_only
def test_specials_in_a_cuda_graph():
    """A graph that was captured while all was finite does again what no longer is."""
    x, w, b, dy = drawn(LARGE, "cuda", torch.float32)
    clean = x.clone()

    def passes():
        return [run(which, LARGE, x, w, b, dy, "auto") for which in PASSES]

    passes()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = passes()
    for value in (0.5, math.nan, math.inf, 0.5):
        x.copy_(clean)
        x[0, 0, 77, 88] = value
        graph.replay()
        for result, expected in zip(results, passes(), strict=True):
            assert torch.equal(result.isnan(), expected.isnan())
            assert torch.equal(result.nan_to_num(), expected.nan_to_num())
        assert all(result.isfinite().all() for result in results) == (value == 0.5)


@cuda_only
def test_without_memory_for_transforms():
    """What is left is enough for the result alone: "auto" takes a kernel that needs no more."""
    case = (1, 1, 2048, 2048, 1, (31, 31), (1, 1), (15, 15), 1, 1)
    x, w, b, dy = drawn(case, "cuda", torch.float32)
    exact = reference("fprop", case, *(t.double() for t in (x, w, b, dy)))
    stock_result = reference("fprop", case, x, w, b, dy)
    with gpu_memory_left(stock_result.nbytes + (8 << 20)):
        with pytest.raises(RuntimeError):
            run("fprop", case, x, w, b, dy)
        torch.cuda.empty_cache()
        actual = run("fprop", case, x, w, b, dy, "auto")
    assert_by_rule(actual, stock_result, exact, ulps=8, terms=31 * 31)


def test_it_is_listed(device):
    on_cpu = device == "cpu"
    (row,) = [
        k for k in braze.kernels("conv2d") if k["name"] == "fft" and (k["arch"] == "cpu") == on_cpu
    ]
    assert row["shipped"]


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """Transforms without room for the filter's reach, whose results wrap around."""

    def wrong(x, w):
        wide = torch.promote_types(x.dtype, torch.float32)
        spectrum = torch.fft.rfft2(stock.pad(x.to(wide), (2, 0, 2, 0)))
        filters = torch.fft.rfft2(w.to(wide), s=spectrum.shape[-2:-1] + (x.shape[-1] + 2,))
        out = torch.einsum("nchw,kchw->nkhw", spectrum, filters.conj())
        size = x.shape[-2] + 2, x.shape[-1] + 2
        return torch.fft.irfft2(out, s=size)[:, :, : x.shape[-2], : x.shape[-1]].to(x.dtype)

    x = torch.randn(2, 3, 20, 18, device=device).to(dtype)
    w = torch.randn(4, 3, 7, 7, device=device).to(dtype)
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, lambda x, w: stock.conv2d(x, w, padding=3), [x, w])
