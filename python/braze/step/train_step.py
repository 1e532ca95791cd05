"""TrainStep, as its user sees it."""

import torch

from braze._nvtx import ranged
from braze.step.body import Body
from braze.step.graphs import Graphs
from braze.step.parts import StepParts
from braze.step.ranks import load_model_state, model_state
from braze.step.step import Step
from braze.step.step_work import StepWork

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


class TrainStep(Step):
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
        parts = StepParts(
            model, loss_fn, optimizer, autocast, grad_scaler, accumulate, max_grad_norm
        )
        body = Body(parts)
        super().__init__(parts, body, Graphs(parts, StepWork(parts, body)))

    model, loss_fn, optimizer, autocast, grad_scaler, accumulate, max_grad_norm = map(
        _argument, _ARGUMENTS
    )

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

    _run = ranged("TrainStep", Step._run)

    # ---- saving ----

    def state_dict(self):
        """Everything that training goes on from: also within an epoch of :meth:`epoch`.

        Returns:
            Dict of "model" (of a DistributedDataParallel the model in it), "optimizer",
            "grad_scaler", "loader" (None without) and "rng".

        Raises:
            RuntimeError: called within an accumulation window.
        """
        if self._micro_step:
            raise RuntimeError(
                "TrainStep: expected state_dict() between updates, but it came after micro-step "
                f"{self._micro_step} of {self.accumulate}"
            )
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "model": model_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "grad_scaler": self.grad_scaler and self.grad_scaler.state_dict(),
            "loader": self._loader_state(),
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
        resume = self._resumption(state["loader"])
        load_model_state(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._parts.scales():
            self.grad_scaler.load_state_dict(state["grad_scaler"])
        resume()
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
