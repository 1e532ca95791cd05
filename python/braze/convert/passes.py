"""What hands on its input, found in the code of its class."""

import ast
import inspect
import types

import torch

from braze.convert.code import Code
from braze.convert.parts import Pass


def compiled(test):
    """A function of a module for an expression over its attributes, as :meth:`PassCode.test` gives
    them, and the names of these. Where they are of types whose comparison does more than that, it
    is false."""
    found, ordered = _attributes(test), set()
    for node in ast.walk(test):
        if any(isinstance(op, _ORDERS) for op in ast.iter_child_nodes(node)):
            ordered |= _attributes(node)
    checks = [
        ast.Compare(_type(_read(n)), [ast.In()], [_name("numbers" if n in ordered else "plain")])
        for n in sorted(found)
    ]
    body = ast.BoolOp(ast.And(), [*checks, test]) if checks else test
    arguments = ast.arguments([], [ast.arg("m")], None, [], [], None, [])
    source = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
    scope = {"numbers": (bool, int, float), "plain": _PLAIN, "getattr": getattr, "type": type}
    return eval(compile(source, "<braze.convert>", "eval"), scope), found


def compiled_all(tests):
    """The function of :func:`compiled` that tells whether all of some expressions hold."""
    always = ast.Constant(True)  # an `and` is of two at least
    return compiled(ast.BoolOp(ast.And(), [always, always, *tests]))[0]


def _attributes(test):
    return {n.args[1].value for n in ast.walk(test) if isinstance(n, ast.Call)}


class PassCode(Code):
    """The code of a forward, or of a function that one calls, which may return its input."""

    def passing(self):
        """A :class:`Pass`, or None."""
        test = self.returns_input(self.body)
        if test is None:
            return None
        passes, found = compiled(test)
        return Pass(passes, tuple(sorted(found - {"training"})), self.same())

    def returns_input(self, body):
        """An expression, over attributes of a module `m`, of when statements do nothing but return
        the input; or None where that is never known."""
        if not body:
            return None
        first, rest = body[0], body[1:]
        if self._does_nothing(first):
            return self.returns_input(rest)
        if isinstance(first, ast.Return) and first.value is not None:
            if self._stands_for_input(first.value):
                return ast.Constant(True)
            return self._called_returns_input(first.value)
        if not isinstance(first, ast.If):
            return None
        test = self.test(first.test)
        if test is None:
            return None
        ways = []
        for way, branch in ((test, first.body), (ast.UnaryOp(ast.Not(), test), first.orelse)):
            then = self.returns_input([*branch, *rest])
            if then is not None:
                ways.append(ast.BoolOp(ast.And(), [way, then]))
        return ast.BoolOp(ast.Or(), ways) if len(ways) > 1 else next(iter(ways), None)

    def _does_nothing(self, statement):
        """Whether a statement does nothing, whichever way it goes, but note that a function of
        torchvision's is used, as these begin."""
        if isinstance(statement, ast.If):
            asks = not statement.orelse and self._asks_what_runs(statement.test)
            return asks and all(map(self._does_nothing, statement.body))
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or call.keywords:
            return False
        function = self.known(call.func)
        if not isinstance(function, types.FunctionType):
            return False
        self.functions.append(function)
        inner = Code(self.kind, function, {}, self.assumed)
        return all(isinstance(a, ast.Name) for a in call.args) and inner.notes_usage()

    def _asks_what_runs(self, node):
        """Whether an expression asks torch whether it is scripting or tracing, and nothing else."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._asks_what_runs(node.operand)
        if isinstance(node, ast.BoolOp):
            return all(map(self._asks_what_runs, node.values))
        called = isinstance(node, ast.Call) and not node.args and not node.keywords
        return called and self.known(node.func) in (torch.jit.is_scripting, torch.jit.is_tracing)

    def _stands_for_input(self, node):
        if not isinstance(node, ast.Name) or self._assigns_before(node.id):
            return False
        return node.id == self.input or self.values.get(node.id) is _INPUT

    def _assigns_before(self, name):
        # Only tests come before what is asked for here.
        return name in self.tree.shared

    def _called_returns_input(self, node):
        """:meth:`returns_input` of ``f(input, ...)``."""
        if not isinstance(node, ast.Call) or self.me is None:
            return None
        function = self.known(node.func)
        if not isinstance(function, types.FunctionType):
            return None
        given = [self._given(a) for a in node.args]
        named = {k.arg: self._given(k.value) for k in node.keywords}
        if None in given or None in named or None in named.values():
            return None
        try:
            bound = inspect.signature(function, follow_wrapped=False).bind(*given, **named)
        except TypeError:
            return None
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name, value in values.items():
            if not isinstance(value, ast.AST) and value is not _INPUT:  # a default
                values[name] = ast.Constant(value) if type(value) in _PLAIN else None
        inner = PassCode(self.kind, function, values, self.assumed)
        found = inner.returns_input(inner.body)
        self.functions.append(function)
        return found

    def _given(self, node):
        """An argument: the input, or an expression over attributes of `m`; or None."""
        return _INPUT if self.is_input(node) else self.test(node)

    def test(self, node):
        """An expression over attributes of the module and constants, in terms of `m`; or None."""
        if isinstance(node, ast.Constant):
            return ast.Constant(node.value) if type(node.value) in _PLAIN else None
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            return None if value is _INPUT or self.assigns(node.id) else value
        if isinstance(node, ast.Attribute):
            name = self.attribute(node)
            return None if name is None else _read(name)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            operand = self.test(node.operand)
            return None if operand is None else ast.UnaryOp(node.op, operand)
        if isinstance(node, ast.BoolOp):
            values = [self.test(v) for v in node.values]
            return None if None in values else ast.BoolOp(node.op, values)
        if isinstance(node, (ast.List, ast.Tuple)):
            values = [self.test(v) for v in node.elts]
            constant = all(isinstance(v, ast.Constant) for v in values)
            return ast.Tuple(values, ast.Load()) if constant else None
        if isinstance(node, ast.Compare) and all(isinstance(op, _COMPARES) for op in node.ops):
            values = [self.test(v) for v in (node.left, *node.comparators)]
            return None if None in values else ast.Compare(values[0], node.ops, values[1:])
        return None


_INPUT = object()
#: The types of what is compared without any effects.
_PLAIN = bool, int, float, str, type(None)
_ORDERS = ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.USub
_COMPARES = *_ORDERS[:-1], ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn


def _name(name):
    return ast.Name(name, ast.Load())


def _read(name):
    # An attribute that is missing is of no type that counts.
    return ast.Call(_name("getattr"), [_name("m"), ast.Constant(name), _name("m")], [])


def _type(node):
    return ast.Call(_name("type"), [node], [])
