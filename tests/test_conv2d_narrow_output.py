"""Convolutions of few results: the CUDA kernel `narrow_output` by name, forward to up to eight
filters and input gradients of up to eight channels, where it must not refuse. The cases run on the
CPU too, by its own kernels."""

import contextlib

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st
from test_conv2d_products import check, drawn, gradient, own, reference, run, set_tf32, skip_large

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, cuda_kernels_of, fuzzed

NAME = "narrow_output"
# n, c, k, h, w, filter, stride, padding, dilation
FORWARD = [
    (4, 32, 2, 64, 64, 1, 1, 0, 1),  # a U-Net's end
    (2, 64, 3, 40, 48, 3, 1, 1, 1),  # an image
    (1, 320, 4, 32, 32, 3, 1, 1, 1),  # a diffusion model's
    (2, 32, 3, 65, 37, 9, 1, 4, 1),  # super-resolution
    (3, 16, 8, 20, 21, 3, 2, 1, 1),
    (2, 64, 5, 33, 17, 4, 3, (2, 1), 1),
    (2, 24, 1, 19, 23, 3, 1, 2, 2),
    (1, 8, 7, 1, 1, 1, 1, 0, 1),
    (2, 40, 6, 5, 300, 5, 1, 2, 1),  # wide
    (2, 8, 3, 300, 3, 3, 1, 1, 1),  # tall
    (700, 16, 6, 7, 5, 3, 1, 1, 1),  # more tiles than blocks
    (1, 512, 3, 9, 9, 3, 1, 1, 1),  # many chunks of channels
    (2, 16, 4, 4, 5, 3, 1, 4, 1),  # padding over the filter
]
BACKWARD = [
    (9, 6, 16, 14, 14, 5, 1, 0, 1),  # LeNet
    (2, 3, 64, 40, 44, 3, 1, 1, 1),
    (2, 4, 24, 13, 31, 2, 1, 0, 1),
    (1, 1, 40, 28, 28, 5, 1, 2, 1),
    (2, 8, 72, 17, 18, 3, 1, 1, 1),
    (2, 5, 16, 21, 15, 3, 1, 2, 2),
    (3, 7, 8, 6, 6, 3, 1, 4, 1),  # padding over the filter
    (1, 2, 512, 10, 12, 3, 1, 1, 1),
    (500, 6, 16, 12, 12, 5, 1, 0, 1),
    (2, 3, 8, 1, 1, 1, 1, 0, 1),
]
CASES = [("fprop", case) for case in FORWARD] + [("dgrad", case) for case in BACKWARD]
WIDE = "it takes float32, bfloat16 and float16"


def refused(device, dtype):
    """What the kernel has to say to that precision, or None."""
    return WIDE if device == "cuda" and dtype == torch.float64 else None


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize(("which", "case"), CASES, ids=str)
def test_matches_stock(device, dtype, which, case, tf32):
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    skip_large(device, case)
    set_tf32(device, tf32)
    x, w, b = drawn(case, device, dtype, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    for bias in (b, None) if which == "fprop" else (None,):
        why = refused(device, dtype)
        with pytest.raises(RuntimeError, match=why) if why else contextlib.nullcontext():
            actual = run(which, case, x, w, bias, dy, tf32, **own(device, NAME))
            assert actual.is_contiguous(memory_format=torch.channels_last)
            tensors = (x, w, bias, dy) if bias is not None else (x, w, torch.zeros_like(b), dy)
            check(actual, which, case, tensors, tf32)


@pytest.mark.parametrize("results", [2, 3])
def test_layers_and_kernels(device, dtype, results):
    """The public function, and on a GPU which kernels run."""
    if refused(device, dtype):
        pytest.skip("not the kernel's")
    set_tf32(device, False)
    x, w, b = drawn((4, 16, results, 30, 34, 3, 1, 1, 1), device, dtype, "nhwc")
    check_against_stock(
        lambda *t: F.conv2d(*t, padding=1),
        lambda *t: stock.conv2d(*t, padding=1),
        [x.requires_grad_(), w.requires_grad_(), b.requires_grad_()],
    )
    if device == "cuda":
        with braze.backend(conv2d=NAME):
            assert "narrow_output" in cuda_kernels_of(lambda: F.conv2d(x, w, b))
        x, w, _ = drawn((4, results, 16, 30, 34, 3, 1, 1, 1), device, dtype, "nhwc")
        case = (4, results, 16, 30, 34, 3, 1, 1, 1)
        dy = gradient(case, x, w, "nhwc")
        backward = lambda: run("dgrad", case, x, w, None, dy, backend=NAME)  # noqa: E731
        assert "narrow_output" in cuda_kernels_of(backward)


@pytest.mark.parametrize(
    ("why", "which", "case", "form"),
    [
        ("eight results", "fprop", (2, 16, 9, 12, 12, 3, 1, 1, 1), "nhwc"),
        ("eight results", "dgrad", (2, 9, 16, 12, 12, 3, 1, 1, 1), "nhwc"),
        ("stride of 1", "dgrad", (2, 3, 16, 12, 12, 3, 2, 1, 1), "nhwc"),
        ("channels last", "fprop", (2, 16, 3, 12, 12, 3, 1, 1, 1), "nchw"),
        ("16 bytes", "fprop", (2, 12, 3, 12, 12, 3, 1, 1, 1), "nhwc"),
        ("no weight gradient", "wgrad", (2, 16, 3, 12, 12, 3, 1, 1, 1), "nhwc"),
        ("shared memory", "fprop", (1, 512, 3, 70, 70, 33, 1, 16, 1), "nhwc"),
        ("up to 64", "fprop", (1, 8, 3, 12, 70, 3, 65, 1, 1), "nhwc"),
    ],
)
def test_refuses_by_name_and_leaves_the_rest_to_others(gpu, why, which, case, form):
    x, w, b = drawn(case, "cuda", torch.bfloat16, form)
    dy = gradient(case, x, w, form)
    with pytest.raises(RuntimeError, match=why):
        run(which, case, x, w, None, dy, backend=NAME)
    check(run(which, case, x, w, None, dy), which, case, (x, w, torch.zeros_like(b), dy))


def test_empty(device, dtype):
    if refused(device, dtype):
        pytest.skip("not the kernel's")
    case = (0, 16, 3, 9, 9, 3, 1, 1, 1)
    x, w, b = drawn(case, device, dtype, "nhwc")
    assert run("fprop", case, x, w, b, None, **own(device, NAME)).shape == (0, 3, 9, 9)


@pytest.mark.parametrize("which", ["fprop", "dgrad"])
def test_strided_views(device, dtype, which):
    """Images that are parts of other tensors, in lines that begin at 16 bytes."""
    if refused(device, dtype):
        pytest.skip("not the kernel's")
    set_tf32(device, False)
    large = torch.randn(4, 20, 24, 48, device=device).to(dtype)
    part = large[::2, 1:15, 2:20, 16:32].permute(0, 3, 1, 2)  # 2 x 16 x 14 x 18
    case = (2, 16, 6, 14, 18, 3, 1, 1, 1) if which == "fprop" else (2, 6, 16, 14, 18, 3, 1, 1, 1)
    x, w, b = drawn(case, device, dtype, "nhwc")
    if which == "fprop":
        out = run(which, case, part, w, b, None, **own(device, NAME))
        return check(out, which, case, (part, w, b, out))
    out = run(which, case, x, w, b, part, **own(device, NAME))
    return check(out, which, case, (x, w, b, part))


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize(
    ("which", "case"),
    [
        ("fprop", (2, 16, 3, 17, 13, 3, 1, 1, 1)),
        ("fprop", (2, 24, 6, 18, 21, 3, 2, 0, 1)),
        ("dgrad", (2, 6, 16, 18, 13, 5, 1, 2, 1)),
    ],
    ids=str,
)
def test_special_values(device, dtype, which, case, tf32):
    """inf and NaN reach the results that meet them and no others, whatever lies beside them."""
    if refused(device, dtype):
        pytest.skip("not the kernel's")
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    set_tf32(device, tf32)
    x, w, b = drawn(case, device, dtype, "nhwc")
    w = w.abs() + 0.5  # an infinity times what is rounded to zero would be NaN
    dy = gradient(case, x, w, "nhwc")
    source = x if which == "fprop" else dy
    n, c, p, q = source.shape
    for value, place in (
        (float("inf"), (0, 0, 0, 0)),
        (float("nan"), (0, c - 1, p // 2, q - 1)),
        (-float("inf"), (n - 1, c - 1, p - 1, q - 1)),
    ):
        source[place] = value
    exact = reference(which, case, x.double(), w.double(), b.double(), dy.double())
    assert not exact.isfinite().all()
    assert exact.isfinite().any()
    out = run(which, case, x, w, b if which == "fprop" else None, dy, tf32, **own(device, NAME))
    ulps = 2**13 if tf32 else 8
    assert_by_rule(out, exact.to(dtype), exact, ulps, terms=c * case[5] ** 2)


def test_in_a_graph(gpu):
    """Kernels of a graph may start before the one before them is done; and it is repeatable."""
    case = (8, 64, 3, 56, 56, 3, 1, 1, 1)
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    images = torch.randn_like(x)

    def step():
        x.copy_(images)
        return run("fprop", case, x, w, b, None, backend=NAME)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(5):
        x.zero_()
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)


def fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    which = data.draw(st.sampled_from(["fprop", "dgrad"]))
    size, padding, dilation = draw(1, 7), (draw(0, 5), draw(0, 5)), draw(1, 3)
    stride = (draw(1, 4), draw(1, 4)) if which == "fprop" else 1
    least = [max(1, (size - 1) * dilation + 1 - 2 * p) for p in padding]
    h, w = (low + draw(0, 60) for low in least)
    many, few = 8 * draw(1, 8), draw(2, 8)  # of one channel the format may be open
    channels = (many, few) if which == "fprop" else (few, many)
    case = (draw(1, 5), *channels, h, w, size, stride, padding, dilation)
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    tf32 = device == "cuda" and dtype == torch.float32 and data.draw(st.booleans())
    set_tf32(device, tf32)
    x, weight, b = drawn(case, device, dtype, "nhwc")
    weight = weight.contiguous(memory_format=data.draw(st.sampled_from(FORMS)))
    dy = gradient(case, x, weight, "nhwc")
    bias = b if which == "fprop" else None
    actual = run(which, case, x, weight, bias, dy, tf32, **own(device, NAME))
    check(actual, which, case, (x, weight, b, dy), tf32)


FORMS = [torch.contiguous_format, torch.channels_last]
test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)
