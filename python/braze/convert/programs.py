"""Runs of layers as programs (braze/_programs): what decides, beside tensors, what a run computes,
and the run as a function of its tensors."""

import functools
import itertools
import operator

import torch

import braze.nn
from braze import _programs
from braze.convert.kinds import ACTIVATIONS, FUNCTION_KINDS, OF_MODULES, OF_TENSORS, SCALINGS
from braze.convert.modules import is_container
from braze.convert.source import NUMBERS

_SETTINGS = {
    "AvgPool2d": (
        *("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
        "divisor_override",
    ),
    "BatchNorm2d": ("num_features", "training", "momentum", "eps", "track_running_stats"),
    "Conv2d": ("out_channels", "stride", "padding", "dilation", "groups", "padding_mode"),
    "LayerNorm": ("normalized_shape", "eps"),
    "Linear": ("in_features", "out_features"),
    "MaxPool2d": ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    **{kind: (*settings, "inplace") for kind, (_, settings) in ACTIVATIONS.items()},
    **{kind: ("training",) for kind in ("Sigmoid", "Tanh")},  # which have none
    "GELU": ("training", "approximate"),
}
#: By layers' classes, what gets the settings that count.
_getters = {getattr(braze.nn, kind): operator.attrgetter(*s) for kind, s in _SETTINGS.items()}
for _flatten in (torch.nn.Flatten, braze.nn.Flatten):
    _getters[_flatten] = operator.attrgetter("start_dim", "end_dim")

#: The tensors of layers that have any. Those of batch norm have the same shapes, so that their
#: order counts; in a layer's own dictionary they stand in the order in which they were set.
_PARAMETERS = dict.fromkeys(
    (braze.nn.BatchNorm2d, braze.nn.Conv2d, braze.nn.LayerNorm, braze.nn.Linear),
    ("weight", "bias"),
)
_BUFFERS = {braze.nn.BatchNorm2d: ("running_mean", "running_var", "num_batches_tracked")}

LAYERS = frozenset(_getters)
KINDS = frozenset(("Flatten", *_SETTINGS))
#: Those, and what else links of programs compute.
LINK_KINDS = KINDS | {"Permute", "ResponseNorm", "Squeeze"}
#: Functions of an input and of layers, outermost first, as the first argument of a link.
_OF_LAYERS = set()
#: How many layers, at most, of what is no run of its own: more layers hold more memory than a node
#: less is worth.
LONGEST_STRETCH = 16


def of_layers(kind):
    """Marks a function of an input and of layers as one that may be a link, of such a kind."""

    def marked(function):
        _OF_LAYERS.add(function)
        FUNCTION_KINDS[function] = kind
        return function

    return marked


def with_inner(links):
    """Links and, in the place of functions of layers, these."""
    return tuple(
        inner
        for link in links
        for inner in (link[1][0] if type(link) is tuple and link[0] in _OF_LAYERS else (link,))
    )


def follow_each_other(container, kinds_of):
    """Whether two of its children that follow each other may be one program.

    Args:
        kinds_of: a function from a module to the kinds of the links that a call of it stands for,
            or None.
    """
    children = container.__dict__["_modules"].values() if is_container(container) else ()
    kinds = [kinds_of(child) for child in children]
    known = [bool(k) and LINK_KINDS.issuperset(k) for k in kinds]
    return any(a and b for a, b in itertools.pairwise(known))


def by_program(function):
    """`function` of links, an input, and what is added, by a program where there is one."""

    @functools.wraps(function)
    def call(links, input, *added):
        if _programs.allowed(input):
            result = _by_program(function, links, input, added)
            if result is not None:
                return result
        return function(links, input, *added)

    return call


def _by_program(function, links, input, added):
    name, tensors, buffers = [function], [input, *added], []
    if not _describe(links, name, tensors, buffers):
        return None
    make = functools.partial(_on_others, function, links, 1 + len(added))
    return _programs.run(name, make, tensors, buffers)


def _describe(links, name, tensors, buffers):
    """Adds to a program's name what links compute, as far as their tensors do not say it, and these
    to some; whether there may be a program of them."""
    for link in links:
        if type(link) is tuple:
            called, args, kwargs = link
            if called in _OF_LAYERS:
                name += (called, len(args[0]))
                if not _describe(args[0], name, tensors, buffers):
                    return False
                continue
            count = _tensors_of(called, args)
            if count and all(isinstance(a, torch.Tensor) for a in args[:count]):
                name += (called, *args[count:])
                tensors += args[:count]
                continue
            if called in OF_MODULES or count:
                return False  # a module's tensors, which a program would take for constants
            name += (called, args, *kwargs.items())
            continue
        kind = type(link)
        settings = _getters.get(kind)
        if settings is None:
            return False
        name += (kind, settings(link))
        if kind not in _PARAMETERS:
            continue
        own = link.__dict__
        of_layer = _PARAMETERS[kind]
        if not own.keys().isdisjoint(of_layer):
            return False  # plain attributes, in the place of parameters
        if not _add(own["_parameters"], of_layer, tensors, name):
            return False
        of_layer = _BUFFERS.get(kind)
        if of_layer is not None and not (
            own.keys().isdisjoint(of_layer) and _add(own["_buffers"], of_layer, buffers, name)
        ):
            return False
    return True


def _tensors_of(called, args):
    """How many arguments of a link are tensors, the first ones."""
    return 0 if called in SCALINGS and type(args[0]) in NUMBERS else OF_TENSORS.get(called, 0)


def _add(own, names, tensors, absent):
    """Adds a layer's tensors of such names to some, and to `absent` the names of those that it has
    not; whether it has all of them, if as None, where torch keeps them."""
    for name in names:
        if name not in own:
            return False
        tensor = own[name]
        if tensor is None:
            absent.append(name)
        else:
            tensors.append(tensor)
    return True


def _on_others(function, links, given, tensors, buffers):
    """The run as a function of its tensors, on copies of the layers that hold others."""
    copies = _with_tensors(links, iter(tensors[given:]), iter(buffers))
    return lambda *tensors: function(copies, *tensors[:given])


def _with_tensors(links, parameters, buffers):
    return tuple([_with_own(link, parameters, buffers) for link in links])


def _with_own(link, parameters, buffers):
    if type(link) is tuple:
        count = _tensors_of(*link[:2])
        if count:
            own = (next(parameters) for _ in range(count))
            return link[0], (*own, *link[1][count:]), link[2]
        if link[0] in _OF_LAYERS:
            layers, *others = link[1]
            return link[0], (_with_tensors(layers, parameters, buffers), *others), {}
        return link
    copy = object.__new__(type(link))
    copy.__dict__.update(link.__dict__)
    for where, names, tensors in (
        ("_parameters", _PARAMETERS, parameters),
        ("_buffers", _BUFFERS, buffers),
    ):
        own = link.__dict__[where]
        copy.__dict__[where] = {
            k: None if own[k] is None else next(tensors) for k in names.get(type(link), ())
        }
    return copy
