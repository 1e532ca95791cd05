"""conv_bn_act in evaluation mode without gradients: one kernel does convolution, batch norm, an
addition and an activation where it can."""

import copy

import pytest
import torch
import torch.nn.functional as stock
from torch import nn

import braze
from braze._ops.conv_bn_act import conv_bn_act
from common import assert_by_rule, cuda_kernels_of

op = torch.ops.braze.conv_bn_act_inference.default
LAST = torch.channels_last
#: name in the op, its settings, torch's function
ACTIVATIONS = {
    "identity": (("identity", ()), lambda v: v),
    "relu": (("relu", ()), torch.relu),
    "relu6": (("hardtanh", (0.0, 6.0)), stock.relu6),
    "silu": (("silu", ()), stock.silu),
    "gelu": (("gelu", ()), stock.gelu),
    # (torch's own has a sixth in float32, in float64 too.)
    "hardswish": (("hardswish", ()), lambda v: v * (v + 3).clamp(0, 6) / 6),
    "mish": (("mish", ()), stock.mish),
}
#: channels, filters, filter, stride, padding, groups, size: a class of kernels each
CASES = {
    "3x3": (32, 48, 3, 1, 1, 1, 13),
    "3x3/2": (64, 64, 3, 2, 1, 1, 14),
    "3x3 many": (64, 264, 3, 1, 1, 1, 9),
    "1x1": (40, 72, 1, 1, 0, 1, 15),
    "1x1/2": (64, 128, 1, 2, 0, 1, 9),
    "1x1 few": (16, 24, 1, 1, 0, 1, 20),
    "odd": (7, 13, 3, 1, 1, 1, 9),
    "first": (3, 40, 7, 2, 3, 1, 33),
    "depthwise": (48, 48, 3, 1, 1, 48, 17),
    "depthwise/2": (24, 24, 5, 2, 2, 24, 15),
    "depthwise 7x7": (36, 36, 7, 1, 3, 36, 11),
    "grouped": (32, 64, 3, 1, 1, 4, 9),
    "dilated": (32, 32, 3, 1, 1, 1, 9),
}


def drawn(case, device, dtype, *, residual=False, bias=False, n=3, form=LAST):
    """The op's tensors, and its geometry."""
    c, k, r, stride, padding, groups, size = CASES[case]
    dilation = 2 if case == "dilated" else 1
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = draw(n, c, size, size).contiguous(memory_format=form)
    w = (draw(k, c // groups, r, r) / (c // groups * r * r) ** 0.5).contiguous(memory_format=form)
    p = (size + 2 * padding - dilation * (r - 1) - 1) // stride + 1
    added = draw(n, k, p, p).contiguous(memory_format=form) if residual else None
    of_norm = draw(k), draw(k), draw(k) / 4, draw(k).abs() + 0.25
    geometry = (stride, stride), (padding, padding), (dilation, dilation), groups
    return (x, w, draw(k) if bias else None, added, *of_norm), geometry


def ours(name, tensors, geometry, eps=1e-3):
    (kind, settings), _ = ACTIVATIONS[name]
    with torch.no_grad():
        return conv_bn_act(*tensors, None, *geometry, False, 0.1, eps, kind, settings)


def reference(name, tensors, geometry, eps=1e-3):
    x, w, b, residual, gamma, beta, mean, var = tensors
    y = stock.batch_norm(stock.conv2d(x, w, b, *geometry), mean, var, gamma, beta, False, eps=eps)
    return ACTIVATIONS[name][1](y if residual is None else y + residual)


def stock_takes(tensors):
    """In float32 where stock's convolution reads memory that nobody wrote, and multiplies it by 0:
    bfloat16 on CPUs."""
    x = tensors[0]
    wide = x.device.type == "cpu" and x.dtype == torch.bfloat16 and not x.isfinite().all()
    return [t.float() if wide and t is not None else t for t in tensors]


def check(name, tensors, geometry, eps=1e-3, ulps=8):
    actual = ours(name, tensors, geometry, eps)
    expected = reference(name, stock_takes(tensors), geometry, eps).to(actual.dtype)
    wide = [t if t is None else t.double() for t in tensors]
    form = LAST if tensors[0].is_contiguous(memory_format=LAST) else torch.contiguous_format
    assert actual.is_contiguous(memory_format=form)
    assert_by_rule(actual, expected, reference(name, wide, geometry, eps), ulps=ulps)
    return actual


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("case", CASES)
def test_against_stock(device, dtype, case, residual):
    for name in ("relu", "identity"):
        check(name, *drawn(case, device, dtype, residual=residual))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("case", ["3x3", "1x1", "depthwise", "first", "grouped"])
def test_activations(device, dtype, case, name):
    for residual in (True, False):
        check(name, *drawn(case, device, dtype, residual=residual, bias=True))


@pytest.mark.parametrize("case", ["3x3 many", "1x1", "depthwise", "first"])
def test_tf32_and_contiguous(device, case):
    check("relu", *drawn(case, device, torch.float32, form=torch.contiguous_format))
    if device == "cuda":
        torch.backends.cudnn.allow_tf32 = True
        for residual in (True, False):
            # (Stock's 1 x 1 filters may be products in float32.)
            tensors, geometry = drawn(case, device, torch.float32, residual=residual, n=8)
            check("relu", tensors, geometry, ulps=2**13)


@pytest.mark.parametrize("case", ["3x3", "1x1", "depthwise", "first", "odd"])
def test_special_values(device, dtype, case):
    tensors, geometry = drawn(case, device, dtype, residual=True)
    x, added = tensors[0], tensors[3]
    x[0, :, 3, 3] = float("inf")
    x[1, 1, 4, 4] = float("nan")
    added[2, 3, 2, 2] = float("-inf")
    for name in ("relu", "relu6", "identity"):
        check(name, tensors, geometry)


def test_statistics_far_from_zero(device, dtype):
    tensors, geometry = drawn("3x3", device, dtype)
    x, w, b, added, gamma, beta, mean, var = tensors
    mean = mean + 40
    check("relu", (x + 8, w, b, added, gamma, beta + 1, mean, var * 1e-3), geometry)
    check("relu", (x, w, b, added, gamma * 1e-3, beta, mean, var * 1e3), geometry)


@pytest.mark.parametrize("absent", [(4, 5), (4,), (5,), ()], ids=str)
def test_parameters_that_are_absent(device, absent):
    tensors, geometry = drawn("3x3", device, torch.float32)
    check("relu", tuple(None if i in absent else t for i, t in enumerate(tensors)), geometry)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["3x3", "1x1", "depthwise", "first", "odd", "grouped"])
def test_under_autocast(device, case, low):
    """Batch norm's parameters stay float32."""
    (x, w, b, added, *norm), geometry = drawn(case, device, torch.float32, residual=True, bias=True)
    added = added.to(low)
    with torch.autocast(device, low):
        actual = ours("relu", (x, w, b, added, *norm), geometry)
    assert actual.dtype == low
    rounded = [t.to(low) for t in (x, w, b)]
    z = stock.conv2d(*rounded, *geometry)
    expected = torch.relu(stock.batch_norm(z, *norm[2:], *norm[:2], False, eps=1e-3) + added)
    wide = [t.double() for t in (*rounded, added, *norm)]
    assert_by_rule(actual, expected, reference("relu", wide, geometry), ulps=8)


def test_opcheck_and_derivatives(device):
    for residual in (True, False):
        tensors, geometry = drawn("odd", device, torch.float64, residual=residual)
        rest = *map(list, geometry[:3]), geometry[3], 1e-3, "silu", 0.0, 0.0
        torch.library.opcheck(op, (*tensors, *rest))
        given = [t.requires_grad_() for t in tensors[:2]]
        assert torch.autograd.gradcheck(
            lambda x, w, t=tensors, r=rest: op(x[:1, :, :4, :4], w, None, None, *t[4:], *r), given
        )


def test_is_left_to_others(device):
    """Where a gradient is wanted, or stock raises."""
    tensors, geometry = drawn("3x3", device, torch.float32)
    tensors[1].requires_grad_()
    rest = None, *geometry, False, 0.1, 1e-5, "relu", ()
    assert conv_bn_act(*tensors, *rest) is None
    with torch.no_grad():
        assert conv_bn_act(*tensors, *rest) is not None
        x, w, *others = (t if t is None else t.detach() for t in tensors)
        assert conv_bn_act(x, w.double(), *others, *rest) is None
        assert conv_bn_act(x[:, :5], w, *others, *rest) is None
        assert conv_bn_act(x, w, *others[:4], None, None, *rest) is None
    with pytest.raises(RuntimeError, match="running_mean"):
        op(x, w, *others[:4], None, None, *map(list, geometry[:3]), 1, 1e-5, "relu", 0.0, 0.0)
    with pytest.raises(RuntimeError, match="dtype"):
        op(x, w.double(), *others, *map(list, geometry[:3]), 1, 1e-5, "relu", 0.0, 0.0)


def test_padding_in_words(device):
    """It is that in numbers where it is even; else stock's own code pads."""
    tensors, (stride, _, _, groups) = drawn("3x3", device, torch.float32)

    def run(weight, stride, padding, dilation):
        geometry = stride, padding, dilation, groups
        return ours("relu", (tensors[0], weight, *tensors[2:]), geometry)

    weight = tensors[1]
    for word, number, dilation in (("same", 1, 1), ("same", 2, 2), ("valid", 0, 1)):
        dilation = dilation, dilation
        expected = run(weight, stride, (number, number), dilation)
        assert torch.equal(run(weight, stride, word, dilation), expected)
    assert run(weight[:, :, :2, :], stride, "same", (1, 1)) is None
    assert run(weight, (2, 2), "same", (1, 1)) is None
    assert run(weight, stride, "some", (1, 1)) is None


def test_the_check_rejects_another_offset(device):
    tensors, geometry = drawn("3x3", device, torch.float32)
    actual = ours("relu", tensors, geometry)
    moved = (*tensors[:5], tensors[5] * (1 + 1e-4), *tensors[6:])
    wide = [t if t is None else t.double() for t in moved]
    with pytest.raises(AssertionError):
        assert_by_rule(
            actual, reference("relu", moved, geometry), reference("relu", wide, geometry), ulps=8
        )


class Block(nn.Module):
    """Of ResNet, MobileNetV2 and MobileNetV3 in one."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.conv2, self.bn2 = nn.Conv2d(64, 64, 3, 1, 1, groups=64), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 32, 3, 1, 1), nn.BatchNorm2d(32)
        self.relu, self.relu6 = nn.ReLU(), nn.ReLU6()

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu6(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + x)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_converted_networks_in_evaluation_mode(device, low):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), Block())
    model = model.to(device, memory_format=LAST)
    x = torch.randn(4, 3, 17, 17, device=device).contiguous(memory_format=LAST)
    with torch.no_grad():
        model(x)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    converted = braze.convert(copy.deepcopy(model))
    with torch.no_grad(), torch.autocast(device, low, enabled=low is not None):
        expected = model(x)
        found = [converted(x) for _ in range(3)]  # the third one by programs
        exact = copy.deepcopy(model).double()
        with torch.autocast(device, enabled=False):
            exact = exact(x.double())
    for actual in found:
        # (Between its layers, stock rounds to 16 bits as braze does, but more often.)
        assert_by_rule(actual, expected, exact, ulps=16)
    for name, value in converted.state_dict().items():
        assert torch.equal(value, before[name]), name
    if device == "cuda" and low is not None:
        with torch.no_grad(), torch.autocast("cuda", low):
            kernels = cuda_kernels_of(lambda: converted(x))
        assert not any("row_apply" in name for name in kernels), kernels
