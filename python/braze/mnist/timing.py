"""Milliseconds per training step of braze and of every way to run stock PyTorch.

All rows start from the same weights and see the same batches; their losses are compared before
anything is timed. The timed rounds are interleaved, so that clocks and neighbours hit all rows
alike.
"""

import contextlib
import copy
import time
from dataclasses import dataclass, field

import numpy as np
import torch

import braze
from braze.mnist.example import MEAN, STD, make_loader

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_CHECKED_STEPS = 5
# Rounding differs between kernels and grows over the checked steps; a wrong kernel is far off.
_LOSS_TOLERANCE = 0.05


@dataclass
class Row:
    """One line of the table: an implementation in a mode and a layout."""

    name: str
    mode: str
    layout: str
    error: str | None = None
    seconds: list = field(default_factory=list)

    @property
    def label(self):
        return f"{self.name} {self.mode}"

    def milliseconds(self):
        """The median and the 20th and 80th percentile over the rounds."""
        return [1e3 * float(q) for q in np.percentile(self.seconds, (50, 20, 80))]

    def as_dict(self):
        row = {"name": self.name, "mode": self.mode, "layout": self.layout, "error": self.error}
        if self.seconds:
            row |= dict(zip(("ms", "ms_p20", "ms_p80"), self.milliseconds(), strict=True))
        return row


class Step:
    """One whole training step: batch load, forward, backward, update, zero-grad."""

    def __init__(self, setup, name, layout):
        nn, sgd, options = setup.implementation(name)
        format = LAYOUTS[layout]
        self.model = setup.make_model(nn).to(setup.device, memory_format=format)
        self.loss_function = nn.CrossEntropyLoss()
        self.optimizer = sgd(self.model.parameters(), lr=setup.lr, **options)
        self.loader = setup.fresh_loader()
        self.loader.memory_format = format
        self.gather = self.loader.gather if name == "braze" else self._gather_by_torch
        self.autocast = setup.autocast()

    def _gather_by_torch(self, indices):
        """The loader's batch made by torch's own ops: stock's rows hold nothing of braze, and the
        compiler can fuse them."""
        images = self.loader.images.index_select(0, indices)
        images = images.to(torch.float32, memory_format=self.loader.memory_format)
        images = (images / 255 - MEAN) / STD
        return images, self.loader.labels.index_select(0, indices)

    def forward(self, images, labels):
        with self.autocast:
            return self.loss_function(self.model(images), labels)

    def __call__(self, indices):
        loss = self.forward(*self.gather(indices))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@dataclass
class Setup:
    """What all rows share."""

    make_model: object  # nn namespace -> model, always with the same initial weights
    digits: braze.data.Digits
    device: torch.device
    precision: str
    batch_size: int
    lr: float
    seed: int

    def __post_init__(self):
        self.loader = make_loader(
            self.digits.train_images,
            self.digits.train_labels,
            self.batch_size,
            self.device,
            seed=self.seed,
            drop_last=True,
        )

    def implementation(self, name):
        if name == "braze":
            return braze.nn, braze.optim.SGD, {}
        return torch.nn, torch.optim.SGD, {"fused": True}

    def autocast(self):
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def fresh_loader(self):
        """A loader at the start of its sequence; all share one copy of the images."""
        loader = copy.copy(self.loader)
        loader.restart(self.seed)
        return loader

    def index_batches(self):
        """Endless batches of indices, epoch after epoch, the same for every row."""
        loader = self.fresh_loader()
        while True:
            yield from loader.index_batches()

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def eager(step):
    return step


def cuda_graph(step):
    """The step recorded once and replayed: no launch costs on the CPU."""
    static_indices = torch.arange(step.loader.batch_size, device=step.loader.images.device)
    # The warm-up steps must not train: the rows' losses are compared.
    state = copy.deepcopy(step.model.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(static_indices)
    torch.cuda.current_stream().wait_stream(stream)
    step.model.load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(static_indices)

    def replay(indices):
        static_indices.copy_(indices)
        graph.replay()
        return loss

    replay.step = step  # the graph reads and writes its weights: they have to live as long
    return replay


def compiled(step, mode="default"):
    """Forward and loss, with their backward, compiled."""
    step.forward = torch.compile(step.forward, mode=mode)
    return step if mode == "default" else _marked(step)


def compiled_whole_step(step, mode="reduce-overhead"):
    """Gather, forward, backward and update in one compiled function (Dynamo splits it)."""
    # The compiler fuses the foreach update, but not the one that is fused already.
    group = step.optimizer.param_groups[0]
    step.optimizer = torch.optim.SGD(group["params"], lr=group["lr"], foreach=True)
    run = _marked(torch.compile(step.__call__, mode=mode))
    # One address for all batches: its CUDA graphs read the indices where the first ones were.
    static_indices = torch.zeros_like(step.loader.labels[: step.loader.batch_size])
    return lambda indices: run(static_indices.copy_(indices))


def compiled_in_cuda_graph(step):
    return cuda_graph(compiled(step))


def _marked(step):
    def run(indices):
        torch.compiler.cudagraph_mark_step_begin()
        return step(indices)

    return run


def modes(device_type, all_modes):
    """(implementation, mode, builder) in the order of the table."""
    cuda = device_type == "cuda"
    rows = [("stock", "eager", eager)]
    if cuda:
        rows.append(("stock", "CUDA graph", cuda_graph))
    rows.append(("stock", "compile", compiled))
    if cuda:
        rows += [
            ("stock", "compile reduce-overhead", lambda s: compiled(s, "reduce-overhead")),
            ("stock", "compile whole step", compiled_whole_step),
            ("stock", "compile in a CUDA graph", compiled_in_cuda_graph),
        ]
    if all_modes:
        rows.append(("stock", "compile max-autotune", lambda s: compiled(s, "max-autotune")))
    rows.append(("braze", "eager", eager))
    if cuda:
        rows.append(("braze", "CUDA graph", cuda_graph))
    return rows


def measure(setup, names, steps, all_modes, say):
    """Times the rows; returns them, the better layout of each only.

    Args:
        setup: :class:`Setup`.
        names: the implementations, of "braze" and "stock".
        steps: timed steps per row, after warm-up.
        all_modes: also max-autotune, and on the CPU compile in both layouts.
        say: called with a sentence before whatever takes long.
    """
    # Each row compiles the same code with other modules; the default allows for 8 of them.
    torch._dynamo.config.recompile_limit = 64
    rows, running, reference = [], [], None
    for name, mode, builder in modes(setup.device.type, all_modes):
        if name not in names:
            continue
        # Compiling for a CPU takes long: in the layout that stock's eager step prefers.
        slow_to_build = mode.startswith("compile") and setup.device.type == "cpu"
        once = slow_to_build and not all_modes
        for layout in [_better_layout(running, setup)] if once else LAYOUTS:
            row = Row(name, mode, layout)
            rows.append(row)
            say(f"preparing {row.label}, {layout}")
            try:
                run = builder(Step(setup, name, layout))
                batches = setup.index_batches()
                for _ in range(_CHECKED_STEPS):
                    loss = float(run(next(batches)))
                if reference is None:
                    reference = loss
                elif not abs(loss - reference) <= _LOSS_TOLERANCE * abs(reference):
                    raise ArithmeticError(
                        f"loss {loss:.4f} after {_CHECKED_STEPS} steps, but {rows[0].label} "
                        f"has {reference:.4f}"
                    )
            except Exception as error:
                row.error = _first_line(error)
                continue
            running.append((row, run, batches))
    say("timing")
    rounds = min(10, steps)
    for _ in range(rounds):
        for row, run, batches in running:
            if row.error is None:
                _time_round(row, run, batches, steps // rounds, setup)
    return _better_of_layouts(rows)


def _time_round(row, run, batches, steps, setup):
    try:
        setup.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            run(next(batches))
        setup.synchronize()
        row.seconds.append((time.perf_counter() - start) / steps)
    except Exception as error:
        row.error = _first_line(error)


def _better_layout(running, setup):
    """The layout in which stock's eager step is faster, from a few steps."""
    trial = {}
    for row, run, batches in running:
        if row.label == "stock eager":
            probe = Row(row.name, row.mode, row.layout)
            _time_round(probe, run, batches, 2, setup)
            trial[row.layout] = probe.seconds[0] if probe.seconds else float("inf")
    return min(trial, key=trial.get) if trial else next(iter(LAYOUTS))


def _better_of_layouts(rows):
    best = {}
    for row in rows:
        other = best.get(row.label)
        if other is None or (not row.error and (other.error or _median(row) < _median(other))):
            best[row.label] = row
    return list(best.values())


def _median(row):
    return row.milliseconds()[0]


def _first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
