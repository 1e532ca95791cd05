"""Milliseconds per training step of braze and of every way to run stock PyTorch.

All rows start from the same weights and see the same batches; each has to pass honesty.Judge before
it is timed. The timed rounds are interleaved, so that clocks and neighbours hit all rows alike.
"""

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

import braze
from braze.mnist import steps as ways
from braze.mnist.honesty import Judge
from braze.mnist.steps import LAYOUTS, BrazeStep, StockStep

_OWN = {"matmul": "braze", "conv2d": "braze"}
_AUTO = {"matmul": "auto", "conv2d": "auto"}
_ROUNDS = 10
# A round's length in seconds: the GPU's idle time before the first step and after the last, about a
# tenth of a millisecond, then counts little.
_LEAST = 0.02


@dataclass
class Row:
    """One line of the table: an implementation in a mode and a layout."""

    name: str
    mode: str
    layout: str
    backend: str | None = None  # of braze's rows: "braze" (own kernels only) or "auto"
    error: str | None = None
    check: dict | None = None  # how far off the checked steps were
    seconds: list = field(default_factory=list)

    @property
    def label(self):
        return f"{self.name} {self.mode}"

    def milliseconds(self):
        """The median and the 20th and 80th percentile over the rounds."""
        return [1e3 * float(q) for q in np.percentile(self.seconds, (50, 20, 80))]

    def as_dict(self):
        keys = ("name", "mode", "layout", "backend", "error", "check")
        row = {key: getattr(self, key) for key in keys}
        if self.seconds:
            row |= dict(zip(("ms", "ms_p20", "ms_p80"), self.milliseconds(), strict=True))
        return row


@dataclass
class Mode:
    """A way to run the step."""

    name: str
    mode: str
    make: Callable  # (setup, layout) -> Step
    start: Callable  # (step, setup) -> epoch(), see steps.py
    backends: dict | None = None

    def row(self, layout):
        backend = self.backends and self.backends["matmul"]
        return Row(self.name, self.mode, layout, backend)

    def settings(self):
        return braze.backend(**self.backends) if self.backends else contextlib.nullcontext()


def modes(device_type, all_modes):
    """Every mode, in the order of the table. The last but one is braze's headline."""
    cuda = device_type == "cuda"

    def stock(mode, start):
        return Mode("stock", mode, StockStep, lambda step, _: start(step))

    rows = [stock("eager", ways.eager)]
    if cuda:
        rows.append(stock("CUDA graph", ways.cuda_graph))
    rows.append(stock("compile", ways.compiled))
    if cuda:
        rows += [
            stock("compile reduce-overhead", lambda s: ways.compiled(s, "reduce-overhead")),
            stock("compile whole step", ways.compiled_whole_step),
            stock("compile in a CUDA graph", ways.compiled_in_cuda_graph),
        ]
    if all_modes:
        rows.append(stock("compile max-autotune", lambda s: ways.compiled(s, "max-autotune")))

    def ours(mode, fused, start, backends=_OWN):
        def make(setup, layout):
            return BrazeStep(setup, layout, fused)

        return Mode("braze", mode, make, start, backends)

    def eager(step, _):
        return ways.eager(step)

    def graph(step, setup):
        return step.captured(setup).epoch

    rows.append(ours("unfused eager", False, eager))
    if cuda:
        rows.append(ours("unfused CUDA graph", False, graph))
    rows.append(ours("fused eager", True, eager))
    if cuda:
        rows.append(ours("fused CUDA graph", True, graph))
    headline = "fused CUDA graph" if cuda else "fused eager"
    rows.append(ours(f"{headline}, auto", True, graph if cuda else eager, _AUTO))
    return rows


@dataclass
class _Running:
    mode: Mode
    row: Row
    losses: Iterator
    trial: float  # seconds per step, roughly


def measure(setup, chosen, rounds_of, all_modes, say):
    """Times the rows; returns them, the better layout of each only.

    Args:
        setup: :class:`Setup`. Its learning rate is that of the checks.
        chosen: called with a :class:`Mode`; returns the layouts to try, or ().
        rounds_of: timed steps per row, after the checked ones; of short steps up to _ROUNDS times
            as many.
        all_modes: also max-autotune, and on the CPU compile in both layouts.
        say: called with a sentence before whatever takes long.
    """
    # Each row compiles the same code with other modules; the default allows for 8 of them.
    torch._dynamo.config.recompile_limit = 64
    rows, running = [], []
    say("stock in float64")
    judge = Judge(setup)
    with judge.hard_images():
        for mode in modes(setup.device.type, all_modes):
            layouts = chosen(mode)
            # Compiling for a CPU takes long: in the layout that stock's eager step prefers.
            if mode.mode.startswith("compile") and setup.device.type == "cpu" and not all_modes:
                layouts = layouts and [_stock_layout(running) or layouts[-1]]
            if not layouts:
                continue
            fastest = None
            for layout in layouts:
                say(f"checking {mode.name} {mode.mode}, {layout}")
                row, ready = _prepare(mode, layout, setup, judge)
                if row.error:
                    rows.append(row)
                elif fastest is None or ready.trial < fastest.trial:
                    fastest = ready  # of the other, nothing is kept: 8192 images take memory
                ready = None
                gc.collect()
                if setup.device.type == "cuda":
                    torch.cuda.empty_cache()
            if fastest:
                rows.append(fastest.row)
                running.append(fastest)
    say("timing")
    rounds = min(_ROUNDS, rounds_of)
    for _ in range(rounds):
        for ready in running:
            if ready.row.error is None:
                enough = min(rounds_of, math.ceil(_LEAST / ready.trial))
                _time_round(ready, max(rounds_of // rounds, enough), setup)
    return rows


def _prepare(mode, layout, setup, judge):
    """The row, and what runs it, or None where it failed."""
    row = mode.row(layout)
    try:
        with mode.settings():
            step = mode.make(setup, layout)
            epoch = mode.start(step, setup)
            row.check, row.error = judge.check(step, epoch)
            if row.error:
                return row, None
            losses = ways.forever(epoch)
            trial = seconds_per_step(losses, 3, setup)
            # What takes a tenth of a millisecond cannot be told apart by three steps of it.
            steps = math.ceil(_LEAST / trial) if setup.device.type == "cuda" else 0
            trial = min(trial, seconds_per_step(losses, steps, setup)) if steps > 3 else trial
            return row, _Running(mode, row, losses, trial)
    except Exception as error:
        row.error = _first_line(error)
        return row, None


def _stock_layout(running):
    return next((r.row.layout for r in running if r.row.label == "stock eager"), None)


def seconds_per_step(losses, steps, setup):
    """Takes `steps` of the iterator `losses`."""
    setup.synchronize()
    start = time.perf_counter()
    for _ in itertools.islice(losses, steps):
        pass
    setup.synchronize()
    return (time.perf_counter() - start) / steps


def _time_round(ready, steps, setup):
    try:
        with ready.mode.settings():
            if setup.device.type == "cpu":
                # Not timed: the row before has had its memory from the same allocator, which has
                # given pages back since. Finding them again can take as long as a step.
                next(ready.losses)
            ready.row.seconds.append(seconds_per_step(ready.losses, steps, setup))
    except Exception as error:
        ready.row.error = _first_line(error)


def _first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def gains(rows):
    """Where braze's speed comes from, as factors; what was not timed is left out.

    "kernels" compares the unfused layers with the same of stock, both captured in a CUDA graph
    (both eager on a CPU); "fusion" the unfused with the fused ones, captured likewise; "graph" the
    fused ones in eager mode with the captured step.
    """
    ms = {row.label: row.milliseconds()[0] for row in rows if row.seconds and not row.error}
    how = "CUDA graph" if any("CUDA graph" in label for label in ms) else "eager"
    fused = f"braze fused {how}"
    stock = [value for label, value in ms.items() if label.startswith("stock")]
    pairs = {
        "best stock": (min(stock, default=None), ms.get(fused)),
        "kernels": (ms.get(f"stock {how}"), ms.get(f"braze unfused {how}")),
        "fusion": (ms.get(f"braze unfused {how}"), ms.get(fused)),
    }
    if how != "eager":
        pairs["graph"] = (ms.get("braze fused eager"), ms.get(fused))
    return {name: a / b for name, (a, b) in pairs.items() if a and b}


#: what :func:`measure` takes as `chosen` for everything
def every_layout(_):
    return list(LAYOUTS)
