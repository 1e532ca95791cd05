"""Global response norm: modules whose forward computes it, found in their code
(response_norm_code.py), as one op, and as a link of runs."""

import torch

from braze._ops._common import TENSORS, autocast_dtype, is_channels_last
from braze._ops.global_response_norm import response_norm_for_product
from braze._stock import gives_way
from braze.convert.kinds import FUNCTION_KINDS, OF_TENSORS
from braze.convert.source import NUMBERS

_other = gives_way(
    *((torch.Tensor, name) for name in ("norm", "mean", "view", "reshape")),
    *((torch.Tensor, f"__{name}__") for name in ("add", "radd", "mul", "rmul", "truediv")),
    *((torch, name) for name in ("norm", "mean", "addcmul")),
    (torch.linalg, "vector_norm"),
)
#: By the dimensions of the pixels, which others are the channels, and how a vector of these
#: broadcasts; whether they are innermost.
_LAYOUTS = {(1, 2): ((3, -1), (1, 1, 1, -1), True), (2, 3): ((1, -3), (1, -1, 1, 1), False)}


class ResponseNorm:
    """What a module is whose forward is global response norm. Each value is of an attribute or
    written in the code.

    Args:
        weight, bias: parameters, as (name, the shape that they are viewed in, or None).
        pixels, channels: the dimensions that the norms go over, and their mean.
        eps: added to the mean.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, weight, bias, pixels, channels, eps, same):
        self.weight, self.bias = weight, bias
        self.pixels, self.channels, self.eps, self.same = pixels, channels, eps, same

    def run(self, module, input):
        """The result of the module's forward as one, or None where its code has to run."""
        if type(input) not in TENSORS or autocast_dtype(input) is not None:
            return None
        link = self._link(module)
        return None if link is None else _normed(input, *link[1])

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        modules.append(module)
        link = self._link(module)
        if link is not None:
            found.append(link)
        return link is not None

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for."""
        return ("ResponseNorm",) if self._link(module) is not None else None

    def layers(self, name, module):
        """What computes in a module of such a name, as (name, module)."""
        return [(name, module)]

    def _link(self, module):
        """``response_normed`` of the module, as a link, or None."""
        # While compiling, torch keeps what code of the user's there was.
        if _other() or not (torch.compiler.is_compiling() or self.same()):
            return None
        own = module.__dict__
        pixels, channels = self.pixels(own), self.channels(own)
        if type(pixels) not in (tuple, list) or type(channels) is not int:
            return None
        layout = _LAYOUTS.get(tuple(pixels))
        eps = self.eps(own)
        if layout is None or channels not in layout[0] or type(eps) not in NUMBERS:
            return None
        vectors = [_vector(own, *named, layout[1]) for named in (self.weight, self.bias)]
        if None in vectors:
            return None
        return response_normed, (*vectors, eps, layout[2]), {"module": module}


def _vector(own, name, viewed, shape):
    """A module's parameter as a vector, or None where it does not broadcast along channels.

    Args:
        viewed: gives the shape in which the code views it; None: in none.
        shape: one that is right.
    """
    tensor = None if name in own else own["_parameters"].get(name)
    if type(tensor) not in TENSORS:
        return None
    if viewed is not None:
        given = viewed(own)
        right = type(given) in (tuple, list) and tuple(given) == shape and tensor.dim() == 1
        return tensor if right else None
    if tensor.dim() == 1:
        return tensor if shape[-1] == -1 else None
    whole = tuple(tensor.numel() if extent == -1 else extent for extent in shape)
    return tensor.view(-1) if tensor.shape == whole and tensor.is_contiguous() else None


def _normed(input, weight, bias, eps, innermost):
    """The result, or None where torch's functions have to run."""
    if input.dim() != 4:
        return None
    if not innermost:
        if not (input.is_contiguous() or is_channels_last(input)):
            return None
        return response_norm_for_product(input, weight, bias, eps)
    if not input.is_contiguous():
        return None
    result = response_norm_for_product(input.permute(0, 3, 1, 2), weight, bias, eps)
    return None if result is None else result.permute(0, 2, 3, 1)


def response_normed(input, weight, bias, eps, innermost, *, module):
    """What a call of a module stands for, as a link of which anything may read the result. The
    tensors are the link's: a program has others in the place of the module's."""
    alone = type(input) in TENSORS and autocast_dtype(input) is None
    result = _normed(input, weight, bias, eps, innermost) if alone else None
    return module(input) if result is None else result


def response_normed_for_product(link, input):
    """The result of a link, which products read and nothing else."""
    _, args, kwargs = link
    result = _normed(input, *args) if type(input) in TENSORS else None
    return kwargs["module"](input) if result is None else result


FUNCTION_KINDS[response_normed] = "ResponseNorm"
OF_TENSORS[response_normed] = 2
