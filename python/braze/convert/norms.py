"""Batch norms with more behind them, found in the code of their classes."""

import ast

import torch

from braze.convert.code import Code
from braze.convert.modules import is_plain_in
from braze.convert.source import Unknown

_CHECK = torch.nn.BatchNorm2d._check_input_dim
_FORWARD = torch.nn.modules.batchnorm._BatchNorm.forward
#: What batch norm reads of a layer.
_STATE = (
    "bias", "eps", "momentum", "num_batches_tracked", "running_mean", "running_var",
    "track_running_stats", "training", "weight",
)  # fmt: skip


class NormCode(Code):
    """The code of the forward of a subclass of ``torch.nn.BatchNorm2d``."""

    def norm_and_more(self):
        """The names of the children that batch norm's result goes through, or None."""
        if not all(is_plain_in(self.kind, name) for name in _STATE):
            return None
        if self.kind._check_input_dim is not _CHECK:  # which torch's own forward calls
            return None
        self.assumed.append((None, "_check_input_dim", _CHECK))
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
            through, value = self.through_children(value)
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
        if self._attribute_of_me(call.func) == "_check_input_dim":
            return len(call.args) == 1 and self.is_input(call.args[0])
        asserts = self.known(call.func) is torch._assert and len(call.args) == 2
        return (
            asserts
            and self._has_four_dimensions(call.args[0])
            and all(isinstance(n, _IN_TEXT) for n in ast.walk(call.args[1]))
            and all(map(self.is_input, _names(call.args[1])))
        )

    def _attribute_of_me(self, node):
        is_mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return node.attr if is_mine and node.value.id == self.me else None

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
            and self.is_input(left.value)
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
            and self.is_input(node.args[0])
        ):
            return False
        base, mro = self.outer("__class__"), self.kind.__mro__
        if base not in mro or vars(base).get("forward") is not self.python:
            return False
        later = (vars(c) for c in mro[mro.index(base) + 1 :])
        return next(c["forward"] for c in later if "forward" in c) is _FORWARD


#: What the text of a failed check may be made of, without any effects: ``f"got {x.ndim}D"``.
_IN_TEXT = (
    ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.Attribute, ast.Name, ast.expr_context
)  # fmt: skip


def _names(node):
    return [n for n in ast.walk(node) if isinstance(n, ast.Name)]


class _Block:
    """The statements of torch's own batch norm in the code of another function, whatever its
    variables are called."""

    def __init__(self, code):
        self.code, self.names, self.begun = code, {}, False
        self.torchs = None
        try:
            self.torchs = Code(torch.nn.BatchNorm2d, _FORWARD)
        except Unknown:
            return
        _, *self.statements, self.last = self.torchs.body
        self.length = len(self.statements)

    def begins(self, body):
        """Whether statements begin with the block, but for its result."""
        if self.torchs is None:
            return False
        self.names = {self.torchs.me: self.code.me, self.torchs.input: self.code.input}
        self.begun = len(body) > self.length and all(
            self._alike(a, b) for a, b in zip(self.statements, body, strict=False)
        )
        return self.begun

    def is_result(self, node):
        """Whether an expression is the block's result."""
        return self.begun and self._alike(self.last.value, node)

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
