"""Batch norm's training passes over channels_last tensors as one kernel each, whose clusters hold a
slice of the channels of all rows in shared memory."""

import pytest
import torch
from test_batch_norm_act import check, inputs, ours
from test_batch_norm_held import (
    ILL_CONDITIONED,
    by_ours,
    check_buffers,
    check_ill_conditioned,
    check_special_values,
)
from test_batch_norm_ladder import of_stock
from test_batch_norm_resident import kernels_of_captured_step, kernels_of_step

import braze
from common import check_against_stock

pytestmark = pytest.mark.usefixtures("hopper")

CHANNELS_LAST = torch.channels_last
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = ["identity", "relu", "relu6", "leaky_relu", "silu", "hardswish", "gelu"]
# slices of one to sixteen vectors, powers of two and not; two to eight blocks of a cluster, one and
# two of a multiprocessor; rows fewer than a block's lines, and such as no number of blocks divides
SHAPES = [
    (64, 512, 7, 7),
    (3, 4096, 7, 7),
    (33, 2040, 5, 3),
    (16, 1152, 7, 7),
    (32, 960, 7, 7),
    (64, 144, 14, 14),
    (64, 488, 7, 7),
    (11, 1040, 7, 13),
    (5, 8192, 5, 5),
    (31, 480, 14, 13),
    (7, 4104, 4, 5),
    (30, 2112, 5, 5),
]


def draw(shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype, memory_format=CHANNELS_LAST)


def check_taken(shape, name, residual, dtype):
    args = inputs(shape, "cuda", dtype, residual=residual, fmt=CHANNELS_LAST)
    assert check(name, True, args).is_contiguous(memory_format=CHANNELS_LAST)
    kernels = kernels_of_step(args[0], name)
    assert "held_rows_forward_kernel" in kernels
    assert "held_rows_backward_kernel" in kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("name", ["identity", "relu", "silu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, name, residual, dtype):
    check_taken(shape, name, residual, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, residual, dtype):
    check_taken((31, 480, 14, 13), name, residual, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [16, 24, 40, 72, 96, 112, 136, 248])
def test_few_channels(channels, dtype):
    """Whichever kernels take them: of few channels there are few clusters."""
    for images in (3, 64):
        args = inputs((images, channels, 14, 14), "cuda", dtype, fmt=CHANNELS_LAST)
        check("relu", True, args)


def test_on_few_multiprocessors():
    """There is room for fewer clusters."""
    args = inputs((64, 512, 7, 7), "cuda", torch.bfloat16, fmt=CHANNELS_LAST)
    with braze.multiprocessors(20):
        check("relu", True, args)
        assert "held_rows_forward_kernel" in kernels_of_step(args[0])


def test_rows():
    """[n, c] is rows of channels too."""
    x = torch.randn(300, 2048, device="cuda", requires_grad=True)
    check_against_stock(by_ours, of_stock, [x])
    assert "held_rows_forward_kernel" in kernels_of_step(x)


def test_what_takes_it():
    """Tensors from a megabyte on that shared memory holds, with an activation that has it."""
    x = draw((64, 256, 14, 14), torch.bfloat16)
    assert "held_rows_forward" in kernels_of_step(x)
    assert "held_rows" not in kernels_of_step(x[:4].contiguous(memory_format=CHANNELS_LAST))
    assert "held_rows" not in kernels_of_step(x, "mish")
    assert "held_rows" not in kernels_of_step(x.contiguous())
    assert "held_rows" not in kernels_of_step(x.double())
    assert "held_rows" not in kernels_of_step(draw((64, 254, 14, 14), torch.bfloat16))
    assert "held_rows" not in kernels_of_step(draw((64, 64, 112, 112), torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ILL_CONDITIONED)
def test_ill_conditioned_input(kind, dtype):
    mean = 1e4 if dtype == torch.float32 else 1e2
    check_ill_conditioned(draw((64, 256, 14, 14)), kind, dtype, mean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype):
    check_special_values(draw((64, 256, 14, 14), dtype))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_buffers(momentum):
    check_buffers(draw((64, 256, 14, 14)) * 3 - 2, momentum)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_repeatable(name):
    x, residual = (draw((64, 512, 7, 7), torch.bfloat16).requires_grad_() for _ in range(2))
    grad = torch.randn_like(x)

    def step():
        y = ours(name, True, x, residual, *(None,) * 4)
        return y.detach(), *torch.autograd.grad(y, (x, residual), grad)

    first = step()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


def test_in_a_captured_step():
    """Where kernels start while the one before still runs."""
    assert "held_rows_forward_kernel" in kernels_of_captured_step(256, 14)


def test_the_tests_reject_a_wrong_kernel():
    """One that forgets a block's rows."""

    def wrong(x):
        return by_ours(torch.cat([x[:-1], x[:1]]))

    x = draw((64, 256, 14, 14)).requires_grad_()
    with pytest.raises(AssertionError):
        check_against_stock(wrong, of_stock, [x])
