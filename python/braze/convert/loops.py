"""What spliced loops go through: layers one after the other, with the runs among them in one."""

import functools
import itertools

import torch

from braze.convert.kinds import KINDS, kind_of, own_norm
from braze.convert.parts import PARTS, Permutes, Sequence, expanded, unchanged
from braze.convert.programs import LAYERS, LINK_KINDS, LONGEST_STRETCH, by_program
from braze.convert.runs import are_plain, in_turn
from braze.convert.squeezes import Squeeze
from braze.convert.through import WINDOW, run_length, run_through, runner_through


def fused(modules):
    """The modules, as callables, with runs among them in one: what ``for module in modules`` goes
    through. Changes of `modules` on the way are seen as an iterator over it sees them."""
    if type(modules).__iter__ not in _ITERATED:
        return modules
    children = tuple(modules)
    kinds = tuple(map(_kinds, children))
    if torch.compiler.is_compiling():
        return _callables(children, _segments(kinds))
    segments, stretches = _plan(tuple(map(type, children)), kinds)
    together = segments or stretches
    return _walk(modules, children, segments, stretches) if together else modules


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
    return links[0] if len(links) == 1 else lambda input: run_through(links, input)


def _walk(modules, children, segments, stretches):
    """The callables. Where others ran, which may have changed what comes next, another iterator
    looks for what is next by now."""
    skip, others_ran = 0, False
    for at, module in enumerate(modules):
        if skip:
            skip -= 1
            continue
        length = max(stretches.get(at, 0), segments.get(at, 0))
        if length:
            now = iter(modules) if others_ran else children
            layers = tuple(itertools.islice(now, at, at + length))
            stretch = layers[: stretches.get(at, 0)]
            links = _links(stretch) if stretch else None
            if links is not None:
                skip = len(stretch) - 1
                yield functools.partial(_one_after_another, links)
                continue
        if at in segments:
            links = layers[: segments[at]][::-1]
            as_one = runner_through(links)
            if as_one is None:  # perhaps of fewer
                links = links[len(links) - run_length([_asked(k) for k in links[::-1]]) :]
                as_one = runner_through(links)
            if as_one is not None:
                skip = len(links) - 1
                yield functools.partial(as_one, links)
                continue
        others_ran = True
        yield module


def _links(children):
    """What calls of children stand for now, outermost first, if all are layers that programs know,
    and nobody watches them; or None."""
    links = expanded(children[::-1])
    if links is None or any(type(k) is tuple and k[0] is own_norm for k in links):
        return None
    return links if are_plain([k for k in links if type(k) is not tuple]) else None


_one_after_another = by_program(in_turn)


def _kinds(module):
    """The kinds of the links that a call of a module stands for now, or None, by its class alone
    where that says it."""
    kind = type(module)
    part = PARTS.get(kind)
    if part is None:
        kind = KINDS.get(kind)
        return None if kind is None else (kind,)
    if type(part) in (Permutes, Sequence, Squeeze):
        return part.kinds(module, _kinds) if unchanged((module,)) else None
    return _asked(module)


def _asked(module):
    """:func:`_kinds`, but None of a layer that does more than what its class says."""
    layers = expanded((module,))
    found = () if layers is None else tuple([kind_of(layer) for layer in layers[::-1]])
    return None if layers is None or None in found else found


def _segments(kinds):
    """Where runs may begin among modules of such kinds, and how long each is."""
    found, at = {}, 0
    while at < len(kinds):
        length = run_length(kinds[at : at + WINDOW])
        if length:
            found[at] = length
        at += max(length, 1)
    return found


@functools.lru_cache(maxsize=1024)
def _plan(types, kinds):
    """Where runs and programs may begin among modules of such classes and kinds, and how long each
    is."""
    segments = _segments(kinds)
    return segments, _stretches(types, kinds, segments)


def _stretches(types, kinds, segments):
    """Where two or more modules that may be one program follow each other, and how many: as far as
    none is one of a run that goes on behind them."""
    found, at = {}, 0
    while at < len(kinds):
        end = _stretch_end(types, kinds, at)
        longer = (i for i in range(at, end) if i + segments.get(i, 0) > end)
        length = next(longer, end) - at
        if length > 1:
            found[at] = length
        at += max(length, 1)
    return found


def _stretch_end(types, kinds, at):
    """Up to where modules from one on may be one program: layers as many as there are; where some
    are more than one, of :data:`LONGEST_STRETCH` layers."""
    count, alone = 0, True
    for end in range(at, len(kinds)):
        own = kinds[end]
        if not own or not LINK_KINDS.issuperset(own):
            return end
        count, alone = count + len(own), alone and types[end] in LAYERS
        if count > LONGEST_STRETCH and not alone:
            return end
    return len(kinds)
