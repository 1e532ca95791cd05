"""Forwards for :func:`braze.convert`: the user's own code, in which calls of layers and functions
that follow each other are spliced together into one.

Nothing is traced. A rewritten forward is the function as it was written, compiled again from its
syntax tree; only the calls that are fused or replaced are other ones, and each of them asks when it
runs whether what it calls is still what it was taken for (runs.py). So whatever else the code does,
branches, effects, settings that change, it goes on doing.
"""

import ast
import inspect
import types
import typing

from braze.convert import additions, kinds, runs
from braze.convert.chains import (
    FUNCTIONS,
    VARIABLE,
    Link,
    blocks,
    calls_of,
    constant,
    function_name,
    runs_among,
    settings_fit,
    stretch_length,
    takes,
)
from braze.convert.emit import SCOPES, is_super
from braze.convert.modules import own_class
from braze.convert.names import Names
from braze.convert.source import Unknown, tree_of


class Splices(typing.NamedTuple):
    """What is changed in a function, by the places of calls and statements in its tree. Equal ones
    make equal functions.

    Attributes:
        nested: runs within one expression: calls as (number, form), innermost first.
        stated: runs over several statements: the statements, those that only lie between, and the
            calls.
        loops: ``for`` statements that go through layers.
        functions: calls of functions that braze has, each with the function.
        methods: calls of ``relu`` and ``relu_`` of what may be a tensor.
        calls: calls of functions that are changed themselves, each with the function.
    """

    nested: tuple = ()
    stated: tuple = ()
    loops: tuple = ()
    functions: tuple = ()
    methods: tuple = ()
    calls: tuple = ()

    def __bool__(self):
        return any(self)


class Found(typing.NamedTuple):
    """What was found in a function and in those that it calls.

    Attributes:
        splices: of the function itself.
        runs: tuples of (kind, name) of the parts of each fused run.
        functions: names of the functions that are replaced.
    """

    splices: Splices
    runs: list
    functions: list


def analyse(module, function, kind_of):
    """Finds what can be spliced in a method of a module, without running anything of it.

    Args:
        kind_of: a function from a module to the kind of layer that it is or will be, or None.

    Raises:
        Unknown: the code of `function` is not known.
    """
    return _Analysis(module, kind_of).function(function, has_self=True)


class _Analysis:
    """Looks through the code of a module's forward and of what that calls."""

    def __init__(self, module, kind_of):
        self.module, self.kind_of = module, kind_of
        self.open = ()  # the functions that are being looked through, against recursion
        self.known = {}

    def function(self, function, has_self):
        key = function, has_self, self.open
        if key not in self.known:
            before, self.open = self.open, (*self.open, function)
            try:
                tree = tree_of(function)
                self.known[key] = _Function(self, function, tree, has_self).look()
            finally:
                self.open = before
        return self.known[key]


class _Function(Names, additions.Surroundings):
    """Looks through the code of one function."""

    def __init__(self, analysis, function, tree, has_self):
        self.analysis, self.python, self.tree = analysis, function, tree
        self.module = analysis.module
        arguments = (*tree.node.args.posonlyargs, *tree.node.args.args)
        self.me = arguments[0].arg if has_self and arguments else None
        self.find_names()
        self.find_local()
        self.links = {}  # by what they are asked for, see link()
        self.kinds = {}  # of the layers that an expression may stand for
        self.parts = {name: [] for name in Splices._fields}
        self.runs, self.functions, self.taken, self.chained = [], [], set(), set()

    def look(self):
        self._bodies(self.tree.node.body)
        for node in self.nodes:
            if isinstance(node, (ast.Call, ast.BinOp)) and node.number not in self.chained:
                self._nested(node)
        for node in self.nodes:
            if isinstance(node, ast.Call) and node.number not in self.taken:
                self._replaced(node)
        splices = Splices(*(tuple(self.parts[name]) for name in Splices._fields))
        return Found(splices, list(dict.fromkeys(self.runs)), list(dict.fromkeys(self.functions)))

    # Chains of links.

    def link(self, node, carried=None):
        """A call or an addition as a link, and the expression that it is applied to; or (None,
        None).

        Args:
            carried: the variable that holds what an earlier statement's chain has made, if any.
        """
        if not isinstance(node, (ast.Call, ast.BinOp, ast.AugAssign)):
            return None, None
        key = node.number, carried
        if key not in self.links:
            self.links[key] = self._link(node, carried)
        return self.links[key]

    def _link(self, node, carried):
        if additions.is_addition(node):
            return self._addition(node, carried)
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            return None, None
        layers = self.layers(node.func)
        if layers:
            kind = self._kind(layers)
            if kind is None or len(node.args) != 1 or node.keywords:
                return None, None
            return Link(node.number, "layer", kind, layers, ""), node.args[0]
        function, settings, input = self._function(node)
        kind = kinds.FUNCTION_KINDS.get(function) if isinstance(function, FUNCTIONS) else None
        if kind is None or settings is None or not settings_fit(function, kind, *settings):
            return None, None
        form = "method" if isinstance(function, str) else "function"
        return Link(node.number, form, kind, (), function_name(function)), input

    def _kind(self, layers):
        """The kind that all of some layers have, or None."""
        known = self.kinds.get(id(layers))
        if known is None:
            found = {self.analysis.kind_of(module) for _, module in layers}
            # The layers are kept, so that no others get their id.
            known = self.kinds[id(layers)] = found.pop() if len(found) == 1 else None, layers
        return known[0]

    def _addition(self, node, carried):
        forms = ("iadd",) if isinstance(node, ast.AugAssign) else ("add", "radd")
        for form in forms:
            inner, added = additions.parts(node, form)
            if isinstance(inner, ast.Name):
                continues = inner.id == carried
            else:
                link = self.link(inner)[0] if isinstance(inner, ast.Call) else None
                continues = link is not None and link.kind == "BatchNorm2d"
            if continues and self.may_be_added(added):
                return Link(node.number, form, "Add", (), form.lstrip("ri")), inner
        return None, None

    def _function(self, node):
        """The function of a call, or the name of the method; its settings as constants, or None;
        and the expression that it is applied to."""
        function = self.value(node.func)
        if function is None and isinstance(node.func, ast.Attribute):
            if self._is_me(node.func.value) or self.layers(node.func.value):
                return None, None, None
            function, args, input = node.func.attr, node.args, node.func.value
        elif function is None or not node.args:
            return function, None, None
        else:
            args, input = node.args[1:], node.args[0]
        values = tuple(constant(a) for a in args)
        named = {k.arg: constant(k.value) for k in node.keywords}
        known = None not in named and not any(v is VARIABLE for v in (*values, *named.values()))
        return function, (values, named) if known else None, input

    def chain(self, node, carried=None):
        """The links of an expression, outermost first, and what they are applied to."""
        links = []
        link, inner = self.link(node, carried)
        while link:
            links.append(link)
            node = inner
            link, inner = self.link(node, carried)
        return links, node

    def _nested(self, node):
        links = self.chain(node)[0]
        self.chained.update(k.number for k in links)
        links = [k for k in links[::-1] if k.number not in self.taken]
        at = 0
        while at < len(links):
            length = stretch_length(links[at : at + runs.LONGEST_STRETCH])
            if length:
                self._take(links[at : at + length])
                self.parts["nested"].append(calls_of(links[at : at + length]))
            at += max(length, 1)

    def _take(self, run):
        self.taken.update(k.number for k in run)
        self.runs += blocks(run)

    # Statements.

    def _bodies(self, body, in_try=False):
        """Finds the runs over statements of a body, and of the bodies in it."""
        at = 0
        while at < len(body) and not in_try:
            at += max(1, self._statements(body, at))
        for statement in body:
            if isinstance(statement, SCOPES):
                continue
            # What is assigned on the way may be looked at where an exception is caught.
            if isinstance(statement, ast.For) and not in_try and self._is_loop(statement):
                self._loop(statement)
            tried = in_try or isinstance(statement, _CATCH)
            for name in ("body", "orelse", "finalbody"):
                self._bodies(getattr(statement, name, []), tried)
            for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                self._bodies(handler.body, tried)

    def _statements(self, body, first):
        """Takes a run that begins in the first of these statements and ends in a later one; how
        many statements it takes, or 0."""
        links, owners, name, between = [], [], None, []
        for at in range(first, len(body)):
            statement = body[at]
            if links and self.may_lie_between(statement, name):
                between.append(at)
                continue
            target, found, base, whole = self._value(statement, name)
            if not found or (links and not self._continues(name, target, base, statement)):
                break
            links += found[::-1]
            owners += [at] * len(found)
            name = target
            # Nothing can go on with what is no variable.
            long_enough = len(links) - owners.count(first) >= runs.LONGEST_STRETCH
            if not whole or not isinstance(name, str) or long_enough:
                break
        for start in range(owners.count(first)):
            length = stretch_length(links[start : start + runs.LONGEST_STRETCH])
            if length and owners[start + length - 1] > first:
                run, last = links[start : start + length], owners[start + length - 1]
                if self._added_first(run[0], run[1], owners[start : start + 2]):
                    return 0
                self._take(run)
                numbers = tuple(s.number for s in body[first : last + 1])
                aside = tuple(body[i].number for i in between if i < last)
                self.parts["stated"].append((numbers, aside, calls_of(run)))
                # For where the statements run as they stand.
                for k in run:
                    if k.form == "function" and k.kind in kinds.ACTIVATIONS:
                        node = self.tree.numbered[k.number]
                        self.parts["functions"].append((k.number, self.value(node.func)))
                    if k.form == "method" and k.kind == "ReLU":
                        self.parts["methods"].append(k.number)
                return last + 1 - first
        return 0

    def _added_first(self, norm, addition, owners):
        """Whether ``module(x) + bn(y)`` stands in one statement: what is added comes first."""
        node = self.tree.numbered[addition.number]
        return (
            addition.form == "radd"
            and owners[0] == owners[1]
            and not isinstance(additions.parts(node, "radd")[1], ast.Name)
        )

    def _value(self, statement, carried=None):
        """What a statement sets (a variable's name; None: it returns), the links of the chain that
        it evaluates first, outermost first, what they are applied to, and whether they are all."""
        target = None
        if isinstance(statement, ast.AugAssign):
            target = statement.target
            if not isinstance(target, ast.Name) or target.id in self.tree.shared:
                return None, [], None, False
            return target.id, *self.chain(statement, carried), True
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if not isinstance(target, ast.Name) or target.id in self.tree.shared:
                return None, [], None, False
            target = target.id
        elif not isinstance(statement, ast.Return) or statement.value is None:
            return None, [], None, False
        node = statement.value
        while node is not None:
            links, base = self.chain(node, carried)
            if links:
                return target, links, base, node is statement.value
            node = self._evaluated_first(node)
        return None, [], None, False

    def _evaluated_first(self, node):
        """The part of an expression before which nothing is evaluated that might do anything."""
        if isinstance(node, ast.BinOp):
            return node.left
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return node.value
        if isinstance(node, ast.Call):
            if self.layers(node.func) or self.value(node.func) is not None:
                return node.args[0] if node.args else None
            return node.func.value if isinstance(node.func, ast.Attribute) else None
        return None

    def _continues(self, name, target, base, statement):
        """Whether a statement goes on with what the one before has assigned, and nothing else ever
        sees that."""
        if not isinstance(base, ast.Name) or base.id != name or name in self.declared:
            return False
        nodes = (n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name)
        loads = sum(isinstance(n.ctx, ast.Load) for n in nodes)
        if loads != (0 if isinstance(statement, ast.AugAssign) else 1):
            return False
        once = len(self.stores[name]) == 1 and len(self.loads[name]) == 1
        return target in (name, None) or once

    def _is_loop(self, node):
        """Whether a statement is ``for layer in layers: x = layer(x)``."""
        if not (isinstance(node.target, ast.Name) and len(node.body) == 1 and not node.orelse):
            return False
        statement, name = node.body[0], node.target.id
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return False
        target, call = statement.targets[0], statement.value
        return (
            isinstance(target, ast.Name)
            and isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == name
            and len(call.args) == 1
            and not call.keywords
            and isinstance(call.args[0], ast.Name)
            and call.args[0].id == target.id != name
            and len(self.stores[name]) == len(self.loads[name]) == 1
            and not {name, target.id} & (self.tree.shared | self.declared)
        )

    def _loop(self, node):
        found = runs_among(self.elements(node.iter) or (), self.analysis.kind_of)
        if found:
            self.runs += found
            self.parts["loops"].append(node.number)

    # Functions in the place of others.

    def _replaced(self, node):
        function, _, _ = self._function(node)
        names = [k.arg for k in node.keywords]
        open_ended = None in names or any(isinstance(a, ast.Starred) for a in node.args)
        args = len(node.args) + isinstance(function, str)
        if isinstance(function, str):
            if function in kinds.METHODS and not open_ended and takes(function, args, names):
                self.parts["methods"].append(node.number)
                self.functions.append(function_name(function))
            return
        if isinstance(function, FUNCTIONS) and function in kinds.FUNCTIONS:
            if not open_ended and takes(function, args, names):
                self.parts["functions"].append((node.number, function))
                self.functions.append(function_name(function))
            return
        called, has_self = self._called(node)
        if called is not None and called not in self.analysis.open and not _is_librarys(called):
            try:
                found = self.analysis.function(called, has_self)
            except Unknown:
                return
            if found.splices:
                self.parts["calls"].append((node.number, called, found.splices))
            self.runs += found.runs
            self.functions += found.functions

    def _called(self, node):
        """The Python function that a call runs, and whether it gets the module as its first
        argument."""
        func, found, bound = node.func, None, False
        if isinstance(func, ast.Attribute) and self.me and self._is_me(func.value):
            bound, name = True, self.attribute_name(func)
            if name in self.module.__dict__:
                return None, False
            if not is_super(func.value):
                found = inspect.getattr_static(own_class(self.module), name, None)
            elif "__class__" in self.python.__code__.co_freevars:
                found = _after(own_class(self.module), self.outer("__class__"), name)
        else:
            found = self.value(func)
        if isinstance(found, staticmethod):
            found, bound = found.__func__, False
        return (found, bound) if isinstance(found, types.FunctionType) else (None, False)

    def _is_me(self, node):
        return (isinstance(node, ast.Name) and node.id == self.me) or is_super(node)


_CATCH = tuple(
    getattr(ast, n) for n in ("Try", "TryStar", "With", "AsyncWith") if hasattr(ast, n)
)  # fmt: skip


def _after(kind, base, name):
    """What ``super().name`` is in a method of `base` of an instance of `kind`."""
    mro = kind.__mro__
    if base not in mro:
        return None
    later = (vars(c) for c in mro[mro.index(base) + 1 :])
    return next((c[name] for c in later if name in c), None)


def _is_librarys(function):
    return (function.__module__ or "").split(".")[0] in ("torch", "braze")
