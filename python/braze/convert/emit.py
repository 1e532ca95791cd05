"""Functions whose calls are spliced, made of their trees."""

import ast

from braze.convert import additions, runs
from braze.convert.source import PREFIX, copy_tree, make

#: Code of its own, which is left as it is.
SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
#: What changed code calls.
_CALLED = (
    *("run", "runner", "fused", "swapped", "method", "other", "inherited"),
    *additions.FORMS,
)


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
        self.stated = {numbers[0]: (numbers, *rest) for numbers, *rest in splices.stated}
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
            number = body[at].number
            numbers, between, run = self.stated.get(number, ((number,), (), None))
            statements = body[at : at + len(numbers)]
            changed.append(
                self._stated(statements, between, run) if run else self.visit(statements[0])
            )
            at += len(numbers)
        return changed

    def _stated(self, statements, between, run):
        """``if`` the links run as one, that, ``else`` the statements as they stand."""
        nodes = {n.number: n for s in statements for n in ast.walk(s) if isinstance(n, _LINKS)}
        calls = [(nodes[number], form) for number, form in run]
        between = [s for s in statements if s.number in between]
        base = copy_tree(_applied_to(*calls[0]))
        before = []
        if between:
            # What the run is applied to is evaluated where it stands, into a variable that the
            # statements in between do not know.
            variable = statements[0].targets[0]
            before = [ast.Assign([copy_tree(variable)], base)]
            base = ast.Name(variable.id, ast.Load())
        test, result = self._as_one(calls, base, between)
        last, (outermost, form) = copy_tree(statements[-1]), calls[-1]
        if form == "iadd":
            last = ast.Assign([ast.Name(outermost.target.id, ast.Store())], result)
        else:
            last = _Replace(run[-1][0], result).visit(last)
        as_one = [self.visit(s) for s in (*before, *map(copy_tree, between), last)]
        plain = [self.visit(s) for s in statements]
        return ast.copy_location(ast.If(test, as_one, plain), statements[0])

    def _as_one(self, calls, base, between=()):
        """The question whether links run as one, and the call that runs them so."""
        added = [additions.parts(*c)[1] for c in calls if c[1] in additions.FORMS]
        beside = [copy_tree(m) for m in additions.modules_called([*between, *added])]
        links = ast.Tuple([_link(call, form) for call, form in calls[::-1]], ast.Load())
        names = "as_one", "links"
        if beside:  # other runs may be asked for before this one runs
            names = [f"{name}_{calls[-1][0].number}" for name in names]
        arguments = [ast.NamedExpr(_name(names[1], ast.Store()), links)]
        if beside:
            arguments.append(ast.Tuple(beside, ast.Load()))
        test = ast.NamedExpr(_name(names[0], ast.Store()), _call("runner", *arguments))
        return test, _call(names[0], _name(names[1]), base, *map(copy_tree, added))

    def visit_For(self, node):
        node = self.generic_visit(node)
        if node.number in self.splices.loops:
            node.iter = ast.copy_location(_call("fused", node.iter), node.iter)
        return node

    def _nested(self, node):
        """The call of a run in the place of its outermost link, or None where there is none."""
        run = self.nested.get(getattr(node, "number", None))  # None: it is one of those made here
        if run is None:
            return None
        calls, inner = [], node
        for _, form in reversed(run):
            calls.append((inner, form))
            inner = _applied_to(inner, form)
        calls.reverse()
        added = [additions.parts(*c)[1] for c in calls if c[1] in additions.FORMS]
        if additions.modules_called(added):
            test, result = self._as_one(calls, copy_tree(inner))
            plain = self.generic_visit(node)
            return ast.copy_location(ast.IfExp(test, self.visit(result), plain), node)
        links = ast.Tuple([_link(call, form) for call, form in calls[::-1]], ast.Load())
        new = _call("run", links, self.visit(inner), *map(self.visit, added))
        return ast.copy_location(new, node)

    def visit_BinOp(self, node):
        return self._nested(node) or self.generic_visit(node)

    def visit_Call(self, node):
        run = self._nested(node)
        if run is not None:
            return run
        number = getattr(node, "number", None)
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

    def generic_visit(self, node):
        if isinstance(node, _LINKS) and node.number == self.number:
            return ast.copy_location(self.new, node)
        return super().generic_visit(node)


#: What may be a link of a chain.
_LINKS = ast.Call, ast.BinOp, ast.AugAssign


def _applied_to(call, form):
    if form in additions.FORMS:
        return additions.parts(call, form)[0]
    return call.func.value if form == "method" else call.args[0]


def _link(call, form):
    """The expression of a link, see runs.py."""
    if form in additions.FORMS:
        return ast.Tuple([_name(form), ast.Tuple([], ast.Load()), ast.Dict([], [])], ast.Load())
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
