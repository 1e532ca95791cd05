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
from braze._ops._common import below_autograd
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

    def claim(self):
        """By each reader, in its forward: the sums are those of one reader's gradient."""
        self._readers += 1

    def wanted(self):
        """The last arguments of ``conv2d_norm_backward``; None where the gradient itself has to be
        made."""
        if not self._scope.in_backward or torch.is_grad_enabled() or self._readers != 1:
            return None
        result = self._result()
        if result is not None and (result._backward_hooks or result.retains_grad):
            return None
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
        function = getattr(type(result.grad_fn), "_forward_cls", None)
        if hasattr(function, "has_norm") and function.has_norm(result.grad_fn):
            result._braze_norm = NormOf(result, current.scope)


def norm_before(tensor):
    """By a reader of `tensor`, in its forward: the :class:`NormOf` that it offers, claimed, or
    None."""
    norm = getattr(tensor, "_braze_norm", None)
    if norm is not None:
        norm.claim()
    return norm


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
    wanted = norm.wanted() if norm is not None else None
    if wanted is None:
        return _ops.conv2d_backward.default(*args, added)
    *grads, sums = _ops.conv2d_norm_backward.default(*args, added, *wanted)
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
