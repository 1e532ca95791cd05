"""Casts of parameters under autocast: all of a model's in one launch forward, one backward."""

import contextlib
import threading

import torch


class _Casts(torch.autograd.Function):
    """Tensors of one dtype in another one."""

    @staticmethod
    def forward(ctx, dtype, *tensors):
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        return tuple(_cast(tensors, dtype))

    @staticmethod
    def backward(ctx, *grads):
        cast = iter(_cast([g for g in grads if g is not None], ctx.dtype))
        return None, *(None if g is None else next(cast) for g in grads)


def _cast(tensors, dtype):
    results = [torch.empty_like(t, dtype=dtype) for t in tensors]
    if results:
        torch._foreach_copy_(results, list(tensors))
    return results


class SharedCasts:
    """Learns in one forward pass which parameters autocast casts, and casts them together in the
    next ones. The results are those of separate casts, bit for bit: where a parameter is used more
    than once, the later uses cast it again, so that its gradients add up in its own dtype."""

    def __init__(self):
        self._wanted = {}  # (id of a parameter, dtype) -> parameter
        self._ready = {}

    @contextlib.contextmanager
    def active(self):
        """The scope of a forward pass."""
        outer, _current.casts = _current.casts, self
        try:
            together = {}
            for (_, dtype), p in self._wanted.items():
                together.setdefault((dtype, p.dtype, p.device), []).append(p)
            for (dtype, _, _), parameters in together.items():
                keys = [(id(p), dtype) for p in parameters]
                self._ready.update(zip(keys, _Casts.apply(dtype, *parameters), strict=True))
            yield
        finally:
            self._ready.clear()
            _current.casts = outer

    def take(self, tensor, dtype):
        """The cast parameter, or None where the caller has to cast."""
        key = id(tensor), dtype
        if key not in self._wanted and isinstance(tensor, torch.nn.Parameter):
            self._wanted[key] = tensor
        return self._ready.pop(key, None)


class _Current(threading.local):
    casts = None  # the SharedCasts of this thread's forward pass


_current = _Current()


def shared_cast(tensor, dtype):
    """`tensor` in `dtype`, from the SharedCasts in whose scope this thread is if that has it."""
    if _current.casts is not None and not torch.compiler.is_compiling():
        cast = _current.casts.take(tensor, dtype)
        if cast is not None:
            return cast
    return tensor.to(dtype)
