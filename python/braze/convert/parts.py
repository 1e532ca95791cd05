"""Modules that are no layers of torch's but whose calls are links of runs all the same: those that
hand on their input as it is (:class:`Pass`), and batch norms with more behind them
(:class:`NormAct`). What they are is found in their code (recognise.py); whether they still are is
asked at every call.
"""

import types

import torch

from braze.convert.kinds import calls_more, own_norm
from braze.convert.modules import child_of

#: The kind of a link that hands on its input in some of the module's modes, such as dropout's.
SOMETIMES = "Sometimes"
#: What instances of a class are, or None, by class: filled by recognise.part_of().
PARTS = {}


class Pass:
    """What a module is that hands on its input as it is, and does nothing else, while `passes`.

    Args:
        passes: a function of the module.
        names: the attributes that `passes` reads, beside `training`.
        torchs: tells whether torch's own functions have to run, as ``_stock.gives_way`` makes it.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, passes, names, torchs, same):
        self.passes, self.names, self.torchs, self.same = passes, names, torchs, same

    def expand(self, module, found):
        """Adds the links that a call of the module stands for, none, to those found; whether it
        stands for that now."""
        return (
            not calls_more(module)
            and not self.torchs()
            and (torch.compiler.is_compiling() or self.same())
            and self.passes(module)
        )

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, or None."""
        values = {name: getattr(module, name, None) for name in self.names}
        modes = [types.SimpleNamespace(**values, training=mode) for mode in (True, False)]
        passing = [self.passes(mode) for mode in modes]
        if all(passing):
            return ()
        return (SOMETIMES,) if any(passing) else None


class NormAct:
    """What a module is whose class adds to ``torch.nn.BatchNorm2d`` that its result goes through
    children: ``self.act(self.drop(batch_norm(x)))``.

    Args:
        names: of the children, innermost first.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, names, same):
        self.names, self.same = names, same

    def expand(self, module, found):
        """Adds the links that a call of the module stands for, outermost first, to those found;
        whether it stands for that now."""
        return not calls_more(module) and self.expand_forward(module, found)

    def expand_forward(self, module, found):
        """:meth:`expand` of a call of the module's forward."""
        if not (torch.compiler.is_compiling() or self.same()):
            return False
        for name in self.names[::-1]:
            child = getattr(module, name, None)
            part = PARTS.get(type(child))
            if part is None:
                found.append(child)
            elif not part.expand(child, found):
                return False
        found.append((own_norm, (module,), {}))
        return True

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, innermost first, or None."""
        found = ("BatchNorm2d",)
        for name in self.names:
            child = child_of(module, name)
            kinds = None if child is None else kinds_of(child)
            if kinds is None:
                return None
            found += kinds
        return found

    def children(self, module):
        """The names of the children that are links, innermost first."""
        named = [(name, child_of(module, name)) for name in self.names]
        return [name for name, child in named if not isinstance(PARTS.get(type(child)), Pass)]


def expanded(links):
    """The links that links, outermost first, stand for, without those that hand on their input; or
    None where one of them does something else now."""
    found = []
    for link in links:
        part = None if type(link) is tuple else PARTS.get(type(link))
        if part is None:
            found.append(link)
        elif not part.expand(link, found):
            return None
    return tuple(found)
