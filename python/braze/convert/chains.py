"""Chains of calls of layers and functions: which of them are runs that are one op."""

import functools
import inspect
import itertools
import types
import typing

import torch

from braze._ops.activation import fits
from braze.convert import kinds, runs, through
from braze.convert.blocks import conv_fits
from braze.convert.modules import is_container, own_class
from braze.convert.parts import SOMETIMES, layers_in
from braze.convert.recognise import part_of
from braze.nn import functional as F

FUNCTIONS = str, types.FunctionType, types.BuiltinFunctionType


class Link(typing.NamedTuple):
    """A call of a layer or of a function, or an addition, as part of a chain.

    Attributes:
        number: the call, by its place in the tree.
        form: ``"layer"``, ``"part"`` (a module of parts.py), ``"function"`` or ``"method"`` of a
            tensor; of additions, ``"add"`` (to what comes before in the chain), ``"radd"`` (of that
            to something) or ``"iadd"``; of products with a parameter, ``"mul"`` or ``"rmul"``.
        kinds: what it computes, innermost first, see kinds.py: of a part nothing or more.
        layers: the layers that it may call, with their names; empty for functions.
        name: of the function.
    """

    number: int
    form: str
    kinds: tuple
    layers: tuple
    name: str


def module_link(number, kinds, layers):
    """A call of a module of such kinds."""
    parts = any(part_of(own_class(m)) is not None for _, m in layers)
    return Link(number, "part" if parts else "layer", kinds, layers, "")


def analyse_children(module, kinds_of):
    """The runs among the children of a Sequential, as :class:`Found` has them."""
    children = module.__dict__["_modules"].items() if is_container(module) else ()
    return runs_among(children, kinds_of)


def runs_among(layers, kinds_of):
    links = [module_link(0, kinds_of(m), ((name, m),)) for name, m in layers]
    found, at = [], 0
    while at < len(links):
        length = run_length(links[at : at + WINDOW])
        found += blocks(links[at : at + length])
        at += max(length, 1)
    return found


#: Of how many links, at most, it is asked what they begin with.
WINDOW = max(through.WINDOW, runs.LONGEST_STRETCH)


def run_length(links):
    """How many links, innermost first, the longest run has that they begin with, or 0."""
    return _longest(links[: through.WINDOW], through.run_length)


def stretch_length(links):
    """:func:`run_length` of runs and of what may be one program."""
    plain = _longest(links[: _before_parts(links)], _plain_stretch)
    return max(run_length(links), plain, _longest(links, through.module_and_more))


def _before_parts(links):
    """How many links there are before the first that is a part, and before the run that goes on
    with it."""
    forms = [k.form for k in links[: runs.LONGEST_STRETCH]]
    if "part" not in forms:
        return len(forms)
    end = forms.index("part")
    return next((i for i in range(1, end) if run_length(links[i:]) > end - i), end)


def _plain_stretch(links):
    """:func:`runs.stretch_length` of links that stand for one layer each."""
    plain = itertools.takewhile(lambda more: more is not None and len(more) == 1, links)
    return runs.stretch_length([more[0] for more in plain])


def _longest(links, length_of):
    length = length_of([k.kinds for k in links])
    while length and not _go_together(links[:length]):
        length = length_of([k.kinds for k in links[: length - 1]])
    return length


def _go_together(links):
    """Whether layers have settings that the fused blocks have too."""
    if len({len(k.layers) for k in links} - {0, 1}) > 1:
        return False  # of a loop over several lists of layers, of other lengths
    for (conv, convs), (bn, norms) in itertools.pairwise(part for k in links for part in _parts(k)):
        if (conv, bn) == ("Conv2d", "BatchNorm2d"):
            pairs = zip(convs, norms, strict=False)
            if not all(conv_fits(a, b) for (_, a), (_, b) in pairs):
                return False
    return True


def blocks(run):
    """The fused blocks of a run, as tuples of (kind, name) of their parts."""
    found, at = [], 0
    parts = [part for k in run for part in _parts(k)]
    while at < len(parts):
        computed = tuple(kind for kind, _ in parts[at:])
        length = max((len(b) for b in runs.BLOCKS if computed[: len(b)] == b), default=0)
        block = parts[at : at + length]
        for i in range(max((len(layers) for _, layers in block), default=0)):
            found.append(tuple((k, layers[i if len(layers) > 1 else 0][0]) for k, layers in block))
        at += max(length, 1)
    return found


def _parts(link):
    """The parts of a link that compute something: the kind of each, and the layers that it may be,
    with their names."""
    if not link.layers:
        return [(link.kinds[0], [(f"{link.name}()", None)])]
    computed = [kind for kind in link.kinds if kind != SOMETIMES]
    layers = zip(*(layers_in(*layer) for layer in link.layers), strict=True)
    return list(zip(computed, map(list, layers), strict=True))


def calls_of(links):
    return tuple((k.number, k.form) for k in links)


def function_name(function):
    if isinstance(function, str):
        return function.rstrip("_")
    if function in kinds.OF_LISTS:
        return "cat"
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
    of_list = function in kinds.OF_LISTS
    if not of_list and getattr(torch.nn.functional, function_name(function), None) is not function:
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
    if kind in ("Add", "Scale") or function is torch.permute:
        return False  # operators, and what only modules stand for
    if kind == "Permute":
        return not kwargs and len(args) > 1 and all(type(a) is int for a in args)
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
