import copy
import pickle

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import assert_same_layer, check_against_stock, compile, fuzzed
from convert_models import ops_run

SHAPES = [
    ((5,), 3),
    ((1, 1), 1),
    ((7, 13), 10),
    ((64, 128), 10),
    ((16, 24), 32),
    ((33, 257), 129),
    ((64, 3136), 128),
    ((2, 3, 5, 7), 11),
    ((0, 7), 3),
    ((4, 0), 3),
    ((4, 7), 0),
]


def linear_relu(input, weight, bias=None):
    return stock.linear(input, weight, bias).relu()


def operands(shape, n, bias, device, dtype):
    """Small integers: results are exact, so that rounding cannot decide whether the gradient
    passes. Every other output is negative."""
    g = torch.Generator().manual_seed(sum(shape) + n + torch.initial_seed())
    signs = torch.ones(n)
    signs[1::2] = -1
    tensors = [
        torch.randint(1, 4, shape, generator=g),
        torch.randint(1, 4, (n, shape[-1]), generator=g) * signs.unsqueeze(1),
    ]
    if bias:
        tensors.append(torch.randint(1, 4, (n,), generator=g) * signs)
    return [t.to(device, dtype).requires_grad_() for t in tensors]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("shape", "n"), SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, n, bias):
    check_against_stock(F.linear_relu, linear_relu, operands(shape, n, bias, device, dtype))


@pytest.mark.parametrize("backend", ["auto", "braze"])
@pytest.mark.parametrize("rows", [1, 64, 1000, 5000])
def test_bias_gradient_of_many_rows(device, dtype, rows, backend):
    x, w, b = operands((rows, 6), 40, True, device, dtype)
    with braze.backend(matmul=backend):
        check_against_stock(F.linear_relu, linear_relu, [x.detach(), w.detach(), b])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"),
    [(64, 3136, 128), (128, 520, 128), (5, 712, 8), (33, 1032, 72), (100, 4096, 16), (65, 600, 24)],
)
def test_on_a_part_of_a_gpu(device, dtype, rows, columns, outputs, count, bias):
    """Where layers share a GPU, a block makes some columns of all of a layer's gradients."""
    inputs = operands((rows, columns), outputs, bias, device, dtype)
    with braze.multiprocessors(count):
        check_against_stock(F.linear_relu, linear_relu, inputs)
        check_against_stock(F.linear, stock.linear, inputs)


def test_strides(device, dtype):
    def strided(shape):
        rows, cols = shape
        r = lambda *s: torch.rand(s, device=device).to(dtype) + 0.5  # noqa: E731
        yield r(cols, rows).mT
        yield r(2 * rows, cols + 3)[::2, 1:-2]
        yield r(1, cols).expand(shape)
        yield r(1 + rows * cols)[1:].view(shape)

    for x, w in zip(strided((9, 7)), strided((6, 7)), strict=True):
        bias = torch.rand(12, device=device).to(dtype)[::2]
        inputs = [t.detach().requires_grad_() for t in (x, w, bias)]
        out = F.linear_relu(*inputs)
        assert out.is_contiguous()
        for g in (torch.ones_like(out)[:, :1].expand_as(out), torch.rand_like(out.mT).mT):
            check_against_stock(F.linear_relu, linear_relu, inputs, grad_output=g)


def test_zero_and_nan_results(device, dtype):
    """No gradient passes where the result is 0; torch lets it pass where it is NaN."""
    x = torch.tensor([[0.0], [1.0], [-1.0], [float("nan")]], device=device).to(dtype)
    x = x.requires_grad_()
    w = torch.ones(2, 1, device=device, dtype=dtype, requires_grad=True)
    b = torch.zeros(2, device=device, dtype=dtype, requires_grad=True)
    out = F.linear_relu(x, w, b)
    assert torch.equal(out[:3], torch.tensor([[0, 0], [1, 1], [0, 0]], device=device).to(dtype))
    assert out[3].isnan().all()
    dx, db = torch.autograd.grad(out, (x, b), torch.ones_like(out))
    assert dx.flatten().tolist() == [0, 2, 0, 2]
    assert db.tolist() == [2, 2]


def fuzz(data, device):
    extent = st.integers(0, 70)
    m, k, n = data.draw(extent), data.draw(extent), data.draw(extent)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    with braze.backend(matmul=data.draw(st.sampled_from(["auto", "braze"]))):
        inputs = operands((m, k), n, data.draw(st.booleans()), device, dtype)
        check_against_stock(F.linear_relu, linear_relu, inputs)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


def test_gradcheck(device):
    inputs = operands((2, 3, 4), 5, True, device, torch.float64)
    assert torch.autograd.gradcheck(F.linear_relu, inputs)
    for mask in range(1, 8):
        some = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(inputs)]
        assert torch.autograd.gradgradcheck(F.linear_relu, some)
        assert torch.autograd.gradgradcheck(F.linear_relu, some[:2]) if mask & 3 else True


def test_opcheck(device, dtype):
    x, w, _ = operands((2, 6, 7), 5, True, device, dtype)
    g, y = (torch.rand(2, 6, 5, device=device).to(dtype).requires_grad_() for _ in range(2))
    for mask in ([True, True, True], [False, True, False], [False, False, True]):
        torch.library.opcheck(
            torch.ops.braze.linear_relu_backward.default, (g, y.detach(), x, w, mask)
        )


def test_compile(device):
    inputs = operands((4, 7), 5, True, device, torch.float32)
    compiled = compile(lambda *t: (F.linear_relu(*t) * 2).sum())
    check_against_stock(compiled, lambda *t: (linear_relu(*t) * 2).sum(), inputs)


def test_autocast(device):
    inputs = operands((4, 7), 5, True, device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = F.linear_relu(*inputs)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, F.linear(*inputs).relu())
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs)


def test_repeatable(device, dtype):
    inputs = operands((3000, 70), 33, True, device, dtype)

    def grads():
        return torch.autograd.grad(F.linear_relu(*inputs).sum(), inputs)

    first = grads()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, grads(), strict=True))


def test_one_op_each_way(device):
    inputs = operands((4, 7), 5, True, device, torch.float32)
    out = F.linear_relu(*inputs)
    assert ops_run(lambda: F.linear_relu(*inputs)) == ["linear"]
    g = torch.ones_like(out)
    assert ops_run(lambda: torch.autograd.grad(out, inputs, g)) == ["linear_relu_backward"]


def test_module(device):
    layer = braze.nn.LinearReLU(7, 5, device=device)
    plain = torch.nn.Linear(7, 5, device=device)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, device=device)
    for clone in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_layer(clone, torch.nn.Sequential(plain, torch.nn.ReLU()), x)
    assert braze.nn.LinearReLU(7, 5, False, device, torch.float64).bias is None
    for linear in (plain, braze.nn.Linear(7, 5, bias=False, device=device)):
        made = braze.nn.LinearReLU.from_modules(linear, torch.nn.ReLU())
        assert isinstance(made, torch.nn.Linear)
        assert made.weight is linear.weight
        assert made.bias is linear.bias
        assert repr(made) == repr(linear).replace("Linear", "LinearReLU")
        assert_same_layer(made, torch.nn.Sequential(linear, torch.nn.ReLU()), x)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.ReLU, not Sigmoid"):
        braze.nn.LinearReLU.from_modules(plain, torch.nn.Sigmoid())


def test_vector_weight_and_bias_of_one_element(device):
    x, w, b = (torch.randn(s, device=device, dtype=torch.float64) for s in [(4, 5), (3, 5), (1,)])
    inputs = [t.requires_grad_() for t in (x, w, b)]
    check_against_stock(F.linear_relu, linear_relu, inputs)
    vector = w.detach()[0].requires_grad_()
    check_against_stock(F.linear_relu, linear_relu, [x, vector])


def test_bad_input(device):
    r = lambda *s: torch.randn(s, device=device)  # noqa: E731
    with pytest.raises(TypeError, match=r"linear\(\): argument 'weight' .* must be Tensor"):
        F.linear_relu(r(2, 3), 3)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 5x4\)"):
        F.linear_relu(r(2, 3), r(4, 5))
    backward = torch.ops.braze.linear_relu_backward
    with pytest.raises(RuntimeError, match="expected result of the forward's output shape"):
        backward(r(2, 4), r(2, 5), r(2, 3), r(4, 3), [True, True, True])
    with pytest.raises(RuntimeError, match="result to have the same dtype as input"):
        backward(r(2, 4), r(2, 4).double(), r(2, 3), r(4, 3), [True, True, True])


def test_the_tests_reject_a_wrong_backward(device, dtype):
    """One that lets the gradient pass where the result is zero."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(x, w)
            return torch.ops.braze.linear(x, w, b, True)

        @staticmethod
        def backward(ctx, grad):
            return torch.ops.braze.linear_backward(grad, *ctx.saved_tensors, [True] * 3)

    with pytest.raises(AssertionError):
        check_against_stock(Wrong.apply, linear_relu, operands((9, 7), 6, True, device, dtype))
