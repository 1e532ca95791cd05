"""softmax and log_softmax: public functions, autograd Functions, fakes. Kernels:
csrc/cuda/softmax/."""

import warnings

import torch

from braze import _config
from braze._ops._common import HALF_DTYPES, below_autograd, eager, plain, register

_ops = torch.ops.braze


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, dim, dtype=None):
        with below_autograd():
            result = _ops.softmax.default(input, dim, dtype)
        ctx.save_for_backward(result)
        ctx.dim, ctx.input_dtype = dim, input.dtype
        return result

    @staticmethod
    def backward(ctx, grad_output):
        (result,) = ctx.saved_tensors
        return _softmax_backward(grad_output, result, ctx.dim, ctx.input_dtype), None, None


class SoftmaxRung(Softmax):
    """By the kernel that `backend` names; the backward is softmax's."""

    @staticmethod
    def forward(ctx, input, dim, dtype=None, backend="auto"):
        with below_autograd():
            result = _ops.softmax_rung.default(input, dim, dtype, backend)
        ctx.save_for_backward(result)
        ctx.dim, ctx.input_dtype = dim, input.dtype
        return result

    @staticmethod
    def backward(ctx, grad_output):
        return *Softmax.backward(ctx, grad_output), None


class SoftmaxBackward(torch.autograd.Function):
    """y (dy - sum(dy y)): symmetric in dy, quadratic in y."""

    @staticmethod
    def forward(ctx, grad_output, output, dim, input_dtype):
        ctx.save_for_backward(grad_output, output)
        ctx.dim, ctx.input_dtype = dim, input_dtype
        with below_autograd():
            return _ops.softmax_backward.default(grad_output, output, dim, input_dtype)

    @staticmethod
    def backward(ctx, grad):
        dy, y = ctx.saved_tensors
        v = grad.to(y.dtype)
        grad_dy = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_dy = _softmax_backward(v, y, ctx.dim, y.dtype)
        if ctx.needs_input_grad[1]:
            inner = (dy * y).sum(ctx.dim, keepdim=True)
            grad_y = v * (dy - inner) - (v * y).sum(ctx.dim, keepdim=True) * dy
        return grad_dy, grad_y, None, None


class LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, dim, dtype=None):
        with below_autograd():
            result = _ops.log_softmax.default(input, dim, dtype)
        ctx.save_for_backward(result)
        ctx.dim, ctx.input_dtype = dim, input.dtype
        return result

    @staticmethod
    def backward(ctx, grad_output):
        (result,) = ctx.saved_tensors
        return _log_softmax_backward(grad_output, result, ctx.dim, ctx.input_dtype), None, None


class LogSoftmaxBackward(torch.autograd.Function):
    """dy - exp(y) sum(dy)."""

    @staticmethod
    def forward(ctx, grad_output, output, dim, input_dtype):
        ctx.save_for_backward(grad_output, output)
        ctx.dim, ctx.input_dtype = dim, input_dtype
        with below_autograd():
            return _ops.log_softmax_backward.default(grad_output, output, dim, input_dtype)

    @staticmethod
    def backward(ctx, grad):
        dy, y = ctx.saved_tensors
        v = grad.to(y.dtype)
        weighted = v * y.exp()
        grad_dy = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_dy = v - weighted.sum(ctx.dim, keepdim=True)
        if ctx.needs_input_grad[1]:
            grad_y = -weighted * dy.sum(ctx.dim, keepdim=True)
        return grad_dy, grad_y, None, None


def _rung_formula(input, dim, dtype=None, backend="auto"):
    return torch.softmax(input, dim, dtype)


_aten = torch.ops.aten
_softmax = eager(Softmax, _ops.softmax.default, 1, torch.softmax)
_softmax_rung = eager(SoftmaxRung, _ops.softmax_rung.default, 1, _rung_formula)
_softmax_backward = eager(
    SoftmaxBackward, _ops.softmax_backward.default, 2, _aten._softmax_backward_data
)
_log_softmax = eager(LogSoftmax, _ops.log_softmax.default, 1, torch.log_softmax)
_log_softmax_backward = eager(
    LogSoftmaxBackward, _ops.log_softmax_backward.default, 2, _aten._log_softmax_backward_data
)


def _fake(input, dim, dtype=None, backend="auto"):
    return torch.empty_like(input, dtype=dtype)


def _fake_backward(grad_output, output, dim, input_dtype):
    return torch.empty_like(output, dtype=input_dtype)


def _autocast_dtype(input):
    """float32 where autocast is on: torch casts both functions on CUDA, neither on the CPU."""
    if input.is_cuda and input.dtype in HALF_DTYPES and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return None


def _autocast(input, dim, dtype=None):
    return input, dim, _autocast_dtype(input) if dtype is None else dtype


register("softmax", fake=_fake, autograd=_softmax, autocast=_autocast)
register("softmax_rung", fake=_fake, autograd=_softmax_rung)
register("log_softmax", fake=_fake, autograd=_log_softmax, autocast=_autocast)
register("softmax_backward", fake=_fake_backward, autograd=_softmax_backward)
register("log_softmax_backward", fake=_fake_backward, autograd=_log_softmax_backward)


def _apply(name, function, op, input, dim, stacklevel, dtype, *backend):
    dims = input.dim() or 1
    if dim is None:
        warnings.warn(
            f"Implicit dimension choice for {name} has been deprecated. "
            "Change the call to include dim=X as an argument.",
            stacklevel=stacklevel + 1,
        )
        dim = 0 if input.dim() in (0, 1, 3) else 1
    if not -dims <= dim < dims:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], "
            f"but got {dim})"
        )
    if dtype is None:
        dtype = _autocast_dtype(input)
    elif dtype == input.dtype:
        dtype = None
    elif not (dtype == torch.float32 and input.dtype in HALF_DTYPES):  # that one is fused
        input, dtype = input.to(dtype), None
    if torch.compiler.is_compiling():
        return op(input, dim, dtype, *backend)
    return function(input, dim, dtype, *backend)


def softmax(input, dim=None, _stacklevel=3, dtype=None):
    """exp(x) / sum(exp(x)) along `dim`. As ``torch.nn.functional.softmax``.

    The maximum and the sum are found in one pass (Milakov and Gimelshein, 2018). 16-bit inputs are
    computed in float32. Under CUDA autocast 16-bit inputs give float32, as in torch.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.
        dim: the dimension that sums to 1; None warns and takes 0 for 0, 1 or 3 dimensions, else 1.
        dtype: the input is cast to it first.

    Returns:
        Same shape and memory format as `input`. Bitwise repeatable. Twice differentiable.

    Raises:
        IndexError: no such dimension.
        RuntimeError: a kernel was chosen (:class:`braze.backend`) that cannot take the arguments.
    """
    if not plain(input):
        return torch.nn.functional.softmax(input, dim, _stacklevel + 1, dtype)
    backend = _config.chosen_backend("softmax")
    if backend != "auto":
        rung = _softmax_rung, _ops.softmax_rung
        return _apply("softmax", *rung, input, dim, _stacklevel, dtype, backend)
    return _apply("softmax", _softmax, _ops.softmax, input, dim, _stacklevel, dtype)


def log_softmax(input, dim=None, _stacklevel=3, dtype=None):
    """x - log(sum(exp(x))) along `dim`. As ``torch.nn.functional.log_softmax``.

    Arguments, result and errors as :func:`softmax`.
    """
    if not plain(input):
        return torch.nn.functional.log_softmax(input, dim, _stacklevel + 1, dtype)
    return _apply("log_softmax", _log_softmax, _ops.log_softmax, input, dim, _stacklevel, dtype)
