"""Batch norm's layers beside that of images."""

import copy

import pytest
import torch

import braze
from common import assert_by_rule

CASES = [
    ("BatchNorm1d", (6, 5)),
    ("BatchNorm1d", (4, 5, 9)),
    ("BatchNorm3d", (3, 5, 2, 4, 6)),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("settings", [{}, {"affine": False, "momentum": None}], ids=str)
@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_layers_match_stock(device, dtype, name, shape, settings, channels_last):
    theirs = getattr(torch.nn, name)(5, **settings).to(device, dtype)
    ours = getattr(braze.nn, name)(5, **settings).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, type(theirs))
    double = copy.deepcopy(theirs).double()
    x = torch.randn(shape, device=device).to(dtype)
    if channels_last and len(shape) == 5:
        x = x.to(memory_format=torch.channels_last_3d)
    for training in (True, False):
        results = []
        for layer, input in ((ours, x), (theirs, x), (double, x.double())):
            layer.train(training)
            leaf = input.detach().requires_grad_()
            y = layer(leaf)
            weights = torch.linspace(-1, 1, y.numel(), device=device).view(shape).to(dtype)
            (grad,) = torch.autograd.grad(y, leaf, weights.to(y))
            results.append([y, grad, *layer.buffers()])
        for i, (a, s, r) in enumerate(zip(*results, strict=True)):
            if a.is_floating_point():
                assert_by_rule(a, s, r, 8, what=f"{training} {i}")
            else:
                assert torch.equal(a, s)
        assert results[0][0].stride() == x.stride()


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_other_dimensions_are_refused(device, name, shape):
    x = torch.randn(2, 5, 3, 3, device=device)
    messages = []
    for n in (torch.nn, braze.nn):
        with pytest.raises(ValueError, match="expected ") as raised:
            getattr(n, name)(5).to(device)(x)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_the_tests_reject_a_wrong_layer(device):
    """One that takes the last dimension for the channels."""
    x = torch.randn(4, 5, 5, device=device)
    layer = braze.nn.BatchNorm1d(5).to(device)
    stock = torch.nn.BatchNorm1d(5).to(device)
    wrong = layer(x.transpose(1, 2)).transpose(1, 2)
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(wrong, stock(x), copy.deepcopy(stock).double()(x.double()))
