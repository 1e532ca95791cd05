"""Muon: one launch for the momentum, products batched over parameters, one for the update."""

import functools
import itertools
import math

import torch

from braze._ops._common import is_channels_last
from braze._ops.matmul import matmul
from braze._ops.muon import (
    muon_momentum_,
    muon_normalize_,
    muon_polynomial_,
    muon_unpad_,
    squares_for,
)
from braze._ops.sgd import sgd_
from braze.optim import _sharded
from braze.optim._branches import Branches
from braze.optim._multi_tensor import MultiTensor

# Elements of XX' in a batch from which on its product fills a GPU: tiles of 128 x 128 for each of
# an H200's 132 multiprocessors.
_FULL = 132 * 128 * 128
# What a launch in a chain costs in the place of these operations, other chains beside it: 5 us, at
# 300 TFLOP/s.
_CHAINED_FLOPS = 1.5e9
# What one costs all chains together: kernels of a CUDA graph start one after the other, about one
# in 1.6 us however many branches there are.
_LAUNCH_FLOPS = 0.5e9
# A GPU's fast kernels for products in 16 bits want rows of 16 bytes.
_MULTIPLE = 8
# Iterations that products of an extent's square take on their own, without the matrix: roundings
# of float16 grow by up to the first coefficient's square in each.
_MOST_APART = 3
# Coefficients (the first one, the sum of all) whose polynomials, so many of them multiplied, stay
# within float16.
_LARGEST, _LARGEST_SUM = 8, 16


class Muon(MultiTensor, torch.optim.Muon):
    """``torch.optim.Muon``, and for parameters of more dimensions, as convolutions' weights.

    Those are flattened to matrices of one row for each output channel. Constructor, state dict,
    hooks and learning-rate schedulers are torch's. The momentum of all parameters is one launch,
    the Newton-Schulz iterations are braze's products in bfloat16 (of float32 matrices on a GPU in
    float16), batched over parameters of one shape and on a GPU of similar ones, and the update is a
    launch for each adjustment of the learning rate. A 1-element float32 or float64 tensor as `lr`
    on the parameters' device is read by the kernel. Works with ``torch.amp.GradScaler`` without
    waiting for the GPU; the gradients themselves stay scaled. Formulas and sources:
    docs/optimizers.md.

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
        shapes = [(p.shape[0], math.prod(p.shape[1:])) for p in params]
        updates = [_by_rows(p) for p in params]
        batched = self._batched(group, shapes, params[0].device)
        # In the order of the batches, for which the norms are wanted; behind them what is in none.
        order = [i for members, *_ in batched for i in members]
        order += sorted({*range(len(params))} - {*order})
        ordered = [updates[i] for i in order]
        squares = squares_for(ordered)
        muon_momentum_(
            ordered,
            [launch.grads[i] for i in order],
            *([states[i] for i in order] for states in launch.states),
            *self._casts(launch),
            group["momentum"],
            group["nesterov"],
            grad_scale,
            found_inf,
            norm,
            max_norm,
            squares,
        )
        half = _in_float16(params[0], group["ns_coefficients"])
        dtype = torch.float16 if half else torch.bfloat16
        whitened = self._orthogonalize(group, updates, batched, dtype, squares)
        # By how the learning rate is adjusted.
        parts = {}
        for i, shape in enumerate(shapes):
            part = parts.setdefault(_adjustment(group["adjust_lr_fn"], *shape), ([], []))
            part[0].append(i)
            part[1].append(whitened[i])
        lr, lr_tensor = self._rate(group, params[0].device)
        for number, (ratio, (indices, steps)) in enumerate(parts.items()):
            casts = [], []
            if params[0].dtype not in (torch.float32, torch.bfloat16):
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
                None,
                0.0,
                True,
            )

    def _batched(self, group, shapes, device):
        """The batches of :func:`grouped`."""
        costs = (_LAUNCH_FLOPS, _MULTIPLE) if device.type == "cuda" else (0, 1)
        of = grouped if torch.compiler.is_compiling() else _grouped_before
        return of(tuple(shapes), group["ns_steps"], *costs)

    def _orthogonalize(self, group, updates, batched, dtype, squares):
        """Of each update, a matrix, :func:`orthogonalized`: in `dtype`, with the update's strides.
        squares: of the updates in the order of their batches."""
        device, steps = updates[0].device, group["ns_steps"]
        on_gpu, compiling = device.type == "cuda", torch.compiler.is_compiling()
        batches = _into_batches(updates, batched, group["eps"], dtype, squares)
        run = iterated_apart if dtype == torch.float16 else orthogonalized
        parts = [
            (functools.partial(run, batch, group["ns_coefficients"], steps), *_cost(batch, steps))
            for batch in batches
        ]
        if on_gpu and not compiling:
            branches = self.__dict__.setdefault("_branches", {})
            if device not in branches:
                branches[device] = Branches(device)
            results = branches[device].run(parts)
        else:
            results = [function() for function, _, _ in parts]
        return _out_of_batches(updates, batched, results, dtype)


def grouped(shapes, steps, launch_flops, multiple):
    """Which matrices share a batch: those of one shape, and others with zeros around them, which
    stay zeros and change nothing else, where that saves launches which cost more.

    Greedily: the two batches first of which one saves most. Tall matrices are not put together with
    wide ones, whose products are in another order.

    Args:
        shapes: rows and columns of each matrix; those without elements are in no batch.
        steps: how many iterations.
        launch_flops: what a launch costs in the place of these operations.
        multiple: of what the extents of a batch are.

    Returns:
        (numbers of the matrices, rows, columns) of each batch.
    """
    groups = {}  # tall or not, rows, columns -> numbers
    for i, (rows, columns) in enumerate(shapes):
        if rows and columns:
            extents = (-(-extent // multiple) * multiple for extent in (rows, columns))
            groups.setdefault((rows > columns, *extents), []).append(i)

    def cost(number, rows, columns):
        launches = _launches(rows, columns, steps)
        return _flops(number, rows, columns, steps) + launches * launch_flops

    def together(one, other):
        return one[0], max(one[1], other[1]), max(one[2], other[2])

    def saved(one, other):
        if one[0] != other[0]:
            return 0
        numbers = len(groups[one]), len(groups[other])
        apart = cost(numbers[0], *one[1:]) + cost(numbers[1], *other[1:])
        return apart - cost(sum(numbers), *together(one, other)[1:])

    savings = {pair: saved(*pair) for pair in itertools.combinations(groups, 2)}
    while savings:
        pair = max(savings, key=savings.get)
        if savings[pair] <= 0:
            break
        members = [i for key in pair for i in groups.pop(key)]
        merged = together(*pair)
        # Of one of the two, or of neither; a third may have had that shape.
        groups[merged] = groups.get(merged, []) + members
        savings = {p: s for p, s in savings.items() if not {*p} & {*pair, merged}}
        for key in groups:
            if key != merged:
                savings[key, merged] = saved(key, merged)
    return tuple((tuple(members), *key[1:]) for key, members in groups.items())


_grouped_before = functools.lru_cache(maxsize=32)(grouped)


def _into_batches(updates, batched, eps, dtype, squares):
    """The batches of :func:`grouped` in `dtype`, each matrix divided by its norm, or by `eps`."""
    batches = [
        torch.empty(len(members), rows, columns, dtype=dtype, device=updates[members[0]].device)
        for members, rows, columns in batched
    ]
    matrices = [matrix for batch in batches for matrix in batch.unbind()]
    if matrices:
        inputs = [updates[i] for members, *_ in batched for i in members]
        muon_normalize_(matrices, inputs, eps, squares)
    return batches


def _out_of_batches(updates, batched, batches, dtype):
    """For each update its matrix of the batches, without copies where no columns were added."""
    results = [None] * len(updates)
    padded = []
    for (members, _, columns), batch in zip(batched, batches, strict=True):
        for i, matrix in zip(members, batch.unbind(), strict=True):
            update = updates[i]
            if len(update) * columns == update.numel():  # its rows are the first, without gaps
                strides, offset = update.stride(), matrix.storage_offset()
                results[i] = matrix.as_strided(update.shape, strides, offset)
            else:
                results[i] = torch.empty_like(update, dtype=dtype)
                padded.append((results[i], matrix))
    if padded:
        muon_unpad_(*map(list, zip(*padded, strict=True)))
    for i, update in enumerate(updates):
        if results[i] is None:  # nothing in it
            results[i] = torch.empty_like(update, dtype=dtype)
    return results


def orthogonalized(x, coefficients, steps):
    """Newton-Schulz iterations towards the nearest orthogonal matrix of each of a batch.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024): of X, divided by
    its norm, X <- (a I + b A + c A A) X with A = X X'; of a tall one from the other side.

    Args:
        x: (number, rows, columns), in 16 bits, divided by their norms.
        coefficients: a, b, c.
        steps: how many iterations.

    Returns:
        The same shape.
    """
    tall = x.shape[1] > x.shape[2]
    with torch.autocast(x.device.type, enabled=False):
        for _ in range(steps):
            gram = matmul(x.mT, x) if tall else matmul(x, x.mT)
            square = matmul(gram, gram)
            muon_polynomial_(gram, square, *coefficients)
            x = matmul(x, square) if tall else matmul(square, x)
    return x


def _in_float16(param, coefficients):
    """Whether the iterations run in float16: where they may run apart from the matrices, and the
    update takes any 16 bits."""
    fits = abs(coefficients[0]) <= _LARGEST and sum(map(abs, coefficients)) <= _LARGEST_SUM
    return param.is_cuda and param.dtype == torch.float32 and fits


def _pays_apart(rows, columns):
    """Whether fewer operations are needed by :func:`iterated_apart`'s way."""
    return 2 * max(rows, columns) > 3 * min(rows, columns)


def iterated_apart(x, coefficients, steps):
    """As :func:`orthogonalized`, in float16 and with fewer operations where one extent is larger.

    X <- P X with P = a I + b A + c A A makes of A = X X' the product P A P, since P and A commute.
    So a few iterations need products of A's size only, of which one is the product of all P, and X
    is multiplied once. Roundings of A grow in that; A is made anew of X every third time, for which
    an error no larger than that of bfloat16's usual iterations was measured, whatever the spectrum
    (docs/optimizers.md).

    Args:
        x: (number, rows, columns), in float16, divided by their norms.
        coefficients, steps: as there.

    Returns:
        The same shape.
    """
    if not _pays_apart(*x.shape[1:]):
        return orthogonalized(x, coefficients, steps)
    tall = x.shape[1] > x.shape[2]
    with torch.autocast(x.device.type, enabled=False):
        while steps > 0:
            apart = min(steps, _MOST_APART)
            steps -= apart
            gram = matmul(x.mT, x) if tall else matmul(x, x.mT)
            product = None
            for left in range(apart - 1, -1, -1):
                polynomial = matmul(gram, gram)
                muon_polynomial_(gram, polynomial, *coefficients)
                product = polynomial if product is None else matmul(polynomial, product)
                if left > 0:
                    gram = matmul(polynomial, matmul(gram, polynomial))
            x = matmul(x, product) if tall else matmul(product, x)
    return x


def _flops(number, rows, columns, steps):
    """Operations of the iterations, as a GPU runs those of float32 parameters."""
    less, more = sorted((rows, columns))
    if not _pays_apart(rows, columns):
        return steps * number * less * less * (4 * more + 2 * less)
    begun = -(-steps // _MOST_APART)  # times that the matrices are multiplied
    return number * less * less * (4 * more * begun + 2 * less * (4 * steps - 3 * begun))


def _launches(rows, columns, steps):
    """Of the iterations of a batch, likewise."""
    return 5 * steps - -(-steps // _MOST_APART) if _pays_apart(rows, columns) else 4 * steps


def _cost(batch, steps):
    """Of its iterations in operations, and whether their products fill a GPU."""
    number, rows, columns = batch.shape
    launches = _launches(rows, columns, steps)
    cost = _flops(number, rows, columns, steps) + launches * _CHAINED_FLOPS
    return cost, number * min(rows, columns) ** 2 >= _FULL


def _adjustment(adjust_lr_fn, rows, columns):
    """By what torch.optim.Muon multiplies the learning rate."""
    if rows * columns == 0:
        return 1.0
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _by_rows(p):
    """Memory for an update: with the parameter's strides where each row has its own part of it (to
    orthogonalise, the order of columns does not matter), else contiguous."""
    last = p.dim() > 2 and p.numel() and is_channels_last(p)
    return torch.empty_like(
        p, memory_format=torch.preserve_format if last else torch.contiguous_format
    )
