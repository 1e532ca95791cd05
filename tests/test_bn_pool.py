"""bn_relu_max_pool2d: what follows a convolution in a block, and the block that uses it."""

import copy

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from braze._ops.bn_pool import BnReLUMaxPool2d, bn_relu_max_pool2d
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


def fused(z, gamma, beta, mean=None, var=None, training=True, momentum=0.1, batches=None):
    return bn_relu_max_pool2d(z, mean, var, gamma, beta, training, momentum, 1e-5, batches)


def reference(z, gamma, beta, mean=None, var=None, training=True):
    if mean is not None:
        mean, var = mean.to(gamma.dtype), var.to(gamma.dtype)
    z = z.clone()  # cuDNN's batch norm faults on unaligned memory
    return stock.max_pool2d(stock.batch_norm(z, mean, var, gamma, beta, training).relu(), 2)


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


def floors(dtype):
    # In float64 stock is its own reference, so that the rule allows nothing for stock's error.
    return {"ulps": 64, "grad_ulps": 256} if dtype == torch.float64 else {"grad_ulps": 8}


def parameter_dtypes(dtype):
    return {dtype, torch.float64 if dtype == torch.float64 else torch.float32}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, training, channels_last):
    for parameter_dtype in parameter_dtypes(dtype):
        args = inputs(shape, device, dtype, parameter_dtype)
        mean = torch.randn(shape[1], device=device).to(parameter_dtype) * 0.2
        var = torch.rand(shape[1], device=device).to(parameter_dtype) + 0.5
        if channels_last:
            args[0] = args[0].detach().to(memory_format=torch.channels_last).requires_grad_()

        def run(f, z, gamma, beta, mean=mean, var=var):
            return f(z, gamma, beta, mean.to(gamma.dtype), var.to(gamma.dtype), training)

        check_against_stock(
            lambda *t: run(fused, *t), lambda *t: run(reference, *t), args, **floors(dtype)
        )


def test_without_affine(device, dtype):
    z, gamma, beta = inputs((4, 6, 5, 8), device, dtype)
    mean, var = torch.zeros(6, device=device).to(dtype), torch.ones(6, device=device).to(dtype)
    for w, b in [(None, None), (gamma, None), (None, beta)]:
        for training in (True, False):

            def run(f, t, w=w, b=b, training=training):
                w, b, m, v = (None if p is None else p.to(t.dtype) for p in (w, b, mean, var))
                if f is fused:
                    return f(t, w, b, m, v, training)
                return stock.max_pool2d(stock.batch_norm(t, m, v, w, b, training).relu(), 2)

            check_against_stock(
                lambda t, run=run: run(fused, t),
                lambda t, run=run: run(reference, t),
                [z],
                **floors(dtype),
            )


@pytest.mark.parametrize("channels", [5, 16])
def test_layouts(device, dtype, channels):
    z, gamma, beta = inputs((3, channels, 6, 9), device, dtype)
    for name, x in layouts(z.shape, device, dtype):
        if name != "expanded":
            x.copy_(z.detach())
        x = x.detach().requires_grad_()
        y = check_against_stock(fused, reference, [x, gamma, beta], **floors(dtype))
        fmt = torch.channels_last if name == "channels_last" else torch.contiguous_format
        assert y.is_contiguous(memory_format=fmt), name
        y = fused(x, gamma, beta)
        upstream = torch.randn(3, 3, channels, 4, device=device).to(dtype).transpose(1, 2)
        (grad,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
        assert grad.is_contiguous(memory_format=fmt), name
        assert torch.equal(grad, torch.autograd.grad(y, x, upstream.contiguous())[0]), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_unaligned_storage_offset(device, dtype, channels_last):
    z, gamma, beta = inputs((4, 8, 8, 16), device, dtype)
    storage = torch.empty(z.numel() + 1, device=device, dtype=dtype)[1:]
    x = storage.view(4, 8, 16, 8).permute(0, 3, 1, 2) if channels_last else storage.view(z.shape)
    x.copy_(z.detach())
    check_against_stock(fused, reference, [x.requires_grad_(), gamma, beta], **floors(dtype))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics(device, dtype, momentum):
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
def test_ties_and_special_values(device, dtype, channels_last):
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
    args = [z.requires_grad_(), gamma.requires_grad_(), beta.requires_grad_()]
    check_against_stock(fused, reference, args, **floors(dtype))


def test_nan_in_training(device):
    z, gamma, beta = inputs((3, 4, 6, 6), device, torch.float32)
    with torch.no_grad():
        z[1, 2, 3, 4] = float("nan")
    y, expected = fused(z, gamma, beta), reference(z, gamma, beta)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[:, 2].isnan().all()


def test_mean_much_larger_than_the_deviation(device):
    z, gamma, beta = inputs((8, 6, 12, 12), device, torch.float32)
    z = (z.detach() + 1000).requires_grad_()
    check_against_stock(fused, reference, [z, gamma, beta], grad_ulps=8)


def test_repeatable_and_the_same_for_any_number_of_threads():
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


def test_partial_gradients(device):
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
)
@settings(max_examples=25, deadline=None)
def test_fuzzed_shapes(shape, channels_last, training):
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        z, gamma, beta = inputs(shape, device, torch.float64)
        if channels_last:
            z = z.detach().to(memory_format=torch.channels_last).requires_grad_()
        mean, var = torch.zeros_like(gamma), torch.ones_like(gamma)
        check_against_stock(
            lambda *t, m=mean, v=var: fused(*t, m.detach(), v.detach(), training),
            lambda *t, m=mean, v=var: reference(*t, m.detach(), v.detach(), training),
            [z, gamma, beta],
            ulps=64,
            grad_ulps=4096,
        )


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradcheck(device, channels_last):
    z, gamma, beta = inputs((2, 3, 5, 6), device, torch.float64)
    if channels_last:
        z = z.detach().to(memory_format=torch.channels_last).requires_grad_()
    assert torch.autograd.gradcheck(fused, (z, gamma, beta))
    mean, var = torch.randn(3, device=device).double(), torch.rand(3, device=device).double() + 0.5
    assert torch.autograd.gradcheck(
        lambda *t: fused(*t, mean, var, training=False), (z, gamma, beta)
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, channels_last):
    z, gamma, beta = inputs((2, 8, 5, 6), device, dtype)
    if channels_last:
        z = z.detach().to(memory_format=torch.channels_last).requires_grad_()
    op = torch.ops.braze.bn_relu_max_pool2d.default
    buffers = [torch.zeros(8, device=device).to(dtype), torch.ones(8, device=device).to(dtype)]
    batches = torch.zeros((), dtype=torch.int64, device=device)
    torch.library.opcheck(op, (z, gamma, beta, None, None, None, True, 0.1, 1e-5))
    with torch.no_grad():
        args = z.detach(), gamma.detach(), beta.detach()
        torch.library.opcheck(op, (*args, *buffers, batches, True, 0.1, 1e-5))
        y, codes, mean, rstd = op(*args, *buffers, batches, True, 0.1, 1e-5)
        backward = torch.ops.braze.bn_relu_max_pool2d_backward.default
        for mask in ([True, True, True], [True, False, False], [False, True, False]):
            for weight in (gamma.detach(), None):
                torch.library.opcheck(
                    backward,
                    (torch.randn_like(y), args[0], weight, codes, mean, rstd, True, mask),
                )


def block_of(device, **options):
    block = braze.nn.ConvBnReLUMaxPool2d(16, 24, 3, padding=1, **options)
    return block.to(device)


@pytest.mark.parametrize("channels_last", [False, True])
def test_block(device, channels_last):
    """A convolution with many inputs per output: conv2d and one op."""
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    block = block_of(device)
    layers = torch.nn.Sequential(
        *copy.deepcopy((block.conv, block.bn)), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    )
    x = torch.randn(4, 16, 9, 10, device=device).to(memory_format=fmt).requires_grad_()
    y = block(x)
    assert "BnReLUMaxPool2d" in y.grad_fn.name()
    wide = copy.deepcopy(layers).double()
    stock_layers = torch.nn.Sequential(
        torch.nn.Conv2d(16, 24, 3, padding=1), torch.nn.BatchNorm2d(24), *layers[2:]
    ).to(device)
    stock_layers.load_state_dict(layers.state_dict())
    wide = copy.deepcopy(stock_layers).double()
    expected, exact = stock_layers(x), wide(x.double())
    assert_by_rule(y, expected, exact, ulps=16)
    upstream = torch.randn_like(y)
    results = [
        torch.autograd.grad(t, [x, *m.parameters()], upstream.to(t))
        for t, m in ((y, block), (expected, stock_layers))
    ]
    results.append(torch.autograd.grad(exact, [x, *wide.parameters()], upstream.double()))
    names = ["input", *(name for name, _ in stock_layers.named_parameters())]
    for name, actual, theirs, r in zip(names, *results, strict=True):
        if name != "0.bias":  # zero in exact arithmetic
            assert_by_rule(actual, theirs, r, ulps=32, what=name)
    assert_by_rule(block.bn.running_var, stock_layers[1].running_var, wide[1].running_var, ulps=8)
    assert block.bn.num_batches_tracked == 1


@pytest.mark.parametrize("shape", [(4, 16, 2, 2), (1, 16, 3, 2), (2, 16, 1, 8), (0, 16, 8, 8)])
def test_block_of_other_shapes_behaves_as_the_four_ops(device, shape):
    block = block_of(device, bias=False).eval()
    x = torch.randn(shape, device=device)

    def outcome(f):
        try:
            return tuple(f().shape)
        except Exception as error:
            return type(error)

    expected = outcome(
        lambda: F.max_pool2d(
            F.batch_norm(
                F.conv2d(x, block.conv.weight, None, padding=1),
                block.bn.running_mean,
                block.bn.running_var,
            ).relu(),
            2,
        )
    )
    assert outcome(lambda: block(x)) == expected


def test_compile(device):
    block = block_of(device)
    x = torch.randn(4, 16, 12, 13, device=device, requires_grad=True)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True)
    out, expected = compiled(x), block(x)
    assert torch.equal(out, expected)
    grad, expected_grad = (torch.autograd.grad(t.square().sum(), x)[0] for t in (out, expected))
    # The convolution's kernel may be another one: the compiler chooses its gradient's strides.
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(compiled.bn.running_mean, block.bn.running_mean)
    assert compiled.bn.num_batches_tracked == block.bn.num_batches_tracked == 1


def test_autocast(device):
    block = block_of(device)
    x = torch.randn(4, 16, 12, 12, device=device)
    with torch.autocast(device, torch.bfloat16):
        out = block(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in block.parameters())


def test_bad_input(device):
    z, gamma, beta = inputs((2, 4, 6, 6), device, torch.float32)
    op, backward = torch.ops.braze.bn_relu_max_pool2d, torch.ops.braze.bn_relu_max_pool2d_backward
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    settings = None, True, 0.1, 1e-5
    with pytest.raises(ValueError, match="eps must be positive"):
        bn_relu_max_pool2d(z, None, None, gamma, beta, True, 0.1, 0.0, None)
    with pytest.raises(RuntimeError, match="weight should contain 4 elements not 3"):
        op(z, gamma[:3], beta, mean, var, *settings)
    with pytest.raises(RuntimeError, match="expected running_mean of dtype float32"):
        op(z, gamma, beta, mean.double(), var.double(), *settings)
    with pytest.raises(RuntimeError, match="at least one 2x2 window"):
        op(z[..., :1], gamma, beta, mean, var, *settings)
    with pytest.raises(RuntimeError, match="expected a 4-D input"):
        op(z[0], gamma, beta, mean, var, *settings)
    with pytest.raises(RuntimeError, match="expected input of dtype float64"):
        op(z.long(), None, None, mean, var, *settings)
    with pytest.raises(RuntimeError, match="running_mean must be defined in evaluation"):
        op(z, gamma, beta, None, None, None, False, 0.1, 1e-5)
    with pytest.raises(RuntimeError, match="expected num_batches_tracked where momentum is None"):
        op(z, gamma, beta, mean, var, None, True, None, 1e-5)
    assert torch.equal(mean, torch.zeros_like(mean))
    with torch.no_grad():
        y, codes, m, r = op(z, gamma, beta, mean, var, *settings)
        mask = [True, True, True]
        with pytest.raises(RuntimeError, match="grad_output to have the same shape"):
            backward(y[..., :1], z, gamma, codes, m, r, True, mask)
        with pytest.raises(RuntimeError, match="expected codes of 9 int32 elements"):
            backward(y, z, gamma, codes[1:], m, r, True, mask)
        with pytest.raises(RuntimeError, match="expected mean of dtype float32"):
            backward(y, z, gamma, codes, m.double(), r, True, mask)
    grad = torch.autograd.grad(fused(z, gamma, beta).sum(), z, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="braze::bn_relu_max_pool2d is not twice"):
        grad.sum().backward()


def test_the_tests_reject_a_wrong_kernel(device):
    """Gradients without batch norm's correction terms: the comparison must fail."""

    class Wrong(BnReLUMaxPool2d):
        @staticmethod
        def backward(ctx, grad_output, *_):
            ctx.training = False
            return BnReLUMaxPool2d.backward(ctx, grad_output)

    args = inputs((2, 4, 7, 8), device, torch.float32)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(
            lambda *t: Wrong.apply(*t, None, None, None, True, 0.1, 1e-5)[0], reference, args
        )
