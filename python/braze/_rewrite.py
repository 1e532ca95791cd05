"""Forwards rewritten for :func:`braze.convert`: a module's own forward is traced by torch.fx, with
its children as leaves, and runs of calls in it are replaced by fused ones. The module tree stays as
it is, so state dicts, hooks, ``.to()``, ``deepcopy`` and pickling have nothing to notice."""

import copyreg
import functools
import types
import typing
import weakref

import torch

import braze.nn
from braze._ops._common import autocast_dtype, cast_to, is_channels_last
from braze._ops.transpose import transpose_copy
from braze._trace import OWN_FORWARD, Recorder, Untraceable, containers, names_used, trace
from braze.nn import functional as F
from braze.nn.modules import conv_bn_relu2d, conv_bn_relu_max_pool2d

#: The layers that have a counterpart of the same name in torch.nn.
LAYERS = (
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "NLLLoss",
    "ReLU",
    "Softmax",
)
_KINDS = {getattr(braze.nn, name): name for name in LAYERS}
#: Functions as fx records them, and braze's of the same signature.
_FUNCTIONS = {
    getattr(torch.nn.functional, name): getattr(F, name)
    for name in F.__all__
    if hasattr(torch.nn.functional, name)
}
_RELUS = (torch.nn.functional.relu, torch.relu)
_RELUS_IN_PLACE = (torch.nn.functional.relu_, torch.relu_)
#: Plans that one forward may collect before it stops tracing: its settings change all the time.
_MOST_PLANS = 8
_PLANS = "_braze_plans"


class Pooling(typing.NamedTuple):
    """The settings of a call of max_pool2d, under the names that the layer has for them."""

    kernel_size: typing.Any
    stride: typing.Any
    padding: typing.Any
    dilation: typing.Any
    ceil_mode: bool


class Block(typing.NamedTuple):
    """A fused run."""

    parts: tuple  # names of its layers, of functions where they are no layers
    before: str
    after: str


#: The runs that are fused, by the layers' names, and the modules that stand for them (None: not
#: worth reporting); the longer ones first.
_RUNS = {
    ("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"): "ConvBnReLUMaxPool2d",
    ("Conv2d", "BatchNorm2d", "ReLU"): "ConvBnReLU2d",
    ("Flatten", "Linear", "ReLU"): "LinearReLU",
    ("Flatten", "Linear"): None,
    ("Linear", "ReLU"): "LinearReLU",
}
#: Layers that a run has to be the only caller of.
_ONCE = ("Conv2d", "BatchNorm2d", "Linear")


def hooks(module):
    """Which hooks a module has, by the names of their dictionaries."""
    return [
        name.strip("_")
        for name, value in module.__dict__.items()
        if name.endswith("_hooks") and isinstance(value, dict) and value
    ]


def _runs_as(module, kind):
    """Whether calling a layer does nothing but run the forward of `kind`."""
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def run_block(input, conv, bn, relu, pool, then=None):
    """Convolution, batch norm, ReLU and max pooling as one op, or one by one where a layer has
    gained a hook or changed its class since it was converted.

    Args:
        relu: a layer, or None for the function.
        pool: a layer, :class:`Pooling` for the function, or None for no pooling.
        then: the linear layer that the pooled result is flattened for, and nothing else, or None.
    """
    as_one = (
        _runs_as(conv, braze.nn.Conv2d)
        and _runs_as(bn, braze.nn.BatchNorm2d)
        and (relu is None or _runs_as(relu, braze.nn.ReLU))
        and (pool is None or isinstance(pool, Pooling) or _runs_as(pool, braze.nn.MaxPool2d))
        and input.dim() == 4
        and not torch.nn.modules.module._has_any_global_hook()
    )
    if as_one and pool is None:
        return conv_bn_relu2d(input, conv, bn)
    if as_one:
        flat = then is not None and not _weight_is_smaller(input, then)
        memory_format = torch.contiguous_format if flat else None
        return conv_bn_relu_max_pool2d(input, conv, bn, pool, memory_format)
    output = bn(conv(input))
    output = F.relu(output) if relu is None else relu(output)
    if pool is None:
        return output
    return F.max_pool2d(output, *pool) if isinstance(pool, Pooling) else pool(output)


def _linear_as_one(linear, relu):
    """Whether a linear layer and perhaps a ReLU layer may run as one op."""
    return (
        _runs_as(linear, braze.nn.Linear)
        and (relu is None or _runs_as(relu, braze.nn.ReLU))
        and not torch.nn.modules.module._has_any_global_hook()
    )


def run_linear_relu(input, linear, relu):
    """A linear layer and ReLU as one op, or one by one, as :func:`run_block` does.

    Args:
        relu: a layer, or None for the function.
    """
    if _linear_as_one(linear, relu):
        return F.linear_relu(input, linear.weight, linear.bias)
    output = linear(input)
    return F.relu(output) if relu is None else relu(output)


def _weight_is_smaller(input, linear):
    """Whether a linear layer's weight is smaller than the flat input, both of as many columns."""
    return len(input) > linear.out_features


def run_flat_linear(input, flatten, linear, relu=None, has_relu=False):
    """Flatten from dimension 1 on, a linear layer and perhaps ReLU; fused as in :func:`run_block`.

    Flattening a channels_last tensor copies it, which is a transposition. Where the weight is the
    smaller of the two, the weight is brought into the tensor's order instead.

    Args:
        flatten, relu: a layer, or None for the function.
        has_relu: whether there is a ReLU.
    """
    if (
        (flatten is None or _is_flatten(flatten))
        and _linear_as_one(linear, relu)
        and is_channels_last(input)
        and not input.is_contiguous()
        and input[0].numel() == linear.in_features
    ):
        weight, dtype = linear.weight, autocast_dtype(input)
        if dtype is not None:
            (weight,) = cast_to(dtype, weight)
        output = input.permute(0, 2, 3, 1).flatten(1, 2)  # pixels of channels
        if _weight_is_smaller(input, linear):
            weight = transpose_copy(weight.unflatten(1, (input.shape[1], -1))).flatten(1)
        else:
            output = transpose_copy(output)
        function = F.linear_relu if has_relu else F.linear
        return function(output.flatten(1), weight, linear.bias)
    output = torch.flatten(input, 1) if flatten is None else flatten(input)
    return run_linear_relu(output, linear, relu) if has_relu else linear(output)


def layer_kind(module):
    """The name of the converted layer that a module is, or None."""
    kind = _KINDS.get(type(module))
    return None if kind is None or hooks(module) or "forward" in module.__dict__ else kind


class Plan:
    """A rewritten forward, and what has to hold for it to stand for the module's own.

    Attributes:
        function: takes the module and its inputs; None where the module's own forward is to run.
        inputs: how many tensors it takes.
        reason: why the forward could not be traced, or None.
        blocks: each fused run as :class:`Block`.
        functions: the names of torch.nn.functional's functions that were replaced.
    """

    def __init__(self, module, kind_of):
        self.function, self.inputs, self.reason = None, 0, None
        self.blocks, self.functions = [], []
        # Weak references: a module that held itself would live on until the garbage collector runs.
        self._containers = [(weakref.ref(c), children) for c, children in containers(module)]
        recorder = Recorder()
        try:
            graph, self.inputs = trace(module, recorder)
        except Untraceable as error:
            self.reason = str(error)
        self._reads = [(weakref.ref(m), *read) for m, *read in recorder.reads.values()]
        if self.reason is None:
            self._rewrite(module, graph, kind_of)

    def holds(self):
        """Whether the module has the children and the settings that it had when it was traced."""
        for container, children in self._containers:
            if tuple(container()._modules.values()) != children:
                return False
        for module, name, value in self._reads:
            now = getattr(module(), name, None)
            if now is not value and (type(now) is not type(value) or now != value):
                return False
        return True

    def reads_training(self, module):
        return any(owner() is module and name == "training" for owner, name, _ in self._reads)

    def _rewrite(self, module, graph, kind_of):
        calls = {}
        for node in graph.nodes:
            if node.op == "call_module":
                calls[node.target] = calls.get(node.target, 0) + 1

        def kind(node):
            """The layer or function that a node calls, by the layer's name."""
            if node.op == "call_module":
                layer = module.get_submodule(node.target)
                return "Flatten" if _is_flatten(layer) else kind_of(layer)
            if (node.target is torch.flatten or node.target == "flatten") and (
                node.args[1:] == (1,) and not node.kwargs
            ):
                return "Flatten"
            if _relu_options(node) is not None:
                return "ReLU"
            if node.target is torch.nn.functional.max_pool2d:
                return "MaxPool2d"
            return None

        fused = set()
        for node in list(graph.nodes):
            for wanted, after in _RUNS.items():
                run = None if node in fused else _match(node, kind, wanted)
                if not run or any(calls[n.target] > 1 for n in run if kind(n) in _ONCE):
                    continue
                if wanted[0] == "Linear":
                    _fuse(graph, run, run_linear_relu, _layers(graph, run))
                elif wanted[0] == "Flatten":
                    has_relu = len(run) > 2
                    layers = (*_layers(graph, run), None)[:3]
                    _fuse(graph, run, run_flat_linear, (*layers, has_relu))
                elif _fits(module, run):
                    layers = _layers(graph, run)
                    pool = (layers[3] or _pooling(run[3])) if len(run) > 3 else None
                    _fuse(graph, run, run_block, (*layers[:3], pool))
                else:
                    continue
                fused.update(run)
                if after:
                    named = range(wanted[0] == "Flatten", len(run))
                    parts = tuple(_name(run[i]) for i in named)
                    self.blocks.append(Block(parts, ", ".join(wanted[i] for i in named), after))
                break
        for node in list(graph.nodes):
            if node.target is run_flat_linear:
                _tell_block(graph, node)
        for node in list(graph.nodes):
            name = _replace_function(node)
            if name:
                self.functions.append(name)
        if fused or self.functions:
            graph.lint()
            source = graph.python_code("self")
            scope = dict(source.globals)
            where = f"<forward of {type(module).__qualname__}, rewritten by braze.convert>"
            exec(compile(source.src, where, "exec"), scope)
            self.function = scope["forward"]


def _is_flatten(module):
    """Whether a layer flattens all dimensions but the first, and nothing watches it."""
    return (_runs_as(module, torch.nn.Flatten) or _runs_as(module, braze.nn.Flatten)) and (
        module.start_dim,
        module.end_dim,
    ) == (1, -1)


def _relu_options(node):
    """The keyword arguments that make F.relu of a node, or None if it is no ReLU."""
    if node.op == "call_method" and node.target in ("relu", "relu_"):
        return {"inplace": node.target == "relu_"}
    if node.op == "call_function" and node.target in _RELUS_IN_PLACE:
        return {"inplace": True}
    if node.op == "call_function" and node.target in _RELUS:
        inplace = node.args[1] if len(node.args) > 1 else node.kwargs.get("inplace", False)
        return {"inplace": inplace}
    return None


def _match(first, kind, kinds):
    """The nodes of a run of such `kinds` that starts at `first`, or None.

    They follow each other, so that nothing else can have changed the input in between, and each is
    used by the next one only.
    """
    run, node = [], first
    for wanted in kinds:
        if kind(node) != wanted or len(node.all_input_nodes) != 1 or not node.args:
            return None
        if node.op == "call_module" and (len(node.args) != 1 or node.kwargs):
            return None
        if run and (node.args[0] is not run[-1] or len(run[-1].users) != 1):
            return None
        run.append(node)
        node = node.next
    return run


def _pooling(node):
    """The settings of a call of F.max_pool2d, or None if it returns indices too."""

    def settings(kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
                 return_indices=False):  # fmt: skip
        return (
            None if return_indices else Pooling(kernel_size, stride, padding, dilation, ceil_mode)
        )

    return settings(*node.args[1:], **node.kwargs)


def _pool_fits(module, pool):
    """Whether a pooling returns nothing but its result."""
    if pool.op == "call_module":
        return not module.get_submodule(pool.target).return_indices
    return _pooling(pool) is not None


def _fits(module, run):
    """Whether a run's layers have settings that the block has too."""
    conv, bn = (module.get_submodule(node.target) for node in run[:2])
    fits = conv.padding_mode == "zeros" and bn.num_features == conv.out_channels
    return fits and (len(run) < 4 or _pool_fits(module, run[3]))


def _name(node):
    return node.target if node.op == "call_module" else f"{_function_name(node)}()"


def _function_name(node):
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return "max_pool2d" if node.target is torch.nn.functional.max_pool2d else name.rstrip("_")


def _layers(graph, run):
    """Nodes that get a run's layers from the module; None in the place of functions."""
    with graph.inserting_before(run[-1]):
        return [
            graph.create_node("get_attr", n.target) if n.op == "call_module" else None for n in run
        ]


def _fuse(graph, run, function, layers):
    last = run[-1]
    with graph.inserting_before(last):
        block = graph.call_function(function, (run[0].args[0], *layers))
    last.replace_all_uses_with(block)
    for node in reversed(run):
        graph.erase_node(node)


def _tell_block(graph, flat_linear):
    """Lets a block know whose linear layer its pooled result is for."""
    block, _, linear = flat_linear.args[:3]
    if block.target is run_block and len(block.users) == 1:
        with graph.inserting_before(block):
            then = graph.create_node("get_attr", linear.target)
        block.args = (*block.args, then)


def _replace_function(node):
    """Makes a node call braze's function, if there is one; returns the function's name."""
    options = _relu_options(node)
    if options is not None:
        name = _function_name(node)
        node.op, node.target = "call_function", F.relu
        node.args, node.kwargs = node.args[:1] or (node.kwargs["input"],), options
        return name
    if node.op != "call_function" or node.target not in _FUNCTIONS:
        return None
    name = _function_name(node)
    node.target = _FUNCTIONS[node.target]
    return name


def plans(module, kind_of):
    """The module's forward as traced in its present mode and, where it asks, in the other one.

    Args:
        kind_of: a function from a module to the name of the layer that it is or will be, or None.
    """
    found = [Plan(module, kind_of)]
    if found[0].reads_training(module):
        module.training = not module.training
        try:
            found.append(Plan(module, kind_of))
        finally:
            module.training = not module.training
    return found


def worth_rewriting(module, kind_of):
    """Whether a forward that could not be traced may call anything that braze would replace."""
    kinds = {kind_of(child) for _, children in containers(module) for child in children}
    fused = {"Conv2d", "BatchNorm2d"} <= kinds or {"Linear", "ReLU"} <= kinds
    return fused or bool(names_used(module) & {*F.__all__, "relu_"})


class Plans(list):
    """The plans of one module. No copy or pickle holds them: Rewritten.__setstate__ traces anew."""

    def __reduce__(self):
        return Plans, ()


class Rewritten:
    """Mixed into a module's class, with :func:`_forward` as its forward."""

    def __reduce_ex__(self, protocol):
        # The class is made at run time, so that no pickle can name it.
        make, args, *state = super().__reduce_ex__(max(protocol, 2))
        if make is not copyreg.__newobj__:
            return make, args, *state
        return _new, (self._class_before_convert, *args[1:]), *state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.__dict__[_PLANS] = Plans(plans(self, layer_kind))


def _forward(self, *args, **kwargs):
    """Runs a rewritten forward where one holds, else the class's own.

    A plan holds for the children and settings (``training`` among them) that the forward read while
    it was traced. Others are traced when they are first met, up to eight; calls with more than the
    required arguments, or with any that is no tensor, go to the class's own forward.
    """
    plan = _plan(self)
    if (
        plan is None
        or plan.function is None
        or kwargs
        or len(args) != plan.inputs
        or not all(isinstance(a, torch.Tensor) for a in args)
    ):
        return getattr(self, OWN_FORWARD)(*args, **kwargs)
    return plan.function(self, *args)


def _new(own_class, *args):
    kind = rewritten_class(own_class)
    return kind.__new__(kind, *args)


@functools.cache
def rewritten_class(own_class):
    """A subclass of the same name whose forward may be replaced by a rewritten one."""
    # torch.compile counts recompilations per code object, so each class has one of its own.
    forward = types.FunctionType(_forward.__code__.replace(), globals(), "forward")
    forward = functools.wraps(own_class.forward)(forward)  # for inspect.signature
    attributes = {
        "forward": forward,
        "__doc__": own_class.__doc__,
        "__module__": own_class.__module__,
        "__qualname__": own_class.__qualname__,
        "_class_before_convert": own_class,
        OWN_FORWARD: own_class.forward,
    }
    bases = Rewritten, own_class
    return types.new_class(own_class.__name__, bases, exec_body=lambda d: d.update(attributes))


def rewrite(module):
    """Changes a module's class so that its forward is rewritten; traces it at once."""
    if not isinstance(module, Rewritten):
        module.__class__ = rewritten_class(type(module))
    if not module.__dict__.get(_PLANS):
        module.__dict__[_PLANS] = Plans(plans(module, layer_kind))


def _plan(module):
    known = module.__dict__.get(_PLANS, ())
    for plan in known:
        if plan.holds():
            return plan
    if len(known) >= _MOST_PLANS or torch.compiler.is_compiling():
        return None
    module.__dict__[_PLANS] = Plans([*known, Plan(module, layer_kind)])
    return module.__dict__[_PLANS][-1]
