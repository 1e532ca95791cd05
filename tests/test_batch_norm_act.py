"""batch_norm_act: batch norm, an addition and an activation as one op."""

import copy

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import braze.nn.functional as F
from braze import nn
from braze._ops.batch_norm_act import BatchNormAct
from common import assert_by_rule, check_against_stock, compile, cuda_kernels_of, layouts

op = torch.ops.braze.batch_norm_act.default
inference = torch.ops.braze.batch_norm_act_inference.default
backward = torch.ops.braze.batch_norm_act_backward.default

# name -> (settings, torch's function, where its derivative jumps)
ACTIVATIONS = {
    "identity": ((), lambda v: v, ()),
    "relu": ((), torch.relu, (0,)),
    "relu6": ((), stock.relu6, (0, 6)),
    "hardtanh": ((-0.5, 0.75), lambda v: stock.hardtanh(v, -0.5, 0.75), (-0.5, 0.75)),
    "leaky_relu": ((0.2,), lambda v: stock.leaky_relu(v, 0.2), (0,)),
    "silu": ((), stock.silu, ()),
    "gelu": ((), stock.gelu, ()),
    "gelu, tanh": (("tanh",), lambda v: stock.gelu(v, approximate="tanh"), ()),
    # torch's own kernels have 1/6 of fp32's accuracy in float64
    "hardswish": (
        (),
        lambda v: v * stock.relu6(v + 3) / 6 if v.dtype == torch.float64 else stock.hardswish(v),
        (-3, 3),
    ),
    "hardsigmoid": ((), lambda v: stock.relu6(v + 3) / 6, (-3, 3)),
    "sigmoid": ((), torch.sigmoid, ()),
    "tanh": ((), torch.tanh, ()),
    "elu": ((0.7,), lambda v: stock.elu(v, 0.7), (0,)),
    # a power of two: torch's own takes 1 / alpha in fp32 in its float64 gradient
    "celu": ((2.0,), lambda v: stock.celu(v, 2.0), ()),
    "mish": ((), stock.mish, ()),
}
# vectors of several widths, odd extents and channels, one image, several blocks and tiles of each
SHAPES = [
    (4, 8, 6, 6),
    (3, 5, 7, 11),
    (2, 24, 9, 12),
    (1, 40, 14, 14),
    (2, 300, 3, 5),
    (3, 1, 6, 4),
    (65, 2, 28, 28),
    (2, 2056, 2, 2),
    (6, 144),
    (5, 6, 7),
    (2, 3, 4, 5, 2),
]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def ours(name, training, x, residual, *norm):
    activation, arguments = name.partition(",")[0], ACTIVATIONS[name][0]
    weight, bias, mean, var = norm
    return F.batch_norm_act(
        x, mean, var, weight, bias, training,
        residual=residual, activation=activation, settings=arguments,
    )  # fmt: skip


def theirs(name, training, x, residual, weight, bias, mean, var):
    if weight is None and bias is not None:  # a case in which the backward of torch 2.11 fails
        weight = torch.ones_like(bias)
    if weight is not None and mean is not None:
        mean, var = mean.to(weight.dtype), var.to(weight.dtype)
    y = stock.batch_norm(x.clone(), mean, var, weight, bias, training)
    return ACTIVATIONS[name][1](y if residual is None else y + residual)


def inputs(shape, device, dtype, *, residual=True, fmt=torch.contiguous_format):
    """x, residual, weight, bias, mean and var; the parameters of 16-bit tensors in float32."""
    parameter = torch.float64 if dtype == torch.float64 else torch.float32

    def rand(*shape):
        return torch.randn(shape, device=device)

    def activations():
        t = rand(*shape).to(dtype)
        t = t.to(memory_format=fmt) if len(shape) == 4 else t
        return t.requires_grad_()

    c = shape[1]
    return [
        activations(),
        activations() if residual else None,
        (rand(c) * 2).to(parameter).requires_grad_(),
        rand(c).to(parameter).requires_grad_(),
        rand(c).to(parameter) * 0.2,
        torch.rand(c, device=device).to(parameter) + 0.5,
    ]


def away_from_jumps(name, training, args):
    """An incoming gradient that is zero wherever rounding decides on which side of a jump of the
    derivative the activation's argument is."""
    x, *others = (None if t is None else t.detach().double() for t in args)
    v = theirs("identity", training, x, *others)
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    margin = 64 * torch.finfo(args[0].dtype).eps * max(1, v.abs().max().item())
    for jump in ACTIVATIONS[name][2]:
        grad[(v.cpu() - jump).abs() < margin] = 0
    return grad.to(args[0].dtype)


def check(name, training, args):
    present = [t for t in args if t is not None]

    def run(function, *tensors):
        found = iter(tensors)
        return function(name, training, *(None if t is None else next(found) for t in args))

    return check_against_stock(
        lambda *t: run(ours, *t),
        lambda *t: run(theirs, *t),
        present,
        grad_output=away_from_jumps(name, training, args),
    )


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_matches_stock(device, dtype, name, residual, training, layout):
    fmt = FORMATS[layout]
    args = inputs((3, 16, 5, 8), device, dtype, residual=residual, fmt=fmt)
    y = check(name, training, args)
    assert y.is_contiguous(memory_format=fmt)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ["identity", "relu", "silu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape, name, training, layout):
    if len(shape) != 4 and layout == "channels_last":
        pytest.skip("channels_last is for images")
    for residual in (True, False):
        args = inputs(shape, device, dtype, residual=residual, fmt=FORMATS[layout])
        check(name, training, args)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_without_gradients(device, dtype, name, residual, layout):
    """In evaluation mode, where small tensors have a kernel of their own."""
    for shape in ((3, 16, 5, 8), (2, 264, 3, 3), (1, 12, 9, 9), (6, 144), (2, 64, 95, 95)):
        fmt = FORMATS[layout] if len(shape) == 4 else torch.contiguous_format
        args = inputs(shape, device, dtype, residual=residual, fmt=fmt)
        before = [t if t is None else t.detach().clone() for t in args]
        with torch.no_grad():
            y, expected = ours(name, False, *args), theirs(name, False, *args)
            exact = theirs(name, False, *(t if t is None else t.double() for t in args))
        assert y.is_contiguous(memory_format=fmt)
        assert_by_rule(y, expected, exact)
        for t, was in zip(args, before, strict=True):
            assert t is None or torch.equal(t, was)


@pytest.mark.parametrize("layout", FORMATS)
def test_far_from_zero_without_gradients(device, layout):
    x, residual, weight, bias, mean, var = inputs(
        (2, 64, 7, 7), device, torch.float32, fmt=FORMATS[layout]
    )
    args = x * 1e-3 + 1, residual, weight, bias, mean * 1e-3 + 1, var * 1e-6
    with torch.no_grad():
        exact = theirs("relu", False, *(t.double() for t in args))
        assert_by_rule(ours("relu", False, *args), theirs("relu", False, *args), exact)


def test_without_gradients_in_one_kernel(device):
    if device == "cpu":
        pytest.skip("counts launches on a GPU")
    x, residual, *norm = inputs((2, 64, 7, 7), device, torch.bfloat16, fmt=FORMATS["channels_last"])
    with torch.no_grad():
        names = cuda_kernels_of(lambda: ours("relu", False, x, residual, *norm))
    assert "tail_pass" in names
    assert "coefficients" not in names


@given(
    shape=st.tuples(*(st.integers(1, m) for m in (5, 70, 13, 13))),
    name=st.sampled_from(["identity", "relu", "hardtanh", "silu"]),
    training=st.booleans(),
    residual=st.booleans(),
    layout=st.sampled_from(list(FORMATS)),
)
@settings(max_examples=30, deadline=None)
def test_fuzzed_shapes(shape, name, training, residual, layout):
    if training and shape[0] * shape[2] * shape[3] == 1:
        training = False
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        args = inputs(shape, device, torch.float64, residual=residual, fmt=FORMATS[layout])
        check(name, training, args)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_layouts(device, dtype, name):
    """Both tensors in all layouts, also in different ones."""
    args = inputs((3, 16, 6, 9), device, dtype)
    for kind, x in layouts((3, 16, 6, 9), device, dtype):
        residual = args[0].detach().to(memory_format=torch.channels_last).requires_grad_()
        args[:2] = [x.detach().requires_grad_(), residual]
        y = check(name, True, args)
        fmt = torch.channels_last if kind == "channels_last" else torch.contiguous_format
        assert y.is_contiguous(memory_format=fmt), kind
        y = ours(name, True, *args)
        upstream = torch.randn(3, 6, 16, 9, device=device).to(dtype).transpose(1, 2)
        found = torch.autograd.grad(y, args[:2], upstream, retain_graph=True)
        again = torch.autograd.grad(y, args[:2], upstream.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), kind


@pytest.mark.parametrize("layout", FORMATS)
def test_unaligned_storage_offset(device, dtype, layout):
    args = inputs((4, 8, 8, 16), device, dtype)
    for i in (0, 1):
        storage = torch.empty(args[i].numel() + 1, device=device, dtype=dtype)[1:]
        t = storage.view(4, 8, 16, 8).permute(0, 3, 1, 2)
        t = t if layout == "channels_last" else storage.view(4, 8, 8, 16)
        args[i] = t.copy_(args[i].detach()).requires_grad_()
    check("relu", True, args)


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_without_parameters(device, dtype, name):
    x, residual, weight, bias, mean, var = inputs((4, 6, 5, 8), device, dtype)
    for w, b in [(None, None), (weight, None), (None, bias)]:
        check(name, True, [x, residual, w, b, None, None])
        check(name, False, [x, residual, w, b, mean, var])


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics(device, dtype, momentum):
    x, residual, weight, _, *_ = inputs((6, 5, 7, 4), device, dtype)
    bn = torch.nn.BatchNorm2d(5, momentum=momentum, device=device, dtype=weight.dtype)
    layer = nn.BatchNormAct2d(5, momentum=momentum, device=device, dtype=weight.dtype)
    wide = copy.deepcopy(bn).double()
    versions = [b._version for b in layer.buffers()]
    for _ in range(3):
        bn(x), wide(x.double())
        layer(x, residual)
    for actual, expected, reference in zip(
        list(layer.buffers())[:2], bn.buffers(), wide.buffers(), strict=False
    ):
        assert_by_rule(actual, expected, reference)
    assert layer.num_batches_tracked == bn.num_batches_tracked == 3
    assert all(b._version > v for b, v in zip(layer.buffers(), versions, strict=True))
    before = [b.clone() for b in layer.buffers()]
    layer.eval()(x, residual)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), before, strict=True))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", ["identity", "relu", "relu6", "leaky_relu"])
def test_special_values(device, dtype, name, layout):
    """NaN and infinities in both tensors, sums that are exactly a bound, and sums that are NaN."""
    fmt = FORMATS[layout]
    x, residual = (torch.randint(-3, 7, (4, 8, 9, 6), device=device).to(dtype) for _ in range(2))
    nan, inf = float("nan"), float("inf")
    x[0, 0, 0, 0], x[1, 1, 4, 5], x[2, 2, 2, 2], x[3, 3, 2, 2] = nan, inf, -inf, inf
    residual[0, 0, 0, 1], residual[1, 2, 3, 4], residual[3, 3, 2, 2] = nan, inf, -inf
    x, residual = (t.to(memory_format=fmt).requires_grad_() for t in (x, residual))
    mean, var = torch.zeros(8, device=device).to(dtype), torch.ones(8, device=device).to(dtype)
    arguments, function, _ = ACTIVATIONS[name]
    eps = 2.0**-100  # 1 + eps is 1
    y = F.batch_norm_act(
        x, mean, var, eps=eps, residual=residual, activation=name, settings=arguments
    )
    total = stock.batch_norm(x, mean, var, eps=eps) + residual
    expected = function(total)
    assert_by_rule(y, expected, expected.double())
    upstream = torch.randn(y.shape, device=device).to(dtype)
    grads = (torch.autograd.grad(t, (x, residual), upstream) for t in (y, expected))
    decided = ~total.isnan()  # torch's own kernels differ in what they let through at NaN
    for a, b in zip(*grads, strict=True):
        assert_by_rule(a[decided], b[decided], b[decided].double())


def test_nan_in_training(device):
    args = inputs((3, 4, 6, 6), device, torch.float32)
    with torch.no_grad():
        args[0][1, 2, 3, 4] = float("nan")
    y, expected = ours("relu", True, *args), theirs("relu", True, *args)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[:, 2].isnan().all()


@pytest.mark.parametrize("layout", FORMATS)
def test_mean_much_larger_than_the_deviation(device, layout):
    args = inputs((8, 6, 12, 12), device, torch.float32, fmt=FORMATS[layout])
    args[0] = (args[0].detach() + 1000).requires_grad_()
    check("relu", True, args)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (0, 5)], ids=str)
def test_empty(device, shape):
    args = inputs(shape, device, torch.float32)
    expected, y = theirs("relu", True, *args), ours("relu", True, *args)
    assert y.shape == expected.shape
    for a, b in zip(
        torch.autograd.grad(y.sum(), args[:4]),
        torch.autograd.grad(expected.sum(), args[:4]),
        strict=True,
    ):
        assert torch.equal(a, b)
    batches = torch.zeros((), dtype=torch.int64, device=device)
    F.batch_norm_act(args[0], *args[4:], training=True, num_batches_tracked=batches)
    assert batches == 1


def test_a_residual_that_does_not_go_with_the_input(device):
    """Broadcast, or of another dtype: added by torch's rules."""
    x, _, *norm = inputs((3, 4, 5, 6), device, torch.bfloat16)
    for residual in (
        torch.randn(4, 1, 1, device=device, dtype=torch.bfloat16),
        torch.randn(3, 4, 5, 6, device=device),
        torch.randn(2, 3, 4, 5, 6, device=device, dtype=torch.bfloat16),
    ):
        y, expected = (f("relu", True, x, residual, *norm) for f in (ours, theirs))
        wide = theirs("relu", True, *(t.double() for t in (x, residual, *norm)))
        assert_by_rule(y, expected, wide)


def test_partial_gradients(device):
    args = inputs((4, 8, 6, 7), device, torch.float32)
    for name in ("identity", "relu", "silu"):
        for training in (True, False):
            y = ours(name, training, *args)
            everything = torch.autograd.grad(y.sum(), args[:4], retain_graph=True)
            for i, t in enumerate(args[:4]):
                (alone,) = torch.autograd.grad(y.sum(), t, retain_graph=True)
                assert torch.equal(alone, everything[i])


def test_gradients_in_other_layouts(device, dtype):
    """Those that come are brought to the input's, by a transposition where they are contiguous."""
    for shape in ((4, 24, 5, 7), (3, 8, 1, 9), (2, 2056, 7, 7)):
        args = inputs(shape, device, dtype, fmt=torch.channels_last)
        y = ours("relu", True, *args)
        dy = torch.randn(*shape, device=device).to(dtype)
        expected = torch.autograd.grad(
            y, args[:4], dy.contiguous(memory_format=torch.channels_last), retain_graph=True
        )
        wide = torch.randn(*shape[:3], 2 * shape[3], device=device).to(dtype)
        wide[..., ::2] = dy
        for other in (dy, dy.mT.contiguous().mT, wide[..., ::2]):
            for a, b in zip(
                torch.autograd.grad(y, args[:4], other, retain_graph=True), expected, strict=True
            ):
                assert torch.equal(a, b)


def test_repeatable_and_the_same_for_any_number_of_threads():
    args = inputs((16, 24, 15, 16), "cpu", torch.float32)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, threads):
        torch.set_num_threads(count)
        y = ours("silu", True, *args)
        results.append((y, *torch.autograd.grad(y.square().sum(), args[:4])))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradcheck(device, name, layout):
    args = inputs((2, 4, 3, 5), device, torch.float64, fmt=FORMATS[layout])
    norm = args[4:]
    for training in (True, False):
        assert torch.autograd.gradcheck(
            lambda *t, training=training: ours(name, training, *t, *norm), args[:4]
        )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_second_derivatives(device, name):
    for residual in (True, False):
        args = inputs((2, 2, 2, 3), device, torch.float64, residual=residual)
        wanted = [t for t in args[:4] if t is not None]
        for training in (True, False):

            def run(*tensors, training=training, args=args):
                found = iter(tensors)
                mine = (None if t is None else next(found) for t in args[:4])
                return ours(name, training, *mine, *args[4:])

            assert torch.autograd.gradgradcheck(run, wanted)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", ["identity", "relu", "hardtanh", "silu"])
def test_opcheck(device, dtype, name, layout):
    x, residual, weight, bias, mean, var = inputs((2, 8, 5, 6), device, dtype, fmt=FORMATS[layout])
    act = (name, -0.5, 0.5)
    for r in (residual, None):
        torch.library.opcheck(op, (x, r, weight, bias, None, None, None, True, 0.1, 1e-5, *act))
        with torch.no_grad():
            tensors = [None if t is None else t.detach() for t in (x, r, weight, bias)]
            batches = torch.zeros((), dtype=torch.int64, device=device)
            rest = mean, var, batches, True, 0.1, 1e-5, *act
            torch.library.opcheck(op, (*tensors, *rest))
            y, mask, statistics = op(*tensors, *rest)
            kept = tensors[1] if mask.numel() == 0 and name != "identity" else None
            has_residual = kept is not None or mask.numel() > 0
            for wanted in ([True] * 4, [True, False, False, True], [False, False, True, False]):
                wanted[1] = wanted[1] and has_residual
                torch.library.opcheck(
                    backward,
                    (y, tensors[0], kept, *tensors[2:], mask, statistics, True, *act, wanted),
                )


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", ["relu", "silu", "mish"])
def test_opcheck_of_inference(device, dtype, name, layout):
    args = inputs((2, 8, 5, 6), device, dtype, fmt=FORMATS[layout])
    x, residual, *norm = (t.detach() for t in args)
    for r in (residual, None):
        torch.library.opcheck(inference, (x, r, *norm, 1e-5, name, 0.0, 0.0))
    y = inference(args[0], None, *norm, 1e-5, name, 0.0, 0.0)  # with a gradient, by the other op
    assert torch.equal(
        torch.autograd.grad(y.sum(), args[0])[0],
        torch.autograd.grad(ours(name, False, args[0], None, *norm).sum(), args[0])[0],
    )


@pytest.mark.parametrize("name", ["identity", "relu", "leaky_relu", "celu"])
def test_compiles(device, name):
    args = inputs((2, 8, 5, 6), device, torch.float32)
    compiled = compile(lambda *t: ours(name, True, *t, None, None))
    y, expected = compiled(*args[:4]), ours(name, True, *args[:4], None, None)
    assert torch.equal(y, expected)
    for a, b in zip(*(torch.autograd.grad(t.sum(), args[:4]) for t in (y, expected)), strict=True):
        assert torch.equal(a, b)


def test_bad_input(device):
    x, residual, weight, bias, mean, var = inputs((2, 4, 6, 6), device, torch.float32)
    with pytest.raises(ValueError, match="expected activation to be one of celu, elu"):
        F.batch_norm_act(x, mean, var, activation="softmax")
    with pytest.raises(ValueError, match="min_val cannot be greater"):
        F.batch_norm_act(x, mean, var, activation="hardtanh", settings=(1.0, 0.0))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.batch_norm_act(x[:1, :, :1, :1], mean, var, training=True)
    settings = None, True, 0.1, 1e-5
    relu = "relu", 0.0, 0.0
    with pytest.raises(RuntimeError, match="expected activation to be one of identity, relu"):
        op(x, residual, weight, bias, mean, var, *settings, "sine", 0.0, 0.0)
    with pytest.raises(RuntimeError, match="weight should contain 4 elements not 3"):
        op(x, residual, weight[:3], bias, mean, var, *settings, *relu)
    with pytest.raises(RuntimeError, match="expected residual to have the same shape as input"):
        op(x, residual[:1], weight, bias, mean, var, *settings, *relu)
    with pytest.raises(RuntimeError, match="expected residual to have the same dtype as input"):
        op(x, residual.double(), weight, bias, mean, var, *settings, *relu)
    assert torch.equal(mean, mean.clone())
    with torch.no_grad():
        y, mask, statistics = op(x, residual, weight, bias, None, None, *settings, *relu)
        rest = True, *relu, [True] * 4
        kept = residual if mask.numel() == 0 else None
        with pytest.raises(RuntimeError, match="grad_output to have the same shape"):
            backward(y[..., :1], x, kept, weight, bias, mask, statistics, *rest)
        with pytest.raises(RuntimeError, match="expected statistics of shape"):
            backward(y, x, kept, weight, bias, mask, statistics.double(), *rest)
        with pytest.raises(RuntimeError, match="expected a mask of"):
            backward(y, x, kept, weight, bias, mask.new_zeros(3), statistics, *rest)
        with pytest.raises(RuntimeError, match="expected a residual"):
            backward(y, x, None, weight, bias, mask.new_zeros(0), statistics, *rest)


@pytest.mark.parametrize("residual", [True, False])
def test_the_tests_reject_a_wrong_kernel(device, residual):
    """The gradient of another activation: the comparison must fail."""

    class Wrong(BatchNormAct):
        @staticmethod
        def backward(ctx, grad_output, *_):
            ctx.settings = ctx.settings[0], "hardsigmoid", 0.0, 0.0
            return BatchNormAct.backward(ctx, grad_output)

    x, r, weight, bias, mean, var = inputs((2, 8, 7, 8), device, torch.float32, residual=residual)

    def wrong(x, weight, bias):
        rest = mean, var, None, True, 0.1, 1e-5, "silu", 0.0, 0.0
        return Wrong.apply(x, r, weight, bias, *rest)[0]

    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(
            wrong,
            lambda x, w, b: theirs(
                "silu", True, x, None if r is None else r.to(x.dtype), w, b, None, None
            ),
            [x, weight, bias],
        )
