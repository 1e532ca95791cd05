"""TrainStep: a whole training step as one CUDA graph. User page: docs/train_step.md."""

import contextlib
import itertools
import numbers
import operator
import weakref
from typing import NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from braze import _config
from braze._aside import Aside
from braze._capture import HostState, Rates, capture
from braze._nvtx import ranged
from braze._ops.cast import SharedCasts
from braze._ops.cross_entropy import check_errors, expected_gradients
from braze._ops.gather import GatheredMoments
from braze._prefetch import Prefetch
from braze.optim import SGD

# Steps that run eagerly, as true training steps, before their shape is captured: they create what
# the libraries, autograd and the optimizer create lazily.
_EAGER_CALLS = 2
# Shapes and settings whose graphs are kept; the one that has waited longest goes first.
_MAX_ENTRIES = 32
# What a graph's replays leave before it is captured anew, so that no loss is ever overwritten.
_LOSSES = 1 << 19
# Bytes of images in a batch that is gathered beside the step before. A larger one takes from that
# step as much time as it would take from its own (H200: batch 512 in bf16 5 us gained, batch 1024
# nothing, in TF32 12 us lost).
_PREFETCHED = 1 << 20
# They count their steps on the CPU whatever the settings.
_UNCAPTURABLE = (torch.optim.Adafactor, torch.optim.Adagrad)
_NOT_CAPTURED = (
    "TrainStep: this step cannot be captured in a CUDA graph; model and optimizer are unchanged. "
    "The usual cause is code in the model, the loss, a hook or the optimizer that waits for the "
    "GPU: .item(), .cpu(), printing a tensor, `if` on a tensor's value, indexing by a mask. "
    "The cause here: {}"
)


class _Losses:
    """Where a graph's replays leave their losses, each in a place of its own.

    Copying the loss after each replay would make the GPU wait for two launches; the graph does it
    beside the backward pass, on the branch of `stream`.
    """

    def __init__(self, dtype, device, stream):
        with torch.inference_mode(False):  # whose tensors could not be written outside of it
            self._values = torch.empty(_LOSSES, dtype=dtype, device=device)
            self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream = stream
        self._count = 0

    def full(self):
        return self._count == len(self._values)

    def keep(self, loss):
        """Within a capture: copies `loss` on the branch, which has to be joined before it ends."""
        self._stream.wait_stream(torch.cuda.current_stream(loss.device))
        with torch.cuda.stream(self._stream):
            self._values.index_copy_(0, self._place, loss.detach().reshape(1))
            self._place.add_(1)

    def next(self):
        """The loss of a replay."""
        self._count += 1
        return self._values[self._count - 1]


class _Beside(NamedTuple):
    """What a graph does beside the chain of its kernels."""

    stream: torch.cuda.Stream  # of the branch of `losses` and `prefetch`
    losses: _Losses
    prefetch: Prefetch | None
    aside: Aside | None


class _Entry:
    """What belongs to one kind of call: one shape, one set of settings."""

    def __init__(self, leaves, spec, device):
        self.spec = spec
        self.leaves = [
            torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x for x in leaves
        ]
        self.eager_calls = 0
        self.graph = self.losses = self.loss_dtype = self.prefetch = None
        self.buffers = []  # addresses of the model's that the graph reads and writes
        # What a replay leaves, in memory of the graph or of the accumulation buffers.
        self.grad_norm = None
        self.grads = []

    def load(self, leaves):
        for mine, given in zip(self.leaves, leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(given, non_blocking=True)

    def batch(self):
        return self.leaves if self.spec is None else pytree.tree_unflatten(self.leaves, self.spec)


class TrainStep:
    """One training step: forward, loss, backward, clipping, update and zero-grad in one call.

    On a GPU the whole step is one CUDA graph; on the CPU the same calls run eagerly. Every call is
    exactly one step: the first two with a shape run eagerly, the third is captured, and from then
    on it is replayed. The results are those of the uncaptured loop, bit for bit with
    ``torch.use_deterministic_algorithms(True)``.

    After a call ``p.grad`` holds the step's gradient (written, not accumulated; clipped; with a
    `grad_scaler` perhaps still scaled) in memory that the next call overwrites.

    Args:
        model: any ``torch.nn.Module``, its parameters and buffers on one device.
        loss_fn: ``loss_fn(model(*inputs), target)``, a scalar.
        optimizer: braze's or torch's; on a GPU torch's with ``capturable=True`` where they have it.
        autocast: a dtype, or a ``torch.autocast``; None leaves autocast as the caller has it.
        grad_scaler: a ``torch.amp.GradScaler``; on a GPU `optimizer` is braze's or ``fused=True``.
        accumulate: calls per update. Each contributes its loss divided by this number.
        max_grad_norm: clips the norm of all gradients together; :attr:`grad_norm` is the norm.

    Raises:
        TypeError, ValueError: an argument is unfit; the model lies on several devices.

    Example:
        >>> step = braze.TrainStep(model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.1))
        >>> for images, labels in loader:
        ...     loss = step(images, labels)
    """

    def __init__(
        self,
        model,
        loss_fn,
        optimizer,
        *,
        autocast=None,
        grad_scaler=None,
        accumulate=1,
        max_grad_norm=None,
    ):
        for name, given, attribute, wanted in (
            ("model", model, "parameters", "a torch.nn.Module"),
            ("loss_fn", loss_fn, "__call__", "callable"),
            ("optimizer", optimizer, "param_groups", "a torch.optim.Optimizer"),
            ("grad_scaler", grad_scaler, "is_enabled", "a torch.amp.GradScaler or None"),
        ):
            if not hasattr(given, attribute) and (name, given) != ("grad_scaler", None):
                raise TypeError(
                    f"TrainStep: expected {name} to be {wanted}, but got {type(given).__name__}"
                )
        if isinstance(accumulate, bool) or not isinstance(accumulate, numbers.Integral):
            raise TypeError(f"TrainStep: expected accumulate to be an int, but got {accumulate!r}")
        if accumulate < 1:
            raise ValueError(f"TrainStep: expected accumulate of at least 1, but got {accumulate}")
        if isinstance(max_grad_norm, torch.Tensor):
            max_grad_norm = max_grad_norm.item()
        if max_grad_norm is not None:
            if not isinstance(max_grad_norm, numbers.Real):
                raise TypeError(
                    f"TrainStep: expected max_grad_norm to be a number, but got {max_grad_norm!r}"
                )
            if not max_grad_norm > 0:
                raise ValueError(
                    f"TrainStep: expected max_grad_norm above 0 or None, but got {max_grad_norm}"
                )
        if not (
            autocast is None or isinstance(autocast, torch.dtype) or hasattr(autocast, "__enter__")
        ):
            raise TypeError(
                "TrainStep: expected autocast to be a dtype, a torch.autocast or None, but got "
                f"{type(autocast).__name__}"
            )
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.autocast = autocast
        self.grad_scaler = grad_scaler
        self.accumulate = accumulate
        self.max_grad_norm = max_grad_norm
        #: the last update's gradient norm before clipping, on the device; the next call may
        #: overwrite it
        self.grad_norm = None
        self._loader = None
        self._micro_step = 0  # within the accumulation window
        self._buffers = {}  # parameter -> accumulated gradient, on a GPU with accumulate > 1
        self._window_grads = []  # (parameter, gradient) as the last micro-step left them
        self._epoch_state, self._position, self._skip = None, 0, 0
        self._place = None  # the loader's order and position that the graphs read, on the device
        self._order, self._begin = None, 0  # the epoch's order that was copied there, the position
        self._fetched = None, None, 0  # a graph's Prefetch, and where its batch begins in an order
        self._entries = {}
        self._casts, self._moments = SharedCasts(), GatheredMoments()
        self._ones = {}  # the gradient of the loss, for each dtype and device
        self._stream = self._last_stream = self._rates = self._watched = None
        self._modules, self._structure = [], []
        self._inspect()

    def _inspect(self):
        """Reads model and optimizer: parameters, modules, device; refuses what cannot work."""
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError("TrainStep: LBFGS calls the model by itself, several times in a step")
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        params = list(dict.fromkeys([*self.model.parameters(), *owned]))
        devices = {t.device for t in (*params, *self.model.buffers())}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(
                "TrainStep: expected the model's parameters and buffers and the optimizer's "
                f"parameters on one device, but found {found}"
            )
        (device,) = devices
        if device.type == "cuda":
            self._check_capturable()
        self._params, self.device = params, device
        kept = set(params)
        self._buffers = {p: buffer for p, buffer in self._buffers.items() if p in kept}
        self._window_grads = [(p, grad) for p, grad in self._window_grads if p in kept]
        if self._watched is not self.optimizer:
            self._watched = self.optimizer
            # Loading gives its state new memory, of which the graphs know nothing.
            dropper = weakref.WeakMethod(self.recapture)
            self.optimizer.register_load_state_dict_post_hook(
                lambda _: (drop := dropper()) and drop()
            )
        self._modules = list(self.model.modules())
        self._structure = self._parts()
        if device.type != "cuda":
            return
        if self._stream is None or self._stream.device != device:
            # Blocks of its kernels go before those of the branches for gradients (graph.cu), and
            # these before those of the branch for losses and batches.
            self._stream = torch.cuda.Stream(device, priority=-2)
        self._rates = Rates(self.optimizer, device)
        # Its eager steps are meant: no need to warn of them.
        self.optimizer._warned_capturable_if_run_uncaptured = True

    def _check_capturable(self):
        name = type(self.optimizer).__name__
        if isinstance(self.optimizer, _UNCAPTURABLE):
            raise ValueError(f"TrainStep: {name} cannot be captured in a CUDA graph")
        if any(not group.get("capturable", True) for group in self.optimizer.param_groups):
            raise ValueError(
                f"TrainStep: {name} with capturable=False counts its steps on the CPU; expected "
                f"{name}(..., capturable=True)"
            )
        if self._scales() and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"TrainStep: with {name} a GradScaler waits for the GPU in every step; expected an "
                "optimizer that checks for infinities itself: braze.optim.SGD, or fused=True"
            )

    def _parts(self):
        """What the step consists of. The same objects, compared by identity: the same step; what
        this list holds cannot be freed, so that no new object takes an old one's place unseen."""
        loader = self._loader
        parts = [self.model, self.loss_fn, self.optimizer, self.grad_scaler, self.autocast]
        if loader is not None:
            parts += loader.dtype, loader.memory_format
        for module in self._modules:
            parts += module._modules.values()
            parts += module._parameters.values()
        for group in self.optimizer.param_groups:
            parts.append(group)
            parts += group["params"]
        return parts

    def _is_the_same(self):
        """Whether what :meth:`_inspect` has read still holds."""
        if self._params[0].device != self.device:
            return False  # the model has been moved
        parts = self._parts()
        return len(parts) == len(self._structure) and all(map(operator.is_, parts, self._structure))

    def _scales(self):
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    # ---- calling ----

    def __call__(self, *batch):
        """One step, or one micro-step of `accumulate`.

        Args:
            batch: the model's inputs, then the target: tensors, or tuples, lists and dicts of them.
                Those on the host are copied without waiting: leave pinned memory as it is until
                the copy is done.

        Returns:
            The loss, a scalar on the device that stays as it is. Reading it waits for the step.

        Raises:
            RuntimeError: the step cannot be captured. Model and optimizer are as before the call.
            torch.OutOfMemoryError: no memory for the capture; likewise.
        """
        if len(batch) < 2:
            raise TypeError(f"TrainStep: expected inputs and a target, but got {len(batch)}")
        return self._run(batch, gather=False)

    def bind(self, loader):
        """Takes batches from a :class:`braze.data.DeviceLoader`: see :meth:`epoch`.

        Returns:
            The step itself.
        """
        if not hasattr(loader, "gather_next"):
            raise TypeError(
                f"TrainStep: expected a braze.data.DeviceLoader, but got {type(loader).__name__}"
            )
        if loader.images.device != self.device:
            raise ValueError(
                f"TrainStep: the model is on {self.device}, but the loader on "
                f"{loader.images.device}"
            )
        self.recapture()
        self._loader = loader
        with torch.inference_mode(False):  # whose tensors could not be written outside of it
            zeros = torch.zeros(2, dtype=torch.int64, device=self.device)
            self._place = torch.empty_like(loader.labels), zeros
        self._epoch_state, self._position, self._skip = None, 0, 0
        return self

    def epoch(self):
        """One epoch over the bound loader, gathering and normalising inside the captured step.

        After :meth:`load_state_dict` the first call goes on within the epoch of the saved state.

        Yields:
            The loss of each step, as a call returns it.
        """
        if self._loader is None:
            raise RuntimeError("TrainStep: call bind(loader) before epoch()")
        self._epoch_state = self._loader.get_state()
        self._position, self._skip = self._skip, 0
        order, batch_size = self._loader.draw(), self._loader.batch_size
        sizes = enumerate(self._loader.batch_sizes())
        for number, size in itertools.islice(sizes, self._position, None):
            begin = number * batch_size
            loss = self._run((size,), gather=True, order=(order, begin))
            self._position += 1
            yield loss
        self._epoch_state, self._position = None, 0

    def check(self):
        """Waits for the GPU and raises IndexError if a braze loss met a label out of range.

        A captured step cannot raise by itself: such a row's loss is NaN and its gradient zero.
        """
        if self.device.type == "cuda":
            check_errors(self.device)

    def recapture(self):
        """Forgets all graphs, after a change that :class:`TrainStep` cannot see.

        It sees shapes, hyper-parameters, train and eval mode, ``requires_grad``, autocast,
        precision, determinism, backends, replaced submodules, parameters and buffers and their new
        memory, and new parameter groups; not a module's other attributes, nor what Python code in
        the model decides by itself.
        """
        if self._entries and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a graph may still be running
        self._entries.clear()
        self._forget_place()
        self._casts, self._moments = SharedCasts(), GatheredMoments()

    def _seek(self, order, begin):
        """Brings an epoch's order to where the graphs read it, and the position to `begin`."""
        if order is not self._order:
            self._place[0].copy_(order)
        if order is not self._order or begin != self._begin:
            self._place[1].zero_()
            self._place[1][0] = begin
        self._order, self._begin = order, begin

    def _forget_place(self):
        self._order, self._fetched = None, (None, None, 0)

    def _run(self, batch, gather, order=None):
        if not self._is_the_same():
            self.recapture()
            self._inspect()
        first, last = self._micro_step == 0, self._micro_step >= self.accumulate - 1
        try:
            if self.device.type == "cuda":
                loss = self._run_cuda(batch, gather, first, last, order)
            else:
                if gather:
                    self._seek(*order)
                loss, norm = self._micro(batch, gather, first, last)
                if gather:
                    self._begin += batch[0]
                self.grad_norm = norm if last else self.grad_norm
                self._window_grads = self._grads()
        except BaseException:
            self._micro_step = 0  # the window starts anew
            self._forget_place()
            self._clean_scaler()
            raise
        self._micro_step = 0 if last else self._micro_step + 1
        return loss

    _run = ranged("TrainStep", _run)

    def _run_cuda(self, batch, gather, first, last, order):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("TrainStep: called inside another CUDA graph's capture")
        leaves, spec = batch, None
        if not gather and not all(isinstance(x, torch.Tensor) for x in batch):
            leaves, spec = pytree.tree_flatten(batch)
        key = self._key(leaves, spec, gather, first, last)
        entry = self._entries.pop(key, None)
        if entry is None:
            self._check_capturable()  # settings may have changed
            if len(self._entries) >= _MAX_ENTRIES:
                torch.cuda.synchronize(self.device)
                del self._entries[next(iter(self._entries))]
            entry = _Entry(leaves, spec, self.device)
        self._entries[key] = entry  # now the youngest
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream not in (None, stream):
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        if not gather:
            entry.load(leaves)
        if entry.graph is None and entry.eager_calls < _EAGER_CALLS:
            if gather:
                self._seek(*order)
            self._stream.wait_stream(stream)
            try:
                with torch.cuda.stream(self._stream):
                    loss, norm = self._micro(entry.batch(), gather, first, last)
            finally:
                stream.wait_stream(self._stream)
            entry.eager_calls += 1
            entry.loss_dtype = loss.dtype
            self._window_grads = self._grads()
        else:
            if (
                entry.graph is None
                or entry.losses.full()
                or entry.buffers != self._buffer_addresses()
            ):
                self._capture(entry, gather, first, last)
            if gather:
                self._fetch(entry.prefetch, *order, batch[0])
            self._rates.write()
            entry.graph.replay()
            if self._window_grads is not entry.grads:  # the last call ran another graph
                for p in self._params:
                    p.grad = None
            for p, grad in entry.grads:
                p.grad = grad
            if last:
                torch.autograd.graph.increment_version(self._params)
            self._window_grads = entry.grads
            loss, norm = entry.losses.next(), entry.grad_norm
        if gather:
            self._begin += batch[0]
        if last:
            self.grad_norm = norm
        return loss

    def _fetch(self, prefetch, order, begin, size):
        """Before a replay: its batch, or the position from which it gathers."""
        if prefetch is None:
            self._seek(order, begin)
            return
        held, held_order, held_begin = self._fetched
        if held is not prefetch or held_order is not order or held_begin != begin:
            self._seek(order, begin)
            prefetch.fill()
            self._begin += size
        self._fetched = prefetch, order, begin + size

    def _key(self, leaves, spec, gather, first, last):
        """All that a graph has frozen. Whatever differs needs another graph."""
        return (
            gather,
            first,
            last,
            self.accumulate,
            self.max_grad_norm,
            spec and str(spec),
            tuple(
                (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x)
                for x in leaves
            ),
            tuple([(p.data_ptr(), p.requires_grad) for p in self._params]),
            () if first else tuple(id(p) for p, _ in self._window_grads),
            tuple([m.training for m in self._modules]),
            self._rates and self._rates.key(),
            _config.settings(self.device.type),
        )

    def _capture(self, entry, gather, first, last):
        aside = Aside(self._update_takes_casts()) if self.accumulate == 1 else None
        if not self._record(entry, gather, first, last, aside):
            self._record(entry, gather, first, last, None)

    def _record(self, entry, gather, first, last, aside):
        """One capture; False where a gradient that `aside` made was read too early."""
        batch, before = entry.batch(), HostState(self.model, self.optimizer, self._params)
        if not any(other.graph for other in self._entries.values()):
            # torch retires a memory pool with the last graph that uses it.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            branch, prefetch = torch.cuda.Stream(self.device), None
            losses = _Losses(entry.loss_dtype, self.device, branch)
            if gather and self.accumulate == 1 and self._loader.nbytes(*batch) <= _PREFETCHED:
                filters = self._moments.filters
                prefetch = Prefetch(self._loader, self._place, *batch, filters, branch)
            beside = _Beside(branch, losses, prefetch, aside)
            with self._rates.on_device():
                graph, (_, norm) = capture(
                    lambda: self._micro(batch, gather, first, last, beside),
                    self._stream,
                    self._pool,
                )
            if aside and not aside.all_arrived():
                before.restore()
                return False
            grads = self._grads()
            before.verify()
        except BaseException as error:
            before.restore()
            self._pool = torch.cuda.graph_pool_handle()  # the failed capture may hold the old one
            if isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(
                    "TrainStep: out of memory while capturing; model and optimizer are unchanged. "
                    f"{error}"
                ) from error
            if isinstance(error, RuntimeError):
                raise RuntimeError(_NOT_CAPTURED.format(error)) from error
            raise
        entry.graph, entry.losses, entry.prefetch = graph, losses, prefetch
        entry.grad_norm, entry.grads = norm, grads
        entry.buffers = self._buffer_addresses()
        return True

    def _buffer_addresses(self):
        return [b.data_ptr() for m in self._modules for b in m._buffers.values() if b is not None]

    def _update_takes_casts(self):
        """Whether gradients may be unfinished until the optimizer's launch casts them: whether it
        is sure to be the first that reads them, and to read them all."""
        hooks = self.optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        owned = {p for group in self.optimizer.param_groups for p in group["params"]}
        plain = type(self.optimizer) is SGD and self.max_grad_norm is None and not self._scales()
        return plain and not hooks and owned.issuperset(self._params)

    def _grads(self):
        return [(p, p.grad) for p in self._params if p.grad is not None]

    # ---- the step itself ----

    def _micro(self, batch, gather, first, last, beside=None):
        """Forward and backward of one batch; the update if it is the window's last.

        batch: with `gather` how many images; beside: given where the step is being captured.
        """
        _, losses, prefetch, aside = beside or (None,) * 4
        for p in self._params:
            p.grad = None
        if not first:
            for p, grad in self._window_grads:
                p.grad = grad
        # A cast weight that an enclosing autocast remembers would be that of an earlier step.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            # The gradient that the loss will be given, where nothing comes between.
            direct = self.accumulate == 1 and not self._scales()
            ones = expected_gradients(self._ones if direct else None)
            with self._autocast(), self._casts.active(), self._moments.active(), ones:
                if gather:
                    batch = self._gather(*batch, prefetch)
                *inputs, target = batch
                loss = self.loss_fn(self.model(*inputs), target)
            scaled = loss / self.accumulate if self.accumulate > 1 else loss
            if self._scales():
                scaled = self.grad_scaler.scale(scaled)
            if losses:
                losses.keep(loss)
            if prefetch:
                prefetch.start()
            with aside.active(scaled, self._params) if aside else contextlib.nullcontext():
                scaled.backward(self._one_like(scaled))
        if prefetch:
            prefetch.finish()
        torch.clear_autocast_cache()
        if self.accumulate > 1 and self.device.type == "cuda":
            self._keep_grads()
        norm = self._update(aside.sources if aside else None) if last else None
        if beside:
            # At the very end, where no kernel has to wait for it.
            torch.cuda.current_stream(self.device).wait_stream(beside.stream)
        return loss.detach(), norm

    def _gather(self, size, prefetch):
        """The loader's next batch, or, while a step is captured, that which a replay will find."""
        if prefetch:
            batch, filters = prefetch.batch, prefetch.filters
        else:
            filters = self._moments.filters
            batch = self._loader.empty_batch(size, filters)
            self._loader.gather_next(*self._place, batch, filters)
        *batch, moments = batch
        self._moments.gathered(batch[0], moments, filters)
        return batch

    def _one_like(self, loss):
        """What backward() would fill a new tensor with in every step."""
        if loss.dim() or not loss.is_floating_point():
            return None  # for backward() to refuse
        key = loss.dtype, loss.device
        if key not in self._ones and not (
            loss.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            self._ones[key] = torch.ones_like(loss)
        return self._ones.get(key)

    def _autocast(self):
        if self.autocast is None:
            return contextlib.nullcontext()
        if isinstance(self.autocast, torch.dtype):
            return torch.autocast(self.device.type, self.autocast)
        return self.autocast

    def _keep_grads(self):
        """Moves new gradients to where the window's other graphs find them."""
        for p in self._params:
            if p.grad is None or p.grad is self._buffers.get(p):
                continue
            if p not in self._buffers:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("a parameter gets its first gradient during the capture")
                self._buffers[p] = torch.empty_like(p.grad)
            p.grad = self._buffers[p].copy_(p.grad)

    def _update(self, sources):
        norm = None
        if self.max_grad_norm is not None:
            if self._scales():
                self.grad_scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self._params, self.max_grad_norm)
        if self._scales():
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        elif sources:
            self.optimizer._sources = sources
            try:
                self.optimizer.step()
            finally:
                del self.optimizer._sources
        else:
            self.optimizer.step()
        return norm

    def _clean_scaler(self):
        """Lets the scaler forget an update that an exception has cut short."""
        if self._scales():
            self.grad_scaler._per_optimizer_states.pop(id(self.optimizer), None)
            for name in ("grad_scale", "found_inf"):
                self.optimizer.__dict__.pop(name, None)

    # ---- saving ----

    def state_dict(self):
        """Everything that training goes on from: also within an epoch of :meth:`epoch`.

        Returns:
            Dict of "model", "optimizer", "grad_scaler", "loader" (None without) and "rng".

        Raises:
            RuntimeError: called within an accumulation window.
        """
        if self._micro_step:
            raise RuntimeError(
                "TrainStep: expected state_dict() between updates, but it came after micro-step "
                f"{self._micro_step} of {self.accumulate}"
            )
        loader = None
        if self._loader is not None:
            state = self._epoch_state
            loader = {
                "generator": self._loader.get_state() if state is None else state,
                "position": max(self._position, self._skip),
            }
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "grad_scaler": self.grad_scaler and self.grad_scaler.state_dict(),
            "loader": loader,
            "rng": rng,
        }

    def load_state_dict(self, state):
        """Goes on from a :meth:`state_dict`, with the same model, optimizer and loader settings.

        Raises:
            KeyError: `state` is no such dict; nothing has been loaded.
            RuntimeError: this step has a GradScaler, but the state none, or that of a disabled one;
                nothing has been loaded. Or model or optimizer do not fit, as torch says it.
            ValueError: the loader has fewer batches than the state; nothing has been loaded.
        """
        missing = {"model", "optimizer", "grad_scaler", "loader", "rng"}.difference(state)
        if missing:
            raise KeyError(
                "TrainStep: expected a dict of TrainStep.state_dict(), but it has no "
                f"{', '.join(map(repr, sorted(missing)))}"
            )
        if self._scales() and not state["grad_scaler"]:
            raise RuntimeError(
                "TrainStep: this step has a GradScaler, but the state was saved without one, or "
                "with a disabled one. To go on with this one's scale, set state['grad_scaler'] = "
                "step.grad_scaler.state_dict() before loading"
            )
        resumes = self._loader is not None and state["loader"] is not None
        if resumes and state["loader"]["position"] > len(self._loader):
            raise ValueError(
                f"TrainStep: the state is at batch {state['loader']['position']} of an epoch, but "
                f"the loader has {len(self._loader)}; expected the loader's settings as saved"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._scales():
            self.grad_scaler.load_state_dict(state["grad_scaler"])
        if resumes:
            self._loader.set_state(state["loader"]["generator"].cpu())
            self._epoch_state, self._position = None, 0
            self._skip = state["loader"]["position"]
        # torch.load(map_location="cuda") has moved what belongs on the CPU.
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self.device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self.device)
        self._micro_step = 0
        self.recapture()
