"""Gradients of parameters made beside the rest of a captured backward pass.

Nothing needs them before the update, so that the chain of the activations' gradients need not wait
for them. C++: csrc/ops/aside.h.
"""

import contextlib

import torch

_ops = torch.ops.braze

_open = {}  # index of a device -> its Aside: autograd's threads look here too


class Aside:
    """The scope of one backward pass that is being captured.

    Whoever reads such a gradient before the branch is joined (a hook, a sum where a parameter is
    used twice) would read it unfinished. So each has to arrive, as it was made, in a parameter's
    `grad` or at a :func:`join`; where one does not, the capture is worth nothing.
    """

    def __init__(self):
        # Address -> alias, which keeps the address from becoming another tensor's.
        self._missing, self._arrived = {}, []

    @contextlib.contextmanager
    def active(self, device_of, parameters):
        """Open within the block; joined behind it.

        Args:
            device_of: a tensor on the device whose current stream is being captured.
            parameters: those whose gradients the block makes.
        """
        device = device_of.device.index
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
        if hooked or device in _open or not _ops.open_aside.default(device_of):
            yield
            return
        _open[device] = self
        try:
            yield
        finally:
            del _open[device]
            self._join(device_of, True)
        self._check(p.grad for p in parameters)

    def all_arrived(self):
        return not self._missing

    def _join(self, device_of, close):
        made = _ops.join_aside.default(device_of, close)
        self._missing.update((t.data_ptr(), t) for t in made)

    def _check(self, tensors):
        # The version of a new tensor: deterministic algorithms fill it.
        filled = torch.utils.deterministic.fill_uninitialized_memory
        made = int(filled and torch.are_deterministic_algorithms_enabled())
        for t in tensors:
            if t is not None and t._version == made and t.data_ptr() in self._missing:
                self._arrived.append(self._missing.pop(t.data_ptr()))


def join(gradients):
    """Before gradients are read within a backward pass: waits for those that are not made yet."""
    present = [g for g in gradients if g is not None and g.is_cuda]
    aside = _open.get(present[0].device.index) if present else None
    if aside is not None:
        aside._join(present[0], False)
        aside._check(present)
