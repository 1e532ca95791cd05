"""Forwards for :func:`braze.convert`: the user's own code, in which calls of layers and functions
that follow each other are spliced together into one.

Nothing is traced. A rewritten forward is the function as it was written, compiled again from its
syntax tree; only the calls that are fused or replaced are other ones, and each of them asks when it
runs whether what it calls is still what it was taken for (runs.py). So whatever else the code does,
branches, effects, settings that change, it goes on doing.
"""

import ast
import inspect
import itertools
import types
import typing

import torch

from braze.convert import runs
from braze.convert.source import PREFIX, Unknown, copy_tree, make, tree_of

_CONTAINERS = torch.nn.ModuleList, torch.nn.Sequential


class Link(typing.NamedTuple):
    """A call of a layer or of a function, as part of a chain.

    Attributes:
        number: the call, by its place in the tree.
        form: ``"layer"``, ``"function"`` or ``"method"`` of a tensor.
        kind: what it computes, see runs.KINDS.
        layers: the layers that it may call, with their names; empty for functions.
        name: of the function.
    """

    number: int
    form: str
    kind: str
    layers: tuple
    name: str


class Splices(typing.NamedTuple):
    """What is changed in a function, by the places of calls and statements in its tree. Equal ones
    make equal functions.

    Attributes:
        nested: runs within one expression: calls as (number, form), innermost first.
        stated: runs over several statements: the statements, and the calls.
        loops: ``for`` statements that go through layers.
        functions: calls of functions that braze has.
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


def analyse_children(module, kind_of):
    """The runs among the children of a Sequential, as :class:`Found` has them."""
    children = module.__dict__["_modules"].items() if _is_container(module) else ()
    return _runs_among(children, kind_of)


def _runs_among(layers, kind_of):
    links = [Link(0, "layer", kind_of(m), ((name, m),), "") for name, m in layers]
    found, at = [], 0
    while at < len(links):
        length = _run_length(links[at:])
        found += _blocks(links[at : at + length])
        at += max(length, 1)
    return found


def _run_length(links):
    """The length of the longest run that links, innermost first, begin with, or 0."""
    length = runs.run_length(tuple(k.kind for k in links))
    while length and not _fits(links[:length]):
        length = runs.run_length(tuple(k.kind for k in links[: length - 1]))
    return length


def _fits(links):
    """Whether layers have settings that the fused blocks have too."""
    if len({len(k.layers) for k in links} - {0, 1}) > 1:
        return False  # of a loop over several lists of layers, of other lengths
    for conv, bn in itertools.pairwise(links):
        if conv.kind == "Conv2d":
            pairs = zip(conv.layers, bn.layers, strict=False)
            if not all(runs.conv_fits(a, b) for (_, a), (_, b) in pairs):
                return False
    return True


def _blocks(run):
    """The fused blocks of a run, as tuples of (kind, name) of their parts."""
    found, at = [], 0
    while at < len(run):
        kinds = tuple(k.kind for k in run[at:])
        length = next((len(b) for b in runs.BLOCKS if kinds[: len(b)] == b), 0)
        block = run[at : at + length]
        for i in range(max((len(k.layers) for k in block), default=0)):
            found.append(tuple((k.kind, _part(k, i)) for k in block))
        at += max(length, 1)
    return found


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
        self.open = []  # the functions that are being looked through, against recursion

    def function(self, function, has_self):
        tree = tree_of(function)
        self.open.append(function)
        try:
            return _Function(self, function, tree, has_self).look()
        finally:
            self.open.pop()


class _Function:
    """Looks through the code of one function."""

    def __init__(self, analysis, function, tree, has_self):
        self.analysis, self.python, self.tree = analysis, function, tree
        self.module = analysis.module
        arguments = (*tree.node.args.posonlyargs, *tree.node.args.args)
        self.me = arguments[0].arg if has_self and arguments else None
        names = [n for n in tree.numbered if isinstance(n, ast.Name)]
        self.stores, self.loads = {}, {}
        for name in names:
            uses = self.loads if isinstance(name.ctx, ast.Load) else self.stores
            uses.setdefault(name.id, []).append(name)
        if self.me in self.stores:
            self.me = None
        self.aliases = {}  # layers by the local variables that hold them
        self.parts = {name: [] for name in Splices._fields}
        self.runs, self.functions, self.taken = [], [], set()

    def look(self):
        self._find_aliases()
        self._bodies(self.tree.node.body)
        for node in self._nodes(self.tree.node):
            if isinstance(node, ast.Call):
                self._nested(node)
        for node in self._nodes(self.tree.node):
            if isinstance(node, ast.Call) and node.number not in self.taken:
                self._replaced(node)
        splices = Splices(*(tuple(self.parts[name]) for name in Splices._fields))
        return Found(splices, self.runs, self.functions)

    def _nodes(self, node):
        """A node and what is in it, outermost first, without the functions and classes in it."""
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _SCOPES):
                yield from self._nodes(child)

    # What names stand for.

    def _find_aliases(self):
        """Local variables that are set once, to a layer, or by a loop over layers."""
        for node in self._nodes(self.tree.node):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._alias(node.targets[0], self.layers(node.value))
            elif isinstance(node, ast.For):
                self._alias_loop(node.target, node.iter)

    def _alias(self, target, layers):
        if (
            layers
            and isinstance(target, ast.Name)
            and len(self.stores.get(target.id, ())) == 1
            and target.id not in self.tree.shared
            and target.id not in _declared(self.tree.node)
        ):
            self.aliases[target.id] = layers

    def _alias_loop(self, target, iterated):
        self._alias(target, self._elements(iterated))
        if (
            isinstance(iterated, ast.Call)
            and self.value(iterated.func) in (zip, enumerate)
            and isinstance(target, ast.Tuple)
            and not iterated.keywords
        ):
            args = iterated.args
            if self.value(iterated.func) is enumerate:
                args = [None, *args[:1]]
            for name, argument in zip(target.elts, args, strict=False):
                if argument is not None:
                    self._alias(name, self._elements(argument))

    def _elements(self, node):
        """The layers that a container expression holds, as (name, module), or None."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            found = self._elements(node.value)
            parts = (node.slice.lower, node.slice.upper, node.slice.step)
            bounds = [None if part is None else _constant(part) for part in parts]
            return None if not found or _VARIABLE in bounds else found[slice(*bounds)]
        is_me = isinstance(node, ast.Name) and node.id == self.me
        holders = (("", self.module),) if is_me else self.layers(node)
        if not holders or len(holders) > 1 or not _is_container(holders[0][1]):
            return None
        (prefix, container), *_ = holders
        prefix = f"{prefix}." if prefix else ""
        return tuple((prefix + k, m) for k, m in container.__dict__["_modules"].items())

    def layers(self, node):
        """The modules that an expression may stand for, as ((name, module), ...), or None."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            found = self._elements(node.value)
            index = _constant(node.slice)
            if found and isinstance(index, int) and -len(found) <= index < len(found):
                return (found[index],)
            return found if isinstance(node.slice, ast.Name) else None
        return None

    def _attribute(self, node):
        if isinstance(node.value, ast.Name) and node.value.id == self.me:
            owners = (("", self.module),)
        else:
            owners = self.layers(node.value)
        if not owners or len(owners) > 1:
            return None
        ((prefix, owner),) = owners
        name = self._attribute_name(node)
        child = child_of(owner, name)
        return None if child is None else ((f"{prefix}.{name}" if prefix else name, child),)

    def _attribute_name(self, node):
        """The name of an attribute: Python spells private ones after the class."""
        name, kind = node.attr, (self.tree.class_name or "").lstrip("_")
        return f"_{kind}{name}" if kind and name[:2] == "__" != name[-2:] else name

    def value(self, node):
        """What an expression of names stands for outside of the function, or None."""
        if isinstance(node, ast.Name):
            return self._outer(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, types.ModuleType):
                return vars(owner).get(node.attr)
        return None

    def _outer(self, name):
        code = self.python.__code__
        if name in code.co_freevars:
            cell = self.python.__closure__[code.co_freevars.index(name)]
            return cell.cell_contents if cell != types.CellType() else None
        if name in self.tree.locals:
            return None
        scope = self.python.__globals__
        builtins = scope.get("__builtins__", {})
        builtins = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
        return scope.get(name, builtins.get(name))

    # Chains of links.

    def link(self, node):
        """A call as a link, and the expression that it is applied to; or (None, None)."""
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            return None, None
        layers = self.layers(node.func)
        if layers:
            kinds = {self.analysis.kind_of(module) for _, module in layers}
            if len(kinds) > 1 or None in kinds or len(node.args) != 1 or node.keywords:
                return None, None
            return Link(node.number, "layer", kinds.pop(), layers, ""), node.args[0]
        function, settings, input = self._function(node)
        kind = runs.FUNCTION_KINDS.get(function) if isinstance(function, _FUNCTIONS) else None
        if kind is None or settings is None or not _settings_fit(kind, *settings):
            return None, None
        form = "method" if isinstance(function, str) else "function"
        return Link(node.number, form, kind, (), _function_name(function)), input

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
        values = tuple(_constant(a) for a in args)
        named = {k.arg: _constant(k.value) for k in node.keywords}
        known = None not in named and not any(v is _VARIABLE for v in (*values, *named.values()))
        return function, (values, named) if known else None, input

    def chain(self, node):
        """The links of an expression, outermost first, and what they are applied to."""
        links = []
        link, inner = self.link(node)
        while link:
            links.append(link)
            node = inner
            link, inner = self.link(node)
        return links, node

    def _nested(self, node):
        links = self.chain(node)[0]
        links = [k for k in links[::-1] if k.number not in self.taken]
        at = 0
        while at < len(links):
            length = _run_length(links[at:])
            if length:
                self._take(links[at : at + length])
                self.parts["nested"].append(_calls(links[at : at + length]))
            at += max(length, 1)

    def _take(self, run):
        self.taken.update(k.number for k in run)
        self.runs += _blocks(run)

    # Statements.

    def _bodies(self, body, in_try=False):
        """Finds the runs over statements of a body, and of the bodies in it."""
        at = 0
        while at < len(body):
            at += 1 if in_try else max(1, self._statements(body[at:]))
        for statement in body:
            if isinstance(statement, _SCOPES):
                continue
            if isinstance(statement, ast.For) and self._is_loop(statement):
                self._loop(statement)
            # What is assigned on the way may be looked at where an exception is caught.
            tried = in_try or isinstance(statement, _CATCH)
            for name in ("body", "orelse", "finalbody"):
                self._bodies(getattr(statement, name, []), tried)
            for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                self._bodies(handler.body, tried)

    def _statements(self, body):
        """Takes a run that begins in the first statement of a body and ends in a later one; how
        many statements it takes, or 0."""
        links, owners, name = [], [], None
        for at, statement in enumerate(body):
            target, found, base, whole = self._value(statement)
            if not found or (at and not self._continues(name, target, base, statement)):
                break
            links += found[::-1]
            owners += [at] * len(found)
            name = target
            if not whole or not isinstance(name, str):
                break  # nothing can go on with what is no variable
        for start in range(owners.count(0)):
            length = _run_length(links[start:])
            if length and owners[start + length - 1]:
                run, count = links[start : start + length], owners[start + length - 1] + 1
                self._take(run)
                numbers = tuple(s.number for s in body[:count])
                self.parts["stated"].append((numbers, _calls(run)))
                # For where the statements run as they stand.
                for form, part in (("function", "functions"), ("method", "methods")):
                    calls = [k.number for k in run if k.form == form and k.kind == "ReLU"]
                    self.parts[part] += calls
                return count
        return 0

    def _value(self, statement):
        """What a statement sets (a variable's name; None: it returns), the links of the chain that
        it evaluates first, outermost first, what they are applied to, and whether they are all."""
        target = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if not isinstance(target, ast.Name) or target.id in self.tree.shared:
                return None, [], None, False
            target = target.id
        elif not isinstance(statement, ast.Return) or statement.value is None:
            return None, [], None, False
        node = statement.value
        while node is not None:
            links, base = self.chain(node)
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
        if not isinstance(base, ast.Name) or base.id != name or name in _declared(self.tree.node):
            return False
        nodes = (n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name)
        if sum(isinstance(n.ctx, ast.Load) for n in nodes) != 1:
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
            and not {name, target.id} & (self.tree.shared | _declared(self.tree.node))
        )

    def _loop(self, node):
        found = _runs_among(self._elements(node.iter) or (), self.analysis.kind_of)
        if found:
            self.runs += found
            self.parts["loops"].append(node.number)

    # Functions in the place of others.

    def _replaced(self, node):
        function, _, _ = self._function(node)
        if isinstance(function, str):
            if function in ("relu", "relu_") and not node.args and not node.keywords:
                self.parts["methods"].append(node.number)
                self.functions.append(_function_name(function))
            return
        if isinstance(function, _FUNCTIONS) and function in runs.FUNCTIONS:
            self.parts["functions"].append(node.number)
            self.functions.append(_function_name(function))
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
            bound, name = True, self._attribute_name(func)
            if name in self.module.__dict__:
                return None, False
            if not _is_super(func.value):
                found = inspect.getattr_static(own_class(self.module), name, None)
            elif "__class__" in self.python.__code__.co_freevars:
                found = _after(own_class(self.module), self._outer("__class__"), name)
        else:
            found = self.value(func)
        if isinstance(found, staticmethod):
            found, bound = found.__func__, False
        return (found, bound) if isinstance(found, types.FunctionType) else (None, False)

    def _is_me(self, node):
        return (isinstance(node, ast.Name) and node.id == self.me) or _is_super(node)


_FUNCTIONS = str, types.FunctionType, types.BuiltinFunctionType
_SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
_CATCH = tuple(
    getattr(ast, n) for n in ("Try", "TryStar", "With", "AsyncWith") if hasattr(ast, n)
)  # fmt: skip
_VARIABLE = object()


def _calls(links):
    return tuple((k.number, k.form) for k in links)


def _part(link, i):
    if not link.layers:
        return f"{link.name}()"
    return link.layers[i if len(link.layers) > 1 else 0][0]


def _function_name(function):
    if isinstance(function, str):
        return function.rstrip("_")
    # Functions that dispatch on an argument are not called what torch calls them.
    names = (n for n in runs.F.__all__ if getattr(torch.nn.functional, n, None) is function)
    return next(names, function.__name__.rstrip("_"))


def _settings_fit(kind, args, kwargs):
    """Whether a function that is called with such settings is the layer of that kind."""
    if kind == "Flatten":
        return args == (1,) and not kwargs
    if kind == "MaxPool2d":
        try:
            return runs.Pooling(*args, **kwargs).return_indices is False
        except TypeError:
            return False
    return len(args) <= 1 and set(kwargs) <= {"inplace"}


def _constant(node):
    """The value of a number, string, None or tuple of them as it is written, else _VARIABLE."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _VARIABLE
    return _VARIABLE if isinstance(value, (list, dict, set)) else value


def _declared(node):
    """The names that a function declares as global or nonlocal."""
    found = (n for n in ast.walk(node) if isinstance(n, (ast.Global, ast.Nonlocal)))
    return {name for n in found for name in n.names}


def _is_super(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "super"
        and not node.args
        and not node.keywords
    )


def _after(kind, base, name):
    """What ``super().name`` is in a method of `base` of an instance of `kind`."""
    mro = kind.__mro__
    if base not in mro:
        return None
    later = (vars(c) for c in mro[mro.index(base) + 1 :])
    return next((c[name] for c in later if name in c), None)


def _is_librarys(function):
    return (function.__module__ or "").split(".")[0] in ("torch", "braze")


def worth_splicing(module, kind_of):
    """Whether a forward of unknown code may call anything that braze would replace."""
    children = list(module.__dict__["_modules"].values())
    children += [c for m in children if isinstance(m, _CONTAINERS) for c in m._modules.values()]
    kinds = {kind_of(child) for child in children if child is not None}
    names = set()
    todo = [getattr(own_class(module).forward, "__code__", None)]
    while todo:
        code = todo.pop()
        if code is not None:
            names.update(code.co_names)
            todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    fused = {"Conv2d", "BatchNorm2d"} <= kinds or {"Linear", "ReLU"} <= kinds
    return fused or bool(names & {*runs.F.__all__, "relu_"})


def own_class(module):
    """The class of a module before it was converted."""
    kind = type(module)
    return vars(kind).get("_class_before_convert", kind)


def _is_container(module):
    """Whether a module is a list of others that iterates and indexes as torch's do."""
    kind = own_class(module)
    stock = next((c for c in _CONTAINERS if isinstance(module, c)), None)
    return stock is not None and all(
        getattr(kind, n) is getattr(stock, n) for n in ("__iter__", "__getitem__")
    )


def child_of(module, name):
    """The child that ``module.name`` is, without running anything of the module's class; or
    None."""
    kind = own_class(module)
    if (
        kind.__getattr__ is not torch.nn.Module.__getattr__
        or kind.__getattribute__ is not torch.nn.Module.__getattribute__
        or name in module.__dict__
        or name in module.__dict__["_parameters"]
        or name in module.__dict__["_buffers"]
        or inspect.getattr_static(kind, name, None) is not None
    ):
        return None
    return module.__dict__["_modules"].get(name)


def spliced(function, splices):
    """The function with its calls spliced."""
    values = {
        f"{PREFIX}{n}": getattr(runs, n) for n in ("run", "runner", "fused", "swapped", "method")
    }
    values[f"{PREFIX}other"] = runs.other
    for number, called, inner in splices.calls:
        values[f"{PREFIX}known_{number}"] = called
        values[f"{PREFIX}code_{number}"] = called.__code__
        values[f"{PREFIX}made_{number}"] = spliced(called, inner)
    return make(function, _Change(splices).apply, values)


def _name(name, ctx=None):
    return ast.Name(PREFIX + name, ctx or ast.Load())


def _call(name, *args):
    return ast.Call(_name(name), list(args), [])


_BODIES = "body", "orelse", "finalbody"


class _Change(ast.NodeTransformer):
    """Changes a function's tree as its splices say."""

    def __init__(self, splices):
        self.splices = splices
        self.nested = {run[-1][0]: run for run in splices.nested}  # by the outermost call
        self.stated = {numbers[0]: (numbers, run) for numbers, run in splices.stated}
        self.calls = {number for number, *_ in splices.calls}

    def apply(self, function):
        function.body = self._body(function.body)
        return ast.fix_missing_locations(function)

    def generic_visit(self, node):
        if isinstance(node, _SCOPES):
            return node
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
            elif isinstance(value, list) and name in _BODIES:
                setattr(node, name, self._body(value))
            elif isinstance(value, list):
                setattr(node, name, [self.visit(v) if isinstance(v, ast.AST) else v for v in value])
        return node

    def _body(self, body):
        changed, at = [], 0
        while at < len(body):
            numbers, run = self.stated.get(body[at].number, ((body[at].number,), None))
            statements = body[at : at + len(numbers)]
            changed.append(self._stated(statements, run) if run else self.visit(statements[0]))
            at += len(numbers)
        return changed

    def _stated(self, statements, run):
        """``if`` the links run as one, that, ``else`` the statements as they stand."""
        nodes = {n.number: n for s in statements for n in ast.walk(s) if isinstance(n, ast.Call)}
        calls = [(nodes[number], form) for number, form in run]
        links = ast.Tuple([_link(call, form) for call, form in calls[::-1]], ast.Load())
        base = self.visit(copy_tree(_applied_to(*calls[0])))
        test = ast.NamedExpr(
            _name("as_one", ast.Store()),
            _call("runner", ast.NamedExpr(_name("links", ast.Store()), links)),
        )
        result = _call("as_one", _name("links"), base)
        last = _Replace(run[-1][0], result).visit(copy_tree(statements[-1]))
        plain = [self.visit(s) for s in statements]
        return ast.copy_location(ast.If(test, [self.visit(last)], plain), statements[0])

    def visit_For(self, node):
        node = self.generic_visit(node)
        if node.number in self.splices.loops:
            node.iter = ast.copy_location(_call("fused", node.iter), node.iter)
        return node

    def visit_Call(self, node):
        number = getattr(node, "number", None)  # None: it is one of those made here
        if number in self.nested:
            run, links, call = self.nested[number], [], node
            for _, form in reversed(run):
                links.append(_link(call, form))
                call = _applied_to(call, form)
            new = _call("run", ast.Tuple(links, ast.Load()), self.visit(call))
            return ast.copy_location(new, node)
        if number in self.splices.methods:
            new = _call("method", self.visit(node.func.value), ast.Constant(node.func.attr))
            return ast.copy_location(new, node)
        node = self.generic_visit(node)
        if number in self.splices.functions:
            node.func = ast.copy_location(_call("swapped", node.func), node.func)
        elif number in self.calls:
            made = (_name(f"{n}_{number}") for n in ("known", "code", "made"))
            node.func = ast.copy_location(_call("other", node.func, *made), node.func)
        return node


class _Replace(ast.NodeTransformer):
    def __init__(self, number, new):
        self.number, self.new = number, new

    def visit_Call(self, node):
        if node.number == self.number:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def _applied_to(call, form):
    return call.func.value if form == "method" else call.args[0]


def _link(call, form):
    """The expression of a link, see runs.py."""
    if form == "layer":
        return copy_tree(call.func)
    function = ast.Constant(call.func.attr) if form == "method" else copy_tree(call.func)
    args = call.args if form == "method" else call.args[1:]
    names = [ast.Constant(k.arg) for k in call.keywords]
    settings = ast.Dict(names, [k.value for k in call.keywords])
    return ast.Tuple([function, ast.Tuple(args, ast.Load()), settings], ast.Load())
