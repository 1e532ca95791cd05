"""Chains of calls of layers and functions: which of them are runs that are one op."""

import ast
import functools
import inspect
import itertools
import types
import typing

import torch

from braze._ops.activation import fits
from braze.convert import kinds, runs
from braze.convert.modules import is_container
from braze.nn import functional as F

FUNCTIONS = str, types.FunctionType, types.BuiltinFunctionType
VARIABLE = object()  # what constant() returns of anything else


class Link(typing.NamedTuple):
    """A call of a layer or of a function, or an addition, as part of a chain.

    Attributes:
        number: the call, by its place in the tree.
        form: ``"layer"``, ``"function"`` or ``"method"`` of a tensor; of additions, ``"add"``
            (to what comes before in the chain), ``"radd"`` (of that to something) or ``"iadd"``.
        kind: what it computes, see kinds.py.
        layers: the layers that it may call, with their names; empty for functions.
        name: of the function.
    """

    number: int
    form: str
    kind: str
    layers: tuple
    name: str


def analyse_children(module, kind_of):
    """The runs among the children of a Sequential, as :class:`Found` has them."""
    children = module.__dict__["_modules"].items() if is_container(module) else ()
    return runs_among(children, kind_of)


def runs_among(layers, kind_of):
    links = [Link(0, "layer", kind_of(m), ((name, m),), "") for name, m in layers]
    found, at = [], 0
    while at < len(links):
        length = run_length(links[at : at + runs.LONGEST])
        found += blocks(links[at : at + length])
        at += max(length, 1)
    return found


def run_length(links, longest=runs.run_length):
    """The length of the longest run that links, innermost first, begin with, or 0.

    Args:
        longest: the same of kinds.
    """
    length = longest(tuple(k.kind for k in links))
    while length and not _go_together(links[:length]):
        length = longest(tuple(k.kind for k in links[: length - 1]))
    return length


def stretch_length(links):
    """:func:`run_length` of runs and of what may be one program."""
    return run_length(links, runs.stretch_length)


def _go_together(links):
    """Whether layers have settings that the fused blocks have too."""
    if len({len(k.layers) for k in links} - {0, 1}) > 1:
        return False  # of a loop over several lists of layers, of other lengths
    for conv, bn in itertools.pairwise(links):
        if (conv.kind, bn.kind) == ("Conv2d", "BatchNorm2d"):
            pairs = zip(conv.layers, bn.layers, strict=False)
            if not all(runs.conv_fits(a, b) for (_, a), (_, b) in pairs):
                return False
    return True


def blocks(run):
    """The fused blocks of a run, as tuples of (kind, name) of their parts."""
    found, at = [], 0
    while at < len(run):
        computed = tuple(k.kind for k in run[at:])
        length = max((len(b) for b in runs.BLOCKS if computed[: len(b)] == b), default=0)
        block = run[at : at + length]
        for i in range(max((len(k.layers) for k in block), default=0)):
            found.append(tuple((k.kind, _part(k, i)) for k in block))
        at += max(length, 1)
    return found


def calls_of(links):
    return tuple((k.number, k.form) for k in links)


def _part(link, i):
    if not link.layers:
        return f"{link.name}()"
    return link.layers[i if len(link.layers) > 1 else 0][0]


def function_name(function):
    if isinstance(function, str):
        return function.rstrip("_")
    # Functions that dispatch on an argument are not called what torch calls them.
    names = (n for n in F.__all__ if getattr(torch.nn.functional, n, None) is function)
    return next(names, function.__name__.rstrip("_"))


def takes(function, args, names):
    """Whether torch's function, or a tensor's method, takes a call of such a form, as braze's does.

    Args:
        args: how many arguments it gets by position.
        names: of those that it gets by name.
    """
    if isinstance(function, str):
        return args == 1 and not names
    if getattr(torch.nn.functional, function_name(function), None) is not function:
        return args == 1 and not names  # torch.relu and the like have no settings
    signature = _signature(kinds.FUNCTIONS[function].ours)
    if "dim" in signature.parameters and "dim" not in names and args < 2:
        return False  # they warn, of where they are called
    try:
        signature.bind(*[None] * args, **dict.fromkeys(names))
    except TypeError:
        return False
    return args > 0


_signature = functools.lru_cache(maxsize=None)(inspect.signature)


def settings_fit(function, kind, args, kwargs):
    """Whether a function that is called with such settings is the layer of that kind."""
    if kind == "Add":
        return False  # additions are operators
    if kind == "Flatten":
        return args == (1,) and not kwargs
    if not takes(function, len(args) + 1, kwargs):
        return False
    if kind == "MaxPool2d":
        size, stride, *pair, ceil_mode, return_indices = kinds.Pooling(*args, **kwargs)
        extents = (size, size if stride is None else stride, *pair)
        return return_indices is False and isinstance(ceil_mode, bool) and all(map(_fits, extents))
    name, settings = kinds.ACTIVATIONS[kind]
    given = {**settings, **dict(zip(settings, args, strict=False)), **kwargs}
    return fits(name, [given[setting] for setting in settings])


def _fits(extent):
    """Whether a setting of max_pool2d is an int or two of them."""
    pair = extent if isinstance(extent, tuple) and len(extent) == 2 else (extent,)
    return all(type(e) is int for e in pair)


def constant(node):
    """The value of a number, string, None or tuple of them as it is written, else VARIABLE."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return VARIABLE
    return VARIABLE if isinstance(value, (list, dict, set)) else value
