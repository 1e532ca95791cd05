"""What a training step consists of, and whether that is still so."""

import numbers
import operator
import weakref

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from braze.optim import LAMB, SGD, Adam, AdamW, MultiTensor, Muon, RMSprop

# They count their steps on the CPU whatever the settings.
_UNCAPTURABLE = (torch.optim.Adafactor, torch.optim.Adagrad)
# Their launches cast gradients. A subclass may look at these before.
_CASTS = (SGD, Adam, AdamW, RMSprop, LAMB, Muon)


class StepParts:
    """The arguments of :class:`braze.TrainStep`, which the user may replace between calls, and what
    :meth:`inspect` reads of them.

    Raises:
        TypeError, ValueError: an argument is unfit.
    """

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
        self.loader = None  # that the step is bound to
        self.device = None
        self.params, self.modules = [], []  # the model's and the optimizer's; the model's
        self._structure, self._watched = [], None

    def inspect(self, on_reload):
        """Reads model and optimizer: parameters, modules, device; refuses what cannot work.

        Args:
            on_reload: a method, called as long as its object lives when the optimizer has loaded a
                state: its tensors have new memory then, of which graphs know nothing.

        Raises:
            ValueError: nothing has been read then.
        """
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
            self.check_capturable()
        self.params, self.device = params, device
        if self._watched is not self.optimizer:
            self._watched = self.optimizer
            reloaded = weakref.WeakMethod(on_reload)
            self.optimizer.register_load_state_dict_post_hook(
                lambda _: (call := reloaded()) and call()
            )
        self.modules = list(self.model.modules())
        self._structure = self._now()

    def check_capturable(self):
        """Raises ValueError where the optimizer, or the scaler with it, waits for the GPU."""
        name = type(self.optimizer).__name__
        if isinstance(self.optimizer, _UNCAPTURABLE):
            raise ValueError(f"TrainStep: {name} cannot be captured in a CUDA graph")
        counts_on_cpu = not isinstance(self.optimizer, MultiTensor) and any(
            not group.get("capturable", True) for group in self.optimizer.param_groups
        )
        if counts_on_cpu:
            raise ValueError(
                f"TrainStep: {name} with capturable=False counts its steps on the CPU; expected "
                f"{name}(..., capturable=True)"
            )
        if self.scales() and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"TrainStep: with {name} a GradScaler waits for the GPU in every step; expected an "
                "optimizer that checks for infinities itself: one of braze.optim, or fused=True"
            )

    def are_the_same(self):
        """Whether what :meth:`inspect` has read still holds."""
        if self.params[0].device != self.device:
            return False  # the model has been moved
        now = self._now()
        return len(now) == len(self._structure) and all(map(operator.is_, now, self._structure))

    def _now(self):
        """What the step consists of. The same objects, compared by identity: the same step; what
        this list holds cannot be freed, so that no new object takes an old one's place unseen."""
        parts = [self.model, self.loss_fn, self.optimizer, self.grad_scaler, self.autocast]
        if self.loader is not None:
            parts += self.loader.dtype, self.loader.memory_format
        for module in self.modules:
            parts += module._modules.values()
            parts += module._parameters.values()
        for group in self.optimizer.param_groups:
            parts.append(group)
            parts += group["params"]
        return parts

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

    def gradients(self):
        """The parameters that have a gradient, each with it."""
        return [(p, p.grad) for p in self.params if p.grad is not None]

    def buffer_addresses(self):
        """Where the model's buffers lie."""
        return [b.data_ptr() for m in self.modules for b in m._buffers.values() if b is not None]
