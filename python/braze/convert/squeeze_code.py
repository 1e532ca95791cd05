"""Squeeze-and-excitation, found in the code of classes: a forward that multiplies its input by what
children make of the input's means."""

import ast
import inspect
import types

from braze.convert.passes import PassCode, compiled
from braze.convert.squeezes import Squeeze


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
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        if node.func.attr != "mean" or not self.is_input(node.func.value) or len(node.args) > 1:
            return False
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if node.args:
            given["dim"] = node.args[0]
        if set(given) != {"dim", "keepdim"}:
            return False
        try:
            dim, keepdim = ast.literal_eval(given["dim"]), ast.literal_eval(given["keepdim"])
        except ValueError:
            return False
        pixels = type(dim) in (tuple, list) and sorted(d % 4 for d in dim) == [2, 3]
        return pixels and keepdim is True

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
