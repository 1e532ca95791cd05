"""Forwards for :func:`braze.convert`: the user's own code, in which calls of layers and functions
that follow each other are spliced together into one.

Nothing is traced. A rewritten forward is the function as it was written, compiled again from its
syntax tree; only the calls that are fused or replaced are other ones, and each of them asks when it
runs whether what it calls is still what it was taken for (runs.py). So whatever else the code does,
branches, effects, settings that change, it goes on doing.
"""

import ast
import typing

from braze.convert import additions, kinds, runs, shared_products, standardized, through
from braze.convert.branches import Branches
from braze.convert.calls import Calls
from braze.convert.chains import (
    FUNCTIONS,
    WINDOW,
    Link,
    blocks,
    calls_of,
    function_name,
    module_link,
    runs_among,
    settings_fit,
    stretch_length,
)
from braze.convert.emit import SCOPES
from braze.convert.names import Names
from braze.convert.source import tree_of


class Splices(typing.NamedTuple):
    """What is changed in a function, by the places of calls and statements in its tree. Equal ones
    make equal functions.

    Attributes:
        nested: runs within one expression: calls as (number, form), innermost first.
        stated: runs over several statements: the statements, those that only lie between, the
            calls, the ``if`` statements among them with the way that each takes, and what that
            takes for granted (branches.py).
        loops: ``for`` statements that go through layers.
        functions: calls of functions that braze has, each with the function.
        methods: calls of ``relu`` and ``relu_`` of what may be a tensor.
        calls: calls of functions that are changed themselves, each with the function.
        standardized: weight standardization that is written out (standardized.py).
        shared: norms whose result several convolutions read (shared_products.py).
    """

    nested: tuple = ()
    stated: tuple = ()
    loops: tuple = ()
    functions: tuple = ()
    methods: tuple = ()
    calls: tuple = ()
    standardized: tuple = ()
    shared: tuple = ()

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


def analyse(module, function, kinds_of):
    """Finds what can be spliced in a method of a module, without running anything of it.

    Args:
        kinds_of: a function from a module to the kinds of the links that a call of it stands for,
            as recognise.kinds_of() gives them.

    Raises:
        Unknown: the code of `function` is not known.
    """
    return _Analysis(module, kinds_of).function(function, has_self=True)


class _Analysis:
    """Looks through the code of a module's forward and of what that calls."""

    def __init__(self, module, kinds_of):
        self.module, self.kinds_of = module, kinds_of
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


class _Chain:
    """Calls that follow each other over several statements.

    Attributes:
        links: innermost first.
        owners: for each, the place of its statement.
        name: the variable that holds the result, None where it is returned.
    """

    def __init__(self):
        self.links, self.owners, self.name = [], [], None


class _Function(Names, Calls, Branches, additions.Surroundings):
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
        for found in shared_products.find(self):
            if found.number not in self.taken:
                self.parts["shared"].append(found)
                self.runs += blocks([self.link(self.tree.numbered[found.number])[0]])
        for found in standardized.find(self):
            self.parts["standardized"].append(found)
            self.functions.append(standardized.NAME)
            self.taken.add(found.norm)
        for node in self.nodes:
            if isinstance(node, ast.Call) and node.number not in self.taken:
                self.replace(node)
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
        if additions.is_scaling(node):
            return self._scaling(node)
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            return None, None
        layers = self.layers(node.func)
        if layers:
            found = self._kinds(layers)
            if found is None or len(node.args) != 1 or node.keywords:
                return None, None
            return module_link(node.number, found, layers), node.args[0]
        function, settings, input = self.function_of(node)
        kind = kinds.FUNCTION_KINDS.get(function) if isinstance(function, FUNCTIONS) else None
        if kind is None or settings is None or not settings_fit(function, kind, *settings):
            return None, None
        form = "method" if isinstance(function, str) else "function"
        return Link(node.number, form, (kind,), (), function_name(function)), input

    def _kinds(self, layers):
        """The kinds that all of some layers have, or None."""
        known = self.kinds.get(id(layers))
        if known is None:
            found = {self.analysis.kinds_of(module) for _, module in layers}
            # The layers are kept, so that no others get their id.
            known = self.kinds[id(layers)] = found.pop() if len(found) == 1 else None, layers
        return known[0]

    def _addition(self, node, carried):
        forms = ("iadd",) if isinstance(node, ast.AugAssign) else ("add", "radd")
        for form in forms:
            inner, added = additions.parts(node, form)
            if self._is_normed(inner, added, form, carried) and self.may_be_added(added):
                return Link(node.number, form, ("Add",), (), form.lstrip("ri")), inner
        return None, None

    def _scaling(self, node):
        for form in additions.scale_forms(node):
            inner, scale = additions.parts(node, form)
            if self.is_me(inner) or self.layers(inner):
                continue
            # A run evaluates the parameter before what it scales.
            first = form == "rmul" or isinstance(scale, ast.Constant)
            ordered = first or isinstance(inner, ast.Name)
            if ordered and self.is_scale(scale):
                return Link(node.number, form, ("Scale",), (), "mul"), inner
        return None, None

    def _is_normed(self, node, added, form, carried):
        """Whether an expression may be a batch norm's result, or a scaled one, of this statement or
        of one before, to which something is added."""
        if isinstance(node, ast.Name):
            return node.id == carried
        called = isinstance(node, ast.Call) or additions.is_scaling(node)
        link, inner = self.link(node, carried) if called else (None, None)
        if link is None:
            return False
        if link.kinds not in ((), (through.SOMETIMES,), ("Permute",)):
            return through.computing(link.kinds)[0] in runs.ADDED_TO
        # A run evaluates its names after what is made before this expression.
        ordered = form != "radd" or isinstance(added, ast.Name)
        return ordered and self._is_normed(inner, added, form, carried)

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
            length = stretch_length(links[at : at + WINDOW])
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
        chain, between, branches = _Chain(), [], {}
        for at in range(first, len(body)):
            statement = body[at]
            if chain.links and self.may_lie_between(statement, chain.name):
                between.append(at)
                continue
            inner = [statement]
            if isinstance(statement, ast.If):
                branches[at] = self.led(statement)
                if branches[at] is None:
                    break
                inner = branches[at].statements
            if not all(self._goes_on(chain, part, at) for part in inner) or not chain.links:
                break
        links, owners = chain.links, chain.owners
        end = 0  # of what is a run within the first statement
        for start in range(owners.count(first)):
            if start < end:
                continue
            if first in branches and start > 0:
                break  # behind other statements in there
            length = stretch_length(links[start : start + WINDOW])
            run, last = links[start : start + length], owners[start + length - 1]
            if last == first:
                end = start + length
            taken = any(k.number in self.taken for k in run)
            if not length or last == first or taken or self._added_first(run, owners[start:]):
                continue
            kept = any(i < last for i in between) or not self._is_applied_to_name(run[0])
            if kept and first in branches:
                continue
            if kept and self._adds_what_it_sets(run[: owners[start:].count(first)], body[first]):
                continue
            self._take(run)
            numbers = tuple(s.number for s in body[first : last + 1])
            aside = tuple(body[i].number for i in between if i < last)
            passed = [branch for i, branch in branches.items() if i <= last]
            led = tuple(way for branch in passed for way in branch.ways)
            assumed = dict.fromkeys(a for branch in passed for a in branch.assumed)
            self.parts["stated"].append((numbers, aside, calls_of(run), led, tuple(assumed)))
            self._replace_where_they_stand(run)
            return last + 1 - first
        return 0

    def _goes_on(self, chain, statement, at):
        """Adds what a statement goes on with to a chain; whether another one may go on."""
        target, found, base, whole = self._value(statement, chain.name)
        if not found:
            return False
        if chain.links and not self._continues(chain.name, target, base, statement):
            return False
        chain.links += found[::-1]
        chain.owners += [at] * len(found)
        chain.name = target
        later = chain.links[chain.owners.count(chain.owners[0]) :]
        long_enough = sum(len(k.kinds) for k in later) >= runs.LONGEST_STRETCH
        # Nothing can go on with what is no variable.
        return whole and isinstance(target, str) and not long_enough

    def _replace_where_they_stand(self, run):
        """Replaces the functions in a run over statements for where these run as they stand."""
        for k in run:
            if k.form == "function" and k.kinds[0] in kinds.ACTIVATIONS:
                node = self.tree.numbered[k.number]
                self.parts["functions"].append((k.number, self.value(node.func)))
            if k.form == "method" and k.kinds == ("ReLU",):
                self.parts["methods"].append(k.number)

    def _added_first(self, run, owners):
        """Whether ``module(x) + bn(y)`` stands in one statement: what is added comes first."""
        for at, link in enumerate(run):
            if link.form == "radd":
                behind = (i for i in range(at - 1, -1, -1) if {*run[i].kinds} & {*runs.ADDED_TO})
                norm = next(behind)
                added = additions.parts(self.tree.numbered[link.number], "radd")[1]
                return owners[norm] == owners[at] and not isinstance(added, ast.Name)
        return False

    def _is_applied_to_name(self, link):
        """Whether the first link of a run is applied to a variable, not to what is made for it."""
        return isinstance(self.link(self.tree.numbered[link.number])[1], ast.Name)

    def _adds_what_it_sets(self, run, statement):
        """Whether ``x = bn(f(x)) + module(x)`` reads, in what is added, the variable that it sets:
        in that the spliced code keeps what the run is applied to, from before on."""
        (target,) = statement.targets if isinstance(statement, ast.Assign) else (None,)
        return isinstance(target, ast.Name) and any(
            isinstance(n, ast.Name) and n.id == target.id
            for link in run
            if link.form in additions.FORMS
            for n in ast.walk(additions.parts(self.tree.numbered[link.number], link.form)[1])
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
        found = runs_among(self.elements(node.iter) or (), self.analysis.kinds_of)
        if found:
            self.runs += found
            self.parts["loops"].append(node.number)


_CATCH = tuple(
    getattr(ast, n) for n in ("Try", "TryStar", "With", "AsyncWith") if hasattr(ast, n)
)  # fmt: skip
