"""matmul and linear: public functions, autograd Functions, fake kernels. Kernels:
csrc/cuda/matmul/."""

import math

import torch

from braze import _config
from braze._ops._bilinear import Saved, double_backward, masked
from braze._ops._common import autocast_dtype, below_autograd, cast_to, eager, plain, register
from braze._ops.relu import relu, relu_backward

_ops = torch.ops.braze


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, other, allow_tf32=False, deterministic=False, backend="auto"):
        ctx.save_for_backward(input, other)
        ctx.settings = (allow_tf32, deterministic, backend)
        with below_autograd():
            return _ops.matmul.default(input, other, *ctx.settings)

    @staticmethod
    def backward(ctx, grad):
        input, other = ctx.saved_tensors
        if input.dim() == 2 and other.dim() == 2:
            wants_input, wants_other = ctx.needs_input_grad[:2]
            grad_input = _matmul(grad, other.mT, *ctx.settings) if wants_input else None
            grad_other = _matmul(input.mT, grad, *ctx.settings) if wants_other else None
            return grad_input, grad_other, None, None, None
        # As matrices: a vector on the left is a row, on the right a column.
        a, b = input, other
        if b.dim() == 1:
            b, grad = b.unsqueeze(1), grad.unsqueeze(-1)
        if a.dim() == 1:
            a, grad = a.unsqueeze(0), grad.unsqueeze(-2)
        grad_input = grad_other = None
        if ctx.needs_input_grad[0]:
            grad_input = _grad_left(grad, a, b, ctx.settings).reshape(input.shape)
        if ctx.needs_input_grad[1]:
            # (A B)' = B' A': the right operand's gradient is the left one's of the transposes.
            grad_other = _grad_left(grad.mT, b.mT, a.mT, ctx.settings).mT.reshape(other.shape)
        return grad_input, grad_other, None, None, None


def _grad_left(grad, a, b, settings):
    """The gradient of `a` in a @ b, both matrices or batches of them."""
    if a.dim() == 2 and b.dim() > 2:
        # One A for a batch of B: the sum over the batch is a single product of all columns.
        grad, b = _side_by_side(grad), _side_by_side(b)
    return _sum_to(_matmul(grad, b.mT, *settings), a.shape)


def _side_by_side(matrices):
    """The columns of all matrices of a batch, in one."""
    rows = matrices.movedim(-2, 0)
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def _as_rows(t):
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _sum_to(t, shape):
    return t if t.shape == shape else t.sum_to_size(shape)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        bias=None,
        relu=False,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.settings = (allow_tf32, deterministic, backend)
        with below_autograd():
            out = _ops.linear.default(input, weight, bias, relu, *ctx.settings)
        if relu:
            ctx.save_for_backward(input, weight, out)
        else:
            ctx.save_for_backward(input, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        input, weight, *result = ctx.saved_tensors
        mask = (*ctx.needs_input_grad, False)[:3]  # a raw call may have left out the bias
        if result:
            grads = linear_relu_backward(grad, *result, input, weight, mask, *ctx.settings)
        else:
            grads = linear_backward(grad, input, weight, mask, *ctx.settings)
        return *masked(grads, mask), None, None, None, None


class LinearBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        grad_output,
        input,
        weight,
        output_mask,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.settings = (allow_tf32, deterministic, backend)
        ctx.output_mask = output_mask
        ctx.save_for_backward(grad_output, input, weight)
        ctx.set_materialize_grads(False)
        with below_autograd():
            return _ops.linear_backward.default(
                grad_output, input, weight, output_mask, *ctx.settings
            )

    @staticmethod
    def backward(ctx, *grads):
        return *_linear_double_backward(ctx, grads, ctx.settings), None, None, None, None


class LinearReLUBackward(torch.autograd.Function):
    """LinearBackward of relu_backward(grad_output, result), in fewer kernels; its own derivatives
    are those of the two ops. The result enters through its sign only."""

    @staticmethod
    def forward(
        ctx,
        grad_output,
        result,
        input,
        weight,
        output_mask,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        ctx.settings = (allow_tf32, deterministic, backend)
        ctx.output_mask = output_mask
        ctx.save_for_backward(grad_output, result, input, weight)
        ctx.set_materialize_grads(False)
        with below_autograd():
            return _ops.linear_relu_backward.default(
                grad_output, result, input, weight, output_mask, *ctx.settings
            )

    @staticmethod
    def backward(ctx, *grads):
        grad_output, result, input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        passed = Saved(
            (relu_backward(grad_output, result), input, weight),
            ctx.output_mask,
            (wanted[0], *wanted[2:4]),
        )
        d_passed, *d = _linear_double_backward(passed, grads, ctx.settings)
        d_grad = None if d_passed is None else relu_backward(d_passed, result)
        return d_grad, None, *d, None, None, None, None


def _linear_double_backward(ctx, grads, settings):
    return double_backward(
        ctx,
        grads,
        lambda x, w, b: _linear(x, w, b, False, *settings),
        lambda g, x, w, mask: linear_backward(g, x, w, mask, *settings),
        lambda b, like: b.expand_as(like),
    )


def _linear_formula(input, weight, bias=None, relu=False, *settings):
    out = torch.nn.functional.linear(input, weight, bias)
    return torch.relu(out) if relu else out


def _linear_gradients(grad_output, input, weight, output_mask, *settings):
    rows = _as_rows(grad_output)
    return (
        grad_output.matmul(weight) if output_mask[0] else None,
        rows.mT.matmul(_as_rows(input)) if output_mask[1] else None,
        rows.sum(0) if output_mask[2] else None,
    )


def _linear_relu_gradients(grad_output, result, *args):
    return _linear_gradients(relu_backward(grad_output, result), *args)


_matmul = eager(Matmul, _ops.matmul.default, 2, lambda a, b, *settings: torch.matmul(a, b))
_linear = eager(Linear, _ops.linear.default, 3, _linear_formula)
linear_backward = eager(LinearBackward, _ops.linear_backward.default, 3, _linear_gradients)
linear_relu_backward = eager(
    LinearReLUBackward, _ops.linear_relu_backward.default, 4, _linear_relu_gradients
)


def _fake_matmul(input, other, allow_tf32=False, deterministic=False, backend="auto"):
    return input.new_empty(torch.matmul(input, other).shape)


def _fake_linear(input, weight, bias=None, relu=False, *settings):
    return input.new_empty(torch.nn.functional.linear(input, weight, bias).shape)


def _fake_linear_backward(grad_output, input, weight, output_mask, *settings):
    shapes = (input.shape, weight.shape, weight.shape[:1])
    return tuple(
        input.new_empty(s if m else (0,)) for s, m in zip(shapes, output_mask, strict=True)
    )


def _fake_linear_relu_backward(grad_output, result, input, weight, output_mask, *settings):
    return _fake_linear_backward(grad_output, input, weight, output_mask)


def _cast_two(input, other, *rest):
    return *cast_to(autocast_dtype(input), input, other), *rest


def _cast_three(input, weight, bias=None, *rest):
    return *cast_to(autocast_dtype(input), input, weight, bias), *rest


def product_flops(input, *args, out_shape):
    return 2 * math.prod(out_shape) * input[-1]


def _linear_backward_flops(grad_output, input, weight, output_mask, *args, out_shape):
    return 2 * math.prod(grad_output) * input[-1] * sum(output_mask[:2])


register("matmul", fake=_fake_matmul, autograd=_matmul, autocast=_cast_two, flops=product_flops)
register("linear", fake=_fake_linear, autograd=_linear, autocast=_cast_three, flops=product_flops)
register(
    "linear_backward",
    fake=_fake_linear_backward,
    autograd=linear_backward,
    flops=_linear_backward_flops,
)
register(
    "linear_relu_backward",
    fake=_fake_linear_relu_backward,
    autograd=linear_relu_backward,
    flops=lambda grad, result, *args, out_shape: _linear_backward_flops(
        grad, *args, out_shape=out_shape
    ),
)


def settings(input):
    return (
        _config.allow_tf32("matmul", input),
        _config.deterministic(),
        _config.chosen_backend("matmul"),
    )


def matmul(input, other):
    """Matrix product with ``torch.matmul``'s ranks and broadcasting.

    Args:
        input, other: at least one dimension each; the last two are the matrices, the others are
            broadcast; a 1-D tensor is a row on the left, a column on the right. float64, float32,
            bfloat16 or float16, any strides.

    Returns:
        The product, contiguous, in the inputs' dtype. 16-bit inputs are summed in float32; float32
        is rounded to TF32 only where ``torch.backends.cuda.matmul`` allows it. Twice
        differentiable. Bitwise repeatable.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: shapes that do not fit, different dtypes, different devices, or a backend that
            cannot take the arguments.
    """
    if other is None or not plain(input, other):
        return torch.matmul(input, other)
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, other = cast_to(dtype, input, other)
    function = _ops.matmul if torch.compiler.is_compiling() else _matmul
    return function(input, other, *settings(input))


def linear(input, weight, bias=None):
    """input @ weight' + bias over the last dimension, as ``torch.nn.functional.linear``.

    Args:
        input: [..., K], any strides; float64, float32, bfloat16 or float16.
        weight: [N, K], or [K].
        bias: [N], or None; torch computes what more dimensions broadcast to.

    Returns:
        [..., N] ([...] for a weight of shape [K]), contiguous, in the inputs' dtype. Precision,
        repeatability and derivatives as in :func:`braze.matmul`; the bias is added before the
        result is rounded.

    Raises:
        TypeError: input or weight is not a tensor.
        RuntimeError: as :func:`braze.matmul`.
    """
    if weight is None or not plain(input, weight, bias) or _is_matrix(bias):
        return torch.nn.functional.linear(input, weight, bias)
    return _checked_linear(input, weight, bias, False)


def linear_relu(input, weight, bias=None):
    """max(linear(input, weight, bias), 0) as one op; NaN stays NaN.

    The backward zeroes the gradient where the result is, and sums it for the bias, in one pass.

    Args:
        input, weight, bias: as in :func:`linear`.

    Returns:
        As :func:`linear`. The ReLU comes before the result is rounded. Twice differentiable.

    Raises:
        TypeError, RuntimeError: as :func:`linear`.
    """
    if weight is None or not plain(input, weight, bias) or _is_matrix(bias):
        return relu(linear(input, weight, bias))
    return _checked_linear(input, weight, bias, True)


def _is_matrix(bias):
    """Whether a bias is one that torch broadcasts against the rows."""
    return bias is not None and bias.dim() > 1


def _checked_linear(input, weight, bias, with_relu):
    if input.dim() == 0 or weight.dim() == 0:
        raise RuntimeError(
            f"both arguments to linear need to be at least 1D, but they are {input.dim()}D and "
            f"{weight.dim()}D"
        )
    if weight.dim() == 1:
        out = matmul(input, weight)
        out = out if bias is None else out + bias
        return relu(out) if with_relu else out
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = cast_to(dtype, input, weight, bias)
    if bias is not None and bias.numel() == 1:
        bias = bias.expand(weight.shape[0])
    function = _ops.linear if torch.compiler.is_compiling() else _linear
    return function(input, weight, bias, with_relu, *settings(input))
