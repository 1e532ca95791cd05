"""Gradients of parameters made on a side stream of a captured backward pass, or only by the update.

Nothing needs them earlier, so that the chain of the activations' gradients need not wait for them.
C++: csrc/ops/side_stream.h.
"""

import contextlib
import threading

import torch

_ops = torch.ops.braze

_open = {}  # index of a device -> its SideStream: autograd's threads look here too


class SideStream:
    """The scope of one backward pass that is being captured.

    Whoever reads such a gradient too early (a hook, a sum where a parameter is used twice) would
    read it unfinished. So each is pending until it arrives, as it was made, in a parameter's `grad`
    or at a :func:`join`; where one does not, the capture is worth nothing.

    Args:
        takes_casts: whether the update will cast gradients from :attr:`sources`.
        forks: whether gradients are made on a stream of their own; without, only casts are left to
            the update.
    """

    def __init__(self, takes_casts, forks=True):
        self.takes_casts, self._forks = takes_casts, forks
        #: address of a gradient -> tensor of which it is to be a cast
        self.sources = {}
        # Address -> version of a tensor that nobody has written, and what keeps the address from
        # becoming another tensor's.
        self._pending, self._arrived = {}, []

    @contextlib.contextmanager
    def active(self, device_of, parameters):
        """Open within the block; joined behind it.

        Args:
            device_of: a tensor on the device whose current stream is being captured.
            parameters: those whose gradients the block makes.
        """
        device = device_of.device.index
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
        if (
            hooked
            or device in _open
            or (self._forks and not _ops.open_side_stream.default(device_of))
        ):
            yield
            return
        _open[device] = self
        try:
            yield
        finally:
            del _open[device]
            self._join(device_of, True)
        self._check(p.grad for p in parameters)
        self._check(self.sources.values())

    def cast_later(self, gradients, sources):
        """Leaves the casts of `sources`, which may be unfinished, to the update."""
        for g, source in zip(gradients, sources, strict=True):
            if g.numel() == 0:
                continue  # nothing to cast, and no address of its own
            self.sources[g.data_ptr()] = source
            # Autograd takes a gradient over as it is where nobody else has the tensor.
            self._pending[g.data_ptr()] = g._version, g.untyped_storage()

    def all_arrived(self):
        return not self._pending

    def _join(self, device_of, close):
        if not self._forks:
            return
        made = _ops.join_side_stream.default(device_of, close)
        # Deterministic algorithms fill a new tensor.
        filled = torch.utils.deterministic.fill_uninitialized_memory
        version = int(filled and torch.are_deterministic_algorithms_enabled())
        self._pending.update((t.data_ptr(), (version, t)) for t in made)

    def _check(self, tensors):
        for t in tensors:
            if t is not None and self._pending.get(t.data_ptr(), (-1,))[0] == t._version:
                self._arrived.append(self._pending.pop(t.data_ptr()))


class OfFunction:
    """The side streams of a captured function: one for each of its calls of ``backward()``.

    Args:
        device: the device that is captured.
        parameters: those that the function may train.
    """

    def __init__(self, device, parameters):
        self._device, self._parameters = device, parameters
        self._opened = []

    @contextlib.contextmanager
    def active(self):
        """Within this block ``torch.autograd.backward``, and what calls it, makes gradients of
        parameters on a side stream, which is joined before it returns."""
        plain, thread = torch.autograd.backward, threading.get_ident()

        def backward(
            tensors, grad_tensors=None, retain_graph=None, create_graph=False, *rest, **named
        ):
            tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            own_thread = threading.get_ident() == thread
            # A gradient that has a graph of its own is read at once.
            if own_thread and not create_graph and tensors and tensors[0].device == self._device:
                side = SideStream(takes_casts=False)
                self._opened.append(side)
                scope = side.active(tensors[0], self._parameters)
            else:
                scope = contextlib.nullcontext()
            with scope:
                plain(tensors, grad_tensors, retain_graph, create_graph, *rest, **named)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = plain

    def all_arrived(self):
        return all(side.all_arrived() for side in self._opened)


@contextlib.contextmanager
def none_but(device_of):
    """Within this block ops that are captured on other streams than the current one make no
    branches: there is one pair of streams for these on a device, and kernels of several chains that
    took turns on it would wait for each other.

    Args:
        device_of: a tensor on the device.
    """
    opened = _ops.open_side_stream.default(device_of)
    try:
        yield
    finally:
        if opened:
            _ops.join_side_stream.default(device_of, True)


def _open_for(gradients):
    return _open.get(gradients[0].device.index) if gradients and gradients[0].is_cuda else None


def taking_casts(gradients):
    """The :class:`SideStream` that takes the casts of these gradients, of one dtype, for later, or
    None: the update's launch casts from one dtype only."""
    side = _open_for(gradients)
    if side is None or not side.takes_casts:
        return None
    known = next(iter(side.sources.values()), gradients[0])
    return side if known.dtype == gradients[0].dtype else None


def follow(device_of, stream):
    """What `stream` is given from now on waits for what the side stream of the current one, if one
    is open, has been given."""
    if _open.get(device_of.device.index) is not None:
        _ops.follow_side_stream.default(device_of, stream.cuda_stream)


def join(gradients):
    """Before gradients are read within a backward pass: waits for those that are not made yet."""
    side = _open_for(gradients)
    if side is not None:
        side._join(gradients[0], False)
        side._check(gradients)
