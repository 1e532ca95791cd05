import copy

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, layouts

SHAPES = [
    (4, 8, 16, 16),
    (3, 5, 7, 11),
    (2, 32, 28, 28),
    (5, 64, 7, 7),
    (64, 3),
    (5, 1, 1, 1),
    (7, 13, 31),
    (2, 3, 4, 5, 6),
    (2, 300, 2, 2),
    (600, 2, 3, 3),
]


def channel_vectors(channels, device, dtype):
    """weight, bias, running_mean, running_var."""
    weight, bias, mean = (torch.randn(channels, device=device).to(dtype) for _ in range(3))
    return weight, bias, mean, (torch.rand(channels, device=device) + 0.5).to(dtype)


def parameter_dtypes(dtype):
    return {dtype, torch.float64 if dtype == torch.float64 else torch.float32}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, training):
    for parameter_dtype in parameter_dtypes(dtype):
        x = (torch.randn(shape, device=device) * 2 + 1).to(dtype).requires_grad_()
        weight, bias, mean, var = channel_vectors(shape[1], device, parameter_dtype)
        weight.requires_grad_()
        bias.requires_grad_()

        def run(f, x, w, b, mean=mean, var=var):
            # The float64 reference casts parameters; buffers follow them.
            return f(x, mean.to(w.dtype), var.to(w.dtype), w, b, training)

        check_against_stock(
            lambda *t: run(F.batch_norm, *t),
            lambda *t: run(stock.batch_norm, *t),
            [x, weight, bias],
        )


def test_running_statistics(device, dtype):
    for parameter_dtype in parameter_dtypes(dtype):
        x = (torch.randn(6, 5, 7, 3, device=device) * 3 - 2).to(dtype)
        _, _, mean, var = channel_vectors(5, device, parameter_dtype)
        for momentum in (0.1, 0.0, 1.0, 0.37):
            buffers = [
                (m.clone(), v.clone())
                for m, v in [(mean, var), (mean, var), (mean.double(), var.double())]
            ]
            versions = [b._version for b in buffers[0]]
            F.batch_norm(x, *buffers[0], training=True, momentum=momentum)
            stock.batch_norm(x, *buffers[1], training=True, momentum=momentum)
            stock.batch_norm(x.double(), *buffers[2], training=True, momentum=momentum)
            for actual, expected, reference in zip(*buffers, strict=True):
                assert_by_rule(actual, expected, reference)
            assert all(b._version > v for b, v in zip(buffers[0], versions, strict=True))
        before = mean.clone(), var.clone()
        F.batch_norm(x, mean, var, training=False)
        assert torch.equal(mean, before[0])
        assert torch.equal(var, before[1])


def test_without_affine_or_statistics(device, dtype):
    x = torch.randn(4, 6, 5, 5, device=device).to(dtype).requires_grad_()
    weight, bias, mean, var = channel_vectors(6, device, dtype)
    for w, b in [(None, None), (weight, None), (None, bias)]:
        for args in [(None, None, w, b, True), (mean, var, w, b, False)]:

            def cast(f, t, args=args):
                return f(t, *(a.to(t.dtype) if isinstance(a, torch.Tensor) else a for a in args))

            check_against_stock(
                lambda t, cast=cast: cast(F.batch_norm, t),
                lambda t, cast=cast: cast(stock.batch_norm, t),
                [x],
            )


@pytest.mark.parametrize("channels", [5, 16])
def test_layouts(device, dtype, channels):
    for name, x in layouts((3, channels, 6, 7), device, dtype):
        x = x.detach().requires_grad_()
        y = check_against_stock(
            lambda t: F.batch_norm(t, None, None, training=True),
            lambda t: stock.batch_norm(t, None, None, training=True),
            [x],
        )
        fmt = torch.channels_last if name == "channels_last" else torch.contiguous_format
        assert y.is_contiguous(memory_format=fmt), name
        y = F.batch_norm(x, None, None, training=True)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        assert grad.is_contiguous(memory_format=fmt), name


def test_unaligned_storage_offset(device, dtype):
    x = torch.randn(4 * 8 * 6 * 6 + 1, device=device).to(dtype)[1:].view(4, 8, 6, 6)
    check_against_stock(
        lambda t: F.batch_norm(t, None, None, training=True),
        lambda t: stock.batch_norm(t, None, None, training=True),
        [x.requires_grad_()],
    )


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["large_mean", "outlier_first", "two_images_far_apart"])
def test_ill_conditioned_input(device, kind, fmt):
    """The statistics where the mean dwarfs the deviation or the first values are no guide."""
    x = torch.randn(16, 8, 14, 14, device=device)
    if kind == "large_mean":
        x += 1e4
    elif kind == "outlier_first":
        x[0, :, 0, 0] = 1e4
    else:
        x[8:] += 1e3
    x = x.contiguous(memory_format=fmt).requires_grad_()
    check_against_stock(
        lambda t: F.batch_norm(t, None, None, training=True),
        lambda t: stock.batch_norm(t, None, None, training=True),
        [x],
    )
    # Independent of stock: the statistics themselves are right to fp32's last bits.
    _, mean, rstd = torch.ops.braze.batch_norm(x, None, None, None, None, None, True, 0.1, 1e-5)
    v = x.detach().double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(
        mean.double(), x.detach().double().mean((0, 2, 3)), rtol=3e-7, atol=1e-6
    )
    torch.testing.assert_close(rstd.double(), (v + 1e-5).rsqrt(), rtol=2e-6, atol=0)


def test_special_values(device, dtype):
    x = torch.randn(4, 6, 5, 5, device=device).to(dtype)
    x[0, 0, 0, 0], x[0, 1, 0, 0], x[1, 2, 1, 1] = float("nan"), float("inf"), -float("inf")
    x[:, 3] = 0.5  # no variance
    x[:, 4] = 1e-40
    for training in (True, False):
        buffers = (
            torch.zeros(6, device=device, dtype=dtype),
            torch.ones(6, device=device, dtype=dtype),
        )
        actual = F.batch_norm(x, *(b.clone() for b in buffers), training=training)
        expected = stock.batch_norm(x, *(b.clone() for b in buffers), training=training)
        reference = stock.batch_norm(x.double(), *(b.double() for b in buffers), training=training)
        assert_by_rule(actual, expected, reference)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_fuzz(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw_int = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    shape = [draw_int(0, 9), draw_int(1, 70), *(draw_int(1, 12) for _ in range(draw_int(0, 3)))]
    training = data.draw(st.booleans())
    # Of two values per channel, dx is all rounding: the exact gradient is nearly zero.
    if training and torch.Size(shape).numel() < 8 * shape[1]:
        shape[0] += 8
    torch.manual_seed(draw_int(0, 99))
    x = torch.randn(shape, device=device)
    if len(shape) == 4 and data.draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    weight, bias, mean, var = channel_vectors(shape[1], device, torch.float32)
    inputs = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]

    def run(f, x, w, b):
        return f(x, mean.to(x.dtype, copy=True), var.to(x.dtype, copy=True), w, b, training)

    check_against_stock(
        lambda *t: run(F.batch_norm, *t),
        lambda *t: run(stock.batch_norm, *t),
        inputs,
    )


def test_gradcheck(device):
    x = torch.randn(3, 4, 2, 3, device=device, dtype=torch.float64, requires_grad=True)
    weight, bias, mean, var = channel_vectors(4, device, torch.float64)
    inputs = x, weight.requires_grad_(), bias.requires_grad_()
    for training in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, w, b, training=training: F.batch_norm(
                x, mean.clone(), var.clone(), w, b, training
            ),
            inputs,
        )


def test_gradients_by_mask(device, dtype):
    """Each subset of gradients equals that part of all of them."""
    x = torch.randn(3, 4, 5, 6, device=device).to(dtype)
    weight, bias, mean, var = channel_vectors(4, device, dtype)
    for training in (True, False):
        y, m, r = torch.ops.braze.batch_norm(x, weight, bias, mean, var, None, training, 0.1, 1e-5)
        backward = torch.ops.braze.batch_norm_backward
        full = backward(y, x, weight, m, r, training, [True, True, True])
        for mask in [(True, False, False), (False, True, False), (False, False, True)]:
            part = backward(y, x, weight, m, r, training, list(mask))
            for wanted, got, expected in zip(mask, part, full, strict=True):
                assert torch.equal(got, expected if wanted else expected.new_empty(0))


def test_saved_buffer_is_protected(device):
    """A graph that saved a buffer refuses to go backward after the buffer was updated."""
    mean = torch.zeros(3, device=device)
    leaf = torch.ones(3, device=device, requires_grad=True)
    z = (leaf * mean).sum()
    F.batch_norm(
        torch.randn(4, 3, device=device), mean, torch.ones(3, device=device), training=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, channels_last):
    x = torch.randn(3, 4, 5, 6, device=device).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias, mean, var = channel_vectors(4, device, dtype)
    count = torch.zeros((), dtype=torch.int64, device=device)
    op, opcheck = torch.ops.braze.batch_norm.default, torch.library.opcheck
    inputs = x.clone().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    opcheck(op, (*inputs, mean, var, count, True, None, 1e-5))
    opcheck(op, (*inputs, mean, var, None, True, 0.1, 1e-5))
    opcheck(op, (*inputs, mean, var, None, False, 0.1, 1e-5))
    opcheck(op, (inputs[0], None, None, None, None, None, True, 0.1, 1e-5))
    y, m, r = op(x, weight, bias, mean, var, None, True, 0.1, 1e-5)
    args = y.detach(), x, weight.detach(), m, r, True
    for mask in ([True, True, True], [True, False, False], [False, True, False]):
        opcheck(torch.ops.braze.batch_norm_backward.default, (*args, mask))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_module(device, momentum):
    theirs = torch.nn.BatchNorm2d(5, momentum=momentum).to(device)
    ours = braze.nn.BatchNorm2d(5, momentum=momentum).to(device)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, torch.nn.BatchNorm2d)
    assert repr(ours) == repr(theirs)
    for step in range(4):
        if step == 3:
            ours.eval()
            theirs.eval()
        x = torch.randn(4, 5, 3, 3, device=device) + step
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    ours.train()(x[:0])
    theirs.train()(x[:0])
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert torch.equal(copy.deepcopy(ours)(x), ours(x))


def test_module_without_running_statistics(device):
    for kwargs in [dict(track_running_stats=False), dict(affine=False), dict(bias=False)]:
        try:
            theirs = torch.nn.BatchNorm2d(5, **kwargs).to(device)
        except TypeError:  # `bias` came with torch 2.12
            continue
        ours = braze.nn.BatchNorm2d(5, **kwargs).to(device)
        x = torch.randn(4, 5, 3, 3, device=device)
        for _ in range(2):
            torch.testing.assert_close(ours(x), theirs(x))
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
            ours.eval()
            theirs.eval()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_counts_in_other_dtypes(device, momentum):
    """``module.type()`` casts the count of batches, too."""

    def make():
        torch.manual_seed(0)
        head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU()
        tail = nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5, momentum=momentum), nn.SiLU()
        return nn.Sequential(*head, nn.MaxPool2d(2), *tail, nn.BatchNorm2d(5, momentum=momentum))

    theirs, ours = make().to(device), braze.convert(make()).to(device)
    x = torch.randn(4, 3, 6, 6, device=device, dtype=torch.float64)
    for model in (theirs, ours):
        model.type(torch.float64)
    for _ in range(3):
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_compile(device, momentum):
    def make(nn):
        torch.manual_seed(0)
        return nn.BatchNorm2d(5, momentum=momentum).to(device)

    models = make(braze.nn), make(torch.nn), make(torch.nn).double()
    calls = [lambda t, model=model: model(t * 2) + 1 for model in models]
    calls[0] = torch.compile(calls[0], fullgraph=True)
    for step in range(3):
        x = torch.randn(4, 5, 3, 3, device=device)
        results = []
        for call, model in zip(calls, models, strict=True):
            model.train(step < 2)
            t = x.to(model.weight.dtype).requires_grad_()
            y = call(t)
            grads = torch.autograd.grad(y.square().sum(), (t, model.weight, model.bias))
            results.append((y, *grads, model.running_mean, model.running_var))
        for actual, expected, reference in zip(*results, strict=True):
            assert_by_rule(actual, expected, reference)
        assert models[0].num_batches_tracked == models[1].num_batches_tracked


def test_strided_parameters_and_buffers(device):
    x = torch.randn(4, 5, 3, 3, device=device)
    wide = [v.repeat_interleave(2) for v in channel_vectors(5, device, torch.float32)]
    weight, bias, mean, var = (v[::2] for v in wide)
    buffers = mean.clone(), var.clone()
    expected = stock.batch_norm(x, *buffers, weight, bias, True)
    torch.testing.assert_close(F.batch_norm(x, mean, var, weight, bias, True), expected)
    torch.testing.assert_close((mean, var), buffers)
    assert torch.equal(wide[3][1::2], wide[3][1::2].clone())


Y = (4, 3, 5, 5)
BAD = [
    (Y, dict(running_mean=None, running_var=None), "running_mean must be defined in evaluation"),
    (Y, dict(running_var=None), "running_var must be defined in evaluation mode"),
    (Y, dict(running_var=None, training=True), "running_mean and running_var must either both be"),
    (Y, dict(running_mean=None, training=True), "running_mean and running_var must either both be"),
    ((1, 3), dict(training=True), r"Expected more than 1 value per channel .* size torch.Size\(.1"),
    ((1, 3, 1, 1), dict(training=True), "Expected more than 1 value per channel when training"),
    (Y, dict(running_mean=torch.zeros(4)), "running_mean should contain 3 elements not 4"),
    (Y, dict(running_var=torch.zeros(4)), "running_var should contain 3 elements not 4"),
    (Y, dict(weight=torch.zeros(4)), "weight should contain 3 elements not 4"),
    (Y, dict(bias=torch.zeros(4), training=True), "bias should contain 3 elements not 4"),
    (Y, dict(momentum=None), "argument 'momentum' .position 7. must be float, not NoneType"),
    (Y, dict(training=True, eps=-1), "eps must be positive during training, but got -1"),
    (Y, dict(training=True, eps=0), "eps must be positive during training, but got 0"),
    (Y, dict(eps=-1), "eps must be non-negative, but got -1"),
    (Y, dict(running_mean=torch.zeros(3, requires_grad=True), training=True), "not differentiable"),
    ((3,), dict(), "batch_norm"),
    ((), dict(training=True), "index out of range"),
]


@pytest.mark.parametrize(("shape", "kwargs", "message"), BAD, ids=str)
def test_bad_arguments(device, shape, kwargs, message):
    """torch's exception type and, where it says what was wrong, its wording."""
    kwargs = {"running_mean": torch.zeros(3), "running_var": torch.ones(3), **kwargs}
    to_device = lambda v: v.detach().to(device).requires_grad_(v.requires_grad)  # noqa: E731
    kwargs = {k: to_device(v) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    x = torch.randn(shape, device=device)
    before = {k: v.clone() for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(Exception, match=message) as ours:
        F.batch_norm(x, **kwargs)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        stock.batch_norm(x, **kwargs)
    assert ours.type is theirs.type
    assert all(torch.equal(kwargs[k], v) for k, v in before.items())


def test_bad_dtypes(device):
    x = torch.randn(Y, device=device)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    for dtype in (torch.int32, torch.int64, torch.complex64, torch.bool):
        with pytest.raises(RuntimeError, match="batch_norm: expected input of dtype float64"):
            torch.ops.braze.batch_norm(x.to(dtype), None, None, mean, var, None, False, 0.1, 1e-5)
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        with pytest.raises(RuntimeError, match="expected weight of dtype float32"):
            F.batch_norm(x, mean, var, mean.to(dtype))
        with pytest.raises(RuntimeError, match="expected running_mean of dtype float32"):
            F.batch_norm(x, mean.to(dtype), var.to(dtype), training=True)
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D input\)"):
        braze.nn.BatchNorm2d(3).to(device)(x[0])
    with pytest.raises(RuntimeError, match="grad_output to have the same shape as input"):
        torch.ops.braze.batch_norm_backward(x[:2], x, None, mean, var, True, [True, True, True])


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (4, 3, 0, 5), (4, 0, 5, 5), (1, 0, 2, 1)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_empty(device, shape, training):
    channels = shape[1]
    x = torch.randn(shape, device=device, requires_grad=True)
    weight, bias, mean, var = channel_vectors(channels, device, torch.float32)
    before = mean.clone(), var.clone()
    weight.requires_grad_()
    y = F.batch_norm(x, mean, var, weight, bias, training)
    assert y.shape == x.shape
    grads = torch.autograd.grad(y.sum(), (x, weight))
    assert grads[0].shape == x.shape
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


def test_repeatable(device, dtype):
    x = torch.randn(17, 6, 13, 11, device=device).to(dtype).requires_grad_()
    for fmt in (torch.contiguous_format, torch.channels_last):
        t = x.detach().contiguous(memory_format=fmt).requires_grad_()
        runs = []
        for _ in range(3):
            y = F.batch_norm(t, None, None, training=True)
            runs.append((y, *torch.autograd.grad(y.double().pow(3).sum(), t)))
        for y, grad in runs[1:]:
            assert torch.equal(y, runs[0][0])
            assert torch.equal(grad, runs[0][1])


def test_registered():
    assert any(k["shipped"] for k in braze.kernels("batch_norm"))


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """The unbiased variance in place of the biased one, and a gradient that takes the statistics
    for constants."""
    x = torch.randn(2, 3, 2, 2, device=device).to(dtype).requires_grad_()

    def unbiased(t):
        return t / t.float().var((0, 2, 3), keepdim=True).sqrt().to(t.dtype)

    def constant_statistics(t):
        _, mean, rstd = torch.ops.braze.batch_norm(
            t.detach(), None, None, None, None, None, True, 0.1, 1e-5
        )
        var = rstd.to(torch.float64) ** -2 - 1e-5
        return F.batch_norm(t, mean.to(t.dtype), var.to(t.dtype))

    def right(t):
        return stock.batch_norm(t, None, None, training=True)

    with pytest.raises(AssertionError, match="error"):
        check_against_stock(unbiased, right, [x])
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(constant_statistics, right, [x])
