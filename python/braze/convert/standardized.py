"""Weight standardization, as convolutions write it out that run on standardized weights: found in
the code of functions, and as one op.

One way is ``F.batch_norm`` of the weight as one image with a channel for each filter, as in::

    weight = F.batch_norm(
        self.weight.reshape(1, self.out_channels, -1), None, None,
        weight=(self.gain * self.scale).view(-1), training=True, momentum=0., eps=self.eps,
    ).reshape_as(self.weight)

The other is a whole forward, as BiT's authors have it::

    w = self.weight
    v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
    w = (w - m) / torch.sqrt(v + 1e-5)
    return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)
"""

import ast
import typing

import torch

from braze._ops._common import TENSORS
from braze._ops.weight_standardization import standardized_for_product, weight_standardization
from braze._stock import called_by, gives_way, is_torchs
from braze.convert.modules import is_plain_attribute
from braze.convert.source import NUMBERS, VARIABLE, constant
from braze.nn import functional as F

_KNOWN = torch.nn.functional.batch_norm
#: What braze calls it in reports.
NAME = "weight_standardization"
_NAMES = (
    *("input", "running_mean", "running_var", "weight", "bias"),
    *("training", "momentum", "eps"),
)
_other = gives_way(
    (torch.nn.functional, "batch_norm"),
    *called_by("batch_norm"),
    *((torch.Tensor, name) for name in ("reshape", "reshape_as", "view", "__mul__")),
)


class Standardized(typing.NamedTuple):
    """Weight standardization in a function.

    Attributes:
        number: of the expression.
        norm: number of the call of ``F.batch_norm`` in it.
        weight, channels, eps: numbers of the weight, of the number of filters and of what is added
            to the variance.
        factors: numbers of nothing, of the gain, or of gain and scale.
        viewed: whether the weight has to be contiguous, as it is for a view.
        private: whether a convolution is all that reads the result.
    """

    number: int
    norm: int
    weight: int
    channels: int
    eps: int
    factors: tuple
    viewed: bool
    private: bool


def find(code):
    """All of a function.

    Args:
        code: a :class:`braze.convert.splice._Function`.
    """
    if not code.me or not is_torchs(_KNOWN):
        return []
    calls = (node for node in code.nodes if isinstance(node, ast.Call))
    return [found for found in map(lambda call: _standardized(code, call), calls) if found]


def _standardized(code, node):
    """What a call is, a :class:`Standardized` or None."""
    method, inner, args = _method(node)
    if method not in ("reshape_as", "view_as") or len(args) != 1 or not isinstance(inner, ast.Call):
        return None
    weight = _attribute(code, args[0])
    given = _arguments(code, inner)
    if weight is None or given is None:
        return None
    rows, filters, shape = _method(given["input"])
    alike = rows in ("reshape", "view") and _attribute(code, filters) == weight
    if not alike or len(shape) != 3 or (constant(shape[0]), constant(shape[2])) != (1, -1):
        return None
    factors = _factors(code, given.get("weight"))
    eps = given.get("eps")
    if factors is None or eps is None or not all(_is_known(code, n) for n in (shape[1], eps)):
        return None
    return Standardized(
        node.number,
        inner.number,
        args[0].number,
        shape[1].number,
        eps.number,
        tuple(f.number for f in factors),
        rows == "view",
        _is_private(code, node),
    )


def _method(node):
    """The name, the owner and the arguments of ``owner.name(...)``; else Nones."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not is_call or node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
        return None, None, ()
    return node.func.attr, node.func.value, node.args


def _attribute(code, node):
    """The name of an attribute of the module itself, for which its class has no code, or None."""
    mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    if not mine or node.value.id != code.me:
        return None
    name = code.attribute_name(node)
    return name if is_plain_attribute(code.module, name) else None


def _is_known(code, node):
    return _attribute(code, node) is not None or type(constant(node)) in NUMBERS


def _arguments(code, call):
    """Those of a call of ``F.batch_norm`` without running statistics, in training, by their names;
    or None."""
    if code.value(call.func) is not _KNOWN or len(call.args) > len(_NAMES):
        return None
    if any(isinstance(a, ast.Starred) for a in call.args):
        return None
    given = dict(zip(_NAMES, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in given:
            return None
        given[keyword.arg] = keyword.value
    values = {name: constant(node) for name, node in given.items()}
    nothing = (values.get(name) is None for name in ("running_mean", "running_var", "bias"))
    trains = values.get("training") is True and values.get("momentum") is not VARIABLE
    return given if "input" in given and trains and all(nothing) else None


def _factors(code, node):
    """The expressions of gain and scale in ``(gain * scale).view(-1)``; () where there is none,
    None where it is something else."""
    if node is None or constant(node) is None:
        return ()
    method, owner, args = _method(node)
    shapes = {"view": [-1], "reshape": [-1], "flatten": []}
    if method not in shapes or [constant(a) for a in args] != shapes[method]:
        return None
    factors = (owner,)
    if isinstance(owner, ast.BinOp) and isinstance(owner.op, ast.Mult):
        factors = owner.left, owner.right
    return factors if all(_attribute(code, f) is not None for f in factors) else None


def _is_private(code, node):
    """Whether a convolution is all that reads the value of an expression: as its weight."""
    if code.changes_context():
        return False
    for call in code.nodes:
        if not (isinstance(call, ast.Call) and len(call.args) > 1):
            continue
        if code.value(call.func) is not torch.nn.functional.conv2d:
            continue
        read = call.args[1]
        if read is node:
            return True
        if isinstance(read, ast.Name) and _only_value(code, read.id) is node:
            return True
    return False


def _only_value(code, name):
    """What a variable is set to, where that is once, and it is read once."""
    if not code.is_set_once(name) or len(code.loads[name]) != 1:
        return None
    for statement in code.nodes:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        if len(targets) == 1 and targets[0] is code.stores[name][0]:
            return statement.value
    return None


def standardized(function, weight, channels, eps, factors, viewed, private):
    """The value of a :class:`Standardized`, or None where the code itself has to run.

    Args:
        function: what it calls for ``torch.nn.functional.batch_norm``.
        weight: the convolution's.
        channels: the number of its filters.
        eps: added to the variance.
        factors: (), (gain,) or (gain, scale), in whatever order.
        viewed, private: see there.
    """
    gain, scale = None, 1.0
    for factor in factors:
        if type(factor) in NUMBERS:
            scale = factor
        elif gain is None:
            gain = factor
        else:
            return None
    if len(factors) > 0 and gain is None:
        return None
    if function is not _KNOWN or _other() or type(eps) not in NUMBERS:
        return None
    if not _is_plain(weight) or weight.dim() < 2 or channels != weight.shape[0]:
        return None
    # Torch refuses filters of one element, and views of what lies otherwise in memory.
    if weight.numel() <= channels or (viewed and not weight.is_contiguous()):
        return None
    if gain is not None:
        fits = _is_plain(gain) and gain.dtype == weight.dtype and gain.device == weight.device
        if not fits or gain.numel() != channels or not gain.is_contiguous():
            return None
    run = standardized_for_product if private else weight_standardization
    return run(weight, gain, float(scale), eps)


def _is_plain(tensor):
    return type(tensor) in TENSORS and tensor.dtype.is_floating_point


def whole(code):
    """What a forward of :class:`braze.convert.image_norm_code.OwnConvCode` adds to the variance, if
    it is the other way; else None."""
    if len(code.body) != 4:
        return None
    first, moments, scaled, last = code.body
    if not (_sets(first) and _sets(scaled) and isinstance(moments, ast.Assign)):
        return None
    names = [n.id for n in ast.walk(moments.targets[0]) if isinstance(n, ast.Name)]
    pair = isinstance(moments.targets[0], ast.Tuple) and len(names) == 2
    distinct = {*names, first.targets[0].id, code.input, code.me}
    if len(moments.targets) != 1 or not pair or len(distinct) != 5 or code.tree.shared:
        return None
    var, mean = names
    weight, result = first.targets[0].id, scaled.targets[0].id
    if result in (var, mean, code.input, code.me) or code.attribute(first.value) != "weight":
        return None
    if not _is_var_mean(code, moments.value, weight) or not _is_conv(code, last, result):
        return None
    return _eps_of(code, scaled.value, weight, mean, var)


def _sets(statement):
    """Whether a statement sets one variable."""
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    return len(targets) == 1 and isinstance(targets[0], ast.Name)


def _is_name(node, name):
    return isinstance(node, ast.Name) and node.id == name


def _is_var_mean(code, node, weight):
    """Whether an expression is the biased variance and the mean of each filter."""
    called = isinstance(node, ast.Call) and code.known(node.func) is torch.var_mean
    if not called or len(node.args) != 1 or not _is_name(node.args[0], weight):
        return False
    given = {}
    for keyword in node.keywords:
        value = keyword.value
        elements = value.elts if isinstance(value, (ast.List, ast.Tuple)) else None
        given[keyword.arg] = (
            constant(value) if elements is None else tuple(constant(e) for e in elements)
        )
    biased = given.pop("unbiased", None) is False or given.pop("correction", None) == 0
    return biased and given == {"dim": (1, 2, 3), "keepdim": True}


def _eps_of(code, node, weight, mean, var):
    """The number in ``(weight - mean) / torch.sqrt(var + number)``, or None."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult))):
        return None
    root = torch.sqrt if isinstance(node.op, ast.Div) else torch.rsqrt
    deviation, call = node.left, node.right
    if not (isinstance(deviation, ast.BinOp) and isinstance(deviation.op, ast.Sub)):
        return None
    if not (_is_name(deviation.left, weight) and _is_name(deviation.right, mean)):
        return None
    called = isinstance(call, ast.Call) and len(call.args) == 1 and not call.keywords
    inner = call.args[0] if called and code.known(call.func) is root else None
    if not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add)):
        return None
    eps = constant(inner.right)
    return eps if _is_name(inner.left, var) and type(eps) in NUMBERS else None


def _is_conv(code, statement, weight):
    """Whether a statement returns the convolution of the input with such a weight and with the
    module's settings."""
    call = statement.value if isinstance(statement, ast.Return) else None
    if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 7:
        return False
    if code.known(call.func) is not torch.nn.functional.conv2d:
        return False
    input, given, *settings = call.args
    names = [code.attribute(node) for node in settings]
    return code.is_input(input) and _is_name(given, weight) and names == list(_SETTINGS)


_SETTINGS = "bias", "stride", "padding", "dilation", "groups"
_other_whole = gives_way(
    *((torch, name) for name in ("var_mean", "sqrt", "rsqrt")),
    *((torch.Tensor, name) for name in ("__sub__", "__add__", "__truediv__", "__mul__")),
    (torch.nn.functional, "conv2d"),
)


def convolve(eps, same, module, input):
    """The result of a forward that :func:`whole` knows, or None where its code has to run.

    Args:
        eps: added to the variance.
        same: tells whether the class's code is what it was.
    """
    own, parameters = module.__dict__, module.__dict__["_parameters"]
    if _other_whole() or not (torch.compiler.is_compiling() or same()):
        return None
    # (One by one: the compiler of torch before 2.13 compares no sets with keys.)
    if "weight" in own or "bias" in own or "weight" not in parameters or "bias" not in parameters:
        return None
    weight = parameters["weight"]
    if not (_is_plain(weight) and weight.dim() == 4 and type(input) in TENSORS):
        return None
    settings = [own.get(name) for name in _SETTINGS[1:]]
    weight = standardized_for_product(weight, None, 1.0, eps)
    return F.conv2d(input, weight, parameters["bias"], *settings)
