"""What modules are that are no layers of torch's, found in the code of their classes without
running it: :mod:`parts` says what for."""

import ast
import inspect
import types

import torch

from braze._stock import called_by, gives_way
from braze.convert.kinds import CALLS, calls_more
from braze.convert.modules import is_plain_in, own_class, why_unsupported
from braze.convert.names import Outer
from braze.convert.parts import PARTS, NormAct, Pass
from braze.convert.source import Unknown, tree_of

_TORCHS_NORM = torch.nn.modules.batchnorm._BatchNorm.forward
#: What batch norm reads of a layer.
_STATE = (
    "bias", "eps", "momentum", "num_batches_tracked", "running_mean", "running_var",
    "track_running_stats", "training", "weight",
)  # fmt: skip


def part_of(kind):
    """What instances of a class are in runs, a :class:`Pass` or a :class:`NormAct`, or None."""
    part = PARTS.get(kind)
    if kind not in PARTS or (part is not None and not part.same()):
        part = PARTS[kind] = _recognised(kind)
    return part


def _recognised(kind):
    forward = inspect.getattr_static(kind, "forward", None)
    plain = isinstance(forward, types.FunctionType) and kind.__call__ is torch.nn.Module.__call__
    if not plain or kind.__module__.startswith(("torch.", "braze.")):
        return None
    try:
        code = _Code(kind, forward)
        if issubclass(kind, torch.nn.BatchNorm2d):
            names = code.norm_and_more()
            return None if names is None else NormAct(names, code.same())
        if issubclass(kind, _OTHER_LAYERS):
            return None
        return code.passing()
    except Unknown:
        return None


#: Layers of torch's whose subclasses are not looked at here.
_OTHER_LAYERS = tuple(
    kind
    for name, kind in vars(torch.nn).items()
    if isinstance(kind, type) and issubclass(kind, torch.nn.Module) and name != "Module"
)


class _Code(Outer):
    """The code of a function that gets a module and one input, or of one that such a function
    calls.

    Attributes:
        assumed: what has been assumed of names outside of the function, as (scope, name, value).
    """

    def __init__(self, kind, function, values=None, assumed=None):
        self.kind, self.python = kind, function
        self.tree = tree_of(function)
        given = self.tree.node.args
        arguments = [a.arg for a in (*given.posonlyargs, *given.args)]
        if given.vararg or given.kwarg or set(function.__code__.co_freevars) - {"__class__"}:
            raise Unknown("it takes what its own arguments do not say")
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
        scope = {"kind": self.kind, "called": torch.nn.Module.__call__}
        tests = ["kind.__call__ is called", "kind.forward is function0"]
        for i, function in enumerate(self.functions):
            for part in ("code", "defaults", "kwdefaults"):
                scope[f"{part}{i}"] = getattr(function, f"__{part}__")
                tests.append(f"function{i}.__{part}__ is {part}{i}")
            scope[f"function{i}"] = function
        noted = {(id(names), name): (names, value) for names, name, value in self.assumed}
        for i, ((_, name), (names, value)) in enumerate(noted.items()):
            scope[f"names{i}"], scope[f"value{i}"] = names, value
            tests.append(f"names{i}.get({name!r}) is value{i}")
        return eval(f"lambda: {' and '.join(tests)}", scope)

    def attribute(self, node):
        """The name of ``self.name`` where its class has no code for it, or None."""
        if not (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == self.me
            and not self._assigns(self.me)
        ):
            return None
        name = self.attribute_name(node)
        return name if is_plain_in(self.kind, name) else None

    def _assigns(self, name):
        nodes = (n for n in self.tree.numbered if isinstance(n, ast.Name))
        return any(n.id == name and not isinstance(n.ctx, ast.Load) for n in nodes)

    # Batch norm, and what its result goes through.

    def norm_and_more(self):
        """The names of the children that batch norm's result goes through, or None."""
        if not all(is_plain_in(self.kind, name) for name in _STATE):
            return None
        body = self.body
        while body and self._is_check(body[0]):
            body = body[1:]
        variable, names, block = None, [], _Block(self)
        if block.begins(body):
            body = body[block.length :]
        for statement in body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target, value = statement.targets[0], statement.value
            elif isinstance(statement, ast.Return) and statement.value is not None:
                target, value = None, statement.value
            else:
                return None
            through = []
            while isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
                name = self.attribute(value.func)
                if name is None:
                    break
                through.insert(0, name)
                value = value.args[0]
            if variable is None:
                if not (block.is_result(value) or self._is_super(value)):
                    return None
            elif not (isinstance(value, ast.Name) and value.id == variable):
                return None
            names += through
            if target is None:
                return tuple(names) if statement is body[-1] else None
            if not isinstance(target, ast.Name) or target.id in self.tree.shared:
                return None
            variable = target.id
        return None

    def _is_check(self, node):
        """Whether a statement does nothing where the input has four dimensions."""
        if isinstance(node, ast.Assert):
            return self._has_four_dimensions(node.test)
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or call.keywords:
            return False
        if self.attribute_of_me(call.func) == "_check_input_dim":
            checks = self.kind._check_input_dim is torch.nn.BatchNorm2d._check_input_dim
            return checks and len(call.args) == 1 and self._is_input(call.args[0])
        asserts = self.known(call.func) is torch._assert and len(call.args) == 2
        calls = (n for a in call.args[1:] for n in ast.walk(a) if isinstance(n, ast.Call))
        return asserts and self._has_four_dimensions(call.args[0]) and not any(calls)

    def attribute_of_me(self, node):
        is_mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return node.attr if is_mine and node.value.id == self.me else None

    def _is_input(self, node):
        return isinstance(node, ast.Name) and node.id == self.input

    def _has_four_dimensions(self, node):
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
            return False
        left, right = node.left, node.comparators[0]
        if isinstance(left, ast.Call) and not left.args and not left.keywords:
            left = left.func
            name = "dim"
        else:
            name = "ndim"
        return (
            isinstance(left, ast.Attribute)
            and left.attr == name
            and self._is_input(left.value)
            and isinstance(node.ops[0], ast.Eq)
            and isinstance(right, ast.Constant)
            and type(right.value) is int
            and right.value == 4
        )

    def _is_super(self, node):
        """Whether an expression is ``super().forward(input)``, where that is torch's."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        owner = node.func.value
        if not (
            node.func.attr == "forward"
            and isinstance(owner, ast.Call)
            and not (owner.args or owner.keywords or node.keywords)
            and self.known(owner.func) is super
            and len(node.args) == 1
            and self._is_input(node.args[0])
        ):
            return False
        base, mro = self.outer("__class__"), self.kind.__mro__
        if base not in mro or vars(base).get("forward") is not self.python:
            return False
        later = (vars(c) for c in mro[mro.index(base) + 1 :])
        return next(c["forward"] for c in later if "forward" in c) is _TORCHS_NORM

    # What hands on its input.

    def passing(self):
        """A :class:`Pass`, or None."""
        test = self.returns_input(self.body)
        if test is None:
            return None
        found = {n.args[1].value for n in ast.walk(test) if isinstance(n, ast.Call)}
        ordered = any(isinstance(n, _ORDERS) for n in ast.walk(test))
        kinds = (bool, int, float) if ordered else _PLAIN
        # Of these types, so that comparing them does nothing but that.
        checks = [ast.Compare(_type(_read(n)), [ast.In()], [_name("kinds")]) for n in sorted(found)]
        body = ast.BoolOp(ast.And(), [*checks, test]) if checks else test
        arguments = ast.arguments([], [ast.arg("m")], None, [], [], None, [])
        source = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
        scope = {"kinds": kinds, "getattr": getattr, "type": type}
        passes = eval(compile(source, "<braze.convert>", "eval"), scope)
        return Pass(passes, tuple(sorted(found - {"training"})), gives_way(*CALLS), self.same())

    def returns_input(self, body):
        """An expression, over attributes of a module `m`, of when statements do nothing but return
        the input; or None where that is never known."""
        if not body:
            return None
        first, rest = body[0], body[1:]
        if isinstance(first, ast.Return) and first.value is not None:
            if self._stands_for_input(first.value):
                return ast.Constant(True)
            return self._called_returns_input(first.value)
        if not isinstance(first, ast.If):
            return None
        test = self._test(first.test)
        if test is None:
            return None
        ways = []
        for way, branch in ((test, first.body), (ast.UnaryOp(ast.Not(), test), first.orelse)):
            then = self.returns_input([*branch, *rest])
            if then is not None:
                ways.append(ast.BoolOp(ast.And(), [way, then]))
        return ast.BoolOp(ast.Or(), ways) if len(ways) > 1 else next(iter(ways), None)

    def _stands_for_input(self, node):
        if not isinstance(node, ast.Name) or self._assigns_before(node.id):
            return False
        return node.id == self.input or self.values.get(node.id) is _INPUT

    def _assigns_before(self, name):
        # Only tests come before what is asked for here.
        return name in self.tree.shared

    def _called_returns_input(self, node):
        """:meth:`returns_input` of ``f(input, ...)``."""
        if not isinstance(node, ast.Call) or self.me is None:
            return None
        function = self.known(node.func)
        if not isinstance(function, types.FunctionType):
            return None
        given = [self._given(a) for a in node.args]
        named = {k.arg: self._given(k.value) for k in node.keywords}
        if None in given or None in named or None in named.values():
            return None
        try:
            bound = inspect.signature(function, follow_wrapped=False).bind(*given, **named)
        except TypeError:
            return None
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name, value in values.items():
            if not isinstance(value, ast.AST) and value is not _INPUT:  # a default
                values[name] = ast.Constant(value) if type(value) in _PLAIN else None
        inner = _Code(self.kind, function, values, self.assumed)
        found = inner.returns_input(inner.body)
        self.functions.append(function)
        return found

    def _given(self, node):
        """An argument: the input, or an expression over attributes of `m`; or None."""
        return _INPUT if self._is_input(node) else self._test(node)

    def _test(self, node):
        """An expression over attributes of the module and constants, in terms of `m`; or None."""
        if isinstance(node, ast.Constant):
            return ast.Constant(node.value) if type(node.value) in _PLAIN else None
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            return None if value is _INPUT or self._assigns(node.id) else value
        if isinstance(node, ast.Attribute):
            name = self.attribute(node)
            return None if name is None else _read(name)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            operand = self._test(node.operand)
            return None if operand is None else ast.UnaryOp(node.op, operand)
        if isinstance(node, ast.BoolOp):
            values = [self._test(v) for v in node.values]
            return None if None in values else ast.BoolOp(node.op, values)
        if isinstance(node, ast.Compare) and all(isinstance(op, _COMPARES) for op in node.ops):
            values = [self._test(v) for v in (node.left, *node.comparators)]
            return None if None in values else ast.Compare(values[0], node.ops, values[1:])
        return None


_INPUT = object()
#: The types of what is compared without any effects.
_PLAIN = bool, int, float, str, type(None)
_ORDERS = ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.USub
_COMPARES = *_ORDERS[:-1], ast.Eq, ast.NotEq, ast.Is, ast.IsNot


def _name(name):
    return ast.Name(name, ast.Load())


def _read(name):
    # An attribute that is missing is of no type that counts.
    return ast.Call(_name("getattr"), [_name("m"), ast.Constant(name), _name("m")], [])


def _type(node):
    return ast.Call(_name("type"), [node], [])


class _Block:
    """The statements of torch's own batch norm in the code of another function, whatever its
    variables are called."""

    def __init__(self, code):
        self.code, self.names = code, {}
        self.torchs = None
        try:
            self.torchs = _Code(torch.nn.BatchNorm2d, _TORCHS_NORM)
        except Unknown:
            return
        _, *self.statements, self.last = self.torchs.body
        self.length = len(self.statements)

    def begins(self, body):
        """Whether statements begin with the block, but for its result."""
        if self.torchs is None:
            return False
        self.names = {self.torchs.me: self.code.me, self.torchs.input: self.code.input}
        return len(body) > self.length and all(
            self._alike(a, b) for a, b in zip(self.statements, body, strict=False)
        )

    def is_result(self, node):
        """Whether an expression is the block's result."""
        return bool(self.names) and self._alike(self.last.value, node)

    def _alike(self, a, b):
        if isinstance(a, list):
            return isinstance(b, list) and len(a) == len(b) and all(map(self._alike, a, b))
        if not isinstance(a, ast.AST):
            return type(a) is type(b) and a == b
        if type(a) is not type(b):
            return False
        if isinstance(a, ast.Name):
            return self._same_name(a, b)
        return all(
            self._alike(getattr(a, name), getattr(b, name))
            for name in a._fields
            if name not in ("ctx", "kind", "type_comment")
        )

    def _same_name(self, a, b):
        if a.id not in self.torchs.tree.locals:
            value = self.torchs.value(a)
            return value is not None and self.code.known(b) is value
        if b.id not in self.code.tree.locals or b.id in self.code.tree.shared - {"__class__"}:
            return False
        if a.id not in self.names and b.id in self.names.values():
            return False
        return self.names.setdefault(a.id, b.id) == b.id


def _dropped(module):
    p = module.p
    return type(p) in (int, float) and 0 <= p <= 1 and (p == 0 or not module.training)


def _always(*_):
    return True


_FUNCTION = (torch.nn.functional, "dropout"), *called_by("dropout")
PARTS[torch.nn.Identity] = Pass(
    _always, (), gives_way((torch.nn.Identity, "forward"), *CALLS), _always
)
PARTS[torch.nn.Dropout] = Pass(
    _dropped, ("p",), gives_way((torch.nn.Dropout, "forward"), *_FUNCTION, *CALLS), _always
)


def kinds_of(module, kind_of):
    """The kinds of the links that a call of a module stands for, innermost first, or None.

    Args:
        kind_of: a function from a module to the kind of layer that it is or will be, or None.
    """
    part = part_of(own_class(module))
    if part is None:
        kind = kind_of(module)
        return None if kind is None else (kind,)
    if calls_more(module) or why_unsupported(module):
        return None
    return part.kinds(module, lambda child: kinds_of(child, kind_of))
