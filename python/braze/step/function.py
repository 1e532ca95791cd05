"""braze.capture, as its user sees it. User page: docs/capture.md."""

import functools
import warnings

import torch
from torch.utils import _pytree as pytree

from braze._nvtx import ranged
from braze.step.function_work import FunctionCall, FunctionWork, lasting
from braze.step.graphs import Graphs
from braze.step.surroundings import NOT_REPEATED, PLAIN, Surroundings, SurroundingsState
from braze.step.watched import Watched

_NAME = "braze.capture"
_LEAVES = (torch.Tensor, *PLAIN)  # arguments that are no trees
# Calls in a row, each of another kind than all before, after which a warning says so.
_RESTLESS_CALLS = 20
_KINDS = (  # the parts of a kind of call, in the order of `Graphs`
    "the structure of the arguments",
    "shapes, strides, dtypes or values of the arguments",
    None,  # FunctionParts.key
    "hyper-parameters of an optimizer",
    "precision, determinism, autocast or backend",
)


def capture(function, *, modules=(), optimizers=()):
    """A function that trains, as one CUDA graph for each kind of call.

    The function takes tensors and does whatever training consists of: models, losses and
    optimizers, as many as there are, gradient penalties, clipping, averages of weights. Each call
    is one true call: on a GPU the first two of a kind run eagerly, the third is captured and
    replayed, all later ones are replayed. The results are those of `function` itself, bit for bit
    with ``torch.use_deterministic_algorithms(True)``. On the CPU every call runs eagerly.

    What the graphs depend on (modules, optimizers, tensors, plain Python values) is found in the
    code of the function: its closure, globals, defaults, and attributes of the object that it is a
    method of. docs/capture.md says how far that goes, and what cannot be captured.

    Args:
        function: a callable of tensors, or tuples, lists and dicts of them, and of hashable Python
            values; each value is a kind of call of its own.
        modules: ``torch.nn.Module``'s that it uses, beside those that are found.
        optimizers: ``torch.optim.Optimizer``'s, likewise; on a GPU braze's, or torch's with
            ``capturable=True`` where they have it.

    Returns:
        :class:`CapturedFunction`: takes the same arguments.

    Raises:
        TypeError: an argument is unfit.

    Example:
        >>> @braze.capture
        ... def train(images, labels):
        ...     optimizer.zero_grad()
        ...     loss = F.cross_entropy(model(images), labels)
        ...     loss.backward()
        ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     return loss
    """
    return CapturedFunction(function, modules, optimizers)


class FunctionParts(Watched):
    """What a captured function depends on: what is found in its code, and what is given."""

    caller = _NAME

    def __init__(self, function, modules, optimizers):
        super().__init__()
        self.function = function
        self._given_modules, self._given_optimizers = modules, optimizers
        self.surroundings = None  # looked for at the first call, when all has been defined
        self._roots, self._optimizers = [], []

    def look(self):
        """Reads anew what the function depends on."""
        if self.surroundings is None:
            self.surroundings = Surroundings(self.function)
        else:
            self.surroundings.scan()
        found = self.surroundings
        self._roots = list(dict.fromkeys((*self._given_modules, *found.modules)))
        self._optimizers = list(dict.fromkeys((*self._given_optimizers, *found.optimizers)))

    def roots(self):
        return self._roots

    def optimizers(self):
        return self._optimizers

    def loose_params(self):
        return [t for t in self.surroundings.tensors if t.is_leaf and t.requires_grad]

    def tensors(self):
        """Those found that no module or optimizer has."""
        return self.surroundings.tensors

    def _only_device(self, devices):
        # Of tensors that belong to no module those on the host are the host's business.
        devices |= {t.device for t in self.surroundings.tensors if t.is_cuda}
        return super()._only_device(devices) if devices else None

    def are_the_same(self):
        return self.surroundings.follow() and super().are_the_same()

    def key(self):
        settings = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        scales = [
            s.is_enabled()
            and (s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval())
            for s in self.surroundings.scalers
        ]
        return self.surroundings.key(), super().key(), settings, tuple(scales)

    def host_states(self):
        return [SurroundingsState(self.surroundings)]


class CapturedFunction:
    """What :func:`braze.capture` returns."""

    def __init__(self, function, modules=(), optimizers=()):
        if not callable(function):
            raise TypeError(
                f"{_NAME}: expected a callable, but got {type(function).__name__} (settings are "
                "keyword arguments)"
            )
        modules = (modules,) if isinstance(modules, torch.nn.Module) else tuple(modules)
        single = isinstance(optimizers, torch.optim.Optimizer)
        optimizers = (optimizers,) if single else tuple(optimizers)
        for given, kind in ((modules, torch.nn.Module), (optimizers, torch.optim.Optimizer)):
            for one in given:
                if not isinstance(one, kind):
                    raise TypeError(
                        f"{_NAME}: expected {kind.__name__}s, but got {type(one).__name__}"
                    )
        functools.update_wrapper(self, function, updated=())
        self._parts = FunctionParts(function, modules, optimizers)
        self._work = FunctionWork(self._parts)
        self._graphs = Graphs(self._parts, self._work)
        self._forget_changes()

    def __call__(self, *args, **kwargs):
        """One call of the function.

        Returns:
            What the function returns, its tensors detached. A scalar stays as it is; on a GPU a
            tensor with dimensions is overwritten by a later call.

        Raises:
            TypeError, ValueError: arguments are unfit.
            RuntimeError: it cannot be captured. Models and optimizers are as before the call.
            torch.OutOfMemoryError: no memory for the capture; likewise.
        """
        return self._run(args, kwargs)

    def recapture(self):
        """Forgets all graphs, after a change that cannot be seen: of a module's other attributes,
        for example, or of what a Python module holds."""
        self._graphs.forget()
        self._work.gradients.forget()
        self._forget_changes()

    def _forget_changes(self):
        self._changed, self._unrepeatable = set(), set()
        self._last_kind, self._new_kinds = None, 0

    def _run(self, args, kwargs):
        parts = self._parts
        leaves, spec = args, None
        if kwargs or not all(isinstance(x, _LEAVES) for x in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        _check(leaves)
        if parts.surroundings is None or not parts.are_the_same():
            if parts.surroundings is not None:
                self._graphs.forget()
                self._work.gradients.forget()
            parts.look()
            parts.inspect(self.recapture)
            if parts.device is not None and parts.device.type == "cuda":
                self._graphs.prepare()
        if parts.device is None:
            parts.device = next((x.device for x in leaves if _on_gpu(x)), None)
            if parts.device is not None:
                self._graphs.prepare()
        if parts.device is None or parts.device.type != "cuda":
            results, spec = pytree.tree_flatten(parts.function(*args, **kwargs))
            return pytree.tree_unflatten(lasting(results), spec)
        if self._unrepeatable:
            raise RuntimeError(
                f"{_NAME}: this function cannot be captured in a CUDA graph. "
                + NOT_REPEATED.format(", ".join(sorted(self._unrepeatable)))
            )
        call = FunctionCall(leaves, spec)
        try:
            result = self._graphs.run(call)
        except BaseException:
            self._changed = set()
            raise
        if call.ran_eagerly:
            self._after_eager(call)
        return result

    _run = ranged("capture", _run)

    def _after_eager(self, call):
        # What the code changes by itself, call after call, a graph would not.
        changed = self._parts.surroundings.changes()
        self._unrepeatable, self._changed = changed & self._changed, changed
        self._new_kinds = self._new_kinds + 1 if call.is_new else 0
        if self._new_kinds == _RESTLESS_CALLS:
            warnings.warn(
                f"{_NAME}: each of the last {_RESTLESS_CALLS} calls was of another kind, so that "
                "none has been captured. What differed between the last two: "
                f"{self._difference(self._last_kind, call.kind)}",
                stacklevel=4,
            )
        self._last_kind = call.kind

    def _difference(self, a, b):
        found = [name for name, x, y in zip(_KINDS, a, b, strict=True) if name and x != y]
        (was, was_tensors), *was_rest = a[2]
        (now, now_tensors), *now_rest = b[2]
        if len(was) == len(now):
            names = self._parts.surroundings.names()
            found += [name for name, x, y in zip(names, was, now, strict=True) if x != y]
        if was_tensors != now_tensors:
            found.append("tensors that it uses, replaced instead of written to")
        if was_rest != now_rest:
            found.append("parameters, their requires_grad, or modules' train and eval modes")
        return ", ".join(found) or "modules, optimizers or other objects that it uses"


def _on_gpu(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _check(leaves):
    """Raises where an argument could not be part of a graph."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                raise ValueError(
                    f"{_NAME}: an argument requires grad, but a graph works on a copy; call "
                    "requires_grad_() on a detached tensor within the function"
                )
            if leaf.layout is not torch.strided:
                raise ValueError(f"{_NAME}: expected dense arguments, but got {leaf.layout}")
        elif isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer)):
            raise TypeError(
                f"{_NAME}: expected tensors and hashable values as arguments, but got "
                f"{type(leaf).__name__}; give modules=[...] and optimizers=[...] to {_NAME}"
            )
        else:
            try:
                hash(leaf)
            except TypeError:
                raise TypeError(
                    f"{_NAME}: expected tensors and hashable values as arguments, but got "
                    f"{type(leaf).__name__}"
                ) from None
