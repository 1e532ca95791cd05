"""Norms of images, with an activation perhaps, whose result several convolutions read and nothing
else: found in the code of functions, and run with a result in the convolutions' dtype.

A pre-activation residual block is that::

    y = self.norm1(x)
    shortcut = self.downsample(y) if self.downsample is not None else x
    y = self.conv1(y)

(One that a single convolution reads is a run with it, see runs.py.)
"""

import ast
import typing

import torch

from braze.convert.blocks import norm_for_products
from braze.convert.kinds import ACTIVATIONS, kind_of
from braze.convert.parts import expanded

_PRODUCTS = "Conv2d", "OwnConv2d"


_any_global_hook = torch.nn.modules.module._has_any_global_hook


class Shared(typing.NamedTuple):
    """A call of a norm in a function.

    Attributes:
        number: of the call.
        readers: numbers of the names of the modules that read its result.
    """

    number: int
    readers: tuple


def find(code):
    """All of a function.

    Args:
        code: a :class:`braze.convert.splice._Function`.
    """
    found = []
    if code.changes_context():
        return found
    for statement in code.nodes:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        if len(targets) == 1 and isinstance(targets[0], ast.Name):
            readers = _readers(code, targets[0].id)
            if readers and _is_norm(code, statement.value):
                found.append(Shared(statement.value.number, tuple(r.number for r in readers)))
    return found


def _is_norm(code, node):
    """Whether an expression is a call of a module that is a norm, with an activation perhaps."""
    link, input = code.link(node)
    if link is None or not link.layers or not isinstance(input, ast.Name):
        return False
    return len(link.layers) == 1 and _is_of_norm(link.kinds)


def _is_of_norm(kinds):
    return kinds[:1] in (("GroupNorm",), ("LayerNorm2d",)) and all(
        kind in ACTIVATIONS for kind in kinds[1:]
    )


def _readers(code, name):
    """The names of the modules, two or more, that are all that reads a variable; or None."""
    if not code.is_set_once(name):
        return None
    reads = code.loads.get(name, ())
    calls = [
        node
        for node in code.nodes
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    ]
    readers = [c.func for read in reads for c in calls if c.args[0] is read]
    whole = len(readers) == len(reads) >= 2
    return readers if whole and all(_may_read(code, reader) for reader in readers) else None


def _may_read(code, node):
    """Whether a name is of a convolution, of what begins with one, or of nothing at present."""
    if not (isinstance(node, ast.Attribute) and code.is_me(node.value)):
        return False
    layers = code.layers(node)
    if not layers:
        own, name = code.module.__dict__, code.attribute_name(node)
        return name in own and own[name] is None
    return all((code.analysis.kinds_of(m) or (None,))[0] in _PRODUCTS for _, m in layers)


def shared_norm(module, input, *readers):
    """The result of a call of a norm, for modules that are all that reads it."""
    if torch.compiler.is_compiling() or _any_global_hook():
        return module(input)
    links = expanded((module,))
    if links is None or not _is_of_norm(tuple([kind_of(link) for link in links[::-1]])):
        return module(input)
    for reader in readers:
        inner = None if reader is None else expanded((reader,))
        if reader is not None and (not inner or kind_of(inner[-1]) not in _PRODUCTS):
            return module(input)
    result = norm_for_products(links, input)
    return module(input) if result is None else result
