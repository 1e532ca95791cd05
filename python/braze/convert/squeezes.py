"""Squeeze-and-excitation, found in the code of classes: a forward that multiplies its input by what
children make of the input's means."""

import ast
import inspect
import types

import torch

from braze._C import unwatched
from braze._ops._common import TENSORS, is_channels_last
from braze._stock import called_by, gives_way
from braze.convert.code import CALLS
from braze.convert.kinds import calls_of
from braze.convert.passes import PassCode, compiled
from braze.convert.source import Unknown
from braze.convert.through import run_through
from braze.nn import functional as F

_any_global_hook = torch.nn.modules.module._has_any_global_hook
_MEAN = gives_way((torch.Tensor, "mean"), (torch.Tensor, "__mul__"), (torch.Tensor, "__rmul__"))
_POOL = gives_way(
    (torch.nn.AdaptiveAvgPool2d, "forward"),
    (torch.nn.functional, "adaptive_avg_pool2d"),
    *called_by("adaptive_avg_pool2d"),
    *calls_of(torch.nn.AdaptiveAvgPool2d),
)


class Squeeze:
    """What a module is whose forward is ``x * self.gate(self.fc(x.mean((2, 3), keepdim=True)))``.

    Args:
        pool: the name of the child that takes the mean, or None.
        names: of the children that the mean goes through, innermost first.
        methods: the names of the class's methods that do it.
        guard: a function of the module that tells whether it is this now.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, pool, names, methods, guard, same):
        self.pool, self.names, self.methods = pool, names, methods
        self.guard, self.same = guard, same

    def run(self, module, input):
        """The result of the module's forward as one, or None where its code has to run."""
        if type(input) not in TENSORS or torch.compiler.is_compiling():
            return None
        own = module.__dict__
        if not self.same() or _MEAN() or not self.guard(module):
            return None
        # Only now: a mode sees what is asked of a tensor.
        if input.dim() != 4 or not (input.is_contiguous() or is_channels_last(input)):
            return None
        if not own.keys().isdisjoint((*self.methods, *self.names, self.pool)):
            return None
        children = own["_modules"]
        if self.pool is not None:
            pool = children.get(self.pool)
            if type(pool) is not torch.nn.AdaptiveAvgPool2d or _POOL() or not unwatched((pool,)):
                return None
            if _any_global_hook():
                return None
            if pool.output_size not in (1, (1, 1), [1, 1]):
                return None
        layers = [children.get(name) for name in reversed(self.names)]
        if None in layers:
            return None
        layers = tuple(layers)
        return F.squeeze_excite(input, lambda mean: run_through(layers, mean) if layers else mean)


#: What instances of a class are, or None, by class.
_KNOWN = {}


def squeeze_of(kind):
    """What instances of a class are if their forward is squeeze-and-excitation, or None."""
    known = _KNOWN.get(kind)
    if known is None or not known.same():
        known = _KNOWN[kind] = _recognised(kind)
    return known


def _recognised(kind):
    forward = inspect.getattr_static(kind, "forward", None)
    called = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in CALLS)
    if not isinstance(forward, types.FunctionType) or not called:
        return None
    if kind.__module__.startswith(("torch.", "braze.")):
        return None
    try:
        return SqueezeCode(kind, forward).squeeze()
    except Unknown:
        return None


class SqueezeCode(PassCode):
    """The code of a forward that may be squeeze-and-excitation, or of a method that it calls."""

    def squeeze(self):
        """A :class:`Squeeze`, or None."""
        last = self.body[-1] if self.body else None
        if not isinstance(last, ast.Return) or not isinstance(last.value, ast.BinOp):
            return None
        if not isinstance(last.value.op, ast.Mult) or self.assigns(self.input):
            return None
        factors = [last.value.left, last.value.right]
        gates = [factor for factor in factors if not self.is_input(factor)]
        found = self._gate(gates[0]) if len(gates) == 1 else None
        if found is None or self.assigns(self.me):
            return None
        pool, names, methods, guards = found
        never = ast.Constant(False)
        guard, _ = compiled(ast.UnaryOp(ast.Not(), ast.BoolOp(ast.Or(), [never, never, *guards])))
        return Squeeze(pool, tuple(names), tuple(methods), guard, self.same())

    def _gate(self, value):
        """What the last statement's expression is, made of statements before it: the name of the
        child that takes the mean or None, the names of the children behind it, innermost first, the
        methods that it was found in, and expressions that have to be false; or None."""
        variable, found, guards = None, None, []
        for statement in self.body[:-1]:
            if isinstance(statement, ast.If) and not statement.orelse:
                guards.append(self.test(statement.test))
                if guards[-1] is None:
                    return None
                continue
            if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
                return None
            target = statement.targets[0]
            if not isinstance(target, ast.Name) or target.id in self.tree.shared:
                return None
            found = self._goes_on(statement.value, variable, found)
            if found is None:
                return None
            variable = target.id
        found = self._goes_on(value, variable, found)
        return found and (*found[:3], [*found[3], *guards])

    def _goes_on(self, value, variable, found):
        """What an expression of the variable is, which is what was found, or, without one, an
        expression of the input."""
        names = []
        while isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
            name = self.attribute(value.func)
            if name is None:
                break
            names.insert(0, name)
            value = value.args[0]
        if found is not None:
            if not (isinstance(value, ast.Name) and value.id == variable):
                return None
            pool, before, methods, guards = found
            return pool, [*before, *names], methods, guards
        if self._is_mean(value):
            return None, names, [], []
        if self.is_input(value):
            return (names[0], names[1:], [], []) if names else None
        found = self._of_method(value)
        if found is None:
            return None
        pool, before, methods, guards = found
        return pool, [*before, *names], methods, guards

    def _is_mean(self, node):
        """Whether an expression is ``input.mean((2, 3), keepdim=True)``."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        if node.func.attr != "mean" or not self.is_input(node.func.value) or len(node.args) > 1:
            return False
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if node.args:
            given["dim"] = node.args[0]
        if set(given) != {"dim", "keepdim"}:
            return False
        try:
            dim, keepdim = ast.literal_eval(given["dim"]), ast.literal_eval(given["keepdim"])
        except ValueError:
            return False
        pixels = type(dim) in (tuple, list) and sorted(d % 4 for d in dim) == [2, 3]
        return pixels and keepdim is True

    def _of_method(self, node):
        """What ``self.method(input)`` is."""
        if not (isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords):
            return None
        name, owner = getattr(node.func, "attr", None), getattr(node.func, "value", None)
        if not (
            isinstance(owner, ast.Name) and owner.id == self.me and self.is_input(node.args[0])
        ):
            return None
        name = self.attribute_name(node.func)
        function = inspect.getattr_static(self.kind, name, None)
        if not isinstance(function, types.FunctionType):
            return None
        for base in self.kind.__mro__:  # as long as none of them gets another
            value = vars(base).get(name)
            self.assumed.append((vars(base), name, value))
            if value is not None:
                break
        inner = SqueezeCode(self.kind, function, None, self.assumed)
        last = inner.body[-1] if inner.body else None
        if not isinstance(last, ast.Return) or last.value is None or inner.assigns(inner.input):
            return None
        found = None if inner.assigns(inner.me) else inner._gate(last.value)
        if found is None:
            return None
        self.functions += inner.functions
        pool, names, methods, guards = found
        return pool, names, [*methods, name], guards
