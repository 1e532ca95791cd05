"""What spliced forwards call: runs of layers as fused ops where everything in them is what it was
when the model was converted, else one by one.

A run is called with its links: for each layer or function of it, outermost (last to run) first,
the layer itself, or ``(function, arguments, keyword arguments)`` with what follows the input, or
``(name of a tensor's method, arguments, keyword arguments)``. A run with an addition in it, whose
link is one of :data:`ADDITIONS`, takes what is added as its last argument.
"""

import functools
import operator
import types
import typing

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

import braze.nn
from braze._ops._common import autocast_dtype, cast_to, is_channels_last
from braze._ops.transpose import transpose_copy
from braze.nn import functional as F
from braze.nn.modules import batch_norm_act, conv_bn_relu2d, conv_bn_relu_max_pool2d

#: The layers that have a counterpart of the same name in torch.nn.
LAYERS = (
    "AvgPool2d",
    "BatchNorm2d",
    "CELU",
    "Conv2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "ELU",
    "GELU",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "Mish",
    "NLLLoss",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SyncBatchNorm",
    "Tanh",
)
#: Activations: by the name of the layer, that of torch.nn.functional's function, and the settings
#: that both have, with the function's defaults.
ACTIVATIONS = {
    "CELU": ("celu", {"alpha": 1.0}),
    "ELU": ("elu", {"alpha": 1.0}),
    "GELU": ("gelu", {"approximate": "none"}),
    "Hardsigmoid": ("hardsigmoid", {}),
    "Hardswish": ("hardswish", {}),
    "Hardtanh": ("hardtanh", {"min_val": -1.0, "max_val": 1.0}),
    "LeakyReLU": ("leaky_relu", {"negative_slope": 0.01}),
    "Mish": ("mish", {}),
    "ReLU": ("relu", {}),
    "ReLU6": ("relu6", {}),
    "SiLU": ("silu", {}),
    "Sigmoid": ("sigmoid", {}),
    "Tanh": ("tanh", {}),
}
#: Kinds of links by the classes of layers as they are after convert.
KINDS = {getattr(braze.nn, name): name for name in LAYERS}
KINDS[torch.nn.Flatten] = KINDS[braze.nn.Flatten] = "Flatten"
#: Kinds of links by functions and by names of tensors' methods.
FUNCTION_KINDS = {
    torch.nn.functional.relu: "ReLU",
    torch.nn.functional.relu_: "ReLU",
    torch.relu: "ReLU",
    torch.relu_: "ReLU",
    torch.nn.functional.max_pool2d: "MaxPool2d",
    torch.flatten: "Flatten",
    torch.sigmoid: "Sigmoid",
    torch.tanh: "Tanh",
    **{getattr(torch.nn.functional, name): kind for kind, (name, _) in ACTIVATIONS.items()},
    "relu": "ReLU",
    "relu_": "ReLU",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "flatten": "Flatten",
}


def add(a, b):
    """``a + b``, where what came before in the run is `a`."""
    return a + b


def radd(a, b):
    """``b + a``, where what came before in the run is `a`."""
    return b + a


#: What stands for an addition in a run: ``a + b``, ``b + a`` or ``a += b``.
ADDITIONS = add, radd, operator.iadd
iadd = operator.iadd
FUNCTION_KINDS.update(dict.fromkeys(ADDITIONS, "Add"))
#: braze's functions by torch's of the same signature.
FUNCTIONS = {
    getattr(torch.nn.functional, name): getattr(F, name)
    for name in F.__all__
    if hasattr(torch.nn.functional, name)
}
FUNCTIONS[torch.relu] = F.relu
FUNCTIONS[torch.sigmoid], FUNCTIONS[torch.tanh] = F.sigmoid, F.tanh
FUNCTIONS[torch.relu_] = FUNCTIONS[torch.nn.functional.relu_] = functools.partial(
    F.relu, inplace=True
)
_FUNCTIONS = str, types.FunctionType, types.BuiltinFunctionType
_FLAT = (1,), {}  # the arguments of a Flatten that keeps the first dimension


class Pooling(typing.NamedTuple):
    """The settings of a call of max_pool2d, under the names that the layer has for them."""

    kernel_size: typing.Any
    stride: typing.Any = None
    padding: typing.Any = 0
    dilation: typing.Any = 1
    ceil_mode: bool = False
    return_indices: bool = False


def hooks(module):
    """Which hooks a module has, by the names of their dictionaries."""
    return [
        name.strip("_")
        for name, value in module.__dict__.items()
        if name.endswith("_hooks") and isinstance(value, dict) and value
    ]


def _calls_more(module):
    """Whether a call of the module runs something beside its class's forward: a hook, or a forward
    of its own. Attribute by attribute, as torch.compile can trace it."""
    return (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def kind_of(link):
    """What a link computes, by the name of the layer, or None if something else may happen too."""
    if type(link) is tuple:
        function = link[0]
        return FUNCTION_KINDS.get(function) if isinstance(function, _FUNCTIONS) else None
    kind = KINDS.get(type(link))
    if kind is None or _calls_more(link) or (kind == "MaxPool2d" and link.return_indices):
        return None
    return kind


def runner(links, beside=()):
    """The function that runs such links as one, or None.

    Args:
        beside: modules that run before the links do, and would run between them otherwise.
    """
    if torch.nn.modules.module._has_any_global_hook():
        return None
    for module in beside:
        if not _is_quiet(module, links):
            return None
    return RUNS.get(tuple([kind_of(link) for link in links]))


def run(links, input, *added):
    """The result of all links."""
    return (runner(links) or one_by_one)(links, input, *added)


def one_by_one(links, input, *added):
    for link in reversed(links):
        is_addition = type(link) is tuple and link[0] in ADDITIONS
        input = link[0](input, *added) if is_addition else call(link, input)
    return input


_QUIET = "AvgPool2d", "BatchNorm2d", "Conv2d", "Linear", "MaxPool2d"


def _is_quiet(module, links):
    """Whether a module, or None, only computes: it changes nothing but its own buffers, runs no
    code of the user's, and is none of the links."""
    if module is None:
        return True
    kind = type(module)
    kind = vars(kind).get("_class_before_convert", kind)
    if kind in (torch.nn.Sequential, braze.nn.Sequential, torch.nn.Identity):
        if _calls_more(module):
            return False
        return all(_is_quiet(child, links) for child in module._modules.values())
    return kind_of(module) in _QUIET and not any(link is module for link in links)


def call(link, input):
    if type(link) is not tuple:
        return link(input)
    function, args, kwargs = link
    if isinstance(function, str):
        return method(input, function, *args, **kwargs)
    return swapped(function)(input, *args, **kwargs)


def swapped(function):
    """braze's function of the same meaning and signature, if there is one."""
    try:
        return FUNCTIONS.get(function, function)
    except TypeError:  # some other callable by now, which has no hash
        return function


def method(input, name, *args, **kwargs):
    """``input.name(...)`` of what may be a tensor."""
    if name in ("relu", "relu_") and type(input) in (torch.Tensor, torch.nn.Parameter):
        return F.relu(input, *args, **kwargs, inplace=name == "relu_")
    return getattr(input, name)(*args, **kwargs)


def other(callee, known, code, made):
    """`made` in the place of the function `known`, bound as `callee` is; `callee` itself where it
    has become something else, or the function has other code or defaults."""
    if not torch.compiler.is_compiling() and changed(known, code, made):
        return callee
    # In this order: torch.compile takes a bound method for the function itself.
    if isinstance(callee, types.MethodType):
        return functools.partial(made, callee.__self__) if callee.__func__ is known else callee
    return made if callee is known else callee


def inherited(callee, me, known, code, made):
    """:func:`other` of ``super().name``, of which torch.compile cannot tell what it is."""
    if torch.compiler.is_compiling():
        return functools.partial(made, me)
    return other(callee, known, code, made)


def changed(known, code, made):
    """Whether a function is no longer what `made` was made of."""
    return (
        known.__code__ is not code
        or known.__defaults__ is not made.__defaults__
        or known.__kwdefaults__ is not made.__kwdefaults__
    )


def fused(modules):
    """The modules, as callables, with runs among them in one: what ``for module in modules`` goes
    through. Changes of `modules` on the way are seen as an iterator over it sees them."""
    if type(modules).__iter__ not in _ITERATED:
        return modules
    children = tuple(modules)
    kinds = tuple(map(type, children))
    if torch.compiler.is_compiling():
        return _callables(children, _segments(kinds))
    segments = _known_segments(kinds)
    return _walk(modules, children, segments) if segments else modules


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
    return links[0] if len(links) == 1 else lambda input: run(links, input)


def _walk(modules, children, segments):
    skip, others_ran = 0, False
    for at, module in enumerate(modules):
        if skip:
            skip -= 1
            continue
        # What ran so far may have changed what comes next.
        if at in segments and not (others_ran and tuple(modules) != children):
            links = children[at : at + segments[at]][::-1]
            as_one = runner(links)
            if as_one is None:  # perhaps of fewer
                length = run_length([kind_of(link) for link in links[::-1]])
                links = children[at : at + length][::-1]
                as_one = runner(links)
            if as_one is not None:
                skip = len(links) - 1
                yield functools.partial(as_one, links)
                continue
        others_ran = True
        yield module


def _segments(types):
    """Where runs may begin among modules of such types, and how long each is."""
    kinds = [KINDS.get(kind) for kind in types]
    found, at = {}, 0
    while at < len(kinds):
        length = run_length(kinds[at:])
        if length:
            found[at] = length
        at += max(length, 1)
    return found


_known_segments = functools.lru_cache(maxsize=1024)(_segments)


def run_length(kinds):
    """The length of the longest run that links of such kinds, innermost first, begin with, or 0."""
    for length in range(min(len(kinds), _LONGEST), 1, -1):
        if tuple(kinds[:length][::-1]) in RUNS:
            return length
    return 0


def conv_fits(conv, bn):
    """Whether a convolution and a batch norm have settings that the fused blocks have too."""
    return conv.padding_mode == "zeros" and bn.num_features == conv.out_channels


def _block(links, input, then=None):
    """Convolution, batch norm, ReLU and perhaps max pooling as one op.

    Args:
        then: the linear layer that the pooled result is flattened for, and nothing else, or None.
    """
    conv, bn = links[-1], links[-2]
    if not isinstance(input, torch.Tensor) or input.dim() != 4 or not conv_fits(conv, bn):
        return one_by_one(links, input)
    if len(links) == len(_CONV):
        return conv_bn_relu2d(input, conv, bn)
    pool = links[0]
    if type(pool) is tuple:
        pool = Pooling(*pool[1], **pool[2])
    flat = then is not None and not _weight_is_smaller(input, then)
    memory_format = torch.contiguous_format if flat else None
    return conv_bn_relu_max_pool2d(input, conv, bn, pool, memory_format)


def _batch_norm_act(links, input, *added):
    """Batch norm, an addition where there is one, and an activation where there is one."""
    if (
        not isinstance(input, torch.Tensor)
        or input.dim() != 4
        or not all(_goes_with(residual, input) for residual in added)
    ):
        return one_by_one(links, input, *added)
    activation, settings = activation_of(links[0])
    return batch_norm_act(input, links[-1], *added, activation=activation, settings=settings)


def activation_of(link):
    """The name and the settings of an activation; of an addition, the identity's."""
    kind = kind_of(link)
    if kind == "Add":
        return "identity", ()
    name, settings = ACTIVATIONS[kind]
    if type(link) is not tuple:
        return name, tuple([getattr(link, setting) for setting in settings])
    _, args, kwargs = link
    given = {**settings, **dict(zip(settings, args, strict=False)), **kwargs}
    return name, tuple([given[setting] for setting in settings])


def _goes_with(residual, input):
    """Whether an addition to a tensor like `input`, in place or not, gives one just like it."""
    return (
        isinstance(residual, torch.Tensor)
        and residual.dtype == input.dtype
        and residual.device == input.device
        and residual.dim() == input.dim()
        and is_channels_last(residual) == is_channels_last(input)
        and all(
            a is b or statically_known_true(a == b)
            for a, b in zip(residual.shape, input.shape, strict=True)
        )
    )


def _linear_relu(links, input):
    if not isinstance(input, torch.Tensor):
        return one_by_one(links, input)
    return F.linear_relu(input, links[-1].weight, links[-1].bias)


def _weight_is_smaller(input, linear):
    """Whether a linear layer's weight is smaller than the flat input, both of as many columns."""
    # False of a dynamic batch that may be either: to compare it would restrict it.
    return statically_known_true(input.shape[0] > linear.out_features)


def _flat_linear(links, input):
    """Flatten from dimension 1 on, a linear layer and perhaps ReLU.

    Flattening a channels_last tensor copies it, which is a transposition. Where the weight is the
    smaller of the two, the weight is brought into the tensor's order instead.
    """
    flatten, linear = links[-1], links[-2]
    flat = flatten[1:] if type(flatten) is tuple else ((flatten.start_dim,), {})
    end_dim = -1 if type(flatten) is tuple else flatten.end_dim
    if (
        not isinstance(input, torch.Tensor)
        or input.is_contiguous()
        or (flat, end_dim) != (_FLAT, -1)
        or not is_channels_last(input)
        or input.shape[1] * input.shape[2] * input.shape[3] != linear.in_features
    ):
        output = call(flatten, input)
        return linear(output) if len(links) < 3 else _linear_relu(links[:2], output)
    weight, dtype = linear.weight, autocast_dtype(input)
    if dtype is not None:
        (weight,) = cast_to(dtype, weight)
    output = input.permute(0, 2, 3, 1).flatten(1, 2)  # pixels of channels
    if _weight_is_smaller(input, linear):
        weight = transpose_copy(weight.unflatten(1, (input.shape[1], -1))).flatten(1)
    else:
        output = transpose_copy(output)
    function = F.linear if len(links) < 3 else F.linear_relu
    return function(output.flatten(1), weight, linear.bias)


def _block_flat_linear(links, input):
    first = len(links) - len(_POOLED)
    return _flat_linear(links[:first], _block(links[first:], input, then=links[first - 2]))


_CONV = "ReLU", "BatchNorm2d", "Conv2d"
_POOLED = "MaxPool2d", *_CONV
_NORM_RUNS = [
    ("Add", "BatchNorm2d"),
    *((kind, "BatchNorm2d") for kind in ACTIVATIONS),
    *((kind, "Add", "BatchNorm2d") for kind in ACTIVATIONS),
]
#: What runs links of such kinds, outermost first. Each takes the links, the input, and what is
#: added where there is an addition.
RUNS = {
    **dict.fromkeys(_NORM_RUNS, _batch_norm_act),
    _CONV: _block,
    _POOLED: _block,
    ("Linear", "Flatten", *_POOLED): _block_flat_linear,
    ("ReLU", "Linear", "Flatten", *_POOLED): _block_flat_linear,
    ("ReLU", "Linear"): _linear_relu,
    ("Linear", "Flatten"): _flat_linear,
    ("ReLU", "Linear", "Flatten"): _flat_linear,
}
_LONGEST = max(map(len, RUNS))
#: The parts of runs that are one op: the kinds of its layers, innermost first, and the module that
#: stands for it.
BLOCKS = {
    _POOLED[::-1]: "ConvBnReLUMaxPool2d",
    _CONV[::-1]: "ConvBnReLU2d",
    ("Linear", "ReLU"): "LinearReLU",
    **{kinds[::-1]: "BatchNormAct2d" for kinds in _NORM_RUNS},
}
