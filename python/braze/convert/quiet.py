"""Which modules only compute, so that it makes no difference when they do."""

import functools
import itertools

import torch

from braze._C import share, unwatched
from braze._stock import gives_way
from braze.convert.kinds import ACTIVATIONS, KINDS, VIEWS, calls_more, kind_of, own_norm, places
from braze.convert.parts import PARTS, unchanged
from braze.convert.programs import with_inner

_QUIET = "AvgPool2d", "BatchNorm2d", "Conv2d", "Linear", "MaxPool2d"
_INNER = frozenset((*_QUIET, *ACTIVATIONS))


def are_quiet(modules, links, parts=()):
    """Whether modules, or None, only compute: they change nothing but their own buffers, run no
    code of the user's but what is known, and none is one of the links.

    Args:
        parts: that have to be unchanged, too.
    """
    layers, parts, links = [], list(parts), with_inner(links)
    for module in modules:
        if module is not None and not _collect(module, layers, parts):
            return False
    if parts and not unchanged(parts):
        return False
    computing = [layer for layer in layers if type(layer) is not tuple]
    traced = torch.compiler.is_compiling()
    if traced:
        if any(calls_more(module) for module in computing):
            return False
        if any(layer._gives_way() for layer in computing):
            return False
    elif asks(tuple(map(type, computing)))() or not unwatched(computing):
        return False
    for layer in layers:
        if type(layer) is tuple:  # own_norm of a module
            computing.append(layer[1][0])
    if not traced:
        return not share(computing, links)
    links = [link[1][0] if type(link) is tuple and link[1] else link for link in links]
    return not any(layer is link for layer in computing for link in links)


@functools.lru_cache(maxsize=1024)
def asks(types):
    """What tells whether torch's have to run in the place of one of some layers of braze's."""
    return gives_way(*itertools.chain.from_iterable(map(places, types)))


def _collect(module, layers, parts):
    """Adds the layers that a module consists of to those found, and what they were found in to the
    parts; whether layers of their kinds only compute."""
    kind = type(module)
    if kind in KINDS:
        layers.append(module)
        return KINDS[kind] in _QUIET
    part = PARTS.get(kind)
    inner = []
    if part is None or not part.expand(module, inner, parts):
        return False
    layers += inner
    if any(type(layer) is tuple and layer[0] is not own_norm for layer in inner):
        return False
    # An activation may overwrite its input, which has to be a result of the module's own then.
    kinds = _QUIET
    for layer in reversed(inner):
        if type(layer) is not tuple and KINDS.get(type(layer)) not in kinds:
            return False
        kinds = _INNER
    return True


def overwrites(link):
    """Whether a link may write to what it is applied to, or hand that on to one that does."""
    kind = kind_of(link)
    if kind in VIEWS:
        return True
    if kind not in ACTIVATIONS:
        return False
    if type(link) is not tuple:
        return getattr(link, "inplace", False)
    function, args, kwargs = link
    name = function if isinstance(function, str) else function.__name__
    return name.endswith("_") or kwargs.get("inplace", False) or any(a is True for a in args)
