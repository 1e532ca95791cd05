"""The Hopper convolutions `halo_wgmma` and `halo_narrow_dgrad`, by name where they must not refuse,
and where `auto` and "braze" take them."""

import pytest
import torch
import torch.nn.functional as stock
from torch.nn import grad

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, cuda_kernels_of

FLOATS = torch.float32, torch.float64


CASES = [  # n, c, k, h, w, filter, padding
    (3, 32, 64, 14, 14, 3, 1),
    (64, 32, 64, 14, 14, 3, 1),
    (150, 32, 64, 14, 14, 3, 1),  # several tiles for each warpgroup, in every pass
    (40, 24, 64, 3, 3, 3, 1),  # several images in a tile
    (5, 64, 64, 13, 11, 3, 1),
    (7, 32, 64, 7, 7, 3, 1),
    (2, 64, 72, 28, 28, 3, 0),
    (2, 32, 40, 56, 56, 3, 1),
    (3, 96, 64, 9, 9, 3, 1),
    (1, 16, 8, 1, 3, 3, 1),
    # in TF32 a block of channels at a time
    (5, 128, 32, 28, 28, 3, 1),
    (150, 128, 24, 14, 14, 3, 1),
    (2, 96, 40, 9, 70, 3, 1),
    # stripes: more columns than a tile has positions, or so many that it has few rows
    (3, 32, 32, 9, 256, 3, 1),
    (2, 16, 24, 17, 322, 3, 0),
    (2, 32, 32, 11, 130, 3, 1),
]


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_halo_wgmma(hopper, dtype, case, tf32):
    """The Hopper kernel by name, where it must not refuse: every pass, every type but float64."""
    n, c, k, h, w, size, padding = case
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
    x = torch.randn(n, c, h, w, device="cuda").to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(k, c, size, size, device="cuda").to(dtype)
    bias = torch.randn(k, device="cuda").to(dtype).requires_grad_()
    weight = weight.to(memory_format=torch.channels_last)
    # fp32's weights, whole or in parts, have to fit shared memory.
    fits = dtype != torch.float32 or c * min(k, 64) <= (64 * 64 if tf32 else 32 * 64)
    if dtype == torch.float64 or not fits:
        with braze.backend(conv2d="halo_wgmma"), pytest.raises(RuntimeError, match="cannot take"):
            F.conv2d(x, weight, bias, padding=padding)
        return
    x.requires_grad_()
    weight.requires_grad_()
    if dtype == torch.float32 and (k == 72 if tf32 else w == 56):
        # The weights of 72 filters, or the parts of a row of 64 channels, do not: forward only.
        with braze.backend(conv2d="halo_wgmma"):
            y = F.conv2d(x, weight, bias, padding=padding)
        with pytest.raises(RuntimeError, match="cannot take"):
            y.sum().backward()
        return
    with braze.backend(conv2d="halo_wgmma"):
        assert "halo" in cuda_kernels_of(lambda: F.conv2d(x, weight, bias, padding=padding))
        check_against_stock(
            lambda *t: F.conv2d(*t, padding=padding),
            lambda *t: stock.conv2d(*t, padding=padding),
            [x, weight, bias],
            # Stock may run a small convolution in fp32 where TF32 is allowed.
            ulps=2**13 if dtype == torch.float32 and tf32 else 4,
        )


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
def test_halo_wgmma_waits_for_each_tile(hopper, dtype, tf32):
    """Many tiles for each group of warps, whose copies may arrive in any order: the same result
    every time. (Groups that shared a stage's barriers once computed with what was there before, or
    waited for ever, in one launch of some hundred.)"""
    if dtype == torch.float64:
        pytest.skip("float64 is refused")
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
    layout = {"dtype": dtype, "memory_format": torch.channels_last}
    x = torch.randn(1024, 32, 14, 14, device="cuda").to(**layout)
    dy = torch.randn(1024, 64, 14, 14, device="cuda").to(**layout)
    weight = torch.randn(64, 32, 3, 3, device="cuda").to(**layout)
    geometry = [1, 1], [1, 1], [1, 1], 1
    settings = tf32, False
    first = None
    for _ in range(200):
        y = torch.ops.braze.conv2d(x, weight, None, *geometry, *settings, "halo_wgmma")
        results = [y]
        for name, mask in (
            ("halo_wgmma", [True, True, False]),
            ("halo_narrow_dgrad", [True, False, False]),
        ):
            grads = torch.ops.braze.conv2d_backward(dy, x, weight, *geometry, mask, *settings, name)
            results += [g for g, wanted in zip(grads, mask, strict=True) if wanted]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
@pytest.mark.parametrize("backend", ["auto", "braze"])
def test_contiguous_in_channels_last(hopper, backend, precision):
    """On Hopper tensors in the default format are transposed for the channels_last kernel; in the
    precisions that have fast kernels of others, large ones."""
    torch.backends.cudnn.conv.fp32_precision = "ieee" if precision == "ieee" else "tf32"
    like = {"device": "cuda", "dtype": torch.bfloat16 if precision == "bf16" else torch.float32}
    images = torch.randn(9 if precision == "ieee" else 200, 48, 14, 13, **like)
    weight = torch.randn(64, 32, 3, 3, **like).requires_grad_()
    bias = torch.randn(64, **like).requires_grad_()
    with braze.backend(conv2d=backend):
        for x in (images[:, :32].contiguous(), images[:, 8:40]):  # dense and not
            y = F.conv2d(x.requires_grad_(), weight, bias, padding=1)
            names = cuda_kernels_of(lambda x=x: F.conv2d(x, weight, bias, padding=1))
            assert any(name in names for name in ("halo", "im2col")), names
            assert "transpose" in names, names
            assert y.is_contiguous()
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert grad.is_contiguous()
            check_against_stock(
                lambda *t: F.conv2d(*t, padding=1),
                lambda *t: stock.conv2d(*t, padding=1),
                [x.detach().requires_grad_(), weight, bias],
                ulps=2**13 if precision == "tf32" else 4,  # as above
            )


NARROW_CASES = [  # n, c, k, h, w, filter, padding
    (3, 32, 64, 14, 14, (3, 3), (1, 1)),
    (150, 32, 64, 14, 14, (3, 3), (1, 1)),  # several tiles for each warpgroup
    (40, 24, 64, 3, 3, (3, 3), (1, 1)),  # several images in a tile
    (2, 8, 64, 13, 11, (3, 3), (0, 0)),
    (3, 16, 128, 9, 10, (1, 3), (0, 0)),
    (2, 32, 64, 12, 20, (2, 3), (1, 2)),
    (2, 32, 64, 1, 3, (3, 3), (1, 1)),
    (3, 32, 64, 9, 256, (3, 3), (1, 1)),  # stripes of columns
    (2, 24, 64, 6, 290, (2, 3), (1, 2)),
]


def channels_last(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype, memory_format=torch.channels_last)


def operands(case, dtype):
    """The gradient of the result, the input and the filters of a case, channels last."""
    n, c, k, h, w, (rows, columns), (top, left) = case
    p, q = h + 2 * top - rows + 1, w + 2 * left - columns + 1
    return (
        channels_last(n, k, p, q, dtype=dtype),
        channels_last(n, c, h, w, dtype=dtype),
        channels_last(k, c, rows, columns, dtype=dtype),
    )


def gradients(case, dy, x, weight, tf32, backend, mask=(True, False, False)):
    geometry = [1, 1], list(case[-1]), [1, 1], 1
    return torch.ops.braze.conv2d_backward(
        dy, x, weight, *geometry, list(mask), tf32, False, backend
    )


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("case", NARROW_CASES, ids=str)
@pytest.mark.parametrize("backend", ["braze", "halo_narrow_dgrad", "halo_wgmma"])
def test_narrow_dgrad(hopper, dtype, backend, case, tf32):
    """Input gradients of up to 32 channels: "braze" takes the kernel for them, but for wide images
    in 16 bits; `halo_wgmma`, which can do them too, runs there and where it is asked for."""
    if dtype == torch.float64:
        pytest.skip("float64 is refused")
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
    dy, x, weight = operands(case, dtype)
    names = cuda_kernels_of(lambda: gradients(case, dy, x, weight, tf32, backend))
    is_wide = dtype != torch.float32 and case[4] > 20
    by_halo = backend == "halo_wgmma" or (backend == "braze" and is_wide)
    assert ("dgrad_kernel" in names) == (not by_halo), names
    assert ("conv_kernel" in names) == by_halo, names
    check_against_stock(
        lambda dy, weight: gradients(case, dy, x, weight, tf32, backend)[0],
        lambda dy, weight: grad.conv2d_input(x.shape, weight, dy, padding=case[-1]),
        [dy, weight],
        ulps=2**13 if dtype == torch.float32 and tf32 else 4,
    )


def test_auto_takes_the_narrow_dgrad(hopper, dtype):
    """What a training step of the MNIST network runs."""
    if dtype == torch.float64:
        pytest.skip("float64 is refused")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    case = (64, 32, 64, 14, 14, (3, 3), (1, 1))
    inputs = operands(case, dtype)
    assert "dgrad_kernel" in cuda_kernels_of(lambda: gradients(case, *inputs, False, "auto"))
    narrow = gradients(case, *inputs, False, "halo_narrow_dgrad")[0]
    assert torch.equal(gradients(case, *inputs, False, "auto")[0], narrow)


@pytest.mark.parametrize(
    "case",
    [
        (3, 40, 64, 14, 14, (3, 3), (1, 1)),  # channels
        (3, 32, 40, 14, 14, (3, 3), (1, 1)),  # filters
        (3, 32, 64, 14, 14, (3, 5), (1, 2)),  # columns
    ],
    ids=str,
)
def test_narrow_dgrad_says_what_it_takes(hopper, case):
    inputs = operands(case, torch.bfloat16)
    with pytest.raises(RuntimeError, match="takes input gradients of up to 32 channels"):
        gradients(case, *inputs, False, "halo_narrow_dgrad")
    gradients(case, *inputs, False, "halo_wgmma")


def test_narrow_dgrad_computes_no_other_pass(hopper):
    case = (3, 32, 64, 14, 14, (3, 3), (1, 1))
    dy, x, weight = operands(case, torch.bfloat16)
    reason = "takes input gradients of up to 32 channels"
    with pytest.raises(RuntimeError, match=reason):
        gradients(case, dy, x, weight, False, "halo_narrow_dgrad", (False, True, False))
    with braze.backend(conv2d="halo_narrow_dgrad"), pytest.raises(RuntimeError, match=reason):
        F.conv2d(x, weight, padding=1)


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("case", NARROW_CASES[:3], ids=str)
def test_infinities(hopper, case, tf32):
    """fp32 in parts: tiles with infinities or NaN are summed on CUDA cores, in every pass. Against
    the CPU, since cuDNN's algorithms spread them."""
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
    dy, x, weight = operands(case, torch.float32)
    x[0, 3, 0, 1], x[-1, 5, 2, 2] = float("inf"), float("nan")
    dy[0, 7, 1, 1], dy[-1, 60, 1, 1] = -float("inf"), float("nan")  # no tap of these is padding
    padding, ulps = case[-1], 2**13 if tf32 else 4

    def check(actual, function, *tensors):
        expected, reference = (function(*(t.to("cpu", d) for t in tensors)) for d in FLOATS)
        assert_by_rule(actual, expected.cuda(), reference, ulps)

    y = torch.ops.braze.conv2d(
        x, weight, None, [1, 1], list(padding), [1, 1], 1, tf32, False, "halo_wgmma"
    )
    check(y, lambda x, w: stock.conv2d(x, w, padding=padding), x, weight)
    for name in ("halo_wgmma", "halo_narrow_dgrad"):
        dx = gradients(case, dy, x, weight, tf32, name)[0]
        check(dx, lambda dy, w: grad.conv2d_input(x.shape, w, dy, padding=padding), dy, weight)
    dw = gradients(case, dy, x, weight, tf32, "halo_wgmma", (False, True, False))[1]
    check(dw, lambda dy, x: grad.conv2d_weight(x, weight.shape, dy, padding=padding), dy, x)


WIDE_CASES = [  # n, c, k, h, w, padding
    (2, 32, 32, 9, 256, 1),
    (1, 64, 40, 5, 300, 1),
    (3, 16, 72, 3, 512, 0),  # 510 columns: no stripes of a power of two
    (1, 8, 16, 11, 768, 2),
    (2, 32, 64, 40, 96, 1),  # rows that would fit, two of them
    (1, 96, 64, 1, 640, 1),
]


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("case", WIDE_CASES, ids=str)
def test_weight_gradient_of_wide_images(hopper, dtype, case, tf32):
    """Images that are cut into stripes of columns, whose edges must not meet."""
    if dtype == torch.float64:
        pytest.skip("float64 is refused")
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
    n, c, k, h, w, padding = case
    geometry = (n, c, k, h, w, (3, 3), (padding, padding))
    dy, x, weight = operands(geometry, dtype)
    actual = gradients(geometry, dy, x, weight, tf32, "halo_wgmma", (False, True, False))[1]

    def expected(to):
        return grad.conv2d_weight(x.to(to), weight.shape, dy.to(to), padding=padding)

    ulps = 2**13 if dtype == torch.float32 and tf32 else 4
    assert_by_rule(actual, expected(dtype), expected(torch.float64), ulps)


def test_widths_that_no_stripes_divide(hopper):
    geometry = (1, 16, 16, 4, 257, (3, 3), (1, 1))
    dy, x, weight = operands(geometry, torch.bfloat16)
    with pytest.raises(RuntimeError, match="cannot take"):
        gradients(geometry, dy, x, weight, False, "halo_wgmma", (False, True, False))


def test_the_tests_reject_a_wrong_kernel(hopper):
    """An input gradient whose taps are one position off, as a wrong shift of the sums would be."""
    case = (3, 32, 64, 14, 14, (3, 3), (1, 1))
    dy, x, weight = operands(case, torch.bfloat16)
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(
            lambda dy, weight: gradients(case, dy, x, weight, False, "braze")[0].roll(1, 3),
            lambda dy, weight: grad.conv2d_input(x.shape, weight, dy, padding=1),
            [dy, weight],
        )
