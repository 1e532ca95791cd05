"""Modules whose forward calls children one after the other, found in the code of their classes."""

import ast

from braze.convert.code import Code
from braze.convert.parts import Chain


class ChainCode(Code):
    """The code of a forward that may be ``x = self.conv(x)``, ``x = self.norm(x)``, and so on."""

    def chain(self):
        """A :class:`Chain`, or None."""
        self.aliases = {}  # expressions of attributes, in terms of `m`, by local variables
        *body, last = self.body or [None]
        if not isinstance(last, ast.Return) or last.value is None:
            return None
        variable, steps = self.input, []
        for statement in body:
            if self._is_alias(statement, variable):
                continue
            found = self._step(statement, variable)
            if found is None:
                return None
            variable, step = found
            steps.append(step)
        names = self._through(last.value, variable)
        if names is None:
            return None
        steps.append(_strings(names))
        whole = steps[0]
        for step in steps[1:]:
            whole = ast.BinOp(whole, ast.Add(), step)
        arguments = ast.arguments([], [ast.arg("m")], None, [], [], None, [])
        source = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, whole)))
        scope = {"getattr": getattr}
        return Chain(eval(compile(source, "<braze.convert>", "eval"), scope), self.same())

    def _step(self, statement, variable):
        """The variable that a statement sets, and an expression of the names of the children that
        it calls, innermost first; or None."""
        if isinstance(statement, ast.If):
            test = self._none_test(statement.test)
            ways = [self._steps(body, variable) for body in (statement.body, statement.orelse)]
            if test is None or None in ways:
                return None
            return variable, ast.IfExp(test, *map(_strings, ways))
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return None
        target, names = statement.targets[0], self._through(statement.value, variable)
        if not isinstance(target, ast.Name) or target.id in self.tree.shared or names is None:
            return None
        return None if target.id in (self.me, *self.aliases) else (target.id, _strings(names))

    def _steps(self, body, variable):
        """The names of the children that statements call, which all set the same variable."""
        names = []
        for statement in body:
            found = None if isinstance(statement, ast.If) else self._step(statement, variable)
            if found is None or found[0] != variable:
                return None
            names += [n.value for n in found[1].elts]
        return names

    def _through(self, value, variable):
        """The names of the children that an expression hands the variable through, or None."""
        names, value = self.through_children(value)
        return names if isinstance(value, ast.Name) and value.id == variable else None

    def _is_alias(self, statement, variable):
        """Takes ``name = getattr(self, "name", None)``; whether a statement is that."""
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return False
        target, call = statement.targets[0], statement.value
        if not (isinstance(target, ast.Name) and isinstance(call, ast.Call)):
            return False
        if target.id in (self.me, variable) or target.id in self.tree.shared or call.keywords:
            return False
        if len(call.args) != 3 or self.known(call.func) is not getattr:
            return False
        owner, name, default = call.args
        if not all(isinstance(n, ast.Constant) for n in (name, default)):
            return False
        found = ast.Attribute(owner, name.value, ast.Load())
        if type(name.value) is not str or default.value is not None or not self.attribute(found):
            return False
        self.aliases[target.id] = _get(name.value)
        return True

    def _none_test(self, node):
        """An expression of whether attributes of `m` are None, or None."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operand = self._none_test(node.operand)
            return None if operand is None else ast.UnaryOp(node.op, operand)
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
            return None
        right = node.comparators[0]
        if not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return None
        if not (isinstance(right, ast.Constant) and right.value is None):
            return None
        if isinstance(node.left, ast.Name):
            left = self.aliases.get(node.left.id)
        else:
            name = self.attribute(node.left)
            m = ast.Name("m", ast.Load())
            left = None if name is None else ast.Attribute(m, name, ast.Load())
        return None if left is None else ast.Compare(left, node.ops, [right])


def _get(name):
    arguments = [ast.Name("m", ast.Load()), ast.Constant(name), ast.Constant(None)]
    return ast.Call(ast.Name("getattr", ast.Load()), arguments, [])


def _strings(names):
    return ast.Tuple([ast.Constant(name) for name in names], ast.Load())
