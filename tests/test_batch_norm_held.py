"""Batch norm's training passes over contiguous tensors as one kernel each, whose clusters hold a
few channels of all images in shared memory."""

import functools

import pytest
import torch
from test_batch_norm_act import check, inputs, ours
from test_batch_norm_ladder import of_stock
from test_batch_norm_resident import kernels_of_step
from torch import nn

import braze
from common import assert_by_rule, check_against_stock

pytestmark = pytest.mark.usefixtures("hopper")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one channel of a cluster, two, four and eight; two blocks and as many as there may be; images that
# no number of blocks divides; vectors of one, two, four and eight elements
SHAPES = [
    (64, 96, 28, 28),
    (33, 160, 14, 14),
    (70, 512, 7, 7),
    (9, 64, 56, 56),
    (11, 64, 30, 31),
    (9, 520, 15, 17),
    (2, 512, 56, 40),
    (3, 1024, 28, 20),
    (300, 264, 3, 5),
]


def by_ours(x):
    return ours("identity", True, x, None, *(None,) * 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("name", ["identity", "relu", "relu6", "silu", "hardswish", "gelu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(shape, name, residual, dtype):
    args = inputs(shape, "cuda", dtype, residual=residual)
    assert check(name, True, args).is_contiguous()
    kernels = kernels_of_step(args[0], name)
    assert "held_forward_kernel" in kernels
    assert "held_backward_kernel" in kernels


def test_what_takes_it():
    """Tensors of a megabyte and more whose channels fit a cluster, with an activation that has it;
    elsewhere the passes are kernels of their own."""
    x = torch.randn(64, 64, 28, 28, device="cuda", dtype=torch.bfloat16)
    assert "held_forward" in kernels_of_step(x)
    assert "held" not in kernels_of_step(x[:4].contiguous())
    assert "held" not in kernels_of_step(x, "mish")
    assert "held_forward" not in kernels_of_step(x.contiguous(memory_format=torch.channels_last))
    assert "held" not in kernels_of_step(x.double())
    assert "held" not in kernels_of_step(torch.randn(1, 512, 56, 40, device="cuda"))
    large = torch.randn(256, 8, 112, 112, device="cuda", dtype=torch.bfloat16)  # 6 MB a channel
    assert "held" not in kernels_of_step(large)


ILL_CONDITIONED = ["large_mean", "outlier_first", "two_images_far_apart"]


def check_ill_conditioned(x, kind, dtype, mean=1e2):
    """64 images in float32 that are made ill-conditioned, and converted."""
    if kind == "large_mean":
        x += mean
    elif kind == "outlier_first":
        x[0, :, 0, 0] = 1e4
    else:
        x[32:] += 1e3
    check_against_stock(by_ours, of_stock, [x.to(dtype).requires_grad_()])


def check_special_values(x):
    x[0, 0, 0, 0], x[0, 1, 0, 0], x[1, 2, 1, 1] = float("nan"), float("inf"), -float("inf")
    x[:, 3] = 0.5  # no variance
    x[:, 4] = 1e-40
    assert_by_rule(by_ours(x), of_stock(x), of_stock(x.double()))


def check_buffers(x, momentum):
    made = functools.partial(nn.BatchNorm2d, x.shape[1], momentum=momentum, device=x.device)
    norms = [made(), made(), made().double()]
    norms[0] = braze.convert(nn.Sequential(norms[0], nn.ReLU()))
    for _ in range(3):
        x = x + 1
        for norm, values in zip(norms, (x, x, x.double()), strict=True):
            norm(values)
    actual, expected, exact = (list(norm.buffers()) for norm in norms)
    assert actual[2] == 3
    for a, b, c in zip(actual[:2], expected, exact, strict=False):
        assert_by_rule(a, b, c, what=str(momentum))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ILL_CONDITIONED)
def test_ill_conditioned_input(kind, dtype):
    check_ill_conditioned(torch.randn(64, 96, 28, 28, device="cuda"), kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype):
    check_special_values(torch.randn(64, 96, 14, 14, device="cuda").to(dtype))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_buffers(momentum):
    check_buffers(torch.randn(64, 96, 28, 28, device="cuda") * 3 - 2, momentum)


def test_repeatable():
    x = torch.randn(64, 96, 28, 28, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn_like(x)

    def step():
        y = ours("relu", True, x, None, *(None,) * 4)
        return y.detach(), *torch.autograd.grad(y, x, grad)

    first = step()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


def test_the_tests_reject_a_wrong_kernel():
    """One that forgets a block's images."""

    def wrong(x):
        return by_ours(torch.cat([x[:-1], x[:1]]))

    x = torch.randn(64, 96, 28, 28, device="cuda").requires_grad_()
    with pytest.raises(AssertionError):
        check_against_stock(wrong, of_stock, [x])
