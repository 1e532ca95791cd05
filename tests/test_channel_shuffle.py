import pytest
import torch

import braze
import braze.nn.functional as F
from braze._ops import channel_shuffle as ops
from common import compile
from convert_models import ops_run

# (shape, groups): halves of whole vectors, of pairs, of odd numbers; many groups; groups of one
# channel, one group; one pixel; more elements than a launch has threads
CASES = [
    ((2, 16, 5, 6), 2),
    ((3, 20, 7, 7), 2),
    ((2, 116, 9, 5), 2),
    ((2, 58, 4, 4), 2),
    ((2, 30, 4, 3), 2),
    ((2, 16, 5, 6), 8),
    ((2, 24, 3, 5), 12),
    ((2, 18, 3, 5), 3),
    ((1, 240, 14, 14), 5),
    ((2, 6, 3, 3), 6),
    ((2, 6, 3, 3), 1),
    ((1, 2, 2, 1), 2),
    ((32, 232, 28, 28), 2),
    ((32, 232, 28, 28), 116),
]
raw = torch.ops.braze.channel_shuffle


def stock(x, groups):
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


def image(shape, device, dtype):
    x = torch.randn(shape, device=device).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(ops, "SHUFFLE_ON", ("cpu", "cuda"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_stock(device, dtype, case):
    """A copy: bit for bit, and so is the gradient."""
    shape, groups = case
    x = image(shape, device, dtype).requires_grad_()
    y = F.channel_shuffle(x, groups)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.grad_fn.name() == "ChannelShuffleBackward"
    expected = stock(x, groups)
    assert torch.equal(y, expected)
    dy = torch.randn_like(expected)
    assert torch.equal(torch.nn.functional.channel_shuffle(x, groups), expected)
    for grad in (dy, dy.contiguous(memory_format=torch.channels_last)):
        (mine,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        assert torch.equal(mine, torch.autograd.grad(expected, x, grad, retain_graph=True)[0])


def test_a_wrong_order_is_seen(device):
    x = image((2, 12, 3, 3), device, torch.float32)
    assert not torch.equal(F.channel_shuffle(x, 3), stock(x, 4))


def test_parts_of_other_tensors(device, dtype):
    """Channels that begin anywhere, whose pixels lie further apart, and other orders."""
    whole = image((2, 40, 5, 6), device, dtype)
    for first, count, groups in ((0, 16, 2), (3, 16, 2), (8, 24, 12), (5, 30, 3)):
        x = whole[:, first : first + count]
        assert torch.equal(raw(x, groups), stock(x.contiguous(), groups))
    x = whole[:, :, ::2, 1:]
    assert torch.equal(raw(x, 4), stock(x.contiguous(), 4))
    assert torch.equal(raw(whole.contiguous(), 5), stock(whole.contiguous(), 5))


def test_what_stays_torchs(device):
    x = torch.randn(2, 8, 3, 3, device=device)
    ran = lambda *args: "channel_shuffle" in ops_run(lambda: F.channel_shuffle(*args))  # noqa: E731
    last = x.contiguous(memory_format=torch.channels_last)
    assert ran(last, 2)
    assert not ran(x, 2)
    assert torch.equal(F.channel_shuffle(x, 2), stock(x, 2))


def test_empty(device):
    for shape in ((0, 8, 3, 3), (2, 8, 0, 3)):
        x = torch.empty(shape, device=device).contiguous(memory_format=torch.channels_last)
        assert raw(x, 2).shape == shape
        assert F.channel_shuffle(x, 2).shape == shape


def test_derivatives(device):
    x = image((2, 6, 2, 3), device, torch.float64).requires_grad_()
    for groups in (2, 3):
        torch.autograd.gradcheck(lambda x, g=groups: F.channel_shuffle(x, g), x)
        torch.autograd.gradgradcheck(lambda x, g=groups: F.channel_shuffle(x, g), x)


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_torch_func(device, transform):
    x = image((2, 6, 2, 3), device, torch.float32)
    if transform == "vmap":
        y = torch.vmap(lambda x: F.channel_shuffle(x, 2))(torch.stack([x, 2 * x]))
        assert torch.equal(y[1], stock(2 * x, 2))
    else:
        y, dy = torch.func.jvp(lambda x: F.channel_shuffle(x, 2), (x,), (2 * x,))
        assert torch.equal(dy, 2 * y)


def test_opcheck(device):
    x = image((2, 8, 3, 4), device, torch.float32)
    torch.library.opcheck(raw, (x.requires_grad_(), 2))
    torch.library.opcheck(raw, (torch.randn(2, 8, 3, 4, device=device), 4))


def test_compile(device):
    x = image((2, 8, 3, 4), device, torch.float32).requires_grad_()
    y = compile(lambda x: F.channel_shuffle(x, 2) * 2)(x)
    assert torch.equal(y, 2 * stock(x, 2))
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(grad, 8 * x)


def test_bad_input(device):
    x = image((2, 8, 3, 4), device, torch.float32)
    for groups in (0, -2, 3):
        with pytest.raises(RuntimeError, match="groups"):
            raw(x, groups)
        with pytest.raises(RuntimeError, match="group"):
            F.channel_shuffle(x, groups)
    with pytest.raises(RuntimeError, match="expected input to be 4-D"):
        raw(x[0], 2)
    with pytest.raises(RuntimeError, match=r"float32"):
        raw(x.to(torch.int32), 2)
    with pytest.raises(TypeError, match="channel_shuffle"):
        F.channel_shuffle([1], 2)


def test_listed(device):
    arch = "cpu" if device == "cpu" else "sm_80+"
    assert arch in [kernel["arch"] for kernel in braze.kernels("channel_shuffle")]
