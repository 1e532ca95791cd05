"""The activations beside ReLU: public functions, autograd Function, fake kernels. Kernels:
csrc/cuda/activation/."""

import torch
from torch.nn import functional as stock

from braze._ops._common import below_autograd, eager, eager_backward, plain, register
from braze._ops.activation import Activation, are_numbers, in_torch, passed_back
from braze._ops.activation import activation as activation_of

_ops = torch.ops.braze


class ActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, name, first, second):
        ctx.save_for_backward(input)
        ctx.act = name, first, second
        with below_autograd():
            return _ops.activation.default(input, name, first, second)

    @staticmethod
    def backward(ctx, grad_output):
        return _activation_backward(grad_output, *ctx.saved_tensors, *ctx.act), None, None, None


def _in_torch(input, *act):
    return in_torch(Activation(*act), input)


def _formula(grad_output, input, *act):
    return passed_back(Activation(*act), grad_output, input)


_activation = eager(ActivationFunction, _ops.activation.default, tensors=1, formula=_in_torch)
_activation_backward = eager_backward(
    ActivationFunction, _ops.activation_backward.default, 2, formula=_formula
)
register("activation", fake=lambda input, *_: torch.empty_like(input), autograd=_activation)
register(
    "activation_backward",
    fake=lambda grad_output, input, *_: torch.empty_like(input),
    autograd=_activation_backward,
)


def _apply(input, name, *settings):
    act = activation_of(name, *settings)
    if torch.compiler.is_compiling():
        return _ops.activation(input, *act)
    return _activation(input, *act)


def relu6(input, inplace=False):
    """min(max(input, 0), 6). As ``torch.nn.functional.relu6``.

    In place, torch's own function runs. All else, of the other activations too, is as
    :func:`braze.nn.functional.relu` has it, but that the second derivative and all further ones are
    made of torch's ops.
    """
    if inplace or not plain(input):
        return stock.relu6(input, inplace)
    return _apply(input, "relu6")


def hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False):
    """min(max(input, min_val), max_val). As ``torch.nn.functional.hardtanh``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input) or not are_numbers(min_val, max_val):
        return stock.hardtanh(input, min_val, max_val, inplace)
    return _apply(input, "hardtanh", min_val, max_val)


def leaky_relu(input, negative_slope=0.01, inplace=False):
    """input, times the slope where it is negative. As ``torch.nn.functional.leaky_relu``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input) or not are_numbers(negative_slope):
        return stock.leaky_relu(input, negative_slope, inplace)
    return _apply(input, "leaky_relu", negative_slope)


def silu(input, inplace=False):
    """input * sigmoid(input). As ``torch.nn.functional.silu``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input):
        return stock.silu(input, inplace)
    return _apply(input, "silu")


def gelu(input, *, approximate="none"):
    """input times the cumulative normal distribution at it. As ``torch.nn.functional.gelu``.

    Args:
        input: as of :func:`relu6`, like the result and its derivatives.
        approximate: "tanh" for the formula with tanh (Hendrycks and Gimpel, 2016), or "none".
    """
    if not plain(input) or not isinstance(approximate, str):
        return stock.gelu(input, approximate=approximate)
    return _apply(input, "gelu", approximate)


def hardswish(input, inplace=False):
    """input * relu6(input + 3) / 6. As ``torch.nn.functional.hardswish``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input):
        return stock.hardswish(input, inplace)
    return _apply(input, "hardswish")


def hardsigmoid(input, inplace=False):
    """relu6(input + 3) / 6. As ``torch.nn.functional.hardsigmoid``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input):
        return stock.hardsigmoid(input, inplace)
    return _apply(input, "hardsigmoid")


def sigmoid(input):
    """1 / (1 + exp(-input)). As ``torch.nn.functional.sigmoid``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    return _apply(input, "sigmoid") if plain(input) else stock.sigmoid(input)


def tanh(input):
    """The hyperbolic tangent. As ``torch.nn.functional.tanh``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    return _apply(input, "tanh") if plain(input) else stock.tanh(input)


def elu(input, alpha=1.0, inplace=False):
    """input, or alpha * (exp(input) - 1) where it is negative. As ``torch.nn.functional.elu``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input) or not are_numbers(alpha):
        return stock.elu(input, alpha, inplace)
    return _apply(input, "elu", alpha)


def celu(input, alpha=1.0, inplace=False):
    """input, or alpha * (exp(input / alpha) - 1) where it is negative. As
    ``torch.nn.functional.celu``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input) or not are_numbers(alpha):
        return stock.celu(input, alpha, inplace)
    return _apply(input, "celu", alpha)


def mish(input, inplace=False):
    """input * tanh(log(1 + exp(input))). As ``torch.nn.functional.mish``.

    Dtypes, shapes and derivatives as of :func:`relu6`.
    """
    if inplace or not plain(input):
        return stock.mish(input, inplace)
    return _apply(input, "mish")
