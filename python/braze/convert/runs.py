"""What spliced forwards call: runs of layers as fused ops where everything in them is what it was
when the model was converted, else one by one.

A run is called with its links: for each layer or function of it, outermost (last to run) first,
the layer itself, or ``(function, arguments, keyword arguments)`` with what follows the input, or
``(name of a tensor's method, arguments, keyword arguments)``. A run with an addition in it, whose
link is one of :data:`kinds.ADDITIONS`, takes what is added as its last argument.
"""

import functools
import itertools
import operator
import types

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

import braze.nn
from braze._C import unwatched
from braze._ops._common import TENSORS, autocast_dtype, cast_to, is_channels_last, plain
from braze._ops.activation import fits
from braze._ops.conv2d import memory_format
from braze._ops.fused import is_2x2
from braze._ops.layer_norm import layer_norm_for_product
from braze._ops.relu_max_pool2d import pools_behind_relu, takes_bias
from braze._ops.scale_add import scale_add_takes, scaled_dim
from braze._ops.transpose import transpose_copy
from braze._step_scope import current
from braze._stock import gives_way
from braze.convert.kinds import (
    ACTIVATIONS,
    ADDITIONS,
    FUNCTIONS,
    KINDS,
    METHODS,
    Pooling,
    kind_of,
    own_norm,
    places,
)
from braze.convert.programs import KINDS as PROGRAM_KINDS
from braze.convert.programs import LONGEST_STRETCH, by_program
from braze.convert.quiet import are_quiet, asks, overwrites
from braze.nn import functional as F
from braze.nn.modules import batch_norm_act, conv2d_settings, conv_bn_act, conv_bn_relu_as_one

_any_global_hook = torch.nn.modules.module._has_any_global_hook
_FLAT = (1,), {}  # the arguments of a Flatten that keeps the first dimension


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
    """Whether such layers, all of classes that programs know, are still what they were, without
    hooks, and return one tensor each."""
    types = tuple(map(type, layers))
    if _any_global_hook() or asks(types)() or not unwatched(layers):
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


def one_by_one(links, input, *added):
    for link in reversed(links):
        is_addition = type(link) is tuple and link[0] in ADDITIONS
        input = link[0](input, *added) if is_addition else call(link, input)
    return input


def call(link, input):
    if type(link) is not tuple:
        return link(input)
    function, args, kwargs = link
    if isinstance(function, str):
        return method(input, function, *args, **kwargs)
    return called(function, FUNCTIONS.get(function), input, *args, **kwargs)


def called(function, replacement, /, input, *args, **kwargs):
    """function(input, ...), by braze's in its place where it still is what that replaces."""
    if replacement is not None and type(input) in TENSORS:
        known, ours, torchs = replacement
        if function is known and not torchs():
            return ours(input, *args, **kwargs)
    return function(input, *args, **kwargs)


def called_of_list(function, replacement, /, tensors, *args, **kwargs):
    """:func:`called` of a function of a list or tuple of tensors."""
    known, ours, torchs = replacement
    if function is known and not torchs():
        result = ours(tensors, *args, **kwargs)
        if result is not None:
            return result
    return function(tensors, *args, **kwargs)


def method(input, name, *args, **kwargs):
    """``input.name(...)`` of what may be a tensor."""
    if name in METHODS and not args and not kwargs and type(input) in TENSORS:
        _, ours, torchs = METHODS[name]
        if not torchs():
            return ours(input)
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


def run_length(kinds):
    """The length of the longest run that links of such kinds, innermost first, begin with, or 0."""
    for length in range(min(len(kinds), LONGEST), 1, -1):
        if tuple(kinds[:length][::-1]) in RUNS:
            return length
    return 0


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
    if "Add" in kinds and kinds[kinds.index("Add") + 1 :][:1] != ("BatchNorm2d",):
        return None
    return _in_turn


def _in_turn(links, input, *added):
    """Run by run, and what is none link by link."""
    kinds, end = [kind_of(link) for link in links], len(links)
    while end > 0:
        start = end - max(1, run_length(kinds[:end][::-1]))
        if kinds[start:end] == ["Conv2d"] and kinds[start - 1 : start] == ["BatchNorm2d"]:
            after = start - max(1, run_length(kinds[:start][::-1]))
            of_part = added if "Add" in kinds[after:start] else ()
            output = conv_and_norm(links[after:end], input, *of_part)
            if output is not None:
                input, end = output, after
                continue
        part, of_part = links[start:end], added if "Add" in kinds[start:end] else ()
        if end == len(links) and added and added[0] is input and tuple(kinds[start:end]) == _CONV:
            pair = _forked(part, input)
            if pair is not None:
                input, *added = pair
                end = start
                continue
        function = RUNS.get(tuple(kinds[start:end]))
        if function is None:
            is_new = end < len(links) and kinds[end] in _MAKE
            function = _on_new if is_new else one_by_one
        input = function(part, input, *of_part)
        end = start
    return input


#: On which devices the gradients of a block's input, by its first convolution and by the shortcut,
#: are one sum on the way out of the former's kernel.
FORKED_ON = ("cuda",)


def _forked(links, input):
    """The block of convolution, batch norm and ReLU, and an alias of the input for the addition
    behind it, within a TrainStep; or None."""
    conv, norm = links[-1], _norm(links[-2])
    if (
        current.scope is None
        or type(input) not in TENSORS
        or input.device.type not in FORKED_ON
        or not (torch.is_grad_enabled() and input.requires_grad)
        or autocast_dtype(input) not in (None, input.dtype)
        or isinstance(conv.padding, str)
        or not conv_fits(conv, norm)
    ):
        return None
    return conv_bn_relu_as_one(input, conv, norm, forked=True)


#: On which devices convolutions leave batch norm's statistics, for what follows that.
CONV_BN_ACT_ON = ("cuda",)


def conv_and_norm(links, input, *added):
    """Convolution, batch norm, an addition and an activation where there are any, or None where no
    op takes them all."""
    *rest, norm, conv = links
    norm = _norm(norm)
    if (
        type(input) not in TENSORS
        or input.device.type not in CONV_BN_ACT_ON
        or not conv_fits(conv, norm)
    ):
        return None
    activation, settings = activation_of(rest[0]) if rest else ("identity", ())
    if settings and not fits(activation, settings):
        return None
    return conv_bn_act(input, conv, norm, *added, activation=activation, settings=settings)


#: What makes a new tensor, whatever its settings.
_MAKE = frozenset(("AvgPool2d", "BatchNorm2d", "Conv2d", "Linear", "MaxPool2d"))
#: Activations of which torch's autograd copies the input where they overwrite it.
_COPIED = frozenset(("Hardsigmoid", "Hardswish", "Mish", "SiLU"))


def _on_new(links, input, *added):
    """:func:`one_by_one` of a link whose input nobody else sees: if it is to be overwritten, and
    copied for that, braze's activation, which does neither, computes the same."""
    link = links[0]
    if kind_of(link) in _COPIED and torch.is_grad_enabled() and overwrites(link):
        return getattr(F, ACTIVATIONS[kind_of(link)][0])(input)
    return one_by_one(links, input, *added)


def conv_fits(conv, bn):
    """Whether a convolution and a batch norm have settings that the fused blocks have too."""
    return conv.padding_mode == "zeros" and bn.num_features == conv.out_channels


def _block(links, input, then=None):
    """Convolution, batch norm, ReLU and perhaps max pooling as one op.

    Args:
        then: the linear layer that the pooled result is flattened for, and nothing else, or None.
    """
    conv, bn = links[-1], _norm(links[-2])
    if not conv_fits(conv, bn):
        return one_by_one(links, input)
    pool = output = None
    if len(links) > len(_CONV):
        pool = _pooling(links[0])
        if is_2x2(pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode):
            contiguous = then is not None and not _weight_is_smaller(input, then)
            output = conv_bn_relu_as_one(input, conv, bn, max_pool=True, contiguous=contiguous)
            if output is not None:
                return output.contiguous() if contiguous else output
    output = conv_bn_relu_as_one(input, conv, bn)
    if output is None:
        return one_by_one(links, input)
    return output if pool is None else call(links[0], output)


def _pooling(link):
    """What has the settings of a max pool."""
    return link if type(link) is not tuple else Pooling(*link[1], **link[2])


def _batch_norm_act(links, input, *added):
    """Batch norm, an addition where there is one, and an activation where there is one."""
    if (
        type(input) not in TENSORS
        or input.dim() != 4
        or not all(_goes_with(residual, input) for residual in added)
    ):
        return one_by_one(links, input, *added)
    activation, settings = activation_of(links[0])
    if settings and not fits(activation, settings):
        return one_by_one(links, input, *added)
    norm = _norm(links[-1])
    return batch_norm_act(input, norm, *added, activation=activation, settings=settings)


def _norm(link):
    """The module whose batch norm a link is."""
    return link[1][0] if type(link) is tuple else link


def _norm_alone(links, input):
    return call(links[0], input)


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
        type(residual) in TENSORS
        and residual.dtype == input.dtype
        and residual.device == input.device
        and residual.dim() == input.dim()
        and is_channels_last(residual) == is_channels_last(input)
        and all(
            a is b or statically_known_true(a == b)
            for a, b in zip(residual.shape, input.shape, strict=True)
        )
    )


def _conv_relu(links, input):
    if type(input) not in TENSORS:
        return one_by_one(links, input)
    conv = links[-1]
    input, settings = conv2d_settings(input, conv)
    return F.conv2d_relu(input, conv.weight, conv.bias, *settings)


#: On which devices max pooling takes the bias and the ReLU of the convolution before it, whose
#: backward then is one pass, if tensors are channels_last.
RELU_POOL_ON = ("cuda",)
#: Elements that pooling leaves, at most, in another order than they are in.
_MOST_TURNED = 1 << 20


def _conv_relu_pool(links, input, then=None):
    """Convolution, ReLU and max pooling.

    Args:
        then: as in :func:`_block`.
    """
    conv, pool = links[-1], _pooling(links[0])
    if (
        type(input) not in TENSORS
        or input.device.type not in RELU_POOL_ON
        or pool.return_indices
        or not pools_behind_relu(
            pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode
        )
        or not _leaves_channels_last(input, conv)
    ):
        return call(links[0], _conv_relu(links[1:], input))
    input, settings = conv2d_settings(input, conv)
    output = F.conv2d(input, conv.weight, None, *settings)
    contiguous = (
        then is not None
        and not _weight_is_smaller(input, then)
        and statically_known_true(output.numel() <= 4 * _MOST_TURNED)
    )
    windows = pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode
    return F.relu_max_pool2d(output, conv.bias, *windows, contiguous)


def _leaves_channels_last(input, conv):
    """Whether a convolution's result is channels_last, and its bias may be added by another op."""
    weight, bias = conv.weight, conv.bias
    if weight is None or not plain(input, weight, bias) or input.dim() != 4 or weight.dim() != 4:
        return False
    dtype = autocast_dtype(input)
    return memory_format(input, weight) == torch.channels_last and (
        bias is None
        or (
            bias.shape == weight.shape[:1]
            and bias.device == input.device
            and (bias.dtype == input.dtype if dtype is None else takes_bias(dtype, bias))
        )
    )


def _linear_relu(links, input):
    if type(input) not in TENSORS:
        return one_by_one(links, input)
    return F.linear_relu(input, links[-1].weight, links[-1].bias)


def _layer_norm_product(links, input):
    """Layer norm, and a linear layer or several with activations between them."""
    if type(input) not in TENSORS:
        return one_by_one(links, input)
    norm = links[-1]
    output = layer_norm_for_product(input, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    if len(links) < 4:
        return one_by_one(links[:-1], output)
    return call(links[0], _linear_activation(links[1:-1], output))


#: On which devices an activation takes the bias of the linear layer before it, so that its backward
#: makes the bias' gradient.
ACTIVATION_WITH_BIAS_ON = ("cuda",)


def _linear_activation(links, input):
    activation, linear = links
    name, settings = activation_of(activation)
    if (
        name == "relu"
        or not _is_whole_bias(linear.bias, linear.weight)
        or input.device.type not in ACTIVATION_WITH_BIAS_ON
        or (settings and not fits(name, settings))
    ):
        return one_by_one(links, input)
    return F.bias_activation(F.linear(input, linear.weight), linear.bias, name, settings)


def _is_whole_bias(bias, weight):
    """Whether a linear layer has a bias that only torch's own rules of addition are needed for."""
    return bias is not None and bias.shape == weight.shape[:1] and bias.dtype == weight.dtype


#: On which devices a layer scale and the addition behind it are one op.
SCALE_ADD_ON = ("cuda",)


def _scale_add(links, input, added):
    """A product with a parameter, and an addition."""
    (function, *_), (_, (scale,), _) = links
    takes = (
        scale is not None
        and scale_add_takes(input, scale, added)
        and input.device.type in SCALE_ADD_ON
        and _keep_format(input, scale, added)
        # Added in place, a float32 residual would be rounded.
        and not (function is operator.iadd and added.dtype not in (input.dtype, scale.dtype))
    )
    return F.scale_add(input, scale, added) if takes else one_by_one(links, input, added)


def _keep_format(input, scale, added):
    """Whether the op's result has the memory format of torch's, and channels are innermost, for
    which it is fast."""
    if is_channels_last(input):
        return is_channels_last(added) and scaled_dim(input, scale) == 1
    innermost = scaled_dim(input, scale) == input.dim() - 1
    return innermost and input.is_contiguous() and added.is_contiguous()


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
        type(input) not in TENSORS
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


def _conv_relu_pool_flat_linear(links, input):
    first = len(links) - len(_CONV_POOLED)
    pooled = _conv_relu_pool(links[first:], input, then=links[first - 2])
    return _flat_linear(links[:first], pooled)


_CONV_POOLED = "MaxPool2d", "ReLU", "Conv2d"
_CONV = "ReLU", "BatchNorm2d", "Conv2d"
_POOLED = "MaxPool2d", *_CONV
_NORM_RUNS = [
    ("Add", "BatchNorm2d"),
    *((kind, "BatchNorm2d") for kind in ACTIVATIONS),
    *((kind, "Add", "BatchNorm2d") for kind in ACTIVATIONS),
]
_LAYER_NORM_RUNS = [
    ("Linear", "LayerNorm"),
    *(("Linear", kind, "Linear", "LayerNorm") for kind in ACTIVATIONS),
]
#: What runs links of such kinds, outermost first. Each takes the links, the input, and what is
#: added where there is an addition.
RUNS = {
    **dict.fromkeys(_NORM_RUNS, _batch_norm_act),
    _CONV: _block,
    _POOLED: _block,
    ("Linear", "Flatten", *_POOLED): _block_flat_linear,
    ("ReLU", "Linear", "Flatten", *_POOLED): _block_flat_linear,
    ("BatchNorm2d",): _norm_alone,  # of a module that adds nothing to it at present
    ("ReLU", "Conv2d"): _conv_relu,
    _CONV_POOLED: _conv_relu_pool,
    ("Linear", "Flatten", *_CONV_POOLED): _conv_relu_pool_flat_linear,
    ("ReLU", "Linear", "Flatten", *_CONV_POOLED): _conv_relu_pool_flat_linear,
    ("ReLU", "Linear"): _linear_relu,
    ("Add", "Scale"): _scale_add,
    **dict.fromkeys(_LAYER_NORM_RUNS, _layer_norm_product),
    ("Linear", "Flatten"): _flat_linear,
    ("ReLU", "Linear", "Flatten"): _flat_linear,
}
LONGEST = max(map(len, RUNS))
#: To what something is added in runs.
ADDED_TO = "BatchNorm2d", "Scale"
#: Of what is no run of its own, see LONGEST_STRETCH.
STRETCH_KINDS = frozenset(("Add", *PROGRAM_KINDS))
#: The parts of runs that are one op: the kinds of its layers, innermost first, and the module that
#: stands for it.
BLOCKS = {
    _POOLED[::-1]: "ConvBnReLUMaxPool2d",
    _CONV[::-1]: "ConvBnReLU2d",
    ("Conv2d", "ReLU"): "ConvReLU2d",
    ("Linear", "ReLU"): "LinearReLU",
    **{kinds[::-1]: "BatchNormAct2d" for kinds in _NORM_RUNS},
    ("LayerNorm", "Linear"): "LayerNormLinear",
    ("Scale", "Add"): "ScaleAdd",
}
