"""Memory for a batch that a step frees as soon as nothing reads it: for most models behind the
forward pass, so that it does not count at the backward pass's peak."""

import torch


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
