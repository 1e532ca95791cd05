"""Proof of honesty: a way to run the step is timed only if it computes what it should.

Each makes the same 20 steps from the same weights on the same batches, and so does stock PyTorch in
float64. It may be off by twice as much as stock's own eager step at the same precision, the worst
of four runs of it, plus a floor.

Training is chaotic: where rounding decides a ReLU or a maximum the other way, two runs part. Three
things keep that from deciding. The learning rate is small, so that a difference hardly grows
within the checked steps. The images get noise while they are checked, because MNIST's even
background is full of ties. And what fails gets two more tries, with other weights and batches: at
batch 64 in fp32 about one run in ten of anybody's parts, while a wrong step is wrong every time.
"""

import contextlib
import itertools
from dataclasses import dataclass

import torch

from braze.mnist.steps import LAYOUTS, StockStep, forever

#: the checked steps' learning rate
RATE = 0.002
_TRIES = 3
_FACTOR = 2
# Losses: some roundings of float32. The update: its own rounding is 1e-4 of it (the weights are 100
# times larger than their change, and round 20 times). TF32 in the place of fp32 is off by 2e-5 and
# 3e-3, a bias without its gradient by more.
_FLOOR = {"losses": 32 * torch.finfo(torch.float32).eps, "update": 1e-3}


@dataclass
class Trace:
    """What the checked steps left: float64, on the CPU."""

    losses: torch.Tensor
    start: dict  # parameter's name -> tensor
    weights: dict

    def errors(self, reference):
        """How far off it is: the losses, and the change of all parameters together; relative."""
        start = reference.start
        return {
            "losses": float((self.losses - reference.losses).norm() / reference.losses.norm()),
            "update": _norm(self.weights, reference.weights) / _norm(start, reference.weights),
        }


def _norm(a, b):
    return float(sum((a[name] - b[name]).square().sum() for name in b).sqrt())


def checked_steps(setup):
    """How many steps are checked: 20; fewer where a CPU would take long."""
    return 20 if setup.device.type == "cuda" else min(20, max(3, 2048 // setup.batch_size))


def trace(epoch, model, steps):
    """Runs the first steps of ``epoch()``, which trains `model`."""

    def weights():
        return {
            name: p.detach().to("cpu", torch.float64, copy=True)
            for name, p in model.named_parameters()
        }

    start = weights()
    # A CUDA graph writes each loss into the same tensor.
    losses = [float(loss) for loss in itertools.islice(forever(epoch), steps)]
    return Trace(torch.tensor(losses, dtype=torch.float64), start, weights())


class Judge:
    """Knows the float64 run, and how far off stock is."""

    def __init__(self, setup):
        self._setup = setup
        self.steps = checked_steps(setup)
        self._tries = []

    @contextlib.contextmanager
    def hard_images(self):
        """The data set, which all loaders share, has noise within this block."""
        images = self._setup.loader.images
        true_images = images.clone()
        generator = torch.Generator().manual_seed(self._setup.seed)
        noise = torch.randint(64, images.shape, generator=generator, dtype=torch.uint8).to(images)
        images.copy_(torch.where(images < 128, images + noise, images - noise))
        try:
            yield
        finally:
            images.copy_(true_images)

    def check(self, step, epoch):
        """Runs the checked steps; call it within :meth:`hard_images`.

        Args:
            step: what trains; it is started anew.
            epoch: yields its losses.

        Returns:
            How far off they were, by name, and a sentence if that is too far, else None.
        """
        for number in range(_TRIES):
            seed, state, reference, limits = self._try(number)
            step.start_anew(state, seed)
            errors = trace(epoch, step.model, self.steps).errors(reference)
            wrong = [name for name, limit in limits.items() if not errors[name] <= limit]
            if not wrong:
                return errors, None
        off = ", ".join(
            f"{name} by {errors[name]:.1e} ({limits[name]:.1e} allowed)" for name in wrong
        )
        return errors, f"wrong after {self.steps} steps, against float64: {off}"

    def _try(self, number):
        """Seed, initial weights, the float64 run, and what each error may be."""
        while len(self._tries) <= number:
            seed = self._setup.seed + len(self._tries)
            state = self._setup.state(seed)
            reference = self._stock(state, seed, "contiguous", torch.float64)
            runs = [
                self._stock(state, seed, layout, torch.float32, flip).errors(reference)
                for layout, flip in itertools.product(LAYOUTS, (False, True))
            ]
            limits = {
                name: _FACTOR * max(run[name] for run in runs) + floor
                for name, floor in _FLOOR.items()
            }
            self._tries.append((seed, state, reference, limits))
        return self._tries[number]

    def _stock(self, state, seed, layout, dtype, flip=False):
        """An eager run of stock. `flip` turns each batch around: that changes the rounding only."""
        step = StockStep(self._setup, layout, dtype)
        step.start_anew(state, seed)
        if flip:
            gather = step.gather
            step.gather = lambda indices: gather(indices.flip(0))
        return trace(step.epoch, step.model, self.steps)
