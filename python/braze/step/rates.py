"""The hyper-parameters of a captured step: learning rates on the device, the rest frozen."""

import contextlib
from typing import NamedTuple

import torch

from braze._C import read, reads
from braze.optim import MultiTensor

_NOT_READ_IN_A_STEP = ("params", "param_names", "initial_lr", "max_lr", "min_lr")
_PLAIN = (int, float, bool, str, type(None))
_ABSENT = object()


class Rates:
    """Learning rates on the device, so that a graph follows their changes.

    The optimizer's groups keep their numbers, which schedulers and users change; only while a step
    is captured a tensor stands in their place. Rates that the optimizer cannot read there are part
    of :meth:`key`: a change needs another graph.
    """

    def __init__(self, optimizer, device):
        self.device = device
        self._optimizer = optimizer
        self._held = {}  # index of the group, dtype -> [tensor, the number in it]
        self._known = []  # of each group a _Known

    def _dtype(self, group):
        if isinstance(group.get("lr"), torch.Tensor) or "lr" not in group:
            return None
        if isinstance(self._optimizer, MultiTensor):
            return torch.float64
        # torch's optimizers compute with the unrounded number, but take float32 tensors only.
        exact = torch.are_deterministic_algorithms_enabled()
        follows = group.get("capturable") or group.get("fused")
        return torch.float32 if follows and not exact else None

    def key(self):
        """The hyper-parameters that a graph freezes."""
        groups, exact = self._optimizer.param_groups, torch.are_deterministic_algorithms_enabled()
        if len(self._known) != len(groups):
            self._known = [None] * len(groups)
        frozen = []
        for index, group in enumerate(groups):
            known = self._known[index]
            if known is None or known.exact is not exact or not known.still_holds(group):
                known = self._known[index] = self._know(group, exact)
            frozen.append(known.frozen)
        if isinstance(self._optimizer, MultiTensor):
            frozen.append(self._optimizer.frozen_settings())
        return tuple(frozen)

    def _know(self, group, exact):
        followed = self._dtype(group) is not None
        names = tuple(name for name in group if not (followed and name == "lr"))
        plain = all(
            _is_plain(value) for name, value in group.items() if name not in _NOT_READ_IN_A_STEP
        )
        return _Known(
            exact=exact,
            frozen=self._frozen(group),
            group=group if plain else None,
            size=len(group),
            places=[(group, names)],
            values=[group[name] for name in names],
            rate=group["lr"] if followed else _ABSENT,
        )

    def _frozen(self, group):
        frozen, lr_dtype = [], self._dtype(group)
        for name, value in group.items():
            if name == "lr" and lr_dtype is not None:
                frozen.append(lr_dtype)
            elif name not in _NOT_READ_IN_A_STEP:
                frozen.append(_frozen(value))
        return tuple(frozen)

    def is_plain(self):
        """Whether the last :meth:`key` depends on nothing but which objects are in
        :meth:`places`."""
        return (
            holds_groups(self._optimizer)
            and getattr(self._optimizer, "_average", None) is None
            and all(known.group is not None for known in self._known)
        )

    def places(self):
        """Where the optimizer has its settings, for ``braze._C.read``."""
        groups = self._optimizer.param_groups
        own = vars(self._optimizer), ("param_groups", "max_grad_norm", "_average")
        return [own, (groups, None), *[(group, None) for group in groups]]

    @contextlib.contextmanager
    def on_device(self):
        """Groups hold tensors within this block.

        Raises:
            RuntimeError: the block has changed a learning rate.
        """
        replaced = []
        for index, group in enumerate(self._optimizer.param_groups):
            dtype = self._dtype(group)
            if dtype is not None:
                number = group["lr"]
                held = self._held.get((index, dtype))
                if held is None:
                    tensor = torch.full((), number, dtype=dtype, device=self.device)
                    held = self._held[index, dtype] = [tensor, number]
                replaced.append((group, number, held, _version(held[0])))
                group["lr"] = held[0]
        changed = False
        try:
            yield
        finally:
            for group, number, held, version in replaced:
                if group["lr"] is not held[0] or _version(held[0]) != version:
                    changed, held[1] = True, None  # to be written anew
                group["lr"] = number
        if changed:
            raise RuntimeError(
                f"a learning rate of {type(self._optimizer).__name__} is changed within it, which "
                "a graph would not repeat; change it, or step the scheduler, between calls"
            )

    def write(self):
        """Brings the tensors up to date, before a replay."""
        groups = self._optimizer.param_groups
        for (index, _), held in self._held.items():
            lr = groups[index]["lr"]
            if not isinstance(lr, torch.Tensor) and held[1] != lr:
                held[0].fill_(lr)
                held[1] = lr


def holds_groups(optimizer):
    """Whether its groups are an attribute of its own: some that wrap others read theirs."""
    return "param_groups" in getattr(optimizer, "__dict__", ())


def _version(tensor):
    return 0 if tensor.is_inference() else tensor._version


class _Seen(NamedTuple):
    """What the last call found of all optimizers: most calls find the same objects."""

    exact: bool
    key: tuple
    places: list  # for braze._C.reads
    values: list


class AllRates:
    """The :class:`Rates` of several optimizers. While none of their groups changes, one comparison
    is made for all of them together.

    Args:
        optimizers: a list.
        device: where a graph reads the rates.
    """

    def __init__(self, optimizers, device):
        self._rates = [Rates(optimizer, device) for optimizer in optimizers]
        self._seen = None
        self._written = False  # whether the tensors hold what was seen

    def key(self):
        """The optimizers' keys."""
        seen, exact = self._seen, torch.are_deterministic_algorithms_enabled()
        if seen and seen.exact is exact and reads(seen.places, _ABSENT, seen.values):
            return seen.key
        key, self._seen, self._written = tuple([r.key() for r in self._rates]), None, False
        if all(rates.is_plain() for rates in self._rates):
            places = [place for rates in self._rates for place in rates.places()]
            self._seen = _Seen(exact, key, places, read(places, _ABSENT))
        return key

    @contextlib.contextmanager
    def on_device(self):
        """As :meth:`Rates.on_device`, for all."""
        self._written = False
        with contextlib.ExitStack() as stack:
            for rates in self._rates:
                stack.enter_context(rates.on_device())
            yield

    def write(self):
        """As :meth:`Rates.write`, behind :meth:`key`."""
        if self._seen is None or not self._written:
            for rates in self._rates:
                rates.write()
            self._written = True


class _Known(NamedTuple):
    """A group of plain values as it was read last: most calls find the same objects in it."""

    exact: bool  # whether the numbers were to be exact
    frozen: tuple  # its part of the key
    group: dict  # None: has values whose contents may change
    size: int
    places: list  # for braze._C.reads: all but a learning rate that is not part of the key
    values: list  # what is there
    rate: object  # this learning rate; _ABSENT: there is none

    def still_holds(self, group):
        if group is not self.group or len(group) != self.size:
            return False
        rate = _ABSENT if self.rate is _ABSENT else group.get("lr", _ABSENT)
        followed = rate is self.rate or type(rate) is float
        return followed and reads(self.places, _ABSENT, self.values)


def _is_plain(value):
    return type(value) in _PLAIN or (type(value) is tuple and all(type(v) in _PLAIN for v in value))


def _frozen(value):
    """A hashable stand-in: of a GPU tensor its place, of all else the value."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.is_cuda else tuple(value.flatten().tolist())
    if isinstance(value, dict):
        value = list(value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
