"""activation(input + bias) as one op: public function, autograd Function, fake kernels. Kernels:
csrc/cuda/bias_activation/."""

import torch

from braze._ops._bilinear import masked
from braze._ops._common import (
    HALF_DTYPES,
    below_autograd,
    check_tensor,
    eager,
    eager_backward,
    plain,
    register,
)
from braze._ops.activation import Activation, in_torch, passed_back
from braze._ops.activation import activation as activation_of

_ops = torch.ops.braze


class BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, bias, activation, first, second):
        ctx.save_for_backward(input, bias)
        ctx.act = activation, first, second
        with below_autograd():
            return _ops.bias_activation.default(input, bias, *ctx.act)

    @staticmethod
    def backward(ctx, grad_output):
        mask = ctx.needs_input_grad[:2]
        grads = _bias_activation_backward(grad_output, *ctx.saved_tensors, *ctx.act, mask)
        return *masked(grads, mask), None, None, None


def _formula(input, bias, *act):
    return in_torch(Activation(*act), input + bias.to(input.dtype))


def _gradients(grad_output, input, bias, activation, first, second, output_mask):
    """The backward in torch's ops, to be differentiated by them."""
    act = Activation(activation, first, second)
    grad = passed_back(act, grad_output, input + bias.to(input.dtype))
    of_input, of_bias = output_mask
    return (
        grad if of_input else None,
        grad.to(bias.dtype).sum_to_size(bias.shape) if of_bias else None,
    )


_bias_activation = eager(BiasActivation, _ops.bias_activation.default, tensors=2, formula=_formula)
_bias_activation_backward = eager_backward(
    BiasActivation, _ops.bias_activation_backward.default, tensors=3, formula=_gradients
)


def _fake_backward(grad_output, input, bias, activation, first, second, output_mask):
    of_input, of_bias = output_mask
    return (
        input.new_empty(input.shape if of_input else [0]),
        bias.new_empty(bias.shape if of_bias else [0]),
    )


register(
    "bias_activation",
    fake=lambda input, bias, *_: input.new_empty(input.shape),
    autograd=_bias_activation,
)
register("bias_activation_backward", fake=_fake_backward, autograd=_bias_activation_backward)


def bias_activation(input, bias, activation="gelu", settings=()):
    """``activation(input + bias)`` as one op, with the bias along the last dimension.

    The backward makes the gradients of both in one pass; nothing but `input` and `bias` is kept.

    Args:
        input: [..., C], any strides; float64, float32, bfloat16 or float16.
        bias: [C], of input's dtype or, for 16-bit input, float32, which is not rounded then.
        activation, settings: as in :func:`braze.nn.functional.batch_norm_act`.

    Returns:
        Of input's shape and dtype, contiguous; rounded once. Bitwise repeatable. Differentiable
        with respect to both; the second derivative and all further ones are made of torch's ops.
        Other shapes and dtypes are computed, or refused, by torch.

    Raises:
        ValueError: an activation of another name.
        TypeError: an argument is not a tensor.
        RuntimeError: shapes that do not broadcast.
    """
    act = activation_of(activation, *settings)
    check_tensor("bias_activation", "input", 1, input)
    check_tensor("bias_activation", "bias", 2, bias)
    if not _takes(input, bias):
        return in_torch(act, input + bias)
    function = _ops.bias_activation if torch.compiler.is_compiling() else _bias_activation
    return function(input, bias, *act)


def _takes(input, bias):
    own = input.dtype
    dtypes = (own, torch.float32) if own in HALF_DTYPES else (own,)
    return (
        plain(input, bias)
        and bias.dtype in dtypes
        and input.device == bias.device
        and input.dim() > 0
        and bias.shape == input.shape[-1:]
    )
