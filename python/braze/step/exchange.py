"""The average of several processes' gradients, made while a step's backward pass goes on."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from braze._ops._common import FLOAT_DTYPES
from braze._ops.cast import cast_
from braze._ops.mean import mean_
from braze.step.side_stream import follow

# Bytes of the first part that is sent, as of DistributedDataParallel's: the sooner it begins. Of
# no more than the second, all are sent together: that takes hardly longer than the first alone.
_FIRST_BYTES, _TOGETHER_BYTES = 1 << 20, 4 << 20


def takes(replicas):
    """Whether an :class:`Exchange` does what a DistributedDataParallel is asked to do.

    The module exchanges gradients as soon as autograd has handed them over, so that none may be
    made later or by other streams, copies each by a launch of its own, and has to be called eleven
    times before a capture. Where it does something else than averaging all gradients, it is left to
    that."""
    own = replicas.__dict__
    others = "_comm_hooks", "mixed_precision", "_delay_all_reduce_params", "static_graph"
    if any(own.get(name) for name in (*others, "find_unused_parameters", "_use_python_reducer")):
        return False
    embeddings = nn.Embedding, nn.EmbeddingBag
    if any(isinstance(m, embeddings) and m.sparse for m in replicas.modules()):
        return False
    return not replicas._join_config.enable and all(map(_is_plain, replicas.parameters()))


def _is_plain(p):
    """Whether a parameter has numbers that can be averaged, in as much memory as they need, in
    whatever order, is no DTensor, and has no update within the backward pass."""
    if not p.is_floating_point() or hasattr(p, "_in_backward_optimizers"):
        return False
    if type(p.detach()) is not torch.Tensor:
        return False
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Bucket:
    """Gradients that are sent together.

    Args:
        params: theirs, of one dtype.
    """

    def __init__(self, params):
        self.params, self.waiting = params, len(params)
        count = sum(p.numel() for p in params)
        self.flat = torch.zeros(count, dtype=params[0].dtype, device=params[0].device)
        #: where their averages lie
        self.views = list(map(_laid_out, self.flat.split([p.numel() for p in params]), params))


def _laid_out(flat, like):
    """A dense tensor's elements, in the order of those of another one in memory."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def _alike(to, grad):
    """Whether a cast may copy one to the other: their elements lie in the same order."""
    strides = zip(to.shape, to.stride(), grad.stride(), strict=True)
    return {to.dtype, grad.dtype} <= _CAST and all(n == 1 or a == b for n, a, b in strides)


def _grouped(key, *lists):
    """(key, lists) of the places at which `key` of their tensors is the same."""
    groups = {}
    for tensors in zip(*lists, strict=True):
        groups.setdefault(key(*tensors), []).append(tensors)
    return [(of, *map(list, zip(*group, strict=True))) for of, group in groups.items()]


def _as_halves(tensors):
    """The same bytes of dense tensors, each in one dimension."""
    return [t.as_strided((t.numel(),), (1,)).view(torch.float16) for t in tensors]


def _pack(parts, grads):
    """Copies gradients to parts of their dtypes, in one launch where they lie alike."""
    for lie_alike, to, sources in _grouped(_alike, parts, grads):
        if lie_alike:
            cast_(_as_halves(to), _as_halves(sources))
        else:
            torch._foreach_copy_(to, sources)


def _copy(to, grads):
    """Copies gradients in a launch for each dtype that they have."""
    kind = lambda view, grad: (view.dtype, grad.dtype, _alike(view, grad))  # noqa: E731
    for (*_, alike), views, sources in _grouped(kind, to, grads):
        (cast_ if alike else torch._foreach_copy_)(views, sources)


class _Rows:
    """How gradients lie in a row of bytes, each from a multiple of 16 on.

    Args:
        grads: what is to be sent.
        views: they are laid out as these.
    """

    def __init__(self, grads, views):
        self._grads, self._views, self._begins, self.bytes = grads, views, [], 0
        for grad in grads:
            self._begins.append(self.bytes)
            self.bytes += -(-grad.nbytes // 16) * 16

    def parts(self, row):
        """A row's gradients."""
        parts = []
        for begin, grad, view in zip(self._begins, self._grads, self._views, strict=True):
            part = row[begin : begin + grad.nbytes].view(grad.dtype)
            parts.append(_laid_out(part, view))
        return parts


_CAST = frozenset(FLOAT_DTYPES)


class Exchange:
    """Of one DistributedDataParallel, whose parameters' gradients and buffers it sends.

    Gradients go in buckets of that module's sizes, the last layers' first, as soon as all of one
    are there; on a GPU on a stream of its own, which waits for the side stream on which gradients
    are made (:mod:`braze.step.side_stream`), while the main stream waits for neither. Each becomes
    a part of its bucket, in memory that stays the same.

    Two processes send gradients of 16 bits as such, and each averages both's: half of the bytes of
    a sum in float32, and the same mean. Of more, each would get all the others'.

    Args:
        group: the processes'.
        most_bytes: of a bucket.
    """

    def __init__(self, group, most_bytes):
        self._group, self._ranks = group, dist.get_world_size(group)
        # What is sent counts, and of two processes that is mostly half.
        self._most_bytes = most_bytes * (2 if self._ranks == 2 else 1)
        self._params, self._buckets, self._of = [], [], {}
        self._next, self._side, self._stream = 0, None, None
        # (Work, what `mean_` is given behind it). Kept until the next step: a thread of Gloo that
        # lets go of the last one needs the interpreter, which may be ending and wait for that
        # thread.
        self._sent = []

    @torch.no_grad()
    def begin(self, replicas):
        """Before a forward pass: takes the parameters of which gradients are expected, and sends
        the first process's buffers to all where the module would do that, which it then does
        not."""
        ignored = replicas.parameters_to_ignore
        named = replicas.module.named_parameters()
        self._share_out([p for name, p in named if p.requires_grad and name not in ignored])
        wanted = replicas._check_sync_bufs_pre_fwd()
        replicas.require_forward_param_sync = False
        if not wanted:
            return
        replicas._assign_modules_buffers()
        by_dtype = {}
        for buffer in replicas.modules_buffers:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        source = dist.get_global_rank(self._group, 0)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, source, self._group)
            if dist.get_rank(self._group) > 0:
                parts = flat.split([buffer.numel() for buffer in buffers])
                views = [p.view(b.shape) for p, b in zip(parts, buffers, strict=True)]
                torch._foreach_copy_(buffers, views)

    @contextlib.contextmanager
    def active(self, side):
        """Sends gradients that are made within the block.

        Args:
            side: the :class:`SideStream` that is open, or None.

        Raises:
            RuntimeError: one of them got no gradient.
        """
        self._next, self._side, self._sent = 0, side, []
        for bucket in self._buckets:
            bucket.waiting = len(bucket.params)
        handles = [p.register_post_accumulate_grad_hook(self._arrived) for p in self._params]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._side = None
        if self._next < len(self._buckets):
            raise RuntimeError(
                "TrainStep: a parameter got no gradient, which the other processes wait for; "
                "DistributedDataParallel(find_unused_parameters=True) allows that"
            )

    def bucket_of(self, p):
        """The one that has a parameter's gradient, or None."""
        return self._of.get(id(p))

    def finish(self, side):
        """The main stream waits for what has been sent; parameters get the averages."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for work, mean in self._sent:
            work.wait()
            if mean is not None:
                mean_(*mean)
        for bucket in self._buckets:
            for p, view in zip(bucket.params, bucket.views, strict=True):
                if side is not None:
                    side.sources.pop(p.grad.data_ptr(), None)
                p.grad = view

    def _share_out(self, params):
        if list(map(id, params)) == list(map(id, self._params)):
            return
        if self._stream is None and params and params[0].is_cuda:
            self._stream = torch.cuda.Stream(params[0].device)
        self._params, self._buckets = params, []
        together = sum(p.numel() * p.element_size() for p in params) <= _TOGETHER_BYTES
        part, size, most = [], 0, self._most_bytes if together else _FIRST_BYTES
        for p in reversed(params):
            if part and (size >= most or p.dtype != part[0].dtype):
                self._buckets.append(_Bucket(part))
                part, size, most = [], 0, self._most_bytes
            part.append(p)
            size += p.numel() * p.element_size()
        if part:
            self._buckets.append(_Bucket(part))
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.params}

    def _arrived(self, p):
        self._of[id(p)].waiting -= 1
        # In one order in all processes.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._send(self._buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _send(self, bucket):
        sources = self._side.sources if self._side is not None else {}
        grads = [sources.get(p.grad.data_ptr(), p.grad) for p in bucket.params]
        if self._stream is None:
            self._average(bucket, grads)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        follow(grads[0], self._stream)
        with torch.cuda.stream(self._stream):
            self._average(bucket, grads)

    def _average(self, bucket, grads):
        rows = _Rows(grads, bucket.views)
        if self._gathers(bucket, grads, rows.bytes):
            work, mean = self._gather(bucket, grads, rows)
        else:
            work, mean = self._sum(bucket, grads), None
        if work is not None:
            self._sent.append((work, mean))
        elif mean is not None:  # the current stream waits for the work
            mean_(*mean)

    def _sum(self, bucket, grads):
        _copy(bucket.views, grads)
        operation = dist.ReduceOp.SUM
        if self._group._get_backend(bucket.flat.device).name() == "nccl":
            operation = dist.ReduceOp.AVG  # which multiplies on the way
        else:
            bucket.flat.mul_(1 / self._ranks)
        on_cpu = self._stream is None
        return dist.all_reduce(bucket.flat, operation, self._group, async_op=on_cpu)

    def _gathers(self, bucket, grads, row_bytes):
        """Whether these gradients are gathered: that saves a quarter of the bytes and more."""
        known = _CAST.issuperset([bucket.flat.dtype, *(grad.dtype for grad in grads)])
        return self._ranks == 2 and known and row_bytes <= 0.75 * bucket.flat.nbytes

    def _gather(self, bucket, grads, rows):
        """Returns the work, and what :func:`mean_` is given behind it."""
        both = torch.empty(2, rows.bytes, dtype=torch.uint8, device=bucket.flat.device)
        own, on_cpu = both[dist.get_rank(self._group)], self._stream is None
        _pack(rows.parts(own), grads)
        work = dist.all_gather_into_tensor(both.view(-1), own, self._group, async_op=on_cpu)
        return work, (bucket.views, *map(rows.parts, both))
