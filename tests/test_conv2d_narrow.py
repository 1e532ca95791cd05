"""First layers: the CUDA kernel `narrow_input` by name, pass by pass, where it must not refuse. The
cases run on the CPU too, by its own kernels."""

import contextlib

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st
from test_conv2d_products import (
    FORMATS,
    check,
    check_first_layer_beyond_31_bits,
    drawn,
    gradient,
    own,
    pair,
    reference,
    run,
    set_tf32,
    skip_large,
)

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, cuda_kernels_of, fuzzed

NAME = "narrow_input"
PASSES = ["fprop", "wgrad"]
# n, c, k, h, w, filter, stride, padding, dilation
CASES = [
    (2, 3, 64, 224, 224, 7, 2, 3, 1),  # ResNet
    (2, 3, 32, 224, 224, 3, 2, 1, 1),  # MobileNet, EfficientNet
    (1, 3, 64, 224, 224, 3, 1, 1, 1),  # VGG
    (5, 3, 16, 32, 32, 3, 1, 1, 1),  # CIFAR
    (5, 3, 64, 32, 32, 5, 1, 2, 1),
    (2, 3, 96, 64, 96, 4, 4, 0, 1),  # ConvNeXt
    (3, 4, 32, 84, 84, 8, 4, 0, 1),  # Nature-CNN
    (9, 1, 6, 28, 28, 5, 1, 2, 1),  # LeNet
    (9, 1, 32, 28, 28, 3, 1, 1, 1),
    (9, 6, 16, 14, 14, 5, 1, 0, 1),  # the second layer of LeNet
    (2, 8, 40, 21, 18, 3, 1, 1, 1),
    (2, 5, 24, 19, 23, 3, 2, 1, 1),
    (2, 7, 33, 12, 40, 4, (3, 1), 2, 1),
    (5, 3, 24, 31, 31, 2, 1, 0, 1),  # airbench
    (2, 3, 64, 99, 97, 11, 4, 2, 1),  # AlexNet
    (2, 3, 80, 32, 48, 16, 16, 0, 1),  # ViT
    (1, 1, 1, 1, 1, 1, 1, 0, 1),
    (1, 3, 40, 33, 37, 3, 2, 1, 1),  # rows of odd length: no words
    (2, 3, 65, 13, 300, 3, 1, 1, 1),  # wide; a filter beyond the blocks of 64
    (2, 2, 33, 300, 5, 3, 1, 2, 1),  # tall; padding as wide as the filter
    (1, 2, 10, 5, 7, 3, 1, 5, 1),  # padding over the filter
    (2, 4, 48, 21, 26, 3, 3, 1, 1),
    (1, 3, 17, 30, 31, 3, 7, 0, 1),  # a stride over the filter: pixels that no window meets
    (3, 1, 13, 18, 35, 4, (1, 2), (2, 1), 1),
    (2, 3, 200, 12, 20, 6, (2, 1), (0, 3), 1),
    (150, 3, 24, 6, 5, 3, 1, 1, 1),  # more images than blocks of some devices
]


def refuses(device, dtype):
    """What the kernel has to say to that precision, or None."""
    wide = device == "cuda" and dtype == torch.float64
    return "it takes float32, bfloat16 and float16" if wide else None


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_stock(device, dtype, case, form, tf32):
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    skip_large(device, case)
    set_tf32(device, tf32)
    x, w, b = drawn(case, device, dtype, form)
    dy = gradient(case, x, w, form)
    for which in PASSES:
        for bias in (b, None) if which == "fprop" else (None,):
            why = refuses(device, dtype)
            with pytest.raises(RuntimeError, match=why) if why else contextlib.nullcontext():
                actual = run(which, case, x, w, bias, dy, tf32, **own(device, NAME))
                assert actual.is_contiguous(memory_format=FORMATS[form])
                tensors = (x, w, bias, dy) if bias is not None else (x, w, torch.zeros_like(b), dy)
                check(actual, which, case, tensors, tf32)


@pytest.mark.parametrize("form", FORMATS)
def test_layers_and_kernels(device, dtype, form):
    """The public function, and on a GPU which kernels run."""
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    set_tf32(device, False)
    x, w, b = drawn((4, 3, 24, 30, 34, 3, 2, 1, 1), device, dtype, form)
    named = braze.backend(conv2d=NAME) if device == "cuda" else contextlib.nullcontext()
    with named:
        check_against_stock(
            lambda *t: F.conv2d(*t, stride=2, padding=1),
            lambda *t: stock.conv2d(*t, stride=2, padding=1),
            [x, w.requires_grad_(), b.requires_grad_()],
        )
        if device == "cuda":
            assert "narrow_input_fprop" in cuda_kernels_of(lambda: F.conv2d(x, w, b))
            out = F.conv2d(x, w, b)
            names = cuda_kernels_of(lambda: torch.autograd.grad(out.sum(), w))
            assert "narrow_input_wgrad" in names


@pytest.mark.parametrize(
    ("why", "shape", "weight", "arguments"),
    [
        ("eight channels", (2, 9, 12, 12), (8, 9, 3, 3), {}),
        ("one group", (2, 4, 12, 12), (8, 2, 3, 3), {"groups": 2}),
        ("no dilation", (2, 3, 12, 12), (8, 3, 3, 3), {"dilation": 2}),
        ("up to 64", (1, 3, 12, 70), (8, 3, 3, 65), {}),
        ("up to 64", (1, 3, 12, 70), (8, 3, 3, 3), {"stride": 65}),
    ],
)
def test_refuses_by_name_and_leaves_the_rest_to_others(gpu, why, shape, weight, arguments):
    x, w = (torch.randn(s, device="cuda").bfloat16() for s in (shape, weight))
    with braze.backend(conv2d=NAME), pytest.raises(RuntimeError, match=why):
        F.conv2d(x, w, **arguments)
    out = F.conv2d(x, w, **arguments)
    exact = stock.conv2d(x.double(), w.double(), **arguments)
    assert_by_rule(out, stock.conv2d(x, w, **arguments), exact)


# of up to eight filters: both gradients, with the result's for an image
FEW_FILTERS = [
    (2, 32, 2, 64, 64, 1, 1, 0, 1),  # a U-Net's end
    (2, 64, 3, 40, 48, 3, 1, 1, 1),
    (1, 128, 3, 33, 37, 9, 1, 4, 1),
    (3, 24, 8, 17, 12, 5, 1, 0, 1),
    (2, 20, 1, 12, 19, 4, 1, (2, 0), 1),
    (2, 9, 7, 8, 6, 3, 1, 5, 1),  # padding over the filter
    (150, 16, 5, 6, 7, 3, 1, 1, 1),
    (1, 70, 4, 5, 300, 3, 1, 1, 1),
]


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", FEW_FILTERS, ids=str)
def test_gradients_of_few_filters(device, dtype, case, form, tf32):
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    skip_large(device, case)
    set_tf32(device, tf32)
    x, w, b = drawn(case, device, dtype, form)
    dy = gradient(case, x, w, form)
    for which in ("dgrad", "wgrad"):
        actual = run(which, case, x, w, b, dy, tf32, **own(device, NAME))
        assert actual.is_contiguous(memory_format=FORMATS[form])
        check(actual, which, case, (x, w, b, dy), tf32)


@pytest.mark.parametrize(
    ("which", "case"),
    [("dgrad", (2, 3, 8, 12, 12, 3, 2, 1, 1)), ("wgrad", (2, 16, 8, 12, 12, 3, 2, 1, 1))],
    ids=str,
)
def test_strided_gradients_of_few_filters_are_refused(gpu, which, case):
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    with pytest.raises(RuntimeError, match="a stride of 1"):
        run(which, case, x, w, b, dy, backend=NAME)


@pytest.mark.parametrize("form", FORMATS)
def test_empty(device, dtype, form):
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    case = (0, 3, 8, 9, 9, 3, 1, 1, 1)
    x, w, b = drawn(case, device, dtype, form)
    dy = torch.empty(0, 8, 9, 9, device=device, dtype=dtype)
    assert run("fprop", case, x, w, b, dy, **own(device, NAME)).shape == (0, 8, 9, 9)
    assert not run("wgrad", case, x, w, b, dy, **own(device, NAME)).any()


def views(device, dtype):
    """Images of three channels, 14 x 18, that are parts of other tensors."""
    storage = torch.randn(8 * 5 * 16 * 20 + 64, device=device).to(dtype)
    dense = storage[3 : 3 + 2 * 3 * 14 * 18]  # begins between words
    large = storage[: 8 * 5 * 16 * 20]
    return [
        dense.view(2, 3, 14, 18),
        dense.view(2, 14, 18, 3).permute(0, 3, 1, 2),
        large.view(8, 5, 16, 20)[::4, 1:4, 2:, 1:19],
        large.view(8, 16, 20, 5)[::4, 2:, 1:19, 2:].permute(0, 3, 1, 2),
        large.view(8, 16, 5, 20)[::4, 2:, 1:4, :18].permute(0, 2, 1, 3),
        large[: 2 * 14 * 18 * 3].view(2, 3, 18, 14).transpose(2, 3),  # column by column
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("stride", [1, 2])
def test_strided_views(device, dtype, number, stride):
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    set_tf32(device, False)
    x = views(device, dtype)[number]
    case = (2, 3, 24, 14, 18, 3, stride, 1, 1)
    _, w, b = drawn(case, device, dtype, "nchw")
    dy = gradient(case, x, w, "nchw")
    for which in PASSES:
        actual = run(which, case, x, w, b, dy, **own(device, NAME))
        check(actual, which, case, (x, w, b, dy))


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "case",
    [
        (2, 3, 24, 17, 13, 3, 1, 1, 1),
        (2, 3, 24, 17, 14, 7, 2, 3, 1),
        (2, 1, 24, 18, 13, 5, 1, 2, 1),
        (2, 4, 24, 18, 21, 2, 3, 0, 1),
    ],
    ids=str,
)
def test_special_values(device, dtype, case, form, tf32):
    """inf and NaN reach the results that meet them and no others, whatever lies beside a window in
    the words and tiles that are loaded."""
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    set_tf32(device, tf32)
    n, c, _, h, w_ = case[:5]
    x, w, b = drawn(case, device, dtype, form)
    w = w.abs() + 0.5  # an infinity times what is rounded to zero would be NaN
    inf, nan = float("inf"), float("nan")
    for value, place in (
        (inf, (0, 0, 0, 0)),
        (nan, (0, c - 1, h // 2, w_ - 1)),
        (-inf, (n - 1, c - 1, h - 1, w_ - 1)),
        (inf, (n - 1, 0, h - 1, w_ // 2)),
    ):
        x[place] = value
    exact = reference("fprop", case, x.double(), w.double(), b.double(), None)
    assert not exact.isfinite().all()
    assert exact.isfinite().any()
    out = run("fprop", case, x, w, b, None, tf32, **own(device, NAME))
    ulps = 2**13 if tf32 else 4
    assert_by_rule(out, exact.to(dtype), exact, ulps, terms=c * case[5] ** 2)
    # Each weight's gradient from the pixels that it meets; padding is zeros that meet finite dy.
    dy = torch.randn_like(exact).to(dtype, memory_format=FORMATS[form])
    dw = run("wgrad", case, x, w, b, dy, tf32, **own(device, NAME)).double()
    (top, left), (down, right) = pair(case[7]), pair(case[6])
    padded = stock.pad(x.double(), [left, left, top, top])
    p, q = exact.shape[2:]
    for r in range(case[5]):
        for s in range(case[5]):
            met = padded[:, :, r : r + down * p : down, s : s + right * q : right][:, :, :p, :q]
            expected = torch.einsum("ncpq,nkpq->kcpq", met, dy.double()).sum((2, 3))
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(dw[:, :, r, s]), kind(expected)), (r, s, kind.__name__)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "case",
    [
        (9, 3, 64, 34, 30, 7, 2, 3, 1),
        (40, 3, 24, 13, 11, 3, 1, 1, 1),
        (1, 1, 70, 5, 6, 3, 1, 1, 1),
        (300, 3, 16, 32, 32, 3, 1, 1, 1),  # several tiles for each block
    ],
    ids=str,
)
def test_moments(device, dtype, case, form):
    """Batch norm's statistics of what the kernel stores, which it leaves itself."""
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    skip_large(device, case)
    set_tf32(device, False)
    x, w, b = drawn(case, device, dtype, form)
    b *= 30  # a mean much larger than the deviation
    k, geometry = case[2], {"stride": case[6], "padding": case[7]}
    mean, var = (torch.full((k,), v, device=device, dtype=dtype) for v in (0.0, 1.0))
    gamma, beta = torch.ones(k, device=device, dtype=dtype), torch.zeros_like(mean)

    def block():
        affine = mean, var, gamma, beta
        return F.conv_bn_relu2d(x, w, b, *affine, training=True, momentum=1.0, **geometry)

    with braze.backend(conv2d=NAME) if device == "cuda" else contextlib.nullcontext():
        z = F.conv2d(x, w, b, **geometry).double()
        block()
        if device == "cuda":
            assert "given_moments" in cuda_kernels_of(block)
    for actual, exact in ((mean, z.mean((0, 2, 3))), (var, z.var((0, 2, 3)))):
        # In the place of stock's the exact values, rounded; deviations were summed in fp32.
        assert_by_rule(actual, exact.to(dtype), exact, ulps=64, terms=z.numel() // k)


@pytest.mark.parametrize("form", FORMATS)
def test_repeatable(gpu, form):
    case = (64, 3, 64, 112, 112, 7, 2, 3, 1)
    x, w, b = drawn(case, "cuda", torch.bfloat16, form)
    dy = gradient(case, x, w, form)
    for which in PASSES:
        first = run(which, case, x, w, b, dy, backend=NAME)
        for _ in range(20):
            assert torch.equal(run(which, case, x, w, b, dy, backend=NAME), first)


def test_in_a_graph(gpu):
    """Kernels of a graph may start before the one before them is done."""
    case = (8, 3, 64, 56, 56, 7, 2, 3, 1)
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    images = torch.randn_like(x)

    def step():
        x.copy_(images)
        return [run(which, case, x, w, b, dy, backend=NAME) for which in PASSES]

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(5):
        for t in (x, *results):
            t.zero_()
        graph.replay()
        assert all(torch.equal(a, e) for a, e in zip(results, expected, strict=True))


def test_more_than_2_to_the_31_elements(gpu):
    check_first_layer_beyond_31_bits(NAME)


def fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size, stride, padding = draw(1, 9), (draw(1, 5), draw(1, 5)), (draw(0, 5), draw(0, 5))
    least = [max(1, size - 2 * p) for p in padding]
    h, w = (low + draw(0, 60) for low in least)
    case = (draw(1, 5), draw(1, 8), draw(1, 130), h, w, size, stride, padding, 1)
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    tf32 = device == "cuda" and dtype == torch.float32 and data.draw(st.booleans())
    set_tf32(device, tf32)
    form, other = (data.draw(st.sampled_from(sorted(FORMATS))) for _ in range(2))
    x, weight, b = drawn(case, device, dtype, form)
    dy = gradient(case, x, weight, other)
    for which in PASSES:
        actual = run(which, case, x, weight, b, dy, tf32, **own(device, NAME))
        check(actual, which, case, (x, weight, b, dy), tf32)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


@pytest.mark.parametrize("form", FORMATS)
def test_the_tests_reject_a_wrong_kernel(device, dtype, form):
    """A kernel that takes the element beside the window for the window's, and one that forgets a
    tile's last column."""
    case = (2, 3, 24, 20, 22, 3, 1, 1, 1)
    x, w, b = drawn(case, device, dtype, form)
    dy = gradient(case, x, w, form)
    tensors = (x, w, b, dy)
    out = reference("fprop", case, *tensors)
    beside = torch.cat([out[..., :15], out[..., 16:], out[..., 15:16]], dim=3)
    with pytest.raises(AssertionError):
        check(beside, "fprop", case, tensors)
    dy = dy.clone()
    dy[..., 15] = 0
    with pytest.raises(AssertionError):
        check(reference("wgrad", case, x, w, b, dy), "wgrad", case, tensors)
