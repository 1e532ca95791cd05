"""ReLU: public function, autograd Functions, fake kernels. Kernels: csrc/cuda/relu/."""

import torch

from braze._ops._common import below_autograd, eager, overwrite, plain, register

_ops = torch.ops.braze


class ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        with below_autograd():
            result = _ops.relu.default(input)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad_output):
        return relu_backward(grad_output, *ctx.saved_tensors)


class ReLUInplace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ctx.mark_dirty(input)
        with below_autograd():
            _ops.relu_.default(input)
        ctx.save_for_backward(input)
        return input

    @staticmethod
    def backward(ctx, grad_output):
        return relu_backward(grad_output, *ctx.saved_tensors)


class ReLUBackward(torch.autograd.Function):
    """Linear in grad_output; the result enters through its sign only, so its gradient is zero."""

    @staticmethod
    def forward(ctx, grad_output, result):
        ctx.save_for_backward(result)
        with below_autograd():
            return _ops.relu_backward.default(grad_output, result)

    @staticmethod
    def backward(ctx, grad):
        return relu_backward(grad, *ctx.saved_tensors), None


def _overwrite(input):
    overwrite([input], _ops.relu_.default, input)
    return input


def _relu_gradient(grad_output, result):
    return torch.ops.aten.threshold_backward(grad_output, result, 0)


_relu = eager(ReLU, _ops.relu.default, tensors=1, formula=torch.relu)
_relu_inplace = eager(ReLUInplace, _overwrite, tensors=1)
relu_backward = eager(ReLUBackward, _ops.relu_backward.default, tensors=2, formula=_relu_gradient)


def _relu_(input):
    _relu_inplace(input)


register("relu", fake=torch.empty_like, autograd=_relu)
register("relu_", fake=lambda input: None, autograd=_relu_)
register(
    "relu_backward",
    fake=lambda grad_output, result: torch.empty_like(result),
    autograd=relu_backward,
)


def relu(input, inplace=False):
    """max(input, 0) element by element; NaN stays NaN. As ``torch.nn.functional.relu``.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.
        inplace: overwrite `input` and return it.

    Returns:
        Same shape, dtype and memory format as `input`. Bitwise repeatable. Twice differentiable.

    Raises:
        RuntimeError: `inplace` on an inference tensor outside of inference mode, or on a tensor
            whose elements share memory.
    """
    if not plain(input):
        return torch.nn.functional.relu(input, inplace)
    if torch.compiler.is_compiling():
        # The compiler turns the copy into an overwrite where it can.
        return input.copy_(_ops.relu(input)) if inplace else _ops.relu(input)
    return _relu_inplace(input) if inplace else _relu(input)
