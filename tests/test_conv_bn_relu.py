"""conv_bn_relu2d and the modules on it: a convolution and all that follows it, as one op."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as stock
from torch._subclasses.fake_tensor import FakeTensorMode

import braze
import braze.nn.functional as F
from braze._ops.bn_relu import ConvBnReLU2d
from common import assert_by_rule, check_against_stock, cuda_kernels_of, hopper_only
from conftest import cuda_only

# n, c, h, w, filters, filter size, options: few and many channels, odd extents, several tiles per
# image and several images per tile of the kernels that leave statistics
SHAPES = [
    (4, 16, 9, 10, 24, 3, {"padding": 1}),
    (3, 32, 14, 14, 64, 3, {"padding": 1}),
    (9, 8, 7, 7, 5, 3, {}),
    (2, 12, 12, 9, 8, 3, {"stride": 2, "padding": 1, "groups": 4}),
    (5, 16, 6, 8, 7, 1, {}),
    (2, 6, 10, 11, 4, 3, {"dilation": 2, "padding": "same"}),
    (1, 64, 30, 33, 16, 3, {"padding": 1}),
    (100, 3, 18, 18, 8, 3, {"padding": 1}),
]


@pytest.fixture(params=[True, False], ids=["pool", "no pool"])
def pool(request):
    return request.param


def fused(x, w, b, gamma, beta, mean=None, var=None, *, pool, training=True, **options):
    f = F.conv_bn_relu_max_pool2d if pool else F.conv_bn_relu2d
    return f(x, w, b, mean, var, gamma, beta, training=training, **options)


def reference(x, w, b, gamma, beta, mean=None, var=None, *, pool, training=True, **options):
    z = stock.conv2d(x, w, b, **options)
    y = stock.batch_norm(z, mean, var, gamma, beta, training).relu()
    return stock.max_pool2d(y, 2) if pool else y


def integers(shape, limit, device, dtype):
    return torch.randint(-limit, limit + 1, shape, device=device).to(dtype)


def inputs(shape, device, dtype):
    """Small integers: a convolution's output is exact, so that which element of a window is the
    maximum, and which ReLU stops, does not depend on the order of sums. A bias that is no integer
    keeps the normalised values away from zero."""
    n, c, h, w, k, size, options = shape
    x = integers((n, c, h, w), 3, device, dtype)
    weight = integers((k, c // options.get("groups", 1), size, size), 1, device, dtype)
    bias = integers((k,), 2, device, dtype)
    gamma = (torch.rand(k, device=device) + 0.5).to(dtype)
    beta = torch.full((k,), 0.0371, device=device).to(dtype)
    return [x, weight, bias, gamma, beta]


def leaves(tensors, channels_last=False):
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    return [
        (t.to(memory_format=fmt) if t.dim() == 4 else t).detach().requires_grad_() for t in tensors
    ]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, training, channels_last, pool):
    args = leaves(inputs(shape, device, dtype), channels_last)
    k, options = shape[4], {"pool": pool, "training": training, **shape[6]}
    mean = (torch.rand(k, device=device) + 0.3).to(dtype)
    var = (torch.rand(k, device=device) * 9 + 9).to(dtype)
    if training:
        args[2].requires_grad_(False)  # its gradient is zero in exact arithmetic

    def run(f, *tensors):
        return f(*tensors, mean.to(tensors[0].dtype), var.to(tensors[0].dtype), **options)

    y = check_against_stock(lambda *t: run(fused, *t), lambda *t: run(reference, *t), args)
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    assert y.is_contiguous(memory_format=fmt)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("channels_last", [False, True])
def test_running_statistics(device, dtype, momentum, channels_last, pool):
    x, weight, bias, gamma, beta = leaves(
        inputs((6, 16, 9, 7, 24, 3, {}), device, dtype), channels_last
    )
    bn = torch.nn.BatchNorm2d(24, momentum=momentum, device=device, dtype=dtype)
    wide = copy.deepcopy(bn).double()
    mean, var, batches = (b.clone() for b in bn.buffers())
    versions = [b._version for b in (mean, var, batches)]
    for _ in range(3):
        z = stock.conv2d(x, weight, bias)
        bn(z), wide(stock.conv2d(x.double(), weight.double(), bias.double()))
        options = {"momentum": momentum, "num_batches_tracked": batches}
        fused(x, weight, bias, gamma, beta, mean, var, pool=pool, **options)
    for actual, expected, r in zip((mean, var), bn.buffers(), wide.buffers(), strict=False):
        assert_by_rule(actual, expected, r)
    assert batches == bn.num_batches_tracked == 3
    for buffer, version in zip((mean, var, batches), versions, strict=True):
        assert buffer._version > version


def test_statistics_of_large_images(device, dtype):
    """Where the convolution's kernel leaves moments, as on a GPU, it leaves many sets of them."""
    n, size = (48, 100) if device == "cuda" else (2, 20)
    tensors = inputs((n, 16, size, size, 32, 3, {}), device, dtype)
    x, weight, bias, gamma, beta = leaves(tensors, channels_last=True)
    x = x.detach()
    z, exact = (stock.conv2d(*(t.to(d) for t in tensors[:3])) for d in (dtype, torch.float64))
    kept = torch.promote_types(dtype, torch.float32)
    mean, var = (f(32, device=device, dtype=kept) for f in (torch.zeros, torch.ones))
    fused(x, weight, bias, gamma, beta, mean, var, pool=False, momentum=1.0)
    stocks = torch.zeros_like(mean), torch.ones_like(var)
    stock.batch_norm(z.to(kept), *stocks, None, None, True, 1.0)
    assert_by_rule(mean, stocks[0], exact.mean((0, 2, 3)))
    assert_by_rule(var, stocks[1], exact.var((0, 2, 3)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_constant_output(device, dtype, channels_last, pool):
    """A channel of one value has no variance, whatever its value rounds to."""
    x, weight, bias, gamma, beta = leaves(inputs((4, 16, 8, 8, 8, 3, {}), device, dtype))
    x = torch.full_like(x, 49 / 64).detach()
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    y = fused(x, weight, bias, gamma, beta, pool=pool)
    assert_by_rule(y, *(beta.to(t).view(-1, 1, 1).expand_as(y) for t in (dtype, torch.float64)))


def test_mean_much_larger_than_the_deviation(device, pool):
    args = inputs((8, 16, 12, 12, 8, 3, {}), device, torch.float32)
    args[2] += 1000
    args = leaves(args, channels_last=True)
    args[2].requires_grad_(False)
    check_against_stock(lambda *t: fused(*t, pool=pool), lambda *t: reference(*t, pool=pool), args)


@pytest.mark.parametrize("channels_last", [False, True])
def test_nan_and_infinity(device, pool, channels_last):
    x, *rest = leaves(inputs((3, 16, 8, 8, 8, 3, {"padding": 1}), device, torch.float32))
    mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)
    for value in (float("nan"), float("inf")):
        x = x.detach().clone()
        x[1, 2, 3, 4] = value
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        y = fused(x, *rest, mean, var, pool=pool, training=False, padding=1)
        expected = reference(x, *rest, mean, var, pool=pool, training=False, padding=1)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf(), expected.isinf())
        assert fused(x, *rest, pool=pool, padding=1).isnan().all()


def test_gradient_of_the_bias(device, pool):
    """Zero in training, where batch norm takes the bias out again."""
    args = leaves(inputs((2, 16, 6, 6, 8, 3, {}), device, torch.float32))
    (grad,) = torch.autograd.grad(fused(*args, pool=pool).sum(), args[2])
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradcheck(device, channels_last, pool):
    args = inputs((2, 5, 5, 6, 3, 3, {}), device, torch.float64)
    args = leaves([torch.randn_like(t) for t in args], channels_last)
    mean, var = torch.randn(3, device=device).double(), torch.rand(3, device=device).double() + 0.5
    with braze.backend(conv2d="braze"):  # cuDNN's float64 gradients are not repeatable
        assert torch.autograd.gradcheck(lambda *t: fused(*t, pool=pool, padding=1), args)
        assert torch.autograd.gradcheck(
            lambda *t: fused(*t, mean, var, pool=pool, training=False, padding=1), args
        )


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, channels_last, pool):
    args = leaves(inputs((2, 16, 6, 7, 8, 3, {}), device, dtype), channels_last)
    geometry, settings = ([1, 1], [1, 1], [1, 1], 1), (False, True, "auto")
    op = torch.ops.braze.conv_bn_relu2d.default
    norm = True, 0.1, 1e-5, pool
    for contiguous in (False, True):
        call = (*args, None, None, None, *geometry, *norm, contiguous, *settings)
        torch.library.opcheck(op, call)
    args = [t.detach() for t in args]
    buffers = [torch.zeros(8, device=device).to(dtype), torch.ones(8, device=device).to(dtype)]
    batches = torch.zeros((), dtype=torch.int64, device=device)
    call = (*args, *buffers, batches, *geometry, *norm, False, *settings)
    torch.library.opcheck(op, call)
    y, *saved = op(*call)
    x, weight, _, *parameters = args
    backward = torch.ops.braze.conv_bn_relu2d_backward.default
    for mask in ([True] * 5, [False, True, False, True, True], [False] * 4 + [True]):
        for gamma, beta in (parameters, (None, None)):
            head = torch.randn_like(y), x, weight, gamma, beta, *saved
            torch.library.opcheck(backward, (*head, *geometry, True, pool, mask, *settings))


# Pooled pixels of one image or of several in a block, with a last block that is not full; planes of
# one pixel; and more than the L2 cache holds.
FORMATS = [
    SHAPES[0],
    SHAPES[1],
    (7, 16, 14, 14, 64, 3, {"padding": 1}),
    (5, 16, 2, 3, 32, 3, {"padding": 1}),
    (90, 16, 28, 28, 64, 3, {"padding": 1}),
]


@pytest.mark.parametrize("shape", FORMATS)
def test_memory_format_of_the_result(device, dtype, shape):
    """Any format gives the same numbers, forward and backward, at any size."""
    with braze.backend(conv2d="braze"):  # cuDNN's float64 gradients are not repeatable
        args = leaves(inputs(shape, device, dtype), channels_last=True)
        usual = fused(*args, pool=True, **shape[-1])
        upstream = torch.randn_like(usual)
        expected = torch.autograd.grad(usual, args, upstream)
        assert usual.is_contiguous(memory_format=torch.channels_last)
        for fmt in (torch.contiguous_format, torch.channels_last):
            y = fused(*args, pool=True, memory_format=fmt, **shape[-1])
            assert y.is_contiguous(memory_format=fmt)
            assert torch.equal(y, usual)
            for grad_fmt in (torch.contiguous_format, torch.channels_last):
                grads = torch.autograd.grad(
                    y, args, upstream.contiguous(memory_format=grad_fmt), retain_graph=True
                )
                assert all(map(torch.equal, grads, expected))


def test_fakes_of_what_is_kept(device):
    """On a GPU z at the maxima is kept behind the codes."""
    args = inputs((2, 16, 28, 28, 64, 3, {}), device, torch.float32)
    x, *rest = (
        t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in args
    )
    settings = [1, 1], [1, 1], [1, 1], 1, True, 0.1, 1e-5, True, False
    kept = torch.ops.braze.conv_bn_relu2d(x, *rest, None, None, None, *settings)
    with FakeTensorMode() as mode:
        x, *rest = (mode.from_tensor(t) for t in (x, *rest))
        fakes = torch.ops.braze.conv_bn_relu2d(x, *rest, None, None, None, *settings)
    assert [(t.shape, t.stride()) for t in kept] == [(t.shape, t.stride()) for t in fakes]
    codes = kept[0].numel() // 8
    assert (kept[2].numel() > codes) == (device == "cuda")


# Enough tiles for every multiprocessor to take several: there one kernel makes the gradients of a
# 3x3 convolution's input and weight (csrc/cuda/conv_bn_relu2d/conv_gradients.cu). Whole images, odd
# extents, fewer channels, rows of images.
AT_ONCE = [(700, 32, 14, 14), (620, 8, 13, 9), (560, 16, 7, 8), (96, 24, 30, 27)]
ARITHMETIC = [torch.bfloat16, torch.float16, "tf32"]


def backward_at_once(device, arithmetic, shape, contiguous):
    """What conv_bn_relu2d_backward wants of a forward, and gradients by its output_mask."""
    tf32 = arithmetic == "tf32"
    if tf32:
        torch.backends.cudnn.conv.fp32_precision = "tf32"
    n, *rest = shape
    x, weight, bias, gamma, beta = inputs(
        (n if device == "cuda" else 2, *rest, 64, 3, {}),
        device,
        torch.float32 if tf32 else arithmetic,
    )
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    gamma[::3] *= -1
    geometry = [1, 1], [1, 1], [1, 1], 1
    y, *saved = torch.ops.braze.conv_bn_relu2d(
        x, weight, bias, gamma, beta, *(None,) * 3, *geometry, True, 0.1, 1e-5, True, contiguous
    )
    dy = torch.randn_like(y)

    def backward(*mask, allow_tf32=tf32, backend="auto"):
        settings = allow_tf32, False, backend
        return torch.ops.braze.conv_bn_relu2d_backward(
            dy, x, weight, gamma, beta, *saved, *geometry, True, True, mask, *settings
        )

    return (x, weight, gamma, beta), y, dy, saved[0], backward


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("arithmetic", ARITHMETIC, ids=str)
@pytest.mark.parametrize("shape", AT_ONCE, ids=str)
def test_gradients_at_once(device, arithmetic, shape, contiguous):
    tensors, _, dy, _, backward = backward_at_once(device, arithmetic, shape, contiguous)
    dx, dw, *norm = backward(True, True, True, True, True)
    for again, once in zip(backward(*[True] * 5), (dx, dw, *norm), strict=True):
        assert torch.equal(again, once)

    def stocks(wide):
        args = [t.to(wide).requires_grad_() for t in tensors]
        x, weight, gamma, beta = args
        y = reference(x, weight, None, gamma, beta, pool=True, padding=1)
        return torch.autograd.grad(y, args, dy.to(wide))

    for actual, stock_, exact in zip(
        (dx, dw, *norm[1:]), stocks(dx.dtype), stocks(torch.float64), strict=True
    ):
        assert_by_rule(actual, stock_, exact, 2**13 if arithmetic == "tf32" else 4)
    assert norm[0].eq(0).all()


@cuda_only
def test_gradients_at_once_under_benchmark(device):
    hopper_only(device)
    *_, backward = backward_at_once(device, torch.bfloat16, AT_ONCE[0], False)
    for backend, expected in ("auto", True), ("benchmark", True), ("cudnn", False):
        ran = cuda_kernels_of(lambda backend=backend: backward(*[True] * 5, backend=backend))
        assert ("conv_gradients_kernel" in ran) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("arithmetic", ARITHMETIC, ids=str)
@pytest.mark.parametrize("contiguous", [False, True])
def test_gradients_at_once_that_are_not_finite(device, value, arithmetic, contiguous):
    """A gradient that is not finite reaches what those reach that are made one after the other."""
    *_, y, dy, _, backward = backward_at_once(device, arithmetic, AT_ONCE[0], contiguous)
    where = (y[:, 5] > 0).nonzero()[3]  # not where ReLU stops it
    dy[where[0], 5, where[1], where[2]] = value
    grads = backward(*[True] * 5)
    dx, *_ = backward(True, *[False] * 4)
    _, dw, *norm = backward(False, *[True] * 4)
    for at_once, expected in zip(grads, (dx, dw, *norm), strict=True):
        assert torch.equal(at_once.isfinite(), expected.isfinite())
    assert not grads[1][5].isfinite().any()
    assert grads[1][:5].isfinite().all()


@pytest.mark.parametrize("shape", AT_ONCE, ids=str)
@pytest.mark.parametrize("values", ["tiny", "huge", "growing", "zeros first", "by image"])
def test_gradients_at_once_of_any_scale(device, shape, values):
    """TF32 has float32's range of exponents, the kernel's operands, scaled float16, do not."""
    (x, weight, *_), _, dy, z, backward = backward_at_once(device, "tf32", shape, False)
    rows, images = torch.arange(x.shape[2], device=device), len(x)
    by = {
        # (Of products below float32's normal range cuDNN, with which these compare, drops bits.)
        "tiny": torch.tensor(2.0**-80),
        "huge": torch.tensor(2.0**90),
        "growing": 2.0 ** (4.0 * rows).clamp(max=40)[:, None],
        "zeros first": (rows >= 4).float()[:, None],
        "by image": 2.0 ** (torch.arange(images) % 7 * 9.0 - 27)[:, None, None, None],
    }[values].to(device)
    x.mul_(by)
    if values == "growing":  # z, whose statistics stay: what becomes dz grows too
        z.mul_(2.0 ** (3.0 * rows).clamp(max=24)[:, None])
    elif values in ("tiny", "huge"):
        weight.mul_(by), dy.mul_(2.0**-20 if values == "huge" else by * 2.0**60)
    dx, dw, *_ = backward(*[True] * 5)
    exact_dx, *_ = backward(True, *[False] * 4, allow_tf32=False)
    _, exact_dw, *_ = backward(False, *[True] * 4, allow_tf32=False)
    for actual, exact, dims in ((dx, exact_dx, (1, 2, 3)), (dw, exact_dw, (2, 3))):
        assert exact.isfinite().all()
        largest = exact.abs().amax(dims, keepdim=True)
        assert ((actual - exact).abs() <= 2.0**-8 * largest).all()


def layers_of(pool, **options):
    return torch.nn.Sequential(
        torch.nn.Conv2d(16, 24, 3, padding=1, **options),
        torch.nn.BatchNorm2d(24),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2) if pool else torch.nn.Identity(),
    )


def block_of(layers):
    conv, bn, _, pool = copy.deepcopy(layers)
    if isinstance(pool, torch.nn.MaxPool2d):
        return braze.nn.ConvBnReLUMaxPool2d.from_modules(conv, bn, pool)
    return braze.nn.ConvBnReLU2d.from_modules(conv, bn)


@pytest.mark.parametrize("channels_last", [False, True])
def test_module(device, channels_last, pool):
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    layers = layers_of(pool).to(device)
    block, wide = block_of(layers), copy.deepcopy(layers).double()
    x = torch.randn(4, 16, 9, 10, device=device).to(memory_format=fmt).requires_grad_()
    tensors = [t.detach().clone().requires_grad_() for t in layers.parameters()]

    def run(model):
        def function(x, *tensors):
            names = [name for name, _ in model.named_parameters()]
            like = copy.deepcopy(model).to(x.dtype)
            return torch.func.functional_call(like, dict(zip(names, tensors, strict=True)), x)

        return function

    check_against_stock(run(block), run(layers), [x, *tensors])
    y, expected, exact = block(x), layers(x), wide(x.double())
    assert "ConvBnReLU2d" in y.grad_fn.name()
    assert_by_rule(y, expected, exact)
    assert_by_rule(block.bn.running_var, layers[1].running_var, wide[1].running_var)
    assert block.bn.num_batches_tracked == 1
    block.eval(), layers.eval(), wide.eval()
    assert_by_rule(block(x), layers(x), wide(x.double()))


def test_state_dict_copies_and_pickles(device, pool):
    options = {"stride": 1, "padding": 1, "momentum": None, "affine": True}
    kind = braze.nn.ConvBnReLUMaxPool2d if pool else braze.nn.ConvBnReLU2d
    block, other = kind(16, 24, 3, **options).to(device), kind(16, 24, 3, **options).to(device)
    assert block.bn.momentum is None
    names = [f"conv.{n}" for n in ("weight", "bias")]
    names += [f"bn.{n}" for n in ("weight", "bias", "running_mean", "running_var")]
    assert list(block.state_dict()) == [*names, "bn.num_batches_tracked"]
    x = torch.randn(2, 16, 8, 8, device=device)
    block(x)
    other.load_state_dict(block.state_dict())
    copies = [other, copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
    expected = block.eval()(x)
    assert all(torch.equal(c.eval()(x), expected) for c in copies)


def test_modules_that_do_not_fit():
    conv, bn = torch.nn.Conv2d(4, 8, 3, padding_mode="reflect"), torch.nn.BatchNorm2d(8)
    with pytest.raises(ValueError, match="expected padding_mode='zeros'"):
        braze.nn.ConvBnReLU2d.from_modules(conv, bn)
    conv = torch.nn.Conv2d(4, 8, 3)
    with pytest.raises(ValueError, match="expected batch norm over 8 channels, but got 4"):
        braze.nn.ConvBnReLU2d.from_modules(conv, torch.nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="return_indices=False"):
        braze.nn.ConvBnReLUMaxPool2d.from_modules(conv, bn, torch.nn.MaxPool2d(2, None, 0, 1, True))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "pool_stride": 2, "pool_padding": 1},
        {"kernel_size": 2, "ceil_mode": True},
        {"kernel_size": (2, 1)},
        {"kernel_size": 2, "pool_dilation": 2, "pool_stride": 1},
    ],
    ids=str,
)
def test_other_poolings_follow_the_block(device, options):
    args = leaves(inputs((2, 16, 9, 9, 8, 3, {}), device, torch.float32))
    args[2].requires_grad_(False)

    def stock_run(x, w, b, gamma, beta):
        y = reference(x, w, b, gamma, beta, pool=False)
        names = ("kernel_size", "pool_stride", "pool_padding", "pool_dilation")
        settings = [options.get(name, d) for name, d in zip(names, (2, None, 0, 1), strict=True)]
        return stock.max_pool2d(y, *settings, ceil_mode=options.get("ceil_mode", False))

    def run(x, w, b, gamma, beta):
        options_ = {"training": True, **options}
        return F.conv_bn_relu_max_pool2d(x, w, b, None, None, gamma, beta, **options_)

    y = run(*args)
    assert "ConvBnReLU2d" in y.grad_fn.next_functions[0][0].name()
    check_against_stock(run, stock_run, args)


@pytest.mark.parametrize(
    "shape", [(4, 16, 2, 2), (1, 16, 3, 2), (2, 16, 1, 8), (0, 16, 8, 8), (16, 8, 8), (1, 16, 1, 1)]
)
def test_other_shapes_behave_as_the_layers(device, shape, pool):
    layers = layers_of(pool).to(device)
    x = torch.randn(shape, device=device)

    def outcome(f):
        try:
            return tuple(f(x).shape)
        except Exception as error:
            return type(error)

    for training in (True, False):
        layers.train(training)
        expected = outcome(layers)
        assert outcome(block_of(layers)) == expected


def test_compile(device, pool):
    layers = layers_of(pool).to(device)
    block = block_of(layers)
    x = torch.randn(4, 16, 12, 13, device=device, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True)
    out, expected = compiled(x), block(x)
    assert torch.equal(out, expected)
    # The convolution's kernel may be another one: the compiler chooses its gradient's strides.
    wide = layers.double()(x.double())
    assert_by_rule(*(torch.autograd.grad(t.square().sum(), x)[0] for t in (out, expected, wide)))
    assert torch.equal(compiled.bn.running_mean, block.bn.running_mean)
    assert compiled.bn.num_batches_tracked == block.bn.num_batches_tracked == 1


def test_autocast(device, pool):
    block = block_of(layers_of(pool)).to(device)
    x = torch.randn(4, 16, 12, 12, device=device)
    with torch.autocast(device, torch.bfloat16):
        out = block(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in block.parameters())


def test_bad_input(device, pool):
    x, w, b, gamma, beta = leaves(inputs((2, 16, 6, 6, 8, 3, {}), device, torch.float32))
    mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)

    def run(*tensors, **options):
        return fused(*tensors, pool=pool, **options)

    with pytest.raises(ValueError, match="eps must be positive"):
        run(x, w, b, gamma, beta, eps=0.0)
    with pytest.raises(ValueError, match="must either both be None or neither"):
        run(x, w, b, gamma, beta, mean)
    with pytest.raises(RuntimeError, match="weight should contain 8 elements not 3"):
        run(x, w, b, gamma[:3], beta, mean, var)
    with pytest.raises(RuntimeError, match="to have 16 channels, but got 15 channels"):
        run(x[:, :15], w, b, gamma, beta)
    with pytest.raises(RuntimeError, match="non-positive stride is not supported"):
        run(x, w, b, gamma, beta, stride=0)
    with pytest.raises(RuntimeError, match=r"not implemented for|not supported for Long"):
        run(x.long(), w.detach().long(), None, None, None)
    with pytest.raises(TypeError, match="input"):
        run(None, w, b, gamma, beta)
    assert torch.equal(mean, torch.zeros_like(mean))


def test_the_tests_reject_a_wrong_kernel(device, pool):
    """Gradients without batch norm's correction terms: the comparison must fail."""

    class Wrong(ConvBnReLU2d):
        @staticmethod
        def backward(ctx, grad_output, *_):
            *geometry, _, with_pool = ctx.geometry
            ctx.geometry = *geometry, False, with_pool
            return ConvBnReLU2d.backward(ctx, grad_output)

    args = leaves(inputs((2, 16, 7, 8, 8, 3, {}), device, torch.float32))
    with torch.no_grad():  # no ties, which any rounding breaks: the comparison is lenient there
        args[0].normal_()
    args[2].requires_grad_(False)
    settings = [1, 1], [0, 0], [1, 1], 1, True, 0.1, 1e-5, pool, False
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(
            lambda *t: Wrong.apply(*t, None, None, None, *settings)[0],
            lambda *t: reference(*t, pool=pool),
            args,
        )
