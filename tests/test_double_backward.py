"""Second and third derivatives through what has kernels for the first only: batch norm, max pooling
and the fused blocks. The rest has its tests beside the op's."""

import copy
import weakref

import pytest
import torch

import braze
import braze.nn.functional as F
from common import assert_by_rule

stock = torch.nn.functional
ops = torch.ops.braze


def rand(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def buffers(channels):
    return rand(channels), rand(channels).abs() + 0.5


def norm(affine=True, training=True, count=None, shape=(3, 3, 4, 2)):
    """Batch norm: a function of input, weight and bias, and these; count: with momentum=None."""
    parameters = [rand(shape[1]), rand(shape[1])] if affine else []
    statistics = buffers(shape[1]) if count is not None or not training else (None, None)
    momentum = None if count is not None else 0.1

    def function(x, w=None, b=None):
        mean, var = (None if t is None else t.to(x, copy=True) for t in statistics)
        batches = None if count is None else torch.tensor(count, device=x.device)
        settings = w, b, mean, var, batches, training, momentum, 1e-5
        return ops.batch_norm(x, *settings)[0]

    return function, [rand(*shape), *parameters]


def bn_relu(pool, training):
    statistics = (None, None) if training else buffers(3)

    def function(x, w, b):
        mean, var = (None if t is None else t.to(x) for t in statistics)
        return ops.bn_relu2d(x, w, b, mean, var, None, training, 0.1, 1e-5, pool)[0]

    return function, [rand(2, 3, 5, 4), rand(3), rand(3)]


def block(pool, training, shape=(2, 3, 5, 6), filters=(3, 3, 2, 2), input_grad=True, **settings):
    """A fused block: a function of (the input and) all parameters."""
    statistics = (None, None) if training else buffers(filters[0])
    function = F.conv_bn_relu_max_pool2d if pool else F.conv_bn_relu2d
    constant = [] if input_grad else [rand(*shape)]
    parameters = [rand(*filters), *(rand(filters[0]) for _ in range(3))]

    def call(*tensors):
        x, w, b, gamma, beta = (*(t.to(tensors[0]) for t in constant), *tensors)
        mean, var = (None if t is None else t.to(x) for t in statistics)
        return function(x, w, b, mean, var, gamma, beta, training=training, **settings)

    return call, [rand(*shape)] * input_grad + parameters


def first_block(training, filters, **settings):
    """What conv_bn_relu_max_pool2d.h is for."""
    shape = (2, filters[1], 6, 7)
    return block(True, training, shape, filters, False, **settings)


def cases():
    pools = {
        "max_pool2d": lambda x: F.max_pool2d(x, 2),
        "max_pool2d, overlapping": lambda x: F.max_pool2d(x, 3, 2, 1, 1, True),
        "max_pool2d, dilated": lambda x: F.max_pool2d(x, (2, 3), 1, 1, 2),
    }
    many = {"padding": (1, 0), "stride": (1, 2), "dilation": 2, "groups": 3}
    return {
        **{name: (f, [rand(2, 3, 5, 6)]) for name, f in pools.items()},
        "batch_norm": norm(),
        "batch_norm, evaluation": norm(training=False),
        "batch_norm, no parameters": norm(affine=False),
        "batch_norm, no parameters, evaluation": norm(affine=False, training=False),
        "batch_norm, momentum=None": norm(count=3),
        "batch_norm, rows": norm(shape=(6, 3)),
        "layer_norm": (
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            [rand(3, 2, 5, 4), rand(5, 4), rand(5, 4)],
        ),
        "group_norm": (
            lambda x, w, b: F.group_norm(x, 2, w, b),
            [rand(3, 4, 2, 3), rand(4), rand(4)],
        ),
        **{
            f"{name}, {'pooled, ' * pool}{'training' if training else 'evaluation'}": case
            for pool in (False, True)
            for training in (False, True)
            for name, case in (
                ("bn_relu2d", bn_relu(pool, training)),
                ("block", block(pool, training)),
                ("block of groups", block(pool, training, (1, 3, 5, 7), (3, 1, 2, 2), **many)),
            )
        },
        "block, 3x3 pooling": block(True, True, kernel_size=3, pool_stride=2, padding=1),
        "first block, training": first_block(True, (3, 1, 3, 3), padding=1),
        "first block, evaluation": first_block(False, (3, 1, 3, 3), padding=1),
        "first block, nine filters of 3 channels": first_block(True, (9, 3, 3, 3)),
        "first block, nine 5x5 filters": first_block(False, (9, 1, 5, 5), padding=(2, 1)),
    }


torch.manual_seed(3)
CASES = cases()


def leaves(tensors, device, channels_last=False):
    form = torch.channels_last if channels_last else torch.contiguous_format
    return [
        t.to(device, copy=True, memory_format=form if t.dim() == 4 else torch.preserve_format)
        .requires_grad_()
        for t in tensors
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _repeatable():
    """cuDNN's gradients of float64 convolutions are not bitwise what they were before."""
    with braze.backend(conv2d="braze", layer_norm="braze", group_norm="braze"):
        yield


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradgradcheck(device, case, channels_last):
    function, tensors = case
    tensors = leaves(tensors, device, channels_last)
    # torch's scatter_add on CUDA, in the formula of overlapping windows, adds in any order.
    nondet_tol = 1e-9 if device == "cuda" else 0.0
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True, nondet_tol=nondet_tol)


@pytest.mark.parametrize(
    "name",
    [
        "batch_norm",
        "layer_norm",
        "group_norm",
        "max_pool2d, overlapping",
        "bn_relu2d, training",
        "block, pooled, training",
        "first block, training",
    ],
)
def test_third_order(device, name):
    """Of batch norm in training, torch's own formula is not its derivative."""
    function, tensors = CASES[name]
    tensors = leaves(tensors, device)

    def gradient(*tensors):
        loss = function(*tensors).pow(3).sum()
        return torch.autograd.grad(loss, tensors, create_graph=True)

    assert torch.autograd.gradgradcheck(gradient, tensors, fast_mode=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_first_derivative_is_the_same(device, case):
    """Recording it costs no accuracy: the kernels make it."""
    function, tensors = case
    tensors = leaves(tensors, device)
    plain, recorded = (
        torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=graph)
        for graph in (False, True)
    )
    assert all(torch.equal(p, r) for p, r in zip(plain, recorded, strict=True))
    assert not any(p.requires_grad for p in plain)
    assert any(r.requires_grad for r in recorded)


@pytest.mark.parametrize("filters_last", [False, True])
def test_mixed_layouts(device, filters_last):
    """The codes of a block are in the order of the convolution's output, whatever that is."""
    function, (x, w, *rest) = CASES["block, pooled, training"]
    tensors = leaves([x], device, not filters_last) + leaves([w], device, filters_last)
    tensors += leaves(rest, device)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_one_tensor_in_two_places(device):
    """As input and as gradient, as weight and as bias."""
    x, w = rand(4, 3).to(device).requires_grad_(), rand(3).to(device).requires_grad_()

    def second(batch_norm):
        y = batch_norm(x, None, None, w, w, True)
        grads = torch.autograd.grad(y, (x, w), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w))

    torch.testing.assert_close(second(F.batch_norm), second(stock.batch_norm))


def model(training):
    n = torch.nn
    return n.Sequential(
        n.Conv2d(1, 6, 3, padding=1),
        n.BatchNorm2d(6),
        n.ReLU(),
        n.MaxPool2d(2),
        n.Conv2d(6, 8, 3, padding=1),
        n.BatchNorm2d(8, momentum=None),
        n.ReLU(),
        n.MaxPool2d(2),
        n.Conv2d(8, 8, 3, padding=1, bias=False),
        n.BatchNorm2d(8, affine=False),
        n.ReLU(),
        n.MaxPool2d(3, 2, 1),
        n.Flatten(),
        n.Linear(32, 3),
    ).train(training)


def penalised(module, x, target):
    """A loss with the norm of its gradients in it: with respect to the input or the parameters."""
    loss = stock.cross_entropy(module(x), target)
    wanted = [x] if x.requires_grad else list(module.parameters())
    grads = torch.autograd.grad(loss, wanted, create_graph=True)
    return loss + sum(g.square().sum() for g in grads)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("input_grad", [False, True])
def test_gradient_penalty(device, training, input_grad):
    """A converted model trains as stock's does, its buffers too."""
    ours = model(training).to(device, torch.float64)
    theirs = copy.deepcopy(ours)
    braze.convert(ours)
    target = torch.arange(6, device=device) % 3
    for _ in range(3):
        x = rand(6, 1, 12, 12).to(device).requires_grad_(input_grad)
        for module in (ours, theirs):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            optimizer.zero_grad()
            penalised(module, x, target).backward()
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_accuracy(device):
    """Of the second derivatives in float32, by the rule."""
    first = model(True).to(device)
    x, target = rand(16, 1, 12, 12).to(device), torch.arange(16, device=device) % 3

    def gradients(module, dtype):
        module = module.to(dtype)
        module.zero_grad()
        penalised(module, x.to(dtype).requires_grad_(), target).backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    ours = gradients(braze.convert(copy.deepcopy(first)), torch.float32)
    theirs = gradients(copy.deepcopy(first), torch.float32)
    exact = gradients(first, torch.float64)
    for a, s, e in zip(ours, theirs, exact, strict=True):
        # A convolution's bias in front of batch norm has no gradient but rounding.
        if s.dim() != 1 or e.abs().max() > 1e-6:
            assert_by_rule(a, s, e, ulps=64)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_input(device, low):
    """With float32 parameters, as under autocast, by the rule."""
    x, w = rand(4, 3, 5, 6).to(device, low), rand(3).to(device).float()

    def second(api, dtype, parameters):
        a, b = x.to(dtype).requires_grad_(), w.to(parameters).requires_grad_()
        y = api.max_pool2d(api.batch_norm(a, None, None, b, None, True), 2)
        grads = torch.autograd.grad(y.square().sum(), (a, b), create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in grads), (a, b))

    ours, theirs = (second(api, low, torch.float32) for api in (F, stock))
    for a, s, e in zip(ours, theirs, second(stock, torch.float64, torch.float64), strict=True):
        assert_by_rule(a, s, e)


def test_max_pooling_does_not_keep_its_input(device):
    leaf = rand(2, 3, 4, 4).to(device).requires_grad_()
    x = leaf + 1
    kept = weakref.ref(x)
    y = F.max_pool2d(x, 2)
    del x
    assert kept() is None
    (grad,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    largest = stock.max_pool2d((leaf + 1).detach(), 2)
    torch.testing.assert_close(second.sum(), 6 * largest.sum())
