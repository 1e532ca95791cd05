"""Group norms, and layer norms of rows or over the channels of images, in the code of other classes
than torch's (image_norm_code.py), and in front of products: links and blocks of runs.

Under autocast torch normalises in float32, and a convolution that reads the result rounds it. Where
convolutions are all that reads it, it has their dtype from the start.
"""

import torch

from braze._ops._common import TENSORS, autocast_dtype
from braze._ops.activation import activation as act_of
from braze._ops.activation import fits
from braze._ops.group_norm_act import group_norm_act_for_product
from braze._ops.layer_norm import layer_norm_for_product
from braze._stock import called_by, gives_way
from braze.convert.kinds import FUNCTION_KINDS, OF_MODULES, OF_TENSORS, calls_more
from braze.convert.parts import children_of, expand_into, kinds_of_children, layers_of_children
from braze.convert.source import NUMBERS
from braze.nn import functional as F

_other = gives_way(
    *((torch.nn.functional, name) for name in ("group_norm", "layer_norm")),
    *(place for name in ("group_norm", "layer_norm") for place in called_by(name)),
    (torch.Tensor, "permute"),
)


def own_group_norm(input, weight, bias, num_groups, eps):
    """``F.group_norm`` of what a module holds, as a link."""
    return F.group_norm(input, num_groups, weight, bias, eps)


def own_layer_norm(input, weight, bias, shape, eps):
    """``F.layer_norm`` over the channels of images, as a link."""
    return F.layer_norm(input.permute(0, 2, 3, 1), shape, weight, bias, eps).permute(0, 3, 1, 2)


def own_row_norm(input, weight, bias, shape, eps):
    """``F.layer_norm`` of what a module holds, as a link."""
    return F.layer_norm(input, shape, weight, bias, eps)


FUNCTION_KINDS[own_group_norm] = "GroupNorm"
FUNCTION_KINDS[own_layer_norm] = "LayerNorm2d"
FUNCTION_KINDS[own_row_norm] = "LayerNorm"
OF_TENSORS.update(dict.fromkeys((own_group_norm, own_layer_norm, own_row_norm), 2))


class FunctionNorm:
    """What a module is whose forward is one of these norms, of which children may take the result:
    ``self.act(self.drop(F.group_norm(x, ...)))``.

    Args:
        link: the function that stands for the norm, one of the three above.
        names: of the children, innermost first.
        guard: a function of the module that tells whether it is this now.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, link, names, guard, same):
        self.link, self.names, self.guard, self.same = link, names, guard, same

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`."""
        modules.append(module)
        if not expand_into(found, children_of(module, self.names), modules):
            return False
        link = self._norm(module)
        if link is not None:
            found.append(link)
        return link is not None

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for, innermost first, or None."""
        if self._norm(module) is None:
            return None
        return kinds_of_children(module, self.names, kinds_of, (FUNCTION_KINDS[self.link],))

    def layers(self, name, module):
        """What computes in a module of such a name, innermost first, as (name, module)."""
        return [(name, module), *layers_of_children(name, module, self.names)]

    def _norm(self, module):
        own = module.__dict__
        if _other() or not self.guard(module):
            return None
        parameters = own["_parameters"]
        if "weight" in own or "bias" in own:
            return None
        if not ("weight" in parameters and "bias" in parameters):
            return None
        weight, bias, eps = parameters["weight"], parameters["bias"], own.get("eps")
        if type(eps) not in NUMBERS:
            return None
        if self.link is own_group_norm:
            extent = own.get("num_groups")
            right = type(extent) is int
        else:
            extent = own.get("normalized_shape")
            right = type(extent) is tuple and (self.link is own_row_norm or len(extent) == 1)
        return (self.link, (weight, bias, extent, eps), {}) if right else None


class OwnConv:
    """What a module is whose forward hands its input to a convolution, and uses it for nothing
    else.

    Args:
        eps: of the standardization of its weight (standardized.py), or None.
        is_last: whether it returns the convolution's result, which nobody else sees then.
        same: tells whether the class's code is what it was.
    """

    def __init__(self, eps, is_last, same):
        self.eps, self.is_last, self.same = eps, is_last, same

    def expand(self, module, found, modules):
        """See :meth:`Pass.expand`. The module itself is called."""
        found.append((convolved, (module,), {}))
        # A hook would see the input in another dtype.
        return not calls_more(module) and (torch.compiler.is_compiling() or self.same())

    def kinds(self, module, kinds_of):
        """The kinds of the links that a call of the module stands for."""
        return ("OwnConv2d",)

    def layers(self, name, module):
        """What computes in a module of such a name, as (name, module)."""
        return [(name, module)]


def convolved(input, module):
    """A call of an :class:`OwnConv`, as a link."""
    return module(input)


FUNCTION_KINDS[convolved] = "OwnConv2d"
OF_MODULES.add(convolved)


def group_norm_as_one(norm, activation, settings, input):
    """Group norm and an activation whose result products read, and nothing else; None where torch's
    functions have to run.

    Args:
        norm: the link.
        activation, settings: as of :func:`braze.nn.functional.batch_norm_act`.
    """
    if type(input) not in TENSORS or (settings and not fits(activation, settings)):
        return None
    if type(norm) is tuple:
        weight, bias, num_groups, eps = norm[1]
    else:
        weight, bias, num_groups, eps = norm.weight, norm.bias, norm.num_groups, norm.eps
    act = act_of(activation, *settings)
    return group_norm_act_for_product(input, num_groups, weight, bias, eps, act)


def group_norm_alone(norm, activation, settings, input):
    """:func:`group_norm_as_one` where anything may read the result."""
    if type(input) not in TENSORS or autocast_dtype(input) is not None:
        return None
    return group_norm_as_one(norm, activation, settings, input)


def layer_norm_as_one(norm, input):
    """Layer norm over the channels of images, whose result products read, and nothing else; None
    where torch's functions have to run."""
    if type(input) not in TENSORS or input.dim() != 4:
        return None
    weight, bias, shape, eps = norm[1]
    result = layer_norm_for_product(input.permute(0, 2, 3, 1), shape, weight, bias, eps)
    return result.permute(0, 3, 1, 2)
