"""Autocast's casts of a model's parameters and inputs in one launch."""

import torch

from braze._ops._common import is_channels_last
from braze._ops.cast import cast_
from braze.step import side_stream


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


def _cast(tensors, dtype):
    # A gradient may be a view with gaps, or of any strides.
    tensors = [t if _is_dense(t) else t.contiguous() for t in tensors]
    results = [torch.empty_like(t, dtype=dtype) for t in tensors]
    if results:
        cast_(results, tensors)
    return results


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
        self._ready, self._made = {}, {}

    def wanted(self):
        """Lists of parameters that a launch may cast together, as :func:`_together` has them."""
        return _together(self._wanted)

    def cast_together(self, inputs=()):
        """At the beginning of a forward pass, which ends with :meth:`drop`.

        Args:
            inputs: what the model is called with.
        """
        for i, t in enumerate(inputs):
            if type(t) is torch.Tensor and not t.requires_grad:
                self._inputs[id(t)] = i
        for key, parameters in self.wanted().items():
            made = self._made.pop(key, None)
            tensors = parameters if made else [*parameters, *self._inputs_for(inputs, *key)]
            casts = _Casts.apply(key[0], made, *tensors)
            for t, cast in zip(tensors, casts, strict=True):
                self._ready[id(t), key[0]] = t._version, cast

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
        version, cast = self._ready.pop(key, (None, None))
        return cast if cast is not None and version == tensor._version else None


class CastsWithoutGradients:
    """Learns in one call of a function which tensors autocast casts where no gradient is wanted, of
    those that are there before the call: parameters and `others`. Casts them together in the next
    calls, as soon as one of them is wanted. The results are those of separate casts, bit for bit:
    one that has been written to since is cast again, and so is one for each later use, since of a
    write to ``tensor.data`` between two passes nothing tells.

    Args:
        others: tensors; what else a function reads, arguments among them.
    """

    def __init__(self, others=()):
        self._others = {id(t): t for t in others}
        self._wanted = {}  # (id of a tensor, dtype) -> tensor
        self._ready = None  # of this call: the same key -> version and cast

    def drop(self):
        """At the end of a call."""
        self._ready = None

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
        version, cast = self._ready.pop(key, (None, None))
        return cast if version == tensor._version else None

    def _cast_together(self):
        for (dtype, *_), tensors in _together(self._wanted).items():
            for t, cast in zip(tensors, _cast(tensors, dtype), strict=True):
                self._ready[id(t), dtype] = t._version, cast


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
