"""Products with the full epilogue, and linear layers fused by it: linear_add, linear_relu_linear.
Kernels: csrc/cuda/matmul/; front end: csrc/ops/linear_fused.cpp."""

import torch

from braze._ops._bilinear import masked
from braze._ops._common import (
    autocast_dtype,
    below_autograd,
    cast_to,
    check_tensor,
    eager,
    plain,
    register,
)
from braze._ops.matmul import (
    linear,
    linear_backward,
    linear_relu,
    linear_relu_backward,
    product_flops,
    settings,
)
from braze._ops.relu import relu_backward

_ops = torch.ops.braze


class MatmulEpilogue(torch.autograd.Function):
    """input @ other + bias + residual, through a ReLU, zeroed where relu_result is, and the sums of
    its columns and rows; each part if it is wanted."""

    @staticmethod
    def forward(
        ctx,
        input,
        other,
        bias=None,
        residual=None,
        relu_result=None,
        relu=False,
        column_sums=False,
        row_sums=False,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.settings = (allow_tf32, deterministic, backend)
        ctx.sums = (column_sums, row_sums)
        ctx.set_materialize_grads(False)
        with below_autograd():
            results = _ops.matmul_epilogue.default(
                input, other, bias, residual, relu_result, relu, *ctx.sums, *ctx.settings
            )
        # Behind both, the output is zero where either zeroes the gradient.
        ctx.save_for_backward(input, other, results[0] if relu else relu_result)
        return results

    @staticmethod
    def backward(ctx, grad, grad_columns, grad_rows):
        input, other, result = ctx.saved_tensors
        column_sums, row_sums = ctx.sums
        terms = [] if grad is None else [grad]
        shape = (*input.shape[:-1], other.shape[1])
        if column_sums and grad_columns is not None:
            terms.append(grad_columns.expand(shape))
        if row_sums and grad_rows is not None:
            terms.append(grad_rows.unsqueeze(-1).expand(shape))
        if not terms:
            return (None,) * 11
        grad = sum(terms[1:], start=terms[0])
        if result is not None:
            grad = relu_backward(grad, result)
        # A raw call may have left out what is optional.
        *mask, wants_residual = (*ctx.needs_input_grad, False, False)[:4]
        d_input = d_other = d_bias = None
        if any(mask):
            grads = linear_backward(grad, input, other.mT, mask, *ctx.settings)
            d_input, d_other, d_bias = masked(grads, mask)
            d_other = None if d_other is None else d_other.mT
        return d_input, d_other, d_bias, grad if wants_residual else None, *(None,) * 7


# Where linear_backward and linear_relu_backward are one launch each on a GPU (kMostRows and
# kMostOutputs in csrc/cuda/matmul/linear_gradients.cu), two of them beat the fused epilogue.
_FEW_ROWS, _FEW_OUTPUTS = 128, 512


class LinearReLULinear(torch.autograd.Function):
    """The output and the hidden layer, the ReLU's result. In the backward the product that makes
    the hidden layer's gradient takes the ReLU's, and the bias gradient below it, as epilogue."""

    @staticmethod
    def forward(
        ctx,
        input,
        weight1,
        bias1,
        weight2,
        bias2=None,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.settings = (allow_tf32, deterministic, backend)
        ctx.set_materialize_grads(False)
        with below_autograd():
            out, hidden = _ops.linear_relu_linear.default(
                input, weight1, bias1, weight2, bias2, *ctx.settings
            )
        ctx.save_for_backward(input, weight1, weight2, hidden)
        return out, hidden

    @staticmethod
    def backward(ctx, grad, grad_hidden):
        input, weight1, weight2, hidden = ctx.saved_tensors
        wanted = (*ctx.needs_input_grad, False)  # a raw call may have left out the last bias
        below, upper = wanted[:3], wanted[3:5]
        d_below, d_upper = (None, None, None), (None, None)
        if grad is None:
            if grad_hidden is not None and any(below):
                grads = linear_relu_backward(
                    grad_hidden, hidden, input, weight1, below, *ctx.settings
                )
                d_below = masked(grads, below)
            return *d_below, *d_upper, None, None, None
        if any(below) and not _one_by_one(ctx.settings, hidden, weight2):
            d_passed, d_bias1, _ = _matmul_epilogue(
                grad, weight2, None, grad_hidden, hidden, False, below[2], False, *ctx.settings
            )
            if any(upper):
                grads = linear_backward(grad, hidden, weight2, (False, *upper), *ctx.settings)
                d_upper = masked(grads, (False, *upper))[1:]
            mask = (*below[:2], False)
            d_below = (None, None, d_bias1 if below[2] else None)
            if any(mask):
                grads = linear_backward(d_passed, input, weight1, mask, *ctx.settings)
                d_below = (*masked(grads, mask)[:2], d_below[2])
            return *d_below, *d_upper, None, None, None
        mask = (any(below), *upper)
        grads = linear_backward(grad, hidden, weight2, mask, *ctx.settings)
        d_hidden, *d_upper = masked(grads, mask)
        if any(below):
            if grad_hidden is not None:
                d_hidden = d_hidden + grad_hidden
            grads = linear_relu_backward(d_hidden, hidden, input, weight1, below, *ctx.settings)
            d_below = masked(grads, below)
        return *d_below, *d_upper, None, None, None


def _one_by_one(settings, hidden, weight2):
    """Whether the gradients of the two layers are better taken one after the other: also where a
    kernel or library was named, which may not have the epilogue."""
    if settings[2] not in ("auto", "braze"):
        return True
    outputs, width = weight2.shape
    rows = hidden.numel() // max(1, width)
    return hidden.is_cuda and rows <= _FEW_ROWS and max(outputs, width) <= _FEW_OUTPUTS


def _epilogue_formula(
    input,
    other,
    bias=None,
    residual=None,
    relu_result=None,
    relu=False,
    column_sums=False,
    row_sums=False,
    *settings,
):
    out = torch.matmul(input, other)
    for term in (bias, residual):
        out = out if term is None else out + term
    out = torch.relu(out) if relu else out
    out = out if relu_result is None else relu_backward(out, relu_result)
    columns = out.sum_to_size(out.shape[-1:]) if column_sums else None
    return out, columns, out.sum(-1) if row_sums else None


_matmul_epilogue = eager(MatmulEpilogue, _ops.matmul_epilogue.default, 5, _epilogue_formula)
_linear_relu_linear = eager(LinearReLULinear, _ops.linear_relu_linear.default, tensors=5)


def _fake_matmul_epilogue(
    input,
    other,
    bias=None,
    residual=None,
    relu_result=None,
    relu=False,
    column_sums=False,
    row_sums=False,
    *settings,
):
    out = input.new_empty(torch.matmul(input, other).shape)
    for name, t, shape in (
        ("bias", bias, out.shape[-1:]),
        ("residual", residual, out.shape),
        ("relu_result", relu_result, out.shape),
    ):
        if t is not None:
            _check_shape("matmul_epilogue", name, t, shape)
    columns = input.new_empty(out.shape[-1:] if column_sums else (0,))
    rows = input.new_empty(out.shape[:-1] if row_sums else (0,))
    return out, columns, rows


def _fake_linear_relu_linear(input, weight1, bias1, weight2, bias2=None, *settings):
    hidden = torch.nn.functional.linear(input, weight1, bias1)
    out = torch.nn.functional.linear(hidden, weight2, bias2)
    return input.new_empty(out.shape), input.new_empty(hidden.shape)


def _cast_five(a, b, c=None, d=None, e=None, *rest):
    return *cast_to(autocast_dtype(a), a, b, c, d, e), *rest


def _linear_relu_linear_flops(input, *args, out_shape):
    out, hidden = out_shape
    return product_flops(input, out_shape=hidden) + product_flops(hidden, out_shape=out)


register(
    "matmul_epilogue",
    fake=_fake_matmul_epilogue,
    autograd=_matmul_epilogue,
    autocast=_cast_five,
    flops=lambda input, *args, out_shape: product_flops(input, out_shape=out_shape[0]),
)
register(
    "linear_relu_linear",
    fake=_fake_linear_relu_linear,
    autograd=_linear_relu_linear,
    autocast=_cast_five,
    flops=_linear_relu_linear_flops,
)


def linear_add(input, weight, bias, residual):
    """linear(input, weight, bias) + residual as one op.

    Args:
        input, weight, bias: as in :func:`linear`; weight is [N, K].
        residual: of the result's shape, [..., N], any strides.

    Returns:
        As :func:`linear`. The residual is added before the result is rounded. Twice differentiable.
        Under autocast the residual is cast as the others are.

    Raises:
        TypeError, RuntimeError: as :func:`linear`; RuntimeError for a residual of another shape.
    """
    if weight is None or residual is None or not plain(input, weight, bias, residual):
        check_tensor("linear_add", "residual", 4, residual)
        return linear(input, weight, bias) + residual
    _check_dims("linear_add", input, weight=weight)
    _check_shape("linear_add", "residual", residual, (*input.shape[:-1], weight.shape[0]))
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias, residual = cast_to(dtype, input, weight, bias, residual)
    bias = _expanded(bias, weight)
    function = _ops.matmul_epilogue if torch.compiler.is_compiling() else _matmul_epilogue
    parts = (bias, residual, None, False, False, False)
    return function(input, weight.mT, *parts, *settings(input))[0]


def linear_relu_linear(input, weight1, bias1, weight2, bias2=None):
    """linear(max(linear(input, weight1, bias1), 0), weight2, bias2), the two-layer perceptron, as
    one op.

    In the backward the hidden layer's gradient leaves its product with the ReLU's gradient taken
    and already summed for `bias1`: no pass over it remains.

    Args:
        input: [..., K], any strides; float64, float32, bfloat16 or float16.
        weight1, bias1: [H, K] and [H], or None for the bias.
        weight2, bias2: [N, H] and [N], or None for the bias.

    Returns:
        [..., N], contiguous, in the inputs' dtype; the hidden layer is rounded to it. Precision,
        repeatability and derivatives as in :func:`braze.matmul`.

    Raises:
        TypeError, RuntimeError: as :func:`linear`.
    """
    if weight1 is None or weight2 is None or not plain(input, weight1, bias1, weight2, bias2):
        return linear(linear_relu(input, weight1, bias1), weight2, bias2)
    _check_dims("linear_relu_linear", input, weight1=weight1, weight2=weight2)
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight1, bias1, weight2, bias2 = cast_to(
            dtype, input, weight1, bias1, weight2, bias2
        )
    bias1, bias2 = _expanded(bias1, weight1), _expanded(bias2, weight2)
    function = _ops.linear_relu_linear if torch.compiler.is_compiling() else _linear_relu_linear
    return function(input, weight1, bias1, weight2, bias2, *settings(input))[0]


def _expanded(bias, weight):
    """A bias of one element for all outputs, as linear takes it."""
    if bias is not None and bias.numel() == 1:
        return bias.expand(weight.shape[0])
    return bias


def _check_dims(function, input, **weights):
    if input.dim() == 0:
        raise RuntimeError(f"{function}: expected input to be at least 1D, but got 0D")
    for name, weight in weights.items():
        if weight.dim() != 2:
            raise RuntimeError(f"{function}: expected {name} to be 2D, but got {weight.dim()}D")


def _check_shape(function, argument, t, shape):
    if tuple(t.shape) != tuple(shape):
        raise RuntimeError(
            f"{function}: expected {argument} to have shape {list(shape)}, but got {list(t.shape)}"
        )
