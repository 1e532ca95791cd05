"""The tolerance rule and checks against stock torch, for tests, benchmarks and new ops."""

import torch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def assert_by_rule(actual, stock, reference, ulps=4, what="output"):
    """Asserts that `actual` is as accurate as stock torch.

    max|actual - reference| <= 2 max|stock - reference| + `ulps` eps max|reference|, over the finite
    entries; infinities and NaNs have to be where the stock result has them. Shape, dtype and device
    have to equal the stock result's.

    Args:
        actual: braze's result.
        stock: torch's result at the same dtype and settings.
        reference: torch's result in float64 on the same (rounded) inputs.
    """
    assert actual.shape == stock.shape, f"{what}: shape {actual.shape}, stock {stock.shape}"
    assert actual.dtype == stock.dtype, f"{what}: dtype {actual.dtype}, stock {stock.dtype}"
    assert actual.device == stock.device, f"{what}: device {actual.device}, stock {stock.device}"
    if actual.numel() == 0:
        return
    # The three may live on different devices (a float64 reference made on the CPU).
    a, s, r = (t.detach().to(actual.device, torch.float64) for t in (actual, stock, reference))
    special = ~s.isfinite()
    assert torch.equal(special, ~a.isfinite()), f"{what}: non-finite values at other places"
    assert torch.equal(a[special].nan_to_num(), s[special].nan_to_num()), f"{what}: inf or nan"
    finite = ~special & r.isfinite()
    if not finite.any():
        return
    a, s, r = a[finite], s[finite], r[finite]
    error, stock_error = (a - r).abs().max(), (s - r).abs().max()
    limit = 2 * stock_error + ulps * torch.finfo(stock.dtype).eps * r.abs().max()
    assert error <= limit, f"{what}: error {error:.3e}, stock {stock_error:.3e}, limit {limit:.3e}"


def check_against_stock(braze_fn, stock_fn, inputs, ulps=4, grad_ulps=None, conditioned=False):
    """Runs both functions forward and backward and compares results and gradients by the rule.

    Args:
        braze_fn, stock_fn: take `inputs`, return one tensor.
        inputs: tensors; the floating-point ones get gradients if they require grad.
        ulps, grad_ulps: the floor for the result and for the gradients.
        conditioned: raise the floor to what rounding must cost where terms cancel: twice the change
            of the float64 result when inputs and incoming gradient move by one rounding of the
            arithmetic (float64 for float64 inputs, else float32). Not where ties decide.
    """
    generator = torch.Generator().manual_seed(2)

    def nudge(t, eps):
        sign = 2 * torch.randint(2, t.shape, generator=generator).to(t) - 1
        return t * (1 + eps * sign)

    def run(fn, dtype=None, eps=0.0):
        args = [
            nudge(t.detach().to(dtype or t.dtype), eps).requires_grad_(t.requires_grad)
            if eps and isinstance(t, torch.Tensor) and t.is_floating_point()
            else t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad)
            if isinstance(t, torch.Tensor) and t.is_floating_point()
            else t
            for t in inputs
        ]
        out = fn(*args)
        wanted = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        if not wanted:
            return out, ()
        # Fixed weights, rounded to the result's dtype, so that all three see the same gradient.
        # Where there are many they are drawn on the GPU: the CPU would take seconds.
        place = out.device if out.numel() > 1 << 22 else torch.device("cpu")
        generator = torch.Generator(place).manual_seed(1)
        dtypes = [t.dtype for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64, device=place)
        weight = weight.to(dtypes[0]).to(out)
        weight = nudge(weight, eps) if eps else weight
        return out, torch.autograd.grad(out, wanted, weight)

    actual, actual_grads = run(braze_fn)
    stock, stock_grads = run(stock_fn)
    reference, reference_grads = run(stock_fn, torch.float64)
    moved, moved_grads = reference, reference_grads
    if conditioned:
        arithmetic = torch.float64 if actual.dtype == torch.float64 else torch.float32
        moved, moved_grads = run(stock_fn, torch.float64, torch.finfo(arithmetic).eps)

    def floor(ulps, result, reference, moved):
        """`ulps`, raised to twice the relative change from `reference` to `moved`."""
        largest = reference.abs().max() if reference.numel() else 0
        if moved is reference or not largest or not largest.isfinite():
            return ulps
        change = ((moved - reference).abs().max() / largest).item()
        return max(ulps, 2 * change / torch.finfo(result.dtype).eps)

    assert_by_rule(actual, stock, reference, floor(ulps, stock, reference, moved))
    grads = zip(actual_grads, stock_grads, reference_grads, moved_grads, strict=True)
    for i, (a, s, r, m) in enumerate(grads):
        assert_by_rule(a, s, r, floor(grad_ulps or ulps, s, r, m), what=f"gradient {i}")
    return actual


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
