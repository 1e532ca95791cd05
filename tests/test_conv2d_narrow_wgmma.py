"""First layers: the CUDA kernel `narrow_input_wgmma` by name, forward and weight gradient, where it
must not refuse."""

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
    pair,
    reference,
    run,
    set_tf32,
)

import braze
import braze.nn.functional as F
from common import assert_by_rule, cuda_kernels_of, fuzzed, hopper_only

NAME = "narrow_input_wgmma"
# n, c, k, h, w, filter, stride, padding, dilation
CASES = [
    (2, 3, 64, 224, 224, 7, 2, 3, 1),  # ResNet
    (2, 3, 32, 224, 224, 3, 2, 1, 1),  # MobileNet, EfficientNet
    (1, 3, 64, 224, 224, 3, 1, 1, 1),  # VGG
    (5, 3, 16, 32, 32, 3, 1, 1, 1),  # CIFAR
    (5, 3, 64, 32, 32, 5, 1, 2, 1),
    (3, 4, 32, 84, 84, 8, 4, 0, 1),  # Nature-CNN
    (9, 1, 32, 28, 28, 3, 1, 1, 1),
    (5, 3, 24, 31, 31, 2, 1, 0, 1),  # airbench
    (1, 3, 40, 33, 37, 3, 2, 1, 1),  # rows that begin within a word
    (2, 3, 72, 13, 300, 3, 1, 1, 1),  # wide; filters beyond the blocks of 64
    (2, 2, 32, 300, 5, 3, 1, 2, 1),  # tall; padding as wide as the filter
    (1, 2, 8, 5, 7, 3, 1, 5, 1),  # padding over the filter
    (2, 3, 64, 1, 1, 1, 1, 0, 1),
    (2, 3, 200, 12, 20, 6, (2, 1), (0, 3), 1),
    (2, 1, 64, 40, 1001, 3, (3, 2), (1, 0), 1),  # tiles across
    (150, 3, 24, 6, 5, 3, 1, 1, 1),  # more images than blocks of some devices
]
#: of 16 bits only: longer filter rows
LONG = [(2, 3, 64, 99, 97, 11, 4, 2, 1), (1, 2, 24, 40, 50, 16, 2, 7, 1)]
PRECISIONS = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "tf32": (torch.float32, True),
    "fp32": (torch.float32, False),
}


@pytest.fixture(params=PRECISIONS)
def precision(request, gpu):
    hopper_only("cuda")
    dtype, tf32 = PRECISIONS[request.param]
    set_tf32("cuda", tf32)
    return dtype, tf32


def forward(case, x, w, b, tf32):
    return run("fprop", case, x, w, b, None, tf32, backend=NAME)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES + LONG, ids=str)
def test_matches_stock(precision, case, form):
    """form: of the weights."""
    dtype, tf32 = precision
    if dtype == torch.float32 and case in LONG:
        pytest.skip("rows of 16 bits")
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    w = w.contiguous(memory_format=FORMATS[form])
    for bias in (b, None):
        actual = forward(case, x, w, bias, tf32)
        added = torch.zeros_like(b) if bias is None else b
        check(actual, "fprop", case, (x, w, added, b), tf32)


def has_weight_gradient(case):
    """Strides of 1 and 2, up to 8 x 8, more than a column of results."""
    width = case[4] + 2 * pair(case[7])[1] - case[5]
    across = pair(case[6])[1]
    return across <= 2 and case[5] <= 8 and width // across > 0


def weight_gradient(case, x, w, b, dy, tf32):
    return run("wgrad", case, x, w, b, dy, tf32, backend=NAME)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_gradients_match_stock(precision, case, form):
    """form: of the weights."""
    dtype, tf32 = precision
    if not has_weight_gradient(case):
        pytest.skip("not the kernel's")
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    w = w.contiguous(memory_format=FORMATS[form])
    dy = gradient(case, x, w, "nhwc")
    actual = weight_gradient(case, x, w, b, dy, tf32)
    check(actual, "wgrad", case, (x, w, b, dy), tf32)


SPECIAL = [
    (2, 3, 24, 17, 13, 3, 1, 1, 1),
    (2, 3, 24, 17, 14, 7, 2, 3, 1),
    (2, 1, 24, 18, 13, 5, 1, 2, 1),
    (2, 4, 24, 18, 21, 2, 2, 0, 1),
    (40, 3, 24, 60, 40, 3, 1, 1, 1),  # several tiles for each block
]


@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_special_values_in_weight_gradients(precision, case):
    """Each weight's gradient from the pixels that it meets; padding is zeros that meet finite
    dy."""
    dtype, tf32 = precision
    if not has_weight_gradient(case):
        pytest.skip("not the kernel's")
    n, c, _, h, w_ = case[:5]
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    x[0, 0, 0, 0], x[n - 1, c - 1, h - 1, w_ - 1] = float("inf"), float("nan")
    x[n // 2, 0, h // 2, w_ - 1] = -float("inf")
    dy = gradient(case, x, w, "nhwc")
    dw = weight_gradient(case, x, w, b, dy, tf32)
    (top, left), (down, right) = pair(case[7]), pair(case[6])
    padded = stock.pad(x.double(), [left, left, top, top])
    p, q = dy.shape[2:]
    for r in range(case[5]):
        for s in range(case[5]):
            met = padded[:, :, r : r + down * p : down, s : s + right * q : right][:, :, :p, :q]
            expected = torch.einsum("ncpq,nkpq->kcpq", met, dy.double()).sum((2, 3))
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(dw[:, :, r, s]), kind(expected)), (r, s, kind.__name__)
    # With finite values in their place the rest is what it is without them.
    finite = x.isfinite()
    close = x.where(finite, 100.0)
    actual = weight_gradient(case, close, w, b, dy, tf32)
    check(actual, "wgrad", case, (close, w, b, dy), tf32)


@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_special_values(precision, case):
    """inf and NaN reach the results that meet them and no others, also those beside a window that
    the products have with weights of zero."""
    dtype, tf32 = precision
    n, c, _, h, w_ = case[:5]
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    w = w.abs() + 0.5
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
    ulps = 2**13 if tf32 else 4
    out = forward(case, x, w, b, tf32)
    assert_by_rule(out, exact.to(dtype), exact, ulps, terms=c * case[5] ** 2)


@pytest.mark.parametrize(
    "case",
    [
        (9, 3, 64, 34, 30, 7, 2, 3, 1),
        (40, 3, 24, 13, 11, 3, 1, 1, 1),
        (1, 1, 72, 5, 6, 3, 1, 1, 1),
        (3, 2, 64, 300, 1, 3, 1, (1, 1), 1),  # every second position of a row of one
        (300, 3, 16, 32, 32, 3, 1, 1, 1),  # several tiles for each block
    ],
    ids=str,
)
def test_moments(precision, case):
    """Batch norm's statistics of what the kernel stores, which it leaves itself."""
    dtype, _ = precision
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    b *= 30  # a mean much larger than the deviation
    k, geometry = case[2], {"stride": case[6], "padding": case[7]}
    mean, var = (torch.full((k,), v, device="cuda", dtype=dtype) for v in (0.0, 1.0))
    affine = torch.ones_like(mean), torch.zeros_like(mean)

    def block():
        F.conv_bn_relu2d(x, w, b, mean, var, *affine, training=True, momentum=1.0, **geometry)

    with braze.backend(conv2d=NAME):
        z = F.conv2d(x, w, b, **geometry).double()
        block()
        assert "given_moments" in cuda_kernels_of(block)
    for actual, exact in ((mean, z.mean((0, 2, 3))), (var, z.var((0, 2, 3)))):
        # In the place of stock's the exact values, rounded; deviations were summed in fp32.
        assert_by_rule(actual, exact.to(dtype), exact, ulps=64, terms=z.numel() // k)


@pytest.mark.parametrize("activation", ["relu", "relu6"])
def test_with_all_that_follows(precision, activation):
    """ReLU, and in evaluation mode batch norm and a clamp, on the way out."""
    dtype, tf32 = precision
    ulps = 2**13 if tf32 else 8
    case = (3, 3, 64, 57, 60, 7, 2, 3, 1)
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    with braze.backend(conv2d=NAME):
        out = F.conv2d_relu(x, w, b, 2, 3)
    exact = stock.conv2d(x.double(), w.double(), b.double(), 2, 3).relu()
    assert_by_rule(out, stock.conv2d(x, w, b, 2, 3).relu(), exact, ulps=ulps, what="relu")
    layers = torch.nn.Conv2d(3, 64, 7, 2, 3), torch.nn.BatchNorm2d(64)
    last = torch.nn.ReLU() if activation == "relu" else torch.nn.ReLU6()
    model = torch.nn.Sequential(*layers, last).cuda().to(dtype).eval()
    model = model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        model[1].running_mean.normal_(), model[1].running_var.uniform_(0.5, 2)
        exact = torch.nn.Sequential(*layers, last).double()(x.double())
        model.to(dtype)
        expected = model(x)
        with braze.backend(conv2d=NAME):
            out = braze.convert(model)(x)
    assert_by_rule(out, expected, exact, ulps=ulps, what=activation)


def test_repeatable_also_in_a_graph(precision):
    """Kernels of a graph may start before the one before them is done."""
    dtype, tf32 = precision
    case = (64, 3, 64, 112, 112, 7, 2, 3, 1)
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    images = torch.randn_like(x)
    dy = gradient(case, x, w, "nhwc")

    def step():
        x.copy_(images)
        results = [forward(case, x, w, b, tf32)]
        if has_weight_gradient(case):
            results.append(weight_gradient(case, x, w, b, dy, tf32))
        return results

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(10):
        for t in (x, *results):
            t.zero_()
        graph.replay()
        assert all(torch.equal(a, e) for a, e in zip(results, expected, strict=True))


def test_more_than_2_to_the_31_elements(hopper):
    check_first_layer_beyond_31_bits(NAME)


@pytest.mark.parametrize(
    ("why", "case", "dtype"),
    [
        ("strides of 1 and 2", (2, 3, 8, 12, 12, 3, 4, 1, 1), torch.bfloat16),
        ("strides of 1 and 2", (2, 3, 8, 12, 12, 3, 4, 1, 1), torch.float32),
        ("up to 8 x 8", (2, 3, 8, 12, 12, 9, 1, 4, 1), torch.bfloat16),
    ],
)
def test_weight_gradients_that_are_refused(hopper, why, case, dtype):
    x, w, b = drawn(case, "cuda", dtype, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    with pytest.raises(RuntimeError, match=why):
        run("wgrad", case, x, w, b, dy, True, backend=NAME)
    with pytest.raises(RuntimeError, match="no input gradients"):
        run("dgrad", case, x, w, b, dy, True, backend=NAME)


@pytest.mark.parametrize(
    ("why", "shape", "weight", "arguments"),
    [
        ("four channels", (2, 5, 12, 12), (8, 5, 3, 3), {}),
        ("one group", (2, 4, 12, 12), (8, 2, 3, 3), {"groups": 2}),
        ("no dilation", (2, 3, 12, 12), (8, 3, 3, 3), {"dilation": 2}),
        ("16 columns", (1, 3, 12, 70), (8, 3, 3, 17), {}),
        ("every stride", (1, 3, 40, 70), (8, 3, 3, 3), {"stride": 3}),
        ("side by side", (2, 3, 12, 12), (8, 3, 3, 3), {}),
        ("multiples of 16 bytes", (2, 3, 12, 12), (12, 3, 3, 3), {}),
    ],
)
def test_refuses_by_name(hopper, why, shape, weight, arguments):
    x, w = (torch.randn(s, device="cuda").bfloat16() for s in (shape, weight))
    if why != "side by side":
        x = x.contiguous(memory_format=torch.channels_last)
    with braze.backend(conv2d=NAME), pytest.raises(RuntimeError, match=why):
        F.conv2d(x, w, **arguments)


def fuzz(data, device):
    hopper_only(device)
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    dtype, tf32 = data.draw(st.sampled_from(list(PRECISIONS.values())))
    is_16_bit = dtype != torch.float32
    strides = [1, 2, 4, 8] if is_16_bit else [1, 2, 4]
    size = draw(1, 16 if is_16_bit else 8)
    stride = draw(1, 5), data.draw(st.sampled_from(strides))
    padding = draw(0, 5), draw(0, 5)
    least = [max(1, size - 2 * p) for p in padding]
    h, w = (least[0] + stride[0] + draw(0, 60), least[1] + draw(0, 60))
    case = (draw(1, 5), draw(1, 4), 8 * draw(1, 17), h, w, size, stride, padding, 1)
    set_tf32(device, tf32)
    x, weight, b = drawn(case, device, dtype, "nhwc")
    actual = forward(case, x, weight, b, tf32)
    check(actual, "fprop", case, (x, weight, b, b), tf32)
    if has_weight_gradient(case):
        dy = gradient(case, x, weight, "nhwc")
        actual = weight_gradient(case, x, weight, b, dy, tf32)
        check(actual, "wgrad", case, (x, weight, b, dy), tf32)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)
del test_fuzzed_on_cpu  # the kernel is a GPU's


@pytest.mark.parametrize("case", [SPECIAL[0], SPECIAL[4]], ids=str)
def test_the_largest_numbers_of_fp32(hopper, case):
    """Near the largest number the first of two parts would overflow."""
    set_tf32("cuda", False)
    x, w, b = drawn(case, "cuda", torch.float32, "nhwc")
    x[0, 0, 3, 3] = 3.4028e38
    w *= 1e-3
    w[1, 0, 1, 1] = 1e-35
    tensors = x, w, b, b
    check(forward(case, x, w, b, False), "fprop", case, tensors)
    w[2, 0, 0, 0] = 3.4028e38
    x = x.clamp(-3, 3) * 1e-6
    check(forward(case, x, w, b, False), "fprop", case, (x, w, b, b))


def test_special_weights_in_fp32(hopper):
    """A filter with an infinity or NaN leaves the others alone."""
    set_tf32("cuda", False)
    case = SPECIAL[3]  # without padding, whose zeros would make NaN
    x, w, b = drawn(case, "cuda", torch.float32, "nhwc")
    w[3, 1, 0, 0], w[20, 3, 1, 1] = -float("inf"), float("nan")
    out = forward(case, x, w, b, False)
    exact = reference("fprop", case, x.double(), w.double(), b.double(), None)
    finite = [k for k in range(w.shape[0]) if k not in (3, 20)]
    assert_by_rule(out[:, finite], exact[:, finite].float(), exact[:, finite], 4, terms=16)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(out), kind(exact)), kind.__name__


def test_channels_far_apart_in_scale(hopper):
    """Each result, and each weight's gradient, is as accurate as its own products."""
    set_tf32("cuda", False)
    case = (4, 3, 64, 32, 30, 7, 2, 3, 1)
    x, w, b = drawn(case, "cuda", torch.float32, "nhwc")
    w *= 2.0 ** torch.linspace(-60, 60, 64, device="cuda").round()[:, None, None, None]
    x *= torch.tensor([2.0**-20, 1, 2.0**20], device="cuda")[None, :, None, None]
    b.zero_()
    dy = gradient(case, x, w, "nhwc")
    wide = [t.double() for t in (x, w, b, dy)]
    sizes = [t.abs() for t in wide]
    for which, actual in (
        ("fprop", forward(case, x, w, b, False)),
        ("wgrad", weight_gradient(case, x, w, b, dy, False)),
    ):
        error = (actual.double() - reference(which, case, *wide)).abs()
        bound = reference(which, case, *sizes)  # sums of the products' magnitudes
        assert (error / bound).max() < 4e-7, which  # a few roundings of fp32


def test_the_tests_reject_a_wrong_kernel(gpu):
    """One that takes the position behind a row's end for the next row's first."""
    case = (2, 3, 24, 20, 22, 3, 1, 1, 1)
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    tensors = x, w, b, b  # the last stands for a gradient that nobody asks for
    out = reference("fprop", case, *tensors)
    shifted = torch.cat([out[:, :, :, -1:], out[:, :, :, :-1]], dim=3)
    with pytest.raises(AssertionError):
        check(shifted, "fprop", case, tensors)
