"""Which modules only compute, so that it makes no difference when they do."""

import torch

import braze.nn
from braze._stock import gives_way
from braze.convert.kinds import ACTIVATIONS, KINDS, calls_more, own_norm
from braze.convert.parts import PARTS, expanded

_QUIET = "AvgPool2d", "BatchNorm2d", "Conv2d", "Linear", "MaxPool2d"
_CONTAINERS = gives_way((torch.nn.Sequential, "forward"), (torch.nn.Identity, "forward"))


def is_quiet(module, links):
    """Whether a module, or None, only computes: it changes nothing but its own buffers, runs no
    code of the user's but what is known, and is none of the links."""
    if module is None:
        return True
    if type(module) in KINDS:
        return _only_computes(module, links, _QUIET)
    kind = type(module)
    kind = vars(kind).get("_class_before_convert", kind)
    if kind in (torch.nn.Sequential, braze.nn.Sequential, torch.nn.Identity):
        if calls_more(module) or _CONTAINERS():
            return False
        return all(is_quiet(child, links) for child in module._modules.values())
    layers = expanded((module,)) if type(module) in PARTS else None
    if layers is None:
        return False
    # An activation may overwrite its input, which has to be a result of the module's own then.
    for layer in layers[:-1]:
        if not _only_computes(layer, links, _INNER):
            return False
    return len(layers) == 0 or _only_computes(layers[-1], links, _QUIET)


_INNER = frozenset((*_QUIET, *ACTIVATIONS))


def _only_computes(layer, links, kinds):
    """Whether a layer of one of some kinds does what its class says, and is none of the links."""
    norm = type(layer) is tuple
    if norm:
        layer = layer[1][0]
    elif KINDS.get(type(layer)) not in kinds or calls_more(layer) or layer._gives_way():
        return False
    for link in links:
        if type(link) is tuple:
            link = link[1][0] if link[0] is own_norm else None
        if link is layer:
            return False
    return True
