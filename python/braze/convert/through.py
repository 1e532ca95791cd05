"""What spliced forwards call where modules in a run are no layers of torch's, but hand on their
input or do what several layers do (parts.py): the runs of what they stand for."""

import functools

from braze._ops._common import TENSORS
from braze.convert.parts import SOMETIMES, expanded, own_norm
from braze.convert.runs import LONGEST, RUNS, one_by_one, runner


def runner_through(links, beside=()):
    """:func:`runs.runner` of links that may be parts."""
    layers = expanded(links)
    function = runner(layers, beside) if layers else None
    return None if function is None else functools.partial(_through, function, layers)


def _through(function, layers, links, input, *added):
    if any(type(link) is tuple and link[0] is own_norm for link in layers) and not (
        type(input) in TENSORS and input.dim() == 4
    ):
        return one_by_one(links, input, *added)  # which checks its input as its own code does
    return function(layers, input, *added)


def run_through(links, input, *added):
    """:func:`runs.run` of links that may be parts."""
    return (runner_through(links) or one_by_one)(links, input, *added)


def runner_of_through(links, base, beside):
    """:func:`runs.runner_of` of links that may be parts."""
    return runner_through(links, beside)


def run_radd_through(outer, added, norm, input):
    """:func:`runs.run_radd` of links that may be parts."""
    return run_through((*outer, norm), input, added)


def norm_and_more(part, module, input):
    """The result of a module's forward as one, or None where its code has to run.

    Args:
        part: the :class:`parts.NormAct` that the module is.
    """
    layers = []
    if type(input) not in TENSORS or input.dim() != 4 or not part.expand_forward(module, layers):
        return None
    layers = tuple(layers)
    function = runner(layers)
    return None if function is None else function(layers, input)


def run_length(links):
    """How many links, innermost first, the longest run has that they begin with, or 0.

    Args:
        links: for each link the kinds of what it stands for, innermost first, or None.
    """
    if len(links) < 2 or not _computes(links[0]):
        return 0
    found, kinds = 0, []
    for length, more in enumerate(links, 1):
        if more is None:
            break
        kinds += more
        computed = _computed(kinds)
        if len(computed) > LONGEST:
            break
        if length > 1 and _computes(more) and computed in RUNS and not _interrupted(kinds):
            found = length
    return found


#: Of how many links, at most, it is asked what run they begin with.
WINDOW = 4 * LONGEST


def _computes(kinds):
    return kinds is not None and kinds not in ((), (SOMETIMES,))


def _computed(kinds):
    """The kinds, outermost first, of those that always compute something."""
    return tuple([kind for kind in reversed(kinds) if kind != SOMETIMES])


def _interrupted(kinds):
    """Whether there are runs before or behind what only sometimes hands on its input: they would
    be lost where it does not."""
    at = [i for i, kind in enumerate(kinds) if kind == SOMETIMES]
    return any(_has_run(kinds[:i]) or _has_run(kinds[i + 1 :]) for i in at)


def _has_run(kinds):
    computed = _computed(kinds)
    ends = range(2, len(computed) + 1)
    return any(computed[i:j] in RUNS for j in ends for i in range(j - 1))
