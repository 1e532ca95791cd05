"""batch_norm in training by every kernel that this device has: the rungs and what ships."""

import pytest
import torch
import torch.nn.functional as stock
from test_batch_norm import channel_vectors, parameter_dtypes

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, compile

CUDA = [
    "01_thread_per_channel",
    "02_block_per_channel",
    "03_welford",
    "04_split_channels",
    "05_shifted_sums",
    "planes",
    "rows",
    "resident",
]
NAMES = {"cpu": ["two_pass_blocks"], "cuda": CUDA}
#: the kernels that take any layout
ANY_LAYOUT = ("auto", "braze", "two_pass_blocks")
# Channels: fewer and more than a block of 01_thread_per_channel; of fewer elements than threads, of
# a part for each of many blocks; planes of whole vectors and not, smaller and larger than a block.
SHAPES = [
    (4, 8, 16, 16),
    (3, 5, 7, 11),
    (2, 32, 28, 28),
    (5, 64, 7, 7),
    (7, 13, 31),
    (2, 3, 4, 5, 6),
    (2, 300, 2, 2),
    (600, 2, 3, 3),
    (1, 2, 4, 2),
    (40, 1, 33, 31),
]


def rungs(device):
    """What braze.backend() takes for this device, the kernels' names last."""
    kernels = braze.kernels("batch_norm")
    names = [k["name"] for k in kernels if (k["arch"] == "cpu") == (device == "cpu")]
    assert names == NAMES[device]
    return ["auto", "braze", *names]


def takes(name, channels_last):
    """`resident`, which takes some of the latter, has tests of its own."""
    return name in ANY_LAYOUT or ((name == "rows") == channels_last and name != "resident")


def by(name):
    """Batch norm in training by that kernel, whichever backward follows."""

    def batch_norm(x, weight=None, bias=None, mean=None, var=None, momentum=0.1):
        with braze.backend(batch_norm=name):
            return F.batch_norm(x, mean, var, weight, bias, True, momentum)

    return batch_norm


def of_stock(x, weight=None, bias=None):
    return stock.batch_norm(x, None, None, weight, bias, True)


def check(batch_norm, *inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    return check_against_stock(batch_norm, of_stock, inputs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape):
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype)
    for name in rungs(device):
        if takes(name, False):
            for parameter_dtype in parameter_dtypes(dtype):
                weight, bias, *_ = channel_vectors(shape[1], device, parameter_dtype)
                y = check(by(name), x, weight, bias)
                assert y.stride() == x.stride(), name


@pytest.mark.parametrize("shape", [(4, 8, 6, 7), (3, 5, 6, 7), (64, 3), (5, 9, 1, 1)], ids=str)
def test_rows_of_channels(device, dtype, shape):
    """channels_last, and images of one element, which are the same: for `rows` alone."""
    x = torch.randn(shape, device=device).to(dtype)
    if shape[2:] == (6, 7):
        x = x.to(memory_format=torch.channels_last)
    for name in rungs(device):
        if name == "resident":
            continue
        if takes(name, True):
            y = check(by(name), x)
            assert y.stride() == x.stride(), name
        else:
            with pytest.raises(RuntimeError, match=f"{name} cannot take these arguments: it takes"):
                by(name)(x)


def test_unaligned_storage_offset(device, dtype):
    x = torch.randn(4 * 8 * 6 * 6 + 1, device=device).to(dtype)[1:].view(4, 8, 6, 6)
    for name in rungs(device):
        if takes(name, False):
            check(by(name), x)


def test_statistics_and_buffers(device, dtype):
    """What is returned beside the result, the running statistics, and the number of batches."""
    x = (torch.randn(6, 5, 7, 3, device=device) * 3 - 2).to(dtype)
    exact = x.double()
    mean, var = exact.mean((0, 2, 3)), exact.var((0, 2, 3), correction=0)
    for name in filter(lambda name: takes(name, False), rungs(device)):
        for momentum in (0.1, 0.0, 1.0, None):
            start = channel_vectors(5, device, dtype)[2:]
            kept, double = [t.clone() for t in start], [t.double() for t in start]
            expected = [t.clone() for t in start]
            count = torch.tensor(3, device=device)
            weight = 1 / 4 if momentum is None else momentum
            _, got_mean, got_rstd = torch.ops.braze.batch_norm_rung(
                x, None, None, *kept, count, momentum, 1e-5, name
            )
            assert count == 4
            for values, buffers in ((x, expected), (exact, double)):
                stock.batch_norm(values, *buffers, None, None, True, weight)
            for actual, of_torch, reference in zip(kept, expected, double, strict=True):
                assert_by_rule(actual, of_torch, reference, what=f"{name} {momentum}")
            f = got_mean.dtype
            assert_by_rule(got_mean, mean.to(f), mean, terms=x.numel())
            assert_by_rule(got_rstd, (var + 1e-5).rsqrt().to(f), (var + 1e-5).rsqrt())


@pytest.mark.parametrize("kind", ["large_mean", "outlier_first", "two_images_far_apart"])
def test_ill_conditioned_input(device, kind):
    """Where the mean dwarfs the deviation, or the first values are no guide."""
    x = torch.randn(16, 8, 14, 14, device=device)
    if kind == "large_mean":
        x += 1e4
    elif kind == "outlier_first":
        x[0, :, 0, 0] = 1e4
    else:
        x[8:] += 1e3
    for name in rungs(device):
        if takes(name, False):
            check(by(name), x)


def test_special_values(device, dtype):
    x = torch.randn(4, 6, 5, 5, device=device).to(dtype)
    x[0, 0, 0, 0], x[0, 1, 0, 0], x[1, 2, 1, 1] = float("nan"), float("inf"), -float("inf")
    x[:, 3] = 0.5  # no variance
    x[:, 4] = 1e-40
    for name in rungs(device):
        if takes(name, False):
            assert_by_rule(by(name)(x), of_stock(x), of_stock(x.double()))


def test_repeatable(device, dtype):
    x = torch.randn(17, 6, 13, 11, device=device).to(dtype)
    for name in rungs(device):
        if takes(name, False):
            first = by(name)(x)
            assert all(torch.equal(by(name)(x), first) for _ in range(3)), name


def test_empty(device):
    x = torch.randn(0, 3, 5, 5, device=device)
    for name in rungs(device):
        assert by(name)(x).shape == x.shape


def test_gradcheck(device):
    x = torch.randn(3, 4, 2, 3, device=device, dtype=torch.float64, requires_grad=True)
    weight, bias, *_ = channel_vectors(4, device, torch.float64)
    inputs = x, weight.requires_grad_(), bias.requires_grad_()
    for name in rungs(device):
        if takes(name, False):
            assert torch.autograd.gradcheck(by(name), inputs)


def test_opcheck(device, dtype):
    x = torch.randn(3, 4, 5, 6, device=device).to(dtype).requires_grad_()
    weight, bias, mean, var = channel_vectors(4, device, dtype)
    count = torch.zeros((), dtype=torch.int64, device=device)
    op, name = torch.ops.braze.batch_norm_rung.default, NAMES[device][0]
    weight.requires_grad_(), bias.requires_grad_()
    torch.library.opcheck(op, (x, weight, bias, mean, var, count, None, 1e-5, name))
    torch.library.opcheck(op, (x, None, None, None, None, None, 0.1, 1e-5, name))


def test_module_and_compile(device):
    """A layer under a chosen kernel: training by it, evaluation by the only one there is."""
    models = [nn.BatchNorm2d(5).to(device) for nn in (braze.nn, braze.nn, torch.nn)]
    calls = [models[0], compile(models[1]), models[2]]
    with braze.backend(batch_norm=NAMES[device][0]):
        for step in range(3):
            x = torch.randn(4, 5, 3, 3, device=device) + step
            for model in models:
                model.train(step < 2)
            results = [call(x) for call in calls]
            torch.testing.assert_close(results[0], results[2])
            torch.testing.assert_close(results[1], results[2])
            torch.testing.assert_close(models[0].state_dict(), models[2].state_dict())
            torch.testing.assert_close(models[1].state_dict(), models[2].state_dict())


def test_saved_buffer_is_protected(device):
    """A graph that saved a buffer refuses to go backward after the buffer was updated."""
    mean = torch.zeros(3, device=device)
    leaf = torch.ones(3, device=device, requires_grad=True)
    z = (leaf * mean).sum()
    x = torch.randn(4, 3, 2, 2, device=device)
    by(NAMES[device][0])(x, mean=mean, var=torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_unknown_kernels(device):
    x = torch.randn(3, 4, 2, 2, device=device)
    nothing = (None,) * 5
    for name in ("no_such_kernel", "", "cudnn"):
        with pytest.raises(ValueError, match="expected batch_norm to be one of auto, braze, "):
            braze.backend(batch_norm=name)
        with pytest.raises(RuntimeError, match="expected backend to be one of auto, braze, "):
            torch.ops.braze.batch_norm_rung(x, *nothing, 0.1, 1e-5, name)


def normalised(t, squares):
    var = squares.sum((0, 2, 3), keepdim=True) / (t.numel() / t.size(1))
    return ((t.double() - t.double().mean((0, 2, 3), keepdim=True)) / (var + 1e-5).sqrt()).to(t)


def merged_without_distance(t):
    """Parts merged without what their means' distance adds: Chan's formula cut short."""
    parts = [p.double() for p in t.chunk(2)]
    return normalised(t, torch.cat([(p - p.mean((0, 2, 3), keepdim=True)) ** 2 for p in parts]))


def mean_of_the_first_part(t):
    """Squares about the mean of a block's first elements that are not moved to that of all."""
    x = t.double()
    return normalised(t, (x - x[:1].mean((0, 2, 3), keepdim=True)) ** 2)


@pytest.mark.parametrize("wrong", [merged_without_distance, mean_of_the_first_part])
def test_the_tests_reject_a_wrong_kernel(device, dtype, wrong):
    x = torch.randn(4, 3, 5, 5, device=device)
    x[2:] += 4
    x = x.to(dtype)
    check(of_stock, x)
    with pytest.raises(AssertionError, match="error"):
        check(wrong, x)
