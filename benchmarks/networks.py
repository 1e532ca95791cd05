"""``python -m braze bench networks``: whole training steps of networks people train, beside every
mode of stock PyTorch that captures or compiles them.

A step is forward, cross entropy, backward and SGD with momentum, on one resident batch in
channels_last, in milliseconds of the wall clock between two synchronisations. Both sides start from
the same weights; before it is timed, braze's loss is compared with float64's by the tolerance rule.

Stock's best, a compiled model in a CUDA graph, takes a minute to compile. So all of stock's modes
are timed once per GPU and versions (`--anew` does it again), and later the best of them beside
braze.
"""

import contextlib
import copy
import dataclasses
import gc
import itertools
import statistics
import time
import typing
from collections.abc import Callable

import torch

import braze
from benchmarks import results
from benchmarks.harness import set_precision
from benchmarks.network_models import MORE, NETWORKS
from braze.testing import assert_by_rule

KEY = ("network", "batch", "precision", "mode")
COLUMNS = [*KEY, "ms", "p20", "p80", "first_s", "memory_mb", "loss", "error", *results.ENVIRONMENT]
VERSIONS = ("device", "torch", "cuda", "cudnn")
#: precision -> what harness.set_precision calls it
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32", "fp32": "float32"}
#: what autocast casts to; fp16 with a GradScaler
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: of float32: a rounding of the precision, since two sums of roundings cancel by chance
LOSS_ULPS = {"bf16": 2**16, "fp16": 2**13, "tf32": 2**13, "fp32": 64}
ROUNDS = 9
#: seconds of each candidate and round
LEAST = 0.03
LR, MOMENTUM = 0.01, 0.9
#: steps before the timing: TrainStep's are two in eager mode, one of capture
WARM_UP = 4


@dataclasses.dataclass
class Cell:
    """One network at one batch size in one precision."""

    name: str
    batch_size: int
    precision: str
    device: torch.device

    #: mode -> a function of the cell that returns the step; filled in below
    STOCK: typing.ClassVar = {}
    OURS: typing.ClassVar = {}
    #: the CSV
    TABLE: typing.ClassVar = "networks"

    def __post_init__(self):
        self.network = {**NETWORKS, **MORE}[self.name]
        torch.manual_seed(0)
        self.model = self.network.make()
        self.batch = self.network.batch(self.batch_size, self.device)

    def fresh_model(self, dtype=torch.float32):
        model = copy.deepcopy(self.model).to(self.device, dtype, memory_format=torch.channels_last)
        return model.train()

    def autocast(self):
        dtype = AUTOCAST.get(self.precision)
        return torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()

    def grad_scaler(self):
        return torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    def loss(self, model, loss_function=torch.nn.functional.cross_entropy):
        images, labels = self.batch
        with self.autocast():
            return loss_function(model(images), labels)

    def exact(self, result):
        """A function of (model, images) in float64, or None where that does not fit the memory."""
        model = self.fresh_model(torch.float64)
        try:
            with torch.no_grad():
                return result(model, self.batch[0].double())
        except torch.OutOfMemoryError:
            return None

    def references(self):
        """The first step's result in float64, if there is room, and stock's in the precision."""

        def loss(model, images):
            return torch.nn.functional.cross_entropy(model(images), self.batch[1])

        with torch.no_grad():
            return self.exact(loss), self.loss(self.fresh_model())

    def judge(self, row, loss, references):
        """Writes down what a step returned; raises where it is braze's and wrong."""
        row["loss"] = f"{loss.item():.6f}"
        exact, stock_loss = references
        # A step that is captured by hand has trained before its first replay.
        if exact is not None and row["mode"] in self.OURS and "CUDA graph" not in row["mode"]:
            assert_by_rule(loss, stock_loss, exact, ulps=LOSS_ULPS[self.precision])


def eager(cell, model, optimizer, loss_function):
    scaler = cell.grad_scaler()

    def step():
        loss = cell.loss(model, loss_function)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def in_cuda_graph(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        loss = step()

    def replay(kept=step):  # with its model, whose memory the graph reads and writes
        graph.replay()
        return loss

    return replay


def stock(cell, compiled=False, graph=False):
    model = cell.fresh_model()
    fused = {"fused": True} if cell.device.type == "cuda" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, **fused)
    run = torch.compile(model) if compiled else model
    step = eager(cell, run, optimizer, torch.nn.CrossEntropyLoss())
    return in_cuda_graph(step) if graph else step


def ours(cell, captured):
    model = braze.convert(cell.fresh_model())
    optimizer = braze.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loss_function = braze.nn.CrossEntropyLoss()
    if not captured:
        return eager(cell, model, optimizer, loss_function)
    dtype, scaler = AUTOCAST.get(cell.precision), cell.grad_scaler()
    step = braze.TrainStep(model, loss_function, optimizer, autocast=dtype, grad_scaler=scaler)
    return lambda: step(*cell.batch)


def ours_compiled(cell, graph=False):
    """:func:`stock`, compiled, of the converted model."""
    model = braze.convert(cell.fresh_model())
    optimizer = braze.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    run = torch.compile(model, fullgraph=True)
    step = eager(cell, run, optimizer, braze.nn.CrossEntropyLoss())
    return in_cuda_graph(step) if graph else step


STOCK = {
    "stock eager": stock,
    "stock eager in a CUDA graph": lambda cell: stock(cell, graph=True),
    "stock compile": lambda cell: stock(cell, compiled=True),
    "stock compile in a CUDA graph": lambda cell: stock(cell, compiled=True, graph=True),
}
OURS = {
    "braze eager": lambda cell: ours(cell, captured=False),
    "braze TrainStep": lambda cell: ours(cell, captured=True),
    "braze compile": ours_compiled,
    "braze compile in a CUDA graph": lambda cell: ours_compiled(cell, graph=True),
}
Cell.STOCK, Cell.OURS = STOCK, OURS


def modes_for(cell, args, recorded):
    """The modes to time: braze's, and stock's best as recorded, or all of stock's; of converted
    models that are compiled only what is asked for."""
    on_gpu = cell.device.type == "cuda"
    captured = "graph", "TrainStep", "capture"
    modes = [*cell.STOCK, *cell.OURS]
    chosen = [m for m in modes if on_gpu or not any(part in m for part in captured)]
    if args.mode:
        return [m for m in chosen if any(part in m for part in args.mode)]
    chosen = [m for m in chosen if not m.startswith("braze compile")]
    if recorded and not args.anew:
        best = min(recorded, key=lambda row: float(row["ms"]))["mode"]
        return [m for m in chosen if m == best or m in cell.OURS]
    return chosen


@dataclasses.dataclass
class Running:
    row: dict
    step: Callable
    trial: float
    seconds: list


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step, steps, device):
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - start) / steps


def begin(cell, mode, references):
    """The candidate after its first steps, the first's result judged; None in place of it where it
    failed."""
    row = dict.fromkeys(COLUMNS, "")
    row |= dict(zip(KEY, (cell.name, str(cell.batch_size), cell.precision, mode), strict=True))
    on_gpu = cell.device.type == "cuda"
    if on_gpu:
        # What cuBLAS works in counts for whoever uses it: a process keeps 64 MB and more.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(cell.device)
        before = torch.cuda.memory_allocated(cell.device)
    try:
        start = time.perf_counter()
        step = {**cell.STOCK, **cell.OURS}[mode](cell)
        result = step().clone()
        for _ in range(WARM_UP):
            step()
        wait(cell.device)
        row["first_s"] = f"{time.perf_counter() - start:.1f}"
        if on_gpu:
            row["memory_mb"] = (torch.cuda.max_memory_allocated(cell.device) - before) >> 20
        cell.judge(row, result, references)
        return row, Running(row, step, seconds_of(step, 3, cell.device), [])
    except Exception as problem:  # of compilers too: the row says it
        row["error"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return row, None


def time_cell(cell, modes, quick):
    """A row per mode."""
    references = cell.references()
    rows, running = [], []
    for mode in modes:
        torch._dynamo.reset()
        gc.collect()
        row, ready = begin(cell, mode, references)
        rows.append(row)
        running += [ready] if ready else []
    for _ in range(3 if quick else ROUNDS):
        for ready in running:
            steps = max(1, round(LEAST / ready.trial))
            ready.seconds.append(seconds_of(ready.step, steps, cell.device))
    for ready in running:
        low, high = (
            statistics.quantiles(ready.seconds, n=5, method="inclusive")[i] for i in (0, 3)
        )
        ms = (statistics.median(ready.seconds), low, high)
        ready.row |= {k: f"{1e3 * v:.4g}" for k, v in zip(("ms", "p20", "p80"), ms, strict=True)}
    return rows


def recorded_stock(kind, folder, device):
    """(network, batch, precision) -> rows of stock's modes that an earlier run timed here."""
    here = {k: str(v) for k, v in results.environment(device).items() if k in VERSIONS}
    found = {}
    for row in results.load(folder, kind.TABLE):
        if row["mode"] in kind.STOCK and row["ms"] and all(row[k] == here[k] for k in VERSIONS):
            found.setdefault(tuple(row[k] for k in KEY[:3]), []).append(row)
    return found


def cells(args, batches=()):
    """(network, batch, precision) that the arguments leave. batches: in place of the networks'."""
    wanted = {**NETWORKS, **MORE} if args.more else NETWORKS
    names = [n for n in wanted if any(part in n for part in args.network or [""])]
    for name, precision in itertools.product(names, args.precision or ["bf16"]):
        for batch in args.batch or batches or wanted[name].batches:
            yield name, batch, precision


def run(device, args, kind=Cell, batches=()):
    """Yields the rows. kind: what is run of each network."""
    torch.backends.cudnn.benchmark = True
    known = recorded_stock(kind, args.results or results.CHECKOUT, device)
    deadline = args.seconds and time.monotonic() + args.seconds
    for name, batch, precision in cells(args, batches):
        if deadline and time.monotonic() > deadline:
            return
        set_precision(PRECISIONS[precision])
        try:
            cell = kind(name, batch, precision, device)
        except ImportError as problem:
            print(f"{name}: left out, {problem}")
            continue
        modes = modes_for(cell, args, known.get((name, str(batch), precision)))
        yield from time_cell(cell, modes, args.quick)
        del cell
        gc.collect()


def line(row):
    """A row for the terminal."""
    figures = row["error"] or f"{row['ms']:>7} ms, first steps {row['first_s']} s"
    if not row["error"] and row["memory_mb"] != "":
        figures += f", {row['memory_mb']} MB"
    return f"{row['network']:<16} {row['batch']:>5} {row['precision']} {row['mode']:<30} {figures}"
