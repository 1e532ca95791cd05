"""TrainStep, as its user sees it."""

import itertools

import torch
from torch.utils import _pytree as pytree

from braze._nvtx import ranged
from braze._ops.cross_entropy import check_errors
from braze.step.body import Body
from braze.step.graphs import Graphs
from braze.step.parts import StepParts
from braze.step.step_work import StepCall, StepWork

# What the user gives, and may replace between calls.
_ARGUMENTS = (
    "model", "loss_fn", "optimizer", "autocast", "grad_scaler", "accumulate", "max_grad_norm",
)  # fmt: skip
# What else pickles of version 0.1.0 hold; all of it is made anew.
_MADE_ANEW = frozenset((
    "device", "_params", "_modules", "_structure", "_watched", "_buffers", "_ones", "_casts",
    "_moments", "_place", "_order", "_begin", "_fetched", "_entries", "_stream", "_last_stream",
    "_rates",
))  # fmt: skip


def _argument(name):
    def set(self, value):
        setattr(self._parts, name, value)

    return property(lambda self: getattr(self._parts, name), set)


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
        self._parts = StepParts(
            model, loss_fn, optimizer, autocast, grad_scaler, accumulate, max_grad_norm
        )
        self._body = Body(self._parts)
        self._graphs = Graphs(self._parts, StepWork(self._parts, self._body))
        #: the last update's gradient norm before clipping, on the device; the next call may
        #: overwrite it
        self.grad_norm = None
        self._micro_step = 0  # within the accumulation window
        self._epoch_state, self._position, self._skip = None, 0, 0
        self._inspect()

    model, loss_fn, optimizer, autocast, grad_scaler, accumulate, max_grad_norm = map(
        _argument, _ARGUMENTS
    )

    @property
    def device(self):
        """Where the model was at the last call."""
        return self._parts.device

    def _inspect(self):
        self._parts.inspect(self.recapture)
        self._body.keep_gradients_of(self._parts.params)
        if self.device.type == "cuda":
            self._graphs.prepare()

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
        return self._run(batch)

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
        self._parts.loader = loader
        self._body.batches.bind(loader)
        self._epoch_state, self._position, self._skip = None, 0, 0
        return self

    def epoch(self):
        """One epoch over the bound loader, gathering and normalising inside the captured step.

        After :meth:`load_state_dict` the first call goes on within the epoch of the saved state.

        Yields:
            The loss of each step, as a call returns it.
        """
        loader = self._parts.loader
        if loader is None:
            raise RuntimeError("TrainStep: call bind(loader) before epoch()")
        self._epoch_state = loader.get_state()
        self._position, self._skip = self._skip, 0
        order, batch_size = loader.draw(), loader.batch_size
        sizes = enumerate(loader.batch_sizes())
        for number, size in itertools.islice(sizes, self._position, None):
            begin = number * batch_size
            loss = self._run((size,), (order, begin))
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
        self._graphs.forget()
        self._body.relearn()

    def _run(self, batch, order=None):
        """order: of a batch of the loader: its epoch's order, and where in it the batch begins."""
        parts, body, gather = self._parts, self._body, order is not None
        if not parts.are_the_same():
            self.recapture()
            self._inspect()
        first, last = self._micro_step == 0, self._micro_step >= parts.accumulate - 1
        try:
            if parts.device.type == "cuda":
                leaves, spec = batch, None
                if not gather and not all(isinstance(x, torch.Tensor) for x in batch):
                    leaves, spec = pytree.tree_flatten(batch)
                call = StepCall(leaves, spec, order, first, last)
                loss, norm = self._graphs.run(call)
            else:
                if gather:
                    body.batches.seek(*order)
                loss, norm = body.run(batch, gather, first, last)
                body.window_grads = parts.gradients()
        except BaseException:
            self._micro_step = 0  # the window starts anew
            body.batches.forget_place()
            body.clean_scaler()
            raise
        if gather:
            body.batches.advance(batch[0])
        if last:
            self.grad_norm = norm
        self._micro_step = 0 if last else self._micro_step + 1
        return loss

    _run = ranged("TrainStep", _run)

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
        loader = self._parts.loader
        if loader is not None:
            state = self._epoch_state
            position = max(self._position, self._skip)
            loader = {
                "generator": loader.get_state() if state is None else state,
                "position": position,
                # Of all ranks together: it may go on with another number of them.
                "images": position * loader.batch_size * loader.num_replicas,
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
        if self._parts.scales() and not state["grad_scaler"]:
            raise RuntimeError(
                "TrainStep: this step has a GradScaler, but the state was saved without one, or "
                "with a disabled one. To go on with this one's scale, set state['grad_scaler'] = "
                "step.grad_scaler.state_dict() before loading"
            )
        loader = self._parts.loader
        resumes = loader is not None and state["loader"] is not None
        if resumes:
            position = _position(loader, state["loader"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._parts.scales():
            self.grad_scaler.load_state_dict(state["grad_scaler"])
        if resumes:
            loader.set_state(state["loader"]["generator"].cpu())
            self._epoch_state, self._position = None, 0
            self._skip = position
        # torch.load(map_location="cuda") has moved what belongs on the CPU.
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self.device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self.device)
        self._micro_step = 0
        self.recapture()

    def __getstate__(self):
        """For pickle and copy: without graphs, and what a step learns; they are made anew."""
        state = {name: getattr(self, name) for name in _ARGUMENTS} | vars(self)
        state |= {"_loader": self._parts.loader, "_window_grads": self._body.window_grads}
        for name in ("_parts", "_body", "_graphs"):
            del state[name]
        return state

    def __setstate__(self, state):
        state = {name: value for name, value in state.items() if name not in _MADE_ANEW}
        TrainStep.__init__(self, **{name: state.pop(name) for name in _ARGUMENTS})
        loader, self._body.window_grads = state.pop("_loader"), state.pop("_window_grads")
        if loader is not None:
            self.bind(loader)
        vars(self).update(state)


def _position(loader, state):
    """The batch of `loader` with which an epoch that was saved as `state` goes on."""
    position, images = state["position"], state.get("images")
    together = loader.batch_size * loader.num_replicas  # images of a step
    if images is not None:
        if images % together:
            raise ValueError(
                f"TrainStep: the state is at image {images} of an epoch, but the loader's steps "
                f"are of {together} images; expected a batch size (times the number of ranks) that "
                "divides it"
            )
        position = images // together
    if position > len(loader):
        raise ValueError(
            f"TrainStep: the state is at batch {position} of an epoch, but the loader has "
            f"{len(loader)}; expected the loader's settings as saved"
        )
    return position
