"""Drop-in layers: subclasses of torch's own, so that state dicts, ``isinstance``, initialisation,
hooks, ``deepcopy`` and pickling work unchanged; only ``forward`` differs."""

from braze.nn import functional
from braze.nn.modules import Conv2d, Flatten, Linear, ReLU, Sequential

__all__ = ["Conv2d", "Flatten", "Linear", "ReLU", "Sequential", "functional"]
