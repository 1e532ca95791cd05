"""scale_add: a layer scale with the addition behind it."""

import pytest
import torch
from hypothesis import strategies as st

import braze.nn.functional as F
from braze.testing import DTYPES
from common import assert_by_rule, check_against_stock, compile, fuzzed, layouts

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def theirs(input, scale, residual):
    return residual + scale * input


def inputs(shape, scale, device, dtype, other=None, residual=None):
    """Input, scale and residual that require grad."""
    made = torch.randn(shape), torch.randn(scale), torch.randn(shape)
    dtypes = dtype, other or dtype, residual or other or dtype
    return [t.to(device, d).requires_grad_() for t, d in zip(made, dtypes, strict=True)]


def images(tensors, memory_format):
    return [
        t.detach().to(memory_format=memory_format).requires_grad_() if t.dim() == 4 else t
        for t in tensors
    ]


#: The shapes of the input and of the scale.
SHAPES = [
    ((7, 5), (5,)),
    ((3, 4, 64), (64,)),
    ((1000, 96), (96,)),
    ((40, 1032), (1032,)),
    ((2, 24, 9, 8), (24, 1, 1)),
    ((3, 7, 5, 3), (1, 7, 1, 1)),
    ((2, 300, 1, 1), (300, 1, 1)),
    ((2, 3, 4, 5), (5,)),
    ((4, 3, 2), (3, 1)),
    ((6, 2), (6, 1)),
]


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("shape", "scale"), SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, scale, fmt):
    tensors = images(inputs(shape, scale, device, dtype), fmt)
    y = check_against_stock(F.scale_add, theirs, tensors)
    if (
        shape[-1] > 1 and len(shape) - len(scale) < 2
    ):  # not where strides mean nothing, or the width
        assert y.stride() == theirs(*tensors).stride()


@pytest.mark.parametrize("residual", ["half", "float"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("shape", "scale"), SHAPES[1:5], ids=str)
def test_half_in_a_float32_stream(device, dtype, shape, scale, residual):
    """As under autocast, where the scale is float32."""
    added = dtype if residual == "half" else torch.float32
    tensors = inputs(shape, scale, device, dtype, torch.float32, added)
    tensors = images(tensors, torch.channels_last)
    y = F.scale_add(*tensors)
    assert y.dtype == torch.float32
    grad = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, tensors, grad)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = []
    for some, seed in ((tensors, grad), (exact, grad.double())):
        z = theirs(*some)
        expected.append([z, *torch.autograd.grad(z, some, seed)])
    for name, a, s, r in zip(("y", "input", "scale", "residual"), found, *expected, strict=True):
        assert_by_rule(a, s, r, what=name, ulps=8)


def _check_fuzzed(data, device):
    dims = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    at = data.draw(st.integers(0, len(dims) - 1))
    dtype = data.draw(st.sampled_from(DTYPES))
    torch.manual_seed(0)
    scale = (dims[at], *[1] * (len(dims) - at - 1))
    check_against_stock(F.scale_add, theirs, inputs(dims, scale, device, dtype))


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(_check_fuzzed)


def test_layouts(device, dtype):
    scale = torch.randn(16, 1, 1, device=device).to(dtype)
    for _, x in layouts((3, 16, 6, 9), device, dtype):
        for _, residual in layouts((3, 16, 6, 9), device, dtype):
            check_against_stock(F.scale_add, theirs, [x.detach(), scale, residual.detach()])


def test_unaligned_storage_offset(device, dtype):
    x, residual = (torch.randn(64 * 16 + 1, device=device).to(dtype)[1:] for _ in range(2))
    tensors = [x.view(64, 16), torch.randn(16, device=device).to(dtype), residual.view(64, 16)]
    check_against_stock(F.scale_add, theirs, [t.detach().requires_grad_() for t in tensors])


def test_special_values(device, dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, inf, -inf, nan, 0, 2, 3, -0.0]], device=device).to(dtype)
    scale = torch.tensor([0.0, 0, 2, 1, inf, nan, 1, 1], device=device).to(dtype)
    residual = torch.tensor([[1.0, 1, inf, 1, 1, 1, -inf, -0.0]], device=device).to(dtype)
    tensors = [t.requires_grad_() for t in (x, scale, residual)]
    check_against_stock(F.scale_add, theirs, tensors)


def test_partial_gradients(device):
    for i in range(3):
        tensors = [t.detach() for t in inputs((30, 8), (8,), device, torch.float32)]
        tensors[i].requires_grad_()
        check_against_stock(F.scale_add, theirs, tensors)


def test_repeatable(device):
    tensors = inputs((5000, 96), (96,), device, torch.bfloat16, torch.float32)
    grad = torch.randn(5000, 96, device=device)
    first, *others = (torch.autograd.grad(F.scale_add(*tensors), tensors, grad) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("shape", "scale"), [((5, 3), (3,)), ((2, 3, 2, 2), (3, 1, 1))], ids=str)
def test_derivatives(device, shape, scale):
    tensors = inputs(shape, scale, device, torch.float64)
    assert torch.autograd.gradcheck(F.scale_add, tensors)
    assert torch.autograd.gradgradcheck(F.scale_add, tensors)


def test_opcheck(device, dtype):
    other = torch.float32 if dtype in HALF else dtype
    for shape, scale in (((6, 16), (16,)), ((2, 8, 3, 5), (8, 1, 1))):
        for fmt in (torch.contiguous_format, torch.channels_last):
            tensors = images(inputs(shape, scale, device, dtype, other), fmt)
            torch.library.opcheck(torch.ops.braze.scale_add.default, tensors)
            x, s, residual = (t.detach() for t in tensors)
            for mask in ([True, True], [True, False], [False, True]):
                torch.library.opcheck(
                    torch.ops.braze.scale_add_backward.default, (residual, x, s, mask)
                )


def test_compiles(device):
    tensors = inputs((2, 8, 3, 5), (8, 1, 1), device, torch.float32)
    check_against_stock(compile(F.scale_add), theirs, tensors)


def test_what_goes_to_torch(device):
    x, residual = torch.randn(2, 4, 3, device=device), torch.randn(4, 3, device=device)
    for scale in (torch.randn(4, 3), torch.tensor(2.0), torch.randn(2, 1, 1).double()):
        scale = scale.to(device)
        assert torch.equal(F.scale_add(x, scale, residual), theirs(x, scale, residual))


def test_bad_input(device):
    x = torch.randn(2, 3, device=device)
    with pytest.raises(TypeError, match=r"argument 'scale' \(position 2\) must be Tensor"):
        F.scale_add(x, 2.0, x)
    with pytest.raises(RuntimeError, match="size of tensor a"):
        F.scale_add(x, torch.randn(4, device=device), x)
    op = torch.ops.braze.scale_add
    with pytest.raises(RuntimeError, match="expected scale to have the extent"):
        op(x, torch.randn(4, device=device), x)
    with pytest.raises(RuntimeError, match="shape"):
        op(x, torch.randn(3, device=device), x[:1])
    with pytest.raises(RuntimeError, match="expected scale of input's dtype"):
        op(x, torch.randn(3, device=device).double(), x)


def test_the_tests_reject_a_wrong_kernel(device):
    """One that rounds the product before the addition to 16 bits of float32."""
    tensors = inputs((30, 8), (8,), device, torch.float32)

    def wrong(x, scale, residual):
        return residual + (scale * x).bfloat16()

    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, theirs, tensors)
