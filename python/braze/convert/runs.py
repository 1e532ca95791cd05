"""What spliced forwards call: runs of layers as fused ops where everything in them is what it was
when the model was converted, else one by one.

A run is called with its links: for each layer or function of it, outermost (last to run) first,
the layer itself, or ``(function, arguments, keyword arguments)`` with what follows the input, or
``(name of a tensor's method, arguments, keyword arguments)``. A run with an addition in it, whose
link is one of :data:`kinds.ADDITIONS`, takes what is added as its last argument.
"""

import functools
import itertools
import types

import torch

import braze.nn
from braze._C import unwatched
from braze._ops._common import TENSORS
from braze._ops.conv_bn_act import alias_in
from braze._stock import gives_way
from braze.convert.blocks import (
    CONV,
    CONV_POOLED,
    POOLED,
    conv_and_norm,
    conv_bn_relu,
    conv_relu,
    conv_relu_pool,
    conv_relu_pool_flat_linear,
    flat_linear,
    forked_block,
    group_norm_act,
    group_norm_product,
    image_norm_product,
    layer_norm_product,
    linear_relu,
    norm_act,
    norm_alone,
    perhaps_again,
    pooled_flat_linear,
    response_norm_product,
    scale_add,
    scale_permute_add,
)
from braze.convert.kinds import (
    ACTIVATIONS,
    ADDITIONS,
    FUNCTIONS,
    KINDS,
    kind_of,
    own_norm,
    places,
)
from braze.convert.link_calls import call, one_by_one
from braze.convert.parts import PARTS
from braze.convert.programs import LAYERS, LINK_KINDS, LONGEST_STRETCH, by_program
from braze.convert.quiet import are_quiet, asks, overwrites
from braze.nn import functional as F

_any_global_hook = torch.nn.modules.module._has_any_global_hook


def runner(links, beside=()):
    """The function that runs such links as one, or None.

    Args:
        beside: modules that run before the links do, and would run between them otherwise.
    """
    compiling = torch.compiler.is_compiling()
    function = _traced_runner(links) if compiling else _known_runner(links)
    if function is None or _any_global_hook():
        return None
    if beside and (overwrites(links[-1]) or not are_quiet(beside, links)):
        return None
    return function


def _known_runner(links):
    try:
        known = _RUNNERS[tuple([k[0] if type(k) is tuple else type(k) for k in links])]
    except (KeyError, TypeError):  # not looked for yet, or of a callable that has no hash
        known = _find(links)
    if known is None:
        return None
    function, torchs, pooling = known
    if torchs():
        return None
    if not unwatched(links):
        return None
    return None if pooling and links[0].return_indices else function


def are_plain(layers):
    """Whether layers are all of classes that programs know, still what they were, without hooks,
    and return one tensor each."""
    types = tuple(map(type, layers))
    if not LAYERS.issuperset(types) or _any_global_hook() or asks(types)() or not unwatched(layers):
        return False
    pooling = braze.nn.MaxPool2d
    return pooling not in types or not any(
        type(layer) is pooling and layer.return_indices for layer in layers
    )


#: By the classes and functions of links: what runs them as one, what tells whether torch's have to
#: run instead, and whether the last is a layer that pools.
_RUNNERS = {}


def _find(links):
    function = run_of(tuple([kind_of(link) for link in links]))
    if function is None:
        return None
    key = tuple([k[0] if type(k) is tuple else type(k) for k in links])
    asked = itertools.chain.from_iterable(map(places, key))
    pooling = isinstance(links[0], braze.nn.MaxPool2d)
    return _RUNNERS.setdefault(key, (by_program(function), gives_way(*asked), pooling))


def _traced_runner(links):
    """:func:`_known_runner` in words that torch.compile makes guards of. What ``torch.export`` puts
    in the place of modules' `__call__` meanwhile is torch's own."""
    function = run_of(tuple([kind_of(link) for link in links]))
    if function is None:
        return None
    for link in links:
        if type(link) is not tuple:
            if type(link) in _LAYERS and link._gives_way():
                return None
        elif link[0] is own_norm:
            if braze.nn.BatchNorm2d._gives_way():
                return None
        elif link[0] in FUNCTIONS and FUNCTIONS[link[0]].gives_way():
            return None
    return function


_LAYERS = {kind for kind in KINDS if hasattr(kind, "_gives_way")}


def run(links, input, *added):
    """The result of all links."""
    return (runner(links) or one_by_one)(links, input, *added)


def runner_of(links, base, beside):
    """:func:`runner` of links whose input, in a list, is evaluated before the question."""
    return runner(links, beside)


def run_radd(outer, added, norm, input):
    """:func:`run` of batch norm, of its addition to something that was made before it, and of what
    follows.

    Args:
        outer: the links but batch norm.
    """
    return run((*outer, norm), input, added)


def run_added(function, links, input, modules, added):
    """The result of all links, of which one adds what calls of modules, innermost first, make of
    `added`.

    Args:
        function: of :func:`runner`.
    """
    try:
        for module in modules:
            added = module(added)
    except BaseException:
        before_addition(links, input)
        raise
    return function(links, input, added)


def before_addition(links, input):
    """Runs the links before an addition, for what they change, where the rest cannot follow: what
    is added has raised, and would have come after them."""
    at = next(i for i, k in enumerate(links) if type(k) is tuple and k[0] in ADDITIONS)
    one_by_one(links[at + 1 :], input)


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


def run_length(kinds):
    """The length of the longest run that links of such kinds, innermost first, begin with, or 0."""
    for length in range(min(len(kinds), LONGEST), 1, -1):
        if tuple(kinds[:length][::-1]) in RUNS:
            return length
    return 0


def length_with_norm(kinds):
    """How many links, innermost first, a convolution that they begin with leaves batch norm's
    statistics for: both, and what is one run with the latter; 0 where they begin otherwise."""
    if tuple(kinds[:2]) != ("Conv2d", "BatchNorm2d"):
        return 0
    return 1 + max(1, run_length(kinds[1:]))


def stretch_length(kinds):
    """:func:`run_length` of runs and of what may be one program."""
    for length in range(min(len(kinds), LONGEST_STRETCH), 1, -1):
        if run_of(tuple(kinds[:length][::-1])):
            return length
    return 0


def run_of(kinds):
    """What runs links of such kinds, outermost first, or None."""
    function = RUNS.get(kinds)
    if function is not None or not 1 < len(kinds) <= LONGEST_STRETCH:
        return function
    if any(kind not in STRETCH_KINDS for kind in kinds) or kinds.count("Add") > 1:
        return None
    in_place = [kind for kind in kinds if kind != "Permute"]
    if len(in_place) < 2:
        return None
    if "Add" in in_place and (*in_place, None)[in_place.index("Add") + 1] not in ADDED_TO:
        return None
    if any(kind == "Scale" and in_place[i - 1] != "Add" for i, kind in enumerate(in_place)):
        return None
    return in_turn


#: What makes a new tensor, whatever its settings.
_MAKE = frozenset(("AvgPool2d", "BatchNorm2d", "Conv2d", "Linear", "MaxPool2d"))
#: Activations of which torch's autograd copies the input where they overwrite it, and of which
#: braze has no function that overwrites: torch's would keep a stretch from being a program.
_COPIED = frozenset(("Hardsigmoid", "Hardswish", "Mish", "SiLU"))


def _on_new(links, input, *added):
    """:func:`one_by_one` of a link whose input nobody else sees: if it is to be overwritten, and
    perhaps copied for that, braze's activation, which does neither, computes the same."""
    link = links[0]
    if kind_of(link) in _COPIED and overwrites(link):
        return getattr(F, ACTIVATIONS[kind_of(link)][0])(input)
    return one_by_one(links, input, *added)


def own_conv_act(links, input):
    """A convolution in code of its own, and an activation that may overwrite its result: as
    :func:`_on_new` has it."""
    activation, conv = links
    output = call(conv, input)
    if type(output) not in TENSORS or not PARTS[type(conv[1][0])].is_last:
        return call(activation, output)
    return _on_new((activation,), output)


def in_turn(links, input, *added):
    """Run by run, and what is none link by link."""
    kinds, end = [kind_of(link) for link in links], len(links)
    if added and kinds[-1] == "Conv2d":
        input = alias_in(added[0], input)
    while end > 0:
        start = end - max(1, run_length(kinds[:end][::-1]))
        with_norm = length_with_norm(kinds[:end][::-1])
        if with_norm and start == end - 1:
            after = end - with_norm
            of_part = added if "Add" in kinds[after:start] else ()
            output = conv_and_norm(links[after:end], input, *of_part)
            if output is not None:
                input, end = output, after
                continue
        part, of_part = links[start:end], added if "Add" in kinds[start:end] else ()
        if end == len(links) and added and added[0] is input and tuple(kinds[start:end]) == CONV:
            pair = forked_block(part, input)
            if pair is not None:
                input, *added = pair
                perhaps_again(input, added[0])
                end = start
                continue
        function = RUNS.get(tuple(kinds[start:end]))
        if function is None:
            is_new = end < len(links) and kinds[end] in _MAKE
            function = _on_new if is_new else one_by_one
        input = function(part, input, *of_part)
        if added and start > 0:
            perhaps_again(input, added[0])
        end = start
    return input


_NORM_RUNS = [
    ("Add", "BatchNorm2d"),
    *((kind, "BatchNorm2d") for kind in ACTIVATIONS),
    *((kind, "Add", "BatchNorm2d") for kind in ACTIVATIONS),
]
_LAYER_NORM_RUNS = [
    ("Linear", "LayerNorm"),
    *(("Linear", kind, "Linear", "LayerNorm") for kind in ACTIVATIONS),
    *(("Linear", "ResponseNorm", kind, "Linear", "LayerNorm") for kind in ACTIVATIONS),
]
_GROUP_NORM_RUNS = [(kind, "GroupNorm") for kind in ACTIVATIONS]
_GROUP_NORM_PRODUCTS = [
    (product, *between, "GroupNorm")
    for product in ("Conv2d", "OwnConv2d")
    for between in ((), *((kind,) for kind in ACTIVATIONS))
]
_IMAGE_NORM_RUNS = [
    ("Conv2d", "LayerNorm2d"),
    *(("Conv2d", "ResponseNorm", kind, "Conv2d", "LayerNorm2d") for kind in ACTIVATIONS),
    *(
        ("Conv2d", kind, "Conv2d", norm)
        for kind in ACTIVATIONS
        for norm in ("LayerNorm2d", "GroupNorm")
    ),
]
_OWN_CONV_RUNS = [(kind, "OwnConv2d") for kind in sorted(_COPIED)]
_RESPONSE_NORM_RUNS = [("Linear", "ResponseNorm"), ("Conv2d", "ResponseNorm")]
#: What runs links of such kinds, outermost first. Each takes the links, the input, and what is
#: added where there is an addition.
RUNS = {
    **dict.fromkeys(_NORM_RUNS, norm_act),
    CONV: conv_bn_relu,
    POOLED: conv_bn_relu,
    ("Linear", "Flatten", *POOLED): pooled_flat_linear,
    ("ReLU", "Linear", "Flatten", *POOLED): pooled_flat_linear,
    ("BatchNorm2d",): norm_alone,  # of a module that adds nothing to it at present
    ("ReLU", "Conv2d"): conv_relu,
    CONV_POOLED: conv_relu_pool,
    ("Linear", "Flatten", *CONV_POOLED): conv_relu_pool_flat_linear,
    ("ReLU", "Linear", "Flatten", *CONV_POOLED): conv_relu_pool_flat_linear,
    ("ReLU", "Linear"): linear_relu,
    ("Add", "Scale"): scale_add,
    ("Add", "Permute", "Scale"): scale_permute_add,
    **dict.fromkeys(_LAYER_NORM_RUNS, layer_norm_product),
    **dict.fromkeys(_IMAGE_NORM_RUNS, image_norm_product),
    **dict.fromkeys(_GROUP_NORM_RUNS, group_norm_act),
    **dict.fromkeys(_GROUP_NORM_PRODUCTS, group_norm_product),
    **dict.fromkeys(_RESPONSE_NORM_RUNS, response_norm_product),
    **dict.fromkeys(_OWN_CONV_RUNS, own_conv_act),
    ("Linear", "Flatten"): flat_linear,
    ("ReLU", "Linear", "Flatten"): flat_linear,
}
LONGEST = max(map(len, RUNS))
#: To what something is added in runs.
ADDED_TO = "BatchNorm2d", "Scale"
#: Of what is no run of its own, see LONGEST_STRETCH.
STRETCH_KINDS = frozenset(("Add", "Scale", *LINK_KINDS))
#: The parts of runs that are one op: the kinds of its layers, innermost first, and the module that
#: stands for it.
BLOCKS = {
    POOLED[::-1]: "ConvBnReLUMaxPool2d",
    CONV[::-1]: "ConvBnReLU2d",
    ("Conv2d", "ReLU"): "ConvReLU2d",
    ("Linear", "ReLU"): "LinearReLU",
    **{kinds[::-1]: "BatchNormAct2d" for kinds in _NORM_RUNS},
    ("LayerNorm", "Linear"): "LayerNormLinear",
    **{kinds[::-1]: "GroupNormAct2d" for kinds in _GROUP_NORM_RUNS},
    **{kinds[::-1]: "GroupNormConv2d" for kinds in _GROUP_NORM_PRODUCTS},
    ("LayerNorm2d", "Conv2d"): "LayerNormConv2d",
    ("ResponseNorm", "Linear"): "GlobalResponseNormLinear",
    ("ResponseNorm", "Conv2d"): "GlobalResponseNormConv2d",
    ("Scale", "Add"): "ScaleAdd",
    ("Scale", "Permute", "Add"): "ScaleAdd",
}
