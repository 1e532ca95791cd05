"""What a link of a run computes, by the name of its layer, and whether it still computes that."""

import operator
import types
import typing

import torch

import braze.nn
from braze._ops.cat import cat_channels, cat_takes
from braze._stock import called_by, gives_way, is_torchs, remember
from braze.nn import functional as F
from braze.nn.modules import batch_norm_of

#: The layers that have a counterpart of the same name in torch.nn.
LAYERS = (
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm2d",
    "CELU",
    "Conv2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "ELU",
    "GELU",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "Mish",
    "MultiheadAttention",
    "NLLLoss",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SyncBatchNorm",
    "Tanh",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
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
FUNCTION_KINDS = {f: k for f, k in FUNCTION_KINDS.items() if isinstance(f, str) or is_torchs(f)}


def add(a, b):
    """``a + b``, where what came before in the run is `a`."""
    return a + b


def radd(a, b):
    """``b + a``, where what came before in the run is `a`."""
    return b + a


iadd = operator.iadd
#: What stands for an addition in a run, and the methods of tensors that it calls: ``a + b``,
#: ``b + a`` or ``a += b``.
ADDITIONS = {add: ("__add__", "__radd__"), radd: ("__add__", "__radd__"), iadd: ("__iadd__",)}
FUNCTION_KINDS.update(dict.fromkeys(ADDITIONS, "Add"))


def mul(a, scale):
    """``a * scale``, where what came before in the run is `a`."""
    return a * scale


def rmul(a, scale):
    """``scale * a``, where what came before in the run is `a`."""
    return scale * a


def times(a, scale):
    """``a.mul(scale)``, where what came before in the run is `a`."""
    return a.mul(scale)


#: What stands for a product with a parameter or a number in a run, and the methods of tensors that
#: it calls; as a link, ``(mul, (parameter,), {})``.
SCALINGS = {**dict.fromkeys((mul, rmul), ("__mul__", "__rmul__")), times: ("mul",)}
FUNCTION_KINDS.update(dict.fromkeys(SCALINGS, "Scale"))
#: Functions whose first arguments as a link, behind the input, are tensors: how many are.
#: (:data:`SCALINGS` may have a number there.)
OF_TENSORS = dict.fromkeys(SCALINGS, 1)
#: Functions of an input and of a module, whose tensors they read, as the first of a link.
OF_MODULES = set()


def own_norm(input, module):
    """The batch norm in a module whose class adds something to ``torch.nn.BatchNorm2d``'s; as a
    link, ``(own_norm, (module,), {})``."""
    return batch_norm_of(input, module)


FUNCTION_KINDS[own_norm] = "BatchNorm2d"
OF_MODULES.add(own_norm)
# The function of modules alone, see parts.Permutes.
FUNCTION_KINDS["permute"] = FUNCTION_KINDS[torch.permute] = "Permute"


#: What may hand on its input, in another shape.
VIEWS = frozenset(("Flatten", "Permute"))


class Replacement(typing.NamedTuple):
    """What takes the place of a function of torch's.

    Attributes:
        known: torch's function, or the name of the method.
        ours: of the same meaning; called like it, as far as braze.convert replaces calls. Of lists
            of tensors (:data:`OF_LISTS`) it returns None where torch's has to run.
        gives_way: tells whether torch's has to run, see _stock.py.
    """

    known: typing.Callable | str
    ours: typing.Callable
    gives_way: typing.Callable


def _relu_(input):
    return F.relu(input, inplace=True)


def _cat(tensors, dim):
    return cat_channels(tensors) if cat_takes(tensors, dim) else None


#: Functions whose first argument is a list or tuple of tensors.
OF_LISTS = torch.cat, torch.concat, torch.concatenate


def _replacements():
    for name in F.__all__:
        known = getattr(torch.nn.functional, name, None)
        if known is not None:
            dispatched = (torch.nn.functional, "_max_pool2d"), *called_by(name)
            places = dispatched if name == "max_pool2d" else called_by(name)
            yield Replacement(known, getattr(F, name), gives_way(*places))
    for name in ("relu", "sigmoid", "tanh"):
        yield Replacement(getattr(torch, name), getattr(F, name), gives_way())
    for known in (torch.relu_, torch.nn.functional.relu_):
        yield Replacement(known, _relu_, gives_way())
    for known in OF_LISTS:
        yield Replacement(known, _cat, gives_way())


#: By functions of torch's.
FUNCTIONS = {r.known: r for r in _replacements() if is_torchs(r.known)}
#: By names of tensors' methods.
METHODS = {
    "relu": Replacement("relu", F.relu, gives_way((torch.Tensor, "relu"))),
    "relu_": Replacement("relu_", _relu_, gives_way((torch.Tensor, "relu_"))),
}
_FUNCTIONS = str, types.FunctionType, types.BuiltinFunctionType


def places(link):
    """What a link calls of torch's, as :func:`braze._stock.gives_way` takes it.

    Args:
        link: a layer's class, a function, or the name of a tensor's method.
    """
    if isinstance(link, str):
        return ((torch.Tensor, link),)
    if link is own_norm:
        link = braze.nn.BatchNorm2d
    if link in ADDITIONS or link in SCALINGS:
        names = ADDITIONS.get(link) or SCALINGS[link]
        return tuple((torch.Tensor, name) for name in names)
    if not isinstance(link, type):
        name = getattr(link, "__name__", "")
        is_functional = getattr(torch.nn.functional, name, None) is link
        return tuple(called_by(name)) if is_functional else ()
    flatten = (torch.nn.Flatten, "forward"), (torch.Tensor, "flatten")
    return *getattr(link, "_places", flatten), *calls_of(link)


def calls_of(kind):
    """How a module of a class comes to its forward, as :func:`places` gives it."""
    return (kind, "__call__"), (kind, "_call_impl")


# Before others replace any, while runs are made of them.
for _link in (*KINDS, *FUNCTION_KINDS):
    remember(places(_link))


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


#: The methods of layers that may be replaced on an instance; ``module.compile()`` sets the last.
METHODS_OF_LAYERS = (
    "forward",
    "_conv_forward",
    "_check_input_dim",
    "_call_impl",
    "_compiled_call_impl",
)


def calls_more(module):
    """Whether a call of the module runs something beside its class's forward: a hook, or a method
    of its own. Attribute by attribute, as torch.compile can trace it."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return True
    own = module.__dict__
    return (
        "forward" in own
        or "_conv_forward" in own
        or "_check_input_dim" in own
        or "_call_impl" in own
        or "_compiled_call_impl" in own
    )


def kind_of(link):
    """What a link computes, by the name of the layer, or None if something else may happen too."""
    if type(link) is tuple:
        function = link[0]
        return FUNCTION_KINDS.get(function) if isinstance(function, _FUNCTIONS) else None
    kind = KINDS.get(type(link))
    if kind is None or calls_more(link) or (kind == "MaxPool2d" and link.return_indices):
        return None
    return kind
