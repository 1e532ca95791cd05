"""Depthwise convolutions: the CUDA kernel `depthwise` by name, where it must not refuse, and what
`auto` makes of it. The same cases run on the CPU."""

import contextlib

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, fuzzed

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# n, c, h, w, filter, stride, padding
CASES = [
    (1, 1, 1, 1, 3, 1, 1),
    (3, 8, 7, 7, 3, 1, 1),
    (2, 32, 56, 56, 3, 2, 1),
    (2, 19, 10, 10, 5, 2, 2),  # odd channels: no vectors
    (2, 58, 28, 28, 3, 1, 1),  # 4-byte vectors in 16 bits
    (2, 116, 14, 14, 3, 1, 1),  # 8-byte vectors
    (5, 2048, 7, 7, 3, 1, 1),
    (2, 1025, 4, 3, 5, 1, 2),
    (4, 24, 29, 31, 7, 1, 3),
    (2, 16, 13, 17, 7, 2, 3),
    (3, 40, 2, 3, 7, 1, 3),  # smaller than the filter
    (3, 12, 1, 5, 5, 2, 2),
    (2, 10, 8, 130, 3, 1, 1),  # several column tiles
    (1, 3, 3, 1000, 3, 2, 1),
    (1, 3, 700, 3, 5, 1, 2),
    (2, 9, 11, 13, 5, 1, (1, 2)),
    (2, 16, 11, 13, 5, 2, (3, 0)),
    (2, 24, 12, 9, 3, 2, 0),
    (2, 24, 12, 9, 3, 2, 2),
    (2, 17, 15, 8, 7, 1, 6),
    (0, 8, 9, 9, 3, 1, 1),
    (150, 5, 3, 3, 3, 1, 1),  # more images than blocks
    (16, 144, 30, 34, 3, 1, 1),  # large tiles, of 48 channels
    (20, 72, 21, 40, 3, 2, 1),  # of 72
    (12, 120, 19, 29, 5, 1, 2),  # of 32, the last block's filled in part
    (12, 64, 29, 31, 5, 2, 2),
    (24, 96, 15, 18, 7, 1, 3),
]


def by_name(device, name="depthwise"):
    return contextlib.nullcontext() if device == "cpu" else braze.backend(conv2d=name)


def drawn(case, device, dtype, form):
    n, c, h, w, size, _, _ = case
    x = torch.randn(n, c, h, w, device=device).to(dtype, memory_format=FORMATS[form])
    weight = torch.randn(c, 1, size, size, device=device).to(dtype, memory_format=FORMATS[form])
    bias = torch.randn(c, device=device).to(dtype)
    return [t.requires_grad_() for t in (x, weight, bias)]


def convolution(function, case):
    c, stride, padding = case[1], case[5], case[6]
    return lambda x, w, b=None: function(x, w, b, stride, padding, 1, c)


def kernels_of(function):
    """The names of the CUDA kernels that run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_stock(device, dtype, case, form):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("not the kernel's")
    inputs = drawn(case, device, dtype, form)
    with by_name(device):
        out = check_against_stock(
            convolution(F.conv2d, case), convolution(stock.conv2d, case), inputs
        )
    assert out.is_contiguous(memory_format=FORMATS[form])


@pytest.mark.parametrize("form", FORMATS)
def test_which_kernel_runs(gpu, dtype, form):
    case = (64, 96, 56, 56, 3, 1, 1)
    inputs = drawn(case, "cuda", dtype, form)

    def forward():
        return convolution(F.conv2d, case)(*inputs)

    def backward(out):
        return torch.autograd.grad(out, inputs[:2], torch.ones_like(out))

    if dtype == torch.float64:
        with by_name("cuda"), pytest.raises(RuntimeError, match="cannot take these arguments"):
            forward()
        return
    with by_name("cuda"):
        out = forward()
        assert "depthwise" in kernels_of(forward)
        names = kernels_of(lambda: backward(out))
        assert "wgrad_kernel" in names
        assert "depthwise" in names
    # By itself where it was measured not to be slower, else cuDNN.
    out = forward()
    assert "depthwise::" in kernels_of(forward)
    names = kernels_of(lambda: backward(out))
    assert "depthwise::" in names
    assert ("wgrad_kernel" in names) == (form == "nchw" or dtype != torch.float32)


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "auto"])
def test_small_tensors_go_by_tiles(gpu, dtype, measured):
    if dtype == torch.float64:
        pytest.skip("not the kernel's")
    torch.backends.cudnn.benchmark = measured
    inputs = drawn((1, 96, 14, 14, 7, 1, 3), "cuda", dtype, "nhwc")
    assert "tiles_kernel" in kernels_of(lambda: F.conv2d(*inputs, padding=3, groups=96))


def test_small_tensors_go_to_cudnn(gpu):
    inputs = drawn((2, 32, 56, 56, 3, 1, 1), "cuda", torch.bfloat16, "nchw")
    assert "braze" not in kernels_of(lambda: F.conv2d(*inputs, padding=1, groups=32))


@pytest.mark.parametrize(
    ("why", "weight", "arguments"),
    [
        ("filter of 4", (8, 1, 4, 4), {"groups": 8}),
        ("filter of 3 x 5", (8, 1, 3, 5), {"groups": 8}),
        ("stride 3", (8, 1, 3, 3), {"groups": 8, "stride": 3}),
        ("strides 1 and 2", (8, 1, 3, 3), {"groups": 8, "stride": (1, 2)}),
        ("dilation 2", (8, 1, 3, 3), {"groups": 8, "dilation": 2}),
        ("padding 3", (8, 1, 3, 3), {"groups": 8, "padding": 3}),
        ("two filters a channel", (16, 1, 3, 3), {"groups": 8}),
        ("four groups", (8, 2, 3, 3), {"groups": 4}),
    ],
)
def test_refuses_by_name_and_leaves_the_rest_to_others(gpu, why, weight, arguments):
    x, w = torch.randn(2, 8, 12, 12, device="cuda"), torch.randn(weight, device="cuda")
    with by_name("cuda"), pytest.raises(RuntimeError, match="cannot take these arguments"):
        F.conv2d(x, w, **arguments)
    out = F.conv2d(x, w, **arguments)
    reference = stock.conv2d(x.double(), w.double(), **arguments)
    assert_by_rule(out, stock.conv2d(x, w, **arguments), reference)


@pytest.mark.parametrize("form", FORMATS)
def test_strided_views(device, dtype, form):
    """Slices of larger tensors and storage offsets: the 16-byte copies begin anywhere, or are not
    taken."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("not the kernel's")
    case = (2, 24, 14, 14, 3, 1, 1)
    weight = torch.randn(24, 1, 3, 3, device=device).to(dtype)
    storage = torch.randn(6 * 24 * 14 * 14 + 64, device=device).to(dtype)
    dense = storage[3 : 3 + 2 * 24 * 14 * 14]
    views = {
        "nchw": [dense.view(2, 24, 14, 14)],
        "nhwc": [
            dense.view(2, 14, 14, 24).permute(0, 3, 1, 2),
            storage[: 4 * 14 * 14 * 32].view(4, 14, 14, 32)[::2, :, :, :24].permute(0, 3, 1, 2),
        ],
    }[form]
    for x in views:
        with by_name(device):
            check_against_stock(
                convolution(F.conv2d, case),
                convolution(stock.conv2d, case),
                [x.requires_grad_(False), weight.requires_grad_()],
            )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [3, 5, 7])
def test_special_values(device, dtype, size, stride, form):
    """inf and NaN reach the results whose windows hold them and no others, whatever lies beside a
    tile's last column and row."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("not the kernel's")
    case = (2, 10, 17, 12, size, stride, size // 2)
    x, weight, _ = (t.detach() for t in drawn(case, device, dtype, form))
    places = [(0, 0, 0, 0), (0, 3, 8, 11), (1, 9, 16, 0), (1, 2, 16, 11), (1, 4, 9, 9)]
    values = [float("inf"), float("nan"), -float("inf"), float("inf"), float("nan")]
    for place, value in zip(places, values, strict=True):
        x[place] = value
    c, padding = case[1], case[6]
    reference = stock.conv2d(x.double(), weight.double(), None, stride, padding, 1, c)
    with by_name(device):
        out = F.conv2d(x, weight, None, stride, padding, 1, c)
        assert_by_rule(out, reference.to(dtype), reference)
        dy = torch.randn_like(reference).to(dtype)
        mask, geometry = [False, True, False], ([stride] * 2, [padding] * 2, [1, 1], c)
        backend = "auto" if device == "cpu" else "depthwise"
        dw = torch.ops.braze.conv2d_backward(dy, x, weight, *geometry, mask, backend=backend)[1]
    # Each weight's gradient from the pixels that it meets; padding is zeros that meet finite dy.
    padded = stock.pad(x.double(), [padding] * 4)
    p, q = reference.shape[2:]
    seen = False
    for r in range(size):
        for s in range(size):
            met = padded[:, :, r : r + stride * p : stride, s : s + stride * q : stride]
            expected = (met[:, :, :p, :q] * dy.double()).sum((0, 2, 3))
            actual, special = dw[:, 0, r, s].double(), ~expected.isfinite()
            assert torch.equal(~actual.isfinite(), special), (r, s)
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(actual), kind(expected)), (r, s, kind.__name__)
            seen |= special.any().item()
    assert seen
    dy[0, 5, 0, 0], dy[1, 6, p - 1, q - 1] = float("inf"), float("nan")
    finite_weight = weight.abs() + 0.5
    with by_name(device):
        dx = torch.ops.braze.conv2d_backward(
            dy, x, finite_weight, *geometry, [True, False, False], backend=backend
        )[0]
    wide = dy.double(), x.double().nan_to_num(0, 0, 0), finite_weight.double()
    expected = torch.ops.aten.convolution_backward(
        *wide, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], c, [True, False, False]
    )[0]
    assert_by_rule(dx, expected.to(dtype), expected)


@pytest.mark.parametrize("form", FORMATS)
def test_repeatable(gpu, form):
    case = (64, 96, 28, 28, 5, 1, 2)
    x, w, b = drawn(case, "cuda", torch.bfloat16, form)
    with by_name("cuda"):
        first = None
        for _ in range(5):
            out = convolution(F.conv2d, case)(x, w, b)
            result = [out, *torch.autograd.grad(out, (x, w), torch.ones_like(out) * x.detach())]
            first = first or result
            assert all(torch.equal(a, e) for a, e in zip(result, first, strict=True))


def test_more_than_2_to_the_31_elements(gpu):
    n, c, size = 700, 64, 224  # 2.2e9 elements, 4.5 GB in 16 bits
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    x = torch.randn(1, c, size, size, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    w = torch.randn(c, 1, 3, 3, device="cuda", dtype=torch.bfloat16)
    many = torch.empty(
        n, c, size, size, device="cuda", dtype=x.dtype, memory_format=torch.channels_last
    )
    many.copy_(x.expand_as(many))
    with by_name("cuda"):
        one = F.conv2d(x, w, None, 2, 1, 1, c)
        out = F.conv2d(many, w, None, 2, 1, 1, c)
    assert all(torch.equal(out[i], one[0]) for i in (0, n // 2, n - 1))


def fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size = data.draw(st.sampled_from([3, 5, 7]))
    padding = draw(0, size - 1), draw(0, size - 1)
    least = [max(1, size - 2 * p) for p in padding]
    h, w = (low + draw(0, 40) for low in least)
    channels = draw(1, 80) if draw(0, 1) else 8 * draw(1, 40)
    case = (draw(1, 6), channels, h, w, size, draw(1, 2), padding)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    inputs = drawn(case, device, dtype, data.draw(st.sampled_from(sorted(FORMATS))))
    with by_name(device):
        check_against_stock(convolution(F.conv2d, case), convolution(stock.conv2d, case), inputs)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A kernel whose strips' first column is the neighbour's last, and one that forgets a row."""
    case = (2, 8, 14, 14, 3, 1, 1)
    x, w, b = drawn(case, device, dtype, "nchw")
    right = convolution(stock.conv2d, case)

    def shifted(x, w, b):
        out = right(x, w, b)
        return torch.cat([out[..., :7], out[..., 6:13]], dim=3)

    def short(x, w, b):
        return right(torch.cat([x[:, :, :13], torch.zeros_like(x[:, :, 13:])], dim=2), w, b)

    for wrong in (shifted, short):
        with pytest.raises(AssertionError):
            check_against_stock(wrong, right, [x, w, b])
