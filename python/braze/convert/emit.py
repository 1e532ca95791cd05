"""Functions whose calls are spliced, made of their trees."""

import ast

from braze.convert import runs
from braze.convert.source import PREFIX, copy_tree, make

#: Code of its own, which is left as it is.
SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
#: What changed code calls.
_CALLED = "run", "runner", "fused", "swapped", "method", "other", "inherited"


def spliced(function, splices):
    """The function with its calls spliced."""
    values = {PREFIX + name: getattr(runs, name) for name in _CALLED}
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
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.me = arguments[0].arg if arguments else None
        function.body = self._body(function.body)
        return ast.fix_missing_locations(function)

    def generic_visit(self, node):
        if isinstance(node, SCOPES):
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
            made = [_name(f"{n}_{number}") for n in ("known", "code", "made")]
            function, first = "other", []
            if isinstance(node.func, ast.Attribute) and is_super(node.func.value):
                function, first = "inherited", [ast.Name(self.me, ast.Load())]
            node.func = ast.copy_location(_call(function, node.func, *first, *made), node.func)
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


def is_super(node):
    """Whether an expression is ``super()``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "super"
        and not node.args
        and not node.keywords
    )
