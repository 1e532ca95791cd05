"""torch.utils.flop_counter counts for braze's layers what it counts for torch's."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import braze
import braze.nn.functional as F


def count(function, x, backward=True):
    """Forward and backward, of a function that returns one tensor."""
    with FlopCounterMode(display=False) as counter:
        result = function(x)
        if backward:
            result.sum().backward()
    return counter.get_total_flops()


def conv(*args, **settings):
    return torch.nn.Sequential(torch.nn.Conv2d(*args, **settings), torch.nn.BatchNorm2d(args[1]))


def models():
    """name -> (stock's model, the shape of its input)"""
    nn = torch.nn
    return {
        "linear": (nn.Linear(5, 3), (4, 5)),
        "linear on a sequence": (nn.Linear(5, 3, bias=False), (4, 2, 5)),
        "linear and relu": (nn.Sequential(nn.Linear(5, 3), nn.ReLU()), (4, 5)),
        "conv2d": (nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 8, 9)),
        "conv2d of groups": (nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 8, 9)),
        "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (2, 4, 8, 9)),
        "conv_transpose2d of groups": (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 8, 9)),
        "block": (nn.Sequential(*conv(3, 4, 3, padding=1), nn.ReLU()), (2, 3, 8, 9)),
        "pooled block": (
            nn.Sequential(*conv(8, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2)),
            (2, 8, 12, 12),
        ),
        "first block": (
            nn.Sequential(*conv(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            (2, 1, 8, 9),
        ),
    }


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("input_grad", [False, True])
def test_as_stock(device, name, input_grad):
    stock, shape = models()[name]
    ours = braze.convert(copy.deepcopy(stock)).to(device)
    x = torch.randn(shape, device=device)
    wanted = [
        count(f, x.clone().requires_grad_(input_grad), backward)
        for f in (stock.to(device), ours)
        for backward in (False, True)
    ]
    assert wanted[0] > 0
    assert wanted[:2] == wanted[2:]


def test_functions(device):
    """Those that no layer calls."""

    def t(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    def mlp(f):
        w1, b1, w2, b2 = t(3, 5), t(3), t(2, 3), t(2)
        if f is F:
            return lambda x: F.linear_relu_linear(x, w1, b1, w2, b2)
        return lambda x: f.linear(f.relu(f.linear(x, w1, b1)), w2, b2)

    def add(f):
        w, b, r = t(3, 5), t(3), t(4, 3)
        if f is F:
            return lambda x: F.linear_add(x, w, b, r)
        return lambda x: f.linear(x, w, b) + r

    def batched(f):
        other = t(4, 5, 3)
        matmul = braze.matmul if f is F else torch.matmul
        return lambda x: matmul(x, other)

    for make, shape in [(mlp, (4, 5)), (add, (4, 5)), (batched, (4, 2, 5))]:
        ours, stock = (count(make(f), t(*shape)) for f in (F, torch.nn.functional))
        assert ours == stock > 0
