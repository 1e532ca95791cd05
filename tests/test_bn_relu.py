"""bn_relu2d: what follows a convolution in a block, with and without 2x2 pooling."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st

from braze._ops.bn_relu import BnReLU2d
from common import assert_by_rule, check_against_stock, layouts

# n, c, h, w: vectors of several widths, odd extents, several blocks per channel and per row
SHAPES = [
    (4, 8, 16, 16),
    (3, 5, 7, 11),
    (2, 16, 9, 12),
    (2, 13, 14, 14),
    (5, 24, 8, 7),
    (2, 300, 2, 2),
    (3, 1, 6, 4),
    (1, 4, 3, 2),
    (65, 2, 28, 28),
]


op = torch.ops.braze.bn_relu2d.default
backward = torch.ops.braze.bn_relu2d_backward.default


def apply(z, gamma, beta, mean=None, var=None, training=True, momentum=0.1, batches=None, *, pool):
    return op(z, gamma, beta, mean, var, batches, training, momentum, 1e-5, pool)[0]


def stock_apply(z, gamma, beta, mean=None, var=None, training=True, *, pool):
    if mean is not None and gamma is not None:
        mean, var = mean.to(gamma.dtype), var.to(gamma.dtype)
    z = z.clone()  # cuDNN's batch norm faults on unaligned memory
    y = stock.batch_norm(z, mean, var, gamma, beta, training).relu()
    return stock.max_pool2d(y, 2) if pool else y


@pytest.fixture(params=[True, False], ids=["pool", "no pool"])
def pool(request):
    return request.param


@pytest.fixture
def fused(pool):
    return functools.partial(apply, pool=pool)


@pytest.fixture
def reference(pool):
    return functools.partial(stock_apply, pool=pool)


def inputs(shape, device, dtype, parameter_dtype=None):
    """z without ties or near-ties: rounding must not decide where a maximum is."""
    values = torch.randperm(torch.Size(shape).numel(), device=device).view(shape)
    steps = 97 if dtype in (torch.bfloat16, torch.float16) else values.numel()
    z = (values % steps / steps * 4 - 1.5).to(dtype)
    gamma, beta = (
        torch.randn(shape[1], device=device).to(parameter_dtype or dtype).requires_grad_()
        for _ in range(2)
    )
    return [z.requires_grad_(), gamma, beta]


def parameter_dtypes(dtype):
    return {dtype, torch.float64 if dtype == torch.float64 else torch.float32}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, training, channels_last, fused, reference):
    for parameter_dtype in parameter_dtypes(dtype):
        args = inputs(shape, device, dtype, parameter_dtype)
        mean = torch.randn(shape[1], device=device).to(parameter_dtype) * 0.2
        var = torch.rand(shape[1], device=device).to(parameter_dtype) + 0.5
        if channels_last:
            args[0] = args[0].detach().to(memory_format=torch.channels_last).requires_grad_()

        def run(f, z, gamma, beta, mean=mean, var=var):
            return f(z, gamma, beta, mean.to(gamma.dtype), var.to(gamma.dtype), training)

        z, gamma, beta = (t.detach() for t in args)
        functions = [lambda *t, f=f: run(f, *t) for f in (fused, reference)]
        check_against_stock(*functions, [args[0], gamma, beta])
        # The gradients of gamma and beta are sums whose terms cancel.
        check_against_stock(*functions, [z, *args[1:]])


def test_without_affine(device, dtype, fused, reference):
    z, gamma, beta = inputs((4, 6, 5, 8), device, dtype)
    mean, var = torch.zeros(6, device=device).to(dtype), torch.ones(6, device=device).to(dtype)
    for w, b in [(None, None), (gamma, None), (None, beta)]:
        for training in (True, False):

            def run(f, t, w=w, b=b, training=training):
                w, b, m, v = (None if p is None else p.to(t.dtype) for p in (w, b, mean, var))
                return f(t, w, b, m, v, training)

            check_against_stock(
                lambda t, run=run: run(fused, t),
                lambda t, run=run: run(reference, t),
                [z],
            )


@pytest.mark.parametrize("channels", [5, 16])
def test_layouts(device, dtype, channels, fused, reference):
    z, gamma, beta = inputs((3, channels, 6, 9), device, dtype)
    for name, x in layouts(z.shape, device, dtype):
        if name != "expanded":
            x.copy_(z.detach())
        x = x.detach().requires_grad_()
        y = check_against_stock(fused, reference, [x, gamma, beta])
        fmt = torch.channels_last if name == "channels_last" else torch.contiguous_format
        assert y.is_contiguous(memory_format=fmt), name
        y = fused(x, gamma, beta)
        n, c, *extents = y.shape
        upstream = torch.randn(n, extents[0], c, extents[1], device=device).to(dtype)
        upstream = upstream.transpose(1, 2)
        (grad,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
        assert grad.is_contiguous(memory_format=fmt), name
        assert torch.equal(grad, torch.autograd.grad(y, x, upstream.contiguous())[0]), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_unaligned_storage_offset(device, dtype, channels_last, fused, reference):
    z, gamma, beta = inputs((4, 8, 8, 16), device, dtype)
    storage = torch.empty(z.numel() + 1, device=device, dtype=dtype)[1:]
    x = storage.view(4, 8, 16, 8).permute(0, 3, 1, 2) if channels_last else storage.view(z.shape)
    x.copy_(z.detach())
    check_against_stock(fused, reference, [x.requires_grad_(), gamma, beta])


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics(device, dtype, momentum, fused):
    for parameter_dtype in parameter_dtypes(dtype):
        z, gamma, beta = inputs((6, 5, 7, 4), device, dtype, parameter_dtype)
        bn = torch.nn.BatchNorm2d(5, momentum=momentum, device=device, dtype=parameter_dtype)
        wide = copy.deepcopy(bn).double()
        buffers = [b.clone() for b in bn.buffers()]
        versions = [b._version for b in buffers]
        for _ in range(3):
            bn(z), wide(z.double())
            fused(z, gamma, beta, *buffers[:2], momentum=momentum, batches=buffers[2])
        for actual, expected, r in zip(buffers[:2], bn.buffers(), wide.buffers(), strict=False):
            assert_by_rule(actual, expected, r)
        assert buffers[2] == bn.num_batches_tracked == 3
        assert all(b._version > v for b, v in zip(buffers, versions, strict=True))
        before = [b.clone() for b in buffers]
        fused(z, gamma, beta, *buffers[:2], training=False, batches=buffers[2])
        assert all(torch.equal(b, c) for b, c in zip(buffers, before, strict=True))


@pytest.mark.parametrize("channels_last", [False, True])
def test_ties_and_special_values(device, dtype, channels_last, fused, reference):
    """Gradients say which element was taken for the maximum: of equals the first."""
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    z = torch.randint(-2, 3, (4, 8, 9, 6), device=device).to(dtype)
    z[0, 0, 0, 0], z[1, 1, 4, 5], z[2, 2, 2, 2] = float("nan"), float("inf"), -float("inf")
    z[3, 3, 2:4, 2:4] = float("nan")
    z = z.to(memory_format=fmt).requires_grad_()
    gamma = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, 0.0, 1.0, -2.0], device=device).to(dtype)
    beta = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0, -1.0, -9.0, 9.0], device=device).to(dtype)
    mean, var = torch.zeros(8, device=device).to(dtype), torch.ones(8, device=device).to(dtype)
    y = fused(z, gamma, beta, mean, var, training=False)
    expected = reference(z, gamma, beta, mean, var, training=False)
    assert_by_rule(y, expected, expected.double())
    upstream = torch.randn(y.shape, device=device).to(dtype)
    grad, stock_grad = (torch.autograd.grad(t, z, upstream)[0] for t in (y, expected))
    finite = z.isfinite()
    assert_by_rule(grad[finite], stock_grad[finite], stock_grad[finite].double())
    z = torch.randint(-2, 3, (4, 8, 9, 6), device=device).to(dtype).to(memory_format=fmt)
    # No beta of 0: where a channel's mean is 0, rounding would decide what passes the ReLU.
    args = [z.requires_grad_(), gamma.requires_grad_(), (beta + 0.01).requires_grad_()]
    check_against_stock(fused, reference, args)


def test_nan_in_training(device, fused, reference):
    z, gamma, beta = inputs((3, 4, 6, 6), device, torch.float32)
    with torch.no_grad():
        z[1, 2, 3, 4] = float("nan")
    y, expected = fused(z, gamma, beta), reference(z, gamma, beta)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[:, 2].isnan().all()


def test_mean_much_larger_than_the_deviation(device, fused, reference):
    z, gamma, beta = inputs((8, 6, 12, 12), device, torch.float32)
    z = (z.detach() + 1000).requires_grad_()
    check_against_stock(fused, reference, [z, gamma, beta])


def test_repeatable_and_the_same_for_any_number_of_threads(fused):
    z, gamma, beta = inputs((16, 24, 15, 16), "cpu", torch.float32)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, threads):
        torch.set_num_threads(count)
        y = fused(z, gamma, beta)
        results.append((y, *torch.autograd.grad(y.square().sum(), [z, gamma, beta])))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_partial_gradients(device, fused):
    z, gamma, beta = inputs((4, 8, 6, 7), device, torch.float32)
    mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)
    for training in (True, False):
        y = fused(z, gamma, beta, mean, var, training)
        everything = torch.autograd.grad(y.sum(), [z, gamma, beta], retain_graph=True)
        for i, t in enumerate([z, gamma, beta]):
            assert torch.equal(torch.autograd.grad(y.sum(), t, retain_graph=True)[0], everything[i])


@given(
    shape=st.tuples(*(st.integers(1, m) for m in (5, 17)), *[st.integers(2, 13)] * 2),
    channels_last=st.booleans(),
    training=st.booleans(),
    pool=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_fuzzed_shapes(shape, channels_last, training, pool):
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        z, gamma, beta = inputs(shape, device, torch.float64)
        if channels_last:
            z = z.detach().to(memory_format=torch.channels_last).requires_grad_()
        mean, var = torch.zeros_like(gamma), torch.ones_like(gamma)
        check_against_stock(
            lambda *t, m=mean, v=var: apply(*t, m.detach(), v.detach(), training, pool=pool),
            lambda *t, m=mean, v=var: stock_apply(*t, m.detach(), v.detach(), training, pool=pool),
            [z, gamma, beta],
        )


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradcheck(device, channels_last, fused):
    z, gamma, beta = inputs((2, 3, 5, 6), device, torch.float64)
    if channels_last:
        z = z.detach().to(memory_format=torch.channels_last).requires_grad_()
    assert torch.autograd.gradcheck(fused, (z, gamma, beta))
    mean, var = torch.randn(3, device=device).double(), torch.rand(3, device=device).double() + 0.5
    assert torch.autograd.gradcheck(
        lambda *t: fused(*t, mean, var, training=False), (z, gamma, beta)
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, channels_last, pool):
    z, gamma, beta = inputs((2, 8, 5, 6), device, dtype)
    if channels_last:
        z = z.detach().to(memory_format=torch.channels_last).requires_grad_()
    buffers = [torch.zeros(8, device=device).to(dtype), torch.ones(8, device=device).to(dtype)]
    batches = torch.zeros((), dtype=torch.int64, device=device)
    torch.library.opcheck(op, (z, gamma, beta, None, None, None, True, 0.1, 1e-5, pool))
    with torch.no_grad():
        args = z.detach(), gamma.detach(), beta.detach()
        torch.library.opcheck(op, (*args, *buffers, batches, True, 0.1, 1e-5, pool))
        y, *saved = op(*args, *buffers, batches, True, 0.1, 1e-5, pool)
        for mask in ([True, True, True], [True, False, False], [False, True, False]):
            for parameters in (args[1:], (None, args[2]), (None, None)):
                dy = torch.randn_like(y)
                torch.library.opcheck(
                    backward, (dy, args[0], *parameters, *saved, True, pool, mask)
                )


def test_bad_input(device, fused, pool):
    z, gamma, beta = inputs((2, 4, 6, 6), device, torch.float32)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    settings = None, True, 0.1, 1e-5, pool
    with pytest.raises(RuntimeError, match="weight should contain 4 elements not 3"):
        op(z, gamma[:3], beta, mean, var, *settings)
    with pytest.raises(RuntimeError, match="expected running_mean of dtype float32"):
        op(z, gamma, beta, mean.double(), var.double(), *settings)
    if pool:
        with pytest.raises(RuntimeError, match="at least one 2x2 window"):
            op(z[..., :1], gamma, beta, mean, var, *settings)
    for bad in (z[0], z[:0]):
        with pytest.raises(RuntimeError, match="expected a 4-D input that is not empty"):
            op(bad, gamma, beta, mean, var, *settings)
    with pytest.raises(RuntimeError, match="expected input of dtype float64"):
        op(z.long(), None, None, mean, var, *settings)
    with pytest.raises(RuntimeError, match="running_mean must be defined in evaluation"):
        op(z, gamma, beta, None, None, None, False, 0.1, 1e-5, pool)
    with pytest.raises(RuntimeError, match="expected num_batches_tracked where momentum is None"):
        op(z, gamma, beta, mean, var, None, True, None, 1e-5, pool)
    assert torch.equal(mean, torch.zeros_like(mean))
    with torch.no_grad():
        y, codes, statistics = op(z, gamma, beta, mean, var, *settings)
        rest = True, pool, [True, True, True]
        with pytest.raises(RuntimeError, match="grad_output to have the same shape"):
            backward(y[..., :1], z, gamma, beta, codes, statistics, *rest)
        with pytest.raises(RuntimeError, match="expected codes of"):
            backward(y, z, gamma, beta, codes.new_empty(3), statistics, *rest)
        with pytest.raises(RuntimeError, match="expected statistics of shape"):
            backward(y, z, gamma, beta, codes, statistics.double(), *rest)


def test_the_tests_reject_a_wrong_kernel(device, pool, reference):
    """Gradients without batch norm's correction terms: the comparison must fail."""

    class Wrong(BnReLU2d):
        @staticmethod
        def backward(ctx, grad_output, *_):
            ctx.settings = False, ctx.settings[1]
            return BnReLU2d.backward(ctx, grad_output)

    args = inputs((2, 4, 7, 8), device, torch.float32)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(
            lambda *t: Wrong.apply(*t, None, None, None, True, 0.1, 1e-5, pool)[0], reference, args
        )
