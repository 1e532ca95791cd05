"""Batch norm's training passes over contiguous tensors as one kernel each, whose clusters hold a
few channels of all images in shared memory."""

import pytest
import torch
from test_batch_norm_act import check, inputs, ours
from test_batch_norm_ladder import of_stock
from test_batch_norm_resident import kernels_of_step

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["large_mean", "outlier_first", "two_images_far_apart"])
def test_ill_conditioned_input(kind, dtype):
    x = torch.randn(64, 96, 28, 28, device="cuda")
    if kind == "large_mean":
        x += 1e2
    elif kind == "outlier_first":
        x[0, :, 0, 0] = 1e4
    else:
        x[32:] += 1e3
    check_against_stock(by_ours, of_stock, [x.to(dtype).requires_grad_()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype):
    x = torch.randn(64, 96, 14, 14, device="cuda").to(dtype)
    x[0, 0, 0, 0], x[0, 1, 0, 0], x[1, 2, 1, 1] = float("nan"), float("inf"), -float("inf")
    x[:, 3] = 0.5  # no variance
    x[:, 4] = 1e-40
    assert_by_rule(by_ours(x), of_stock(x), of_stock(x.double()))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_buffers(momentum):
    x = torch.randn(64, 96, 28, 28, device="cuda") * 3 - 2
    norms = [torch.nn.BatchNorm2d(96, momentum=momentum, device="cuda") for _ in range(2)]
    norms.append(torch.nn.BatchNorm2d(96, momentum=momentum, device="cuda").double())
    norms[0] = braze.convert(torch.nn.Sequential(norms[0], torch.nn.ReLU()))
    for _ in range(3):
        x = x + 1
        for norm, values in zip(norms, (x, x, x.double()), strict=True):
            norm(values)
    actual, expected, exact = (list(norm.buffers()) for norm in norms)
    assert actual[2] == 3
    for a, b, c in zip(actual[:2], expected, exact, strict=False):
        assert_by_rule(a, b, c, what=str(momentum))


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
