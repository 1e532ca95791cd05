"""Calls of one link of a run, and of functions and methods that braze has its own of."""

from braze._ops._common import TENSORS
from braze.convert.kinds import ADDITIONS, FUNCTIONS, METHODS


def one_by_one(links, input, *added):
    for link in reversed(links):
        is_addition = type(link) is tuple and link[0] in ADDITIONS
        input = link[0](input, *added) if is_addition else call(link, input)
    return input


def call(link, input):
    if type(link) is not tuple:
        return link(input)
    function, args, kwargs = link
    if isinstance(function, str):
        return method(input, function, *args, **kwargs)
    return called(function, FUNCTIONS.get(function), input, *args, **kwargs)


def called(function, replacement, /, input, *args, **kwargs):
    """function(input, ...), by braze's in its place where it still is what that replaces."""
    if replacement is not None and type(input) in TENSORS:
        known, ours, torchs = replacement
        if function is known and not torchs():
            return ours(input, *args, **kwargs)
    return function(input, *args, **kwargs)


def called_of_list(function, replacement, /, tensors, *args, **kwargs):
    """:func:`called` of a function of a list or tuple of tensors."""
    known, ours, torchs = replacement
    if function is known and not torchs():
        result = ours(tensors, *args, **kwargs)
        if result is not None:
            return result
    return function(tensors, *args, **kwargs)


def method(input, name, *args, **kwargs):
    """``input.name(...)`` of what may be a tensor."""
    if name in METHODS and not args and not kwargs and type(input) in TENSORS:
        _, ours, torchs = METHODS[name]
        if not torchs():
            return ours(input)
    return getattr(input, name)(*args, **kwargs)
