"""Layer scales: products with a parameter, or a view of one, along one dimension; and modules whose
forward is such a product (scale_code.py)."""

import ast

import torch

from braze.convert.kinds import mul
from braze.convert.source import VARIABLE, constant

#: Methods that give a tensor's elements another shape.
_SHAPES = "view", "reshape"


class Attribute(str):
    """The name of an attribute that holds a method's argument."""


def view_of(node, attribute):
    """What an expression is a view of, and that view as pairs of a method and its arguments, which
    :func:`viewed` takes: of ``p.view(1, -1, 1, 1)`` and of ``p[:, None, None]`` it is ``p``.

    Args:
        attribute: a function of an expression to the name if it is ``self.name``, else to None.
    """
    steps = []
    while True:
        found = _step(node, attribute)
        if found is None:
            return node, tuple(steps[::-1])
        node, step = found
        steps.append(step)


def _step(node, attribute):
    if isinstance(node, ast.Subscript):
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        found = tuple([_ALL if _is_all(i) else constant(i) for i in index])
        return (node.value, ("__getitem__", (found,))) if {*map(type, found)} <= _INDICES else None
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    sizes = tuple(map(constant, node.args))
    if node.func.attr not in _SHAPES or node.keywords:
        return None
    if len(sizes) == 1 and sizes[0] is VARIABLE:
        name = attribute(node.args[0])
        return None if name is None else (node.func.value, (node.func.attr, (Attribute(name),)))
    return (node.func.value, (node.func.attr, sizes)) if {*map(type, sizes)} == {int} else None


_ALL = slice(None)
_INDICES = {slice, type(None)}


def _is_all(node):
    return isinstance(node, ast.Slice) and not (node.lower or node.upper or node.step)


def viewed(module, tensor, view):
    own = module.__dict__
    for method, arguments in view:
        given = [own[a] if isinstance(a, Attribute) else a for a in arguments]
        tensor = getattr(tensor, method)(*given)
    return tensor


def scale_of(module, name, view):
    """Such a view of what may be a parameter of a module, if it has more than one element along one
    dimension, and along no other; else None."""
    own = module.__dict__
    parameter = None if name in own else own["_parameters"].get(name)
    if type(parameter) is not torch.nn.Parameter:
        return None
    for _, arguments in view:
        for a in arguments:
            if isinstance(a, Attribute) and type(own.get(a)) not in (int, tuple):
                return None
    try:
        found = viewed(module, parameter, view)
    except (RuntimeError, IndexError, TypeError):  # which the user's own code is to raise
        return None
    return found if sum(size != 1 for size in found.shape) == 1 else None


class Scales:
    """What a module is whose forward is ``input * self.gamma``, or that of a view of the parameter.

    Args:
        name: of the parameter.
        view: as :func:`view_of` gives it.
        guard: a function of the module that tells whether its forward is this now.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, name, view, guard, same):
        self.name, self.view, self.guard, self.same = name, view, guard, same

    def expand(self, module, found, modules):
        """See :meth:`parts.Pass.expand`."""
        modules.append(module)
        scale = self._scale(module)
        if scale is not None:
            found.append((mul, (scale,), {}))
        return scale is not None

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, or None."""
        return None if self._scale(module) is None else ("Scale",)

    def layers(self, name, module):
        """What computes in a module of such a name, as (name, module)."""
        return [(name, module)]

    def _scale(self, module):
        return scale_of(module, self.name, self.view) if self.guard(module) else None
