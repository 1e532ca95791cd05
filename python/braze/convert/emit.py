"""Functions whose calls are spliced, made of their trees."""

import ast

from braze.convert import additions, kinds, link_calls, loops, runs, through
from braze.convert.branches import question
from braze.convert.shared_products import shared_norm
from braze.convert.shuffles import SHUFFLE, instead_of
from braze.convert.source import PREFIX, copy_tree, make
from braze.convert.standardized import standardized

#: Code of its own, which is left as it is.
SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
#: What changed code calls.
_CALLED = {
    **{PREFIX + f: getattr(kinds, f) for f in (*additions.FORMS, *additions.SCALE_FORMS)},
    **{PREFIX + f.__name__: f for f in (link_calls.called, link_calls.called_of_list)},
    **{PREFIX + f.__name__: f for f in (link_calls.method, loops.fused)},
    **{PREFIX + f.__name__: f for f in (runs.before_addition, runs.inherited)},
    **{PREFIX + f.__name__: f for f in (runs.other, runs.run)},
    **{PREFIX + f.__name__: f for f in (runs.run_added, runs.run_radd)},
    **{PREFIX + f.__name__: f for f in (runs.runner, runs.runner_of)},
    **{PREFIX + f.__name__: f for f in (through.run_through, through.run_radd_through)},
    **{PREFIX + f.__name__: f for f in (through.runner_through, through.runner_of_through)},
    PREFIX + "shared_norm": shared_norm,
    PREFIX + "standardized": standardized,
    PREFIX + "getattr": getattr,
}


def spliced(function, splices, known=None):
    """The function with its calls spliced.

    Args:
        known: the functions made so far, by what they were made of.
    """
    known = {} if known is None else known
    values = dict(_CALLED)
    for number, called in splices.functions:
        values[f"{PREFIX}ours_{number}"] = kinds.FUNCTIONS[called]
    for number, called, inner in splices.calls:
        key = called, id(inner)
        if key not in known:
            is_shuffle = inner == SHUFFLE
            known[key] = instead_of(called) if is_shuffle else spliced(called, inner, known)
        values[f"{PREFIX}known_{number}"] = called
        values[f"{PREFIX}code_{number}"] = called.__code__
        values[f"{PREFIX}made_{number}"] = known[key]
    return make(function, _Change(splices).apply, values)


def _name(name, ctx=None):
    return ast.Name(PREFIX + name, ctx or ast.Load())


def _call(name, *args):
    return ast.Call(_name(name), list(args), [])


def _for(calls, name):
    """The name of what runs such calls: of layers alone, or of parts too (parts.py)."""
    return f"{name}_through" if any(form == "part" for _, form in calls) else name


def _tuple(*elements):
    return ast.Tuple(list(elements), ast.Load())


_BODIES = "body", "orelse", "finalbody"


class _Change(ast.NodeTransformer):
    """Changes a function's tree as its splices say."""

    def __init__(self, splices):
        self.splices = splices
        self.nested = {run[-1][0]: run for run in splices.nested}  # by the outermost call
        self.stated = {numbers[0]: (numbers, *rest) for numbers, *rest in splices.stated}
        self.functions = dict(splices.functions)
        self.calls = {number for number, *_ in splices.calls}
        self.standardized = {found.number: found for found in splices.standardized}
        self.shared = {found.number: found.readers for found in splices.shared}

    def apply(self, function):
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.me = arguments[0].arg if arguments else None
        wanted = {number for readers in self.shared.values() for number in readers}
        self.readers = {n.number: n for n in ast.walk(function) if _number(n) in wanted}
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
            numbers, *found = self.stated.get(number, ((number,),))
            statements = body[at : at + len(numbers)]
            if found:
                changed += self._stated(statements, *found)
            else:
                changed.append(self.visit(statements[0]))
            at += len(numbers)
        return changed

    def _stated(self, statements, between, run, branches, assumed):
        """``if`` the links run as one, that, ``else`` the statements as they stand."""
        nodes = {n.number: n for s in statements for n in ast.walk(s) if isinstance(n, _LINKS)}
        calls = [(nodes[number], form) for number, form in run]
        between = [s for s in statements if s.number in between]
        first, base, before = statements[0], _applied_to(*calls[0]), []
        inside = {n.number for n in ast.walk(first) if isinstance(n, _LINKS)}
        loaded = [_link(*c) for c in calls]
        if isinstance(base, ast.Name) and not between:
            base = copy_tree(base)
        else:
            # What the run is applied to is evaluated where it stands, after the names of what is
            # called with it: into the variable that the statement sets.
            variable = first.targets[0].id
            own = [c for c in calls if c[0].number in inside]
            held = f"held_{calls[-1][0].number}"
            ours = [_link(*c) for c in own[::-1]]
            before = [
                ast.Assign([_name(held, ast.Store())], _tuple(*ours)),
                ast.Assign([ast.Name(variable, ast.Store())], copy_tree(base)),
            ]
            for i in range(len(own)):
                at = ast.Constant(len(own) - 1 - i)
                loaded[i] = ast.Subscript(_name(held), at, ast.Load())
            base = ast.Name(variable, ast.Load())
            replaced = _held(own, held, base)
            first = _Replace(replaced).visit(copy_tree(first))
        test, as_one = self._asked(calls, loaded, between)
        if assumed:
            questions = [question(self.me, a) for a in assumed]
            test = ast.BoolOp(ast.And(), [*questions, test])
        outermost, form = calls[-1]
        *_, last = way = _way(statements, dict(branches))
        rest = []
        while not _holds(last, outermost):
            rest.insert(0, last)
            way.pop()
            last = way[-1]
        last = copy_tree(last)
        result = _call_as_one(as_one, calls, base)
        if form == "iadd":
            last = ast.Assign([ast.Name(outermost.target.id, ast.Store())], result)
        else:
            last = _Replace({run[-1][0]: result}).visit(last)
        changed = [self.visit(copy_tree(s)) for s in between]
        if changed:
            run_first = _call("before_addition", _name(as_one[1]), copy_tree(base))
            handler = ast.ExceptHandler(None, None, [ast.Expr(run_first), ast.Raise()])
            changed = [ast.Try(changed, [handler], [], [])]
        plain = [self.visit(s) for s in (first, *statements[1:])]
        changed += [self.visit(last), *self._body(copy_tree(rest))]
        made = [*map(self.visit, before), ast.If(test, changed, plain)]
        return [ast.copy_location(s, statements[0]) for s in made]

    def _asked(self, calls, loaded, between=()):
        """The question whether links run as one, and the names of the answer and of the links.

        Args:
            loaded: the expressions of the links, innermost first.
            between: statements whose modules run before the links do, beside those that are added.
        """
        names = [f"{name}_{calls[-1][0].number}" for name in ("as_one", "links")]
        beside = additions.modules_called([*between, *_added(calls)])
        arguments = [ast.NamedExpr(_name(names[1], ast.Store()), _tuple(*loaded[::-1]))]
        if beside:
            arguments.append(_tuple(*map(copy_tree, beside)))
        asked = _call(_for(calls, "runner"), *arguments)
        return _found(names[0], asked), names

    def visit_For(self, node):
        node = self.generic_visit(node)
        if node.number in self.splices.loops:
            node.iter = ast.copy_location(_call("fused", node.iter), node.iter)
        return node

    def _nested(self, node):
        """The call of a run in the place of its outermost link, or None where there is none."""
        run = self.nested.get(_number(node))
        if run is None:
            return None
        calls, inner = [], node
        for _, form in reversed(run):
            calls.append((inner, form))
            inner = _applied_to(inner, form)
        calls.reverse()
        links = [_link(*c) for c in calls[::-1]]
        added = _added(calls)
        if not additions.modules_called(added):
            new = _call(
                _for(calls, "run"), _tuple(*links), self.visit(inner), *map(self.visit, added)
            )
        elif any(form == "radd" for _, form in calls):
            # What is added is evaluated before the batch norm's name.
            outer = _tuple(*links[:-1])
            name = _for(calls, "run_radd")
            new = _call(name, outer, self.visit(added[0]), links[-1], self.visit(inner))
        else:
            new = self._nested_added(node, calls, inner)
        return ast.copy_location(new, node)

    def _nested_added(self, node, calls, inner):
        """A run that adds what a module makes, which comes after the batch norm: as one, or as it
        stands, of the names and the input that were evaluated for the question."""
        number = calls[-1][0].number
        names = as_one, links, base = [f"{n}_{number}" for n in ("as_one", "links", "base")]
        expressions = [_link(*c) for c in calls[::-1]]
        beside = map(copy_tree, additions.modules_called(_added(calls)))
        test = _call(
            _for(calls, "runner_of"),
            ast.NamedExpr(_name(links, ast.Store()), _tuple(*expressions)),
            # A list, from which it is taken, so that nothing keeps it.
            ast.NamedExpr(_name(base, ast.Store()), ast.List([self.visit(inner)], ast.Load())),
            _tuple(*beside),
        )
        taken = ast.Call(ast.Attribute(_name(base), "pop", ast.Load()), [], [])
        result = _call_as_one(names[:2], calls, taken)
        plain = _Replace(_held(calls, links, taken)).visit(copy_tree(node))
        plain = self.generic_visit(plain)
        return ast.IfExp(_found(as_one, test), self.visit(result), plain)

    def _standardized(self, node, found):
        """Weight standardization as one op, where it is that, else as it stands."""
        parts = {n.number: n for n in ast.walk(node) if isinstance(n, ast.expr)}
        function = parts[found.norm].func
        weight, channels, eps = (parts[n] for n in (found.weight, found.channels, found.eps))
        factors = _tuple(*(copy_tree(parts[n]) for n in found.factors))
        flags = ast.Constant(found.viewed), ast.Constant(found.private)
        asked = map(copy_tree, (function, weight, channels, eps))
        asked = _call("standardized", *asked, factors, *flags)
        name = f"standardized_{found.number}"
        return ast.IfExp(_found(name, asked), _name(name), self.generic_visit(node))

    def visit_BinOp(self, node):
        return self._nested(node) or self.generic_visit(node)

    def visit_Call(self, node):
        run = self._nested(node)
        if run is not None:
            return run
        number = _number(node)
        if number in self.splices.methods:
            new = _call("method", self.visit(node.func.value), ast.Constant(node.func.attr))
            return ast.copy_location(new, node)
        if number in self.standardized:
            return ast.copy_location(self._standardized(node, self.standardized[number]), node)
        node = self.generic_visit(node)
        if number in self.shared:
            readers = (copy_tree(self.readers[n]) for n in self.shared[number])
            new = _call("shared_norm", node.func, *node.args, *readers)
            return ast.copy_location(new, node)
        if number in self.functions:
            node.args = [node.func, _name(f"ours_{number}"), *node.args]
            of_list = self.functions[number] in kinds.OF_LISTS
            node.func = ast.copy_location(_name("called_of_list" if of_list else "called"), node)
        elif number in self.calls:
            made = [_name(f"{n}_{number}") for n in ("known", "code", "made")]
            function, first = "other", []
            if isinstance(node.func, ast.Attribute) and is_super(node.func.value):
                function, first = "inherited", [ast.Name(self.me, ast.Load())]
            node.func = ast.copy_location(_call(function, node.func, *first, *made), node.func)
        return node


def _number(node):
    """Where a node stands in the function as it was written; None of those made here."""
    return getattr(node, "number", None)


class _Replace(ast.NodeTransformer):
    """Puts other expressions in the place of some.

    Args:
        new: the other ones, by the numbers of those there are.
    """

    def __init__(self, new):
        self.new = new

    def visit(self, node):
        new = self.new.get(_number(node))
        return ast.copy_location(new, node) if new is not None else super().generic_visit(node)


def _held(calls, name, base):
    """What to put in the place of the names of what is called, and of what it is applied to, where
    both have been evaluated: see :class:`_Replace`.

    Args:
        name: of the variable that holds the links, outermost first.
    """
    replaced = {_applied_to(*calls[0]).number: base}
    for i, (call, form) in enumerate(calls):
        if form in ("layer", "part", "function"):
            at = ast.Constant(len(calls) - 1 - i)
            held = ast.Subscript(_name(name), at, ast.Load())
            if form == "function":
                held = ast.Subscript(held, ast.Constant(0), ast.Load())
            replaced[call.func.number] = held
    return replaced


def _way(statements, branches):
    """The statements that run where ``if`` statements lead as they are said to.

    Args:
        branches: which way those lead, by their numbers.
    """
    found = []
    for statement in statements:
        if statement.number in branches:
            way = branches[statement.number]
            found += _way(statement.body if way else statement.orelse, branches)
        else:
            found.append(statement)
    return found


def _holds(statement, node):
    return any(n is node for n in ast.walk(statement))


#: What may be a link of a chain.
_LINKS = ast.Call, ast.BinOp, ast.AugAssign


def _applied_to(call, form):
    if form in additions.FORMS or form in additions.SCALE_FORMS:
        return additions.parts(call, form)[0]
    return call.func.value if form == "method" else call.args[0]


def _added(calls):
    return [additions.parts(*c)[1] for c in calls if c[1] in additions.FORMS]


def _found(name, asked):
    """Whether what is asked for, which gets a name, is not None. (The compiler of torch before 2.13
    cannot tell whether a function is true.)"""
    named = ast.NamedExpr(_name(name, ast.Store()), asked)
    return ast.Compare(named, [ast.IsNot()], [ast.Constant(None)])


def _call_as_one(names, calls, base):
    """The call that runs links as one.

    Args:
        names: of the function that does so, and of the links.
    """
    as_one, links = map(_name, names)
    added = _added(calls)
    modules = additions.modules_called(added)
    if not modules:
        return ast.Call(as_one, [links, base, *map(copy_tree, added)], [])
    (innermost,) = added
    while isinstance(innermost, ast.Call):
        innermost = innermost.args[0]
    modules = _tuple(*map(copy_tree, modules[::-1]))
    return _call("run_added", as_one, links, base, modules, copy_tree(innermost))


def _link(call, form):
    """The expression of a link, see runs.py."""
    if form in additions.FORMS:
        return ast.Tuple([_name(form), ast.Tuple([], ast.Load()), ast.Dict([], [])], ast.Load())
    if form in additions.SCALE_FORMS:
        scale = copy_tree(additions.parts(call, form)[1])
        return ast.Tuple([_name(form), _tuple(scale), ast.Dict([], [])], ast.Load())
    if form in ("layer", "part"):
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
