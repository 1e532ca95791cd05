"""What the ops of optimizers share: lists of tensors that one launch updates in place."""

import torch

from braze._nvtx import ranged
from braze._ops._common import below_autograd, overwrite, register


def update_op(name, states, averages):
    """Registers ``torch.ops.braze.<name>`` and returns the function that optimizers call: the op
    below autograd, which bumps the versions of what it writes.

    Args:
        name: of an op whose arguments are `params`, `grads`, `states` lists of tensors that are
            written, `cast_outputs`, `cast_inputs`, and settings.
        averages: where among the settings the list of averages is, if there is one; their count
            follows two later.
    """
    op = getattr(torch.ops.braze, name).default

    def update(params, grads, *rest):
        kept, outputs = rest[:states], rest[states]
        settings = rest[states + 2 :]
        written = [*params, *outputs]
        for tensors in kept:
            written += tensors
        if averages is not None and settings[averages : averages + 1] not in ((), (None,)):
            written += settings[averages]
            if len(settings) > averages + 2 and settings[averages + 2] is not None:
                written.append(settings[averages + 2])
        with below_autograd():
            if torch.compiler.is_compiling() or any(map(torch.Tensor.is_inference, written)):
                overwrite(written, op, params, grads, *rest)
            else:  # the same, for thousands of tensors
                op(params, grads, *rest)
                torch.autograd.graph.increment_version(written)

    def autograd(params, grads, *rest):
        tensors = (*params, *grads, *rest[states], *rest[states + 1])
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(
                f"braze::{name} is not differentiable; call it under torch.no_grad()"
            )
        update(params, grads, *rest)

    register(name, fake=lambda *args, **kwargs: None, autograd=autograd)
    return ranged(name.removesuffix("_"), update)
