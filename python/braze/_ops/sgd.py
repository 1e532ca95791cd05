"""The SGD update op; used by braze.optim.SGD. Kernels: csrc/cuda/sgd/."""

import torch

from braze._nvtx import ranged
from braze._ops._common import below_autograd, overwrite, register

_op = torch.ops.braze.sgd_.default


def sgd_(params, grads, momentum_buffers, casts, *settings):
    """Updates the lists in place in one launch; see the schema for `settings`.

    Args:
        casts: outputs, which are among `grads`, and inputs of a :func:`braze._ops.cast.cast_` to be
            done before, or in the same launch where that is possible.
    """
    written = (*params, *momentum_buffers, *casts[0])
    with below_autograd():
        overwrite(written, _op, params, grads, momentum_buffers, *casts, *settings)


def _autograd(params, grads, momentum_buffers, outputs, inputs, *settings):
    tensors = (*params, *grads, *outputs, *inputs)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError("braze::sgd_ is not differentiable; call it under torch.no_grad()")
    sgd_(params, grads, momentum_buffers, (outputs, inputs), *settings)


sgd_ = ranged("SGD", sgd_)
register("sgd_", fake=lambda *args, **kwargs: None, autograd=_autograd)
