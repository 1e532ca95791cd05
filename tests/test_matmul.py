"""matmul and linear: numbers, layouts, gradients, and what they refuse."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st
from matmul_common import randn, strided

import braze
import braze.nn.functional as F
from common import assert_by_rule, assert_same_layer, check_against_stock, compile, fuzzed

MATMUL_SHAPES = [
    ((3,), (3,)),
    ((4, 5), (5,)),
    ((5,), (5, 7)),
    ((3, 4, 5), (5,)),
    ((5,), (3, 5, 7)),
    ((1, 1), (1, 1)),
    ((64, 128), (128, 32)),
    ((127, 101), (101, 53)),
    ((33, 300), (300, 100)),
    ((19, 60000), (60000, 70)),  # few results of long sums: a part for each thread
    ((6, 4, 5), (5, 7)),
    ((4, 5), (6, 5, 7)),
    ((6, 4, 5), (6, 5, 7)),
    ((2, 1, 3, 4, 5), (6, 1, 5, 2)),
    ((0, 5), (5, 7)),
    ((4, 0), (0, 7)),
    ((4, 5), (5, 0)),
    ((0, 4, 5), (0, 5, 7)),
    ((2, 0, 4, 5), (5, 6)),
    ((5, 4), (2, 0, 4, 6)),
    ((1, 0, 4, 5), (3, 0, 5, 6)),
    ((3, 0, 1, 4, 5), (5,)),
    ((0,), (0,)),
]
LINEAR_SHAPES = [
    ((5,), 3),
    ((1, 1), 1),
    ((7, 13), 10),
    ((64, 128), 10),
    ((33, 257), 129),
    ((2, 3, 5, 7), 11),
    ((0, 7), 3),
    ((2, 0, 4, 5), 3),
    ((4, 0), 3),
    ((4, 7), 0),
]


@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=str)
def test_matmul_matches_stock(device, dtype, shapes):
    a, b = (randn(*shape, device=device, dtype=dtype) for shape in shapes)
    check_against_stock(braze.matmul, torch.matmul, [a, b])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("shape", "n"), LINEAR_SHAPES, ids=str)
def test_linear_matches_stock(device, dtype, shape, n, bias):
    inputs = [randn(*shape, device=device, dtype=dtype)]
    inputs.append(randn(n, shape[-1], device=device, dtype=dtype))
    if bias:
        inputs.append(randn(n, device=device, dtype=dtype))
    check_against_stock(F.linear, stock.linear, inputs)


def test_linear_bias_of_one_element_and_vector_weight(device):
    x, w, b = (randn(*s, device=device, dtype=torch.float64) for s in [(4, 5), (3, 5), (1,)])
    check_against_stock(F.linear, stock.linear, [x, w, b])
    check_against_stock(F.linear, stock.linear, [x, randn(5, device=device, dtype=torch.float64)])


def test_strides(device, dtype):
    lefts, rights = list(strided((2, 3, 9, 7), device, dtype)), strided((2, 3, 7, 5), device, dtype)
    for i, (name, b) in enumerate(rights):
        for a_name, a in [lefts[0], lefts[i], lefts[(i + 3) % len(lefts)]]:
            out = braze.matmul(a, b)
            reference = torch.matmul(a.double(), b.double())
            assert out.is_contiguous()
            assert_by_rule(out, torch.matmul(a, b), reference, what=f"{a_name} x {name}")


def test_linear_strides(device, dtype):
    bias = randn(10, device=device, dtype=dtype)[::2]
    weights = list(strided((5, 7), device, dtype))
    for i, (name, x) in enumerate(strided((2, 3, 9, 7), device, dtype)):
        for w in (weights[0][1], weights[i % len(weights)][1]):
            inputs = [t.detach().requires_grad_() for t in (x, w, bias)]
            assert inputs[0].stride() == x.stride(), name
            g = torch.ones((), device=device, dtype=dtype).expand(2, 3, 9, 5)
            check_against_stock(F.linear, stock.linear, inputs, grad_output=g)


def test_special_values(device, dtype):
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([[1.0, inf, 2.0], [nan, 1.0, 1.0], [1.0, 2.0, 3.0]], device=device).to(dtype)
    b = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-inf, 1e-40]], device=device).to(dtype)
    check_against_stock(braze.matmul, torch.matmul, [a, b])
    big = torch.full((40, 40), torch.finfo(dtype).max, device=device, dtype=dtype)
    assert braze.matmul(big, big).isinf().all()


def fuzz_matmul(data, device):
    extent = st.integers(0, 70)
    m, k, n = data.draw(extent), data.draw(extent), data.draw(extent)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    batch_a, batch_b = data.draw(
        st.sampled_from([((), ()), ((3,), ()), ((), (3,)), ((2, 3), (3,)), ((2, 1), (1, 4))])
    )
    transposed = data.draw(st.booleans()), data.draw(st.booleans())
    operands = []
    for batch, (rows, cols), flip in zip(
        (batch_a, batch_b), ((m, k), (k, n)), transposed, strict=True
    ):
        t = torch.randn(*batch, *((cols, rows) if flip else (rows, cols)), device=device).to(dtype)
        operands.append((t.mT if flip else t).requires_grad_())
    check_against_stock(braze.matmul, torch.matmul, operands)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz_matmul)


def test_linear_with_relu(device, dtype):
    x, w, b = (randn(*s, device=device, dtype=dtype) for s in [(17, 33), (20, 33), (20,)])
    # Far from zero, where rounding would decide whether the gradient passes.
    x, w = x.abs(), torch.cat([w[:10].abs(), -w[10:].abs()])
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    check_against_stock(
        lambda *t: torch.ops.braze.linear(*t, True), lambda *t: stock.linear(*t).relu(), [x, w, b]
    )
    nan = torch.full((2, 33), float("nan"), device=device, dtype=dtype)
    assert torch.ops.braze.linear(nan, w, b, True).isnan().all()


def test_gradcheck(device):
    kw = {"device": device, "dtype": torch.float64}
    for a, b in [((3,), (3,)), ((2, 3), (3,)), ((2, 2, 3), (3, 4)), ((2, 3), (3, 3, 4))]:
        inputs = (randn(*a, **kw), randn(*b, **kw))
        assert torch.autograd.gradcheck(braze.matmul, inputs)
        assert torch.autograd.gradgradcheck(braze.matmul, inputs)
    inputs = (randn(2, 3, 4, **kw), randn(5, 4, **kw), randn(5, **kw))
    for relu in (False, True):
        function = lambda *t, relu=relu: torch.ops.braze.linear(*t, relu)  # noqa: E731
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(F.linear, inputs)
    # Only some gradients asked for.
    for mask in range(1, 8):
        some = tuple(t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(inputs))
        assert torch.autograd.gradgradcheck(F.linear, some)


def test_opcheck(device, dtype):
    x, w, b = (randn(*s, device=device, dtype=dtype) for s in [(2, 6, 7), (5, 7), (5,)])
    g = randn(2, 6, 5, device=device, dtype=dtype)
    torch.library.opcheck(torch.ops.braze.matmul.default, (x, w.mT))
    torch.library.opcheck(torch.ops.braze.linear.default, (x, w))
    torch.library.opcheck(torch.ops.braze.linear.default, (x, w, b, True))
    torch.library.opcheck(torch.ops.braze.linear_backward.default, (g, x, w, [True, True, True]))
    torch.library.opcheck(torch.ops.braze.linear_backward.default, (g, x, w, [False, True, False]))


def test_compile(device):
    inputs = [randn(*s, device=device, dtype=torch.float32) for s in [(4, 7), (5, 7), (5,)]]

    def function(linear, matmul):
        return lambda x, w, b: matmul(linear(x, w, b) * 2, w).sum()

    compiled = compile(function(F.linear, braze.matmul))
    check_against_stock(compiled, function(stock.linear, torch.matmul), inputs)


def test_autocast(device):
    x, w, b = (randn(*s, device=device, dtype=torch.float32) for s in [(4, 7), (5, 7), (5,)])
    with torch.autocast(device, dtype=torch.bfloat16):
        out = F.linear(x, w, b)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, torch.ops.braze.linear(x, w, b))
        assert braze.matmul(x, w.mT).dtype == torch.bfloat16
        assert torch.ops.braze.matmul(x, w.mT).dtype == torch.bfloat16
        assert braze.matmul(x.double(), w.mT.double()).dtype == torch.float64
        assert_by_rule(out, stock.linear(x, w, b), stock.linear(x.double(), w.double(), b.double()))
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (x, w, b))


def test_module(device):
    layer = braze.nn.Linear(7, 5, device=device)
    plain = torch.nn.Linear(7, 5, device=device)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, device=device)
    for clone in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_layer(clone, plain, x)
    assert isinstance(layer, torch.nn.Linear)
    model = braze.nn.Sequential(braze.nn.Flatten(), layer, braze.nn.ReLU())
    assert_same_layer(
        model, torch.nn.Sequential(torch.nn.Flatten(), plain, torch.nn.ReLU()), x.view(3, 7, 1)
    )


def test_repeatable(device, dtype):
    a, b = randn(257, 1000, device=device, dtype=dtype), randn(1000, 65, device=device, dtype=dtype)
    first = braze.matmul(a, b)
    assert all(torch.equal(first, braze.matmul(a, b)) for _ in range(3))


def test_bad_input(device):
    r = lambda *s: torch.randn(s, device=device)  # noqa: E731
    with pytest.raises(RuntimeError, match="need to be at least 1D, but they are 0D and 2D"):
        braze.matmul(r(), r(2, 3))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 4x5\)"):
        braze.matmul(r(2, 3), r(4, 5))
    with pytest.raises(RuntimeError, match=r"tensor a \(2\) must match.*tensor b \(3\).*on 0"):
        braze.matmul(r(2, 2, 3), r(3, 3, 5))
    with pytest.raises(RuntimeError, match="same dtype as input, but got float64 and float32"):
        braze.matmul(r(2, 3), r(3, 4).double())
    with pytest.raises(RuntimeError, match="float64, float32, bfloat16 or float16, but got int64"):
        torch.ops.braze.matmul(r(2, 3).long(), r(3, 4).long())
    with pytest.raises(TypeError, match=r"argument 'other' .* must be Tensor, not int"):
        braze.matmul(r(2, 3), 3)
    with pytest.raises(TypeError, match=r"argument 'input' .* must be Tensor, not float"):
        F.linear(3.0, r(2, 3))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 5x4\)"):
        F.linear(r(2, 3), r(4, 5))
    with pytest.raises(RuntimeError, match=r"expected bias to have shape \[4\], but got \[5\]"):
        F.linear(r(2, 3), r(4, 3), r(5))
    with pytest.raises(RuntimeError, match="to linear need to be at least 1D"):
        F.linear(r(), r(4, 3))
    with pytest.raises(RuntimeError, match="expected weight to be 2D, but got 3D"):
        F.linear(r(2, 3), r(2, 4, 3))
    with pytest.raises(RuntimeError, match="expected grad_output of the forward's output shape"):
        torch.ops.braze.linear_backward(r(2, 5), r(2, 3), r(4, 3), [True, True, True])


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A product that drops the last step of the reduction, as a wrong loop bound would."""

    def wrong(a, b):
        return braze.matmul(a[:, :-1], b[:-1])

    a, b = randn(20, 500, device=device, dtype=dtype), randn(500, 20, device=device, dtype=dtype)
    with pytest.raises(AssertionError, match="error"):
        check_against_stock(wrong, torch.matmul, [a, b])


# rows, inputs, outputs: a classifier's last layer, whose gradients come from one pass over the rows
# on a GPU. Rows left over, columns of several blocks, odd ones, which no vector takes.
NARROW = [
    (129, 2, 1),
    (200, 84, 3),
    (1000, 128, 10),
    (5000, 130, 11),
    (333, 1026, 16),
    (20000, 64, 4),
    (300, 33, 10),
    (0, 128, 10),
]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", NARROW, ids=str)
def test_gradients_of_few_outputs(device, dtype, shape, tf32):
    if tf32:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    rows, inputs, outputs = shape
    # Not around zero: in float64 sums that cancel would be far off, relative to themselves.
    x, w, dy = (
        (torch.randn(size, device=device) + 1).to(dtype)
        for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    backward = torch.ops.braze.linear_backward
    grads = backward(dy, x, w, [True] * 3)
    for once, again in zip(grads, backward(dy, x, w, [True] * 3), strict=True):
        assert torch.equal(once, again)

    def stocks(wide):
        args = [t.to(wide).requires_grad_() for t in (x, w)]
        bias = torch.zeros(outputs, device=device, dtype=wide, requires_grad=True)
        return torch.autograd.grad(stock.linear(*args, bias), (*args, bias), dy.to(wide))

    for actual, narrow, exact in zip(grads, stocks(dtype), stocks(torch.float64), strict=True):
        assert_by_rule(actual, narrow, exact, terms=max(rows, outputs))
    if rows:
        for value in (float("nan"), float("inf")):
            dy[rows // 2, -1] = value
            dx, dw, db = backward(dy, x, w, [True] * 3)
            assert dx[rows // 2].isfinite().logical_not().all()
            assert dx.isfinite().sum() == dx.numel() - inputs
            assert dw[:-1].isfinite().all()
            assert db[:-1].isfinite().all()
            assert not db[-1].isfinite()
            assert not dw[-1].isfinite().any()
