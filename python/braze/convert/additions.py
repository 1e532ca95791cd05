"""Additions in runs: ``bn(x) + identity``, ``out += identity``, and what may lie between the batch
norm and the addition; and products with parameters and numbers, ``self.layer_scale * x``, in the
batch norm's place.

In a run, batch norm is computed where the addition is, hence after what is added, and after the
statements in between. So these may be nothing but names, and calls of modules of which it is asked,
each time, whether they only compute (runs.py).
"""

import ast

from braze.convert import scales
from braze.convert.modules import is_plain_attribute
from braze.convert.source import NUMBERS, constant

#: The forms of an addition as a link of a chain: see chains.Link.
FORMS = "add", "radd", "iadd"
#: The forms of a product with a parameter or a number: ``x * p``, ``p * x`` and ``x.mul(p)``.
SCALE_FORMS = "mul", "rmul", "times"


def is_addition(node):
    return isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Add)


def is_scaling(node):
    if isinstance(node, ast.Call):
        called = isinstance(node.func, ast.Attribute) and node.func.attr == "mul"
        return called and len(node.args) == 1 and not node.keywords
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def scale_forms(node):
    """The forms that such a product may have."""
    return SCALE_FORMS[2:] if isinstance(node, ast.Call) else SCALE_FORMS[:2]


def parts(node, form):
    """The expression that an addition or a scaling continues, and what is added to it, or scales
    it."""
    if form == "times":
        return node.func.value, node.args[0]
    if form == "iadd":
        return ast.Name(node.target.id, ast.Load()), node.value
    return (node.left, node.right) if form in ("add", "mul") else (node.right, node.left)


def modules_called(nodes):
    """The expressions of the modules that may run inside of such nodes."""
    return [call.func for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]


_COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


class Surroundings:
    """What may be added, or lie in between, in one function: the part of splice._Function that asks
    for that."""

    def find_local(self):
        """Finds the local variables that nothing but the function's statements sets."""
        walrus = {n.target.id for n in self.tree.numbered if isinstance(n, ast.NamedExpr)}
        self.local = self.tree.locals - self.tree.shared - self.declared - walrus
        comprehensions = (n for n in self.tree.numbered if isinstance(n, _COMPREHENSIONS))
        self.comprehended = {
            getattr(n, "number", None) for c in comprehensions for n in ast.walk(c)
        }

    def may_be_added(self, node):
        """Whether an expression is a local variable, or a call of a module on one."""
        if isinstance(node, ast.Name):
            return node.id in self.local
        return (
            isinstance(node, ast.Call)
            and node.number not in self.comprehended  # where nothing may be assigned on the way
            and len(node.args) == 1
            and not node.keywords
            and (self.is_own(node.func) or len(self.layers(node.func) or ()) == 1)
            and self.may_be_added(node.args[0])
        )

    def may_lie_between(self, statement, name):
        """Whether a statement is an ``if`` over attributes of the module, in which variables other
        than `name` are set to what may be added."""
        return (
            isinstance(statement, ast.If)
            and self._is_test(statement.test)
            and all(self._sets(s) for s in (*statement.body, *statement.orelse))
            and all(n.id != name for n in ast.walk(statement) if isinstance(n, ast.Name))
        )

    def is_scale(self, node):
        """Whether an expression is a number, or ``self.name``: a number, or a parameter of the
        module that, perhaps as a view, has more than one element along one dimension."""
        if type(constant(node)) in NUMBERS:
            return True
        root, view = scales.view_of(node, self._own_name)
        name = self._own_name(root)
        if name is not None and not view and type(self.module.__dict__.get(name)) in NUMBERS:
            return True
        return name is not None and scales.scale_of(self.module, name, view) is not None

    def _own_name(self, node):
        return self.attribute_name(node) if self.is_own(node) else None

    def is_own(self, node):
        """Whether an expression is ``self.name``, without any code of the class."""
        return (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == self.me
            and is_plain_attribute(self.module, self.attribute_name(node))
        )

    def _is_test(self, node):
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.Not) and self._is_test(node.operand)
        if isinstance(node, ast.Compare):
            operands = node.left, *node.comparators
            return all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops) and all(
                isinstance(n, (ast.Name, ast.Constant)) or self.is_own(n) for n in operands
            )
        return self.is_own(node)

    def _sets(self, statement):
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return isinstance(statement, ast.Pass)
        (target,) = statement.targets
        return (
            isinstance(target, ast.Name)
            and target.id in self.local
            and self.may_be_added(statement.value)
        )
