"""The one channel between a running :class:`braze.TrainStep`, or a captured function, and the ops
that it calls.

Here so that neither imports the other: a step enters a :class:`StepScope`, and ops ask
``current.scope``, which is None outside of a step. An op that knows nothing of it is right all the
same: whatever a scope offers saves a launch and changes no number.
"""

import contextlib
import threading

import torch


class StepScope:
    """What one phase of a step has for the ops: its forward pass, or its update.

    As a context manager it is the scope of this thread; the one around it comes back at its end.

    Args:
        casts: of the forward pass: a :class:`braze.step.casts.SharedCasts`.
        moments: of the forward pass: a :class:`braze.step.moments.GatheredMoments`.
        unit_gradients: of the forward pass: by (dtype, device) the scalars of 1, one of which
            backward will be given as the loss's gradient.
        optimizer: of the update: whose step it is.
        sources: of the update: address of a gradient -> the tensor of which it is to be a cast.
    """

    __slots__ = (
        "_casts", "_moments", "_optimizer", "_outer", "_sources", "_unit_gradients", "in_backward"
    )  # fmt: skip

    def __init__(
        self, *, casts=None, moments=None, unit_gradients=None, optimizer=None, sources=None
    ):
        self._casts, self._moments, self._unit_gradients = casts, moments, unit_gradients
        self._optimizer, self._sources = optimizer, sources
        self.in_backward = False

    def __enter__(self):
        self._outer, current.scope = current.scope, self
        return self

    def __exit__(self, *exc):
        current.scope = self._outer

    @contextlib.contextmanager
    def backward(self):
        """While the step itself runs the backward of what this forward pass recorded.

        Its threads are autograd's, so ops ask the scope of their forward: ``in_backward``.
        """
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False

    def takes_ops(self):
        """Whether it is offered to ops one by one now, so that no program runs several as one."""
        return True

    def cast_of(self, tensor, dtype):
        """`tensor` in `dtype`, cast with others in one launch, or None where the op has to cast."""
        return None if self._casts is None else self._casts.take(tensor, dtype)

    def patch_moments(self, input, weight, padding):
        """The moments of the patches of `input` under the filters of `weight`, made where the batch
        was gathered, or None."""
        return None if self._moments is None else self._moments.take(input, weight, padding)

    def unit_gradient(self, dtype, device):
        """The 1 that backward will be given as the gradient of a loss of that dtype, or None."""
        ones = self._unit_gradients
        return ones.get((dtype, device)) if ones else None

    def sources_of(self, optimizer):
        """Address of a gradient that the update of `optimizer` has to write, as the cast of a
        tensor -> that tensor; or None."""
        return self._sources if optimizer is self._optimizer else None


class FunctionScope(StepScope):
    """What a captured function has for the ops that it calls without gradients, as in evaluation.
    Where gradients are recorded it offers nothing.

    Args:
        casts: a :class:`braze.step.casts.CastsWithoutGradients`.
    """

    __slots__ = ()

    def __init__(self, casts):
        super().__init__(casts=casts)

    def takes_ops(self):
        return not torch.is_grad_enabled()

    def cast_of(self, tensor, dtype):
        return super().cast_of(tensor, dtype) if self.takes_ops() else None


class _Current(threading.local):
    scope = None


#: `scope`: the StepScope that this thread is in, or None
current = _Current()


def takes_ops():
    """Whether a scope is offered to ops one by one now."""
    scope = current.scope
    return scope is not None and scope.takes_ops()
