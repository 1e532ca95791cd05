"""Squeeze-and-excitation: modules whose forward multiplies its input by what children make of the
input's means (found in their code: squeeze_code.py), as one, and as a link of programs."""

import torch

import braze.nn
from braze._C import unwatched
from braze._ops._common import TENSORS, is_channels_last
from braze._stock import called_by, gives_way
from braze.convert.kinds import calls_of, places
from braze.convert.link_calls import one_by_one
from braze.convert.parts import expanded
from braze.convert.programs import by_program, of_layers
from braze.convert.runs import are_plain
from braze.convert.through import run_through
from braze.nn import functional as F

_any_global_hook = torch.nn.modules.module._has_any_global_hook
_MEAN = gives_way((torch.Tensor, "mean"), (torch.Tensor, "__mul__"), (torch.Tensor, "__rmul__"))
_POOLING = (torch.nn.functional, "adaptive_avg_pool2d"), *called_by("adaptive_avg_pool2d")
_SEEN = gives_way((torch.Tensor, "expand_as"), (torch.Tensor, "size"), *_POOLING)
#: torch's layer, and braze's in its place.
_POOLS = torch.nn.AdaptiveAvgPool2d, braze.nn.AdaptiveAvgPool2d
_POOL = gives_way(*places(braze.nn.AdaptiveAvgPool2d), *calls_of(torch.nn.AdaptiveAvgPool2d))


class Squeeze:
    """What a module is whose forward is ``x * self.gate(self.fc(x.mean((2, 3), keepdim=True)))``.

    Args:
        pool: the name of the child that takes the mean, or None.
        names: of the children that the mean goes through, innermost first.
        methods: the names of the class's methods that do it.
        guard: a function of the module that tells whether it is this now.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, pool, names, methods, guard, same):
        self.pool, self.names, self.methods = pool, names, methods
        self.guard, self.same = guard, same

    def run(self, module, input):
        """The result of the module's forward as one, or None where its code has to run."""
        if type(input) not in TENSORS or torch.compiler.is_compiling():
            return None
        layers = self._layers(module)
        # Only now: a mode sees what is asked of a tensor.
        if layers is None or input.dim() != 4:
            return None
        if not (input.is_contiguous() or is_channels_last(input)):
            return None
        link = _link(layers, module)
        if link is None:
            return excited(input, layers, module)
        return _by_program((link,), input)

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        if torch.compiler.is_compiling():
            return False
        modules.append(module)
        layers = self._layers(module)
        link = None if layers is None else _link(layers, module)
        if link is None:
            return False
        found.append(link)
        return True

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for."""
        return ("Squeeze",)

    def layers(self, name, module):
        """What computes in a module of such a name, as (name, module)."""
        return [(name, module)]

    def _layers(self, module):
        """Of what the means go through, outermost first; None where the module's code has to
        run."""
        own = module.__dict__
        if not self.same() or _MEAN() or not self.guard(module):
            return None
        if not own.keys().isdisjoint((*self.methods, *self.names, self.pool)):
            return None
        children = own["_modules"]
        if self.pool is not None and not _pools_all(children.get(self.pool)):
            return None
        layers = [children.get(name) for name in reversed(self.names)]
        return None if None in layers else tuple(layers)


def _pools_all(pool):
    """Whether a child is torch's pooling layer of one result for each channel, and nobody watches
    it."""
    if type(pool) not in _POOLS or _POOL() or not unwatched((pool,)):
        return False
    return not _any_global_hook() and pool.output_size in (1, (1, 1), [1, 1])


class Gate:
    """What a module is whose forward multiplies its input by what any code of its own makes of the
    input's means.

    Args:
        pool: the name of the child that takes the means, or None.
        code: a function of the module and a :class:`Seen` in the place of its input, which returns
            the factors.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, pool, code, same):
        self.pool, self.code, self.same = pool, code, same

    def run(self, module, input):
        """As :meth:`Squeeze.run`."""
        if type(input) not in TENSORS or torch.compiler.is_compiling():
            return None
        if not self.same() or _MEAN() or _SEEN():
            return None
        own, pool = module.__dict__, self.pool
        if pool is not None and (pool in own or not _pools_all(own["_modules"].get(pool))):
            return None
        if input.dim() != 4 or not (input.is_contiguous() or is_channels_last(input)):
            return None
        return F.squeeze_excite(input, lambda mean: self.code(module, Seen(input, mean)))

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`: it is called as it is."""
        modules.append(module)
        return False

    def kinds(self, module, kinds_of):
        """See :meth:`Pass.kinds`: no link of any run."""
        return None

    def layers(self, name, module):
        """What computes in a module of such a name, as (name, module)."""
        return [(name, module)]


class Seen:
    """What the code of a :class:`Gate` may see of the module's input.

    Args:
        input: [N, C, H, W].
        pooled: its means, [N, C, 1, 1].
    """

    __slots__ = "_input", "pooled"

    def __init__(self, input, pooled):
        self._input, self.pooled = input, pooled

    def __getattr__(self, name):  # of the input: its shape, dtype, device
        return getattr(self._input, name)

    def mean(self, dim, keepdim=False):
        """Over the pixels, whatever the order of these dimensions."""
        return self.pooled if keepdim else self.pooled.flatten(1)

    def expanded(self, factors):
        """``factors.expand_as(input)``, which a product does by itself."""
        alike = isinstance(factors, torch.Tensor) and factors.shape == self.pooled.shape
        return factors if alike else factors.expand_as(self._input)


@of_layers("Squeeze")
def excited(input, layers, module):
    """What a call of a module stands for: squeeze-and-excitation whose means go through layers,
    outermost first."""
    if input.dim() != 4:
        return module(input)
    return F.squeeze_excite(input, lambda mean: run_through(layers, mean) if layers else mean)


def _link(layers, module):
    """``excited`` of layers that may be parts, as a link; None where one of them is watched, or of
    a class that programs do not know."""
    layers = expanded(layers)
    return None if layers is None or not are_plain(layers) else (excited, (layers, module), {})


_by_program = by_program(one_by_one)
