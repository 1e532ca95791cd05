"""Models whose gradients are averaged over several processes, by torch.distributed."""

import contextlib
import functools
import math
import sys
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from braze.step.exchange import Exchange, takes

# DistributedDataParallel times its first ten iterations by events that it asks for, which a capture
# forbids: torch's "CUDA semantics", section on CUDA graphs.
_EAGER_CALLS = 11

#: The stream on which a replica's gradients are accumulated, for those that were asked to.
_STREAMS = weakref.WeakKeyDictionary()


def renew_reducer(replicas):
    """Makes what exchanges a DistributedDataParallel's gradients anew, as unpickling does: the
    nodes that accumulate them go with it, and new ones belong to the stream that is current."""
    state = replicas.__getstate__()
    hooks = state.get("_comm_hooks", [])
    state["_comm_hooks"] = []
    del replicas.reducer, replicas.logger
    replicas.__setstate__(state)
    for hook, of_hook in hooks:
        replicas.register_comm_hook(of_hook, hook)


#: A replica's :class:`Exchange`.
_EXCHANGES = weakref.WeakKeyDictionary()

#: Graphs that have exchanges in them.
_EXCHANGING = weakref.WeakSet()


def forget_before_groups_end(graphs):
    """Has the end of a process group first drop the graphs that exchange gradients.

    NCCL lets go of a communicator only when no graph has its kernels any more: it would wait for
    ever for a script whose step is still there. torch has no hook for that; ``shutdown`` of a group
    is what its ``destroy_process_group`` calls, by whatever name a script has that.

    Args:
        graphs: has ``forget()``; no reference to it is kept.
    """
    _EXCHANGING.add(graphs)
    shutdown = dist.ProcessGroup.shutdown
    if getattr(shutdown, "_forgets_graphs", False):
        return

    @functools.wraps(shutdown)
    def forget_and_shutdown(group, *args, **kwargs):
        for graphs in list(_EXCHANGING):
            graphs.forget()
        return shutdown(group, *args, **kwargs)

    forget_and_shutdown._forgets_graphs = True
    dist.ProcessGroup.shutdown = forget_and_shutdown


def model_state(model):
    """A model's ``state_dict()``, of a DistributedDataParallel's that of the model in it: it fits
    one process alone, too."""
    return _replicated(model).state_dict()


def load_model_state(model, state):
    """Loads a :func:`model_state`, or the ``state_dict()`` of a DistributedDataParallel."""
    model = _replicated(model)
    prefix = "module."
    if all(name.startswith(prefix) for name in state) and not all(
        name.startswith(prefix) for name in model.state_dict()
    ):
        wrapper = torch.nn.Module()
        wrapper.module = model
        model = wrapper
    model.load_state_dict(state)


def _replicated(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


class Ranks:
    """What of a model belongs to all ranks.

    Args:
        modules: the model's.
        exchanges: whether gradients may be exchanged here, in the place of torch's replicas: there
            is one backward pass in each :meth:`micro_step`, within :meth:`exchanging`.
    """

    def __init__(self, modules, exchanges=False):
        fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody has it without this import
        kinds = tuple(
            getattr(fsdp, name)
            for name in ("FSDPModule", "FullyShardedDataParallel")
            if hasattr(fsdp, name)
        )
        self._replicated = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._sharded = any(isinstance(m, kinds) for m in modules)
        self._may_exchange = exchanges and not self._sharded
        self._exchanging = []  # within the last micro-step of a window

    def _exchanges(self):
        """Replicas, each with the :class:`Exchange` that does what it would; of all or of none."""
        if not self._may_exchange or not all(map(takes, self._replicated)):
            return []
        for replicas in self._replicated:
            if replicas not in _EXCHANGES:
                _EXCHANGES[replicas] = Exchange(replicas.process_group, replicas.bucket_bytes_cap)
        return [(replicas, _EXCHANGES[replicas]) for replicas in self._replicated]

    def are_several(self):
        """Whether the model belongs to several ranks."""
        return bool(self._replicated) or self._sharded

    def read_gradients(self):
        """Whether gradients are read as soon as they are made, within the backward pass."""
        return self.are_several() and not self._exchanges()

    def accumulate_on(self, stream):
        """Lets replicas accumulate their gradients on a stream that is to be captured.

        They do so on the stream that was current when the model was wrapped, mostly the default
        one, which no capture may touch. Replicas of a part of the processes, and those with a mixed
        precision of their own, cannot be renewed: they stay as they were made."""
        for replicas in self._replicated:
            renewable = replicas.process_group == dist.group.WORLD and not replicas.mixed_precision
            known = _STREAMS.get(replicas)
            # (A stream is neither equal to None nor unequal.)
            if renewable and (known is None or known != stream):
                with torch.cuda.stream(stream):
                    renew_reducer(replicas)
                _STREAMS[replicas] = stream

    def agree(self, succeeded):
        """Whether all ranks have `succeeded`: each asks at the same place. One that failed alone
        would leave the others waiting in their next exchange."""
        if not self._replicated:
            return succeeded
        replicas = self._replicated[0]
        flag = torch.tensor(int(succeeded), device=next(replicas.parameters()).device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=replicas.process_group)
        return bool(flag)

    def keep(self, graphs):
        """To be called with graphs that may have exchanges in them."""
        if self._replicated:
            forget_before_groups_end(graphs)

    def eager_calls(self):
        """How many calls of a kind run eagerly before one is captured, at least.

        Sharded parameters get other memory in every step, which no graph could follow: never."""
        if self._sharded:
            return math.inf
        return _EAGER_CALLS if self._replicated and not self._exchanges() else 0

    @contextlib.contextmanager
    def micro_step(self, last):
        """Around a forward and a backward pass: replicas exchange gradients in the `last` one of an
        accumulation window. (Sharded gradients are exchanged in each, so that none lie whole in
        memory.)"""
        exchanges = self._exchanges()
        with contextlib.ExitStack() as stack:
            for module in self._replicated:
                if exchanges or not last:
                    stack.enter_context(module.no_sync())
            for replicas, exchange in exchanges:
                exchange.begin(replicas)
            self._exchanging = [exchange for _, exchange in exchanges if last]
            try:
                yield
            finally:
                self._exchanging = []
                for replicas, _ in exchanges:  # as behind its own exchange, or none
                    replicas.require_forward_param_sync = last

    def bucket_of(self, p):
        """Within :meth:`micro_step`: the gradients with which a parameter's is sent, or None."""
        buckets = (exchange.bucket_of(p) for exchange in self._exchanging)
        return next(filter(None, buckets), None)

    @contextlib.contextmanager
    def exchanging(self, side):
        """Within :meth:`micro_step` around the backward pass alone; `side` is its
        :class:`SideStream` or None."""
        with contextlib.ExitStack() as stack:
            for exchange in self._exchanging:
                stack.enter_context(exchange.active(side))
            yield

    def finish(self, side):
        """Behind it, within :meth:`micro_step`: gradients are the averages of all ranks."""
        for exchange in self._exchanging:
            exchange.finish(side)
