import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import assert_by_rule, assert_same_layer, check_against_stock, compile, fuzzed, layouts

# (input, weight, stride, padding, output_padding, groups, dilation)
CASES = {
    "one pixel": ((1, 1, 1, 1), (1, 1, 1, 1), 1, 0, 0, 1, 1),
    "U-Net 2x2 stride 2": ((2, 16, 9, 7), (16, 8, 2, 2), 2, 0, 0, 1, 1),
    "DCGAN 4x4 stride 2": ((2, 12, 8, 8), (12, 6, 4, 4), 2, 1, 0, 1, 1),
    "DCGAN's first": ((3, 20, 1, 1), (20, 16, 4, 4), 1, 0, 0, 1, 1),
    "3x3 stride 2, output_padding 1": ((2, 10, 7, 6), (10, 5, 3, 3), 2, 1, 1, 1, 1),
    "3x3 stride 1": ((2, 17, 8, 9), (17, 13, 3, 3), 1, 1, 0, 1, 1),
    "odd": ((2, 5, 6, 7), (5, 7, 3, 5), (2, 3), (1, 2), (1, 0), 1, (1, 2)),
    "one output channel": ((2, 9, 6, 5), (9, 1, 4, 4), 2, 1, 0, 1, 1),
    "stride over kernel": ((2, 4, 5, 5), (4, 6, 2, 2), 3, 0, 1, 1, 1),
    "padding over kernel": ((2, 4, 9, 9), (4, 6, 2, 2), 1, 3, 0, 1, 1),
    "dilation 3": ((1, 4, 7, 7), (4, 5, 3, 3), 2, 3, 1, 1, 3),
    "output padding of a stride": ((1, 4, 5, 6), (4, 3, 3, 3), (1, 2), (1, 2), (1, 2), 1, (2, 3)),
    "groups": ((2, 12, 7, 6), (12, 6, 3, 3), 2, 1, 1, 3, 1),
    "depthwise": ((2, 19, 8, 8), (19, 1, 3, 3), 1, 1, 0, 19, 1),
    "depthwise stride 2": ((2, 6, 8, 7), (6, 2, 4, 4), 2, 1, 0, 6, 1),
    "many channels": ((1, 130, 4, 5), (130, 70, 3, 3), 1, 1, 0, 1, 1),
    "wide": ((1, 2, 3, 500), (2, 3, 2, 2), 2, 0, 0, 1, 1),
    "no images": ((0, 3, 8, 8), (3, 4, 3, 3), 2, 1, 1, 1, 1),
}


def randn(*shape, device, dtype, grad=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def tensors(case, device, dtype, bias=True, channels_last=False):
    shape, weight, *_, groups, _ = CASES[case]
    form = torch.channels_last if channels_last else torch.contiguous_format
    result = [
        randn(*s, device=device, dtype=dtype, grad=False).to(memory_format=form).requires_grad_()
        for s in (shape, weight)
    ]
    bias = [randn(weight[1] * groups, device=device, dtype=dtype)] if bias else []
    return result + bias


def call(function, case):
    return lambda x, w, b=None: function(x, w, b, *CASES[case][2:])


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", CASES)
def test_matches_stock(device, dtype, case, channels_last):
    inputs = tensors(case, device, dtype, channels_last=channels_last)
    ours, theirs = (call(api.conv_transpose2d, case) for api in (F, stock))
    result = check_against_stock(ours, theirs, inputs)
    if result.numel() > 0 and device == "cpu":
        assert result.stride() == theirs(*inputs).stride()
    elif result.numel() > 0:  # on a GPU torch has channels_last only where cuDNN serves it
        form = torch.channels_last if channels_last else torch.contiguous_format
        assert result.is_contiguous(memory_format=form)


def test_without_bias(device, dtype):
    for case in ("odd", "depthwise"):
        inputs = tensors(case, device, dtype, bias=False)
        ours, theirs = (call(api.conv_transpose2d, case) for api in (F, stock))
        check_against_stock(ours, theirs, inputs)


def test_layouts(device, dtype):
    inputs = layouts((3, 5, 4, 6), device, dtype)
    weights = layouts((5, 6, 3, 3), device, dtype)
    g = torch.randn(6, 11, 3, 7, device=device).to(dtype).permute(2, 0, 3, 1)
    geometry = [2, 2], [1, 1], [0, 0], 1, [1, 1]
    for i, (name, x) in enumerate(inputs):
        for weight_name, w in (weights[0], weights[1], weights[i]):
            what = f"{name} x {weight_name}"
            leaves = [t.detach().requires_grad_() for t in (x, w)]
            wide = [t.detach().double().requires_grad_() for t in (x, w)]
            out = F.conv_transpose2d(*leaves, stride=2, padding=1)
            stocks = stock.conv_transpose2d(*leaves, stride=2, padding=1)
            reference = stock.conv_transpose2d(*wide, stride=2, padding=1)
            assert_by_rule(out, stocks, reference, what=what)
            if device == "cpu" or dtype != torch.float64:
                assert out.stride() == stocks.stride(), what
            form = torch.contiguous_format if out.is_contiguous() else torch.channels_last
            actual = torch.ops.braze.conv_transpose2d_backward(
                g, *leaves, *geometry, [True, True, False]
            )
            for a, s, r in zip(
                actual,
                torch.autograd.grad(stocks, leaves, g),
                torch.autograd.grad(reference, wide, g.double()),
                strict=False,
            ):
                assert_by_rule(a, s, r, what=f"{what} gradient")
                assert a.is_contiguous(memory_format=form), what


def test_one_channel_formats_are_torchs(device):
    """With one channel only the strides of size-1 dimensions tell the formats apart."""
    x, w = torch.randn(2, 1, 5, 5, device=device), torch.randn(1, 1, 2, 2, device=device)
    bias = torch.randn(1, device=device)
    for a in (x, x.to(memory_format=torch.channels_last)):
        for b in (w, w.to(memory_format=torch.channels_last)):
            out, expected = (f(a, b, bias, 2) for f in (F.conv_transpose2d, stock.conv_transpose2d))
            assert out.stride() == expected.stride()
            torch.testing.assert_close(out, expected)


def test_expanded_gradient(device, dtype):
    def summed(function):
        return lambda *t: call(function, "odd")(*t).sum((1, 2, 3))

    inputs = tensors("odd", device, dtype)
    check_against_stock(summed(F.conv_transpose2d), summed(stock.conv_transpose2d), inputs)


def test_unbatched(device, dtype):
    kw = {"device": device, "dtype": dtype}
    inputs = [randn(3, 8, 9, **kw), randn(3, 4, 3, 3, **kw), randn(4, **kw)]
    check_against_stock(F.conv_transpose2d, stock.conv_transpose2d, inputs)


def test_special_values(device, dtype):
    """inf and NaN reach the results that their pixels make, and no others."""
    x = torch.randn(2, 1, 5, 5, device=device).to(dtype)
    x[0, 0, 0, 0], x[0, 0, 2, 4], x[1, 0, 4, 0] = float("inf"), float("nan"), -float("inf")
    w = torch.randn(1, 3, 3, 3, device=device).to(dtype)
    reference = stock.conv_transpose2d(x.double(), w.double(), stride=2)
    with braze.backend(conv2d="braze"):
        out = F.conv_transpose2d(x, w, stride=2)
    assert_by_rule(out, reference.to(dtype), reference)
    assert out.isnan().sum() == 27
    # A weight's gradient sums over all pixels; of those whose result the padding cuts off (here the
    # one at the top left, for the taps of the first row and column) zeros are left, as in torch.
    geometry, mask = ([2, 2], [1, 1], [0, 0], 1, [1, 1]), [False, True, False]
    x = torch.randn(1, 1, 5, 5, device=device).to(dtype)
    g = torch.ones(1, 3, 9, 9, device=device, dtype=dtype)
    x[0, 0, 0, 0] = float("inf")
    _, dw, _ = torch.ops.braze.conv_transpose2d_backward(g, x, w, *geometry, mask, backend="braze")
    assert dw[0, :, 1:, 1:].eq(float("inf")).all()
    assert not dw[0, :, 0].isinf().any()
    assert not dw[0, :, :, 0].isinf().any()


def fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    pair = lambda low, high: (draw(low, high), draw(low, high))  # noqa: E731
    groups, kernel, stride, dilation, padding = (
        draw(1, 3),
        pair(1, 4),
        pair(1, 3),
        pair(1, 2),
        pair(0, 3),
    )
    more = tuple(draw(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    size = []
    for k, s, d, p, m in zip(kernel, stride, dilation, padding, more, strict=True):
        # The least input of which at least one row is left.
        size.append(max(1, 1 - (m - 2 * p + d * (k - 1)) // s) + draw(1, 12))
    c, k = groups * draw(1, 20), draw(1, 20)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    form = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
    x = torch.randn(draw(1, 3), c, *size, device=device).to(dtype).to(memory_format=form)
    w = torch.randn(c, k, *kernel, device=device).to(dtype)
    b = torch.randn(k * groups, device=device).to(dtype)
    arguments = (stride, padding, more, groups, dilation)
    check_against_stock(
        lambda *t: F.conv_transpose2d(*t, *arguments),
        lambda *t: stock.conv_transpose2d(*t, *arguments),
        [t.requires_grad_() for t in (x, w, b)],
    )


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


def test_gradcheck(device):
    kw = {"device": device, "dtype": torch.float64}
    x, w, b = randn(2, 4, 3, 4, **kw), randn(4, 2, 3, 2, **kw), randn(4, **kw)
    for arguments in ((1, 1, 0, 2, 1), ((2, 1), (2, 0), (1, 0), 2, (1, 2))):
        function = lambda *t, a=arguments: F.conv_transpose2d(*t, *a)  # noqa: E731
        assert torch.autograd.gradcheck(function, (x, w, b), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (x, w, b), fast_mode=True)
    geometry = [2, 2], [1, 1], [1, 1], 2, [1, 1]
    raw = lambda *t: torch.ops.braze.conv_transpose2d(*t, *geometry)  # noqa: E731
    assert torch.autograd.gradcheck(raw, (x, w, b), fast_mode=True)
    for mask in range(1, 8):
        some = tuple(
            t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate((x, w, b))
        )
        assert torch.autograd.gradgradcheck(raw, some, fast_mode=True)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_opcheck(device, dtype, channels_last):
    x, w, b = tensors("odd", device, dtype, channels_last=channels_last)
    geometry = ([2, 3], [1, 2], [1, 0], 1, [1, 2])
    ops = torch.ops.braze
    g = ops.conv_transpose2d(x, w, b, *geometry).detach()
    torch.library.opcheck(ops.conv_transpose2d.default, (x, w, b, *geometry))
    for mask in ([True, True, True], [False, True, False]):
        torch.library.opcheck(ops.conv_transpose2d_backward.default, (g, x, w, *geometry, mask))


def test_compile(device):
    inputs = tensors("groups", device, torch.float32)
    ours = compile(call(F.conv_transpose2d, "groups"))
    check_against_stock(ours, call(stock.conv_transpose2d, "groups"), inputs)


def test_module(device):
    kw = {"stride": 2, "padding": (1, 2), "output_padding": 1, "groups": 2, "device": device}
    layer, plain = (n.ConvTranspose2d(4, 6, 3, **kw) for n in (braze.nn, torch.nn))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 4, 8, 9, device=device)
    for clone in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_layer(clone, plain, x)
    assert isinstance(layer, torch.nn.ConvTranspose2d)
    assert repr(layer) == repr(plain)


def test_module_with_output_size(device):
    layer, plain = (n.ConvTranspose2d(3, 4, 3, 2, 1, device=device) for n in (braze.nn, torch.nn))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 5, 6, device=device)
    for size in ([9, 11], [10, 12], torch.Size([2, 4, 9, 12])):
        ours, theirs = layer(x, output_size=size), plain(x, size)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)
        assert layer(x[0], size[-2:]).shape == theirs.shape[1:]
    for size in ([8, 11], [9, 13], [9], [2, 2, 4, 9, 11]):
        for module in (layer, plain):
            with pytest.raises(ValueError, match=r"output_size must have|requested an output size"):
                module(x, size)
    layer.padding_mode = "reflect"
    with pytest.raises(ValueError, match="Only `zeros` padding mode is supported"):
        layer(x)


def test_output_size_of_any_height(device):
    """A layer that fits its result to another tensor, with open heights and widths."""
    layer = braze.nn.ConvTranspose2d(3, 4, 3, 2, 1, device=device)

    def fit(x, like):
        return layer(x, output_size=like.shape[2:])

    compiled = torch.compile(fit, fullgraph=True, dynamic=True, backend="aot_eager")
    for height in (9, 10, 13):
        x = torch.randn(2, 3, (height + 1) // 2, 6, device=device)
        like = torch.empty(2, 1, height, 12, device=device)
        torch.testing.assert_close(compiled(x, like), fit(x, like))


def test_repeatable(device, dtype):
    inputs = tensors("DCGAN 4x4 stride 2", device, dtype)
    with braze.backend(conv2d="braze"):
        runs = []
        for _ in range(3):
            out = call(F.conv_transpose2d, "DCGAN 4x4 stride 2")(*inputs)
            runs.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_backend_is_honoured_on_cpu():
    """Kernels that add in different orders give different bits: that shows which one ran."""
    x, w, b = tensors("many channels", "cpu", torch.float32)
    results = {}
    for name in ("auto", "blocked_im2col", "direct"):
        with braze.backend(conv2d=name):
            out = call(F.conv_transpose2d, "many channels")(x, w, b)
        # The choice holds for the backward too, which runs after the `with`.
        results[name] = (out, *torch.autograd.grad(out, x, torch.ones_like(out)))
    for default, patches, direct in zip(*results.values(), strict=True):
        assert torch.equal(default, patches)
        assert not torch.equal(direct, patches)


@pytest.mark.parametrize("case", ["odd", "groups", "stride over kernel"])
def test_plain_loops(case, dtype):
    """The CPU's formula as it is written down."""
    inputs = tensors(case, "cpu", dtype)
    with braze.backend(conv2d="direct"):
        ours, theirs = (call(api.conv_transpose2d, case) for api in (F, stock))
        check_against_stock(ours, theirs, inputs)


@pytest.mark.parametrize("backend", ["implicit_gemm_simt", "direct", "cudnn"])
@pytest.mark.parametrize("case", ["odd", "groups", "U-Net 2x2 stride 2"])
def test_cuda_kernels_by_name(gpu, dtype, case, backend):
    """None of them adds the bias in this pass."""
    if backend == "implicit_gemm_simt" and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("it takes float32 and float64")
    inputs = tensors(case, "cuda", dtype)
    with braze.backend(conv2d=backend):
        ours, theirs = (call(api.conv_transpose2d, case) for api in (F, stock))
        check_against_stock(ours, theirs, inputs)


def test_tf32(gpu):
    x, w = torch.randn(8, 64, 14, 14, device="cuda"), torch.randn(64, 64, 4, 4, device="cuda")
    reference = stock.conv_transpose2d(x.double(), w.double(), stride=2, padding=1)

    def error():
        difference = F.conv_transpose2d(x, w, stride=2, padding=1) - reference
        return (difference.abs().max() / reference.abs().max()).item()

    assert error() < 2e-6
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert error() < 2e-3
    with braze.backend(conv2d="implicit_gemm_mma"):
        assert 1e-5 < error() < 2e-3


# what is bad -> (torch's message, arguments that differ)
GOOD = {"x": (1, 4, 5, 6), "w": (4, 3, 3, 3)}
BAD = {
    "stride": ("non-positive stride is not supported", {"stride": 0}),
    "padding": ("negative padding is not supported", {"padding": -1}),
    "output_padding": ("negative output_padding is not supported", {"output_padding": -1}),
    "dilation": (
        "dilation should be greater than zero, but got dilation_height: 0",
        {"dilation": 0},
    ),
    "groups": ("non-positive groups is not supported", {"groups": 0}),
    "much output_padding": (
        "output padding must be smaller than either stride or dilation, but got "
        "output_padding_height: 2 output_padding_width: 2 stride_height: 2 stride_width: 2 "
        "dilation_height: 1 dilation_width: 1",
        {"stride": 2, "output_padding": 2},
    ),
    "nothing left": (
        "Given input size per channel: (5 x 6). Calculated output size per channel: (-1 x 0). "
        "Output size is too small",
        {"padding": 4},
    ),
    "channels": (
        "Given transposed=1, weight of size [4, 3, 3, 3], expected input[1, 3, 5, 6] to have 4 "
        "channels, but got 3 channels instead",
        {"x": (1, 3, 5, 6)},
    ),
    "bias": (
        "Given transposed=1, weight of size [4, 3, 3, 3], expected bias to be 1-dimensional with 3 "
        "elements, but got bias of size [4] instead",
        {"bias": (4,)},
    ),
    "division": (
        "Given groups=3, expected weight to be divisible by 3 at dimension 0, but got weight of "
        "size [[4, 3, 3, 3]] instead",
        {"groups": 3},
    ),
    "many groups": (
        "Given groups=8, expected weight to be at least 8 at dimension 0, but got weight of size "
        "[4, 3, 3, 3] instead",
        {"groups": 8},
    ),
    "no taps": (
        "kernel size should be greater than zero, but got kernel_height: 0 kernel_width: 3",
        {"w": (4, 3, 0, 3)},
    ),
    "no output channels": (
        "non-empty 2D or 4D weight tensor expected, but got: [4, 0, 3, 3]",
        {"w": (4, 0, 3, 3)},
    ),
    "no pixels": (
        "Only zero batch or zero channel inputs are supported, but got input shape: [1, 4, 0, 6]",
        {"x": (1, 4, 0, 6)},
    ),
    "2-D": (
        "Expected 3D (unbatched) or 4D (batched) input to conv_transpose2d, but got input of size: "
        "[5, 6]",
        {"x": (5, 6)},
    ),
    "3-D weight": ("expected stride to be a single integer value or a list of 1", {"w": (3, 3, 3)}),
    "three strides": (
        "expected stride to be a single integer value or a list of 2 values to match the "
        "convolution dimensions, but got stride=[1, 1, 1]",
        {"stride": (1, 1, 1)},
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_in_torchs_words(device, what):
    message, changed = BAD[what]
    arguments = {**GOOD, **changed}
    for name in ("x", "w", "bias"):
        if name in arguments:
            # Stock's plain kernel, which float64 takes, checks everything in words.
            arguments[name] = torch.randn(arguments[name], device=device, dtype=torch.float64)
    x, w = arguments.pop("x"), arguments.pop("w")
    with pytest.raises(RuntimeError, match=re.escape(message)):
        F.conv_transpose2d(x, w, **arguments)
    if device == "cpu":  # on a GPU cuDNN refuses in its own words, or not at all
        with pytest.raises(RuntimeError, match=re.escape(message)):
            stock.conv_transpose2d(x, w, **arguments)


@pytest.mark.parametrize(
    "rest",
    [
        (None, 1.5),
        (None, 1, "same"),
        (None, 2, 0, (1.5, 2)),
        (None, 1, 0, 0, 1, None),
        (3,),
    ],
    ids=str,
)
def test_types_are_torchs_to_refuse(device, rest):
    x, w = torch.randn(1, 4, 5, 6, device=device), torch.randn(4, 3, 3, 3, device=device)
    for weight in (w, None, 3):
        messages = set()
        for function in (F.conv_transpose2d, stock.conv_transpose2d):
            with pytest.raises(TypeError) as error:
                function(x, weight, *rest)
            messages.add(str(error.value))
        assert len(messages) == 1


def test_bad_input(device):
    x, w = torch.randn(1, 3, 8, 8, device=device), torch.randn(3, 4, 3, 3, device=device)
    with pytest.raises(RuntimeError, match="same dtype as input, but got float64 and float32"):
        F.conv_transpose2d(x, w.double())
    with pytest.raises(RuntimeError, match="bfloat16 or float16, but got int64"):
        torch.ops.braze.conv_transpose2d(x.long(), w.long())
    geometry = [1, 1], [0, 0], [0, 0], 1, [1, 1]
    with pytest.raises(RuntimeError, match=r"expected grad_output of shape \[1, 4, 10, 10\]"):
        torch.ops.braze.conv_transpose2d_backward(x, x, w, *geometry, [True, True, True])


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A transposed convolution that turns the taps round, as one that took itself for a convolution
    of a spread input would with the weight as it is."""

    def wrong(x, w):
        return F.conv_transpose2d(x, w.flip(2, 3), stride=2, padding=1)

    x, w, _ = tensors("DCGAN 4x4 stride 2", device, dtype)
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, call(stock.conv_transpose2d, "DCGAN 4x4 stride 2"), [x, w])
