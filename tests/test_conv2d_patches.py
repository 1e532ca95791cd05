"""Convolutions whose windows lie side by side: the CUDA kernel `patches` by name. The cases run on
the CPU too, by its own kernels."""

import itertools

import pytest
import torch
from hypothesis import strategies as st
from test_conv2d_products import (
    FORMATS,
    PASSES,
    check,
    drawn,
    gradient,
    own,
    run,
    set_tf32,
)

from common import cuda_kernels_of, fuzzed, runs_hopper_kernels

NAME = "patches"
# n, c, k, h, w, filter, stride, padding, dilation
CASES = [
    (2, 3, 32, 32, 48, 16, 16, 0, 1),  # a vision transformer
    (3, 3, 40, 28, 42, 14, 14, 0, 1),  # rows of weights that are no whole 16 bytes
    (4, 3, 96, 20, 24, 4, 4, 0, 1),  # ConvNeXt
    (2, 24, 48, 14, 10, 2, 2, 0, 1),
    (1, 1, 5, 6, 9, 3, 3, 0, 1),
    (2, 5, 7, 8, 6, 2, 2, 0, 1),
    (1, 4, 8, 8, 8, 8, 8, 0, 1),  # one patch an image
    (6, 16, 24, 5, 5, 5, 1, 0, 1),  # a filter that has the image's extents, whatever the stride
]
FORMS = list(itertools.product(FORMATS, FORMATS))  # of images, of weights


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_matches_stock(device, dtype, which, case, forms, tf32):
    if tf32 and (device == "cpu" or dtype != torch.float32):
        pytest.skip("as without TF32")
    set_tf32(device, tf32)
    x, w, b = drawn(case, device, dtype, forms[0])
    w = w.contiguous(memory_format=FORMATS[forms[1]])
    dy = gradient(case, x, w, "nhwc" if which == "wgrad" else forms[0])
    b = b if which == "fprop" else torch.zeros_like(b)
    actual = run(which, case, x, w, b, dy, tf32, **own(device, NAME))
    check(actual, which, case, (x, w, b, dy), tf32)


def check_fuzz(data, device):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size, rows, columns = draw(2, 9), draw(1, 4), draw(1, 5)
    which = data.draw(st.sampled_from(PASSES))
    rest = (0, 0) if which == "dgrad" else (draw(0, size - 1), draw(0, size - 1))
    case = (draw(1, 4), draw(1, 20), draw(1, 40), rows * size + rest[0], columns * size + rest[1])
    case += (size, size, 0, 1)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    x, w, b = drawn(case, device, dtype, data.draw(st.sampled_from(list(FORMATS))))
    w = w.contiguous(memory_format=FORMATS[data.draw(st.sampled_from(list(FORMATS)))])
    dy = gradient(case, x, w, "nhwc")
    actual = run(which, case, x, w, None, dy, **own(device, NAME))
    check(actual, which, case, (x, w, torch.zeros_like(b), dy))


test_fuzz_on_cpu, test_fuzz_on_cuda = fuzzed(check_fuzz)


def test_keeps_to_its_place(gpu):
    """Patches and the rest of images that hold more than they are not mixed up."""
    case = (2, 3, 24, 19, 23, 4, 4, 0, 1)
    for form in FORMATS:
        x, w, b = drawn(case, "cuda", torch.bfloat16, form)
        x[:, :, 16:] = float("nan")
        x[:, :, :, 20:] = float("nan")
        dy = gradient(case, x.nan_to_num(), w, "nhwc")
        for which in ("fprop", "wgrad"):
            actual = run(which, case, x, w, None, dy, backend=NAME)
            check(actual, which, case, (x.nan_to_num(), w, torch.zeros_like(b), dy))


def test_which_kernel_runs(gpu):
    """A vision transformer's first layer, by itself."""
    if not runs_hopper_kernels():
        pytest.skip("measured there")
    case = (64, 3, 768, 224, 224, 16, 16, 0, 1)
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    assert "move_patches" in cuda_kernels_of(lambda: run("fprop", case, x, w, b, None))
    case = (64, 128, 128, 5, 5, 5, 1, 0, 1)  # images that are the matrix as they are
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    names = cuda_kernels_of(lambda: run("fprop", case, x, w, b, None))
    assert "move_patches" not in names
    assert "braze" in names


@pytest.mark.parametrize(
    ("why", "which", "case"),
    [
        ("as large as the stride", "fprop", (2, 3, 8, 12, 12, 4, 2, 0, 1)),
        ("as large as the stride", "fprop", (2, 3, 8, 12, 12, 1, 1, 0, 1)),
        ("no padding", "fprop", (2, 3, 8, 12, 12, 4, 4, 1, 1)),
        ("no dilation", "fprop", (2, 3, 8, 12, 12, 2, 2, 0, 2)),
        ("whole patches", "dgrad", (2, 3, 8, 13, 12, 4, 4, 0, 1)),
    ],
)
def test_refuses_by_name_and_leaves_the_rest_to_others(gpu, why, which, case):
    x, w, b = drawn(case, "cuda", torch.bfloat16, "nhwc")
    dy = gradient(case, x, w, "nhwc")
    with pytest.raises(RuntimeError, match=why):
        run(which, case, x, w, None, dy, backend=NAME)
    check(run(which, case, x, w, None, dy), which, case, (x, w, torch.zeros_like(b), dy))


def test_empty(device, dtype):
    case = (0, 3, 8, 8, 8, 4, 4, 0, 1)
    x, w, b = drawn(case, device, dtype, "nhwc")
    assert run("fprop", case, x, w, b, None, **own(device, NAME)).shape == (0, 8, 2, 2)
