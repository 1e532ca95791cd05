"""Group norm with an activation behind it: the op."""

import pytest
import torch
import torch.nn.functional as stock

import braze.nn.functional as F
from braze._ops.activation import NAMES, activation, in_torch
from common import check_against_stock, compile, cuda_kernels_of

pytestmark = pytest.mark.usefixtures("own_norms")

# (shape, groups): whole vectors of channels and not, one group, groups of one channel
CASES = [((2, 16, 6, 5), 4), ((3, 6, 4, 4), 2), ((2, 320, 3, 4), 32), ((4, 8, 7), 1), ((2, 5), 1)]
#: Whose slope jumps: at 3 and -3, where values of 16 bits are.
JUMPS = "hardsigmoid", "hardswish"
activations = pytest.mark.parametrize("name", [n for n in NAMES if n != "identity"])


def tensors(shape, device, dtype, memory_format=torch.contiguous_format):
    x = torch.randn(shape, device=device).mul_(2).to(dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=memory_format)
    weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    return [t.requires_grad_() for t in (x, weight, bias)]


def torchs(groups, name, *settings):
    act = activation(name, *settings)
    if name in JUMPS:  # of which torch rounds a sixth to float32
        factor = torch.ones_like if name == "hardsigmoid" else torch.Tensor.clone

        def composed(x, w=None, b=None):
            v = stock.group_norm(x, groups, w, b)
            return factor(v) * stock.relu6(v + 3) / 6

        return composed
    return lambda x, w=None, b=None: in_torch(act, stock.group_norm(x, groups, w, b))


def ours(groups, name, *settings):
    return lambda x, w=None, b=None: F.group_norm_act(
        x, groups, w, b, activation=name, settings=settings
    )


@activations
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_matches_stock(device, dtype, name, memory_format):
    for shape, groups in CASES[:2]:
        given = tensors(shape, device, dtype, memory_format)
        if name in JUMPS and dtype.itemsize == 2:
            given = [t.detach() for t in given]
        check_against_stock(ours(groups, name), torchs(groups, name), given)


@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
@pytest.mark.parametrize("name", ["relu", "silu"])
def test_shapes(device, dtype, name, shape, groups):
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = tensors(shape, device, dtype, memory_format)
        check_against_stock(ours(groups, name), torchs(groups, name), given)
        check_against_stock(ours(groups, name), torchs(groups, name), given[:1])
        y = ours(groups, name)(*given)
        assert y.stride() == given[0].stride()
        assert y.grad_fn.name() == "GroupNormActBackward"


def test_settings(device):
    given = tensors((2, 16, 6, 5), device, torch.float32, torch.channels_last)
    for name, settings in (
        ("hardtanh", (-0.5, 0.25)),
        ("leaky_relu", (0.3,)),
        ("gelu", ("tanh",)),
        ("elu", (0.7,)),
        ("celu", (0.7,)),
    ):
        check_against_stock(ours(4, name, *settings), torchs(4, name, *settings), given)


def test_without_an_activation(device, dtype):
    given = tensors((2, 16, 6, 5), device, dtype, torch.channels_last)
    y = ours(4, "identity")(*given)
    assert torch.equal(y, F.group_norm(given[0], 4, *given[1:]))


@pytest.mark.parametrize("name", ["relu", "silu"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_float32_parameters_beside_16_bit_input(device, half, name):
    """Rounded once, where the kernels take the activation and where it only bounds."""
    if name == "silu" and device == "cpu":
        pytest.skip("no kernel of a CPU takes the activation: it is rounded before")
    x = tensors((3, 8, 10, 10), device, half, torch.channels_last)[0]
    parameters = tensors((3, 8, 10, 10), device, torch.float32)[1:]

    def in_float32(x, weight, bias):
        result = torchs(4, name)(x.to(weight.dtype), weight, bias)
        return result if x.dtype == torch.float64 else result.to(half)

    check_against_stock(ours(4, name), in_float32, [x, *parameters])


def test_special_values(device):
    x, weight, bias = tensors((3, 8, 4, 4), device, torch.float32, torch.channels_last)
    with torch.no_grad():
        x[0, 0, 0, 0], x[1, 5, 1, 1] = torch.inf, torch.nan
    y, expected = ours(2, "relu")(x, weight, bias), torchs(2, "relu")(x, weight, bias)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert y[2].isfinite().all()


def test_empty(device):
    given = tensors((0, 8, 4, 4), device, torch.float32)
    y = torch.ops.braze.group_norm_act(*given, 2, 1e-5, "relu", 0.0, 0.0)[0]
    assert y.shape == (0, 8, 4, 4)
    assert [g.shape for g in torch.autograd.grad(y.sum(), given)] == [t.shape for t in given]


@pytest.mark.parametrize("name", ["silu", "gelu", "tanh"])
def test_derivatives(device, name):
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = tensors((2, 4, 2, 3), device, torch.float64, memory_format)
        assert torch.autograd.gradcheck(ours(2, name), given)
        assert torch.autograd.gradgradcheck(ours(2, name), given)


def test_opcheck(device):
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = tensors((2, 8, 3, 4), device, torch.float32, memory_format)
        act = "silu", 0.0, 0.0
        torch.library.opcheck(torch.ops.braze.group_norm_act.default, (*given, 2, 1e-5, *act))
        x, weight, bias = (t.detach() for t in given)
        _, mean, rstd = torch.ops.braze.group_norm_act(x, weight, bias, 2, 1e-5, *act)
        torch.library.opcheck(
            torch.ops.braze.group_norm_act_backward.default,
            (torch.randn_like(x), x, weight, bias, mean, rstd, 2, 1e-5, *act, [True] * 3),
        )


def test_compile(device):
    given = tensors((2, 8, 3, 4), device, torch.float32)
    compiled = compile(lambda x, w, b: ours(2, "silu")(x * 2, w, b) + 1)
    expected = torchs(2, "silu")(given[0] * 2, *given[1:]) + 1
    torch.testing.assert_close(compiled(*given), expected, rtol=1e-4, atol=1e-5)


def test_bad_input(device):
    x, weight, bias = (t.detach() for t in tensors((2, 8, 3, 4), device, torch.float32))
    with pytest.raises(ValueError, match="expected activation to be one of"):
        ours(2, "softmax")(x, weight, bias)
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        ours(3, "relu")(x, weight, bias)
    op = torch.ops.braze.group_norm_act
    with pytest.raises(RuntimeError, match="expected activation to be one of"):
        op(x, weight, bias, 2, 1e-5, "softmax", 0.0, 0.0)
    with pytest.raises(RuntimeError, match="bias should contain 8 elements not 7"):
        op(x, weight, bias[1:], 2, 1e-5, "relu", 0.0, 0.0)


def test_the_passes_have_the_activation(hopper):
    given = tensors((2, 64, 16, 16), "cuda", torch.bfloat16, torch.channels_last)
    names = cuda_kernels_of(lambda: ours(8, "silu")(*given).sum().backward())
    assert "normalise_images_kernel" in names
    assert "activation_kernel" not in names


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A gradient that does not pass the activation."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y, mean, rstd = torch.ops.braze.group_norm(x, None, None, 2, 1e-5)
            ctx.save_for_backward(x, mean, rstd)
            return y.relu()

        @staticmethod
        def backward(ctx, grad):
            x, mean, rstd = ctx.saved_tensors
            backward = torch.ops.braze.group_norm_backward
            return backward(grad.contiguous(), x, None, mean, rstd, 2, [True, False, False])[0]

    x = tensors((2, 8, 3, 4), device, dtype)[:1]
    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(Wrong.apply, torchs(2, "relu"), x)
