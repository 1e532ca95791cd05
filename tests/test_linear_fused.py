"""linear_add and linear_relu_linear: linear layers fused by the full epilogue."""

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import check_against_stock, compile, fuzzed
from convert_models import ops_run

SHAPES = [
    ((5,), 3),
    ((1, 1), 1),
    ((7, 13), 10),
    ((33, 257), 129),
    ((200, 136), 264),
    ((2, 3, 5, 7), 11),
    ((0, 7), 3),
    ((4, 0), 3),
    ((4, 7), 0),
]
# input, hidden, outputs. Few rows of few outputs take another way back than the rest.
PERCEPTRONS = [
    ((5,), 3, 2),
    ((1, 1), 1, 1),
    ((7, 13), 10, 4),
    ((64, 40), 130, 10),
    ((64, 40), 600, 10),
    ((129, 40), 33, 65),
    ((300, 72), 136, 64),
    ((2, 3, 50, 7), 11, 5),
    ((0, 7), 3, 2),
    ((4, 0), 3, 2),
    ((4, 7), 0, 2),
    ((4, 7), 3, 0),
]
BIASES = [(True, True), (True, False), (False, True), (False, False)]


def linear_add(input, weight, bias, residual):
    return stock.linear(input, weight, bias) + residual


def perceptron(input, weight1, bias1, weight2, bias2=None):
    return stock.linear(stock.linear(input, weight1, bias1).relu(), weight2, bias2)


def with_biases(function, *biases):
    """The function of the tensors that are there: check_against_stock() wants tensors only."""

    def call(*tensors):
        rest = iter(tensors)
        return function(*(None if missing else next(rest) for missing in biases))

    return call


def randn(*shape, device, dtype=torch.float64):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("backend", ["auto", "braze"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("shape", "n"), SHAPES, ids=str)
def test_linear_add_matches_stock(device, dtype, shape, n, bias, backend):
    kw = {"device": device, "dtype": dtype}
    inputs = [randn(*shape, **kw), randn(n, shape[-1], **kw)]
    inputs += [randn(n, **kw)] if bias else []
    inputs.append(randn(*shape[:-1], n, **kw))
    missing = (False, False, not bias, False)
    with braze.backend(matmul=backend):
        check_against_stock(
            with_biases(F.linear_add, *missing),
            with_biases(linear_add, *missing),
            inputs,
        )


def integer_perceptron(shape, hidden, outputs, device, dtype, biases=(True, True)):
    """Small integers: the hidden layer is exact, so that rounding cannot decide where its gradient
    passes. Every other hidden unit is negative, or zero where nothing is added up."""
    g = torch.Generator().manual_seed(sum(shape) + hidden + outputs + torch.initial_seed())
    signs = torch.ones(hidden)
    signs[1::2] = -1
    tensors = [
        torch.randint(0, 3, shape, generator=g),
        torch.randint(0, 3, (hidden, shape[-1]), generator=g) * signs.unsqueeze(1),
        torch.randint(0, 3, (hidden,), generator=g) * signs if biases[0] else None,
        torch.randint(-2, 3, (outputs, hidden), generator=g),
        torch.randint(-2, 3, (outputs,), generator=g) if biases[1] else None,
    ]
    return [None if t is None else t.to(device, dtype).requires_grad_() for t in tensors]


def check_perceptron(tensors):
    missing = [t is None for t in tensors]
    check_against_stock(
        with_biases(F.linear_relu_linear, *missing),
        with_biases(perceptron, *missing),
        [t for t in tensors if t is not None],
    )


@pytest.mark.parametrize("backend", ["auto", "braze"])
@pytest.mark.parametrize("biases", BIASES, ids=str)
@pytest.mark.parametrize("sizes", PERCEPTRONS, ids=str)
def test_perceptron_matches_stock(device, dtype, sizes, biases, backend):
    with braze.backend(matmul=backend):
        check_perceptron(integer_perceptron(*sizes, device, dtype, biases))


@pytest.mark.parametrize("name", ["mma_sync", "blocked", "cublas"])
def test_perceptron_with_a_named_backend(device, name):
    """Obeyed both ways, also where it has no epilogue for the backward."""
    if (name == "blocked") != (device == "cpu"):
        return
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with braze.backend(matmul=name):
        check_perceptron(integer_perceptron((300, 72), 136, 64, device, dtype))


def fuzz(data, device):
    rows, features, outputs = (data.draw(st.integers(0, 70)) for _ in range(3))
    hidden = data.draw(st.integers(1, 200))
    rows *= data.draw(st.sampled_from([1, 5]))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    biases = data.draw(st.sampled_from(BIASES))
    check_perceptron(integer_perceptron((rows, features), hidden, outputs, device, dtype, biases))


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


def test_every_combination_of_gradients(device):
    """Of each way back: few rows, and many."""
    for rows in (9, 150):
        tensors = integer_perceptron((rows, 6), 7, 5, device, torch.float64)
        g = torch.randn(rows, 5, device=device, dtype=torch.float64)
        all_of_them = torch.autograd.grad(perceptron(*tensors), tensors, g)
        for needed in range(1, 32):
            some = [t.detach().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate(tensors)]
            wanted = [t for t in some if t.requires_grad]
            actual = torch.autograd.grad(F.linear_relu_linear(*some), wanted, g)
            expected = [d for i, d in enumerate(all_of_them) if needed >> i & 1]
            torch.testing.assert_close(actual, tuple(expected))


def test_hidden_layer_of_nan_and_zero(device, dtype):
    """No gradient passes where the hidden layer is 0; torch lets it pass where it is NaN."""
    for rows in (1, 200):
        x = torch.tensor([[0.0], [1.0], [-1.0], [float("nan")]], device=device)
        x = x.repeat(rows, 1).to(dtype).requires_grad_()
        w1 = torch.ones(3, 1, device=device, dtype=dtype, requires_grad=True)
        b1 = torch.zeros(3, device=device, dtype=dtype, requires_grad=True)
        w2 = torch.ones(2, 3, device=device, dtype=dtype, requires_grad=True)
        out = F.linear_relu_linear(x, w1, b1, w2)
        dx, db = torch.autograd.grad(out, (x, b1), torch.ones_like(out))
        assert dx.flatten().tolist() == [0, 6, 0, 6] * rows
        assert db.tolist() == [4 * rows] * 3


def test_strides(device, dtype):
    def strided(rows, cols):
        r = lambda *s: torch.rand(s, device=device).to(dtype) + 0.5  # noqa: E731
        yield r(cols, rows).mT
        yield r(2 * rows, cols + 3)[::2, 1:-2]
        yield r(1, cols).expand(rows, cols)
        yield r(1 + rows * cols)[1:].view(rows, cols)

    bias = (torch.rand(12, device=device).to(dtype) + 0.5)[::2]
    layouts = (strided(140, 7), strided(6, 7), strided(140, 6), strided(5, 6))
    for x, w, residual, w2 in zip(*layouts, strict=True):
        for function, other, tensors in (
            (F.linear_add, linear_add, (x, w, bias, residual)),
            (F.linear_relu_linear, perceptron, (x, w, bias, w2)),
        ):
            inputs = [t.detach().requires_grad_() for t in tensors]
            out = function(*inputs)
            assert out.is_contiguous()
            for g in (torch.ones_like(out)[:, :1].expand_as(out), torch.rand_like(out.mT).mT):
                check_against_stock(function, other, inputs, grad_output=g)


def test_gradcheck_linear_add(device):
    shapes = [(2, 3, 4), (5, 4), (5,), (2, 3, 5)]
    inputs = [randn(*s, device=device) for s in shapes]
    assert torch.autograd.gradcheck(F.linear_add, inputs)
    for mask in range(1, 16):
        some = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(inputs)]
        assert torch.autograd.gradgradcheck(F.linear_add, some)


@pytest.mark.parametrize("rows", [3, 130])
def test_gradcheck_perceptron(device, rows):
    shapes = [(rows, 2), (3, 2), (3,), (2, 3), (2,)]
    inputs = [randn(*s, device=device) for s in shapes]
    # Both layers, as the op gives them: the hidden one has a gradient of its own.
    both = torch.ops.braze.linear_relu_linear
    fast = {"fast_mode": rows > 100}
    for function in (F.linear_relu_linear, both):
        assert torch.autograd.gradcheck(function, inputs, **fast)
        assert torch.autograd.gradgradcheck(function, inputs, **fast)
    assert torch.autograd.gradcheck(lambda *t: both(*t)[1], inputs[:4], **fast)
    for mask in range(1, 32) if rows < 100 else (1, 2, 4, 8, 16):
        some = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(inputs)]
        assert torch.autograd.gradgradcheck(F.linear_relu_linear, some, **fast)


@pytest.mark.parametrize("rows", [6, 130])
def test_opcheck(device, dtype, rows):
    inputs = integer_perceptron((rows, 7), 5, 4, device, dtype)
    op = torch.ops.braze.linear_relu_linear.default
    torch.library.opcheck(op, inputs)
    torch.library.opcheck(op, inputs[:4])
    torch.library.opcheck(op, (*inputs[:2], None, *inputs[3:]))


@pytest.mark.parametrize("rows", [6, 130])
def test_compile(device, rows):
    inputs = integer_perceptron((rows, 7), 6, 5, device, torch.float32)
    inputs.append(torch.randn(rows, 5, device=device, requires_grad=True))

    def function(perceptron, linear_add):
        def call(*tensors):
            *layers, residual = tensors
            added = residual @ layers[3]
            return linear_add(perceptron(*layers), layers[3].mT, layers[2], added).sum()

        return call

    compiled = compile(function(F.linear_relu_linear, F.linear_add))
    check_against_stock(compiled, function(perceptron, linear_add), inputs)


def test_autocast(device):
    inputs = integer_perceptron((150, 7), 6, 5, device, torch.float32)
    residual = torch.randn(150, 6, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = F.linear_relu_linear(*inputs)
        added = F.linear_add(*inputs[:3], residual)
        assert out.dtype == added.dtype == torch.bfloat16
        assert torch.equal(out, F.linear(F.linear_relu(*inputs[:3]), *inputs[3:]))
        x, w, b = inputs[:3]
        assert torch.equal(added, torch.ops.braze.matmul_epilogue(x, w.mT, b, residual)[0])
        assert torch.equal(out, torch.ops.braze.linear_relu_linear(*inputs)[0])
    (out.float().sum() + added.float().sum()).backward()
    assert all(t.grad.dtype == torch.float32 for t in (*inputs, residual))


def test_repeatable(device, dtype):
    inputs = integer_perceptron((3000, 70), 33, 20, device, dtype)
    residual = torch.randn(3000, 33, device=device).to(dtype).requires_grad_()

    def results():
        out = F.linear_relu_linear(*inputs)
        added = F.linear_add(*inputs[:3], residual)
        wanted = [*inputs, residual]
        return out, added, *torch.autograd.grad(out.sum() + added.square().sum(), wanted)

    first = results()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


def test_ops_each_way(device):
    """No pass over the hidden layer's gradient, neither for the ReLU nor for the bias."""
    inputs = integer_perceptron((200, 7), 6, 5, device, torch.float32)
    out = F.linear_relu_linear(*inputs)
    g = torch.ones_like(out)
    assert ops_run(lambda: F.linear_relu_linear(*inputs)) == ["linear_relu_linear"]
    assert ops_run(lambda: torch.autograd.grad(out, inputs, g)) == [
        "matmul_epilogue",
        "linear_backward",
        "linear_backward",
    ]
    few = integer_perceptron((20, 7), 6, 5, device, torch.float32)
    out = F.linear_relu_linear(*few)
    g = torch.ones_like(out)
    back = ops_run(lambda: torch.autograd.grad(out, few, g))
    if device == "cuda":  # one launch each
        assert back == ["linear_backward", "linear_relu_backward"]
    else:
        assert back == ["matmul_epilogue", "linear_backward", "linear_backward"]
    residual = torch.randn(200, 6, device=device, requires_grad=True)
    assert ops_run(lambda: F.linear_add(*inputs[:3], residual)) == ["matmul_epilogue"]


def test_bias_of_one_element(device):
    kw = {"device": device, "dtype": torch.float64}
    x, w, b, r = randn(4, 5, **kw), randn(3, 5, **kw), randn(1, **kw), randn(4, 3, **kw)
    check_against_stock(F.linear_add, linear_add, [x, w, b, r])
    w2, b2 = randn(2, 3, **kw), randn(1, **kw)
    check_against_stock(F.linear_relu_linear, perceptron, [x, w, b, w2, b2])


def test_bad_input(device):
    r = lambda *s: torch.randn(s, device=device)  # noqa: E731
    with pytest.raises(TypeError, match=r"linear_add\(\): argument 'residual' .* must be Tensor"):
        F.linear_add(r(2, 3), r(4, 3), None, 3)
    with pytest.raises(TypeError, match=r"linear\(\): argument 'weight' \(position 2\)"):
        F.linear_relu_linear(r(2, 3), r(4, 3), None, 3)
    for bad in (r(2, 5), r(4), r(1, 4), r(3, 2, 4)):
        with pytest.raises(RuntimeError, match=r"linear_add: expected residual .* \[2, 4\], but"):
            F.linear_add(r(2, 3), r(4, 3), None, bad)
    with pytest.raises(RuntimeError, match="expected residual to have the same dtype as input"):
        F.linear_add(r(2, 3), r(4, 3), None, r(2, 4).double())
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 5x4\)"):
        F.linear_add(r(2, 3), r(4, 5), None, r(2, 4))
    with pytest.raises(RuntimeError, match="linear_add: expected input to be at least 1D"):
        F.linear_add(r(), r(4, 3), None, r(4))
    with pytest.raises(RuntimeError, match="linear_add: expected weight to be 2D, but got 1D"):
        F.linear_add(r(2, 3), r(3), None, r(2))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x4 and 5x6\)"):
        F.linear_relu_linear(r(2, 3), r(4, 3), None, r(6, 5))
    with pytest.raises(RuntimeError, match=r"expected bias1 to have shape \[4\], but got \[5\]"):
        F.linear_relu_linear(r(2, 3), r(4, 3), r(5), r(6, 4))
    with pytest.raises(RuntimeError, match="linear_relu_linear: expected weight2 to have the same"):
        F.linear_relu_linear(r(2, 3), r(4, 3), None, r(6, 4).double())
    with pytest.raises(RuntimeError, match="expected weight1 to be 2D, but got 1D"):
        F.linear_relu_linear(r(2, 3), r(3), None, r(6, 4))


def test_the_tests_reject_a_wrong_backward(device, dtype):
    """One that forgets the ReLU on the way back, and one whose bias gradient ignores it."""

    class Wrong(torch.autograd.Function):
        masked = False

        @staticmethod
        def forward(ctx, x, w1, b1, w2, b2):
            out, hidden = torch.ops.braze.linear_relu_linear(x, w1, b1, w2, b2)
            ctx.save_for_backward(x, w1, w2, hidden)
            return out

        @classmethod
        def backward(cls, ctx, grad):
            x, w1, w2, hidden = ctx.saved_tensors
            mask = hidden if cls.masked else None
            op = torch.ops.braze.matmul_epilogue
            passed, _, _ = op(grad, w2, None, None, mask)
            _, sums, _ = op(grad, w2, column_sums=True)
            back = torch.ops.braze.linear_backward
            _, dw2, db2 = back(grad, hidden, w2, [False, True, True])
            dx, dw1, _ = back(passed, x, w1, [True, True, False])
            return dx, dw1, sums, dw2, db2

    class WrongBias(Wrong):
        masked = True

    for wrong in (Wrong, WrongBias):
        inputs = integer_perceptron((150, 7), 6, 5, device, dtype)
        with pytest.raises(AssertionError, match="gradient"):
            check_against_stock(wrong.apply, perceptron, inputs)
