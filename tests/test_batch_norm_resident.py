"""Batch norm's training passes as one kernel each, which keeps rows in shared memory between its
two passes: by name, and where large channels_last tensors take it by themselves."""

import pytest
import torch
import torch.nn.functional as stock
from test_batch_norm_act import check, inputs, ours
from test_batch_norm_ladder import by, of_stock
from torch import nn

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, cuda_kernels_of

pytestmark = pytest.mark.usefixtures("hopper")

CHANNELS_LAST = torch.channels_last
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# fewer rows than blocks, one stage and many; a vector a row and as many as threads, and what does
# not divide them
SHAPES = [
    (1, 8, 1, 2),
    (3, 16, 5, 7),
    (2, 24, 200, 211),
    (4, 64, 150, 151),
    (2, 96, 90, 91),
    (3, 1152, 17, 16),
    (64, 2048, 7, 7),
    (5, 2048, 6, 5),
    (2, 2040, 11, 4),
]


def draw(shape, dtype, scale=2.0, shift=1.0):
    x = torch.randn(shape, device="cuda") * scale + shift
    return x.to(dtype, memory_format=CHANNELS_LAST)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, dtype):
    x = draw(shape, dtype)
    weight, bias = torch.randn(2, shape[1], device="cuda")
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    y = check_against_stock(by("resident"), of_stock, tensors)
    assert y.stride() == x.stride()


@pytest.mark.parametrize("kind", ["large_mean", "outlier_first", "two_images_far_apart"])
def test_ill_conditioned_input(kind):
    x = draw((64, 8, 44, 44), torch.float32, shift=0.0)
    if kind == "large_mean":
        x += 1e4
    elif kind == "outlier_first":
        x[0, :, 0, 0] = 1e4
    else:
        x[32:] += 1e3
    check_against_stock(by("resident"), of_stock, [x.requires_grad_()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype):
    x = draw((4, 8, 25, 25), dtype)
    x[0, 0, 0, 0], x[0, 1, 0, 0], x[1, 2, 1, 1] = float("nan"), float("inf"), -float("inf")
    x[:, 3] = 0.5  # no variance
    x[:, 4] = 1e-40
    assert_by_rule(by("resident")(x), of_stock(x), of_stock(x.double()))


def test_buffers():
    for momentum in (0.1, 1.0, None):
        x = draw((6, 8, 70, 30), torch.float32, 3, -2)
        mean, var = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
        expected, exact = [t.clone() for t in (mean, var)], [t.double() for t in (mean, var)]
        count = torch.tensor(3, device="cuda")
        torch.ops.braze.batch_norm_rung(x, None, None, mean, var, count, momentum, 1e-5, "resident")
        assert count == 4
        weight = 1 / 4 if momentum is None else momentum
        for values, buffers in ((x, expected), (x.double(), exact)):
            stock.batch_norm(values, *buffers, None, None, True, weight)
        for actual, of_torch, reference in zip((mean, var), expected, exact, strict=True):
            assert_by_rule(actual, of_torch, reference, what=str(momentum))


@pytest.mark.parametrize("x", [(4, 6, 8, 8), (4, 8, 8, 8)], ids=["channels", "layout"])
def test_bad_input(x):
    x = torch.randn(x, device="cuda")
    if x.shape[1] == 6:
        x = x.contiguous(memory_format=CHANNELS_LAST)
    with pytest.raises(RuntimeError, match="resident cannot take these arguments: it takes"):
        by("resident")(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("name", ["identity", "relu", "relu6", "silu", "hardswish", "gelu"])
@pytest.mark.parametrize("shape", [(16, 64, 99, 101), (64, 768, 14, 14)], ids=str)
def test_large_tensors(shape, name, residual, dtype):
    args = inputs(shape, "cuda", dtype, residual=residual, fmt=CHANNELS_LAST)
    check(name, True, args)


def kernels_of_step(x, name="relu"):
    x = x.detach().requires_grad_()
    grad = torch.ones_like(x)

    def step():
        torch.autograd.grad(ours(name, True, x, None, *(None,) * 4), x, grad)

    return cuda_kernels_of(step)


def test_what_takes_it():
    """Large tensors with an activation that has it; elsewhere the passes are kernels of their
    own."""
    large, small = draw((64, 64, 56, 56), torch.bfloat16), draw((4, 64, 28, 28), torch.bfloat16)
    taken = kernels_of_step(large)
    assert "resident_forward_kernel" in taken
    assert "resident_backward_kernel" in taken
    assert "resident" not in kernels_of_step(small)
    assert "resident" not in kernels_of_step(large.detach().contiguous())
    assert "resident" not in kernels_of_step(large.detach(), "mish")


def test_repeatable():
    x = draw((16, 64, 99, 101), torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)

    def step():
        y = ours("relu", True, x, None, *(None,) * 4)
        return y.detach(), *torch.autograd.grad(y, x, grad)

    first = step()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


def test_on_two_streams_at_once():
    """Blocks wait for each other: two such kernels must not each hold half of the GPU."""
    x = [draw((64, 64, 56, 56), torch.bfloat16) for _ in range(2)]
    expected = [F.batch_norm_act(t, None, None, None, None, True, activation="relu") for t in x]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(50):
        for stream, t, found in zip(streams, x, results, strict=True):
            with torch.cuda.stream(stream):
                found[:] = [F.batch_norm_act(t, None, None, None, None, True, activation="relu")]
    torch.cuda.synchronize()
    for found, y in zip(results, expected, strict=True):
        assert torch.equal(found[0], y)


def kernels_of_captured_step(channels, extent):
    """Of a TrainStep that learns something, whose batch norms have so many channels, and images so
    many rows and columns."""
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Conv2d(channels, channels, 5, padding=2, bias=False), nn.BatchNorm2d(channels),
        nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10),
    ).to("cuda", memory_format=CHANNELS_LAST)  # fmt: skip
    model = braze.convert(model)
    optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
    step = braze.TrainStep(model, stock.cross_entropy, optimizer, autocast=torch.bfloat16)
    x = draw((64, 3, extent, extent), torch.float32)
    target = torch.randint(0, 10, (64,), device="cuda")
    losses = [step(x, target).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    return cuda_kernels_of(lambda: step(x, target))


def test_in_a_captured_step():
    assert "resident_forward_kernel" in kernels_of_captured_step(64, 56)


def test_the_tests_reject_a_wrong_kernel():
    """One that forgets a block's part of the rows."""

    def wrong(x, *rest):
        return by("resident")(torch.cat([x[:-1], x[:1]]), *rest)

    x = draw((4, 64, 33, 33), torch.float32).requires_grad_()
    with pytest.raises(AssertionError):
        check_against_stock(wrong, of_stock, [x])
