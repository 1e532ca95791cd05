"""The code of functions of classes that are no layers of torch's, and what it takes for granted."""

import ast

import torch

from braze.convert.modules import is_plain_in
from braze.convert.names import Outer
from braze.convert.source import Unknown, tree_of

#: How a module comes to its forward.
CALLS = "__call__", "_call_impl"
#: How an attribute of an instance is looked up.
_LOOK_UPS = "__getattr__", "__getattribute__"
_NOTES = isinstance, torch._C._log_api_usage_once
#: Statements and expressions that do more than compute and branch.
MORE = (
    *(ast.AsyncFor, ast.AsyncWith, ast.Await, ast.Delete, ast.For, ast.Global, ast.Import),
    *(ast.ImportFrom, ast.NamedExpr, ast.Nonlocal, ast.Raise, ast.Try, ast.While, ast.With),
    *(ast.Yield, ast.YieldFrom),
)


class Code(Outer):
    """The code of a function that gets a module and one input, or of one that such a function
    calls.

    Attributes:
        assumed: what has been assumed of names outside of the function, as (scope, name, value);
            without a scope, of attributes of the class, None where it has none of that name.
    """

    def __init__(self, kind, function, values=None, assumed=None):
        self.kind, self.python = kind, function
        self.tree = tree_of(function)
        given = self.tree.node.args
        arguments = [a.arg for a in (*given.posonlyargs, *given.args)]
        if given.vararg or given.kwarg or set(function.__code__.co_freevars) - {"__class__"}:
            raise Unknown("it takes what its own arguments do not say")
        names = (n for n in self.tree.numbered if isinstance(n, ast.Name))
        self.assigned = {n.id for n in names if not isinstance(n.ctx, ast.Load)}
        self.assumed = [] if assumed is None else assumed
        self.functions = [function]
        if values is None:
            if len(arguments) != 2 or given.kwonlyargs or given.defaults:
                raise Unknown("it takes more than one input")
            self.me, self.input = arguments
            self.values = {}
        else:
            self.me, self.input, self.values = None, None, values
        strings = ast.Expr, ast.Constant
        self.body = [
            s
            for s in self.tree.node.body
            if not (isinstance(s, strings[0]) and isinstance(s.value, strings[1]))
        ]

    def known(self, node):
        """What an expression of names stands for outside of the function, which is noted."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        value = self.value(node)
        if value is not None:
            scope = self.python.__globals__
            self.assumed.append((scope, root.id, scope.get(root.id)))
        while value is not None and isinstance(node, ast.Attribute):
            scope = vars(self.value(node.value))
            self.assumed.append((scope, node.attr, scope[node.attr]))
            node = node.value
        return value

    def same(self):
        """A function that tells whether all that was assumed still holds."""
        scope = {"kind": self.kind}
        tests = ["kind.forward is function0"]
        for i, name in enumerate((*CALLS, *_LOOK_UPS)):
            scope[f"call{i}"] = getattr(torch.nn.Module, name)
            tests.append(f"kind.{name} is call{i}")
        for i, function in enumerate(self.functions):
            for part in ("code", "defaults", "kwdefaults"):
                scope[f"{part}{i}"] = getattr(function, f"__{part}__")
                tests.append(f"function{i}.__{part}__ is {part}{i}")
            scope[f"function{i}"] = function
        noted = {(id(names), name): (names, value) for names, name, value in self.assumed}
        for i, ((_, name), (names, value)) in enumerate(noted.items()):
            if names is None and value is None:
                tests.append(f"not hasattr(kind, {name!r})")
                continue
            if names is None:
                scope[f"value{i}"] = value
                tests.append(f"kind.{name} is value{i}")
                continue
            scope[f"names{i}"], scope[f"value{i}"] = names, value
            tests.append(f"names{i}.get({name!r}) is value{i}")
        return eval(f"lambda: {' and '.join(tests)}", scope)

    def notes_usage(self):
        """Whether all that a function does is to tell torch, for statistics, that it is used."""
        for node in self.tree.numbered:
            if isinstance(node, ast.Call):
                texts = isinstance(node.func, ast.Attribute) and node.func.attr == "startswith"
                if not texts and self.known(node.func) not in _NOTES:
                    return False
            stored = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
            if (stored and not isinstance(node, (ast.Name, ast.Tuple))) or isinstance(node, MORE):
                return False
        return not self.tree.shared

    def attribute(self, node):
        """The name of ``self.name`` where its class has no code for it, or None."""
        if not (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == self.me
            and not self.assigns(self.me)
        ):
            return None
        name = self.attribute_name(node)
        if not is_plain_in(self.kind, name):
            return None
        self.assumed.append((None, name, None))
        return name

    def through_children(self, value):
        """The names of the children that an expression hands another one through, innermost first,
        and that one."""
        names = []
        while isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
            name = self.attribute(value.func)
            if name is None:
                break
            names.insert(0, name)
            value = value.args[0]
        return names, value

    def is_input(self, node):
        return isinstance(node, ast.Name) and node.id == self.input

    def assigns(self, name):
        return name in self.assigned
