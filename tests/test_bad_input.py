"""Bad and borderline input of every public function: the exception type of torch, or its result.

Nothing may be half-written after an error: all tensors passed have to be as they were.
"""

import pytest
import torch
import torch.nn.functional as stock_F

import braze
import braze.nn.functional as F

NAN, INF = float("nan"), float("inf")


def rand(*shape):
    """In float64, where two right results differ by less than assert_close allows."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def labels(*values):
    return torch.tensor(values)


def buffers(n):
    return [torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)]


def with_special_values(*shape):
    x = torch.randn(shape, dtype=torch.float64)
    x.view(-1)[:4] = torch.tensor([NAN, INF, -INF, -0.0])
    return x.requires_grad_()


def transposed(stride=1, padding=0, more=0, groups=1, dilation=1, x=(1, 3, 5, 5), w=(3, 4, 3, 3)):
    """Arguments of a transposed convolution; `more` is its output padding."""
    return rand(*x), rand(*w), None, stride, padding, more, groups, dilation


pytestmark = pytest.mark.usefixtures("own_norms")
# function -> arguments that are right
GOOD = {
    "matmul": lambda: (rand(3, 4), rand(4, 5)),
    "linear": lambda: (rand(3, 4), rand(5, 4), rand(5)),
    "conv2d": lambda: (rand(2, 3, 5, 5), rand(4, 3, 3, 3), rand(4)),
    "conv_transpose2d": lambda: (rand(2, 4, 5, 5), rand(4, 3, 3, 3), rand(3), 2, 1, 1),
    "batch_norm": lambda: (rand(4, 3, 2, 2), *buffers(3), rand(3), rand(3), True),
    "group_norm": lambda: (rand(3, 4, 5), 2, rand(4), rand(4)),
    "instance_norm": lambda: (rand(3, 4, 5),),
    "layer_norm": lambda: (rand(3, 4), (4,), rand(4), rand(4)),
    "relu": lambda: (rand(3, 4),),
    "max_pool2d": lambda: (rand(2, 3, 4, 4), 2),
    "avg_pool2d": lambda: (rand(2, 3, 4, 4), 2),
    "adaptive_avg_pool2d": lambda: (rand(2, 3, 4, 4), 2),
    "interpolate": lambda: (rand(2, 3, 4, 4), None, 2),
    "softmax": lambda: (rand(3, 4), 1),
    "log_softmax": lambda: (rand(3, 4), 1),
    "nll_loss": lambda: (rand(3, 4), labels(0, 3, 1)),
    "cross_entropy": lambda: (rand(3, 4), labels(0, 3, 1)),
}

# (function, what is special, arguments): torch's exception type or torch's result
AS_TORCH = [
    ("matmul", "inner sizes differ", lambda: (rand(3, 4), rand(5, 4))),
    ("matmul", "batches do not broadcast", lambda: (rand(2, 3, 4), rand(3, 4, 5))),
    ("matmul", "dtypes differ", lambda: (rand(3, 4), rand(4, 5).float())),
    ("matmul", "zero stride", lambda: (rand(1, 4).expand(3, 4), rand(4, 1).expand(4, 5))),
    ("matmul", "no inner elements", lambda: (rand(3, 0), rand(0, 5))),
    ("matmul", "empty batch", lambda: (rand(0, 3, 4), rand(4, 5))),
    ("matmul", "0-d", lambda: (rand(), rand(4, 5))),
    ("matmul", "special values", lambda: (with_special_values(3, 4), rand(4, 5))),
    ("linear", "features differ", lambda: (rand(3, 4), rand(5, 3))),
    ("linear", "bias of another size", lambda: (rand(3, 4), rand(5, 4), rand(6))),
    ("linear", "dtypes differ", lambda: (rand(3, 4), rand(5, 4).float())),
    ("linear", "zero stride", lambda: (rand(1, 4).expand(3, 4), rand(5, 4))),
    ("linear", "empty batch", lambda: (rand(0, 4), rand(5, 4), rand(5))),
    ("linear", "no features", lambda: (rand(3, 0), rand(5, 0), rand(5))),
    ("linear", "0-d", lambda: (rand(), rand(5, 4))),
    ("linear", "special values", lambda: (with_special_values(3, 4), rand(5, 4))),
    ("conv2d", "kernel larger than padded input", lambda: (rand(1, 1, 3, 3), rand(1, 1, 6, 6))),
    ("conv2d", "channels differ", lambda: (rand(1, 2, 5, 5), rand(4, 3, 3, 3))),
    (
        "conv2d",
        "groups do not divide",
        lambda: (rand(1, 3, 5, 5), rand(4, 1, 3, 3), None, 1, 0, 1, 2),
    ),
    ("conv2d", "bias of another size", lambda: (rand(1, 3, 5, 5), rand(4, 3, 3, 3), rand(3))),
    ("conv2d", "stride 0", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, 0)),
    ("conv2d", "negative padding", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, 1, -1)),
    ("conv2d", "dilation 0", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, 1, 0, 0)),
    ("conv2d", "groups 0", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, 1, 0, 1, 0)),
    ("conv2d", "groups 1.0", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, 1, 0, 1, 1.0)),
    ("conv2d", "three strides", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, (1, 1, 1))),
    ("conv2d", "unknown padding", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, 1, "wide")),
    ("conv2d", "same with stride", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3), None, 2, "same")),
    ("conv2d", "dtypes differ", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3).float())),
    ("conv2d", "2-d input", lambda: (rand(5, 5), rand(1, 1, 3, 3))),
    ("conv2d", "0-d", lambda: (rand(), rand(1, 1, 3, 3))),
    ("conv2d", "zero stride", lambda: (rand(1, 1, 5, 5).expand(2, 3, 5, 5), rand(4, 3, 3, 3))),
    ("conv2d", "empty batch", lambda: (rand(0, 3, 5, 5), rand(4, 3, 3, 3), rand(4))),
    ("conv2d", "no input channels", lambda: (rand(2, 0, 5, 5), rand(4, 0, 3, 3), rand(4))),
    ("conv2d", "no output channels", lambda: (rand(2, 3, 5, 5), rand(0, 3, 3, 3))),
    ("conv2d", "special values", lambda: (with_special_values(1, 1, 5, 5), rand(1, 1, 3, 3))),
    *(
        ("conv_transpose2d", *rest)
        for rest in [
            ("channels differ", lambda: transposed(x=(1, 2, 5, 5))),
            ("groups do not divide", lambda: transposed(groups=2)),
            ("bias of another size", lambda: (rand(1, 3, 5, 5), rand(3, 4, 3, 3), rand(3))),
            ("stride 0", lambda: transposed(stride=0)),
            ("negative padding", lambda: transposed(padding=-1)),
            ("negative output padding", lambda: transposed(more=-1)),
            ("output padding of a stride", lambda: transposed(stride=2, more=2)),
            ("nothing left", lambda: transposed(padding=4)),
            ("dilation 0", lambda: transposed(dilation=0)),
            ("groups 0", lambda: transposed(groups=0)),
            ("groups 1.0", lambda: transposed(groups=1.0)),
            ("three strides", lambda: transposed(stride=(1, 1, 1))),
            ("padding in words", lambda: transposed(padding="same")),
            ("dtypes differ", lambda: (rand(1, 1, 5, 5), rand(1, 1, 3, 3).float())),
            ("2-d input", lambda: transposed(x=(5, 5))),
            ("3-d weight", lambda: transposed(w=(4, 3, 3))),
            ("0-d", lambda: transposed(x=())),
            ("zero stride", lambda: (rand(1, 1, 5, 5).expand(2, 3, 5, 5), rand(3, 4, 3, 3))),
            ("empty batch", lambda: (rand(0, 3, 5, 5), rand(3, 4, 3, 3), rand(4))),
            ("no input channels", lambda: (rand(2, 0, 5, 5), rand(0, 4, 3, 3), rand(4))),
            ("no output channels", lambda: (rand(2, 3, 5, 5), rand(3, 0, 3, 3))),
            ("special values", lambda: (with_special_values(1, 1, 5, 5), rand(1, 1, 3, 3))),
        ]
    ),
    (
        "batch_norm",
        "one value per channel",
        lambda: (rand(1, 3, 1, 1), None, None, None, None, True),
    ),
    ("batch_norm", "evaluation without statistics", lambda: (rand(4, 3), None, None)),
    (
        "batch_norm",
        "weight of another size",
        lambda: (rand(4, 3, 2, 2), *buffers(3), rand(2), rand(3), True),
    ),
    (
        "batch_norm",
        "statistics of another size",
        lambda: (rand(4, 3, 2, 2), *buffers(2), rand(3), rand(3), True),
    ),
    (
        "batch_norm",
        "zero stride",
        lambda: (rand(1, 3, 2, 2).expand(4, 3, 2, 2), None, None, None, None, True),
    ),
    ("batch_norm", "no channels", lambda: (rand(4, 0, 2, 2), *buffers(0), rand(0), rand(0), True)),
    (
        "batch_norm",
        "empty batch, evaluation",
        lambda: (rand(0, 3, 2, 2), *buffers(3), rand(3), rand(3)),
    ),
    ("batch_norm", "1-d", lambda: (rand(3), *buffers(3))),
    ("batch_norm", "0-d", lambda: (rand(), *buffers(1))),
    (
        "batch_norm",
        "special values",
        lambda: (with_special_values(4, 3), None, None, None, None, True),
    ),
    ("relu", "zero stride", lambda: (rand(1, 4).expand(3, 4),)),
    ("relu", "empty batch", lambda: (rand(0, 4),)),
    ("relu", "0-d", lambda: (rand(),)),
    ("relu", "special values", lambda: (with_special_values(3, 4),)),
    *(
        (pool, *rest)
        for pool in ("max_pool2d", "avg_pool2d")
        for rest in [
            ("kernel larger than padded input", lambda: (rand(1, 1, 3, 3), 4)),
            ("kernel 0", lambda: (rand(1, 1, 3, 3), 0)),
            ("stride 0", lambda: (rand(1, 1, 3, 3), 2, 0)),
            ("padding over half of the kernel", lambda: (rand(1, 1, 4, 4), 2, 2, 2)),
            ("negative padding", lambda: (rand(1, 1, 4, 4), 2, 2, -1)),
            ("kernel of three sizes", lambda: (rand(1, 1, 4, 4), (2, 2, 2))),
            ("2-d", lambda: (rand(4, 4), 2)),
            ("0-d", lambda: (rand(), 2)),
            ("zero stride of the tensor", lambda: (rand(1, 1, 4, 4).expand(2, 3, 4, 4), 2)),
            ("empty batch", lambda: (rand(0, 3, 4, 4), 2)),
            ("no channels", lambda: (rand(2, 0, 4, 4), 2)),
            ("no pixels", lambda: (rand(2, 3, 0, 4), 2)),
            ("special values", lambda: (with_special_values(1, 1, 4, 4), 2)),
        ]
    ),
    ("avg_pool2d", "divisor 0", lambda: (rand(1, 1, 4, 4), 2, 2, 0, False, True, 0)),
    ("max_pool2d", "dilation 0", lambda: (rand(1, 1, 4, 4), 2, 2, 0, 0)),
    *(
        (name, *rest)
        for name in ("softmax", "log_softmax")
        for rest in [
            ("no such dim", lambda: (rand(3, 4), 2)),
            ("0-d", lambda: (rand(), 0)),
            ("0-d, no such dim", lambda: (rand(), 1)),
            ("empty batch", lambda: (rand(0, 4), 1)),
            ("empty rows", lambda: (rand(3, 0), 1)),
            ("zero stride", lambda: (rand(3, 1).expand(3, 4), 1)),
            ("special values", lambda: (with_special_values(3, 4), 1)),
        ]
    ),
    *(
        (loss, *rest)
        for loss in ("nll_loss", "cross_entropy")
        for rest in [
            ("labels of another batch", lambda: (rand(3, 4), labels(0, 1))),
            ("labels of another shape", lambda: (rand(3, 4, 2, 2), torch.zeros(3, 2, 3).long())),
            ("weight of another size", lambda: (rand(3, 4), labels(0, 1, 2), rand(3).detach())),
            ("int32 labels", lambda: (rand(3, 4), labels(0, 1, 2).int())),
            ("0-d", lambda: (rand(), labels())),
            ("empty batch", lambda: (rand(0, 4), torch.zeros(0).long())),
            ("all ignored", lambda: (rand(3, 4), labels(1, 1, 1), None, None, 1)),
            ("zero stride", lambda: (rand(1, 4).expand(3, 4), labels(0, 1, 2))),
            ("special values", lambda: (with_special_values(3, 4), labels(0, 1, 2))),
        ]
    ),
    ("cross_entropy", "probabilities of another shape", lambda: (rand(3, 4), rand(3, 5).detach())),
    (
        "cross_entropy",
        "smoothing over 1",
        lambda: (rand(3, 4), labels(0, 1, 2), None, None, -100, None, "mean", 1.5),
    ),
    (
        "cross_entropy",
        "unknown reduction",
        lambda: (rand(3, 4), labels(0, 1, 2), None, None, -100, None, "median"),
    ),
    (
        "nll_loss",
        "unknown reduction",
        lambda: (rand(3, 4), labels(0, 1, 2), None, None, -100, None, "median"),
    ),
    ("nll_loss", "float labels", lambda: (rand(3, 4), rand(3).detach())),
    ("nll_loss", "1-d input", lambda: (rand(4), torch.tensor(2))),
]


# Where torch's own outcome is an accident of its implementation -> braze's: an exception type, or
# None for a result.
NOT_AS_TORCH = {
    # torch computes the result, and its backward then indexes an empty tensor
    ("batch_norm", "no channels"): None,
    # torch returns as many output channels as there are input channels: none
    ("conv2d", "no input channels"): None,
    # torch indexes the third dimension from the end before it looks how many there are
    ("avg_pool2d", "2-d"): RuntimeError,
    ("avg_pool2d", "0-d"): RuntimeError,
    # torch's log-softmax complains of a dim that the caller did not give
    ("cross_entropy", "0-d"): ValueError,
}


def ours(name):
    return braze.matmul if name == "matmul" else getattr(F, name)


def stock(name):
    return torch.matmul if name == "matmul" else getattr(stock_F, name)


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def on(device, arguments):
    """The arguments on the device, strides kept; leaves require grad as before."""

    def move(t):
        if not is_tensor(t):
            return t
        # An expanded tensor stays one.
        base = t.detach().as_strided([int(t.untyped_storage().size() / t.element_size())], [1], 0)
        moved = base.clone().to(device).as_strided(t.size(), t.stride(), t.storage_offset())
        return moved.requires_grad_(t.requires_grad)

    return [move(t) for t in arguments]


def outcome(function, arguments):
    """The exception, or results, gradients and arguments afterwards."""
    before = [t.detach().clone() for t in arguments if is_tensor(t)]
    try:
        result = function(*arguments)
    except Exception as error:
        after = [t.detach() for t in arguments if is_tensor(t)]
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        return error
    leaves = [t for t in arguments if is_tensor(t) and t.requires_grad]
    grads = torch.autograd.grad(result.sum(), leaves) if leaves and result.requires_grad else ()
    return [result, *grads, *(t for t in arguments if is_tensor(t))]


def assert_same_outcome(actual, expected):
    if isinstance(expected, Exception):
        assert isinstance(actual, Exception), f"expected {expected!r}, got a result"
        # torch's NotImplementedError ("not implemented for 'Long'") is a RuntimeError.
        assert isinstance(expected, type(actual)), f"expected {expected!r}, got {actual!r}"
        assert type(actual) is not Exception
        return
    if isinstance(actual, Exception):
        raise AssertionError(f"torch accepts it, but: {actual!r}") from actual
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, equal_nan=True)


@pytest.mark.parametrize("case", AS_TORCH, ids=lambda case: f"{case[0]}: {case[1]}")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_as_torch(device, case):
    name, what, make = case
    if (name, what, device) == ("conv_transpose2d", "no output channels", "cuda"):
        pytest.skip("cuDNN refuses torch's backward")
    arguments = make()
    expected = outcome(stock(name), on(device, arguments))
    actual = outcome(ours(name), on(device, arguments))
    if case[:2] in NOT_AS_TORCH:
        wanted = NOT_AS_TORCH[case[:2]]
        assert type(actual) is wanted if wanted else not isinstance(actual, Exception), actual
    else:
        assert_same_outcome(actual, expected)


@pytest.mark.parametrize("name", GOOD)
def test_good_arguments_are_good(device, name):
    arguments = GOOD[name]()
    expected = outcome(stock(name), on(device, arguments))
    assert not isinstance(expected, Exception)
    assert_same_outcome(outcome(ours(name), on(device, arguments)), expected)


@pytest.mark.parametrize("no_tensor", [[1.0, 2.0], None], ids=["list", "None"])
@pytest.mark.parametrize("name", GOOD)
def test_not_a_tensor(device, name, no_tensor):
    """torch's exception, whichever argument it is."""
    good = on(device, GOOD[name]())
    for i in (i for i, t in enumerate(good) if is_tensor(t)):
        arguments = [*good[:i], no_tensor, *good[i + 1 :]]
        try:
            stock(name)(*arguments)
        except Exception as error:
            expected = error
        else:
            assert no_tensor is None
            continue  # an argument that may be left out
        assert isinstance(expected, (TypeError, AttributeError, ValueError, RuntimeError))
        actual = outcome(ours(name), arguments)
        assert type(actual) is type(expected)
        if "invalid combination of arguments" not in str(expected):  # lists those that came
            assert str(actual) == str(expected)


BLOCKS = {
    "conv_bn_relu2d": lambda f: f(rand(2, 3, 5, 5), [1.0], training=True),
    "conv_bn_relu_max_pool2d": lambda f: f([1.0], rand(4, 3, 3, 3), training=True),
    "conv2d_relu": lambda f: f(rand(2, 3, 5, 5), [1.0]),
    "linear_relu": lambda f: f([1.0], rand(5, 4)),
    "linear_add": lambda f: f(rand(3, 4), rand(5, 4), None, [1.0]),
    "linear_relu_linear": lambda f: f(rand(3, 4), "weight", None, rand(2, 5)),
    "bias_activation": lambda f: f(rand(3, 4), [1.0] * 4),
    "relu_max_pool2d": lambda f: f(rand(2, 3, 4, 4), [1.0] * 3, 2),
    "scale_add": lambda f: f(rand(3, 4), 2.0, rand(3, 4)),
    "global_response_norm": lambda f: f([1.0], rand(3), rand(3)),
    "weight_standardization": lambda f: f([1.0, 2.0]),
}


BLOCKS_WITHOUT_WEIGHT = {
    "conv_bn_relu2d": lambda f: f(rand(2, 3, 5, 5), None, training=True),
    "conv_bn_relu_max_pool2d": lambda f: f(rand(2, 3, 5, 5), None, training=True),
    "conv2d_relu": lambda f: f(rand(2, 3, 5, 5), None),
    "linear_relu": lambda f: f(rand(3, 4), None),
    "linear_add": lambda f: f(rand(3, 4), None, None, rand(3, 5)),
    "linear_relu_linear": lambda f: f(rand(3, 4), rand(5, 4), None, None),
}


@pytest.mark.parametrize("name", BLOCKS_WITHOUT_WEIGHT)
def test_fused_without_weight(name):
    with pytest.raises(TypeError, match="NoneType"):
        BLOCKS_WITHOUT_WEIGHT[name](ours(name))


@pytest.mark.parametrize("name", BLOCKS)
def test_fused_not_a_tensor(name):
    with pytest.raises(TypeError, match=r"Tensor|unsupported operand"):
        BLOCKS[name](ours(name))


@pytest.mark.parametrize("other", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("name", GOOD)
def test_other_dtypes_are_torchs(device, name, other):
    """Computed where torch computes them, else torch's exception."""
    arguments = [
        t.detach().mul(9).to(other) if is_tensor(t) and t.is_floating_point() else t
        for t in on(device, GOOD[name]())
    ]
    expected, actual = (outcome(f(name), list(arguments)) for f in (stock, ours))
    assert_same_outcome(actual, expected)
    if isinstance(expected, Exception):
        assert str(actual) == str(expected)


@pytest.mark.parametrize("name", ["relu", "matmul", "linear", "softmax"])
def test_sparse_tensors_are_torchs(name):
    arguments = [t.detach() for t in GOOD[name]() if is_tensor(t)]
    arguments[0] = arguments[0].to_sparse()
    rest = [1] if name == "softmax" else []
    expected, actual = (outcome(f(name), [*arguments, *rest]) for f in (stock, ours))
    assert isinstance(actual, Exception) == isinstance(expected, Exception)
    if not isinstance(expected, Exception):
        torch.testing.assert_close(actual[0], expected[0])


class Kept(torch.Tensor):
    """A subclass that torch's functions return again."""


@pytest.mark.parametrize("name", GOOD)
def test_subclasses_stay(device, name):
    arguments = on(device, GOOD[name]())
    arguments[0] = arguments[0].detach().as_subclass(Kept)
    assert type(stock(name)(*arguments)) is type(ours(name)(*arguments)) is Kept


def test_layers_of_integers(device):
    """What a converted model meets where stock's works."""
    x = torch.arange(72, device=device).view(2, 1, 6, 6)
    for layer in ("MaxPool2d", "AvgPool2d"):
        expected = outcome(getattr(torch.nn, layer)(2), [x])  # of CUDA, an error
        assert_same_outcome(outcome(getattr(braze.nn, layer)(2), [x]), expected)
    assert torch.equal(braze.nn.ReLU()(x - 30), (x - 30).relu())


def test_in_place_where_elements_share_memory(device):
    x = torch.randn(1, 3, device=device)
    for function in (stock_F.relu, F.relu):
        with pytest.raises(
            RuntimeError, match=r"refers to a single memory location\. Please clone"
        ):
            function(x.expand(2, 3), inplace=True)
    same = torch.tensor([[-1.0]], device=device).expand(1, 1)  # one element is not shared
    assert F.relu(same, inplace=True) is same
    assert same.item() == 0


@pytest.mark.parametrize("name", [n for n in GOOD if n not in ("relu", "softmax", "log_softmax")])
def test_tensors_on_two_devices(device, name):
    if device == "cpu" or "pool" in name:
        return
    arguments = on(device, GOOD[name]())
    others = [i for i, t in enumerate(arguments) if i and is_tensor(t)]
    for i in others:
        mixed = list(arguments)
        mixed[i] = mixed[i].detach().cpu()
        error = outcome(ours(name), mixed)
        assert isinstance(error, RuntimeError), f"argument {i}: {error!r}"
        assert "device" in str(error)


@pytest.mark.parametrize("name", ["nll_loss", "cross_entropy"])
@pytest.mark.parametrize("label", [4, -1, 2**40])
def test_label_out_of_range(device, name, label):
    """CPU: IndexError at once. CUDA: that row's loss is NaN and its gradient zero, without a sync;
    the error comes from check_errors, and the context lives on (stock's does not)."""
    x = rand(3, 4).detach().to(device).requires_grad_()
    target = labels(0, label, 1).to(device)
    if device == "cpu":
        with pytest.raises(IndexError, match="out of bounds"):
            ours(name)(x, target)
        return
    loss = ours(name)(x, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    loss.sum().backward()
    assert torch.equal(x.grad[1], torch.zeros_like(x.grad[1]))
    with pytest.raises(IndexError):
        braze.check_errors()
    assert not ours(name)(x, labels(0, 1, 2).to(device)).isnan()
    braze.check_errors()


def test_an_integer_tensor_cannot_require_grad(device):
    with pytest.raises(RuntimeError, match="only Tensors of floating point"):
        F.relu(torch.arange(3, device=device).requires_grad_())


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": 0.1, "momentum": -0.5},
        {"lr": 0.1, "weight_decay": -0.1},
        {"lr": 0.1, "nesterov": True},
        {"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.5},
    ],
    ids=str,
)
def test_sgd_settings(settings):
    parameters = [torch.zeros(3, requires_grad=True)]
    with pytest.raises(ValueError) as expected:  # noqa: PT011 (the message is compared below)
        torch.optim.SGD(parameters, **settings)
    with pytest.raises(ValueError) as actual:  # noqa: PT011
        braze.optim.SGD(parameters, **settings)
    assert str(actual.value) == str(expected.value)


def test_sgd_parameters():
    with pytest.raises(ValueError, match="empty parameter list"):
        braze.optim.SGD([], lr=0.1)
    with pytest.raises(TypeError):
        braze.optim.SGD(torch.zeros(3, requires_grad=True), lr=0.1)


def test_transpose_copy_needs_two_dimensions(device):
    with pytest.raises(RuntimeError, match="2 or more dimensions"):
        torch.ops.braze.transpose_copy(torch.randn(3, device=device))
