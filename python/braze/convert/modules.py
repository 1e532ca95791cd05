"""What is asked of modules without running anything of their classes."""

import inspect
import types

import torch

from braze._ops._common import FLOAT_DTYPES
from braze.nn import functional as F

_BATCHES = "num_batches_tracked"
_CONTAINERS = torch.nn.ModuleList, torch.nn.Sequential


def worth_splicing(module, kinds_of):
    """Whether a forward of unknown code may call anything that braze would replace."""
    children = list(module.__dict__["_modules"].values())
    children += [c for m in children if isinstance(m, _CONTAINERS) for c in m._modules.values()]
    kinds = {k for child in children if child is not None for k in kinds_of(child) or ()}
    names = set()
    pending = [getattr(own_class(module).forward, "__code__", None)]
    while pending:
        code = pending.pop()
        if code is not None:
            names.update(code.co_names)
            pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    pairs = (
        ("Conv2d", "BatchNorm2d"),
        ("BatchNorm2d", "ReLU"),
        ("Conv2d", "ReLU"),
        ("Linear", "ReLU"),
    )
    fused = any(kinds.issuperset(pair) for pair in pairs)
    # Not for a concatenation alone: most go along other dimensions than braze's.
    return fused or bool(names & {*F.__all__, "relu_"} - {"cat"})


def why_unsupported(module):
    """Why braze has no kernels for a layer's parameters or buffers, or None."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            continue
        if tensor.dtype not in FLOAT_DTYPES and name != _BATCHES:
            return f"{tensor.dtype} is not supported"
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            return f"device {tensor.device} is not supported"
    return None


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
    return is_plain_in(own_class(module), name)


def is_plain_in(kind, name):
    """Whether to look up such an attribute of an instance runs nothing of its class."""
    return (
        kind.__getattr__ is torch.nn.Module.__getattr__
        and kind.__getattribute__ is torch.nn.Module.__getattribute__
        and inspect.getattr_static(kind, name, None) is None
    )
