"""Results that a backward pass makes again instead of keeping them, of what is kept anyway.

A block of convolution, batch norm and ReLU keeps its convolution's output and the statistics; its
result follows from these. Whoever reads the result and needs it in the backward asks
:func:`again_of`, and keeps what that returns in its place (Chen et al., Training Deep Nets with
Sublinear Memory Cost, 2016; Rota Bulò et al., In-Place Activated BatchNorm, 2018).
"""

import torch

from braze._ops._common import below_autograd, maker_of, with_derivatives_of

_ops = torch.ops.braze


class Again:
    """A block's result, for the backwards of its readers.

    Args:
        node: of the block, whose class has ``made_again(node)``, the result with its derivatives,
            and ``kept_of(node)``, the convolution's output and the statistics.
    """

    __slots__ = ("_kept", "_node", "_readers", "_version")

    def __init__(self, node):
        self._node, self._kept, self._readers = node, None, 0

    def claim(self, tensor):
        """By each reader, in its forward. It pays for one: of the second one on it is kept."""
        self._readers += 1
        if self._readers == 2:
            self._kept, self._version = tensor, tensor._version

    def tensor(self):
        """The result; with its derivatives where these may be asked for."""
        if self._kept is not None:
            if self._kept._version != self._version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {list(self._kept.shape)}"
                )
            return self._kept
        function = type(self._node)._forward_cls
        with below_autograd():
            value = _ops.bn_relu2d_again.default(*function.kept_of(self._node))
        if not torch.is_grad_enabled():
            return value
        return with_derivatives_of(value, function.made_again(self._node))


def offer_again(result):
    """Lets readers of `result` have it made again, where a class made it that knows how to."""
    function = maker_of(result, "made_again")
    if function is not None and function.may_be_made_again(result.grad_fn):
        result._braze_again = Again(result.grad_fn)


def again_of(tensor):
    """What a reader keeps in the place of `tensor`: an :class:`Again`, claimed, or None."""
    again = getattr(tensor, "_braze_again", None)
    if again is not None:
        again.claim(tensor)
    return again
