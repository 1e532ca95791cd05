"""conv_bn_act: what braze.convert makes of a convolution, batch norm and what follows on GPUs, here
on both devices."""

import importlib

import pytest
import torch
import torch.nn.functional as stock

from braze._ops.conv_bn_act import conv_bn_act
from common import assert_by_rule, check_against_stock

op = torch.ops.braze.conv_bn_act.default
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
ACTIVATIONS = {"identity": lambda v: v, "relu": torch.relu, "silu": stock.silu, "gelu": stock.gelu}
GEOMETRY = (1, 1), (1, 1), (1, 1), 1


@pytest.fixture(autouse=True)
def _on_every_device(monkeypatch):
    runs = importlib.import_module("braze.convert.runs")
    monkeypatch.setattr(runs, "CONV_BN_ACT_ON", ("cpu", "cuda"))


def inputs(device, dtype, form, residual=True, n=3, c=8, k=12, size=7):
    """Of small integers, as test_conv_bn_relu has them."""

    def draw(*shape):
        return torch.randint(-2, 3, shape, device=device).to(dtype).requires_grad_()

    def image(channels):
        images = draw(n, channels, size, size).detach()
        return images.contiguous(memory_format=FORMATS[form]).requires_grad_()

    weight = draw(k, c, 3, 3).detach().contiguous(memory_format=FORMATS[form]).requires_grad_()
    gamma, beta = (torch.rand(k, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    return image(c), weight, draw(k), image(k) if residual else None, gamma, beta


def ours(name, tensors, mean=None, var=None, batches=None):
    norm = mean, var, batches
    return conv_bn_act(*tensors, *norm, *GEOMETRY, True, 0.1, 1e-5, name, ())


def reference(name, x, w, b, residual, gamma, beta, mean=None, var=None):
    z = stock.conv2d(x, w, b, padding=1)
    y = stock.batch_norm(z, mean, var, gamma, beta, True)
    return ACTIVATIONS[name](y if residual is None else y + residual)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_stock(device, dtype, name, residual, form):
    tensors = list(inputs(device, dtype, form, residual))
    tensors[2] = tensors[2].detach()  # whose gradient is zero, but for roundings
    given = [t for t in tensors if t is not None]

    def placed(t):
        return t if residual else (*t[:3], None, *t[3:])

    check_against_stock(
        lambda *t: ours(name, placed(t)), lambda *t: reference(name, *placed(t)), given, ulps=16
    )


def test_buffers(device, dtype):
    tensors = [t.detach() for t in inputs(device, dtype, "channels_last")]
    batches = torch.zeros((), dtype=torch.int64, device=device)
    buffers = [[torch.full((12,), v, device=device, dtype=dtype) for v in (0.5, 2)] for _ in "abc"]
    version = buffers[0][0]._version
    ours("relu", tensors, *buffers[0], batches)
    assert buffers[0][0]._version > version
    assert batches == 1
    reference("relu", *tensors, *buffers[1])
    wide = [t.double() for t in buffers[2]]
    reference("relu", *(t.double() for t in tensors), *wide)
    for actual, theirs, exact in zip(*buffers[:2], wide, strict=True):
        assert_by_rule(actual, theirs, exact, ulps=8, terms=147)


@pytest.mark.parametrize("name", ["identity", "relu", "silu"])
def test_derivatives(device, name):
    for residual in (True, False):
        tensors = inputs(device, torch.float64, "channels_last", residual, 2, 2, 2, 3)
        # Away from the kinks.
        moved = [None if t is None else (t + torch.rand_like(t) / 4).detach() for t in tensors]
        given = [t.requires_grad_() for t in moved if t is not None]

        def run(*t, residual=residual):
            return ours(name, t if residual else (*t[:3], None, *t[3:]))

        assert torch.autograd.gradcheck(run, given)
        assert torch.autograd.gradgradcheck(run, given)


def test_opcheck(device, dtype):
    for residual in (True, False):
        tensors = inputs(device, dtype, "channels_last", residual)
        rest = [[1, 1]] * 3, 1, True, 0.1, 1e-5, "relu", 0.0, 0.0
        torch.library.opcheck(op, (*tensors, None, None, None, *rest[0], *rest[1:]))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t[:3] + [t[3][:, :, :1]] + t[4:], "a residual that is broadcast"),
        (lambda t: t[:3] + [t[3].contiguous()] + t[4:], "one of another memory format"),
        (lambda t: t[:3] + [t[3].double()] + t[4:], "one of another dtype"),
        (lambda t: [t[0], t[1].double(), *t[2:]], "a weight of another dtype"),
        (lambda t: [t[0][:, :3], *t[1:]], "other channels"),
        (lambda t: [*t[:4], t[4][:3], *t[5:]], "a parameter of another size"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_is_left_to_others(device, change, what):
    tensors = [t.detach() for t in inputs(device, torch.float32, "channels_last")]
    assert ours("relu", tensors) is not None
    assert ours("relu", change(tensors)) is None, what
