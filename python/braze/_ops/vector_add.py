"""vector_add: public function, autograd Function, fake kernel. Kernels:
csrc/cuda/vector_add/."""

import torch

from braze import _config
from braze._ops._common import below_autograd, check_tensor, eager, plain, register

_ops = torch.ops.braze


class VectorAdd(torch.autograd.Function):
    """The gradient passes to both, so that the backward runs no kernel."""

    @staticmethod
    def forward(ctx, a, b, backend="auto"):
        with below_autograd():
            return _ops.vector_add.default(a, b, backend)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, grad_output, None


_vector_add = eager(VectorAdd, _ops.vector_add.default, tensors=2)
register(
    "vector_add",
    fake=lambda a, b, backend="auto": torch.empty_like(a),
    autograd=_vector_add,
)


def vector_add(a, b):
    """a + b for two tensors of one shape and dtype: no broadcasting, no promotion.

    Args:
        a, b: the same shape and dtype, any strides; float64, float32, bfloat16 or float16. 16-bit
            elements are added in float32 and rounded once, as ``torch.add`` does.

    Returns:
        The sum, in the memory format of `a`. Bitwise repeatable. Differentiable any number of
        times.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: different shapes, dtypes or devices, or an unknown backend.
    """
    if b is None or not plain(a, b):
        check_tensor("vector_add", "a", 1, a)
        check_tensor("vector_add", "b", 2, b)
        return torch.add(a, b)
    function = _ops.vector_add if torch.compiler.is_compiling() else _vector_add
    return function(a, b, _config.chosen_backend("vector_add"))
