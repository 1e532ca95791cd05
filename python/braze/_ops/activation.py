"""Activations as parameters of other ops: names, settings, and what they are in torch."""

import typing

import torch
from torch.nn import functional as stock


class Activation(typing.NamedTuple):
    """An activation as the ops take it: csrc/ops/activation.h."""

    name: str
    first: float = 0.0
    second: float = 0.0


def _hardtanh(min_val=-1.0, max_val=1.0):
    if min_val > max_val:
        raise ValueError("min_val cannot be greater than max_val")
    return Activation("hardtanh", float(min_val), float(max_val))


def _celu(alpha=1.0):
    if alpha == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")
    return Activation("elu", float(alpha), 1 / alpha)


def _gelu(approximate="none"):
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return Activation("gelu" if approximate == "none" else "gelu_tanh")


#: by torch's names of the functions, what takes their settings, under torch's names and defaults
_MAKERS = {
    "celu": _celu,
    "elu": lambda alpha=1.0: Activation("elu", float(alpha), 1.0),
    "gelu": _gelu,
    "hardsigmoid": lambda: Activation("hardsigmoid"),
    "hardswish": lambda: Activation("hardswish"),
    "hardtanh": _hardtanh,
    "identity": lambda: Activation("identity"),
    "leaky_relu": lambda negative_slope=0.01: Activation("leaky_relu", float(negative_slope)),
    "mish": lambda: Activation("mish"),
    "relu": lambda: Activation("relu"),
    "relu6": lambda: Activation("hardtanh", 0.0, 6.0),
    "sigmoid": lambda: Activation("sigmoid"),
    "silu": lambda: Activation("silu"),
    "tanh": lambda: Activation("tanh"),
}
NAMES = tuple(_MAKERS)


def activation(name, *settings):
    """The activation of torch's name, with the settings of ``torch.nn.functional``'s function.

    Raises:
        ValueError: a name that is none of :data:`NAMES`.
    """
    if name not in _MAKERS:
        raise ValueError(f"expected activation to be one of {', '.join(NAMES)}, but got {name!r}")
    return _MAKERS[name](*settings)


def are_numbers(*settings):
    """Whether settings are what Python's numbers may be; torch refuses, or takes, all others."""
    return all(isinstance(setting, (float, int)) for setting in settings)


def fits(name, settings):
    """Whether the activation of torch's name takes such settings."""
    if name != "gelu" and not are_numbers(*settings):
        return False
    try:
        activation(name, *settings)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def in_torch(act, v):
    """The activation of `v` by torch's own function."""
    name, first, second = act
    if name == "identity":
        return v
    if name == "hardtanh":
        return stock.hardtanh(v, first, second)
    if name == "leaky_relu":
        return stock.leaky_relu(v, first)
    if name == "gelu_tanh":
        return stock.gelu(v, approximate="tanh")
    if name == "elu":
        return stock.elu(v, first) if second == 1 else stock.celu(v, first)
    return _PLAIN[name](v)


_PLAIN = {
    "gelu": stock.gelu,
    "hardsigmoid": stock.hardsigmoid,
    "hardswish": stock.hardswish,
    "mish": stock.mish,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": stock.silu,
    "tanh": torch.tanh,
}


def passed_back(act, grad, v):
    """The gradient before the activation, in torch's ops, which differentiate it further.

    Args:
        grad: of the result.
        v: what the activation was applied to.
    """
    name, first, second = act
    aten = torch.ops.aten
    if name == "identity":
        return grad
    if name == "relu":
        return aten.threshold_backward(grad, v, 0)
    if name == "hardtanh":
        return aten.hardtanh_backward(grad, v, first, second)
    if name == "leaky_relu":
        return aten.leaky_relu_backward(grad, v, first, False)
    if name in ("gelu", "gelu_tanh"):
        return aten.gelu_backward(grad, v, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "elu":
        return aten.elu_backward(grad, first, 1, second, False, v)
    if name == "hardswish":
        return aten.hardswish_backward(grad, v)
    # Those whose backward torch has no derivative of.
    return grad * _SLOPES[name](v)


def _silu_slope(v):
    s = torch.sigmoid(v)
    return s * (1 + v * (1 - s))


def _mish_slope(v):
    t = torch.tanh(stock.softplus(v))
    return t + v * torch.sigmoid(v) * (1 - t * t)


_SLOPES = {
    "hardsigmoid": lambda v: ((v > -3) & (v < 3)) / 6,
    "mish": _mish_slope,
    "sigmoid": lambda v: torch.sigmoid(v) * (1 - torch.sigmoid(v)),
    "silu": _silu_slope,
    "tanh": lambda v: 1 - torch.tanh(v) ** 2,
}
