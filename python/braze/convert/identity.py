"""What a class may do with its instances' class: a rewritten forward makes that a subclass."""

import ast
import functools
import types

from braze.convert.source import Unknown, syntax_of

#: Of a class, what its subclass has the same.
_SAME = {"__doc__", "__module__", "__name__", "__qualname__"}
#: Of these, nothing runs once there is a model.
_BEFORE = {"__init__", "__new__", "__init_subclass__"}
_LIBRARIES = "torch", "builtins", "abc", "typing"


def _members(kind):
    """The attributes of a class and of its bases, but torch's, by name."""
    found = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] in _LIBRARIES:
            for name in vars(base):
                found.pop(name, None)
        else:
            found.update(vars(base))
    return found


def why_its_class_counts(kind):
    """Why instances of a class have to keep it, or None: a method of it asks for it."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] not in _LIBRARIES:
            for name, member in vars(base).items():
                if name not in _BEFORE and any(map(_asks, _functions(member))):
                    return f"{name}() asks for the class of its module"
    return None


def _functions(member):
    """The functions that get the module as their first argument in a member of a class."""
    if isinstance(member, property):
        pending = [member.fget, member.fset, member.fdel]
    elif isinstance(member, functools.cached_property):
        pending = [member.func]
    else:
        pending = [member]
    found = []
    while pending:
        function = pending.pop()
        if isinstance(function, types.FunctionType):
            found.append(function)
            pending.append(getattr(function, "__wrapped__", None))
    return found


def _asks(function):
    """Whether a method asks for the class of its module, but for its name."""
    code = function.__code__
    if not code.co_varnames or not _names(code) & {"type", "__class__"}:
        return False
    return _asks_in_source(code, code.co_filename)


@functools.lru_cache(maxsize=1024)
def _asks_in_source(code, filename):  # equal code objects may come from different files
    try:
        node = syntax_of(code)
    except (MemoryError, RecursionError, Unknown):
        return True  # perhaps
    me = code.co_varnames[0]
    nodes = list(ast.walk(node))
    named = {id(n.value) for n in nodes if isinstance(n, ast.Attribute) and n.attr in _SAME}
    return any(_is_class_of(n, me) and id(n) not in named for n in nodes)


def _is_class_of(node, name):
    """Whether an expression is ``type(name)`` or ``name.__class__``."""
    if isinstance(node, ast.Attribute) and node.attr == "__class__":
        return isinstance(node.value, ast.Name) and node.value.id == name
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "type"
        and any(isinstance(a, ast.Name) and a.id == name for a in node.args)
    )


def _names(code):
    found, pending = set(), [code]
    while pending:
        code = pending.pop()
        found.update(code.co_names)
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found


class _OfTheClass:
    """A class method that gets the class there was before, whatever it is called through, so that
    what it assigns is assigned there."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __get__(self, instance, owner=None):
        found = next(vars(c)[self.name] for c in self.kind.__mro__ if self.name in vars(c))
        return found.__get__(instance, self.kind)


def class_methods(kind):
    """What the subclass has in the place of the class methods of a class, by name."""
    return {
        name: _OfTheClass(kind, name)
        for name, member in _members(kind).items()
        if isinstance(member, classmethod) and not name.startswith("__")
    }
