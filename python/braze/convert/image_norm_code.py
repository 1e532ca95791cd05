"""Group norms, layer norms, activations, and convolutions with more to them, found in the code of
classes."""

import ast
import typing

import torch

from braze.convert import standardized
from braze.convert.code import Code
from braze.convert.image_norms import (
    FunctionNorm,
    OwnConv,
    own_group_norm,
    own_layer_norm,
    own_row_norm,
)
from braze.convert.kinds import ACTIVATIONS, FUNCTION_KINDS
from braze.convert.parts import Activates
from braze.convert.passes import PassCode, compiled_all
from braze.convert.source import VARIABLE, constant

_INPUT, _ROWS = "input", "input with its channels innermost"
#: Of how many ``if`` statements both ways are looked at, each with those that follow.
_MOST_TESTS = 6
_TO_ROWS, _TO_IMAGES = (0, 2, 3, 1), (0, 3, 1, 2)


class _Normed(typing.NamedTuple):
    """A norm's result, which has gone through children.

    Attributes:
        link: what stands for the norm.
        as_rows: whether its channels are innermost.
        names: of the children.
    """

    link: typing.Callable
    as_rows: bool
    names: tuple = ()


class FunctionNormCode(PassCode):
    """The code of a forward that may be ``F.group_norm`` or ``F.layer_norm``."""

    def norm(self):
        """A :class:`FunctionNorm`, or None."""
        tests = sum(isinstance(node, ast.If) for node in self.tree.numbered)
        if self.tree.shared or tests > _MOST_TESTS:
            return None
        guards = []
        found = self._walk(self.body, {self.input: _INPUT}, guards)
        if not isinstance(found, _Normed) or found.as_rows:
            return None
        return FunctionNorm(found.link, found.names, compiled_all(guards), self.same())

    def _walk(self, body, known, guards):
        """What statements return, or None; tests that have to hold are added to guards."""
        for at, statement in enumerate(body):
            if isinstance(statement, ast.Return):
                return None if statement.value is None else self._found(statement.value, known)
            if isinstance(statement, ast.If):
                return self._branch(statement, body[at + 1 :], known, guards)
            targets = statement.targets if isinstance(statement, ast.Assign) else ()
            if len(targets) != 1 or not isinstance(targets[0], ast.Name):
                return None
            if targets[0].id == self.me:
                return None
            known[targets[0].id] = self._found(statement.value, known)
        return None

    def _branch(self, statement, rest, known, guards):
        test = self.test(statement.test)
        if test is None:
            return None
        ways = (test, statement.body), (ast.UnaryOp(ast.Not(), test), statement.orelse)
        for way, branch in ways:
            inner = []
            found = self._walk([*branch, *rest], dict(known), inner)
            if isinstance(found, _Normed):
                guards += [way, *inner]
                return found
        return None

    def _found(self, node, known):
        """What an expression stands for, or None."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, ast.Call):
            return None
        function = self.known(node.func)
        if function is torch.nn.functional.group_norm:
            names = "num_groups", "weight", "bias", "eps"
            return self._normed(node, known, own_group_norm, _INPUT, names)
        if function is torch.nn.functional.layer_norm:
            names = "normalized_shape", "weight", "bias", "eps"
            rows = self._normed(node, known, own_row_norm, _INPUT, names)
            return rows or self._normed(node, known, own_layer_norm, _ROWS, names)
        if node.keywords or not isinstance(node.func, ast.Attribute):
            return None
        if node.func.attr == "permute":
            return self._permuted(node, known)
        name = self.attribute(node.func) if len(node.args) == 1 else None
        inner = None if name is None else self._found(node.args[0], known)
        fits = isinstance(inner, _Normed) and not inner.as_rows
        return inner._replace(names=(*inner.names, name)) if fits else None

    def _normed(self, node, known, link, of, names):
        """What a call of a function with such attributes of the module is, or None."""
        given = [None if isinstance(a, ast.Starred) else self.attribute(a) for a in node.args[1:]]
        named = {k.arg: self.attribute(k.value) for k in node.keywords}
        given += [named.pop(name, None) for name in names[len(given) :]]
        if named or not node.args or self._found(node.args[0], known) != of:
            return None
        return _Normed(link, link is own_layer_norm) if tuple(given) == names else None

    def _permuted(self, node, known):
        found = self._found(node.func.value, known)
        given = node.args
        if len(given) == 1 and isinstance(given[0], (ast.Tuple, ast.List)):
            given = given[0].elts
        dims = tuple(constant(a) for a in given)
        if found == _INPUT and dims == _TO_ROWS:
            return _ROWS
        if isinstance(found, _Normed) and found.as_rows and dims == _TO_IMAGES:
            return found._replace(as_rows=False)
        return None


class ActivationCode(Code):
    """The code of a forward that may be ``return F.gelu(input)``."""

    def activates(self):
        """A :class:`parts.Activates`, or None."""
        returned = self.body[0] if len(self.body) == 1 else None
        call = returned.value if isinstance(returned, ast.Return) else None
        if not isinstance(call, ast.Call) or not call.args or not self.is_input(call.args[0]):
            return None
        function = self.known(call.func)
        kind = FUNCTION_KINDS.get(function) if callable(function) else None
        args = tuple(constant(a) for a in call.args[1:])
        kwargs = {k.arg: constant(k.value) for k in call.keywords}
        if kind not in ACTIVATIONS or VARIABLE in (*args, *kwargs.values()) or None in kwargs:
            return None
        names = tuple(ACTIVATIONS[kind][1])
        if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
            return None
        return Activates(kind, (function, args, kwargs), self.same())


class OwnConvCode(Code):
    """The code of the forward of a subclass of ``torch.nn.Conv2d``."""

    def own_conv(self):
        """An :class:`OwnConv`, or None."""
        if self.input in self.tree.shared:
            return None
        for statement in self.body:
            uses = [n for n in ast.walk(statement) if self.is_input(n)]
            loads = [n for n in uses if isinstance(n.ctx, ast.Load)]
            if not uses:
                continue
            # What comes later reads the result, or reads the input again.
            sets = isinstance(statement, ast.Assign) and len(uses) == 2
            if len(loads) != 1 or not (sets or self._is_last_use(statement)):
                return None
            if not self._is_convolved(statement, loads[0]):
                return None
            returned = statement.value if isinstance(statement, ast.Return) else None
            is_last = isinstance(returned, ast.Call) and loads[0] in returned.args[:1]
            return OwnConv(standardized.whole(self), is_last, self.same())
        return None

    def _is_last_use(self, statement):
        later = self.body[self.body.index(statement) + 1 :]
        used = any(self.is_input(n) for s in later for n in ast.walk(s))
        return isinstance(statement, (ast.Assign, ast.Return)) and not used

    def _is_convolved(self, statement, load):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and node.args and node.args[0] is load:
                return self.known(node.func) is torch.nn.functional.conv2d
        return False
