"""Autocast's casts of a model's parameters in one launch."""

import torch

from braze._ops._common import is_channels_last
from braze._ops.cast import cast_
from braze.step import side_stream


class _Casts(torch.autograd.Function):
    """Tensors of one dtype in another one."""

    @staticmethod
    def forward(ctx, dtype, *tensors):
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        return tuple(_cast(tensors, dtype))

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
        return None, *(None if g is None else next(cast) for g in grads)


def _is_dense(t):
    return t.is_contiguous() or is_channels_last(t)


def _cast(tensors, dtype):
    # A gradient may be a view with gaps, or of any strides.
    tensors = [t if _is_dense(t) else t.contiguous() for t in tensors]
    results = [torch.empty_like(t, dtype=dtype) for t in tensors]
    if results:
        cast_(results, tensors)
    return results


class SharedCasts:
    """Learns in one forward pass which parameters autocast casts, and casts them together in the
    next ones. The results are those of separate casts, bit for bit: where a parameter is used more
    than once, the later uses cast it again, so that its gradients add up in its own dtype; so does
    the first use of one that the forward pass has written to before."""

    def __init__(self):
        self._wanted = {}  # (id of a parameter, dtype) -> parameter
        self._ready = {}

    def cast_together(self):
        """At the beginning of a forward pass, which ends with :meth:`drop`."""
        together = {}
        for (_, dtype), p in self._wanted.items():
            together.setdefault((dtype, p.dtype, p.device), []).append(p)
        for (dtype, _, _), parameters in together.items():
            casts = _Casts.apply(dtype, *parameters)
            for p, cast in zip(parameters, casts, strict=True):
                self._ready[id(p), dtype] = p._version, cast

    def drop(self):
        """Forgets casts that nobody has taken."""
        self._ready.clear()

    def take(self, tensor, dtype):
        """The cast parameter, or None where the caller has to cast."""
        key = id(tensor), dtype
        if key not in self._wanted and isinstance(tensor, torch.nn.Parameter):
            self._wanted[key] = tensor
        version, cast = self._ready.pop(key, (None, None))
        return cast if cast is not None and version == tensor._version else None
