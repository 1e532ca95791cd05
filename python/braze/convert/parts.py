"""Modules that are no layers of torch's but whose calls are links of runs all the same: those that
hand on their input as it is (:class:`Pass`) or with its dimensions in another order
(:class:`Permutes`), batch norms with more behind them (:class:`NormAct`), those that hand it
through children (:class:`Chain`, :class:`Sequence`), and squeeze-and-excitation (squeezes.py). What
they are is found in their code (recognise.py); whether they still are is asked at every call.
"""

import copy
import types

import torch

import braze.nn
from braze._C import unwatched
from braze.convert.kinds import calls_more, own_norm
from braze.convert.modules import child_of
from braze.convert.programs import LONGEST_STRETCH

#: The kind of a link that hands on its input in some of the module's modes, such as dropout's.
SOMETIMES = "Sometimes"
#: What instances of a class are, or None, by class: filled by recognise.part_of().
PARTS = {}


#: The classes of torch's, and of braze's for them, that are parts.
TORCHS = torch.nn.Identity, torch.nn.Dropout, torch.nn.Sequential, braze.nn.Sequential


class Pass:
    """What a module is that hands on its input as it is, and does nothing else, while `passes`.

    Args:
        passes: a function of the module.
        names: the attributes that `passes` reads, beside `training`.
        same: tells whether the class's code, and what it calls of torch's, is what it was.
    """

    def __init__(self, passes, names, same):
        self.passes, self.names, self.same = passes, names, same

    def expand(self, module, found, modules):
        """Adds the links that a call of the module stands for, outermost first, to those found;
        whether it stands for that now, if its code is what it was and nobody watches it.

        Args:
            modules: where those are added of which the last is to be asked, see :func:`unchanged`.
        """
        modules.append(module)
        return self.passes(module)

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, or None."""
        values = {name: getattr(module, name, None) for name in self.names}
        modes = [types.SimpleNamespace(**values, training=mode) for mode in (True, False)]
        passing = [self.passes(mode) for mode in modes]
        if all(passing):
            return ()
        return (SOMETIMES,) if any(passing) else None

    def layers(self, name, module):
        """What computes in a module of such a name: nothing."""
        return []


class NormAct:
    """What a module is whose class adds to ``torch.nn.BatchNorm2d`` that its result goes through
    children: ``self.act(self.drop(batch_norm(x)))``.

    Args:
        names: of the children, innermost first.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, names, same):
        self.names, self.same = names, same

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        modules.append(module)
        if not expand_into(found, children_of(module, self.names), modules):
            return False
        found.append((own_norm, (module,), {}))
        return True

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, innermost first, or None."""
        return kinds_of_children(module, self.names, kinds_of, ("BatchNorm2d",))

    def layers(self, name, module):
        """What computes in a module of such a name, innermost first, as (name, module)."""
        return [(name, module), *layers_of_children(name, module, self.names)]


class Chain:
    """What a module is whose forward hands its input through children.

    Args:
        path: a function from the module to the names of the children, innermost first.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, path, same):
        self.path, self.same = path, same

    def names(self, module):
        """The names of the children that a call goes through now, innermost first."""
        try:
            return self.path(module)
        except AttributeError:  # which the module's own code is to raise, where it stands
            return ()

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        modules.append(module)
        names = self.names(module)
        return bool(names) and expand_into(found, children_of(module, names), modules)

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, innermost first, or None."""
        found = kinds_of_children(module, self.names(module), kinds_of)
        return found if found and len(found) <= _LONGEST_CHAIN else None

    def layers(self, name, module):
        """What computes in a module of such a name, innermost first, as (name, module)."""
        return layers_of_children(name, module, self.names(module))


#: Longer chains are no parts of runs.
_LONGEST_CHAIN = 4


class Permutes:
    """What a module is whose forward is ``torch.permute(input, self.dims)``.

    Args:
        name: of the attribute with the dimensions.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, name, same):
        self.name, self.same = name, same

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        modules.append(module)
        dims = module.__dict__.get(self.name)
        if type(dims) not in (tuple, list) or any(type(d) is not int for d in dims):
            return False
        found.append((torch.permute, (tuple(dims),), {}))
        return True

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for."""
        return ("Permute",)

    def layers(self, name, module):
        """What computes in a module of such a name, as (name, module)."""
        return [(name, module)]


class Activates:
    """What a module is whose forward is ``return F.gelu(input)``, or another activation with
    settings that are written there.

    Args:
        kind: of the link.
        link: what stands for a call.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, kind, link, same):
        self.kind, self.link, self.same = kind, link, same

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        modules.append(module)
        found.append(self.link)
        return True

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for."""
        return (self.kind,)

    def layers(self, name, module):
        """What computes in a module of such a name, as (name, module)."""
        return [(name, module)]


class Sequence:
    """What a ``torch.nn.Sequential`` is, and an instance of a subclass that calls its children as
    torch's does.

    Args:
        same: tells whether the class's code is torch's.
    """

    def __init__(self, same):
        self.same = same

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        modules.append(module)
        children = list(module.__dict__["_modules"].values())
        return expand_into(found, children, modules)

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, innermost first, or None."""
        found = ()
        for child in module.__dict__["_modules"].values():
            kinds = kinds_of(child)
            if kinds is None:
                return None
            found += kinds
            if len(found) > LONGEST_STRETCH:
                return None
        return found

    def layers(self, name, module):
        """What computes in a module of such a name, innermost first, as (name, module)."""
        prefix = f"{name}." if name else ""
        children = module.__dict__["_modules"].items()
        return [layer for n, child in children for layer in layers_in(prefix + n, child)]


def of_subclass(part, made):
    """What instances of a subclass are that differs from its class by its forward alone, which does
    the same: the part that the class's are, as long as nobody changes the subclass; or None."""
    if part is None:
        return None
    found, own, same = copy.copy(part), vars(made), part.same
    forward = own["_braze_forward"]
    found.same = lambda: (
        own.get("forward") is forward and own.keys().isdisjoint(_OF_CALLS) and same()
    )
    return found


#: The attributes of classes by which modules are called and go through what they hold.
_OF_CALLS = "__call__", "_call_impl", "__iter__", "__getattr__", "__getattribute__"


def children_of(module, names):
    """The children of such names, or None in the place of one that is something else."""
    own = module.__dict__
    return [None if name in own else own["_modules"].get(name) for name in names]


def expand_into(found, children, modules):
    """Adds the links that calls of children stand for, as :meth:`Pass.expand` does; whether they
    stand for these now.

    Args:
        children: innermost first; None in the place of one that is something else.
    """
    for child in reversed(children):
        part = PARTS.get(type(child))
        if part is None:
            found.append(child)
        elif not part.expand(child, found, modules):
            return False
    return True


def unchanged(modules, called=None):
    """Whether calls of modules that are parts run the code that there was, and nothing else.

    Args:
        called: of those, the ones that are called; default: all. The code of the others runs.
    """
    if torch.compiler.is_compiling():  # which keeps what code of the user's there was
        for module in modules:
            if type(module) in TORCHS and not PARTS[type(module)].same():
                return False
        return not any(calls_more(module) for module in (modules if called is None else called))
    for kind in set(map(type, modules)):
        if not PARTS[kind].same():
            return False
    return unwatched(modules if called is None else called)


def kinds_of_children(module, names, kinds_of, found=()):
    for name in names:
        child = child_of(module, name)
        kinds = None if child is None else kinds_of(child)
        if kinds is None:
            return None
        found += kinds
    return found


def layers_in(name, module):
    """What computes in a call of a module of such a name, innermost first, as (name, module)."""
    part = PARTS.get(type(module))
    return [(name, module)] if part is None else part.layers(name, module)


def layers_of_children(name, module, names):
    prefix = f"{name}." if name else ""
    children = [(prefix + child, child_of(module, child)) for child in names]
    return [layer for named, child in children for layer in layers_in(named, child)]


def expanded(links):
    """The links that links, outermost first, stand for, without those that hand on their input; or
    None where one of them does something else now."""
    modules = []
    found = expanded_if_unchanged(links, modules)
    return None if modules and not unchanged(modules) else found


def expanded_if_unchanged(links, modules):
    """:func:`expanded`, if :func:`unchanged` of the modules that it adds to some."""
    found = []
    for link in links:
        part = None if type(link) is tuple else PARTS.get(type(link))
        if part is None:
            found.append(link)
        elif not part.expand(link, found, modules):
            return None
    return tuple(found)
