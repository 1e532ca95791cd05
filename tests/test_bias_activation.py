"""bias_activation: an activation of a sum with a bias along the last dimension."""

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st
from test_scale_add import HALF

import braze.nn.functional as F
from braze.testing import DTYPES
from common import check_against_stock, compile, fuzzed

#: name -> settings
ACTIVATIONS = {
    "gelu": (),
    "gelu, tanh": ("tanh",),
    "silu": (),
    "hardswish": (),
    "relu": (),
    "leaky_relu": (0.2,),
    "identity": (),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def functions(name):
    """Ours and torch's."""
    function, settings = name.partition(",")[0], ACTIVATIONS[name]

    def ours(x, bias):
        return F.bias_activation(x, bias, function, settings)

    def theirs(x, bias):
        v = x + bias
        if function == "identity":
            return v
        if function == "hardswish" and v.dtype == torch.float64:  # torch's has fp32's 1/6
            return v * stock.relu6(v + 3) / 6
        if function == "gelu" and settings:
            return stock.gelu(v, approximate=settings[0])
        return getattr(stock, function)(v, *settings)

    return ours, theirs


def inputs(shape, device, dtype, bias=None):
    made = torch.randn(shape), torch.randn(shape[-1:])
    dtypes = dtype, bias or dtype
    return [t.to(device, d).requires_grad_() for t, d in zip(made, dtypes, strict=True)]


@pytest.mark.parametrize("shape", [(7,), (9, 5), (3, 4, 64), (700, 96), (20, 1032)], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_matches_stock(device, dtype, name, shape):
    ours, theirs = functions(name)
    y = check_against_stock(ours, theirs, inputs(shape, device, dtype), ulps=8)
    assert y.is_contiguous()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["gelu", "mish"])
def test_float32_bias(device, dtype, name):
    tensors = inputs((300, 48), device, dtype, torch.float32)

    def theirs(x, bias):
        return getattr(stock, name)(x + bias.to(x.dtype))

    check_against_stock(lambda x, b: F.bias_activation(x, b, name), theirs, tensors, ulps=8)


def _check_fuzzed(data, device):
    shape = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    name = data.draw(st.sampled_from(list(ACTIVATIONS)))
    dtype = data.draw(st.sampled_from(DTYPES))
    torch.manual_seed(0)
    check_against_stock(*functions(name), inputs(shape, device, dtype), ulps=8)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(_check_fuzzed)


def test_strides_and_storage_offset(device, dtype):
    ours, theirs = functions("gelu")
    wide = torch.randn(40, 64, device=device).to(dtype)
    bias = torch.randn(33, device=device).to(dtype)
    for x in (wide[:, ::2], wide[:, 1:33], wide.t()[:, :32], wide[:1, :32].expand(5, 32)):
        check_against_stock(ours, theirs, [x.detach().requires_grad_(), bias[:32]], ulps=8)
    aligned_badly = wide.flatten()[1:321].view(20, 16)
    tensors = [aligned_badly.detach().requires_grad_(), bias[1:17].detach().requires_grad_()]
    check_against_stock(ours, theirs, tensors, ulps=8)


@pytest.mark.parametrize("name", ["silu", "relu"])
def test_special_values(device, dtype, name):
    values = [0.0, -0.0, float("inf"), 3.0, -6.0, -30.0, float("nan"), 1e-4]
    x = torch.tensor([values, values[::-1]], device=device).to(dtype).requires_grad_()
    bias = torch.zeros(8, device=device, dtype=dtype)
    ours, theirs = functions(name)
    check_against_stock(ours, theirs, [x, bias], ulps=8)


@pytest.mark.parametrize("wanted", [0, 1])
def test_partial_gradients(device, wanted):
    tensors = [t.detach() for t in inputs((30, 8), device, torch.float32)]
    tensors[wanted].requires_grad_()
    check_against_stock(*functions("gelu"), tensors, ulps=8)


def test_repeatable(device):
    tensors = inputs((5000, 96), device, torch.bfloat16, torch.float32)
    grad = torch.randn(5000, 96, device=device).bfloat16()
    runs = [torch.autograd.grad(F.bias_activation(*tensors), tensors, grad) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", ["gelu", "silu", "leaky_relu"])
def test_derivatives(device, name):
    ours, _ = functions(name)
    tensors = inputs((5, 3), device, torch.float64)
    assert torch.autograd.gradcheck(ours, tensors)
    assert torch.autograd.gradgradcheck(ours, tensors)


def test_opcheck(device, dtype):
    bias = torch.float32 if dtype in HALF else dtype
    tensors = inputs((3, 4, 16), device, dtype, bias)
    act = "gelu", 0.0, 0.0
    torch.library.opcheck(torch.ops.braze.bias_activation.default, (*tensors, *act))
    x, b = (t.detach() for t in tensors)
    for mask in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(
            torch.ops.braze.bias_activation_backward.default, (x, x, b, *act, mask)
        )


def test_compiles(device):
    ours, theirs = functions("gelu")
    check_against_stock(compile(ours), theirs, inputs((6, 16), device, torch.float32), ulps=8)


def test_bad_input(device):
    x = torch.randn(2, 3, device=device)
    bias = torch.randn(3, device=device)
    with pytest.raises(ValueError, match="expected activation to be one of"):
        F.bias_activation(x, bias, "softmax")
    with pytest.raises(TypeError, match=r"argument 'bias' \(position 2\) must be Tensor"):
        F.bias_activation(x, None)
    with pytest.raises(RuntimeError, match="size of tensor a"):
        F.bias_activation(x, torch.randn(4, device=device))
    with pytest.raises(RuntimeError, match="expected bias to have the extent"):
        torch.ops.braze.bias_activation(x, bias[:2], "gelu", 0, 0)
    with pytest.raises(RuntimeError, match="expected bias of input's dtype"):
        torch.ops.braze.bias_activation(x, bias.double(), "gelu", 0, 0)


def test_the_tests_reject_a_wrong_kernel(device):
    """One whose backward leaves the bias out of what it makes again."""
    tensors = inputs((30, 8), device, torch.float32)

    def wrong(x, bias):
        y = stock.gelu(x + bias)
        without = stock.gelu(x + 0 * bias)
        return y.detach() + without - without.detach()

    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, functions("gelu")[1], tensors, ulps=8)
