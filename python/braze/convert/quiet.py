"""Which modules only compute, so that it makes no difference when they do."""

import torch

import braze.nn
from braze._stock import gives_way
from braze.convert.kinds import ACTIVATIONS, calls_more, kind_of, own_norm
from braze.convert.parts import PARTS, expanded

_QUIET = "AvgPool2d", "BatchNorm2d", "Conv2d", "Linear", "MaxPool2d"
_CONTAINERS = gives_way((torch.nn.Sequential, "forward"), (torch.nn.Identity, "forward"))


def is_quiet(module, links):
    """Whether a module, or None, only computes: it changes nothing but its own buffers, runs no
    code of the user's but what is known, and is none of the links."""
    if module is None:
        return True
    kind = type(module)
    kind = vars(kind).get("_class_before_convert", kind)
    if kind in (torch.nn.Sequential, braze.nn.Sequential, torch.nn.Identity):
        if calls_more(module) or _CONTAINERS():
            return False
        return all(is_quiet(child, links) for child in module._modules.values())
    if any(_layer(link) is module for link in links):
        return False
    if PARTS.get(type(module)) is None:
        return kind_of(module) in _QUIET and not module._gives_way()
    layers = expanded((module,))
    if layers is None or any(_layer(link) is layer for link in links for layer in layers):
        return False
    if len(layers) == 0:
        return True
    # An activation may overwrite its input, which has to be a result of the module's own then.
    return _computes(layers[-1], _QUIET) and all(_computes(layer) for layer in layers[:-1])


def _layer(link):
    """The module that a link calls, or whose batch norm it is; of a function, the function."""
    if type(link) is not tuple:
        return link
    return link[1][0] if link[0] is own_norm else link[0]


def _computes(layer, kinds=(*_QUIET, *ACTIVATIONS)):
    """Whether a layer that a module stands for only computes."""
    if type(layer) is tuple:
        return True
    return kind_of(layer) in kinds and not layer._gives_way()
