"""The tolerance rule and checks against stock torch, for tests, benchmarks and new ops."""

import contextlib
import functools
import itertools

import torch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# The step of the finite differences: far above float64's rounding, so that they show the condition
# and not the reference's own noise; far below what would take a value to the other side of a tie.
_STEP = 2.0**-36
#: the ways in which inputs are moved, forth (1) and back (-1); the largest change counts
WAYS = (1, -1, 2, -2, 3, -3)


def assert_by_rule(
    actual,
    stock,
    reference,
    ulps=4,
    what="output",
    terms=None,
    moved=None,
    arithmetic=None,
):
    """Asserts that `actual` is as accurate as stock torch.

    The largest error against `reference`, over the finite entries, is at most

        2 max|stock - reference| + n max(eps max|reference|, change)

    where eps is the dtype's, and n is `ulps`, in float64 `ulps` + sqrt(`terms`). Infinities and
    NaNs have to be where the stock result has them, unless the reference says that stock's is wrong
    there; shape, dtype and device have to be its own.

    Where this comes from: an algorithm is as good as can be asked for if its result is the exact
    one for inputs that are a few roundings off (Higham, Accuracy and Stability of Numerical
    Algorithms, 1.5 and 1.6). What that may cost is the condition: `change`, how far the reference
    moves when every input, and what is kept for the backward, moves by one rounding of the
    arithmetic (float64's for float64, else float32's). Up to float32 stock's error shows what long
    sums cost on top. In float64 it does not: the reference is float64 too, equals stock, and errs
    itself. So the bound has to be known beforehand. Roundings that do not depend on each other add
    up to sqrt(`terms`) of them, in whatever order a sum is taken (Higham and Mary, A New Approach
    to Probabilistic Rounding Error Analysis, 2019), hence for any instruction set and number of
    threads. Wrong kernels are far off: for a million terms the floor is 2e-13 of the largest
    element, while anything done in float32 errs by 6e-8 of it.

    Args:
        actual: braze's result.
        stock: torch's result at the same dtype and settings.
        reference: torch's result in float64 on the same (rounded) inputs.
        ulps: how many roundings a result may be off that is not a long sum.
        terms: of the longest sum behind an element; default: as many as the result has elements.
        moved: a function that returns references for inputs that :func:`mover` moved, one for each
            of `WAYS`; called if the verdict depends on it. Without it `change` counts as 0.
        arithmetic: the dtype to which what lies between inputs and result is rounded, where that is
            not float32, and for float64 float64.
    """
    assert actual.shape == stock.shape, f"{what}: shape {actual.shape}, stock {stock.shape}"
    assert actual.dtype == stock.dtype, f"{what}: dtype {actual.dtype}, stock {stock.dtype}"
    assert actual.device == stock.device, f"{what}: device {actual.device}, stock {stock.device}"
    if actual.numel() == 0:
        return
    # The three may live on different devices (a float64 reference made on the CPU).
    a, s, r = (t.detach().to(actual.device, torch.float64) for t in (actual, stock, reference))
    special = ~s.isfinite()
    # Stock's convolutions in bfloat16 on CPUs read memory that nobody wrote, and multiply it by 0.
    wrong = special & a.isfinite() & (r.abs() <= torch.finfo(stock.dtype).max)
    special &= ~wrong
    assert torch.equal(special, ~a.isfinite()), f"{what}: non-finite values at other places"
    assert torch.equal(a[special].nan_to_num(), s[special].nan_to_num()), f"{what}: inf or nan"
    finite = ~special & r.isfinite()
    if not finite.any():
        return
    s = torch.where(wrong, r, s)
    a, s, r = a[finite], s[finite], r[finite]
    error, stock_error = (a - r).abs().max(), (s - r).abs().max()
    unit = torch.finfo(stock.dtype).eps * r.abs().max()
    if stock.dtype == torch.float64:
        ulps += (terms or actual.numel()) ** 0.5
    limit = 2 * stock_error + ulps * unit
    if error > limit and moved is not None:
        change = _largest_change(r, [m.detach().to(r)[finite] for m in moved()])
        arithmetic = arithmetic or torch.promote_types(stock.dtype, torch.float32)
        rounding = torch.finfo(arithmetic).eps
        limit = 2 * stock_error + ulps * max(unit, change * (rounding / _STEP))
    assert error <= limit, f"{what}: error {error:.3e}, stock {stock_error:.3e}, limit {limit:.3e}"


def mover(way):
    """A function that gives a tensor in float64 with each value up or down by the relative `_STEP`:
    another choice for each of `WAYS` and for each call, but the same for equal values of a tensor,
    so that ties stay ties. `-way` moves all that `way` moves, to the other side."""
    turns = itertools.count(1000 * abs(way))
    step = _STEP if way > 0 else -_STEP

    def move(t):
        t, factor = t.detach().double(), pow(0x9E3779B97F4A7C15, next(turns), 1 << 63)
        # In 20 bits: of what is computed and kept, `-way` sees other last bits than `way`. What is
        # added keeps the bounds of rounding away from float32's numbers and halves between them.
        rounded = (t.view(torch.int64) + 0x5A5A5A5A) >> 32
        up = rounded * factor < 0  # a hash: the highest bit of the product
        return t * (1 + step * torch.where(up, 1, -1).to(t))

    return move


def moving_what_is_kept(move):
    """A context in which what a forward keeps for its backward moves too: a softmax's gradient, for
    one, is made from its rounded result."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda t: move(t) if t.is_floating_point() else t, lambda t: t
    )


def _largest_change(reference, moved):
    """Of the references for inputs that were moved in all `WAYS`. An element that does not go back
    as far where the inputs go back jumped, at a tie, which has nothing to do with rounding; and one
    that does by chance, since it jumps both ways, hardly does it with each of the moves."""
    pairs = list(zip(moved[::2], moved[1::2], strict=True))
    change = torch.stack([(forth - back).abs() / 2 for forth, back in pairs]).amax(0)
    bend = torch.stack([(forth + back - 2 * reference).abs() for forth, back in pairs]).amax(0)
    return torch.where(bend < change / 8, change, 0).max().item()


def check_against_stock(
    braze_fn, stock_fn, inputs, ulps=4, grad_ulps=None, terms=None, grad_output=None
):
    """Runs both functions forward and backward and compares results and gradients by the rule of
    :func:`assert_by_rule`, with the condition measured.

    Args:
        braze_fn, stock_fn: take `inputs`, return one tensor.
        inputs: tensors; the floating-point ones get gradients if they require grad.
        ulps, grad_ulps: the floor for the result and for the gradients; default: twice as much for
            these, which have the roundings of both ways behind them.
        terms: of the longest sum; default: as many as the largest tensor has elements.
        grad_output: the incoming gradient; default: random.

    Returns:
        braze's result.
    """

    def is_float(t):
        return isinstance(t, torch.Tensor) and t.is_floating_point()

    def run(fn, convert=lambda t: t, keeping=contextlib.nullcontext):
        args = [
            convert(t.detach()).requires_grad_(t.requires_grad) if is_float(t) else t
            for t in inputs
        ]
        with keeping():
            out = fn(*args)
        wanted = [t for t in args if is_float(t) and t.requires_grad]
        if not wanted:
            return (out,)
        weight = grad_output
        if weight is None:
            # Fixed weights, rounded to the result's dtype, so that all see the same gradient.
            # Where there are many they are drawn on the GPU: the CPU would take seconds.
            place = out.device if out.numel() > 1 << 22 else torch.device("cpu")
            generator = torch.Generator(place).manual_seed(1)
            weight = torch.randn(out.shape, generator=generator, dtype=torch.float64, device=place)
            weight = weight.to(next(t.dtype for t in inputs if is_float(t)))
        return out, *torch.autograd.grad(out, wanted, convert(weight.to(out)))

    @functools.cache
    def moved():
        moves = map(mover, WAYS)
        return [run(stock_fn, m, functools.partial(moving_what_is_kept, m)) for m in moves]

    actual, stock = run(braze_fn), run(stock_fn)
    reference = run(stock_fn, torch.Tensor.double)
    tensors = [t for t in (*inputs, actual[0]) if isinstance(t, torch.Tensor)]
    terms = terms or max(t.numel() for t in tensors)
    for i, (a, s, r) in enumerate(zip(actual, stock, reference, strict=True)):
        what, floor = (f"gradient {i - 1}", grad_ulps or 2 * ulps) if i else ("output", ulps)
        assert_by_rule(a, s, r, floor, what, terms, lambda i=i: [m[i] for m in moved()])
    return actual[0]


def layouts(shape, device, dtype):
    """The same random 4-D values in the layouts that an op has to take, as (name, tensor)."""
    x = torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
    n, c, h, w = shape
    wide = torch.randn(n, c + 1, h, 2 * w, device=device).to(dtype)
    wide[:, 1:, :, ::2] = x
    return [
        ("contiguous", x),
        ("channels_last", x.to(memory_format=torch.channels_last)),
        ("permuted", x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)),
        ("sliced", wide[:, 1:, :, ::2]),
        ("expanded", x[:1].expand(n, c, h, w)),
    ]
