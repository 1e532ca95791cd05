"""sync_batch_norm's ops on parts of a batch, in one process. Several: test_distributed.py."""

import pytest
import torch

import braze
from common import check_against_stock

ops = torch.ops.braze
SHAPES = [(6, 5), (6, 8, 3, 5), (4, 3, 17), (5, 64, 4, 4), (7, 1, 9, 9)]


class InParts(torch.autograd.Function):
    """Batch norm, made part by part."""

    @staticmethod
    def forward(ctx, x, weight, bias, sizes, buffers, momentum):
        moments = torch.stack([ops.sync_batch_norm_moments(part) for part in x.split(sizes)], 1)
        outputs = []
        for i, part in enumerate(x.split(sizes)):
            updated = (None,) * 3 if i else buffers  # once
            output, statistics, total = ops.sync_batch_norm(
                part, moments, weight, bias, *updated, momentum, 1e-5
            )
            outputs.append(output)
        ctx.save_for_backward(x, weight, statistics, total)
        ctx.sizes = sizes
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight, statistics, total = ctx.saved_tensors
        pairs = list(zip(grad.split(ctx.sizes), x.split(ctx.sizes), strict=True))
        made = [ops.sync_batch_norm_sums(*pair, weight, statistics) for pair in pairs]
        sums = torch.stack([one[0] for one in made]).sum(0)
        dx = [
            ops.sync_batch_norm_input_grad(*pair, weight, statistics, sums, total) for pair in pairs
        ]
        dweight, dbias = (sum(one[i].double() for one in made).to(made[0][i]) for i in (1, 2))
        given = weight is not None
        return torch.cat(dx), dweight if given else None, dbias if given else None, None, None, None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mean", [0, 1000])
def test_parts_are_the_whole(device, dtype, shape, affine, mean):
    sizes = [2, 0, 1, shape[0] - 3]
    x = (torch.randn(shape, device=device) + mean).to(dtype)
    if len(shape) == 4 and affine:
        x = x.to(memory_format=torch.channels_last)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    parameters = [torch.randn(shape[1], device=device, dtype=kept) for _ in range(2 * affine)]
    leaves = [t.requires_grad_() for t in (x, *parameters)]

    def ours(x, weight=None, bias=None):
        return InParts.apply(x, weight, bias, sizes, (None,) * 3, 0.1)

    def stock(x, weight=None, bias=None):
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)

    check_against_stock(ours, stock, leaves)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_buffers_and_layout(device, memory_format):
    x = torch.randn(8, 5, 3, 4, device=device).to(memory_format=memory_format)
    norm = torch.nn.BatchNorm2d(5, momentum=0.3, device=device)
    buffers = norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()
    norm(x)
    InParts.apply(x, None, None, [3, 5], buffers, 0.3)
    for ours, expected in zip(buffers, norm.buffers(), strict=True):
        torch.testing.assert_close(ours, expected)
    whole = ops.sync_batch_norm_moments(x).unsqueeze(1)
    out, *_ = ops.sync_batch_norm(x, whole, None, None, None, None, None, 0.1, 1e-5)
    assert out.stride() == x.stride()


def test_cumulative_average(device):
    x = torch.randn(8, 3, 2, 2, device=device)
    norm = torch.nn.BatchNorm2d(3, momentum=None, device=device)
    mean, var, count = norm.running_mean.clone(), norm.running_var.clone(), torch.tensor(0)
    count = count.to(device)
    for _ in range(3):
        x = x * 1.5 + 1
        norm(x)
        moments = ops.sync_batch_norm_moments(x).unsqueeze(1)
        ops.sync_batch_norm(x, moments, None, None, mean, var, count, None, 1e-5)
    assert count == 3
    torch.testing.assert_close(mean, norm.running_mean)
    torch.testing.assert_close(var, norm.running_var)


def test_nothing_anywhere_changes_nothing(device):
    x = torch.randn(0, 3, 2, 2, device=device)
    mean, var = torch.full((3,), 2.0, device=device), torch.full((3,), 5.0, device=device)
    moments = ops.sync_batch_norm_moments(x).unsqueeze(1).repeat(1, 2, 1)
    out, _, total = ops.sync_batch_norm(x, moments, None, None, mean, var, None, 0.1, 1e-5)
    assert out.shape == x.shape
    assert total == 0
    assert (mean == 2).all()
    assert (var == 5).all()


def test_opcheck(device):
    x = torch.randn(4, 3, 2, 2, device=device)
    w = torch.randn(3, device=device)
    buffers = torch.zeros(3, device=device), torch.ones(3, device=device)
    moments = ops.sync_batch_norm_moments(x).unsqueeze(1)
    count = torch.tensor(0, device=device)
    arguments = x, moments, w, w, *buffers, count, 0.1, 1e-5
    _, statistics, total = ops.sync_batch_norm(*arguments)
    sums, *_ = ops.sync_batch_norm_sums(x, x, w, statistics)
    for op, given in (
        (ops.sync_batch_norm_moments, (x,)),
        (ops.sync_batch_norm, arguments),
        (ops.sync_batch_norm_sums, (x, x, w, statistics)),
        (ops.sync_batch_norm_input_grad, (x, x, w, statistics, sums, total)),
    ):
        torch.library.opcheck(op.default, given)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("moments", lambda a: a.__setitem__(1, a[1][:2])),
        ("moments", lambda a: a.__setitem__(1, a[1].float())),
        ("weight", lambda a: a.__setitem__(2, torch.ones(4, device=a[0].device))),
        ("running_var", lambda a: a.__setitem__(5, None)),
    ],
)
def test_bad_input(device, what, change):
    x = torch.randn(4, 3, 2, 2, device=device)
    moments = ops.sync_batch_norm_moments(x).unsqueeze(1).contiguous()
    mean = torch.zeros(3, device=device)
    arguments = [x, moments, None, None, mean, mean + 1, None, 0.1, 1e-5]
    change(arguments)
    with pytest.raises(RuntimeError, match=what):
        ops.sync_batch_norm(*arguments)
    assert (mean == 0).all()


def test_layer_alone_is_batch_norm(device):
    """Without a process group, as torch's."""
    x = torch.randn(4, 3, 5, 5, device=device)
    norm, stock_norm = (kind.SyncBatchNorm(3, device=device) for kind in (braze.nn, torch.nn))
    torch.testing.assert_close(norm(x), stock_norm(x))
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_var, stock_norm.running_var)
    with pytest.raises(ValueError, match="at least 2D input"):
        norm(x[0, 0, 0])
