"""Channel shuffles that are written out, as ShuffleNets have them: functions of images and a number
of groups that view, transpose, copy and view again."""

import ast

import torch

from braze._ops.channel_shuffle import channel_shuffle, shuffle_takes
from braze._stock import gives_way
from braze.convert.source import Unknown, constant, tree_of

#: Stands for the splices of such a function.
SHUFFLE = "channel_shuffle"
_METHODS = "size", "view", "reshape", "transpose", "permute", "contiguous", "flatten"
_torchs = gives_way((torch, "transpose"), *((torch.Tensor, name) for name in _METHODS))

# What an expression stands for; a size is a pair, _SIZE and the dimension.
_INPUT, _GROUPS, _OF_GROUP, _SIZES, _SIZE = "input", "groups", "of a group", "sizes", "size"
_VIEWED, _TURNED, _DENSE, _RESULT = "viewed", "turned", "dense", "result"
_BATCH, _CHANNELS, *_IMAGE = ((_SIZE, i) for i in range(4))


def is_shuffle(function):
    """Whether a Python function of two arguments is a channel shuffle, by its code."""
    code = function.__code__
    if code.co_argcount != 2 or code.co_freevars or not _means_torch(function):
        return False
    try:
        tree = tree_of(function)
    except Unknown:
        return False
    given = tree.node.args
    if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
        return False
    names = (a.arg for a in given.args)
    known = dict(zip(names, (_INPUT, _GROUPS), strict=True))
    *body, last = tree.node.body
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if not isinstance(statement, ast.Assign) or not _assign(statement, known):
            return False
    return isinstance(last, ast.Return) and _value(last.value, known) == _RESULT


def instead_of(function):
    """What runs in the place of such a function."""
    groups_name = function.__code__.co_varnames[1]

    def made(*args, **kwargs):
        if len(args) == 1 and list(kwargs) == [groups_name]:
            args, kwargs = (*args, kwargs[groups_name]), {}
        same = torch.compiler.is_compiling() or _means_torch(function)
        if same and len(args) == 2 and not kwargs and shuffle_takes(*args) and not _torchs():
            return channel_shuffle(*args)
        return function(*args, **kwargs)

    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def _means_torch(function):
    """Whether `torch` is that outside of the function."""
    return function.__globals__.get("torch") is torch


def _assign(statement, known):
    """Notes what variables stand for; False where that is not known."""
    (target, *more) = statement.targets
    if more:
        return False
    if isinstance(target, ast.Name):
        names, values = [target], [_value(statement.value, known)]
    elif not isinstance(target, ast.Tuple):
        return False
    elif isinstance(statement.value, ast.Tuple):
        names, values = target.elts, [_value(v, known) for v in statement.value.elts]
    else:
        is_sizes = _value(statement.value, known) == _SIZES
        names, values = target.elts, [_BATCH, _CHANNELS, *_IMAGE] if is_sizes else []
    if None in values or len(names) != len(values):
        return False
    if not all(isinstance(name, ast.Name) for name in names):
        return False
    known.update((name.id, value) for name, value in zip(names, values, strict=True))
    return True


def _value(node, known):
    """What an expression stands for, or None."""
    if node is None:
        return None
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return _SIZES if node.attr == "shape" and _value(node.value, known) == _INPUT else None
    if isinstance(node, ast.Subscript):
        at = constant(node.slice)
        if _value(node.value, known) == _SIZES and type(at) is int and 0 <= at < 4:
            return _SIZE, at
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        parts = _value(node.left, known), _value(node.right, known)
        return _OF_GROUP if parts == (_CHANNELS, _GROUPS) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
        return _called(node, known)
    return _number(node)


def _number(node):
    value = constant(node)
    return value if type(value) is int else None


def _called(node, known):
    """What a method's result stands for, or torch.transpose's."""
    name, owner, args = node.func.attr, node.func.value, node.args
    if isinstance(owner, ast.Name) and owner.id == "torch" and "torch" not in known:
        if name != "transpose" or not args:
            return None
        owner, args = args[0], args[1:]
    if len(args) == 1 and isinstance(args[0], (ast.Tuple, ast.List)):
        args = args[0].elts
    of, given = _value(owner, known), tuple(_value(a, known) for a in args)
    if of == _INPUT:
        if name == "size":
            dims = {(): _SIZES, **{(i,): (_SIZE, i) for i in range(4)}}
            return dims.get(given)
        halves = ((_BATCH, _GROUPS, n, *_IMAGE) for n in (_OF_GROUP, -1))
        return _VIEWED if name in ("view", "reshape") and given in halves else None
    if of == _VIEWED:
        turns = (name, given) in (
            ("transpose", (1, 2)),
            ("transpose", (2, 1)),
            ("permute", (0, 2, 1, 3, 4)),
        )
        return _TURNED if turns else None
    if of == _TURNED and name == "contiguous" and not given:
        return _DENSE
    copies = "reshape", "flatten", *(("view",) if of == _DENSE else ())
    if of in (_TURNED, _DENSE) and name in copies:
        whole = ((_BATCH, n, *_IMAGE) for n in (_CHANNELS, -1))
        fits = given == (1, 2) if name == "flatten" else given in whole
        return _RESULT if fits else None
    return None
