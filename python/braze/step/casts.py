"""Autocast's casts of a model's parameters and inputs in one launch."""

import torch

from braze._ops._common import is_channels_last
from braze._ops.cast import cast_
from braze.step import side_stream

# Of casts in parts: bytes of the first; of the rest, for which a branch pays (a graph that has one
# begins some us later); how many times as long as the one before each part is.
_FIRST_BYTES, _LEAST_BYTES, _GROWTH = 2 << 20, 64 << 20, 4


class _Casts(torch.autograd.Function):
    """Tensors of one dtype in another one."""

    @staticmethod
    def forward(ctx, dtype, made, *tensors):
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        casts = tuple(_cast(tensors, dtype) if made is None else made)
        # Nobody is to make the gradient of a batch, or of a frozen parameter.
        needed = zip(casts, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*(cast for cast, needs in needed if not needs))
        return casts

    @staticmethod
    def backward(ctx, *grads):
        present = [g for g in grads if g is not None]
        later = side_stream.taking_casts(present)
        if later is not None and all(_is_dense(g) for g in present):
            cast = [torch.empty_like(g, dtype=ctx.dtype) for g in present]
            later.cast_later(cast, present)
        else:
            side_stream.join(present)
            cast = _cast(present, ctx.dtype)
        cast = iter(cast)
        return None, None, *(None if g is None else next(cast) for g in grads)


def _is_dense(t):
    return t.is_contiguous() or is_channels_last(t)


def _empty(tensors, dtype):
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


def _cast(tensors, dtype):
    # A gradient may be a view with gaps, or of any strides.
    tensors = [t if _is_dense(t) else t.contiguous() for t in tensors]
    results = _empty(tensors, dtype)
    if results:
        cast_(results, tensors)
    return results


class _Part:
    """Casts that one node of autograd makes: recorded when the first of them is taken.

    Backward passes run the youngest node that they can. So gradients come behind the layers whose
    parameters these are, not behind all layers.

    Args:
        dtype: the casts'.
        made: the casts.
        tensors: what they are casts of.
    """

    def __init__(self, dtype, made, tensors):
        self._dtype, self._made, self._tensors = dtype, made, tensors
        self._recorded = None  # id of a tensor -> its cast

    def cast_of(self, tensor):
        if self._recorded is None:
            with torch.enable_grad():  # whoever takes the first one
                casts = _Casts.apply(self._dtype, self._made, *self._tensors)
            self._recorded = dict(zip(map(id, self._tensors), casts, strict=True))
        return self._recorded[id(tensor)]


def _in_parts(dtype, made, tensors, part_of):
    """(tensor, its :class:`_Part`) of casts that one launch has made, or makes now."""
    if made is None:
        with torch.no_grad():
            made = _cast(tensors, dtype)
    parts = {}
    for t, cast in zip(tensors, made, strict=True):
        parts.setdefault(part_of(t), []).append((cast, t))
    for members in parts.values():
        part = _Part(dtype, *zip(*members, strict=True))
        for _, t in members:
            yield t, part


def _together(wanted):
    """Lists of tensors that a launch may cast together, by (dtype to cast to, their dtype and
    device), of a dict with (anything, dtype to cast to) for each tensor."""
    together = {}
    for (_, dtype), t in wanted.items():
        together.setdefault((dtype, t.dtype, t.device), []).append(t)
    return together


class SharedCasts:
    """Learns in one forward pass which parameters and inputs autocast casts, and casts them
    together in the next ones. The results are those of separate casts, bit for bit: where a
    parameter is used more than once, the later uses cast it again, so that its gradients add up in
    its own dtype; so does the first use of one that the forward pass has written to before."""

    def __init__(self):
        self._wanted = {}  # (id of a parameter, dtype) -> parameter
        self._wanted_inputs = set()  # (which one, dtype)
        self._inputs = {}  # id of an input of this pass -> which one it is
        # (Id of a tensor, dtype) -> its version, and what returns its cast.
        self._ready, self._made = {}, {}

    def wanted(self):
        """Lists of parameters that a launch may cast together, as :func:`_together` has them."""
        return _together(self._wanted)

    def wanted_inputs(self):
        """Of the inputs that the passes before cast, to one dtype each: which one -> dtype."""
        found = dict(self._wanted_inputs)
        return found if len(found) == len(self._wanted_inputs) else {}

    def cast_together(self, inputs=(), given=(), part_of=lambda tensor: None):
        """At the beginning of a forward pass, which ends with :meth:`drop`.

        Args:
            inputs: what the model is called with.
            given: which of them -> its cast, of those that are cast already, in a dict.
            part_of: of a parameter or input, anything hashable; gradients of those of which it is
                the same are cast together, as soon as all are there.
        """
        for i, t in enumerate(inputs):
            if i in given:
                self._ready[id(t), given[i].dtype] = t._version, lambda _, cast=given[i]: cast
            elif type(t) is torch.Tensor and not t.requires_grad:
                self._inputs[id(t)] = i
        for key, parameters in self.wanted().items():
            made = self._made.pop(key, None)
            tensors = parameters if made else [*parameters, *self._inputs_for(inputs, *key)]
            for t, part in _in_parts(key[0], made, tensors, part_of):
                self._ready[id(t), key[0]] = t._version, part.cast_of

    def _inputs_for(self, inputs, to, dtype, device):
        """Those that the passes before cast, once each, and that may share a launch."""
        found = {id(t): t for t in inputs if id(t) in self._inputs}
        return [
            t
            for t in found.values()
            if (self._inputs[id(t)], to) in self._wanted_inputs
            and (t.dtype, t.device) == (dtype, device)
        ]

    def drop(self):
        """Forgets casts that nobody has taken."""
        self._inputs.clear()
        self._ready.clear()
        self._made.clear()

    def take(self, tensor, dtype):
        """The cast parameter or input, or None where the caller has to cast."""
        key = id(tensor), dtype
        if id(tensor) in self._inputs:
            self._wanted_inputs.add((self._inputs[id(tensor)], dtype))
        elif key not in self._wanted and isinstance(tensor, torch.nn.Parameter):
            self._wanted[key] = tensor
        version, cast_of = self._ready.pop(key, (None, None))
        return cast_of(tensor) if cast_of is not None and version == tensor._version else None


class CastsWithoutGradients:
    """Learns in one call of a function which tensors autocast casts where no gradient is wanted, of
    those that are there before the call: parameters and `others`. Casts them together in the next
    calls, as soon as one of them is wanted. The results are those of separate casts, bit for bit:
    one that has been written to since is cast again, and so is one for each later use, since of a
    write to ``tensor.data`` between two passes nothing tells.

    In a graph, many bytes are cast in parts, all but the first in a branch: layers at the beginning
    run while the weights of later ones are cast.

    Args:
        others: tensors; what else a function reads, arguments among them.
    """

    def __init__(self, others=()):
        self._others = {id(t): t for t in others}
        self._wanted = {}  # (id of a tensor, dtype) -> tensor
        self._ready = None  # of this call: the same key -> version, cast, its part in the branch
        self._branch = None

    def drop(self):
        """At the end of a call."""
        self._ready = None

    def join(self):
        """Before a call ends: its stream waits for the branch."""
        if self._branch is not None:
            self._branch.join()

    def take(self, tensor, dtype):
        """The cast tensor, or None where the caller has to cast."""
        known = isinstance(tensor, torch.nn.Parameter) or id(tensor) in self._others
        if not known or tensor.is_inference():
            return None
        if self._ready is None:
            self._ready = {}
            self._cast_together()
        key = id(tensor), dtype
        self._wanted.setdefault(key, tensor)
        version, cast, part = self._ready.pop(key, (None, None, None))
        if part is not None:
            self._branch.join(part)
        return cast if version == tensor._version else None

    def _cast_together(self):
        for (dtype, _, device), tensors in _together(self._wanted).items():
            first, *later = self._parts(tensors, device)
            results = [_empty(part, dtype) for part in later]
            if later:  # behind what deterministic algorithms fill memory with
                self._branch.begin()
            self._hold(first, _cast(first, dtype), dtype)
            for part, casts in zip(later, results, strict=True):
                with torch.cuda.stream(self._branch.stream):
                    cast_(casts, part)
                self._hold(part, casts, dtype, self._branch.end())

    def _hold(self, tensors, casts, dtype, part=None):
        for t, cast in zip(tensors, casts, strict=True):
            self._ready[id(t), dtype] = t._version, cast, part

    def _parts(self, tensors, device):
        """Tensors cut up in the order in which they are wanted."""
        behind = sum(t.nbytes for t in tensors) - _FIRST_BYTES
        if device.type != "cuda" or behind < _LEAST_BYTES:
            return [tensors]
        if self._branch is None:
            self._branch = _Branch(device)
        if not torch.cuda.is_current_stream_capturing() or not all(map(_is_dense, tensors)):
            return [tensors]
        parts, left = [[]], _FIRST_BYTES
        for t in tensors:
            if left <= 0:
                left += _GROWTH * sum(other.nbytes for other in parts[-1])
                parts.append([])
            parts[-1].append(t)
            left -= t.nbytes
        return parts


class _Branch:
    """A branch of the graph that is being captured, whose work others wait for part by part."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)
        self._ends = []  # events
        self._joined = {}  # number of a stream -> how many parts it has waited for

    def begin(self):
        """Before the first part: it comes behind what the current stream has been given."""
        if not self._ends:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def end(self):
        """Ends a part; returns its number."""
        self._ends.append(self.stream.record_event())
        return len(self._ends) - 1

    def join(self, part=None):
        """The current stream waits for a part and those before it; None: for all, of which nothing
        is left then."""
        stream = torch.cuda.current_stream(self.stream.device)
        wanted = len(self._ends) if part is None else part + 1
        if wanted > self._joined.get(stream.stream_id, 0):
            stream.wait_event(self._ends[wanted - 1])
            self._joined[stream.stream_id] = wanted
        if part is None:
            self._ends, self._joined = [], {}


@torch.no_grad()
def cast_ahead(all_casts):
    """Makes the casts of several models in one launch, for :meth:`SharedCasts.cast_together` of
    each, before which nobody may write to the parameters.

    Args:
        all_casts: a :class:`SharedCasts` of each model.

    Returns:
        The casts: what runs on another stream reads them as long as it has not been joined.
    """
    together, made = {}, []
    for casts in all_casts:
        for key, parameters in casts.wanted().items():
            together.setdefault(key, []).append((casts, parameters))
    for key, parts in together.items():
        cast = _cast([p for _, parameters in parts for p in parameters], key[0])
        made += cast
        for casts, parameters in parts:
            casts._made[key], cast = cast[: len(parameters)], cast[len(parameters) :]
    return made
