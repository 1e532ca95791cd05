"""What every op's Python side shares: registration, autograd guard, autocast, argument checks."""

import operator

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils import flop_counter

from braze import _lib
from braze._nvtx import ranged
from braze._ops import _traced
from braze._step_scope import current

_library = torch.library.Library("braze", "IMPL")
_lib.define_missing_cuda_ops(_library)

#: `with below_autograd():` inside a Function, so that the op's own Autograd kernel is not entered
below_autograd = torch._C._AutoDispatchBelowAutograd

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (torch.float64, torch.float32, *HALF_DTYPES)


_functorch_is_active = torch._C._are_functorch_transforms_active
saved_tensors_hook = torch._C._autograd._top_saved_tensors_default_hooks

#: Dense data, or what stands for it while a graph is traced.
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})
_FLOATS, _STRIDED = frozenset(FLOAT_DTYPES), torch.strided


def plain(input, *others):
    """Whether a public function may give these arguments to its op.

    All else goes to torch's function of the same meaning, which computes it or raises its own
    error: integers and complex numbers, sparse and nested tensors, subclasses such as DTensor,
    objects that are no tensors; and any tensor within ``torch.func``'s transforms or forward-mode
    differentiation, for which the ops have no formulas.

    Args:
        input: what decides the dtype.
        others: further arguments that are tensors or None.
    """
    if (
        type(input) not in TENSORS
        or input.dtype not in _FLOATS
        or input.layout is not _STRIDED
        or input.is_nested
        or forward_ad._current_level >= 0
        or _functorch_is_active()
    ):
        return False
    for other in others:  # noqa: SIM110 (a generator costs twice as much)
        if type(other) not in TENSORS and other is not None:
            return False
    return True


def check_tensor(function, argument, position, value):
    """Raises torch's TypeError where `value` is no tensor, for functions that torch has not."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{function}(): argument '{argument}' (position {position}) must be Tensor, "
            f"not {type(value).__name__}"
        )


def eager(function, op, tensors, formula=None):
    """What public functions and backwards call for `function.apply`: the same, but cheaper.

    Where autograd records nothing (most of all in a backward without ``create_graph``), the op
    runs without a node; where it does, without the Python part of ``apply``, which serves
    ``torch.func`` only.

    Args:
        function: the op's autograd Function.
        op: what its forward runs: same arguments, same results.
        tensors: how many of the arguments, the first ones, are tensors or None.
        formula: the op made of torch's, for backwards that run within ``torch.func``'s transforms
            or forward-mode differentiation, which are refused without.
    """
    record = super(torch.autograd.Function, function).apply
    if formula is None:
        formula = function.apply  # which refuses

    def call(*args):
        if _functorch_is_active() or forward_ad._current_level >= 0:
            return formula(*args)
        if torch.is_grad_enabled():
            for tensor in args[:tensors]:
                if tensor is not None and tensor.requires_grad:
                    return record(*args)
        with below_autograd():
            return op(*args)

    return ranged(function.__name__, call)


def eager_backward(function, op, tensors, formula):
    """:func:`eager` of a backward op whose own derivatives are taken of a formula in torch's ops.

    Nothing of the formula is computed before a second derivative is asked for.

    Args:
        function: the forward's autograd Function.
        op: the backward op.
        tensors: as in :func:`eager`.
        formula: the op made of torch's, which differentiate it to any order: same arguments, same
            results, None for what it takes as zero.
    """

    def forward(ctx, *args):
        ctx.save_for_backward(*args[:tensors])
        ctx.rest = args[tensors:]
        ctx.set_materialize_grads(False)
        with below_autograd():
            return op(*args)

    def backward(ctx, *grads):
        wanted = ctx.needs_input_grad[:tensors]
        found = derivatives(formula, ctx.saved_tensors, wanted, ctx.rest, grads)
        return *found, *(None,) * len(ctx.rest)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    name = f"{function.__name__}Backward"
    return eager(type(name, (torch.autograd.Function,), methods), op, tensors, formula)


def maker_of(result, method):
    """The autograd Function that made `result`, if it has that method and what it saved may be read
    before its backward reads it: not within hooks for saved tensors, as of
    :func:`torch.utils.checkpoint.checkpoint`, which give each tensor once. Else None."""
    if saved_tensors_hook(True) is not None:
        return None
    function = getattr(type(result.grad_fn), "_forward_cls", None)
    return function if hasattr(function, method) else None


def forking(function):
    """An op's autograd Function that returns an alias of its input behind the result, for what else
    reads the input: as far as backward is concerned, what is made of it is made of this op, and
    both gradients of the input come here, to be one sum on the way out of a kernel.

    Args:
        function: the op's autograd Function; its backward takes `added`, another gradient of the
            input or None.
    """

    def forward(ctx, input, *args):
        output, *saved = function.forward(ctx, input, *args)
        return output, input, *saved  # autograd makes an alias of an input

    def backward(ctx, grad_output, grad_alias, *_):
        added = grad_alias if ctx.needs_input_grad[0] else None
        return function.backward(ctx, grad_output, added=added)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"Forked{function.__name__}", (function,), methods)


def derivatives(formula, tensors, wanted, rest, grads):
    """The gradients of formula(*tensors, *rest) with respect to the tensors, by autograd.

    Args:
        wanted: which of the tensors to differentiate; None is returned for the others.
        grads: the gradient of each result, or None.
    """
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that a tensor that stands in two places has a gradient for each.
        tensors = [t.view_as(t) if w else t for t, w in zip(tensors, wanted, strict=True)]
        results = formula(*tensors, *rest)
        results = results if isinstance(results, tuple) else (results,)
    pairs = [
        (r, g)
        for r, g in zip(results, grads, strict=True)
        if g is not None and r is not None and r.requires_grad
    ]
    inputs = [t for t, w in zip(tensors, wanted, strict=True) if w]
    if not pairs:
        return (None,) * len(tensors)
    found = iter(
        torch.autograd.grad(
            [r for r, _ in pairs],
            inputs,
            [g for _, g in pairs],
            create_graph=graph,
            allow_unused=True,
        )
    )
    return tuple(next(found) if w else None for w in wanted)


def register(name, *, fake, autograd=None, autocast=None, flops=None):
    """Registers the Python kernels of ``torch.ops.braze.<name>``.

    Args:
        name: the op's name; its schema is in csrc/bindings/library.cpp.
        fake: shape function: same signature as the op, returns empty tensors with the sizes,
            strides and dtypes that the kernel returns.
        autograd: same signature as the op; calls the op's autograd Function. Without it the op
            refuses inputs that require grad.
        autocast: same signature as the op, for ops in torch's autocast lists; returns the
            arguments cast. Runs for both device types.
        flops: what ``torch.utils.flop_counter`` counts: takes the op's arguments with shapes in the
            place of tensors, and the results' shapes as `out_shape`.
    """
    torch.library.register_fake(f"braze::{name}", fake, lib=_library)
    _library.impl(name, autograd or _not_differentiable(name), "Autograd")
    kernels = _traced.register(getattr(torch.ops.braze, name).default, fake)
    if autocast is not None:
        op = getattr(torch.ops.braze, name).default
        for key in ("AutocastCPU", "AutocastCUDA"):
            _library.impl(name, _autocast_kernel(op, autocast, key), key)
    if flops is not None:
        for op in (getattr(torch.ops.braze, name), kernels.overloadpacket):
            flop_counter.register_flop_formula(op)(flops)


def _not_differentiable(name):
    op = getattr(torch.ops.braze, name).default

    def kernel(*args):
        if torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in args
        ):
            raise RuntimeError(f"braze::{name} is not differentiable")
        with below_autograd():
            return op(*args)

    return kernel


def _autocast_kernel(op, cast, key):
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args):
        args = cast(*args)  # before the guard, under which autocast is off
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return op(*args)

    return kernel


def autocast_dtype(tensor):
    """The dtype that autocast asks for on the tensor's device, or None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor, dtype):
    scope = current.scope
    if scope is not None and not torch.compiler.is_compiling():
        cast = scope.cast_of(tensor, dtype)
        if cast is not None:
            return cast
    return tensor.to(dtype)


def cast_to(dtype, *tensors):
    """Each tensor in `dtype` where autocast may cast it (floating, not float64), else as it is."""
    return tuple(
        _cast(t, dtype)
        if t is not None and t.is_floating_point() and t.dtype not in (dtype, torch.float64)
        else t
        for t in tensors
    )


def statistics_dtype(tensor):
    """The dtype in which norms keep their statistics, C++'s statistics_type(): float32, of float64
    tensors float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def with_derivatives_of(value, other):
    """The value of the one, the derivatives of the other."""
    return value + (other - other.detach())


def overwrite(buffers, op, *args):
    """op(*args), which overwrites `buffers`, tensors or None.

    Bumps their version counters, which a stable-ABI op does not: a backward that saved a buffer has
    to notice. While compiling, the functionalised graph takes care of it.

    Raises:
        RuntimeError: before anything is written, an inference tensor outside of inference mode.
    """
    traced = _traced.within_graph(op)
    if traced is not op or torch.compiler.is_compiling():
        return traced(*args)
    written = [b for b in buffers if b is not None]
    counted = [b for b in written if not b.is_inference()]
    if len(counted) < len(written) and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{op.name()} would overwrite an inference tensor outside of inference mode"
        )
    results = op(*args)
    if counted:
        torch.autograd.graph.increment_version(counted)
    return results


def _is_nhwc(tensor):
    """Whether memory is in NHWC order, whatever the strides of extents of 1."""
    if tensor.dim() != 4:
        return False
    # torch 2.11 answers False for every tensor of symbolic sizes, so that only strides can tell.
    expected = 1
    for axis in (1, 3, 2, 0):
        if tensor.shape[axis] != 1 and tensor.stride(axis) != expected:
            return False
        expected = expected * tensor.shape[axis]
    return True


def is_channels_last(tensor):
    """Whether the kernels treat a tensor as channels_last: C++'s is_channels_last()."""
    if not _is_nhwc(tensor):
        return False
    if not tensor.is_contiguous():
        return True
    n, c, _, w = tensor.stride()
    return c == 1 and w == tensor.shape[1] and n > 1


def empty_image(like, size, channels_last, dtype=None):
    """An empty tensor on the device of another one, and of its dtype unless another one is given:
    C++'s empty_4d()."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(
        size, dtype=dtype or like.dtype, device=like.device, memory_format=memory_format
    )


def empty_weight_gradient(weight, memory_format):
    """The shape function of C++'s empty_weight_gradient()."""
    channels_last = memory_format == torch.channels_last
    if _is_nhwc(weight) if channels_last else weight.is_contiguous():
        return weight.new_empty_strided(weight.shape, weight.stride())
    return torch.empty_like(weight, memory_format=memory_format)


def int_pair(function, argument, position, value):
    """`value` as a list of ints, as the ops take settings that torch allows as int or tuple."""
    if type(value) is int:
        return [value]
    try:
        return [operator.index(v) for v in value]
    except TypeError:
        if hasattr(value, "__index__") and not isinstance(value, bool):
            return [operator.index(value)]
        raise TypeError(
            f"{function}(): argument '{argument}' (position {position}) must be tuple of ints, "
            f"not {type(value).__name__}"
        ) from None
