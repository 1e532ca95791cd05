"""Weight standardization: the op, in converted forwards, and within captured steps."""

import copy

import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_trains_alike, converted_pair, replaced, seen_by_a_mode
from torch import nn

import braze
import braze.nn.functional as F
from braze._ops.weight_standardization import standardized_for_product
from common import assert_by_rule, check_against_stock, compile
from conftest import cuda_only
from convert_models import ops_run
from step_common import assert_same, batches, loss_fn, plain_loop, recorded_ops

# filters of few elements and of more than a block's threads, odd and even; one filter
SHAPES = [(8, 3, 3, 3), (5, 16, 1, 1), (64, 33, 3, 3), (1, 4, 3, 3), (3, 700, 3, 3), (7, 9)]


def torchs(weight, gain=None, scale=1.0, eps=1e-6):
    """As it is written with torch's functions."""
    return stock.batch_norm(
        weight.reshape(1, weight.shape[0], -1),
        None,
        None,
        weight=None if gain is None else (gain * scale).view(-1),
        training=True,
        momentum=0.0,
        eps=eps,
    ).reshape_as(weight)


def tensors(shape, device, dtype):
    weight = torch.randn(shape, device=device).mul_(0.1).to(dtype).requires_grad_()
    gain = torch.rand(shape[0], *[1] * (len(shape) - 1), device=device).add_(0.5).to(dtype)
    return weight, gain.requires_grad_()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape):
    given = tensors(shape, device, dtype)
    check_against_stock(
        lambda w, g: F.weight_standardization(w, g, 0.3, 1e-5),
        lambda w, g: torchs(w, g, 0.3, 1e-5),
        given,
    )
    check_against_stock(F.weight_standardization, torchs, given[:1])


def test_scale_without_a_gain(device):
    weight, _ = tensors((6, 4, 3, 3), device, torch.float32)
    expected = torchs(weight) * 0.7
    torch.testing.assert_close(F.weight_standardization(weight, scale=0.7), expected)


def test_a_mean_much_larger_than_the_deviation(device):
    weight = torch.randn(16, 64, 3, 3, device=device).add_(1000.0)
    exact = torchs(weight.double())
    assert_by_rule(F.weight_standardization(weight), torchs(weight), exact)


def test_special_values(device, dtype):
    """Stay within their filter."""
    weight, gain = tensors((4, 3, 3, 3), device, dtype)
    with torch.no_grad():
        weight[0, 0, 0, 0], weight[1, 2, 2, 2] = torch.inf, torch.nan
        weight[2] = 0.25
    result = F.weight_standardization(weight, gain)
    assert result[:2].isnan().all()
    assert (result[2] == 0).all()
    assert result[3].isfinite().all()
    result.sum().backward()
    assert weight.grad[:2].isnan().all()
    assert weight.grad[2:].isfinite().all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_results_of_16_bits(device, half):
    """Are the float32 ones, rounded; gradients come in 16 bits."""
    weight, gain = tensors((32, 20, 3, 3), device, torch.float32)
    run = torch.ops.braze.weight_standardization
    narrow, wide = (run(weight, gain, 0.3, 1e-6, t)[0] for t in (half, None))
    assert torch.equal(narrow, wide.to(half))
    grad = torch.randn_like(narrow)
    ours = torch.autograd.grad(narrow, (weight, gain), grad)
    expected = torch.autograd.grad(wide, (weight, gain), grad.float())
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_layouts(device):
    weight, gain = tensors((8, 6, 3, 5), device, torch.float32)
    expected, grad = torchs(weight, gain), torch.randn(weight.shape, device=device)
    expected_grads = torch.autograd.grad(expected, (weight, gain), grad)
    views = {
        "channels_last": weight.detach().to(memory_format=torch.channels_last),
        "transposed": weight.detach().transpose(0, 1).contiguous().transpose(0, 1),
        "strided": torch.randn(16, 6, 3, 5, device=device)[::2].copy_(weight.detach()),
    }
    for name, view in views.items():
        leaf = view.requires_grad_()
        result = F.weight_standardization(leaf, gain)
        torch.testing.assert_close(result, expected, msg=name)
        dense = name == "channels_last"
        strides = leaf.stride() if dense else torch.empty(leaf.shape).stride()
        assert result.stride() == strides, name
        grads = torch.autograd.grad(result, (leaf, gain), grad)
        torch.testing.assert_close(grads, expected_grads, msg=name, rtol=1e-4, atol=1e-4)


def test_empty(device):
    weight = torch.randn(0, 3, 3, 3, device=device, requires_grad=True)
    assert F.weight_standardization(weight).shape == (0, 3, 3, 3)
    F.weight_standardization(weight).sum().backward()
    assert F.weight_standardization(torch.randn(4, 0, device=device)).shape == (4, 0)


def test_derivatives(device):
    given = tensors((3, 2, 3, 3), device, torch.float64)

    def op(w, g):
        return F.weight_standardization(w, g, 0.7, 1e-3)

    assert torch.autograd.gradcheck(op, given)
    assert torch.autograd.gradgradcheck(op, given)
    assert torch.autograd.gradgradcheck(F.weight_standardization, given[:1])


def test_opcheck(device):
    weight, gain = tensors((4, 3, 3, 3), device, torch.float32)
    forward = torch.ops.braze.weight_standardization.default
    last = weight.detach().to(memory_format=torch.channels_last).requires_grad_()
    for given in ((weight, gain), (last, gain), (weight, None)):
        torch.library.opcheck(forward, (*given, 0.5, 1e-6))
    torch.library.opcheck(forward, (weight, gain, 0.5, 1e-6, torch.bfloat16))
    given = [t.detach() for t in (weight, gain)]
    _, mean, rstd = forward(*given, 0.5, 1e-6)
    torch.library.opcheck(
        torch.ops.braze.weight_standardization_backward.default,
        (torch.randn_like(given[0]), *given, mean, rstd, 0.5, [True, True]),
    )


def test_compile(device):
    weight, gain = tensors((4, 3, 3, 3), device, torch.float32)
    compiled = compile(lambda w, g: F.weight_standardization(w * 2, g, 0.5))
    torch.testing.assert_close(compiled(weight, gain), torchs(weight * 2, gain, 0.5))


def test_bad_input(device):
    weight, gain = (t.detach() for t in tensors((4, 3, 3, 3), device, torch.float32))
    with pytest.raises(TypeError, match="argument 'weight'"):
        F.weight_standardization(3)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        F.weight_standardization(weight.flatten())
    with pytest.raises(RuntimeError, match="gain should contain 4 elements not 3"):
        F.weight_standardization(weight, gain[:3])
    with pytest.raises(RuntimeError, match="same dtype as weight"):
        F.weight_standardization(weight, gain.double())
    with pytest.raises(RuntimeError, match="of 16 bits for a float32 weight"):
        torch.ops.braze.weight_standardization(weight.double(), None, 1.0, 1e-6, torch.float32)
    backward = torch.ops.braze.weight_standardization_backward
    statistics = torch.ones(2, 4, device=device)
    with pytest.raises(RuntimeError, match="same shape as weight"):
        backward(weight[1:], weight, gain, *statistics, 1.0, [True, True])
    with pytest.raises(RuntimeError, match="expected mean of 4 elements"):
        backward(weight, weight, gain, *statistics[:, 1:], 1.0, [True, True])
    with pytest.raises(RuntimeError, match="gradient of a gain that is None"):
        backward(weight, weight, None, *statistics, 1.0, [True, True])


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A gradient that leaves out what the variance contributes."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            result, _, ctx.rstd = torch.ops.braze.weight_standardization(weight, None, 1.0, 1e-6)
            return result

        @staticmethod
        def backward(ctx, grad):
            grad = grad - grad.mean((1, 2, 3), keepdim=True)
            return (grad * ctx.rstd.view(-1, 1, 1, 1)).to(grad.dtype)

    weight, _ = tensors((8, 3, 3, 3), device, dtype)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(Wrong.apply, torchs, [weight])


# In converted forwards.


class Scaled(nn.Conv2d):
    """As timm's ScaledStdConv2d."""

    def __init__(self, *args, gamma=1.7, eps=1e-6, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        self.scale = gamma * self.weight[0].numel() ** -0.5
        self.eps = eps

    def forward(self, x):
        weight = stock.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=self.eps,
        ).reshape_as(self.weight)
        return stock.conv2d(
            x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Plain(nn.Conv2d):
    """In one expression, by views; as timm's StdConv2dSame, with something before it."""

    def forward(self, x):
        if self.kernel_size == (1, 1):
            x = stock.pad(x, (1, 1, 1, 1))
        return stock.conv2d(
            x,
            torch.nn.functional.batch_norm(
                self.weight.view(1, self.out_channels, -1), None, None, None, None, True, 0.0, 1e-5
            ).view_as(self.weight),
            self.bias,
            self.stride,
            self.padding,
            groups=self.groups,
        )


class InFloat32(Scaled):
    """A convolution that autocast leaves alone."""

    def forward(self, x):
        weight = stock.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            eps=self.eps,
        ).reshape_as(self.weight)
        with torch.autocast(x.device.type, enabled=False):
            return stock.conv2d(x.float(), weight, self.bias, padding=self.padding)


class Authors(nn.Conv2d):
    """As BiT's authors have it."""

    def forward(self, x):
        w = self.weight
        v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-5)
        return stock.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Biased(Authors):
    """Not this: another variance."""

    def forward(self, x):
        w = self.weight
        v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=True)
        w = (w - m) / torch.sqrt(v + 1e-5)
        return stock.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class OfRows(Authors):
    """Not this: of some dimensions only."""

    def forward(self, x):
        w = self.weight
        v, m = torch.var_mean(w, dim=[2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-5)
        return stock.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Turned(Authors):
    """Not this: mean and variance the other way around."""

    def forward(self, x):
        w = self.weight
        m, v = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-5)
        return stock.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Seen(Scaled):
    """The result is read by something else, too."""

    def forward(self, x):
        weight = stock.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            running_mean=None,
            running_var=None,
            weight=(self.scale * self.gain).reshape(-1),
            training=True,
            eps=self.eps,
        ).reshape_as(self.weight)
        self.seen = weight.dtype
        return stock.conv2d(x, weight, self.bias, padding=self.padding)


class Evaluates(Scaled):
    """By statistics that it is given."""

    def forward(self, x):
        weight = stock.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            torch.zeros(self.out_channels).to(x),
            torch.ones(self.out_channels).to(x),
            (self.gain * self.scale).view(-1),
        ).reshape_as(self.weight)
        return stock.conv2d(x, weight, self.bias, padding=self.padding)


class Other(nn.Conv2d):
    """Of half a filter each."""

    def forward(self, x):
        weight = stock.batch_norm(
            self.weight.reshape(1, 2 * self.out_channels, -1), None, None, training=True
        ).reshape_as(self.weight)
        return stock.conv2d(x, weight, self.bias, padding=self.padding)


def network(kind):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = kind(6, 8, 3, padding=1)
            self.last = kind(8, 4, 1, bias=False)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)))

    Network.__qualname__ = Network.__name__
    return Network


def pair(kind, device):
    return converted_pair(network(kind), device, channels=6)


def counts(model, x):
    ran = ops_run(lambda: model(x).sum().backward())
    return [ran.count("weight_standardization" + end) for end in ("", "_backward")]


@pytest.mark.parametrize("kind", [Scaled, Plain, Seen, Authors])
def test_taken(device, kind):
    model, original, x = pair(kind, device)
    if kind is Plain:  # a view of a channels_last weight is refused
        model, original = (m.to(memory_format=torch.contiguous_format) for m in (model, original))
    report = braze.convert_report(model)
    after = [e.after for e in report.swapped]
    assert after.count("braze.nn.functional.weight_standardization") == 2
    assert not report.left_alone
    assert_trains_alike(model, original, x)
    assert counts(model, x) == [2, 2]


@pytest.mark.parametrize("kind", [Evaluates, Other, Biased, OfRows])
def test_not_taken(device, kind):
    model, original, x = pair(kind, device)
    assert_trains_alike(model, original, x)
    assert counts(model, x) == [0, 0]


def test_a_convolution_under_another_autocast(device):
    model, original, x = pair(InFloat32, device)
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = model(x), original(x)
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs)
    assert counts(model, x) == [2, 2]


def test_a_variance_below_zero_is_torchs(device):
    """(NaN, as torch has it.)"""
    model, original, x = pair(Turned, device)
    assert counts(model, x) == [0, 0]
    assert torch.equal(model(x).isnan(), original(x).isnan())


def test_the_authors_asked_at_each_call(device):
    model, original, x = pair(Authors, device)
    with replaced(torch, "var_mean", lambda *args, **kwargs: known_moments(*args, **kwargs)):
        assert counts(model, x) == [0, 0]
    assert "var_mean" in seen_by_a_mode(lambda: model(x))
    assert counts(model, x) == [2, 2]
    model.first.forward = lambda x: x.repeat(1, 2, 1, 1)[:, :8]
    assert counts(model, x) == [1, 1]
    torch._dynamo.reset()
    model, original, x = pair(Authors, device)
    y = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(y, original(x), rtol=1e-4, atol=1e-5)


known_moments = torch.var_mean


def test_the_same_error_where_a_view_is_refused(device):
    model, original, x = pair(Plain, device)
    for m in (model, original):
        m.first.weight = nn.Parameter(torch.randn(3, 3, 6, 8, device=device).permute(3, 2, 0, 1))
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            m(x)


@pytest.mark.parametrize("kind", [Scaled, Seen, Authors])
def test_under_autocast(device, kind):
    """A result that only the convolution reads is stored in its dtype."""
    model, original, x = pair(kind, device)

    def trained(m, x):
        with torch.autocast(device, torch.bfloat16, enabled=x.dtype == torch.float32):
            y = m(x)
        return y, *torch.autograd.grad(y.square().sum(), list(m.parameters()))

    exact = trained(copy.deepcopy(original).double(), x.double())
    half = {"ulps": 64, "arithmetic": torch.bfloat16}
    for ours, theirs, e in zip(trained(model, x), trained(original, x), exact, strict=True):
        assert_by_rule(ours.bfloat16(), theirs.bfloat16(), e, **half)
        assert ours.dtype == theirs.dtype
    with torch.autocast(device, torch.bfloat16):
        weight = standardized_for_product(model.first.weight, None, 0.5, 1e-6)
    assert weight.dtype == torch.bfloat16


def test_asked_at_each_call(device, monkeypatch):
    model, original, x = pair(Scaled, device)
    assert counts(model, x) == [2, 2]
    with replaced(stock, "batch_norm", lambda *args, **kwargs: torchs_batch_norm(*args, **kwargs)):
        assert counts(model, x) == [0, 0]
    assert "batch_norm" in seen_by_a_mode(lambda: model(x))
    for m in (model, original):
        m.first.scale = torch.tensor(0.5, device=device)
    assert counts(model, x) == [1, 1]
    torch.testing.assert_close(model(x), original(x))
    model.first.gain.data = model.first.gain.data.double()
    with pytest.raises(RuntimeError):
        model(x)


torchs_batch_norm = stock.batch_norm


def test_compiled(device):
    model, original, x = pair(Scaled, device)
    torch._dynamo.reset()
    y = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(y, original(x), rtol=1e-4, atol=1e-5)
    assert type(braze.unconvert(model).first) is Scaled


# Within captured steps.


class Captured(nn.Module):
    """Channels_last, so that the convolution's gradient has its weight's strides."""

    def __init__(self, kind=Scaled):
        super().__init__()
        self.first, self.second = kind(8, 16, 3, padding=1), kind(16, 8, 1)
        self.last = nn.Linear(8, 5)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        x = x.expand(-1, 8, -1, -1).contiguous(memory_format=torch.channels_last)
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


class Twice(Captured):
    """The weights' gradients are summed before they are read."""

    def forward(self, x):
        return super().forward(x) + super().forward(x * 2)


@cuda_only
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", [Scaled, Authors, Seen])
@pytest.mark.parametrize("net", [Captured, Twice])
def test_gradients_on_a_side_stream(autocast, kind, net):
    """Bit for bit the plain loop's. Where a convolution alone reads the standardized weight, its
    gradient goes from branch to branch; elsewhere the step is captured again without."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = net(kind).to("cuda", memory_format=torch.channels_last)
        braze.convert(model)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
        data = batches("cuda")
        if captured:
            step = braze.TrainStep(model, loss_fn, optimizer, autocast=autocast)
            with recorded_ops() as ops:
                losses = [step(x, y) for x, y in data]
        else:
            losses = plain_loop(model, optimizer, data, autocast=autocast)
        results.append((model, losses))
    assert_same(*results[0], *results[1])
    assert [name for name, _ in ops].count("open_side_stream") == 1
    early = kind is Seen or net is Twice
    assert model.forwards == (1 + (net is Twice)) * (3 + early)
