"""Squeeze-and-excitation: modules whose forward multiplies its input by what children make of the
input's means (found in their code: squeeze_code.py), as one, and as a link of programs."""

import torch

from braze._C import unwatched
from braze._ops._common import TENSORS, is_channels_last
from braze._stock import called_by, gives_way
from braze.convert.kinds import calls_of
from braze.convert.link_calls import one_by_one
from braze.convert.parts import expanded
from braze.convert.programs import by_program, of_layers
from braze.convert.runs import are_plain
from braze.convert.through import run_through
from braze.nn import functional as F

_any_global_hook = torch.nn.modules.module._has_any_global_hook
_MEAN = gives_way((torch.Tensor, "mean"), (torch.Tensor, "__mul__"), (torch.Tensor, "__rmul__"))
_POOL = gives_way(
    (torch.nn.AdaptiveAvgPool2d, "forward"),
    (torch.nn.functional, "adaptive_avg_pool2d"),
    *called_by("adaptive_avg_pool2d"),
    *calls_of(torch.nn.AdaptiveAvgPool2d),
)


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
        if self.pool is not None:
            pool = children.get(self.pool)
            if type(pool) is not torch.nn.AdaptiveAvgPool2d or _POOL() or not unwatched((pool,)):
                return None
            if _any_global_hook():
                return None
            if pool.output_size not in (1, (1, 1), [1, 1]):
                return None
        layers = [children.get(name) for name in reversed(self.names)]
        return None if None in layers else tuple(layers)


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
