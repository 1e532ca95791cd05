"""Where a step finds its batch, in as little memory as can be.

A graph reads a batch in a place of its own. Where a model only casts it, as autocast does, that is
the place of the cast, and of the batch itself there is no copy. Else the copy is freed as soon as
nothing reads it: for most models behind the forward pass, so that it does not count at a peak in
the backward pass.
"""

import torch


def is_alike(x, device):
    """Whether a tensor of the caller's is as a copy of it would be: a step that only reads it may
    be given it in place of the copy."""
    return (
        type(x) is torch.Tensor
        and x.device == device
        and x.numel() > 0
        and not x.is_inference()
        and torch.empty_like(x, device="meta").stride() == x.stride()
    )


def holders(t):
    """How many tensors share its memory, more or less by a constant."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata)


def versions_of(tensors):
    """What grows when a tensor is written to."""
    return [
        t._version if isinstance(t, torch.Tensor) and not t.is_inference() else None
        for t in tensors
    ]


def unfilled(leaves, device):
    """New tensors like those of `leaves`; no kernel is launched, though deterministic algorithms
    have torch fill new memory: a replay would fill what has been loaded before it."""
    settings = torch.utils.deterministic
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        return [
            torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x for x in leaves
        ]
    finally:
        settings.fill_uninitialized_memory = filled


def aliases(leaves):
    """Tensors of the same memory which do not keep it from other use: a graph's pool, to which the
    memory belongs, goes on to hold it when `leaves` are gone. To write there before a replay."""
    return [_alias(x) if isinstance(x, torch.Tensor) else x for x in leaves]


class _Bytes:
    def __init__(self, t):
        storage = t.untyped_storage()
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "strides": None,
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def _alias(t):
    if t.numel() == 0:
        return t
    return torch.as_tensor(_Bytes(t), device=t.device).view(t.dtype).as_strided(t.shape, t.stride())
