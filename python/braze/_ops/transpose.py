"""transpose_copy: public function, autograd Function, fake kernel. Kernels:
csrc/cuda/transpose/."""

import torch

from braze import _config
from braze._ops._common import below_autograd, check_tensor, eager, plain, register

_ops = torch.ops.braze


class TransposeCopy(torch.autograd.Function):
    """Its own adjoint."""

    @staticmethod
    def forward(ctx, input, backend="auto"):
        ctx.backend = backend
        with below_autograd():
            return _ops.transpose_copy.default(input, backend)

    @staticmethod
    def backward(ctx, grad_output):
        return _transpose_copy(grad_output, ctx.backend), None


def _formula(input, backend="auto"):
    return torch.transpose(input, -2, -1).contiguous()


_transpose_copy = eager(TransposeCopy, _ops.transpose_copy.default, 1, _formula)
register(
    "transpose_copy",
    fake=lambda input, backend="auto": input.new_empty(
        (*input.shape[:-2], input.size(-1), input.size(-2))
    ),
    autograd=_transpose_copy,
)


def transpose_copy(input):
    """The last two dimensions swapped, in a new contiguous tensor.

    The same values as ``input.transpose(-2, -1).contiguous()``.

    Args:
        input: two or more dimensions, any strides; float64, float32, bfloat16 or float16.

    Returns:
        [..., cols, rows] for an input [..., rows, cols]. Exact. Differentiable any number of times.

    Raises:
        TypeError: `input` is not a tensor.
        RuntimeError: fewer than two dimensions, or a backend that cannot take them.
    """
    if not plain(input):
        check_tensor("transpose_copy", "input", 1, input)
        return _formula(input)
    function = _ops.transpose_copy if torch.compiler.is_compiling() else _transpose_copy
    return function(input, _config.chosen_backend("transpose_copy"))
