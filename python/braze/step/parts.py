"""What a training step consists of."""

import numbers

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from braze.optim import LAMB, SGD, Adam, AdamW, Muon, RMSprop
from braze.step.watched import Watched

# Their launches cast gradients. A subclass may look at these before.
_CASTS = (SGD, Adam, AdamW, RMSprop, LAMB, Muon)


class StepParts(Watched):
    """The arguments of :class:`braze.TrainStep`, which the user may replace between calls, and what
    :meth:`inspect` reads of them.

    Raises:
        TypeError, ValueError: an argument is unfit.
    """

    caller = "TrainStep"
    exchanges = True
    _found_on = "the model's parameters and buffers and the optimizer's parameters"

    def __init__(
        self, model, loss_fn, optimizer, autocast, grad_scaler, accumulate, max_grad_norm
    ):  # fmt: skip
        for name, given, attribute, wanted in (
            ("model", model, "parameters", "a torch.nn.Module"),
            ("loss_fn", loss_fn, "__call__", "callable"),
            ("optimizer", optimizer, "param_groups", "a torch.optim.Optimizer"),
            ("grad_scaler", grad_scaler, "is_enabled", "a torch.amp.GradScaler or None"),
        ):
            if not hasattr(given, attribute) and (name, given) != ("grad_scaler", None):
                raise TypeError(
                    f"{self.caller}: expected {name} to be {wanted}, but got {type(given).__name__}"
                )
        if isinstance(accumulate, bool) or not isinstance(accumulate, numbers.Integral):
            raise TypeError(
                f"{self.caller}: expected accumulate to be an int, but got {accumulate!r}"
            )
        if accumulate < 1:
            raise ValueError(
                f"{self.caller}: expected accumulate of at least 1, but got {accumulate}"
            )
        if isinstance(max_grad_norm, torch.Tensor):
            max_grad_norm = max_grad_norm.item()
        if max_grad_norm is not None:
            if not isinstance(max_grad_norm, numbers.Real):
                raise TypeError(
                    f"{self.caller}: expected max_grad_norm to be a number, but got "
                    f"{max_grad_norm!r}"
                )
            if not max_grad_norm > 0:
                raise ValueError(
                    f"{self.caller}: expected max_grad_norm above 0 or None, but got "
                    f"{max_grad_norm}"
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
        self.loader = None  # that the step is bound to
        super().__init__()

    def roots(self):
        return [self.model]

    def optimizers(self):
        return [self.optimizer]

    def others(self):
        parts = [self.model, self.loss_fn, self.grad_scaler, self.autocast]
        if self.loader is not None:
            parts += self.loader.dtype, self.loader.memory_format
        return parts

    def check_capturable(self):
        """Raises ValueError where the optimizer, or the scaler with it, waits for the GPU."""
        super().check_capturable()
        if self.scales() and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"{self.caller}: with {type(self.optimizer).__name__} a GradScaler waits for the "
                "GPU in every step; expected an optimizer that checks for infinities itself: "
                "one of braze.optim, or fused=True"
            )

    def scales(self):
        """Whether the loss is scaled."""
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    def update_takes_casts(self):
        """Whether gradients may be unfinished until the optimizer's launch casts them: whether it
        is sure to be the first that reads them, and to read them all."""
        hooks = self.optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        owned = {p for group in self.optimizer.param_groups for p in group["params"]}
        casts = type(self.optimizer) in _CASTS and self.optimizer.max_grad_norm is None
        plain = casts and self.max_grad_norm is None and not self.scales()
        return plain and not hooks and owned.issuperset(self.params)
