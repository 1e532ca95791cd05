import copy
import itertools
import pickle

import numpy
import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from braze import _config
from common import (
    assert_by_rule,
    assert_same_layer,
    check_against_stock,
    compile,
    cuda_kernels_of,
    fuzzed,
    layouts,
    runs_hopper_kernels,
)

# (input, weight, stride, padding, dilation, groups)
CASES = {
    "one pixel": ((1, 1, 1, 1), (1, 1, 1, 1), 1, 0, 1, 1),
    "first layer": ((3, 1, 28, 28), (32, 1, 3, 3), 1, 1, 1, 1),
    "second layer": ((3, 32, 14, 14), (64, 32, 3, 3), 1, 1, 1, 1),
    "rgb 7x7 stride 2": ((2, 3, 31, 29), (11, 3, 7, 7), 2, 3, 1, 1),
    "1x1": ((2, 17, 9, 5), (13, 17, 1, 1), 1, 0, 1, 1),
    "1x1 stride 2": ((2, 16, 8, 8), (8, 16, 1, 1), 2, 0, 1, 1),
    "odd": ((2, 5, 11, 13), (7, 5, 3, 5), (2, 1), (1, 2), (1, 2), 1),
    "stride over kernel": ((2, 4, 12, 12), (6, 4, 2, 2), 3, 0, 1, 1),
    "padding over kernel": ((2, 4, 5, 5), (6, 4, 2, 2), 1, 3, 1, 1),
    "dilation 3": ((1, 4, 17, 17), (5, 4, 3, 3), 2, 3, 3, 1),
    "kernel as large as input": ((2, 6, 4, 3), (5, 6, 4, 3), 1, 0, 1, 1),
    "groups": ((2, 12, 7, 9), (18, 4, 3, 3), 1, 1, 1, 3),
    "depthwise": ((2, 19, 10, 10), (19, 1, 3, 3), 1, 1, 1, 19),
    "depthwise multiplier 2 stride 2": ((2, 6, 10, 10), (12, 1, 5, 5), 2, 2, 1, 6),
    "many channels": ((1, 130, 5, 6), (70, 130, 3, 3), 1, 1, 1, 1),
    "wide": ((1, 2, 3, 1000), (3, 2, 3, 3), 1, 1, 1, 1),
    "tall": ((1, 2, 700, 3), (3, 2, 3, 3), 1, 1, 1, 1),
    "unused edge": ((2, 3, 8, 8), (4, 3, 3, 3), 2, 0, 1, 1),
    "no images": ((0, 3, 8, 8), (4, 3, 3, 3), 1, 1, 1, 1),
}


def randn(*shape, device, dtype, grad=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def tensors(case, device, dtype, bias=True):
    shape, weight = CASES[case][:2]
    result = [randn(*shape, device=device, dtype=dtype), randn(*weight, device=device, dtype=dtype)]
    return [*result, randn(weight[0], device=device, dtype=dtype)] if bias else result


def call(function, case):
    stride, padding, dilation, groups = CASES[case][2:]

    def with_bias(x, w, b=None):
        return function(x, w, b, stride, padding, dilation, groups)

    return with_bias


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", CASES)
def test_matches_stock(device, dtype, case, channels_last):
    inputs = tensors(case, device, dtype)
    if channels_last:
        inputs[:2] = [
            t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in inputs[:2]
        ]
    check_against_stock(call(F.conv2d, case), call(stock.conv2d, case), inputs)


def test_without_bias(device, dtype):
    for case in ("odd", "depthwise"):
        inputs = tensors(case, device, dtype, bias=False)
        check_against_stock(call(F.conv2d, case), call(stock.conv2d, case), inputs)


def expected_format(*tensors):
    one = any(
        t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
        for t in tensors
    )
    return torch.channels_last if one else torch.contiguous_format


def test_layouts(device, dtype):
    inputs = layouts((3, 5, 8, 9), device, dtype)
    weights = layouts((6, 5, 3, 3), device, dtype)
    g = torch.randn(6, 9, 3, 8, device=device).to(dtype).permute(2, 0, 3, 1)
    for i, (name, x) in enumerate(inputs):
        for weight_name, w in (weights[0], weights[1], weights[i]):
            what = f"{name} x {weight_name}"
            leaves = [t.detach().requires_grad_() for t in (x, w)]
            wide = [t.detach().double().requires_grad_() for t in (x, w)]
            out = F.conv2d(*leaves, padding=1)
            stocks = stock.conv2d(*leaves, padding=1)
            reference = stock.conv2d(*wide, padding=1)
            assert_by_rule(out, stocks, reference, what=what)
            form = expected_format(x, w)
            assert out.is_contiguous(memory_format=form), what
            actual = torch.ops.braze.conv2d_backward(
                g, *leaves, [1, 1], [1, 1], [1, 1], 1, [True, True, False]
            )
            for a, s, r in zip(
                actual,
                torch.autograd.grad(stocks, leaves, g),
                torch.autograd.grad(reference, wide, g.double()),
                strict=False,
            ):
                assert_by_rule(a, s, r, what=f"{what} gradient")
                assert a.is_contiguous(memory_format=form), what


@pytest.mark.parametrize("filters", [16, 32, 47, 48, 64, 80])
def test_rows_of_any_width(device, filters):
    """Where filters go across the lanes, rows are cut into tiles that may overlap."""
    for width in [*range(1, 18), 29, 43]:
        x = torch.randn(2, 3, 5, width, device=device).to(memory_format=torch.channels_last)
        w = torch.randn(filters, 3, 3, 3, device=device)
        b = torch.randn(filters, device=device)
        reference = stock.conv2d(x.double(), w.double(), b.double(), padding=1)
        stocks = stock.conv2d(x, w, b, padding=1)
        assert_by_rule(F.conv2d(x, w, b, padding=1), stocks, reference, what=f"width {width}")


def test_one_channel_formats_are_torchs(device):
    """With one channel only the strides of size-1 dimensions tell the formats apart."""
    x, w = torch.randn(2, 1, 8, 8, device=device), torch.randn(4, 1, 3, 3, device=device)
    for a in (x, x.to(memory_format=torch.channels_last)):
        for b in (w, w.to(memory_format=torch.channels_last)):
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            out, expected = F.conv2d(a, b), stock.conv2d(a, b)
            assert out.stride() == expected.stride()
            torch.testing.assert_close(out, expected)


def test_expanded_gradient(device, dtype):
    x, w, b = tensors("odd", device, dtype)
    check_against_stock(
        lambda *t: call(F.conv2d, "odd")(*t).sum((1, 2, 3)),
        lambda *t: call(stock.conv2d, "odd")(*t).sum((1, 2, 3)),
        [x, w, b],
    )


def test_unbatched(device, dtype):
    x = randn(3, 8, 9, device=device, dtype=dtype)
    w, b = randn(4, 3, 3, 3, device=device, dtype=dtype), randn(4, device=device, dtype=dtype)
    check_against_stock(F.conv2d, stock.conv2d, [x, w, b])


@pytest.mark.parametrize("kernel", [(3, 3), (4, 3), (2, 4), (1, 1)], ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_string_padding(device, kernel):
    x = randn(2, 3, 8, 9, device=device, dtype=torch.float64)
    w = randn(4, 3, *kernel, device=device, dtype=torch.float64)
    for padding, dilation in (("same", 1), ("same", 2), ("valid", 1)):
        check_against_stock(
            lambda x, w, p=padding, d=dilation: F.conv2d(x, w, padding=p, dilation=d),
            lambda x, w, p=padding, d=dilation: stock.conv2d(x, w, padding=p, dilation=d),
            [x, w],
        )


def test_settings_that_torch_takes_for_integers(device):
    x = randn(2, 4, 8, 9, device=device, dtype=torch.float64)
    w = randn(4, 2, 3, 3, device=device, dtype=torch.float64)
    two = numpy.int64(2)
    for settings in ((two, two, two, two), ((two, 1), torch.tensor(1), [two, two], two)):
        check_against_stock(
            lambda x, w, s=settings: F.conv2d(x, w, None, *s),
            lambda x, w, s=settings: stock.conv2d(x, w, None, *s),
            [x, w],
        )


def test_no_channels(device):
    x = torch.randn(2, 0, 8, 8, device=device, requires_grad=True)
    w = torch.randn(4, 0, 3, 3, device=device, requires_grad=True)
    b = torch.randn(4, device=device, requires_grad=True)
    out = F.conv2d(x, w, b)
    assert torch.equal(out, b.view(4, 1, 1).expand(2, 4, 6, 6))
    grads = torch.autograd.grad(out.sum(), (x, w, b))
    assert [g.shape for g in grads] == [x.shape, w.shape, b.shape]
    assert grads[2].eq(72).all()


def test_special_values(device, dtype):
    """inf and NaN reach the results whose windows hold them, and no others."""
    x = torch.randn(2, 1, 9, 9, device=device).to(dtype)
    x[0, 0, 0, 0], x[0, 0, 4, 8], x[1, 0, 8, 0] = float("inf"), float("nan"), -float("inf")
    w = torch.randn(3, 1, 3, 3, device=device).to(dtype)
    # Against float64: stock's own bfloat16 kernel pairs pixels with zeros and spreads infinities.
    reference = stock.conv2d(x.double(), w.double())
    with braze.backend(conv2d="braze"):
        assert_by_rule(F.conv2d(x, w), reference.to(dtype), reference)
    g = torch.ones(2, 3, 7, 7, device=device, dtype=dtype)
    geometry, mask = ([1, 1], [0, 0], [1, 1], 1), [False, True, False]
    _, dw, _ = torch.ops.braze.conv2d_backward(g, x, w, *geometry, mask, backend="braze")
    # The tap at the top left alone meets x[0, 0, 0, 0].
    assert dw[:, 0, 0, 0].eq(float("inf")).all()
    assert dw[:, 0, 2, 0].eq(-float("inf")).all()
    assert dw[:, 0, 1, 1].isfinite().all()


def fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    groups = draw(1, 3)
    kernel, stride, dilation, padding = (
        (draw(1, 4), draw(1, 4)),
        (draw(1, 3), draw(1, 3)),
        (draw(1, 2), draw(1, 2)),
        (draw(0, 3), draw(0, 3)),
    )
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding)]  # noqa: B905
    size = [low + draw(0, 20) for low in least]
    c, k = groups * draw(1, 20), groups * draw(1, 20)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    form = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
    x = torch.randn(draw(1, 3), c, *size, device=device).to(dtype).to(memory_format=form)
    w = torch.randn(k, c // groups, *kernel, device=device).to(dtype)
    b = torch.randn(k, device=device).to(dtype)
    arguments = (stride, padding, dilation, groups)
    check_against_stock(
        lambda *t: F.conv2d(*t, *arguments),
        lambda *t: stock.conv2d(*t, *arguments),
        [t.requires_grad_() for t in (x, w, b)],
    )


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


def test_gradcheck(device):
    kw = {"device": device, "dtype": torch.float64}
    x, w, b = randn(2, 4, 5, 4, **kw), randn(4, 2, 3, 2, **kw), randn(4, **kw)
    for stride, padding, dilation in ((1, 1, 1), ((2, 1), (2, 0), (1, 2))):
        function = lambda *t, a=(stride, padding, dilation, 2): F.conv2d(*t, *a)  # noqa: E731
        assert torch.autograd.gradcheck(function, (x, w, b), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (x, w, b), fast_mode=True)
    raw = lambda *t: torch.ops.braze.conv2d(*t, [1, 1], [1, 1], [1, 1], 2)  # noqa: E731
    assert torch.autograd.gradcheck(raw, (x, w, b), fast_mode=True)
    for mask in range(1, 8):
        some = tuple(
            t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate((x, w, b))
        )
        assert torch.autograd.gradgradcheck(raw, some, fast_mode=True)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_opcheck(device, dtype, channels_last):
    x, w, b = tensors("odd", device, dtype)
    if channels_last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    geometry = ([2, 1], [1, 2], [1, 2], 1)
    g = torch.ops.braze.conv2d(x, w, b, *geometry).detach()
    torch.library.opcheck(torch.ops.braze.conv2d.default, (x, w, b, *geometry))
    for mask in ([True, True, True], [False, True, False]):
        torch.library.opcheck(torch.ops.braze.conv2d_backward.default, (g, x, w, *geometry, mask))


def test_compile(device):
    inputs = tensors("groups", device, torch.float32)
    check_against_stock(compile(call(F.conv2d, "groups")), call(stock.conv2d, "groups"), inputs)


def test_autocast(device):
    x, w, b = tensors("groups", device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = call(F.conv2d, "groups")(x, w, b)
        raw = torch.ops.braze.conv2d(x, w, b, [1, 1], [1, 1], [1, 1], 3)
        expected = call(stock.conv2d, "groups")(x, w, b)
    assert out.dtype == raw.dtype == torch.bfloat16
    assert torch.equal(out, raw)
    reference = call(stock.conv2d, "groups")(x.double(), w.double(), b.double())
    assert_by_rule(out, expected, reference)
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (x, w, b))


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_module(device, padding_mode):
    kw = {"stride": 2, "padding": (1, 2), "padding_mode": padding_mode, "device": device}
    layer, plain = braze.nn.Conv2d(3, 4, 3, **kw), torch.nn.Conv2d(3, 4, 3, **kw)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 8, 9, device=device)
    for clone in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_layer(clone, plain, x)
    assert isinstance(layer, torch.nn.Conv2d)
    assert repr(layer) == repr(plain)


def test_module_with_string_padding(device):
    layer = braze.nn.Conv2d(3, 4, 3, padding="same", device=device)
    plain = torch.nn.Conv2d(3, 4, 3, padding="same", device=device)
    plain.load_state_dict(layer.state_dict())
    assert_same_layer(layer, plain, torch.randn(2, 3, 8, 9, device=device))


def test_repeatable(device, dtype):
    x, w, b = tensors("second layer", device, dtype)
    out = call(F.conv2d, "second layer")(x, w, b)
    g = torch.randn_like(out)
    with braze.backend(conv2d="braze"):
        out = call(F.conv2d, "second layer")(x, w, b)
        grads = torch.autograd.grad(out, (x, w, b), g)
        for _ in range(3):
            again = call(F.conv2d, "second layer")(x, w, b)
            assert torch.equal(again, out)
            for a, e in zip(torch.autograd.grad(again, (x, w, b), g), grads, strict=True):
                assert torch.equal(a, e)


def own_kernels(device):
    wanted = (lambda arch: arch == "cpu") if device == "cpu" else (lambda arch: "sm_" in arch)
    vendor = _config.backend._VENDORS["conv2d"]
    return [k for k in braze.kernels("conv2d") if wanted(k["arch"]) and k["name"] not in vendor]


@pytest.mark.parametrize("case", ["odd", "depthwise multiplier 2 stride 2", "groups"])
def test_every_kernel_by_name(device, dtype, case):
    kernels = own_kernels(device)
    assert kernels
    inputs = tensors(case, device, dtype)
    for kernel in kernels:
        if str(dtype).removeprefix("torch.") not in kernel["dtypes"].split():
            continue
        if kernel["arch"] == "sm_90a" and not runs_hopper_kernels():
            continue
        with braze.backend(conv2d=kernel["name"]):
            # Tensor-core kernels that take no fp32, and those that take few shapes, say so.
            if (kernel["name"], dtype) == ("implicit_gemm_mma", torch.float32) or (
                kernel["name"]
                in (
                    "halo_wgmma",
                    "halo_narrow_dgrad",
                    "depthwise",
                    "pointwise",
                    "implicit_gemm_wgmma",
                    "narrow_input",
                    "narrow_input_wgmma",
                    "narrow_output",
                    "grouped",
                    "patches",
                )
                or (kernel["name"] == "winograd" and case != "groups")
            ):
                with pytest.raises(RuntimeError, match="cannot take these arguments"):
                    call(F.conv2d, case)(*inputs)
                continue
            check_against_stock(call(F.conv2d, case), call(stock.conv2d, case), inputs)


def test_backend_is_honoured_on_cpu():
    """Kernels that add in different orders give different bits: that shows which one ran."""
    x, w, b = tensors("many channels", "cpu", torch.float32)
    results = {}
    for name in ("auto", "braze", "blocked_im2col", "direct"):
        with braze.backend(conv2d=name):
            out = call(F.conv2d, "many channels")(x, w, b)
        # The choice holds for the backward too, which runs after the `with`.
        results[name] = (out, *torch.autograd.grad(out, x, torch.ones_like(out)))
    for default, braze_, patches, direct in zip(*results.values(), strict=True):
        assert torch.equal(default, patches)
        assert torch.equal(braze_, patches)
        assert not torch.equal(direct, patches)


def test_which_library_runs_on_cuda(device):
    if device == "cpu":
        return
    x, w, _ = tensors("second layer", device, torch.float32)
    for name, own in (("braze", True), ("cudnn", False)):
        with braze.backend(conv2d=name):
            F.conv2d(x, w)
            names = cuda_kernels_of(lambda: F.conv2d(x, w))
        assert names
        assert ("braze" in names) == own, names


@pytest.mark.parametrize("backend", ["auto", "cudnn"])
def test_accuracy_of_long_sums(device, backend):
    """A weight gradient over 64 x 14 x 14 pixels, which cuDNN offers as Winograd first."""
    if device == "cpu" and backend == "cudnn":
        pytest.skip("cuDNN is for CUDA tensors")
    x = torch.randn(64, 32, 14, 14, device=device, requires_grad=True)
    weight = (torch.randn(64, 32, 3, 3, device=device) / 17).requires_grad_()
    with braze.backend(conv2d=backend):
        check_against_stock(
            lambda *t: F.conv2d(*t, padding=1), lambda *t: stock.conv2d(*t, padding=1), [x, weight]
        )


def test_bad_backend(device):
    x, w = torch.randn(1, 1, 3, 3, device=device), torch.randn(1, 1, 3, 3, device=device)
    with pytest.raises(ValueError, match="expected conv2d to be one of auto, braze, cudnn"):
        braze.backend(conv2d="fastest")
    with pytest.raises(RuntimeError, match=r"expected backend to be one of auto, braze.*fastest"):
        torch.ops.braze.conv2d(x, w, backend="fastest")
    if device == "cpu":
        with braze.backend(conv2d="cudnn"), pytest.raises(RuntimeError, match="for CPU tensors"):
            F.conv2d(x, w)


@pytest.mark.parametrize("backend", ["auto", "braze"])
def test_tf32(device, backend):
    x = torch.randn(8, 64, 14, 14, device=device)
    w = torch.randn(64, 64, 3, 3, device=device)
    reference = stock.conv2d(x.double(), w.double())
    scale = reference.abs().max()

    def error():
        with braze.backend(conv2d=backend):
            return ((F.conv2d(x, w) - reference).abs().max() / scale).item()

    assert error() < 2e-6
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    if device == "cpu":
        assert error() < 2e-6
    else:
        # Ten bits of mantissa: the products' errors add up like a random walk.
        assert 1e-5 < error() < 2e-3


BAD = {
    "non-positive stride": ((1, 3, 8, 8), (4, 3, 3, 3), {"stride": 0}),
    "negative padding": ((1, 3, 8, 8), (4, 3, 3, 3), {"padding": -1}),
    "dilation should be greater than zero": ((1, 3, 8, 8), (4, 3, 3, 3), {"dilation": 0}),
    "non-positive groups": ((1, 3, 8, 8), (4, 3, 3, 3), {"groups": 0}),
    r"padded input size per channel: \(2 x 2\). Kernel size: \(3 x 3\)": (
        (1, 3, 2, 2),
        (4, 3, 3, 3),
        {},
    ),
    r"expected input\[1, 3, 8, 8\] to have 2 channels, but got 3": ((1, 3, 8, 8), (4, 2, 3, 3), {}),
    r"expected weight to be divisible by 2 at dimension 0": (
        (1, 4, 8, 8),
        (3, 2, 3, 3),
        {"groups": 2},
    ),
    "expected weight to be at least 1 at dimension 0": ((1, 3, 8, 8), (0, 3, 3, 3), {}),
    "kernel size should be greater than zero": ((1, 3, 8, 8), (4, 3, 0, 3), {}),
    "zero batch or zero channel inputs": ((1, 3, 0, 8), (4, 3, 3, 3), {"padding": 2}),
    r"Expected 3D .* or 4D .* input to conv2d, but got input of size: \[3, 8\]": (
        (3, 8),
        (4, 3, 3, 3),
        {},
    ),
    "expected stride to be a single integer value or a list of 2": (
        (1, 3, 8, 8),
        (4, 3, 3, 3),
        {"stride": (1, 2, 3)},
    ),
    "Invalid padding string": ((1, 3, 8, 8), (4, 3, 3, 3), {"padding": "full"}),
    "not supported for strided": ((1, 3, 8, 8), (4, 3, 3, 3), {"padding": "same", "stride": 2}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_in_torchs_words(device, message):
    shape, weight, arguments = BAD[message]
    x, w = torch.randn(shape, device=device), torch.randn(weight, device=device)
    with pytest.raises(RuntimeError, match=message):
        F.conv2d(x, w, **arguments)
    # cuDNN's front end words some of its own.
    with pytest.raises(RuntimeError, match=message if device == "cpu" else None):
        stock.conv2d(x, w, **arguments)


def test_bad_input(device):
    x, w = torch.randn(1, 3, 8, 8, device=device), torch.randn(4, 3, 3, 3, device=device)
    with pytest.raises(RuntimeError, match=r"bias to be 1-dimensional with 4 elements.*size \[5\]"):
        F.conv2d(x, w, torch.randn(5, device=device))
    with pytest.raises(RuntimeError, match="expected weight to be 4D"):
        F.conv2d(x, w[0])
    with pytest.raises(RuntimeError, match="same dtype as input, but got float64 and float32"):
        F.conv2d(x, w.double())
    with pytest.raises(RuntimeError, match="bfloat16 or float16, but got int64"):
        torch.ops.braze.conv2d(x.long(), w.long())
    with pytest.raises(TypeError, match="conv2d"):
        F.conv2d(x, 3)
    for bad in (1.5, (1.5, 2), True):
        with pytest.raises(TypeError, match="argument 'stride' must be an int or a tuple of ints"):
            F.conv2d(x, w, stride=bad)
    with pytest.raises(RuntimeError, match=r"expected grad_output of shape \[1, 4, 6, 6\]"):
        torch.ops.braze.conv2d_backward(x, x, w, [1, 1], [0, 0], [1, 1], 1, [True, True, True])


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A convolution that takes its padding for one pixel more, as a wrong bound would."""

    def wrong(x, w):
        return F.conv2d(x, w, padding=2)[:, :, :-2, :-2]

    x = randn(2, 4, 8, 8, device=device, dtype=dtype)
    w = randn(3, 4, 3, 3, device=device, dtype=dtype)
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, lambda x, w: stock.conv2d(x, w, padding=1), [x, w])


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("groups", [1, 4])
def test_gradient_has_its_weights_strides(device, kernel, groups):
    """Also those of extents of 1, which DistributedDataParallel compares."""
    formats = torch.contiguous_format, torch.channels_last
    for of_input, of_weight in itertools.product(formats, formats):
        x = torch.randn(2, groups, 6, 6, device=device).to(memory_format=of_input)
        w = torch.randn(4, 1, kernel, kernel, device=device).to(memory_format=of_weight)
        w.requires_grad_()
        y = F.conv2d(x, w, padding=kernel // 2, groups=groups)
        (grad,) = torch.autograd.grad(y.sum(), w)
        assert grad.stride() == w.stride(), (of_input, of_weight)
        (stock,) = torch.autograd.grad(
            torch.nn.functional.conv2d(x, w, padding=kernel // 2, groups=groups).sum(), w
        )
        torch.testing.assert_close(grad, stock, rtol=1e-4, atol=1e-4)
        if kernel == 3 and groups == 1:
            y = F.conv_bn_relu_max_pool2d(x, w, padding=1, training=True)
            assert torch.autograd.grad(y.sum(), w)[0].stride() == w.stride()
