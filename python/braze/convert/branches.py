"""Tests of attributes that a run goes across, such as ``if self.drop_path is not None:``: it takes
the way that they lead now, as long as they lead there."""

import ast
import typing

from braze.convert.source import PREFIX

#: The ways in which an attribute may be what it was, as an assumption (name, way) says it: the
#: operator, the constant, and what stands for an attribute that is missing, which is none of these.
WAYS = {
    "is None": (ast.Is, None, False),
    "is not None": (ast.IsNot, None, None),
    "is True": (ast.Is, True, None),
    "is False": (ast.Is, False, None),
}
_MISSING = object()


class Led(typing.NamedTuple):
    """Where an ``if`` statement leads, and those in it.

    Attributes:
        statements: those that run.
        ways: of each ``if`` on the way, its number and whether it leads into its body.
        assumed: what that takes for granted, as :meth:`Branches.assumed` gives it.
    """

    statements: list
    ways: tuple
    assumed: tuple


class Branches:
    """The part of splice._Function that asks which way a test leads."""

    def led(self, statement):
        """Where an ``if`` statement leads, a :class:`Led`, or None where that is not known."""
        found = self.assumed(statement.test)
        if found is None:
            return None
        way, assumed = found
        statements, ways = [], ((statement.number, way),)
        for inner in statement.body if way else statement.orelse:
            led = self.led(inner) if isinstance(inner, ast.If) else Led([inner], (), ())
            if led is None:
                return None
            statements += led.statements
            ways, assumed = (*ways, *led.ways), (*assumed, *led.assumed)
        return Led(statements, ways, tuple(assumed))

    def assumed(self, test):
        """Which way a test over attributes of the module leads, and what that takes for granted, as
        pairs of an attribute and one of the :data:`WAYS`; or None."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.assumed(test.operand)
            return None if inner is None else (not inner[0], inner[1])
        if isinstance(test, ast.BoolOp):
            return self._assumed_of_all(test)
        if isinstance(test, ast.Compare):
            return self._compared(test)
        value = self._value_now(test)
        if value is True or value is False or value is None:
            return bool(value), ((self.attribute_name(test), f"is {value}"),)
        return None

    def _assumed_of_all(self, test):
        stops = isinstance(test.op, ast.Or)  # the value that settles it
        assumptions = ()
        for value in test.values:
            found = self.assumed(value)
            if found is None:
                return None
            assumptions += found[1]
            if found[0] is stops:
                return stops, assumptions
        return not stops, assumptions

    def _compared(self, test):
        right = test.comparators[0]
        if len(test.ops) > 1 or not isinstance(right, ast.Constant) or right.value is not None:
            return None
        value = self._value_now(test.left)
        if value is _MISSING or not isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            return None
        way = "is None" if value is None else "is not None"
        holds = (value is None) is isinstance(test.ops[0], ast.Is)
        return holds, ((self.attribute_name(test.left), way),)

    def _value_now(self, node):
        """What ``self.name`` is, if looking it up runs nothing of the class. Not ``training``: that
        changes all the time."""
        if not self.is_own(node) or node.attr == "training":
            return _MISSING
        name, own = self.attribute_name(node), self.module.__dict__
        for values in (own, own["_parameters"], own["_buffers"], own["_modules"]):
            if name in values:
                return values[name]
        return _MISSING


def question(me, assumption):
    """The expression that asks whether an assumption holds; it never raises.

    Args:
        me: the name of the module.
    """
    name, way = assumption
    operator, constant, missing = WAYS[way]
    read = ast.Call(
        ast.Name(PREFIX + "getattr", ast.Load()),
        [ast.Name(me, ast.Load()), ast.Constant(name), ast.Constant(missing)],
        [],
    )
    return ast.Compare(read, [operator()], [ast.Constant(constant)])
