"""Calls in a function that are replaced one by one: by braze's functions, or by functions of the
user's whose own calls are."""

import ast
import inspect
import types

from braze.convert import kinds
from braze.convert.chains import FUNCTIONS, function_name, takes
from braze.convert.emit import is_super
from braze.convert.modules import own_class
from braze.convert.shuffles import SHUFFLE, is_shuffle
from braze.convert.source import VARIABLE, Unknown, constant


class Calls:
    """The part of splice._Function that asks for calls."""

    def function_of(self, node):
        """The function of a call, or the name of the method; its settings as constants, or None;
        and the expression that it is applied to."""
        function = self.value(node.func)
        if function is None and isinstance(node.func, ast.Attribute):
            if self.is_me(node.func.value) or self.layers(node.func.value):
                return None, None, None
            function, args, input = node.func.attr, node.args, node.func.value
        elif function is None or not node.args:
            return function, None, None
        else:
            args, input = node.args[1:], node.args[0]
        values = tuple(constant(a) for a in args)
        named = {k.arg: constant(k.value) for k in node.keywords}
        known = None not in named and not any(v is VARIABLE for v in (*values, *named.values()))
        return function, (values, named) if known else None, input

    def replace(self, node):
        function, settings, _ = self.function_of(node)
        names = [k.arg for k in node.keywords]
        open_ended = None in names or any(isinstance(a, ast.Starred) for a in node.args)
        args = len(node.args) + isinstance(function, str)
        if isinstance(function, str):
            if function in kinds.METHODS and not open_ended and takes(function, args, names):
                self.parts["methods"].append(node.number)
                self.functions.append(function_name(function))
            return
        if isinstance(function, FUNCTIONS) and function in kinds.FUNCTIONS:
            if function in kinds.OF_LISTS and not _may_be_of_channels(settings):
                return
            if not open_ended and takes(function, args, names):
                self.parts["functions"].append((node.number, function))
                self.functions.append(function_name(function))
            return
        called, has_self = self._called(node)
        if called is not None and is_shuffle(called):
            self.parts["calls"].append((node.number, called, SHUFFLE))
            self.functions.append(SHUFFLE)
        elif called is not None and called not in self.analysis.open and not _is_librarys(called):
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
        if isinstance(func, ast.Attribute) and self.me and self.is_me(func.value):
            bound, name = True, self.attribute_name(func)
            if name in self.module.__dict__:
                return None, False
            if not is_super(func.value):
                found = inspect.getattr_static(own_class(self.module), name, None)
            elif "__class__" in self.python.__code__.co_freevars:
                found = _after(own_class(self.module), self.outer("__class__"), name)
        else:
            found = self.value(func)
        if isinstance(found, staticmethod):
            found, bound = found.__func__, False
        return (found, bound) if isinstance(found, types.FunctionType) else (None, False)

    def is_me(self, node):
        return (isinstance(node, ast.Name) and node.id == self.me) or is_super(node)


def _after(kind, base, name):
    """What ``super().name`` is in a method of `base` of an instance of `kind`."""
    mro = kind.__mro__
    if base not in mro:
        return None
    later = (vars(c) for c in mro[mro.index(base) + 1 :])
    return next((c[name] for c in later if name in c), None)


def _may_be_of_channels(settings):
    """Whether a concatenation may go along channels, which is all that braze has an op for.

    Args:
        settings: of :meth:`Calls.function_of`.
    """
    if settings is None:
        return True
    values, named = settings
    return (*values, *named.values()) in ((1,), (-3,))


def _is_librarys(function):
    return (function.__module__ or "").split(".")[0] in ("torch", "braze")
