"""What is asked of modules without running anything of their classes."""

import inspect
import types

import torch

from braze.nn import functional as F

_CONTAINERS = torch.nn.ModuleList, torch.nn.Sequential


def worth_splicing(module, kind_of):
    """Whether a forward of unknown code may call anything that braze would replace."""
    children = list(module.__dict__["_modules"].values())
    children += [c for m in children if isinstance(m, _CONTAINERS) for c in m._modules.values()]
    kinds = {kind_of(child) for child in children if child is not None}
    names = set()
    todo = [getattr(own_class(module).forward, "__code__", None)]
    while todo:
        code = todo.pop()
        if code is not None:
            names.update(code.co_names)
            todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    pairs = {"Conv2d", "BatchNorm2d"}, {"BatchNorm2d", "ReLU"}, {"Linear", "ReLU"}
    fused = any(pair <= kinds for pair in pairs)
    return fused or bool(names & {*F.__all__, "relu_"})


def own_class(module):
    """The class of a module before it was converted."""
    kind = type(module)
    return vars(kind).get("_class_before_convert", kind)


def is_container(module):
    """Whether a module is a list of others that iterates and indexes as torch's do."""
    kind = own_class(module)
    stock = next((c for c in _CONTAINERS if isinstance(module, c)), None)
    return stock is not None and all(
        getattr(kind, n) is getattr(stock, n) for n in ("__iter__", "__getitem__")
    )


def child_of(module, name):
    """The child that ``module.name`` is, without running anything of the module's class; or
    None."""
    if (
        not is_plain_attribute(module, name)
        or name in module.__dict__
        or name in module.__dict__["_parameters"]
        or name in module.__dict__["_buffers"]
    ):
        return None
    return module.__dict__["_modules"].get(name)


def is_plain_attribute(module, name):
    """Whether to look up ``module.name`` runs nothing of the module's class."""
    kind = own_class(module)
    return (
        kind.__getattr__ is torch.nn.Module.__getattr__
        and kind.__getattribute__ is torch.nn.Module.__getattribute__
        and inspect.getattr_static(kind, name, None) is None
    )
