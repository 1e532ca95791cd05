"""The step itself: forward, backward and update, as they run eagerly and as they are recorded."""

import contextlib

import torch

from braze._step_scope import StepScope
from braze.step.batches import Batches
from braze.step.casts import SharedCasts
from braze.step.places import versions_of


class Body:
    """Runs one step, or one micro-step of an accumulation window.

    Args:
        parts: the step's :class:`braze.step.parts.StepParts`.
    """

    def __init__(self, parts):
        self._parts = parts
        self.batches = Batches(parts)
        #: (parameter, gradient) as the last micro-step left them
        self.window_grads = []
        self._accumulated = {}  # parameter -> gradient, on a GPU with accumulate > 1
        self.casts = SharedCasts()
        self._ones = {}  # the gradient of the loss, for each dtype and device
        #: whether the last forward pass wrote to the batch
        self.wrote_inputs = False

    def relearn(self):
        """Forgets what earlier steps have taught it."""
        self.batches.relearn()
        self.casts = SharedCasts()

    def keep_gradients_of(self, params):
        """Forgets the gradients of parameters that are gone."""
        kept = set(params)
        self._accumulated = {p: grad for p, grad in self._accumulated.items() if p in kept}
        self.window_grads = [(p, grad) for p, grad in self.window_grads if p in kept]

    def drop_gradients(self):
        """Before a window, which makes them anew: no two sets of them lie in memory."""
        self.window_grads = []
        for p in self._parts.params:
            p.grad = None

    def run(self, batch, gather, first, last, branches=None):
        """Forward and backward of one batch; the update if it is the window's last.

        Args:
            batch: the model's inputs and the target, in a list, of which it takes them; with
                `gather` how many images of the loader.
            first, last: whether it is the window's.
            branches: of the graph, where the step is being captured.

        Returns:
            The loss, and the norm of the gradients or None.
        """
        loss = self.gradients(batch, gather, first, last, branches)
        norm = self.update(branches.side_stream if branches else None) if last else None
        if branches:
            # At the very end, where no kernel has to wait for it.
            torch.cuda.current_stream(self._parts.device).wait_stream(branches.stream)
        return loss, norm

    def gradients(self, batch, gather, first, last, branches=None):
        """Forward and backward of one batch, as :meth:`run`; returns the loss."""
        parts = self._parts
        _, losses, prefetch, side_stream, casts = branches or (None, None, None, None, ())
        if first:
            self.drop_gradients()
        else:
            for p in parts.params:
                p.grad = None
            for p, grad in self.window_grads:
                p.grad = grad
        # A cast weight that an enclosing autocast remembers would be that of an earlier step.
        torch.clear_autocast_cache()
        with torch.enable_grad(), parts.ranks.micro_step(last):
            inputs = () if gather else batch[:-1]
            with self._autocast(), self._forward_scope(inputs, casts) as scope:
                if gather:
                    batch = [*self.batches.gather(*batch, prefetch)]
                *inputs, target = batch
                batch.clear()
                before = versions_of(inputs)
                loss = parts.loss_fn(parts.model(*inputs), target)
                self.wrote_inputs = versions_of(inputs) != before
                # What the backward pass does not need must not count at its peak.
                del inputs, target
            scaled = loss / parts.accumulate if parts.accumulate > 1 else loss
            if parts.scales():
                scaled = parts.grad_scaler.scale(scaled)
            if losses:
                losses.keep(loss)
            if prefetch:
                prefetch.start()
            with (
                scope.backward(),
                side_stream.active(scaled, parts.params)
                if side_stream
                else contextlib.nullcontext(),
                parts.ranks.exchanging(side_stream),
            ):
                scaled.backward(self._one_like(scaled))
            parts.ranks.finish(side_stream)
        if prefetch:
            prefetch.finish()
        torch.clear_autocast_cache()
        if parts.accumulate > 1 and parts.device.type == "cuda":
            self._accumulate()
        return loss.detach()

    @contextlib.contextmanager
    def _forward_scope(self, inputs, given):
        # The gradient that the loss will be given, where nothing comes between.
        direct = self._parts.accumulate == 1 and not self._parts.scales()
        casts, moments = self.casts, self.batches.moments
        ones = self._ones if direct else None
        with StepScope(casts=casts, moments=moments, unit_gradients=ones) as scope:
            try:
                casts.cast_together(inputs, given, self._parts.ranks.bucket_of)
                yield scope
            finally:
                casts.drop()
                moments.drop()

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
        autocast = self._parts.autocast
        if autocast is None:
            return contextlib.nullcontext()
        if isinstance(autocast, torch.dtype):
            return torch.autocast(self._parts.device.type, autocast)
        return autocast

    def _accumulate(self):
        """Moves new gradients to where the window's other graphs find them."""
        for p in self._parts.params:
            if p.grad is None or p.grad is self._accumulated.get(p):
                continue
            if p not in self._accumulated:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("a parameter gets its first gradient during the capture")
                self._accumulated[p] = torch.empty_like(p.grad)
            p.grad = self._accumulated[p].copy_(p.grad)

    def update(self, side_stream=None):
        """Clipping and the optimizer's step; returns the norm of the gradients or None.

        Args:
            side_stream: of the backward pass, which may have left casts of gradients to this.
        """
        parts, norm = self._parts, None
        sources = side_stream.sources if side_stream else None
        if parts.max_grad_norm is not None:
            if parts.scales():
                parts.grad_scaler.unscale_(parts.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parts.params, parts.max_grad_norm)
        if parts.scales():
            parts.grad_scaler.step(parts.optimizer)
            parts.grad_scaler.update()
        elif sources:
            with StepScope(optimizer=parts.optimizer, sources=sources):
                parts.optimizer.step()
        else:
            parts.optimizer.step()
        return norm

    def clean_scaler(self):
        """Lets the scaler forget an update that an exception has cut short."""
        parts = self._parts
        if parts.scales():
            parts.grad_scaler._per_optimizer_states.pop(id(parts.optimizer), None)
            for name in ("grad_scale", "found_inf"):
                parts.optimizer.__dict__.pop(name, None)
