"""Squeeze-and-excitation, found in the code of classes: a forward that multiplies its input by what
children, or any other code, make of the input's means."""

import ast
import inspect
import types

import torch

from braze.convert.code import MORE, Code
from braze.convert.passes import PassCode, compiled
from braze.convert.source import constant, make
from braze.convert.squeezes import Gate, Squeeze


class SqueezeCode(PassCode):
    """The code of a forward that may be squeeze-and-excitation, or of a method that it calls."""

    def squeeze(self):
        """A :class:`Squeeze`, or None."""
        last = self.body[-1] if self.body else None
        if not isinstance(last, ast.Return) or not isinstance(last.value, ast.BinOp):
            return None
        if not isinstance(last.value.op, ast.Mult) or self.assigns(self.input):
            return None
        factors = [last.value.left, last.value.right]
        gates = [factor for factor in factors if not self.is_input(factor)]
        found = self._gate(gates[0]) if len(gates) == 1 else None
        if found is None or self.assigns(self.me):
            return None
        pool, names, methods, guards = found
        never = ast.Constant(False)
        guard, _ = compiled(ast.UnaryOp(ast.Not(), ast.BoolOp(ast.Or(), [never, never, *guards])))
        return Squeeze(pool, tuple(names), tuple(methods), guard, self.same())

    def _gate(self, value):
        """What the last statement's expression is, made of statements before it: the name of the
        child that takes the mean or None, the names of the children behind it, innermost first, the
        methods that it was found in, and expressions that have to be false; or None."""
        variable, found, guards = None, None, []
        for statement in self.body[:-1]:
            if isinstance(statement, ast.If) and not statement.orelse:
                guards.append(self.test(statement.test))
                if guards[-1] is None:
                    return None
                continue
            if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
                return None
            target = statement.targets[0]
            if not isinstance(target, ast.Name) or target.id in self.tree.shared:
                return None
            found = self._goes_on(statement.value, variable, found)
            if found is None:
                return None
            variable = target.id
        found = self._goes_on(value, variable, found)
        return found and (*found[:3], [*found[3], *guards])

    def _goes_on(self, value, variable, found):
        """What an expression of the variable is, which is what was found, or, without one, an
        expression of the input."""
        names, value = self.through_children(value)
        if found is not None:
            if not (isinstance(value, ast.Name) and value.id == variable):
                return None
            pool, before, methods, guards = found
            return pool, [*before, *names], methods, guards
        if self._is_mean(value):
            return None, names, [], []
        if self.is_input(value):
            return (names[0], names[1:], [], []) if names else None
        found = self._of_method(value)
        if found is None:
            return None
        pool, before, methods, guards = found
        return pool, [*before, *names], methods, guards

    def _is_mean(self, node):
        """Whether an expression is ``input.mean((2, 3), keepdim=True)``."""
        given = mean_of_pixels(self, node)
        return given is not None and given.get("keepdim") is True

    def _of_method(self, node):
        """What ``self.method(input)`` is."""
        if not (isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords):
            return None
        name, owner = getattr(node.func, "attr", None), getattr(node.func, "value", None)
        if not (
            isinstance(owner, ast.Name) and owner.id == self.me and self.is_input(node.args[0])
        ):
            return None
        name = self.attribute_name(node.func)
        function = inspect.getattr_static(self.kind, name, None)
        if not isinstance(function, types.FunctionType):
            return None
        for base in self.kind.__mro__:  # as long as none of them gets another
            value = vars(base).get(name)
            self.assumed.append((vars(base), name, value))
            if value is not None:
                break
        inner = SqueezeCode(self.kind, function, None, self.assumed)
        last = inner.body[-1] if inner.body else None
        if not isinstance(last, ast.Return) or last.value is None or inner.assigns(inner.input):
            return None
        found = None if inner.assigns(inner.me) else inner._gate(last.value)
        if found is None:
            return None
        self.functions += inner.functions
        pool, names, methods, guards = found
        return pool, names, [*methods, name], guards


def mean_of_pixels(code, node):
    """The arguments, by name, of ``input.mean((2, 3), ...)``; None where an expression of a
    :class:`Code` is no such call."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if node.func.attr != "mean" or not code.is_input(node.func.value) or len(node.args) > 2:
        return None
    given = dict(zip(("dim", "keepdim"), node.args, strict=False))
    given |= {k.arg: k.value for k in node.keywords}
    if not {"dim"} <= set(given) <= {"dim", "keepdim"}:
        return None
    try:
        given = {name: ast.literal_eval(value) for name, value in given.items()}
    except ValueError:
        return None
    dim = given["dim"]
    pixels = type(dim) in (tuple, list) and sorted(d % 4 for d in dim) == [2, 3]
    return given if pixels and type(given.get("keepdim", False)) is bool else None


class GateCode(Code):
    """The code of a forward that may multiply its input by what it makes of the input's means, in
    whatever way, as long as it asks for nothing else of the input but its shape and type."""

    #: What may be asked for.
    _SEEN = "shape", "size", "dtype", "device"
    #: What runs at other times, more than once, or may end the function.
    _NEVER = (
        *(*MORE, ast.Assert, ast.FunctionDef, ast.ClassDef, ast.Lambda),
        *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    )

    def gate(self):
        """A :class:`Gate`, or None."""
        last = self.body[-1] if self.body else None
        if not isinstance(last, ast.Return) or not isinstance(last.value, ast.BinOp):
            return None
        if not isinstance(last.value.op, ast.Mult):
            return None
        factors = [f for f in (last.value.left, last.value.right) if not self.is_input(f)]
        if len(factors) != 1 or self.assigns(self.input) or self.assigns(self.me):
            return None
        nodes = [n for statement in self.body for n in ast.walk(statement)]
        if any(isinstance(n, self._NEVER) for n in nodes):
            return None
        if sum(isinstance(n, ast.Return) for n in nodes) > 1 or self.tree.shared:
            return None
        pool, changes = self._uses(nodes, last, factors[0])
        if changes is None:
            return None
        code = make(self.python, lambda node: _Changes(changes).visit(node), {})
        return Gate(pool, code, self.same())

    def _uses(self, nodes, last, factor):
        """The name of the child that takes the means or None, and by the number of an expression or
        statement what stands in its place in the gate's code; None where the input is used for
        more."""
        pool, means, allowed = None, 0, set()
        changes = {last.number: lambda node: ast.Return(self._factor(node, factor))}
        for node in nodes:
            if self.is_input(getattr(node, "value", None)) and isinstance(node, ast.Attribute):
                if node.attr in self._SEEN:
                    allowed.add(node.value.number)
            elif mean_of_pixels(self, node) is not None:
                allowed.add(node.func.value.number)
                means += 1
            elif isinstance(node, ast.Call) and node.args and self.is_input(node.args[0]):
                name = self.attribute(node.func) if len(node.args) == 1 else None
                if self._is_expansion(node):
                    if node is not factor:
                        return None, None
                elif name is not None and not node.keywords:
                    pool = name
                    changes[node.number] = self._pooled
                elif self._pools_all(node):
                    changes[node.number] = self._pooled
                else:
                    return None, None
                allowed.add(node.args[0].number)
                means += node is not factor
        allowed |= {f.number for f in (last.value.left, last.value.right) if self.is_input(f)}
        inputs = {n.number for n in nodes if self.is_input(n)}
        return (pool, changes) if means == 1 and inputs == allowed else (None, None)

    def _pooled(self, node):
        return ast.Attribute(ast.Name(self.input, ast.Load()), "pooled", ast.Load())

    def _factor(self, node, factor):
        """Of the changed return statement: what the input is multiplied by."""
        product = node.value
        value = product.left if product.left.number == factor.number else product.right
        if not self._is_expansion(factor):
            return value
        expanded = ast.Attribute(ast.Name(self.input, ast.Load()), "expanded", ast.Load())
        return ast.Call(expanded, [value.func.value], [])

    def _is_expansion(self, node):
        """Whether an expression is ``something.expand_as(input)``."""
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "expand_as"
            and len(node.args) == 1
            and not node.keywords
            and self.is_input(node.args[0])
        )

    def _pools_all(self, node):
        """Whether a call is ``torch.nn.functional.adaptive_avg_pool2d(input, 1)``."""
        if len(node.args) != 2 or node.keywords or constant(node.args[1]) not in (1, (1, 1)):
            return False
        return self.known(node.func) is torch.nn.functional.adaptive_avg_pool2d


class _Changes(ast.NodeTransformer):
    """Puts other nodes in the places of some, given as functions of them by their numbers."""

    def __init__(self, changes):
        self._changes = changes

    def visit(self, node):
        node = self.generic_visit(node)
        change = self._changes.get(getattr(node, "number", None))
        return node if change is None else ast.copy_location(change(node), node)
