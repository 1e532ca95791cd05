"""What spliced forwards call where modules in a run are no layers of torch's, but hand on their
input or do what several layers do (parts.py): the runs of what they stand for."""

import functools
import itertools
import types

import torch

from braze._ops._common import TENSORS
from braze.convert import blocks
from braze.convert.kinds import ACTIVATIONS, FUNCTION_KINDS, KINDS, SCALINGS, own_norm
from braze.convert.link_calls import one_by_one
from braze.convert.parts import (
    PARTS,
    SOMETIMES,
    Chain,
    Sequence,
    expanded_if_unchanged,
    unchanged,
)
from braze.convert.programs import LINK_KINDS, LONGEST_STRETCH
from braze.convert.quiet import are_quiet, overwrites
from braze.convert.runs import LONGEST, RUNS, length_with_norm, run_of, runner
from braze.convert.runs import run_length as length_of_run


def runner_through(links, beside=()):
    """:func:`runs.runner` of links that may be parts."""
    parts = []
    layers = expanded_if_unchanged(links, parts)
    if layers is None or len(layers) == 0:
        return None
    if beside and overwrites(layers[-1]):
        return None
    first = ()
    if isinstance(PARTS.get(type(links[-1])), (Chain, Sequence)):
        count = _count(layers)
        layers, first = layers[:count], layers[count:]
    function = runner(layers)
    if function is None:
        return None
    before = (*beside, *first)
    if not (are_quiet(before, layers, parts) if before else unchanged(parts)):
        return None
    return functools.partial(_through, function, layers, first)


def _count(layers):
    """How many of some layers, outermost first, a run may have that begins behind the convolution
    that is the innermost of them."""
    if torch.compiler.is_compiling():
        return _known_count(tuple([_type(layer) for layer in layers]))
    types = tuple([_type(layer) for layer in layers])
    count = _COUNTS.get(types)
    if count is None:
        count = _COUNTS[types] = _known_count(types)
    return count


def _known_count(types):
    kinds = tuple(
        [FUNCTION_KINDS.get(k) if isinstance(k, _FUNCTION) else KINDS.get(k) for k in types]
    )
    return len(types) - (kinds[-1:] == ALONE and run_of(kinds) is None)


_COUNTS = {}  # by what _type() gives of layers
_FUNCTION = str, types.FunctionType, types.BuiltinFunctionType


def _type(layer):
    return layer[0] if type(layer) is tuple else type(layer)


def _through(function, layers, first, links, input, *added):
    called = {link[0] for link in layers if type(link) is tuple}
    if own_norm in called and not (type(input) in TENSORS and input.dim() == 4):
        return one_by_one(links, input, *added)  # which checks its input as its own code does
    scales = len(layers) > len(links) and not called.isdisjoint(SCALINGS)
    if scales and input.device.type not in blocks.SCALE_ADD_ON:
        return one_by_one(links, input, *added)  # one of which is a program of its own
    for layer in first:
        input = layer(input)
    return function(layers, input, *added)


def run_through(links, input, *added):
    """:func:`runs.run` of links that may be parts."""
    function = runner_through(links)
    if function is None:
        function = one_by_one
    return function(links, input, *added)


def runner_of_through(links, base, beside):
    """:func:`runs.runner_of` of links that may be parts."""
    return runner_through(links, beside)


def run_radd_through(outer, added, norm, input):
    """:func:`runs.run_radd` of links that may be parts."""
    return run_through((*outer, norm), input, added)


def norm_and_more(module, input):
    """The result of the forward of a :class:`parts.NormAct` as one, or None where its code has to
    run."""
    part = PARTS.get(type(module))
    if part is None or type(input) not in TENSORS:
        return None
    if "_check_input_dim" in module.__dict__:
        return None
    layers, modules = [], []
    # Not asked is whether its own call is watched, within which this runs.
    if not part.expand(module, layers, modules) or not unchanged(modules, modules[1:]):
        return None
    layers = tuple(layers)
    function = runner(layers)
    # Only then is the input asked for something: a mode sees that.
    return None if function is None or input.dim() != 4 else function(layers, input)


def run_length(links):
    """How many links, innermost first, there are in the longest group that they begin with in which
    a run goes from each link into the next, or 0.

    Args:
        links: for each link the kinds of what it stands for, innermost first, or None.
    """
    if len(links) < 2 or not _computes(links[0]):
        return 0
    known = links[: links.index(None)] if None in links else links
    found, kinds, owners = 0, [], []
    for at, more in enumerate(known):
        kinds += more
        owners += [at for kind in more if kind != SOMETIMES]
        if len(owners) > LONGEST_STRETCH:
            break
        if at > 0 and _computes(more) and _are_joined(computing(kinds), owners):
            following = itertools.chain.from_iterable(known[at + 1 :])
            if SOMETIMES not in kinds or not _interrupted(kinds, list(following)):
                found = at + 1
    return found


def module_and_more(links):
    """How many links there are in the longest group, if any, of a module that stands for several
    layers and of what is scaled, added or activated behind it, all of which may be one program.

    Args:
        links: as :func:`run_length` takes them.
    """
    found, kinds = 0, list(links[0] or ()) if links else []
    if len(computing(kinds)) < 2 or not LINK_KINDS.issuperset(kinds):
        return 0
    for at, more in enumerate(links[1:], 1):
        if more is None or not _BEHIND.issuperset(more):
            break
        kinds += more
        if more and run_of(computing(kinds)) is not None:
            found = at + 1
    return found


#: What scales, adds, activates, or hands on its input with its dimensions in another order.
_BEHIND = frozenset(("Add", "Permute", "Scale", *ACTIVATIONS))


def _are_joined(computed, owners):
    """Whether layers can run as one, or one by one behind a convolution, so that a run goes from
    each link into the next.

    Args:
        computed: the kinds of the layers, outermost first.
        owners: for each layer, innermost first, the place of the link that stands for it.
    """
    if run_of(computed) is None and not (computed[-1:] == ALONE and computed[:-1] in RUNS):
        return False
    kinds, at, reached = computed[::-1], 0, 0
    while at < len(kinds):
        length = max(1, length_of_run(kinds[at:]), length_with_norm(kinds[at:]))
        if owners[at] > reached:
            return False
        at += length
        reached = max(reached, owners[at - 1])
    return True


#: The kinds of what a chain may begin with before a run begins in it.
ALONE = ("Conv2d",)
#: Of how many links, at most, it is asked what run they begin with.
WINDOW = 4 * LONGEST


def _computes(kinds):
    return kinds is not None and kinds not in ((), (SOMETIMES,))


def computing(kinds):
    """The kinds, outermost first, of those that always compute something."""
    return tuple([kind for kind in reversed(kinds) if kind != SOMETIMES])


def _interrupted(kinds, following):
    """Whether there are runs before or behind what only sometimes hands on its input: they would
    be lost where it does not.

    Args:
        following: the kinds of what follows the links in question.
    """
    at = [i for i, kind in enumerate(kinds) if kind == SOMETIMES]
    return any(_has_run(kinds[:i], []) or _has_run(kinds[i + 1 :], following) for i in at)


def _has_run(kinds, following):
    """Whether a run begins among such kinds."""
    among, all_kinds = len(computing(kinds)), computing([*kinds, *following])[::-1]
    ends = range(2, len(all_kinds) + 1)
    return any(all_kinds[i:j][::-1] in RUNS for j in ends for i in range(min(among, j - 1)))
