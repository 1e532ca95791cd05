"""Batch norm's backward where a convolution reads the result: its first pass is done by the kernel
that makes the gradient.

That pass reads the gradient and what was normalised, for two sums of each channel, and writes the
gradient before the activation where there is a residual. The input gradient of the convolution
behind makes the one from the other before it stores it, and leaves the sums. What it returns is
then not the gradient of the result but that before the activation: so only within a step, whose
backward nobody else sees, and not where somebody looks at that tensor's gradient.
"""

import weakref

import torch

from braze._ops._bilinear import masked
from braze._ops._common import below_autograd, maker_of
from braze._step_scope import current, takes_ops

_ops = torch.ops.braze

#: On which devices kernels of gradients leave sums.
NORM_GRADS_ON = ("cuda",)


class NormOf:
    """The batch norm that made a tensor, for the backward of the convolution that reads it.

    Args:
        result: the tensor, whose node's class has ``norm_of(node)``: what was normalised, the mask
            of the activation's derivative, the statistics, and the activation, a bound.
        scope: the :class:`braze._step_scope.StepScope` that it was made in.
    """

    __slots__ = ("_node", "_readers", "_result", "_scope")

    def __init__(self, result, scope):
        self._node, self._scope = result.grad_fn, scope
        self._result = weakref.ref(result)
        self._readers = 0

    def claim(self, tensor):
        """By each reader, in its forward: the sums are those of one reader's gradient. False where
        `tensor` is not the norm's result any more, but what an operation in place has made of it,
        or somebody looks at its gradient."""
        self._readers += 1
        return tensor.grad_fn is self._node and not _is_watched(tensor)

    def is_wanted(self):
        """Whether the gradient before the activation will do; else it has to be the result's."""
        if not self._scope.in_backward or torch.is_grad_enabled() or self._readers != 1:
            return False
        result = self._result()
        return result is None or not _is_watched(result)

    def arguments(self):
        """The last ones of ``conv2d_norm_backward``."""
        return type(self._node)._forward_cls.norm_of(self._node)

    def leave(self, gradient, sums):
        """For the norm's backward: the gradient before the activation, and its sums."""
        self._node.summed = gradient, gradient._version, sums


def offer_norm(result):
    """Lets the reader of `result`, whose node's class has ``norm_of``, make what its backward
    begins with."""
    if torch.compiler.is_compiling():
        return
    if takes_ops() and result.device.type in NORM_GRADS_ON:
        function = maker_of(result, "has_norm")
        if function is not None and function.has_norm(result.grad_fn):
            result._braze_norm = NormOf(result, current.scope)


def norm_before(tensor):
    """By a reader of `tensor`, in its forward: the :class:`NormOf` that it offers, claimed, or
    None."""
    norm = getattr(tensor, "_braze_norm", None)
    return norm if norm is not None and norm.claim(tensor) else None


def _is_watched(tensor):
    return bool(tensor._backward_hooks) or tensor.retains_grad


def sums_of(node, grad_output):
    """The sums of `grad_output`, which then is that before the activation, if the kernel that made
    it left them for the node of a norm; else None."""
    gradient, version, sums = node.__dict__.pop("summed", (None,) * 3)
    return sums if gradient is grad_output and version == grad_output._version else None


def conv2d_backward_for(norm, *args, added=None):
    """``conv2d_backward``'s results, without derivatives; or ``conv2d_norm_backward``'s, the sums
    left for the norm.

    Args:
        norm: the convolution's :class:`NormOf`, or None.
        added: another gradient of the input, or None.
    """
    if norm is None or not norm.is_wanted():
        return _ops.conv2d_backward.default(*args, added)
    *grads, sums = _ops.conv2d_norm_backward.default(*args, added, *norm.arguments())
    if sums.numel() > 0:
        norm.leave(grads[0], sums)
    return grads


def norm_backward_of(sums, grad_output, input, weight, bias, statistics, asked):
    """``batch_norm_backward_of_sums``, without derivatives: gradients of the input, the weight, the
    bias, and of a constant added to the input; None for those that are not asked for."""
    with below_autograd():
        grads = _ops.batch_norm_backward_of_sums.default(
            grad_output, input, weight, bias, statistics, sums, asked
        )
    return masked(grads, asked)
