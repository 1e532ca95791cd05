"""Convolutions as matrix products: the CUDA kernels `pointwise` and `implicit_gemm_wgmma` by name,
pass by pass, where they must not refuse. The cases run on the CPU too, by its own kernels."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from braze.testing import WAYS, mover
from common import assert_by_rule, cuda_kernels_of, fuzzed, runs_hopper_kernels

NAME = "implicit_gemm_wgmma"
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
PASSES = ["fprop", "dgrad", "wgrad"]
# n, c, k, h, w, filter, stride, padding, dilation
POINTWISE = [
    (1, 1, 1, 1, 1, 1, 1, 0, 1),
    (3, 64, 256, 14, 14, 1, 1, 0, 1),
    (2, 17, 13, 9, 5, 1, 1, 0, 1),
    (5, 8, 24, 7, 7, 1, 1, 0, 1),
    (64, 128, 32, 1, 1, 1, 1, 0, 1),
    (2, 1, 40, 6, 1, 1, 1, 0, 1),
    (2, 72, 1, 1, 8, 1, 1, 0, 1),
    (4, 2048, 512, 7, 7, 1, 1, 0, 1),
    (1, 256, 128, 28, 28, 1, 1, 0, 1),
    (3, 64, 48, 15, 12, 1, 2, 0, 1),
    (2, 17, 13, 9, 5, 1, (3, 1), 0, 1),
    (2, 256, 24, 2, 2, 1, 2, 0, 1),
    (5, 40, 136, 8, 12, 1, 1, 0, 1),
    (3, 136, 264, 16, 20, 1, 2, 0, 1),
    (16, 64, 64, 56, 56, 1, 1, 0, 1),  # a long sum of few results
]
WINDOWS = [
    (2, 8, 8, 5, 5, 3, 1, 1, 1),
    (3, 64, 64, 14, 14, 3, 1, 1, 1),
    (2, 72, 40, 13, 11, 3, 1, 1, 1),  # channels that fill no row of shared memory
    (2, 128, 256, 28, 28, 3, 2, 1, 1),
    (1, 2048, 24, 7, 7, 1, 1, 0, 1),
    (2, 64, 128, 15, 15, 1, 2, 0, 1),
    (2, 24, 40, 17, 19, 5, 3, (2, 1), 1),
    (2, 32, 48, 20, 20, 3, 1, 2, 2),
    (40, 256, 320, 7, 7, 3, 1, 1, 1),
    (2, 16, 512, 9, 9, 7, 2, 3, 1),
    (1, 64, 64, 1, 1, 3, 1, 1, 1),
    (4, 64, 96, 14, 14, 3, 2, 1, 1),
    (2, 32, 32, 21, 10, 2, 3, 0, 1),  # pixels that no window meets
    (2, 40, 32, 16, 15, 3, 4, 1, 2),
    (150, 16, 16, 4, 4, 2, 1, 0, 1),
    (2, 256, 200, 6, 5, 3, 1, 1, 1),  # a sum in several parts, in fp32
    (2, 13, 17, 8, 9, 3, 1, 1, 1),  # rows of the result that begin anywhere, in fp32
    (2, 13, 17, 9, 8, 3, 2, 1, 1),
    (2, 16, 24, 9, 12, 4, (2, 3), (5, 0), (1, 2)),  # padding over the filter
    (32, 64, 192, 56, 56, 3, 1, 1, 1),  # several tiles for each block
    (64, 256, 128, 28, 28, 3, 2, 1, 1),
    (2, 4, 32, 84, 84, 8, 4, 0, 1),  # a filter's row of pixels taken for one pixel
    (3, 3, 24, 16, 20, 4, 4, 0, 1),  # in 16 bits these begin anywhere
    (2, 32, 64, 20, 20, 4, 2, 0, 1),
    (2, 96, 64, 9, 11, 3, 1, (2, 0), 1),
    (5, 16, 8, 13, 14, 5, (3, 2), 0, (2, 1)),
    (2, 8, 16, 12, 9, 2, 2, 0, 1),  # the last column is in no window
    (4, 320, 136, 9, 9, 3, 1, 1, 1),  # taps side by side, the last tile half empty
]


def drawn(case, device, dtype, form):
    n, c, k, h, w, size = case[:6]
    x = torch.randn(n, c, h, w, device=device).to(dtype, memory_format=FORMATS[form])
    weight = torch.randn(k, c, size, size, device=device).to(dtype, memory_format=FORMATS[form])
    return x, weight, torch.randn(k, device=device).to(dtype)


def pair(value):
    return list(value) if isinstance(value, tuple) else [value, value]


def run(which, case, x, w, b, dy, tf32=False, backend="auto"):
    """One pass by the raw op, so that a kernel that lacks the others can be asked for it."""
    geometry = [pair(v) for v in case[6:9]], 1
    settings = tf32, False, backend
    if which == "fprop":
        return torch.ops.braze.conv2d(x, w, b, *geometry[0], 1, *settings)
    mask = [which == "dgrad", which == "wgrad", False]
    grads = torch.ops.braze.conv2d_backward(dy, x, w, *geometry[0], 1, mask, *settings)
    return grads[PASSES.index(which) - 1]


def reference(which, case, x, w, b, dy):
    """The same by torch."""
    geometry = [pair(v) for v in case[6:9]]
    if which == "fprop":
        return stock.conv2d(x, w, b, *geometry)
    mask = [which == "dgrad", which == "wgrad", False]
    grads = torch.ops.aten.convolution_backward(dy, x, w, None, *geometry, False, [0, 0], 1, mask)
    return grads[PASSES.index(which) - 1]


def gradient(case, x, w, form):
    dy = torch.randn_like(stock.conv2d(x, w, None, *[pair(v) for v in case[6:9]]))
    return dy.to(memory_format=FORMATS[form])


def check(actual, which, case, tensors, tf32=False):
    """By the rule, with the condition measured."""
    wide = [t.double() for t in tensors]
    exact = reference(which, case, *wide)
    terms = max(t.numel() for t in (*tensors, actual))
    # Stock may run a small convolution in fp32 where TF32 is allowed.
    ulps = 2**13 if tf32 and actual.dtype == torch.float32 else 4 if which == "fprop" else 8

    def moved():
        return [reference(which, case, *map(mover(way), wide)) for way in WAYS]

    assert_by_rule(actual, reference(which, case, *tensors), exact, ulps, which, terms, moved)


def check_first_layer_beyond_31_bits(name):
    """Forward and weight gradient of more than 2**31 results, by the kernel of that name."""
    n, k = 2700, 64  # 2.2e9 results, 4.3 GB in 16 bits
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB")
    case = (n, 3, k, 224, 224, 3, 2, 1, 1)
    x, w, b = drawn((1, *case[1:]), "cuda", torch.bfloat16, "nhwc")
    many = torch.empty(n, *x.shape[1:], device="cuda", dtype=x.dtype)
    many = many.to(memory_format=torch.channels_last).copy_(x.expand_as(many))
    one = run("fprop", case, x, w, b, None, backend=name)
    out = run("fprop", case, many, w, b, None, backend=name)
    assert all(torch.equal(out[i], one[0]) for i in (0, n // 2, n - 1))
    # All but the last image's gradients are zeros.
    dy = out.zero_()
    dy[-1] = one[0]
    actual = run("wgrad", case, many, w, b, dy, backend=name)
    check(actual, "wgrad", (1, *case[1:]), (x, w, b, one))


@pytest.mark.parametrize("which", PASSES)
def test_auto_takes_other_filters_in_fp32(gpu, which):
    """cuDNN's take four times as long (H200)."""
    if not runs_hopper_kernels():
        pytest.skip("measured there")
    case = (64, 64, 128, 14, 14, 5, 1, 2, 1)
    x, w, _ = drawn(case, "cuda", torch.float32, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    set_tf32("cuda", False)
    assert "braze" in cuda_kernels_of(lambda: run(which, case, x, w, None, dy))


@pytest.mark.parametrize(
    "case", [(64, 4, 32, 84, 84, 8, 4, 0, 1), (64, 6, 40, 30, 30, 3, 2, 1, 1)], ids=str
)
def test_auto_multiplies_no_empty_rows_in_fp32(hopper, case):
    """Weight gradients of a few channels: products in parts take seven times as long (H200)."""
    set_tf32("cuda", False)
    x, w, b = drawn(case, "cuda", torch.float32, "nhwc")
    tensors = x, w, b, gradient(case, x, w, "nhwc")
    assert "split_kernel" not in cuda_kernels_of(lambda: run("wgrad", case, *tensors))
    check(run("wgrad", case, *tensors), "wgrad", case, tensors)


def skip_large(device, case):
    n, c, k, h, w, size = case[:6]
    if device == "cpu" and n * c * k * h * w * size**2 > 1 << 29:
        pytest.skip("takes the CPU seconds")


def own(device, name):
    return {"backend": name} if device == "cuda" else {}


def set_tf32(device, allowed):
    if device == "cuda":
        torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", POINTWISE, ids=str)
def test_pointwise(device, dtype, case, form, tf32):
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    skip_large(device, case)
    set_tf32(device, tf32)
    x, w, b = drawn(case, device, dtype, form)
    dy = gradient(case, x, w, form)
    for which in PASSES:
        why = pointwise_refuses(which, case, dtype, form, tf32) if device == "cuda" else None
        with pytest.raises(RuntimeError, match=why) if why else contextlib.nullcontext():
            actual = run(which, case, x, w, b, dy, tf32, **own(device, "pointwise"))
            assert actual.is_contiguous(memory_format=FORMATS[form])
            check(actual, which, case, (x, w, b, dy), tf32)


def pointwise_refuses(which, case, dtype, form, tf32):
    """What pointwise has to say, or None."""
    images = case[0]
    pixels = result_pixels(case) // images
    # With one channel either format is the other.
    if which != "wgrad" or form == "nhwc" or images == 1 or pixels == 1:
        return None
    if not runs_hopper_kernels():
        return "compute capability 9.0"
    if dtype == torch.float64 or (dtype == torch.float32 and not tf32):
        return "for contiguous images it takes"
    if pixels * dtype.itemsize % 16:
        return "multiples of 16 bytes"
    return None


def windows_refuse(which, case, dtype, tf32):
    """What implicit_gemm_wgmma has to say, or None."""
    if dtype == torch.float64:
        return "it takes float32"
    in_parts = dtype == torch.float32 and not tf32
    pixel, size, width = case[1] * dtype.itemsize, case[5], case[4]
    (stride, padding, dilation) = (pair(v)[1] for v in case[6:9])
    rows = lambda n: -(-n // 128)  # noqa: E731
    by_rows = (
        which != "dgrad"
        and padding == 0
        and dilation == 1
        and stride * pixel % 16 == 0
        and rows(size * pixel) < size * rows(pixel)
    )
    steps = (size * pixel, width * pixel) if by_rows else (pixel,)
    if not in_parts and any(n % 16 for n in steps):
        return "multiple of 16 bytes"
    if which == "wgrad" and not in_parts and case[2] * dtype.itemsize % 16:
        return "16 bytes of filters"
    return None


def result_pixels(case):
    count = case[0]
    for size, stride, padding, dilation in zip(case[3:5], *map(pair, case[6:9]), strict=True):
        count *= (size + 2 * padding - dilation * (case[5] - 1) - 1) // stride + 1
    return count


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_implicit_gemm_wgmma(device, dtype, case, tf32):
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    if device == "cuda" and not runs_hopper_kernels():
        pytest.skip("needs compute capability 9.0")
    skip_large(device, case)
    set_tf32(device, tf32)
    x, w, b = drawn(case, device, dtype, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    for which in PASSES:
        why = windows_refuse(which, case, dtype, tf32) if device == "cuda" else None
        with pytest.raises(RuntimeError, match=why) if why else contextlib.nullcontext():
            actual = run(which, case, x, w, b, dy, tf32, **own(device, "implicit_gemm_wgmma"))
            assert actual.is_contiguous(memory_format=torch.channels_last)
            check(actual, which, case, (x, w, b, dy), tf32)


@pytest.mark.parametrize(
    ("case", "passes", "tf32"),
    [
        # several tiles for each consumer, of several rounds of the ring
        ((64, 128, 128, 28, 28, 3, 1, 1, 1), ("fprop", "dgrad"), False),
        ((64, 64, 64, 56, 56, 3, 1, 1, 1), ("dgrad",), False),
        ((33, 128, 72, 29, 31, 3, 1, 1, 1), ("fprop",), False),  # tiles that are not full
        ((40, 128, 136, 27, 29, 3, 2, 1, 1), ("dgrad",), False),  # phases
        ((40, 128, 136, 27, 29, 3, 2, 1, 1), ("dgrad",), True),
        # phases of more tiles than run at once
        ((150, 72, 64, 27, 29, 3, 2, 1, 1), ("dgrad",), False),
        ((30, 64, 48, 27, 29, 1, 3, 0, 1), ("dgrad",), True),  # phases of no taps
    ],
    ids=str,
)
def test_consumers_take_turns(hopper, case, passes, tf32):
    set_tf32("cuda", tf32)
    x, w, b = drawn(case, "cuda", torch.float32 if tf32 else torch.bfloat16, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    for which in passes:
        call = functools.partial(run, which, case, x, w, b, dy, tf32, "implicit_gemm_wgmma")
        assert "turns_kernel" in cuda_kernels_of(call)
        actual = call()
        check(actual, which, case, (x, w, b, dy), tf32)
        for _ in range(20):
            assert torch.equal(call(), actual)


@pytest.mark.parametrize(
    ("case", "which", "tile"),
    [
        ((40, 72, 120, 57, 59, 3, 1, 1, 1), "fprop", "256, 128"),  # tiles that are not full
        ((32, 128, 64, 56, 56, 3, 1, 1, 1), "fprop", "256, 64"),
        ((64, 64, 64, 56, 56, 3, 1, 1, 1), "dgrad", "256, 64"),
    ],
    ids=str,
)
def test_tall_tiles(hopper, case, which, tile):
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    call = functools.partial(run, which, case, x, w, b, dy, False, "implicit_gemm_wgmma")
    assert f"<__nv_bfloat16, {tile}, " in cuda_kernels_of(call)
    check(call(), which, case, (x, w, b, dy), False)


# taps side by side in one product, and a product for each
@pytest.mark.parametrize(
    "case", [(64, 256, 256, 3, 3, 3, 1, 1, 1), (64, 160, 320, 7, 7, 3, 1, 1, 1)], ids=str
)
def test_weight_gradients_of_short_sums_split_the_depth(hopper, case):
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    call = functools.partial(run, "wgrad", case, x, w, b, dy, False, "implicit_gemm_wgmma")
    assert "cluster_split_kernel" in cuda_kernels_of(call)
    check(call(), "wgrad", case, (x, w, b, dy), False)


@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_few_multiprocessors(hopper, precision, count):
    """Fewer than a cluster takes, and as many as whole waves of tiles fill."""
    case, tf32 = (2, 256, 256, 6, 6, 3, 1, 0, 1), precision == "tf32"
    set_tf32("cuda", tf32)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    for which in PASSES:
        with braze.multiprocessors(count):
            found = run(which, case, x, w, b, dy, tf32, NAME)
        check(found, which, case, (x, w, b, dy), tf32)


@pytest.mark.parametrize("tf32", [False, True], ids=["bfloat16", "tf32"])
def test_few_pixels_split_the_depth(hopper, tf32):
    """512 channels at 7 x 7, one image: the blocks of a cluster share a tile."""
    case, dtype = (1, 512, 512, 7, 7, 3, 1, 1, 1), torch.float32 if tf32 else torch.bfloat16
    set_tf32("cuda", tf32)
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    for which in ("fprop", "dgrad"):
        call = functools.partial(run, which, case, x, w, b, dy, tf32, "implicit_gemm_wgmma")
        assert "cluster_split_kernel" in cuda_kernels_of(call)
        check(call(), which, case, (x, w, b, dy), tf32)


@pytest.mark.parametrize(
    "case",
    [
        (3, 64, 64, 14, 14, 3, 1, 1, 1),
        (2, 72, 40, 13, 11, 3, 1, 1, 1),  # rows that fill no warp, columns that fill no tile
        (1, 64, 64, 1, 3, 3, 1, 1, 1),
        (2, 128, 256, 28, 28, 3, 2, 1, 1),
        (40, 256, 320, 7, 7, 3, 1, 1, 1),
        (4, 64, 1000, 14, 14, 1, 1, 0, 1),
        (32, 64, 192, 56, 56, 3, 1, 1, 1),  # several tiles for each block
        (64, 64, 64, 56, 56, 3, 1, 1, 1),
        (64, 128, 512, 28, 28, 1, 1, 0, 1),
        (64, 512, 2048, 9, 7, 1, 1, 0, 1),
    ],
    ids=str,
)
def test_moments(device, case):
    """Batch norm's statistics of what the kernel stores, which it leaves itself in TF32."""
    if device == "cuda" and not runs_hopper_kernels():
        pytest.skip("needs compute capability 9.0")
    skip_large(device, case)
    set_tf32(device, True)
    x, w, b = drawn(case, device, torch.float32, "nhwc")
    b *= 30  # a mean much larger than the deviation
    k, geometry = case[2], {"stride": case[6], "padding": case[7]}
    mean, var = (torch.full((k,), v, device=device) for v in (0.0, 1.0))

    def block():
        affine = mean, var, torch.ones_like(mean), torch.zeros_like(mean)
        return F.conv_bn_relu2d(x, w, b, *affine, training=True, momentum=1.0, **geometry)

    with braze.backend(conv2d=NAME) if device == "cuda" else contextlib.nullcontext():
        z = F.conv2d(x, w, b, **geometry)
        if device == "cuda":
            assert "given_moments" in cuda_kernels_of(block)
        result = block()
    z = z.double()
    for actual, exact in ((mean, z.mean((0, 2, 3))), (var, z.var((0, 2, 3)))):
        # In the place of stock's the exact values, rounded; deviations were summed in fp32.
        assert_by_rule(actual, exact.float(), exact, ulps=64, terms=z.numel() // k)
    exact = stock.relu(stock.batch_norm(z, None, None, training=True))
    stocks = stock.relu(stock.batch_norm(z.float(), None, None, training=True))
    assert_by_rule(result, stocks, exact, ulps=64, terms=z.numel() // k)


# where `auto` takes one of braze's kernels, as the cases above
TAKEN = [
    ("wgrad", (64, 308, 1232, 1, 1, 1, 1, 0, 1)),
    ("wgrad", (64, 888, 222, 1, 1, 1, 1, 0, 1)),
    ("fprop", (64, 1232, 308, 1, 1, 1, 1, 0, 1)),
    ("fprop", (64, 32, 48, 112, 112, 1, 2, 0, 1)),
]


@pytest.mark.parametrize(("which", "case"), TAKEN, ids=str)
def test_where_auto_takes_products(hopper, which, case):
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    tensors = x, w, b, gradient(case, x, w, "nhwc")
    assert "braze" in cuda_kernels_of(lambda: run(which, case, *tensors))
    check(run(which, case, *tensors), which, case, tensors)


# The same of contiguous tensors, by precision.
TAKEN_CONTIGUOUS = [
    ("dgrad", "float32", (64, 192, 32, 28, 28, 1, 1, 0, 1)),
    ("fprop", "float32", (64, 48, 48, 56, 56, 1, 1, 0, 1)),
    ("fprop", "float32", (64, 144, 32, 28, 28, 1, 1, 0, 1)),
    ("wgrad", "float32", (64, 832, 48, 7, 7, 1, 1, 0, 1)),
    ("fprop", "tf32", (64, 480, 96, 14, 14, 1, 1, 0, 1)),
    ("wgrad", "tf32", (64, 120, 336, 28, 28, 1, 2, 0, 1)),
    ("fprop", "bfloat16", (64, 48, 120, 56, 56, 1, 2, 0, 1)),
    ("wgrad", "bfloat16", (64, 61, 366, 28, 28, 1, 1, 0, 1)),
    ("fprop", "bfloat16", (64, 3, 24, 64, 64, 3, 1, 1, 1)),
    ("dgrad", "bfloat16", (64, 5, 7, 32, 32, 3, 1, 1, 1)),
    ("wgrad", "bfloat16", (64, 1, 32, 28, 28, 5, 1, 2, 1)),
    ("fprop", "tf32", (64, 3, 64, 64, 64, 7, 2, 3, 1)),
    ("wgrad", "tf32", (64, 3, 24, 32, 32, 2, 1, 0, 1)),
    ("wgrad", "float32", (64, 3, 32, 64, 64, 3, 2, 1, 1)),
]


@pytest.mark.parametrize(("which", "precision", "case"), TAKEN_CONTIGUOUS, ids=str)
def test_where_auto_takes_contiguous_tensors_as_they_are(hopper, which, precision, case):
    tf32 = precision == "tf32"
    set_tf32("cuda", tf32)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x, w, b = drawn(case, "cuda", dtype, "nchw")
    tensors = x, w, b, gradient(case, x, w, "nchw")
    call = functools.partial(run, which, case, *tensors, tf32)
    kernels = cuda_kernels_of(call)
    assert "braze" in kernels
    assert "transpose" not in kernels
    check(call(), which, case, tensors, tf32)


@pytest.mark.parametrize(
    ("name", "why", "shape", "weight", "arguments"),
    [
        ("pointwise", "1 x 1 filters", (2, 8, 9, 9), (8, 8, 3, 3), {}),
        ("pointwise", "1 x 1 filters", (2, 8, 9, 9), (8, 8, 1, 1), {"padding": 1}),
        ("pointwise", "1 x 1 filters", (2, 8, 9, 9), (8, 4, 1, 1), {"groups": 2}),
        ("implicit_gemm_wgmma", "one group", (2, 16, 9, 9), (8, 8, 3, 3), {"groups": 2}),
        ("implicit_gemm_wgmma", "multiple of 16 bytes", (2, 9, 9, 9), (8, 9, 3, 3), {}),
        ("implicit_gemm_wgmma", "strides up to 8", (2, 8, 20, 20), (8, 8, 3, 3), {"stride": 9}),
        ("implicit_gemm_wgmma", "padding up to 128", (1, 8, 9, 9), (8, 8, 3, 3), {"padding": 129}),
        ("implicit_gemm_wgmma", "up to 256", (1, 8, 300, 9), (8, 8, 3, 1), {"dilation": 130}),
    ],
)
def test_refuses_by_name_and_leaves_the_rest_to_others(gpu, name, why, shape, weight, arguments):
    if name == "implicit_gemm_wgmma" and not runs_hopper_kernels():
        pytest.skip("needs compute capability 9.0")
    form = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    x, w = (
        torch.randn(shape, device="cuda").to(**form),
        torch.randn(weight, device="cuda").to(**form),
    )
    settings = {
        k: pair(arguments.get(k, d)) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    with pytest.raises(RuntimeError, match=why):
        torch.ops.braze.conv2d(
            x, w, None, *settings.values(), arguments.get("groups", 1), False, False, name
        )
    exact = stock.conv2d(x.double(), w.double(), **arguments)
    assert_by_rule(F.conv2d(x, w, **arguments), stock.conv2d(x, w, **arguments), exact)


@pytest.mark.parametrize("channels", [(72, 140), (64, 60), (30, 32)], ids=str)
@pytest.mark.parametrize("which", PASSES)
def test_special_values_in_parts(gpu, which, channels):
    """fp32's parts of infinities and NaN would not add up: tiles that have them are computed
    otherwise, and the others as ever."""
    if not runs_hopper_kernels():
        pytest.skip("needs compute capability 9.0")
    set_tf32("cuda", False)
    c, k = channels
    case = (9, c, k, 10, 9, 3, 1 if which == "wgrad" else 2, 1, 1)
    x, w, b = drawn(case, "cuda", torch.float32, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    k, p, q = dy.shape[1:]
    inf, nan = float("inf"), float("nan")
    if which == "fprop":
        x[0, 3, 2, 2], x[8, c - 1, 9, 8], w[k - 1, 5, 1, 1] = inf, nan, -inf
    elif which == "dgrad":
        dy[0, 3, 2, 2], dy[8, k - 1, p - 1, q - 1], w[5, c - 2, 1, 1] = inf, nan, -inf
    else:
        dy[0, 3, 2, 2], x[8, c - 1, 5, 5] = inf, nan
    actual = run(which, case, x, w, b, dy, backend="implicit_gemm_wgmma")
    exact = reference(which, case, *(t.double().cpu() for t in (x, w, b, dy)))
    assert not exact.isfinite().all()
    assert exact.isfinite().any()
    # In the place of stock's the exact result, rounded: the floor is that of some 1000 terms.
    assert_by_rule(actual, exact.to("cuda", torch.float32), exact, ulps=16)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", PASSES)
def test_what_shares_a_scale_with_an_infinity(gpu, which, value):
    """Parts of fp32 are scaled by what is largest in a whole tensor: of what is finite, or nothing
    would be left of tiles that an infinity elsewhere has no part in."""
    if not runs_hopper_kernels():
        pytest.skip("needs compute capability 9.0")
    set_tf32("cuda", False)
    # Tiles of images without it, and of channels.
    case = (9, 256, 32, 10, 9, 3, 1, 1, 1) if which == "wgrad" else (40, 72, 60, 10, 9, 3, 1, 1, 1)
    x, w, b = drawn(case, "cuda", torch.float32, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    (dy if which == "dgrad" else x)[0, 0, 0, 0] = value
    actual = run(which, case, x, w, b, dy, backend="implicit_gemm_wgmma")
    exact = reference(which, case, *(t.double().cpu() for t in (x, w, b, dy)))
    special = (actual[:, :128] if which == "wgrad" else actual[:2]).isfinite().logical_not()
    assert special.any()
    assert_by_rule(actual, exact.to("cuda", torch.float32), exact, ulps=16)


def test_contiguous_tensors_are_refused(gpu):
    if not runs_hopper_kernels():
        pytest.skip("needs compute capability 9.0")
    case = WINDOWS[1]
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nchw")
    with pytest.raises(RuntimeError, match="channels-last"):
        run("fprop", case, x, w, b, None, backend="implicit_gemm_wgmma")


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", ["pointwise", "implicit_gemm_wgmma"])
def test_repeatable(gpu, dtype, name, which):
    set_tf32("cuda", False)
    if not runs_hopper_kernels() or (name == "implicit_gemm_wgmma" and dtype == torch.float64):
        pytest.skip("not the kernel's")
    case = POINTWISE[-1] if name == "pointwise" else WINDOWS[-2]
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    first = run(which, case, x, w, b, dy, backend=name)
    for _ in range(50):
        assert torch.equal(run(which, case, x, w, b, dy, backend=name), first)


def test_strided_views(gpu):
    """Slices of larger tensors: pixels further apart than their channels."""
    if not runs_hopper_kernels():
        pytest.skip("needs compute capability 9.0")
    wide = torch.randn(4, 12, 10, 96, device="cuda").bfloat16()
    x = wide[::2, 1:, :, 16:80].permute(0, 3, 1, 2)
    assert not x.is_contiguous(memory_format=torch.channels_last)
    for name, size, padding in (("implicit_gemm_wgmma", 3, 1), ("pointwise", 1, 0)):
        case = (2, 64, 48, 11, 10, size, 1, padding, 1)
        _, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
        out = run("fprop", case, x, w, b, None, backend=name)
        check(out, "fprop", case, (x, w, b, out))


def fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    pointwise = data.draw(st.booleans())
    name = "pointwise" if pointwise else "implicit_gemm_wgmma"
    form = data.draw(st.sampled_from(sorted(FORMATS))) if pointwise else "nhwc"
    if device == "cuda" and not runs_hopper_kernels():
        return
    unit = 1 if pointwise else 8
    size = 1 if pointwise else draw(1, 5)
    dilation, padding = (1, 0) if pointwise else (draw(1, 3), draw(0, 6))
    stride = draw(1, 3)
    least = max(1, dilation * (size - 1) + 1 - 2 * padding)
    case = (
        *(
            draw(1, 5),
            unit * draw(1, 40),
            unit * draw(1, 40),
            least + draw(0, 20),
            least + draw(0, 20),
        ),
        *(size, stride, padding, dilation),
    )
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    set_tf32(device, False)
    x, w, b = drawn(case, device, dtype, form)
    dy = gradient(case, x, w, form)
    for which in PASSES:
        if pointwise and device == "cuda" and pointwise_refuses(which, case, dtype, form, False):
            continue
        actual = run(which, case, x, w, b, dy, **own(device, name))
        check(actual, which, case, (x, w, b, dy))


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


@pytest.mark.parametrize("form", FORMATS)
def test_the_tests_reject_a_wrong_kernel(device, dtype, form):
    """A kernel whose runs of pixels go on into the next line one pixel late, and one that forgets
    the last tap."""
    case = (2, 16, 16, 9, 9, 3, 1, 1, 1)
    x, w, b = drawn(case, device, dtype, form)
    right = reference("fprop", case, x, w, b, None)
    n, k, p, q = right.shape
    run_of_pixels = right.permute(1, 0, 2, 3).reshape(k, -1)
    late = run_of_pixels.roll(1, 1).view(k, n, p, q).permute(1, 0, 2, 3)
    short = w.clone()
    short[:, :, 2, 2] = 0
    for wrong in (late, reference("fprop", case, x, short, b, None)):
        with pytest.raises(AssertionError):
            check(wrong, "fprop", case, (x, w, b, right))
