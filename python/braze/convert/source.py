"""A function's syntax tree, known to be what the function runs, and new functions made of changed
trees. Nothing of a function is executed. Knows nothing of torch."""

import __future__

import ast
import functools
import inspect
import linecache
import types

#: How the names begin that changed trees may use beside the function's own.
PREFIX = "_braze_"
_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
#: The types of plain numbers.
NUMBERS = int, float
#: Functions and methods through which code sees its own local variables.
_SEES_LOCALS = {"breakpoint", "dir", "eval", "exec", "locals", "vars"}
_SEES_FRAMES = {"_getframe", "currentframe"}


class Unknown(Exception):
    """Why a function's tree is not known."""


class Tree:
    """The syntax tree of a function.

    Attributes:
        node: the ``ast.FunctionDef``, of which :func:`make` changes a copy.
        numbered: its expressions and statements; each has its place in here as `number`, and so
            have their copies.
        locals: the names of its arguments and local variables.
        class_name: of the class that it was written in, or None.
        shared: the names that functions inside of it, or around it, see too.
    """

    def __init__(self, code, class_name):
        self.node = syntax_of(code)
        nodes = ast.walk(self.node)
        self.numbered = [n for n in nodes if isinstance(n, (ast.expr, ast.stmt))]
        for number, node in enumerate(self.numbered):
            node.number = number
        self.class_name = class_name
        self.locals = {*code.co_varnames, *code.co_cellvars}
        self.shared = {*code.co_cellvars, *code.co_freevars}


def syntax_of(code):
    """The ``ast.FunctionDef`` that a code object seems to be of.

    Raises:
        Unknown: there is no source, or not of a plain function.
    """
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError, SyntaxError) as error:
        raise Unknown("its source is not to be found") from error
    # Under an `if`, indented code parses as it stands: columns and long strings stay what they are.
    indented = lines[0][:1].isspace()
    try:
        module = ast.parse("if 1:\n" * indented + "".join(lines), code.co_filename)
    except (SyntaxError, ValueError):
        raise Unknown("it is no plain function") from None
    body = module.body[0].body if indented else module.body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise Unknown("it is no plain function")
    ast.increment_lineno(module, first - 1 - indented)
    return body[0]


def _compile(node, code, class_name):
    """The code object of a tree that may be changed, in the place of `code`."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    free = {n for n in code.co_freevars if n != "__class__"}
    free |= {n for n in names if n.startswith(PREFIX)} - _assigned(node)
    # What is evaluated outside of the function is taken from the function itself.
    node.decorator_list, node.returns = [], None
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
    body = [node]
    if class_name or "__class__" in code.co_freevars:
        # Private names are spelled after the class, and super() means it.
        body = [ast.ClassDef(class_name or "_", [], [], body, [], type_params=[])]
    bound = body[0].name
    # A global name would be taken for the one that is bound here.
    body = body if bound in free else [ast.Global([bound]), *body]
    values = [ast.arg(n) for n in sorted(free - {bound})]
    arguments = ast.arguments([], values, None, [], [], None, [])
    outer = ast.FunctionDef(PREFIX, arguments, body, [], type_params=[])
    ast.copy_location(outer, node)
    # From Python 3.11 on, calls through what a file imports are compiled in a way of their own.
    imports = [ast.Import([ast.alias(n)]) for n in sorted(_imported(code.co_filename))]
    module = ast.fix_missing_locations(ast.Module([*imports, outer], []))
    flags = code.co_flags & _FUTURE
    found = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in (PREFIX, *([] if bound == node.name else [bound]), node.name):
        inner = (c for c in found.co_consts if isinstance(c, types.CodeType))
        found = next(c for c in inner if c.co_name == name)
    return found


@functools.lru_cache(maxsize=256)
def _imported(filename):
    """The names that a file imports at its top level."""
    try:
        pending = ast.parse("".join(linecache.getlines(filename))).body
    except (SyntaxError, ValueError):
        return frozenset()
    names = set()
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(a.asname or a.name.split(".")[0] for a in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(node))
    return frozenset(names - {"*"})


def _assigned(node):
    """The names that a function assigns to."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def _class_name(function):
    """The class that a function was written in, or None."""
    outer = function.__qualname__.rsplit(".", 2)[:-1]
    return outer[-1] if outer and outer[-1] != "<locals>" else None


_SAME = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_names", "co_varnames",
    "co_freevars", "co_cellvars", "co_code",
)  # fmt: skip


def _same(a, b):
    """Whether two code objects, or two constants of code objects, do the same."""
    if not (isinstance(a, types.CodeType) and isinstance(b, types.CodeType)):
        return type(a) is type(b) and repr(a) == repr(b)  # which tells 0.0 from -0.0
    return (
        all(getattr(a, name) == getattr(b, name) for name in _SAME)
        and (a.co_flags | inspect.CO_NESTED) == (b.co_flags | inspect.CO_NESTED)
        and len(a.co_consts) == len(b.co_consts)
        and all(map(_same, a.co_consts, b.co_consts))
    )


def tree_of(function):
    """The tree of a Python function.

    Raises:
        Unknown: the source is missing or is not what the function was compiled from, it is a
            generator or a coroutine, or its code may ask for its own local variables.
    """
    if not isinstance(function, types.FunctionType):
        raise Unknown("it is not a Python function")
    # Equal code objects may come from different files.
    code = function.__code__
    tree = _checked_tree(code, code.co_filename, _class_name(function))
    if isinstance(tree, str):
        raise Unknown(tree)
    return tree


@functools.lru_cache(maxsize=1024)
def _checked_tree(code, filename, class_name):
    """The tree, or why it is not known."""
    if code.co_flags & _GENERATES:
        return "it is a generator or a coroutine"
    try:
        tree = Tree(code, class_name)
    except Unknown as error:
        return str(error)
    names = {n.id for n in tree.numbered if isinstance(n, ast.Name)}
    attributes = {n.attr for n in tree.numbered if isinstance(n, ast.Attribute)}
    refused = sorted((names & _SEES_LOCALS) | ((names | attributes) & _SEES_FRAMES))
    if refused:
        return f"it uses {', '.join(refused)}"
    if any(name.startswith(PREFIX) for name in names):
        return f"it uses names that begin with {PREFIX}"
    try:
        again = _compile(copy_tree(tree.node), code, class_name)
    except (SyntaxError, ValueError, StopIteration):
        again = None
    if again is None or not _same(again, code):
        return "its source is not what is loaded"
    return tree


def copy_tree(node):
    """A copy of a tree, whose nodes keep their numbers."""
    if isinstance(node, list):
        return [copy_tree(n) for n in node]
    if not isinstance(node, ast.AST):
        return node
    copied = type(node).__new__(type(node))
    copied.__dict__.update({name: copy_tree(value) for name, value in vars(node).items()})
    return copied


def make(function, change, values):
    """A function like `function`, of a changed tree.

    It shares globals, defaults and closure with `function`, so that it sees what happens to them.

    Args:
        change: takes a copy of the ``ast.FunctionDef`` and returns it changed.
        values: what the names that begin with ``PREFIX`` stand for.
    """
    tree = tree_of(function)
    code = _compile(change(copy_tree(tree.node)), function.__code__, tree.class_name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells.update({name: types.CellType(value) for name, value in values.items()})
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function)


VARIABLE = object()  # what constant() returns of anything else


def constant(node):
    """The value of a number, string, None or tuple of them as it is written, else VARIABLE."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return VARIABLE
    return VARIABLE if isinstance(value, (list, dict, set)) else value
