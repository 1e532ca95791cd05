"""conv_bn_relu_max_pool2d, whose fused kernels take a convolution of few inputs per output."""

import copy

import pytest
import torch
import torch.nn.functional as stock

import braze
import braze.nn.functional as F
from braze._ops.fused import ConvBnReLUMaxPool2d
from common import assert_by_rule, check_against_stock

# n, c, h, w, filters, filter size, padding
SHAPES = [
    (4, 1, 28, 28, 32, 3, 1),
    (3, 3, 9, 13, 13, 3, 0),
    (3, 1, 11, 10, 20, 5, 2),
    (2, 2, 8, 7, 16, 3, 1),
    (5, 1, 3, 2, 1, 3, 1),
    (64, 1, 14, 14, 64, 3, 1),
]


def reference(x, w, b, gamma, beta, *, padding=0, mean=None, var=None, training=True, **options):
    z = stock.conv2d(x, w, b, padding=padding)
    z = stock.batch_norm(z, mean, var, gamma, beta, training, **options)
    return stock.max_pool2d(z.relu(), 2)


def fused(x, w, b, gamma, beta, *, padding=0, mean=None, var=None, training=True, **options):
    return F.conv_bn_relu_max_pool2d(
        x, w, b, mean, var, gamma, beta, padding=padding, training=training, **options
    )


def inputs(shape, device, dtype, whole=False):
    """`whole`: small integers, so that a convolution's output is exact and rounding does not decide
    which element is a maximum; a beta that is none keeps the normalised values away from zero."""
    n, c, h, w, k, size, padding = shape
    x = torch.randn(n, c, h, w, device=device).to(dtype)
    weight = torch.randn(k, c, size, size, device=device).to(dtype)
    vectors = [torch.randn(k, device=device).to(dtype) for _ in range(3)]
    if whole:
        x, weight, vectors[0] = (2 * x).round(), weight.round(), vectors[0].round()
        vectors[2] = torch.full_like(vectors[2], 0.0371)
    return [x, *(t.detach().requires_grad_() for t in (weight, *vectors))], padding


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, channels_last):
    args, padding = inputs(shape, device, dtype, whole=True)
    if channels_last:
        args[0] = args[0].to(memory_format=torch.channels_last)
    # The bias's gradient is zero in exact arithmetic: rounding only.
    args[2].requires_grad_(False)
    check_against_stock(
        lambda *t: fused(*t, padding=padding),
        lambda *t: reference(*t, padding=padding),
        args,
    )


# The largest tiles.
WIDE = [(2, 3, 60, 120, 64, 3, 1), (2, 2, 90, 70, 33, 3, 0), (2, 1, 90, 130, 20, 5, 2)]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("shape", SHAPES + WIDE, ids=str)
def test_in_tf32(device, shape, contiguous):
    """Its products are exact here but for the gradients, which lose 13 bits of 24."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    (x, w, b, gamma, beta), padding = inputs(shape, device, torch.float32, whole=True)
    if not contiguous:
        x = x.to(memory_format=torch.channels_last)
    tensors = w, gamma, beta
    y = fused(x, w, b, gamma, beta, padding=padding)
    wide = [t.detach().double().requires_grad_() for t in (w, b, gamma, beta)]
    exact = reference(x.double(), *wide, padding=padding)
    narrow = reference(x, w, b, gamma, beta, padding=padding)
    assert_by_rule(y, narrow, exact)
    dy = torch.randn_like(y)
    for actual, stocks, expected in zip(
        torch.autograd.grad(y, tensors, dy, retain_graph=True),
        torch.autograd.grad(narrow, tensors, dy),
        torch.autograd.grad(exact, (wide[0], *wide[2:]), dy.double()),
        strict=True,
    ):
        assert_by_rule(actual, stocks, expected, 2**13)
    for again, once in zip(
        torch.autograd.grad(fused(x, w, b, gamma, beta, padding=padding), tensors, dy),
        torch.autograd.grad(y, tensors, dy),
        strict=True,
    ):
        assert torch.equal(again, once)
    before = y.detach()
    for value in (float("nan"), float("inf")):
        special = x.clone()
        special[-1, -1, 1, 1] = value
        zeros, ones = torch.zeros_like(gamma), torch.ones_like(gamma)
        statistics = {"mean": zeros, "var": ones, "training": False, "padding": padding}
        out = fused(special, w, b, gamma, beta, **statistics)
        statistics |= {"mean": zeros.double(), "var": ones.double()}
        expected = reference(special.double(), *wide, **statistics)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())
    assert torch.equal(fused(x, w, b, gamma, beta, padding=padding), before)


@pytest.mark.parametrize("kind", ["offset", "smooth", "zero-sum filters", "constant"])
def test_badly_conditioned_inputs(device, kind):
    """Statistics from moments square the conditioning: fp64 sums have to make up for it."""
    (x, w, b, gamma, beta), padding = inputs((16, 1, 28, 28, 8, 3, 1), device, torch.float32, True)
    if kind == "offset":
        x = x + 1000
    elif kind == "constant":
        x = torch.full_like(x, 3)
    else:
        # Curved, in steps of 1/256: rounding must not decide where neighbours hardly differ.
        at = torch.linspace(0, 3, 28, device=device)
        x = (256 * torch.sin(at + 2 * at[:, None] + x[:, :, :1, :1])).round() / 256
        if kind == "zero-sum filters":
            w = w.detach()
            w[:, :, 1, 1] -= w.sum((2, 3))
            w.requires_grad_()
    b.requires_grad_(False)
    check_against_stock(
        lambda *t: fused(*t, padding=padding),
        lambda *t: reference(*t, padding=padding),
        [x, w, b, gamma, beta],
    )


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics(device, training, momentum):
    (x, _, _, gamma, beta), padding = inputs((4, 1, 10, 10, 6, 3, 1), device, torch.float32)
    torch_bn = torch.nn.BatchNorm2d(6, momentum=momentum, device=device).train(training)
    with torch.no_grad():
        for t in (torch_bn.running_mean, torch_bn.running_var):
            t.add_(torch.rand_like(t))
        torch_bn.weight.copy_(gamma)
        torch_bn.bias.copy_(beta)
    conv = torch.nn.Conv2d(1, 6, 3, padding=padding, device=device)
    pool = torch.nn.MaxPool2d(2)
    layers = torch.nn.Sequential(conv, torch_bn, torch.nn.ReLU(), pool).train(training)
    block = braze.nn.ConvBnReLUMaxPool2d.from_modules(*copy.deepcopy((conv, torch_bn, pool)))
    assert block.training == training
    for _ in range(3):
        assert_by_rule(block(x), layers(x), copy.deepcopy(layers).double()(x.double()))
    for name in ("running_mean", "running_var"):
        ours, theirs = getattr(block.bn, name), getattr(torch_bn, name)
        assert_by_rule(ours, theirs, theirs.double(), what=name)
    assert block.bn.num_batches_tracked == torch_bn.num_batches_tracked
    version = block.bn.running_mean._version
    block(x)
    assert (block.bn.running_mean._version > version) == training


def test_gamma_of_either_sign_and_special_values(device, dtype):
    (x, w, b, gamma, beta), _ = inputs((3, 1, 8, 8, 6, 3, 0), device, dtype)
    gamma = torch.tensor([1.0, -1.0, 0.0, -2.0, 0.5, 0.0], device=device).to(dtype)
    gamma.requires_grad_()
    beta = torch.tensor([0.0, 1.0, 1.0, -1.0, 0.0, -1.0], device=device).to(dtype).requires_grad_()
    b.requires_grad_(False)
    check_against_stock(fused, reference, [x, w, b, gamma, beta])
    mean, var = (
        torch.zeros(6, device=device, dtype=dtype),
        torch.ones(6, device=device, dtype=dtype),
    )
    for value in (float("nan"), float("inf")):
        y = x.clone()
        y[1, 0, 4, 4] = value
        out = fused(y, w, b, gamma, beta, mean=mean, var=var, training=False)
        wide = [t.double() for t in (y, w, b, gamma, beta, mean, var)]
        expected = reference(*wide[:5], mean=wide[5], var=wide[6], training=False)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())
        assert fused(y, w, b, gamma, beta).isnan().all()


def test_gradcheck(device):
    args, padding = inputs((2, 1, 5, 6, 3, 3, 1), device, torch.float64)
    assert torch.autograd.gradcheck(lambda *t: fused(*t, padding=padding), args)
    mean, var = torch.randn(3, device=device).double(), torch.rand(3, device=device).double() + 0.5
    assert torch.autograd.gradcheck(
        lambda *t: fused(*t, padding=padding, mean=mean, var=var, training=False), args
    )


def test_opcheck(device, dtype):
    (x, w, b, gamma, beta), _ = inputs((2, 1, 6, 6, 3, 3, 1), device, dtype)
    op = torch.ops.braze.conv_bn_relu_max_pool2d.default
    args = (x, w, b, gamma, beta, None, None, None, [1, 1], True, 0.1, 1e-5)
    torch.library.opcheck(op, args)
    with torch.no_grad():
        out, codes, moments = op(*args)
        backward = (torch.randn_like(out), x, w, gamma, codes, moments, [1, 1], True, None)
        torch.library.opcheck(torch.ops.braze.conv_bn_relu_max_pool2d_backward.default, backward)


def test_compile(device):
    block = braze.nn.ConvBnReLUMaxPool2d(1, 8, 3, padding=1).to(device)
    x = torch.randn(4, 1, 12, 12, device=device)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True)
    out = compiled(x)
    assert torch.equal(out, block(x))
    out.sum().backward()
    assert torch.equal(compiled.bn.running_mean, block.bn.running_mean)


def test_autocast(device):
    block = braze.nn.ConvBnReLUMaxPool2d(1, 8, 3, padding=1).to(device)
    x = torch.randn(4, 1, 12, 12, device=device)
    with torch.autocast(device, torch.bfloat16):
        out = block(x)
        layers = torch.nn.Sequential(*copy.deepcopy((block.conv, block.bn, block.pool)))
        layers.insert(2, torch.nn.ReLU())
        expected = stock.max_pool2d(
            stock.batch_norm(
                stock.conv2d(x, block.conv.weight, block.conv.bias, padding=1),
                None,
                None,
                block.bn.weight,
                block.bn.bias,
                True,
            ).relu(),
            2,
        )
    assert out.dtype == expected.dtype == torch.bfloat16
    assert_by_rule(out, expected, layers.double()(x.double()))
    out.sum().backward()
    assert block.conv.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "pool_stride": 2, "pool_padding": 1},
        {"stride": 2},
        {"dilation": 2},
        {"ceil_mode": True},
        {"padding": "same"},
    ],
    ids=str,
)
def test_everything_else_runs_as_the_four_ops(device, options):
    (x, w, b, gamma, beta), _ = inputs((2, 3, 13, 13, 8, 3, 0), device, torch.float32)
    conv = {k: v for k, v in options.items() if k in ("stride", "padding", "dilation")}

    def layers(x, w, b, gamma, beta):
        z = stock.batch_norm(stock.conv2d(x, w, b, **conv), None, None, gamma, beta, True)
        size, stride = options.get("kernel_size", 2), options.get("pool_stride")
        padding, ceil_mode = options.get("pool_padding", 0), options.get("ceil_mode", False)
        return stock.max_pool2d(z.relu(), size, stride, padding, ceil_mode=ceil_mode)

    b.requires_grad_(False)
    check_against_stock(
        lambda x, w, b, g, e: F.conv_bn_relu_max_pool2d(
            x, w, b, None, None, g, e, training=True, **options
        ),
        layers,
        [x.requires_grad_(), w, b, gamma, beta],
    )


def test_input_gradient(device):
    (x, w, b, gamma, beta), padding = inputs((2, 1, 8, 8, 4, 3, 1), device, torch.float32)
    out = fused(x.requires_grad_(), w, b, gamma, beta, padding=padding)
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    with pytest.raises(RuntimeError, match="has no gradient for its input"):
        torch.ops.braze.conv_bn_relu_max_pool2d(
            x, w, b, gamma, beta, None, None, None, [1, 1], True, 0.1, 1e-5
        )


def test_bad_input(device):
    (x, w, b, gamma, beta), _ = inputs((2, 1, 8, 8, 4, 3, 1), device, torch.float32)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    with pytest.raises(ValueError, match="eps must be positive"):
        fused(x, w, b, gamma, beta, eps=0.0)
    with pytest.raises(ValueError, match="must either both be None or neither"):
        fused(x, w, b, gamma, beta, mean=mean)
    with pytest.raises(RuntimeError, match="needs running_mean and running_var"):
        fused(x, w, b, gamma, beta, training=False)
    with pytest.raises(RuntimeError, match="expected bn_weight to be a contiguous vector of 4"):
        fused(x, w, b, gamma[:3], beta)
    with pytest.raises(RuntimeError, match="same dtype"):
        fused(x.double(), w, b, gamma, beta)
    with pytest.raises(RuntimeError, match=r"not implemented for 'Long'|not supported for Long"):
        fused(x.long(), w.detach().long(), None, None, None)
    before = mean.clone()
    with pytest.raises(RuntimeError, match="contiguous vector"):
        fused(x, w, b, gamma, beta[:2], mean=mean, var=var)
    assert torch.equal(mean, before)


def no_statistics(bn):
    bn.running_mean = bn.running_var = bn.num_batches_tracked = None


def no_count(bn):
    bn.num_batches_tracked = None


def no_running_statistics(bn):
    bn.running_mean = bn.running_var = None


@pytest.mark.parametrize("change", [None, no_statistics, no_count, no_running_statistics])
@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("pool", [True, False])
def test_no_momentum_without_buffers(device, change, channels, pool):
    """An average over all batches where nothing counts them, or nothing is averaged."""
    n = torch.nn
    track = change is not None
    bn = n.BatchNorm2d(4, momentum=None, track_running_stats=track)
    layers = n.Conv2d(channels, 4, 3), bn, n.ReLU(), *[n.MaxPool2d(2)] * pool
    expected = n.Sequential(*layers).to(device)
    if track:
        change(expected[1])
    models = copy.deepcopy(expected), braze.convert(copy.deepcopy(expected))
    models[0][1].__class__ = braze.nn.BatchNorm2d
    x = torch.randn(2, channels, 8, 8, device=device)
    for training in (True, True, False):
        stock_result = expected.train(training)(x)
        for model in models:
            torch.testing.assert_close(model.train(training)(x), stock_result)
            torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_no_momentum_in_the_functions(device):
    x, w = torch.randn(2, 1, 8, 8, device=device), torch.randn(4, 1, 3, 3, device=device)
    expected = reference(x, w, None, None, None)
    result = fused(x, w, None, None, None, momentum=None)
    torch.testing.assert_close(result, expected)
    batches = torch.tensor(3, device=device)
    for count in (None, batches):
        op = torch.ops.braze.conv_bn_relu_max_pool2d
        raw, *_ = op(x, w, None, None, None, None, None, count, [0, 0], True, None, 1e-5)
        assert torch.equal(raw, result)
    assert batches == 4
    mean, var = torch.ones(4, device=device), torch.ones(4, device=device)
    fused(x, w, None, None, None, mean=mean, var=var, momentum=None)
    assert torch.equal(mean, torch.ones_like(mean))  # nothing counts: as torch's layer has it
    assert torch.equal(var, torch.ones_like(var))


def test_the_tests_reject_a_wrong_kernel(device):
    """Gradients without batch norm's correction terms: the comparison must fail."""

    class Wrong(ConvBnReLUMaxPool2d):
        @staticmethod
        def backward(ctx, grad_output, *_):
            ctx.settings = ctx.settings[0], False, *ctx.settings[2:]
            return ConvBnReLUMaxPool2d.backward(ctx, grad_output)

    args, _ = inputs((2, 1, 8, 8, 4, 3, 0), device, torch.float32)
    args[2].requires_grad_(False)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(
            lambda *t: Wrong.apply(*t, None, None, None, [0, 0], True, 0.1, 1e-5)[0],
            reference,
            args,
        )
