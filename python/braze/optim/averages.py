"""Moving averages of the weights, taken in the launch that updates them."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMA(AveragedModel):
    """``torch.optim.swa_utils.AveragedModel`` with an exponential moving average that
    ``optimizer.step()`` takes in its own pass over the weights.

    Each step of the optimizer does what ``update_parameters(model)`` after it would: the first one
    copies the weights, the later ones make the average ``decay * average + (1 - decay) * weight``,
    also after an update that a ``GradScaler`` skips. What the optimizer does not update (parameters
    without a gradient, or of another optimizer, and buffers), and averages that ``ema.cpu()`` has
    brought elsewhere, are averaged or copied behind its launches, as torch has it. The state dict
    is torch's, and loads both ways; ``n_averaged`` is on the parameters' device.

    Args:
        model: a module; this one holds a copy of it.
        optimizer: one of braze's, which updates parameters of the model.
        decay: a number from 0 to 1.
        use_buffers: averages the buffers too, in the place of copying them.

    Raises:
        TypeError: `optimizer` is not one of braze's.
        ValueError: `decay` is out of range; the optimizer has an average already.

    Example:
        >>> optimizer = braze.optim.AdamW(model.parameters())
        >>> ema = braze.optim.EMA(model, optimizer, decay=0.999)
        >>> step = braze.TrainStep(model, loss_fn, optimizer)
    """

    def __init__(self, model, optimizer, decay=0.999, use_buffers=False):
        if not hasattr(optimizer, "_average"):
            raise TypeError(
                "braze.optim.EMA: expected optimizer to be one of braze.optim, but got "
                f"{type(optimizer).__name__}"
            )
        if optimizer._average is not None:
            raise ValueError("braze.optim.EMA: the optimizer has an average already")
        average_rest = get_ema_multi_avg_fn(decay)  # raises for a decay out of range
        device = next(iter(model.parameters())).device
        super().__init__(model, multi_avg_fn=average_rest, use_buffers=use_buffers)
        self.n_averaged = self.n_averaged.to(device)
        optimizer._average = _Average(model, self, decay)

    def update_parameters(self, model):
        """Not here: the optimizer's step has done it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("braze.optim.EMA: the optimizer's step() updates the average by itself")


class _Average:
    """What an optimizer knows of an :class:`EMA`."""

    def __init__(self, model, ema, decay):
        self.model, self.ema, self.decay = model, ema, decay
        self._begun = False
        ema.register_load_state_dict_post_hook(self._reload)

    def _reload(self, ema, _):
        self._begun = False

    def weight(self):
        """Of the new weights in this step's average. Waits for the GPU until the first is taken."""
        if not self._begun:
            self._begun = self.ema.n_averaged.item() > 0
        return 1 - self.decay if self._begun else 1.0

    def pairs(self):
        """Parameter of the model -> its average."""
        return dict(zip(self.model.parameters(), self.ema.module.parameters(), strict=True))

    def finish(self, pairs, weight, counted):
        """What the launches have left to do.

        Args:
            pairs: those that are still to be averaged.
            counted: whether a launch has counted this average.
        """
        ema, pairs = self.ema, list(pairs.items())
        buffers = [*zip(self.model.buffers(), ema.module.buffers(), strict=True)]
        if ema.use_buffers:
            pairs += buffers
        groups = {}
        for value, average in pairs:
            key = average.device, average.dtype
            groups.setdefault(key, []).append((average.detach(), value.detach().to(average.device)))
        for group in groups.values():
            averages, values = map(list, zip(*group, strict=True))
            if weight == 1.0:
                torch._foreach_copy_(averages, values)
            else:
                ema.multi_avg_fn(averages, values, None)
        if not ema.use_buffers:
            for value, average in buffers:
                average.detach().copy_(value.detach())
        if not counted:
            ema.n_averaged += 1
