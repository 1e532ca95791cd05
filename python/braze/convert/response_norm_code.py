"""Global response norm, found in the code of classes: a forward whose result is
``x + bias + weight * (x * norms / (norms.mean(...) + eps))``, in whatever order and with whatever
variables it is written."""

import ast

import torch

from braze.convert.code import Code
from braze.convert.response_norms import ResponseNorm
from braze.convert.source import VARIABLE, constant

#: What an expression stands for, beside tuples of a name and of what it is made of.
_INPUT = ("input",)


class ResponseNormCode(Code):
    """The code of a forward that may be global response norm: each expression is one of the things
    on the way there, or nothing."""

    def response_norm(self):
        """A :class:`ResponseNorm`, or None."""
        *statements, last = self.body or [None]
        if not isinstance(last, ast.Return) or last.value is None or self.tree.shared:
            return None
        known = {self.input: _INPUT}
        for statement in statements:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if not isinstance(target, ast.Name) or len(statement.targets) != 1:
                return None
            if target.id in (self.me, self.input):
                return None
            known[target.id] = self._found(statement.value, known)
        found = self._found(last.value, known)
        return None if found is None else self._of_sum(found)

    def _of_sum(self, found):
        """A :class:`ResponseNorm` of the sum that is the result, or None."""
        terms = found[1] if found[0] == "sum" else ()
        by_name = {term[0]: term for term in terms}
        if len(terms) != 3 or set(by_name) != {"input", "parameter", "scaled"}:
            return None
        _, weight, (_, pixels, channels, eps) = by_name["scaled"]
        return ResponseNorm(
            weight[1:], by_name["parameter"][1:], pixels, channels, eps, self.same()
        )

    def _found(self, node, known):
        """What an expression stands for, or None."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            name = self.attribute(node)
            return None if name is None else ("parameter", name, None)
        if isinstance(node, ast.Call):
            return self._called(node, known)
        if not isinstance(node, ast.BinOp):
            return None
        left, right = (self._found(side, known) for side in (node.left, node.right))
        if isinstance(node.op, ast.Add):
            return self._added(node, left, right)
        if None in (left, right):
            return None
        if isinstance(node.op, ast.Div):
            fits = left[0] == "norms" and right[0] == "denominator" and left == right[1]
            return ("ratio", left[1], *right[2:]) if fits else None
        return _product(left, right) if isinstance(node.op, ast.Mult) else None

    def _added(self, node, left, right):
        if left is not None and left[0] == "mean":
            eps = self._value(node.right)
            return None if eps is None else ("denominator", *left[1:], eps)
        return _sum(left, right)

    def _called(self, node, known):
        """What a call of a function or of a method stands for."""
        function = self.known(node.func)
        args, method = list(node.args), None
        if function is None and isinstance(node.func, ast.Attribute):
            method, owner = node.func.attr, node.func.value
            args.insert(0, owner)
        if not args or any(isinstance(a, ast.Starred) for a in args):
            return None
        named = {k.arg: k.value for k in node.keywords}
        if method == "norm" or function in (torch.norm, torch.linalg.vector_norm):
            power = "ord" if function is torch.linalg.vector_norm else "p"
            return self._norms(args, named, known, power)
        if method == "mean" or function is torch.mean:
            return self._mean(args, named, known)
        if method in ("view", "reshape"):
            return self._viewed(args, named, known)
        if function is torch.addcmul and len(args) == 3 and not named:
            first, *factors = (self._found(a, known) for a in args)
            return _sum(first, None if None in factors else _product(*factors))
        return None

    def _norms(self, args, named, known, power):
        given = _given(args, named, ("input", power, "dim", "keepdim"))
        if given is None or self._found(given["input"], known) != _INPUT:
            return None
        order = constant(given[power]) if power in given else "fro" if power == "p" else 2
        dims = self._value(given.get("dim"))
        if order not in (2, 2.0, "fro") or constant(given.get("keepdim")) is not True:
            return None
        return None if dims is None else ("norms", dims)

    def _mean(self, args, named, known):
        given = _given(args, named, ("input", "dim", "keepdim"))
        found = None if given is None else self._found(given["input"], known)
        if found is None or found[0] != "norms":
            return None
        dim = self._value(given.get("dim"))
        keeps = constant(given.get("keepdim")) is True
        return ("mean", found, dim) if dim is not None and keeps else None

    def _viewed(self, args, named, known):
        found = None if named else self._found(args[0], known)
        if found is None or found[0] != "parameter" or found[2] is not None:
            return None
        whole = args[1] if len(args) == 2 else ast.Tuple(args[1:], ast.Load())
        shape = self._value(whole)
        return None if shape is None else ("parameter", found[1], shape)

    def _value(self, node):
        """A function from a module's dictionary to the value of an expression, or None."""
        name = None if node is None else self.attribute(node)
        if name is not None:
            return _Attribute(name)
        return None if node is None else _written(node)


class _Attribute:
    """Gets an attribute out of a module's dictionary. Equal ones are of one name."""

    def __init__(self, name):
        self.name = name

    def __call__(self, own):
        return own.get(self.name)

    def __eq__(self, other):
        return type(other) is _Attribute and other.name == self.name

    __hash__ = None


class _Written:
    """A value that is written in the code."""

    def __init__(self, value):
        self.value = value

    def __call__(self, own):
        return self.value

    def __eq__(self, other):
        return type(other) is _Written and repr(other.value) == repr(self.value)

    __hash__ = None


def _written(node):
    if isinstance(node, ast.List):
        node = ast.Tuple(node.elts, ast.Load())
    value = constant(node)
    return None if value is VARIABLE or value is None else _Written(value)


def _given(args, named, names):
    """Arguments by their names, or None."""
    if len(args) > len(names) or not named.keys() <= set(names[len(args) :]):
        return None
    return {**dict(zip(names, args, strict=False)), **named}


def _product(left, right):
    """What a product of two things is, or None."""
    pair = {left[0]: left, right[0]: right}
    if len(pair) != 2:
        return None
    if set(pair) == {"input", "ratio"}:
        return "product", *pair["ratio"][1:]
    if set(pair) == {"parameter", "product"}:
        return "scaled", pair["parameter"], pair["product"]
    return None


def _sum(left, right):
    """What a sum of two things is, or None."""
    if left is None or right is None:
        return None
    terms = [t for side in (left, right) for t in (side[1] if side[0] == "sum" else (side,))]
    return "sum", tuple(terms)
