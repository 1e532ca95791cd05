"""What spliced loops go through: layers one after the other, with the runs among them in one."""

import functools

import torch

from braze.convert.kinds import KINDS, kind_of
from braze.convert.runs import LONGEST, run, run_length, runner


def fused(modules):
    """The modules, as callables, with runs among them in one: what ``for module in modules`` goes
    through. Changes of `modules` on the way are seen as an iterator over it sees them."""
    if type(modules).__iter__ not in _ITERATED:
        return modules
    if torch.compiler.is_compiling():
        children = tuple(modules)
        return _callables(children, _segments(tuple(map(type, children))))
    segments = _known_segments(tuple(map(type, modules)))
    return _walk(modules, segments) if segments else modules


#: Which iterate over what they hold without effects.
_ITERATED = tuple(k.__iter__ for k in (torch.nn.Sequential, torch.nn.ModuleList, list, tuple))


def _callables(children, segments):
    found, at = [], 0
    while at < len(children):
        length = segments.get(at, 1)
        found.append(_callable(children[at : at + length][::-1]))
        at += length
    return found


def _callable(links):
    return links[0] if len(links) == 1 else lambda input: run(links, input)


def _walk(modules, segments):
    """The callables. A second iterator looks ahead, just before what it finds would run: what ran
    so far may have changed what comes next."""
    ahead, seen, skip = iter(modules), 0, 0
    for at, module in enumerate(modules):
        if skip:
            skip -= 1
            continue
        if at in segments:
            for _ in range(seen, at):
                next(ahead, None)
            links, seen = _next(ahead, segments[at]), at + segments[at]
            as_one = links and runner(links)
            if as_one is None:  # perhaps of fewer
                links = links[len(links) - run_length([kind_of(link) for link in links[::-1]]) :]
                as_one = links and runner(links)
            if as_one:
                skip = len(links) - 1
                yield functools.partial(as_one, links)
                continue
        yield module


def _next(iterator, count):
    """The next ones that an iterator has, up to so many, last first."""
    return tuple([link for _, link in zip(range(count), iterator, strict=False)])[::-1]


def _segments(types):
    """Where runs may begin among modules of such types, and how long each is."""
    kinds = [KINDS.get(kind) for kind in types]
    found, at = {}, 0
    while at < len(kinds):
        length = run_length(kinds[at : at + LONGEST])
        if length:
            found[at] = length
        at += max(length, 1)
    return found


_known_segments = functools.lru_cache(maxsize=1024)(_segments)
