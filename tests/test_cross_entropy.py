import copy

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from braze._step_scope import StepScope
from common import assert_by_rule, check_against_stock, compile

REDUCTIONS = ["none", "mean", "sum"]
IGNORE = 2
# one block, several blocks, a block per row, columns; odd, prime, 1
SHAPES = [
    (5,),
    (1, 1),
    (64, 10),
    (1031, 10),
    (300, 128),
    (7, 1000),
    (3, 2050),
    (2, 9001),
    (3, 7, 11),
    (2, 40, 5, 7),
    (2, 3, 2, 3, 2),
]


def labels_for(shape, device):
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(shape[min(len(shape), 2) - 1], rows, device=device)
    if target.numel() > 1:
        target.view(-1)[::3] = IGNORE
    return target


def logits(shape, device, dtype, scale=3):
    return (scale * torch.randn(shape, device=device)).to(dtype).requires_grad_()


def compare(function, inputs, dtype, **settings):
    """By the rule; weights follow the input's dtype in the float64 run. Stock's own nll_loss takes
    only contiguous 4-D inputs and int64 labels."""

    def run(namespace):
        def call(x, target, weight=None):
            target = target.to(x.dtype) if target.is_floating_point() else target
            weight = None if weight is None else weight.to(x.dtype)
            if namespace is stock:
                x = x.contiguous()
                target = target if target.is_floating_point() else target.long()
            return getattr(namespace, function)(x, target, weight=weight, **settings)

        return call

    return check_against_stock(run(F), run(stock), inputs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_labels_match_stock(device, dtype, shape):
    classes = shape[min(len(shape), 2) - 1]
    x, target = logits(shape, device, dtype), labels_for(shape, device)
    weight = torch.rand(classes, device=device).to(dtype) + 0.5
    for reduction in REDUCTIONS:
        for smoothing, w in [(0.0, None), (0.0, weight), (0.1, None), (0.1, weight)]:
            if smoothing and dtype == torch.float16 and classes > 100:
                continue  # stock sums the losses of all classes in float16 and overflows
            compare(
                "cross_entropy",
                [x, target, w],
                dtype,
                reduction=reduction,
                ignore_index=IGNORE,
                label_smoothing=smoothing,
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_probabilities_match_stock(device, dtype, shape):
    dim = min(len(shape), 2) - 1
    x = logits(shape, device, dtype)
    target = torch.randn(shape, device=device).softmax(dim).to(dtype).requires_grad_()
    weight = torch.rand(shape[dim], device=device).to(dtype) + 0.5
    for reduction in REDUCTIONS:
        for smoothing, w in [(0.0, None), (0.2, weight)]:
            compare(
                "cross_entropy",
                [x, target, w],
                dtype,
                reduction=reduction,
                label_smoothing=smoothing,
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nll_loss_matches_stock(device, dtype, shape):
    x, target = logits(shape, device, dtype), labels_for(shape, device)
    weight = torch.rand(shape[min(len(shape), 2) - 1], device=device).to(dtype) + 0.5
    for reduction in REDUCTIONS:
        for w in (None, weight):
            compare("nll_loss", [x, target, w], dtype, reduction=reduction, ignore_index=IGNORE)


@pytest.mark.parametrize("function", ["cross_entropy", "nll_loss"])
def test_layouts(device, dtype, function):
    shape = (3, 8, 5, 6)
    base, target = logits(shape, device, dtype).detach(), labels_for(shape, device)
    wide = torch.randn(3, 9, 5, 12, device=device).to(dtype)
    for x in [
        base.to(memory_format=torch.channels_last),
        base.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        wide[:, 1:, :, ::2],
        base[:1].expand(shape),
    ]:
        for y in (target, target.transpose(1, 2).contiguous().transpose(1, 2), target.byte()):
            x = x.detach().requires_grad_()
            compare(function, [x, y, None], dtype, reduction="mean", ignore_index=IGNORE)
            compare(function, [x, y, None], dtype, reduction="none")
    x = base.to(memory_format=torch.channels_last).requires_grad_()
    getattr(F, function)(x, target).backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    flat = torch.randn(8 * 16 + 1, device=device).to(dtype)[1:].view(8, 16).requires_grad_()
    compare(function, [flat, labels_for((8, 16), device), None], dtype)
    compare(function, [flat.t().detach(), labels_for((16, 8), device), None], dtype)


def test_probability_layouts(device, dtype):
    x = logits((2, 5, 3, 4), device, dtype)
    target = torch.rand(2, 5, 3, 4, device=device).to(dtype)
    for a in (x, x.detach().to(memory_format=torch.channels_last).requires_grad_()):
        for b in (target, target.to(memory_format=torch.channels_last), target[:1].expand_as(a)):
            compare("cross_entropy", [a, b, None], dtype)


def test_special_values(device, dtype):
    inf, nan = float("inf"), float("nan")
    rows = [[inf, 0, 1], [-inf, 0, 1], [-inf] * 3, [nan, 0, 1], [1e4, -1e4, 0], [1e-40, 0, 0]]
    x = torch.tensor(rows, device=device).to(dtype).requires_grad_()
    for target in ([0] * 6, [1] * 6, [0, -100, 0, -100, 0, 0]):
        target = torch.tensor(target, device=device)
        compare("nll_loss", [x, target, None], dtype, reduction="none")
        compare("cross_entropy", [x, target, None], dtype, reduction="none")
        compare("cross_entropy", [x, target, None], dtype, reduction="none", label_smoothing=0.1)


def test_nothing_to_average(device, dtype):
    """torch's edge cases: no rows, no classes, every row ignored, weights that sum to zero."""
    empty, none = torch.randn(0, 5, device=device), torch.zeros(0, dtype=torch.long, device=device)
    x = torch.randn(3, 5, device=device).to(dtype).requires_grad_()
    target = torch.tensor([1, 2, 3], device=device)
    ignored = torch.full((3,), -100, device=device)
    for reduction in REDUCTIONS:
        for function in ("cross_entropy", "nll_loss"):
            leaf = empty.to(dtype).requires_grad_()
            compare(function, [leaf, none, None], dtype, reduction=reduction)
            compare(function, [x, ignored, None], dtype, reduction=reduction)
        compare("cross_entropy", [leaf, torch.rand_like(leaf), None], dtype, reduction=reduction)
        zero_classes = torch.randn(3, 0, device=device).to(dtype)
        compare("cross_entropy", [zero_classes, ignored, None], dtype, reduction=reduction)
        weight = torch.zeros(5, device=device).to(dtype)
        compare("cross_entropy", [x, target, weight], dtype, reduction=reduction)
        compare(
            "cross_entropy", [x, ignored, None], dtype, reduction=reduction, label_smoothing=0.1
        )


def test_bitwise_repeatable(device):
    x = logits((2000, 10), device, torch.float32)
    target = labels_for((2000, 10), device)
    results = {F.cross_entropy(x, target).item() for _ in range(5)}
    assert len(results) == 1


def test_autocast_follows_torch(device):
    target = torch.tensor([1, 2, 3], device=device)
    weight = torch.rand(5, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = logits((3, 5), device, dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            weights = [weight.to(torch.promote_types(dtype, torch.float32))]
            weights += [weight.bfloat16()] if dtype != torch.float64 else []
            for settings in ({}, *({"weight": w} for w in weights)):
                for name in ("cross_entropy", "nll_loss"):
                    loss = getattr(F, name)(x, target, **settings)
                    expected = getattr(stock, name)(x, target, **settings)
                    assert loss.dtype == expected.dtype
                    reference = getattr(stock, name)(
                        x.float(), target, **{k: w.float() for k, w in settings.items()}
                    )
                    torch.testing.assert_close(loss.float(), reference)
            assert torch.ops.braze.cross_entropy(x, target)[0].dtype == expected.dtype
            soft = F.cross_entropy(x, x.detach().softmax(1))
            assert soft.dtype == expected.dtype
        (loss + soft).backward()
        assert x.grad.dtype == dtype


def test_gradcheck(device):
    x = torch.randn(3, 4, 2, device=device, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, 1], [2, 3], [1, -100]], device=device)
    probs = torch.rand(3, 4, 2, device=device, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, device=device, dtype=torch.float64)
    for reduction in REDUCTIONS:
        for smoothing, w in [(0.0, None), (0.2, weight)]:
            settings = {"weight": w, "reduction": reduction, "label_smoothing": smoothing}
            cases = [
                (lambda t, s=settings: F.cross_entropy(t, target, **s), [x]),
                (lambda t, q, s=settings: F.cross_entropy(t, q, **s), [x, probs]),
                (lambda t, r=reduction, w=w: F.nll_loss(t, target, w, reduction=r), [x]),
            ]
            for function, inputs in cases:
                assert torch.autograd.gradcheck(function, inputs)
                assert torch.autograd.gradgradcheck(function, inputs)
    one = torch.randn(4, device=device, dtype=torch.float64, requires_grad=True)
    label = torch.tensor(2, device=device)
    assert torch.autograd.gradgradcheck(lambda t: F.cross_entropy(t, label), [one])
    assert torch.autograd.gradgradcheck(
        lambda t: F.cross_entropy(t, label.view(1), reduction="none"), [one]
    )
    raw = torch.ops.braze.cross_entropy
    assert torch.autograd.gradcheck(lambda t: raw(t, target, weight)[0], [x])
    assert torch.autograd.gradcheck(lambda t: torch.ops.braze.nll_loss(t, target)[0], [x])


def test_gradient_of_class_weights(device):
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(3, 4, device=device, dtype=torch.float64)
    weight = torch.rand(4, device=device, dtype=torch.float64, requires_grad=True)
    for reduction in REDUCTIONS:
        compare("cross_entropy", [x, probs, weight], torch.float64, reduction=reduction)
    target = torch.tensor([0, 1, 2], device=device)
    for function in (F.cross_entropy, F.nll_loss):
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'wei"):
            function(x, target, weight)


def test_opcheck(device, dtype):
    x = logits((3, 4, 2), device, dtype)
    last = x.detach().movedim(1, -1).contiguous().movedim(-1, 1).requires_grad_()
    target = torch.tensor([[0, 1], [2, 3], [1, -100]], device=device)
    probs = torch.rand(3, 4, 2, device=device).to(dtype).requires_grad_()
    weight = torch.rand(4, device=device).to(dtype)
    ops = torch.ops.braze
    for a, t, w, reduction, smoothing in [
        (x, target, None, 1, 0.0),
        (last, target, weight, 0, 0.1),
        (x, probs, weight, 2, 0.1),
        (last, probs, None, 1, 0.0),
    ]:
        torch.library.opcheck(ops.cross_entropy.default, (a, t, w, reduction, -100, smoothing))
        _, stats, total = ops.cross_entropy(a, t, w, reduction, -100, smoothing)
        grad = torch.ones((3, 2) if reduction == 0 else (), device=device, dtype=dtype)
        args = (grad, a.detach(), t.detach(), w, stats, total, reduction, -100, smoothing)
        torch.library.opcheck(ops.cross_entropy_backward.default, (*args, t is probs))
        if t is target:
            torch.library.opcheck(ops.nll_loss.default, (a, t, w, reduction))
            total = ops.nll_loss(a, t, w, reduction)[1]
            args = (grad, a.detach(), t, w, total, reduction, -100)
            torch.library.opcheck(ops.nll_loss_backward.default, args)


@pytest.mark.parametrize("function", ["cross_entropy", "nll_loss"])
def test_compile(device, function):
    x = logits((4, 5), device, torch.float32)
    target = torch.tensor([1, 2, 3, 4], device=device)
    compiled = compile(lambda t: getattr(F, function)(t * 2, target) + 1)
    check_against_stock(compiled, lambda t: getattr(stock, function)(t * 2, target) + 1, [x])


def test_layers(device):
    x, target = logits((6, 5), device, torch.float32), labels_for((6, 5), device)
    weight = torch.rand(5, device=device)
    for name, options in [
        ("CrossEntropyLoss", {"label_smoothing": 0.1, "ignore_index": IGNORE}),
        ("NLLLoss", {"reduction": "sum", "ignore_index": IGNORE}),
    ]:
        ours = getattr(braze.nn, name)(weight, **options)
        theirs = getattr(torch.nn, name)(weight, **options)
        assert isinstance(ours, type(theirs))
        wide = copy.deepcopy(theirs).double()
        assert_by_rule(ours(x, target), theirs(x, target), wide(x.double(), target))
        theirs.load_state_dict(ours.state_dict())


def test_mixed_dtypes_of_probabilities(device):
    x = logits((3, 5), device, torch.float32)
    target = torch.rand(3, 5, device=device, dtype=torch.float64)
    loss, expected = F.cross_entropy(x, target), stock.cross_entropy(x, target)
    assert loss.dtype == expected.dtype
    assert_by_rule(loss, expected, stock.cross_entropy(x.double(), target))


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    reduction=st.sampled_from(REDUCTIONS),
    smoothing=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
    soft=st.booleans(),
)
def test_fuzzed(sizes, reduction, smoothing, weighted, soft):
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        x = logits(sizes, device, torch.float32)
        target = torch.rand(sizes, device=device) if soft else labels_for(sizes, device)
        weight = torch.rand(sizes[1], device=device) + 0.1 if weighted else None
        compare(
            "cross_entropy",
            [x, target, weight],
            torch.float32,
            reduction=reduction,
            label_smoothing=smoothing,
            **({} if soft else {"ignore_index": IGNORE}),
        )


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """A loss whose mean counts ignored rows, and one whose gradient forgets the target."""
    x, target = logits((8, 5), device, dtype), labels_for((8, 5), device)

    def wrong_mean(t):
        return F.cross_entropy(t, target, ignore_index=IGNORE, reduction="sum") / len(target)

    with pytest.raises(AssertionError, match="error"):
        check_against_stock(
            wrong_mean, lambda t: stock.cross_entropy(t, target, ignore_index=IGNORE), [x]
        )

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return F.cross_entropy(t.detach(), target)

        @staticmethod
        def backward(ctx, grad):
            return grad * F.softmax(ctx.saved_tensors[0], 1) / len(target)

    with pytest.raises(AssertionError, match="gradient 0"):
        check_against_stock(WrongGradient.apply, lambda t: stock.cross_entropy(t, target), [x])


@pytest.mark.parametrize("reduction", [1, 2], ids=["mean", "sum"])
def test_gradient_made_in_advance(device, dtype, reduction):
    """The op gives, bit for bit, what the loss and its backward for a gradient of 1 give."""
    for shape in [*SHAPES, (0, 10), (2500, 10)]:
        classes = shape[min(len(shape), 2) - 1]
        x, target = logits(shape, device, dtype).detach(), labels_for(shape, device)
        targets = [target, torch.softmax(torch.randn(shape, device=device), -1).to(dtype)]
        weights = [None, torch.rand(classes, device=device).to(dtype) + 0.5]
        for y, w, smoothing in [(t, w, s) for t in targets for w in weights for s in (0.0, 0.1)]:
            *expected, grad = torch.ops.braze.cross_entropy_with_grad(
                x, y, w, reduction, IGNORE, smoothing
            )
            results = torch.ops.braze.cross_entropy(x, y, w, reduction, IGNORE, smoothing)
            for a, b in zip(results, expected, strict=True):
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
            later, _ = torch.ops.braze.cross_entropy_backward(
                torch.ones_like(results[0]),
                *(x, y, w, *results[1:], reduction, IGNORE, smoothing, False),
            )
            assert grad.stride() == later.stride()
            assert torch.equal(grad.nan_to_num(7), later.nan_to_num(7))
    with pytest.raises(RuntimeError, match="expected reduction to be 1"):
        torch.ops.braze.cross_entropy_with_grad(x, y, w, 0)


def test_gradient_made_in_advance_is_only_used_for_it(device):
    x, target = logits((64, 10), device, torch.float32), labels_for((64, 10), device)
    one = torch.ones((), device=device)
    ones = {(torch.float32, one.device): one}

    def gradients(of):
        """With the expected gradient, another one, a hook, twice, and differentiably."""
        loss = of()
        yield torch.autograd.grad(loss, x, one, retain_graph=True)[0]
        yield torch.autograd.grad(loss, x, one)[0]
        yield torch.autograd.grad(of(), x, torch.full_like(one, 3))[0]
        loss = of()
        loss.register_hook(lambda g: 2 * g)
        yield torch.autograd.grad(loss, x, one)[0]
        (grad,) = torch.autograd.grad(of(), x, one, create_graph=True)
        yield torch.autograd.grad(grad.square().sum(), x)[0]

    def expecting():
        with StepScope(unit_gradients=ones):
            return F.cross_entropy(x, target, ignore_index=IGNORE)

    plain = gradients(lambda: F.cross_entropy(x, target, ignore_index=IGNORE))
    for actual, expected in zip(gradients(expecting), plain, strict=True):
        assert torch.equal(actual, expected)
    loss = expecting()
    one.fill_(5)  # no longer what was expected
    (grad,) = torch.autograd.grad(loss, x, one)
    assert torch.equal(grad, torch.autograd.grad(expecting(), x, torch.full_like(one, 5))[0])
