"""The tolerance rule itself: float64 sums in any order pass, errors of realistic size do not."""

import pytest
import torch
import torch.nn.functional as stock

from braze.testing import WAYS, assert_by_rule, mover
from common import check_against_stock

INF, NAN = float("inf"), float("nan")


def product(sum_of):
    """A matrix product whose sums are made by `sum_of`, which takes the terms along dimension 1."""
    return lambda a, b: sum_of(a.unsqueeze(-1) * b)


def one_after_another(terms):
    total = torch.zeros_like(terms[:, 0])
    for i in range(terms.size(1)):
        total = total + terms[:, i]
    return total


def from_the_last(terms):
    return one_after_another(terms.flip(1))


def in_lanes(terms):
    lanes = [one_after_another(terms[:, i::8]) for i in range(8)]
    return one_after_another(torch.stack(lanes, 1))


def operands(device, dtype, k=999):
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in [(7, k), (k, 5)]]


@pytest.mark.parametrize("sum_of", [one_after_another, from_the_last, in_lanes])
def test_sums_in_any_order_pass(device, sum_of):
    check_against_stock(product(sum_of), torch.matmul, operands(device, torch.float64))


def test_softmax_by_its_formula_passes(device):
    """Of rows as long as the one where the order of a sum once decided over right and wrong."""
    x = (4 * torch.randn(2, 9001, device=device, dtype=torch.float64)).requires_grad_()

    def formula(t):
        e = (t - t.amax(1, keepdim=True)).exp()
        return e / one_after_another(e.view(2, 9001, 1)).view(2, 1)

    check_against_stock(formula, lambda t: stock.softmax(t, 1), [x])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_cancelling_terms_pass(device, dtype):
    """The sum is a millionth of its terms, so that it has the rounding of these."""
    big = torch.randn(4, 20, device=device).to(dtype) * 1e6
    x = torch.cat([big, torch.rand(4, 1, device=device).to(dtype), -big], 1).requires_grad_()
    check_against_stock(lambda t: one_after_another(t), lambda t: t.sum(1), [x])
    with pytest.raises(AssertionError, match="output: error"):
        check_against_stock(lambda t: one_after_another(t[:, 1:]), lambda t: t.sum(1), [x])


def in_float32(a, b):
    return torch.matmul(a.float(), b.float()).double()


def summed_in_float32(a, b):
    return (a.unsqueeze(-1) * b).float().sum(1).double()


def without_one_term(a, b):
    return torch.matmul(a[:, 1:], b[1:])


def with_a_float32_constant(a, b):
    return torch.matmul(a, b) * (torch.tensor(0.1).double() / 0.1)


@pytest.mark.parametrize(
    "wrong", [in_float32, summed_in_float32, without_one_term, with_a_float32_constant]
)
@pytest.mark.parametrize("k", [3, 999, 100_000])
def test_wrong_float64_is_rejected(device, wrong, k):
    inputs = operands(device, torch.float64, k)
    with pytest.raises(AssertionError, match="output: error"):
        check_against_stock(wrong, torch.matmul, inputs)


def test_a_wrong_gradient_of_float64_is_rejected(device):
    class Wrong(torch.autograd.Function):
        """A softmax whose backward sums up in float32."""

        @staticmethod
        def forward(ctx, t):
            y = stock.softmax(t, 1)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return y * (grad - (y * grad).float().sum(1, keepdim=True).double())

    x = torch.randn(3, 2050, device=device, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError, match="gradient 0: error"):
        check_against_stock(Wrong.apply, lambda t: stock.softmax(t, 1), [x])


def test_a_float32_result_has_no_allowance_for_long_sums(device):
    """Stock's own error says what a sum costs; twice that is the limit, not the root of terms."""
    a, b = operands(device, torch.float32, 20_000)

    def worse(a, b):
        exact = torch.matmul(a.double(), b.double())
        error = (torch.matmul(a, b) - exact).abs().max()
        return (exact + 4 * error + 100 * 2**-23 * exact.abs().max()).float()

    with pytest.raises(AssertionError, match="output: error"):
        check_against_stock(worse, torch.matmul, [a.detach(), b.detach()])


def test_ties_allow_nothing(device):
    """Which of two equal values is the maximum changes with any rounding; that is no condition."""
    x = torch.randint(-2, 3, (8, 60), device=device).double()
    inputs = [x, (2 - x).flip(1).requires_grad_()]

    def largest_sum(a, b):
        return (a + b).amax(1)

    def first_sum(a, b):
        total = a + b
        return total.gather(1, total.argmax(1, keepdim=True)).squeeze(1)

    check_against_stock(first_sum, first_sum, inputs)
    with pytest.raises(AssertionError, match="gradient 0: error"):
        check_against_stock(largest_sum, first_sum, inputs)


def test_mover(device):
    x = torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, 1.0, 0.0, INF, -INF, NAN], device=device)
    x = torch.cat([x, torch.randn(200, device=device)])
    seen = []
    for way in WAYS[::2]:
        forth, back = mover(way), mover(-way)
        for _ in range(2):
            y = forth(x)
            assert torch.equal((back(x) - x)[:7], (x - y)[:7])
            assert y.dtype == torch.float64
            assert y[0] == y[5]
            assert y[6] == 0
            assert torch.equal(y[7:9], x[7:9].double())
            assert y[9].isnan()
            change = (y / x.double() - 1)[x.isfinite() & (x != 0)]
            assert torch.allclose(change.abs(), torch.full_like(change, 2.0**-36), rtol=1e-3)
            assert 0.3 < change.gt(0).double().mean() < 0.7
            seen.append(change > 0)
    for i, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[:i])


def test_non_finite_values_have_to_be_where_stock_has_them(device, dtype):
    right = torch.tensor([1.0, INF, NAN], device=device).to(dtype)
    assert_by_rule(right, right, right.double())
    for wrong in ([1.0, INF, 1.0], [1.0, -INF, NAN], [INF, INF, NAN], [1.0, NAN, INF]):
        with pytest.raises(AssertionError, match=r"non-finite|inf or nan"):
            assert_by_rule(torch.tensor(wrong, device=device).to(dtype), right, right.double())


def test_infinities_that_stock_alone_has():
    """Where the reference is finite and the dtype holds it, a finite result is judged by it."""
    reference = torch.tensor([1.0, 2.0, 1e5], dtype=torch.float64)
    inf = float("inf")
    stock = torch.tensor([1.0, inf, inf], dtype=torch.float16)
    assert_by_rule(torch.tensor([1.0, 2.0, inf], dtype=torch.float16), stock, reference)
    assert_by_rule(stock.clone(), stock, reference)
    for wrong in ([1.0, 2.1, inf], [1.0, -inf, inf], [inf, 2.0, inf], [1.0, 2.0, 65504.0]):
        with pytest.raises(AssertionError):
            assert_by_rule(torch.tensor(wrong, dtype=torch.float16), stock, reference)
