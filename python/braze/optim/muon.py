"""Muon: one launch for the momentum, products batched over equal shapes, one for the update."""

import functools
import math

import torch

from braze._ops._common import is_channels_last
from braze._ops.matmul import matmul
from braze._ops.muon import muon_momentum_, muon_polynomial_
from braze._ops.sgd import sgd_
from braze.optim import _sharded
from braze.optim._branches import Branches
from braze.optim._multi_tensor import MultiTensor

# Elements of XX' in a batch from which on its product fills a GPU: tiles of 128 x 128 for each of
# an H200's 132 multiprocessors.
_FULL = 132 * 128 * 128
# What a launch in a chain costs in the place of these operations, other chains beside it: 5 us, at
# 300 TFLOP/s.
_LAUNCH_FLOPS = 1.5e9


class Muon(MultiTensor, torch.optim.Muon):
    """``torch.optim.Muon``, and for parameters of more dimensions, as convolutions' weights.

    Those are flattened to matrices of one row for each output channel. Constructor, state dict,
    hooks and learning-rate schedulers are torch's. The momentum of all parameters is one launch,
    the Newton-Schulz iterations are braze's products in bfloat16, batched over parameters of one
    shape, and the update is a launch for each adjustment of the learning rate. A 1-element float32
    or float64 tensor as `lr` on the parameters' device is read by the kernel. Works with
    ``torch.amp.GradScaler`` without waiting for the GPU; the gradients themselves stay scaled.
    Formulas and sources: docs/optimizers.md.

    Args:
        params: of two and more dimensions; use another optimizer for all others.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as
            torch.
        max_grad_norm: as :class:`braze.optim.Adam`.

    Raises:
        ValueError: settings out of range, as torch; a parameter of fewer dimensions.
        RuntimeError: from ``step()``, as :class:`braze.optim.Adam`; a DTensor: what is
            orthogonalised has to be whole. Nothing has been updated then.
    """

    _kinds = ("momentum_buffer",)

    def __init__(
        self,
        params,
        lr=1e-3,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        ns_coefficients=(3.4445, -4.7750, 2.0315),
        eps=1e-7,
        ns_steps=5,
        adjust_lr_fn=None,
        *,
        max_grad_norm=None,
    ):
        self._refuse(weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        settings = lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps
        # torch's checks and defaults; its constructor refuses more than two dimensions.
        stock = torch.optim.Muon([torch.zeros(1, 1)], *settings, adjust_lr_fn)
        torch.optim.Optimizer.__init__(self, params, stock.defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2:
                    raise ValueError(
                        "Muon only supports parameters of 2 dimensions and more whereas we found a "
                        f"parameter with size: {p.size()}"
                    )
        self.max_grad_norm = max_grad_norm

    def _wanted(self, group):
        if group["ns_steps"] >= 100:
            raise ValueError("Number of steps must be less than 100 for computational efficiency")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError("Coefficients must be a tuple of exactly 3 values")
        return (True,)

    def _state_of(self, group, p, wanted):
        if _sharded.is_sharded(p):
            raise RuntimeError(
                "braze.optim.Muon does not support DTensor parameters: it needs whole matrices"
            )
        state = self.state[p]
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
        return [buffer], None, None

    def _update(self, group, launch, shared):
        grad_scale, found_inf, averages, weight, averaged, norm, max_norm, _ = shared
        params = launch.params
        shapes = {}  # rows and columns -> which parameters
        for i, p in enumerate(params):
            shapes.setdefault((p.shape[0], p[0].numel() if len(p) else 0), []).append(i)
        updates, batches = [None] * len(params), []
        for (rows, columns), indices in shapes.items():
            batch = params[0].new_empty(len(indices), rows, columns)
            batches.append(batch)
            for i, matrix in zip(indices, batch, strict=True):
                updates[i] = _laid_out(matrix, params[i])
        muon_momentum_(
            updates,
            launch.grads,
            *launch.states,
            *self._casts(launch),
            group["momentum"],
            group["nesterov"],
            grad_scale,
            found_inf,
            norm,
            max_norm,
        )
        # By how the learning rate is adjusted.
        parts = {}
        results = self._orthogonalize(group, batches)
        for (shape, indices), whitened in zip(shapes.items(), results, strict=True):
            part = parts.setdefault(_adjustment(group["adjust_lr_fn"], *shape), ([], []))
            part[0].extend(indices)
            part[1].extend(_laid_out(m, params[i]) for i, m in zip(indices, whitened, strict=True))
        lr, lr_tensor = self._rate(group, params[0].device)
        for number, (ratio, (indices, steps)) in enumerate(parts.items()):
            casts = [], []
            if steps[0].dtype != params[0].dtype:
                casts = [updates[i] for i in indices], steps
                steps = casts[0]
            sgd_(
                [params[i] for i in indices],
                steps,
                [],
                *casts,
                lr * ratio,
                0.0,
                0.0,
                group["weight_decay"] / ratio,
                False,
                False,
                False,
                lr_tensor if lr_tensor is None or ratio == 1 else lr_tensor * ratio,
                None,
                found_inf,
                None,
                averages and [averages[i] for i in indices],
                weight,
                averaged if number == 0 else None,
            )

    def _orthogonalize(self, group, batches):
        """Of each batch :func:`orthogonalized`."""
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        parts = [
            (functools.partial(orthogonalized, batch, *settings), *_cost(batch, group["ns_steps"]))
            for batch in batches
        ]
        device = batches[0].device
        if device.type != "cuda" or torch.compiler.is_compiling():
            return [function() for function, _, _ in parts]
        branches = self.__dict__.setdefault("_branches", {})
        if device not in branches:
            branches[device] = Branches(device)
        return branches[device].run(parts)


def orthogonalized(batch, coefficients, steps, eps):
    """Newton-Schulz iterations towards the nearest orthogonal matrix of each of a batch.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024): of X, divided by
    its norm, X <- (a I + b A + c A A) X with A = X X'; of a tall one from the other side.

    Args:
        batch: (number, rows, columns).
        coefficients: a, b, c.
        steps: how many iterations.
        eps: the smallest norm.

    Returns:
        The same shape in bfloat16, in which the products are taken.
    """
    accumulated = torch.float32 if batch.element_size() == 2 else batch.dtype
    norms = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True, dtype=accumulated)
    # In one pass: the division is in the norms' dtype, and rounded once.
    x = torch.empty_like(batch, dtype=torch.bfloat16)
    torch.div(batch, norms.clamp_(min=eps), out=x)
    if not x.numel():
        return x
    tall = x.shape[1] > x.shape[2]
    with torch.autocast(x.device.type, enabled=False):
        for _ in range(steps):
            gram = matmul(x.mT, x) if tall else matmul(x, x.mT)
            square = matmul(gram, gram)
            muon_polynomial_(gram, square, *coefficients)
            x = matmul(x, square) if tall else matmul(square, x)
    return x


def _cost(batch, steps):
    """Of its iterations in operations, and whether their products fill a GPU."""
    number, rows, columns = batch.shape
    less, more = sorted((rows, columns))
    launches = 4 * (steps + 1)
    flops = steps * number * less * less * (4 * more + 2 * less)
    return flops + launches * _LAUNCH_FLOPS, number * less * less >= _FULL


def _adjustment(adjust_lr_fn, rows, columns):
    """By what torch.optim.Muon multiplies the learning rate."""
    if rows * columns == 0:
        return 1.0
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _laid_out(matrix, p):
    """The contiguous matrix as a tensor of the parameter's shape, and with its strides where each
    row has its own part of memory: to orthogonalise, the order of columns does not matter."""
    if p.dim() > 2 and p.numel() and is_channels_last(p):
        return matrix.as_strided(p.shape, p.stride(), matrix.storage_offset())
    return matrix.view(p.shape)
