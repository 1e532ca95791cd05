"""Convolutions in groups, channels last: the CUDA kernel `grouped` by name, pass by pass, where it
must not refuse. The cases run on the CPU too, by its own kernels; one has the same name."""

import pytest
import torch
import torch.nn.functional as stock
from conv2d_common import FORMATS, PASSES, check, geometry, reference, run
from hypothesis import strategies as st
from test_conv2d_products import set_tf32

import braze
import braze.nn.functional as F
from braze import _lib
from common import assert_by_rule, check_against_stock, cuda_kernels_of, fuzzed

NAME = "grouped"


def case_of(n, groups, channels, filters, size, taps=3, stride=1, padding=1, dilation=1):
    """channels, filters: of each group."""
    pair = lambda v: (v, v) if isinstance(v, int) else v  # noqa: E731
    c, k, taps = groups * channels, groups * filters, pair(taps)
    return (n, c, *pair(size), k, taps, pair(stride), pair(padding), dilation, groups)


CASES = [
    case_of(2, 32, 4, 4, (30, 29)),  # ResNeXt
    case_of(2, 32, 8, 8, 28, stride=2),
    case_of(3, 13, 8, 8, 14),  # RegNet
    case_of(3, 8, 12, 12, (11, 13)),
    case_of(2, 6, 16, 16, (15, 9), stride=2),
    case_of(5, 5, 24, 24, 7),
    case_of(2, 4, 24, 24, (27, 28), stride=2),
    case_of(2, 3, 40, 40, (9, 17)),
    case_of(3, 2, 48, 48, 7, stride=2),
    case_of(2, 4, 56, 56, 14),
    case_of(2, 2, 64, 64, (8, 10)),
    case_of(2, 2, 104, 104, 14),  # filters in parts
    case_of(2, 2, 112, 112, 14, stride=2),
    case_of(2, 3, 80, 20, (14, 13), 1, padding=0),  # ShuffleNet
    case_of(2, 3, 20, 80, 9, 1, padding=0),
    case_of(3, 4, 16, 8, (10, 11), 1, (2, 2), 0),
    case_of(2, 4, 8, 24, 12, 1, (2, 1), 1),
    case_of(2, 2, 32, 16, (13, 12), 2, 2, 0),
    case_of(2, 8, 4, 16, 10, (1, 3), 1, (0, 1)),
    case_of(2, 8, 16, 4, (8, 9), (3, 1), (2, 1), (1, 0)),
    case_of(2, 4, 8, 8, (19, 21), 5, 2, 2),
    case_of(2, 4, 8, 16, 17, 3, 1, 2, 2),  # dilation
    case_of(2, 3, 24, 8, (12, 15), (2, 3), 1, (1, 4), (2, 3)),
    case_of(2, 5, 3, 3, (9, 8)),  # channels that are copied one by one
    case_of(2, 3, 7, 5, (8, 9), stride=2),
    case_of(2, 7, 6, 10, 9),
    case_of(1, 9, 1, 2, (6, 7)),
    case_of(2, 2, 17, 33, (5, 9)),
    case_of(1, 2, 8, 8, (1, 2)),
    case_of(2, 4, 4, 4, (3, 2), padding=3),  # padding over the filter
    case_of(1, 4, 8, 8, (5, 190)),  # wide
    case_of(1, 2, 16, 8, (200, 3)),  # tall
    case_of(300, 3, 8, 8, 5),  # several images in a tile, several tiles for each block
    case_of(40, 2, 24, 24, 7),
    case_of(8, 16, 8, 8, 56),
]


# Of as many channels as filters, which the CPU's `grouped` takes where its vectors have whole ones.
IN_PLACE = [
    case_of(2, 16, 2, 2, (9, 11)),
    case_of(2, 8, 2, 2, (6, 5), 1, padding=0),
    case_of(3, 13, 4, 4, (14, 17)),
    case_of(2, 9, 4, 4, (9, 11), stride=2),
    case_of(2, 4, 4, 4, (3, 2), padding=3),
    case_of(1, 4, 4, 4, (5, 6), 3, 3, 2, 2),
    case_of(2, 6, 8, 8, (7, 40), 5, padding=2),
    case_of(2, 3, 8, 8, (10, 9), (2, 3), 2, (1, 0)),
    case_of(2, 3, 16, 16, (9, 10), stride=2),
    case_of(2, 2, 16, 16, (7, 15)),
    case_of(2, 2, 20, 20, (5, 17), 3, padding=2, dilation=2),
    case_of(2, 3, 24, 24, (9, 8), stride=2),
    case_of(2, 2, 56, 56, (4, 5)),
]


def refuses(device, dtype):
    return device == "cuda" and dtype == torch.float64


def named(device, name=NAME):
    return name if device == "cuda" else "auto"


def drawn(case, device, dtype, weight_form="nhwc"):
    n, c, h, w, k, taps, *_, groups = case
    x = torch.randn(n, c, h, w, device=device).to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(k, c // groups, *taps, device=device)
    weight = weight.to(dtype, memory_format=FORMATS[weight_form])
    b = torch.randn(k, device=device).to(dtype)
    dy = torch.randn_like(stock.conv2d(x, weight, None, *geometry(case), groups))
    return x, weight, b, dy.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_stock(device, dtype, case, which, tf32):
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    set_tf32(device, tf32)
    tensors = drawn(case, device, dtype)
    if refuses(device, dtype):
        with pytest.raises(RuntimeError, match="it takes float32, bfloat16 and float16"):
            run(which, case, *tensors, NAME)
        return
    result = check(which, case, tensors, named(device), tf32)
    if which != "wgrad":
        assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_in_place_on_the_cpu(case, which, precision):
    tensors = drawn(case, "cpu", precision)
    vector = {"generic": 16, "avx2": 32, "avx512": 64}[_lib.cpu_isa] // precision.itemsize
    channels, groups = case[1], case[-1]
    width = channels // groups
    fits = vector % width == 0 and channels >= vector
    if not fits and (width <= vector or which == "wgrad"):
        with pytest.raises(RuntimeError, match="grouped takes"):
            run(which, case, *tensors, NAME)
        return
    check(which, case, tensors, NAME, False)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [4, 8, 24])
def test_layers_and_kernels(device, dtype, channels, stride):
    """The public function, with filters in either format, and on a GPU which kernels run."""
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    set_tf32(device, False)
    case = case_of(2, 6, channels, channels, (16, 15), stride=stride)
    for form in FORMATS:
        x, w, b, _ = drawn(case, device, dtype, form)
        inputs = [t.requires_grad_() for t in (x, w, b)]
        what = {"stride": stride, "padding": 1, "groups": 6}
        with braze.backend(conv2d=named(device)):
            check_against_stock(
                lambda *t: F.conv2d(*t, **what),  # noqa: B023
                lambda *t: stock.conv2d(*t, **what),  # noqa: B023
                inputs,
            )
            if device == "cuda":
                forward = lambda: F.conv2d(x, w, b, **what)  # noqa: B023, E731
                assert "grouped_product" in cuda_kernels_of(forward)
                y = forward()
                ones = torch.ones_like(y)
                names = cuda_kernels_of(lambda: torch.autograd.grad(y, inputs, ones))  # noqa: B023
                assert "grouped_product" in names
                assert "grouped_wgrad" in names


@pytest.mark.parametrize(
    ("why", "which", "case", "form"),
    [
        ("several groups", "fprop", case_of(2, 1, 16, 16, 8), "nhwc"),
        ("channels-last", "fprop", case_of(2, 2, 16, 16, 8), "nchw"),
        ("strides of up to 2", "dgrad", case_of(2, 2, 16, 16, 9, stride=3), "nhwc"),
        ("strides of up to 2", "dgrad", case_of(2, 2, 8, 8, 9, stride=2, dilation=2), "nhwc"),
        ("shared memory", "fprop", case_of(1, 2, 4096, 8, 8), "nhwc"),
        ("up to 64", "fprop", case_of(1, 2, 8, 8, 140, stride=65), "nhwc"),
    ],
)
def test_refuses_by_name_and_leaves_the_rest_to_others(gpu, why, which, case, form):
    tensors = [
        t.to(memory_format=FORMATS[form]) if t.dim() == 4 else t
        for t in drawn(case, "cuda", torch.bfloat16)
    ]
    with pytest.raises(RuntimeError, match=why):
        run(which, case, *tensors, NAME)
    check(which, case, tensors, "auto")


@pytest.mark.parametrize(
    ("which", "width", "size", "stride", "takes_tiles"),
    [
        ("fprop", 56, 28, 1, True),
        ("fprop", 56, 28, 2, False),
        ("fprop", 24, 28, 2, True),
        ("dgrad", 56, 28, 2, True),
        ("wgrad", 56, 28, 2, False),
        ("wgrad", 24, 28, 2, False),
        ("wgrad", 24, 14, 1, True),
        ("wgrad", 24, 7, 1, False),
    ],
)
def test_strided_groups_go_to_the_implicit_product(gpu, which, width, size, stride, takes_tiles):
    """Right too, and neither is cuDNN's."""
    case = case_of(64, 16, width, width, size, stride=stride)
    tensors = drawn(case, "cuda", torch.bfloat16)
    names = cuda_kernels_of(lambda: run(which, case, *tensors, "auto"))
    assert ("grouped_" in names) == takes_tiles
    assert "braze" in names
    check(which, case, tensors, "auto")


def test_empty(device, dtype):
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    case = case_of(0, 4, 8, 8, 9)
    x, w, b, dy = drawn(case, device, dtype)
    assert run("fprop", case, x, w, b, dy, named(device)).shape == (0, 32, 9, 9)
    assert run("dgrad", case, x, w, b, dy, named(device)).shape == x.shape
    assert not run("wgrad", case, x, w, b, dy, named(device)).any()


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("begin", [0, 3, 4, 8])
def test_strided_views(device, dtype, which, begin):
    """Images that are parts of others, whose pixels begin anywhere or at 8 or 16 bytes."""
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    set_tf32(device, False)
    case = case_of(2, 4, 8, 4, (14, 18))
    _, w, b, dy = drawn(case, device, dtype)
    large = torch.randn(4, 20, 24, 48, device=device).to(dtype)
    x = large[::2, 1:15, 2:20, begin : begin + 32].permute(0, 3, 1, 2)
    large = torch.randn(4, 20, 24, 48, device=device).to(dtype)
    dy = large[1::2, 1:15, 2:20, begin : begin + 16].permute(0, 3, 1, 2)
    check(which, case, (x, w, b, dy), named(device))


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize(
    "case",
    [
        case_of(2, 6, 4, 4, (17, 13)),
        case_of(2, 6, 8, 8, (18, 13), stride=2),
        case_of(2, 3, 12, 20, (9, 13)),
        case_of(2, 4, 24, 16, (15, 16), stride=2),
        case_of(2, 5, 3, 3, (9, 10)),
    ],
    ids=str,
)
def test_special_values(device, dtype, which, case, tf32):
    """inf and NaN reach the results that meet them and no others: not those of other groups, nor of
    padding, whatever lies beside a tile."""
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    set_tf32(device, tf32)
    x, w, b, dy = drawn(case, device, dtype)
    w = w.abs() + 0.5  # an infinity times what is rounded to zero would be NaN
    if which == "wgrad":
        dy = dy.abs() + 0.5
    source = dy if which == "dgrad" else x
    n, c, h, wide = source.shape
    for value, place in (
        (float("inf"), (0, 0, 0, 0)),
        (float("nan"), (0, c - 1, h // 2, wide - 1)),
        (-float("inf"), (n - 1, c - 1, h - 1, wide - 1)),
    ):
        source[place] = value
    exact = exact_of(which, case, x, w, b, dy)
    assert not exact.isfinite().all()
    assert exact.isfinite().any()
    out = run(which, case, x, w, b, dy, named(device), tf32)
    ulps = 2**13 if tf32 else 8
    assert_by_rule(out, exact.to(dtype), exact, ulps, terms=max(x.numel(), dy.numel()))


def exact_of(which, case, x, w, b, dy):
    """In float64; of the weight gradient padding is no zeros that an infinity might meet."""
    wide = [t.double() for t in (x, w, b, dy)]
    if which != "wgrad":
        return reference(which, case, *wide)
    x, w, _, dy = wide
    (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w) = geometry(case)
    groups, (p, q) = case[9], dy.shape[2:]
    padded = stock.pad(x, [pad_w, pad_w + stride_w * q, pad_h, pad_h + stride_h * p])
    result = torch.empty_like(w)
    dy = dy.unflatten(1, (groups, -1))
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            met = padded[:, :, r * dilation_h :, s * dilation_w :][
                :, :, : stride_h * p : stride_h, : stride_w * q : stride_w
            ].unflatten(1, (groups, -1))
            products = dy[:, :, :, None] * met[:, :, None]
            result[:, :, r, s] = products.sum((0, 4, 5)).flatten(0, 1)
    return result


def test_relu_and_bias(device, dtype):
    if refuses(device, dtype):
        pytest.skip("not the kernel's")
    set_tf32(device, False)
    case = case_of(2, 4, 8, 24, (12, 11))
    x, w, b, _ = drawn(case, device, dtype)
    with braze.backend(conv2d=named(device)):
        check_against_stock(
            lambda *t: F.conv2d_relu(*t, padding=1, groups=4),
            lambda *t: stock.relu(stock.conv2d(*t, padding=1, groups=4)),
            [x, w, b],
        )


@pytest.mark.parametrize("which", PASSES)
def test_in_a_graph(gpu, which):
    """Kernels of a graph may start before the one before them is done; and it is repeatable."""
    case = case_of(16, 16, 8, 8, 28, stride=2)
    x, w, b, dy = drawn(case, "cuda", torch.bfloat16)
    images, gradients = torch.randn_like(x), torch.randn_like(dy)

    def step():
        x.copy_(images)
        dy.copy_(gradients)
        return run(which, case, x, w, b, dy, NAME)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(5):
        x.zero_()
        dy.zero_()
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)


def test_more_than_2_to_the_31_elements(gpu):
    n, c, size = 700, 64, 224  # 2.2e9 elements, 4.5 GB in 16 bits
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    case = case_of(n, 8, 8, 8, size, stride=2)
    x, w, b, _ = drawn((1, *case[1:]), "cuda", torch.bfloat16)
    like = {"device": "cuda", "dtype": x.dtype, "memory_format": torch.channels_last}
    many = torch.empty(n, c, size, size, **like)
    many.copy_(x.expand_as(many))
    one, out = (run("fprop", case, t, w, b, None, NAME) for t in (x, many))
    assert all(torch.equal(out[i], one[0]) for i in (0, n // 2, n - 1))


def fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    which = data.draw(st.sampled_from(PASSES))
    taps = draw(1, 4), draw(1, 4)
    stride = draw(1, 2), draw(1, 2)
    dilation = draw(1, 3) if stride == (1, 1) else 1
    padding = draw(0, 4), draw(0, 4)
    least = [max(1, (t - 1) * dilation + 1 - 2 * p) for t, p in zip(taps, padding, strict=True)]
    size = tuple(low + draw(0, 40) for low in least)
    # (Of one channel, or one pixel, the format may be open.)
    widths = st.sampled_from([2, 3, 4, 6, 8, 12, 16, 20, 24, 40, 48])
    groups = draw(1, 5), draw(2, 6), data.draw(widths), data.draw(widths)
    case = case_of(*groups, size, taps, stride, padding, dilation)
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    tf32 = device == "cuda" and dtype == torch.float32 and data.draw(st.booleans())
    set_tf32(device, tf32)
    tensors = drawn(case, device, dtype, data.draw(st.sampled_from(sorted(FORMATS))))
    check(which, case, tensors, named(device), tf32)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A kernel whose groups begin a channel late, and one that forgets a tile's last column."""
    case = case_of(2, 4, 8, 8, 14)
    x, w, b, _ = drawn(case, device, dtype)
    right = lambda *t: stock.conv2d(*t, padding=1, groups=4)  # noqa: E731

    def shifted(x, w, b):
        return right(x.roll(1, 1), w, b)

    def short(x, w, b):
        return right(torch.cat([x[..., :13], torch.zeros_like(x[..., 13:])], dim=3), w, b)

    for wrong in (shifted, short):
        with pytest.raises(AssertionError):
            check_against_stock(wrong, right, [x, w, b])
