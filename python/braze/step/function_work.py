"""A captured function as work for graphs: what it returns, and what it leaves behind."""

import contextlib
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from braze._step_scope import FunctionScope
from braze.step import places
from braze.step.branches import Slots
from braze.step.casts import CastsWithoutGradients
from braze.step.gradients import Gradients
from braze.step.graphs import Work, load, tree
from braze.step.side_stream import OfFunction
from braze.step.surroundings import PLAIN


class FunctionCall:
    """One call: its arguments flattened."""

    __slots__ = "is_new", "kind", "known", "leaves", "ran_eagerly", "spec"
    copied = True

    def __init__(self, leaves, spec):
        self.leaves, self.spec = leaves, spec
        self.kind = None
        self.known = None  # a :class:`braze.step.gradients.Known`
        self.ran_eagerly = self.is_new = False


class _Kept(NamedTuple):
    """What a graph of a function leaves."""

    leaves: list  # of what it returns: tensors in the graph's memory, values; of scalars the place
    spec: object  # None: it is one leaf
    slots: dict  # dtype -> Slots of the scalars
    left: list  # gradients: as braze.step.gradients.Gradients has it
    written: list  # parameters and other tensors that it writes to
    arguments: list  # indices of arguments that it writes to


class _Scalar(NamedTuple):
    dtype: torch.dtype
    index: int  # among the scalars of that dtype


class FunctionWork(Work):
    """Runs and records a function on a GPU.

    Args:
        parts: its :class:`braze.step.function.FunctionParts`.
    """

    noun = "function"

    def __init__(self, parts):
        self._parts = parts
        self.gradients = Gradients(parts)

    def key(self, call, kind):
        call.kind, call.known = kind, self.gradients.known(kind)
        return self.gradients.key(call.known)

    def is_eager(self, entry, call):
        return call.known.lacks_one()

    def before_eager(self, call):
        self.gradients.bring(call.known)

    def eager(self, entry, call):
        if entry.leaves is None:
            entry.leaves = places.unfilled(call.leaves, self._parts.device)
        load(entry.leaves, call.leaves)
        versions = places.versions_of(entry.leaves)
        result = self.gradients.watch(call.known, lambda: self._run(entry))
        leaves, spec = pytree.tree_flatten(result)
        _copy_back(entry, call, _changed(entry.leaves, versions))
        call.ran_eagerly, call.is_new = True, entry.eager is None
        described = [spec, *map(_described, leaves)]
        if entry.eager is None:
            entry.eager = described
        return pytree.tree_unflatten(lasting(leaves), spec)

    def _run(self, entry):
        leaves, spec = entry.leaves, entry.spec
        args, kwargs = (leaves, {}) if spec is None else tree(leaves, spec)
        if entry.casts is None:
            given = [x for x in entry.leaves if isinstance(x, torch.Tensor)]
            entry.casts = CastsWithoutGradients([*given, *self._parts.tensors()])
        # A cast weight that an enclosing autocast remembers would be that of an earlier call.
        torch.clear_autocast_cache()
        try:
            with FunctionScope(entry.casts):
                result = self._parts.function(*args, **kwargs)
            entry.casts.join()
            return result
        finally:
            entry.casts.drop()
            torch.clear_autocast_cache()

    def is_full(self, entry):
        slots = entry.kept.slots
        return bool(slots) and any(one.full() for one in slots.values())

    def ways(self, entry):
        """With gradients on a side stream, and without, for where one of them is read too early."""
        parts = self._parts
        if not parts.ranks.read_gradients():
            yield OfFunction(parts.device, parts.params)
        yield None

    def prepare(self, entry, call, way):
        self.gradients.bring(call.known)
        counts = {}
        for described in entry.eager[1:]:
            if _is_scalar(described):
                dtype = described[1]
                counts[dtype] = counts.get(dtype, 0) + 1
        slots = {dtype: Slots(dtype, self._parts.device, count) for dtype, count in counts.items()}
        may_write = [t for t in (*self._parts.params, *self._parts.tensors())]
        versions = places.versions_of(may_write), places.versions_of(entry.leaves)
        return way, slots, [p.grad for p in self._parts.params], may_write, versions

    def record(self, entry, call, prepared):
        way, slots, *_ = prepared
        with way.active() if way else contextlib.nullcontext():
            leaves, spec = pytree.tree_flatten(self._run(entry))
        scalars = {}
        for leaf in leaves:
            if _is_scalar(_described(leaf)):
                scalars.setdefault(leaf.dtype, []).append(leaf.detach())
        for dtype, found in scalars.items():
            if dtype in slots and len(found) == slots[dtype].width:
                stacked = torch.stack(found) if len(found) > 1 else found[0].reshape(1)
                slots[dtype].write(stacked.unsqueeze(0))
        return leaves, spec

    def finish(self, entry, prepared, recorded):
        way, slots, grads, may_write, (versions, argument_versions) = prepared
        if way and not way.all_arrived():
            return None
        leaves, spec = recorded
        self._check_result(entry.eager, [spec, *map(_described, leaves)])
        counts, kept = {}, []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device != self._parts.device:
                raise RuntimeError(
                    f"it returns a tensor on {leaf.device}, which a replay would not make anew"
                )
            if _is_scalar(_described(leaf)):
                index = counts[leaf.dtype] = counts.get(leaf.dtype, -1) + 1
                kept.append(_Scalar(leaf.dtype, index))
            else:
                kept.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
        written = _changed(may_write, versions)
        return _Kept(
            kept,
            None if spec.is_leaf() else spec,
            slots,
            self.gradients.left(grads),
            [may_write[i] for i in written],
            _changed(entry.leaves, argument_versions),
        )

    def _check_result(self, before, now):
        if len(before) != len(now) or before[0] != now[0]:
            raise RuntimeError("it does not return the same structure each time")
        for a, b in zip(before[1:], now[1:], strict=True):
            if a is not b and not (isinstance(a, _COMPARED) and type(a) is type(b) and a == b):
                raise RuntimeError(
                    f"it returned {_shown(a)} once and {_shown(b)} now, but a replay could return "
                    "the latter only; return a tensor"
                )

    def before_replay(self, entry, call):
        self.gradients.bring(call.known)

    def after_replay(self, entry, call):
        kept = entry.kept
        self.gradients.leave(kept.left, call.known)
        if kept.written:
            torch.autograd.graph.increment_version(kept.written)
        _copy_back(entry, call, kept.arguments)
        rows = {dtype: slots.next().unbind() for dtype, slots in kept.slots.items()}
        leaves = [
            rows[leaf.dtype][leaf.index]
            if type(leaf) is _Scalar
            else (leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
            for leaf in kept.leaves
        ]
        return leaves[0] if kept.spec is None else pytree.tree_unflatten(leaves, kept.spec)


_TENSOR = ("tensor",)
_COMPARED = (*PLAIN, tuple)


def _described(leaf):
    """Of something returned what has to be the same each time. No value is a tuple: those are
    taken apart before."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _TENSOR if leaf.dim() else ("scalar", leaf.dtype)


def _is_scalar(described):
    return isinstance(described, tuple) and described[0] == "scalar"


def _shown(described):
    if not isinstance(described, tuple):
        return repr(described)
    return f"a {described[0]}" + (f" of {described[1]}" if _is_scalar(described) else "")


def lasting(leaves):
    """What is returned of an eager call: without autograd's graph; scalars that stay as they are,
    though the function may have returned a buffer that it goes on to write to."""
    return [
        (leaf.detach() if leaf.dim() else leaf.detach().clone())
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]


def _changed(tensors, versions):
    """Indices of those that have been written to."""
    now = places.versions_of(tensors)
    return [i for i, (a, b) in enumerate(zip(versions, now, strict=True)) if a != b]


def _copy_back(entry, call, indices):
    """Arguments that the function has written to: into the caller's tensors."""
    if indices:
        with torch.no_grad():
            for i in indices:
                call.leaves[i].copy_(entry.leaves[i])
