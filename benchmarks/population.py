"""``python -m braze bench population``: one training step of many small networks: a
`braze.Population`, with its members on other numbers of streams, the same members one after
another, and stock PyTorch's `torch.func.vmap` over stacked weights.

The network is the CNN of examples/mnist.py; every member has weights, a learning rate and an order
of the images of its own. A step is the batch's load, forward, cross entropy, backward and SGD of
all members, in milliseconds of the wall clock between two synchronisations. Stock's rows read
resident batches, without a load. Before anything is timed, the population's losses and weights are
compared with the lone members', bit for bit, on as many multiprocessors. Beside it the host's time:
of a call that finds the device idle, until it returns. A step that takes no longer is limited by
the host.
"""

import copy
import gc
import importlib.util
import itertools
import statistics
import time
from pathlib import Path

import torch
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import braze
from benchmarks import results
from benchmarks.harness import set_precision
from benchmarks.markdown import op_sections, table
from benchmarks.networks import PRECISIONS, ROUNDS, in_cuda_graph, seconds_of, wait
from braze.data import DeviceLoader
from braze.population import branches

KEY = ("members", "batch", "precision", "mode")
COLUMNS = [
    *KEY, "ms", "p20", "p80", "us_a_member", "host_ms", "memory_mb", "error", *results.ENVIRONMENT,
]  # fmt: skip
WARM_UP, CHECKED, CALLS = 4, 8, 21
STREAMS = (1, 4, 8, 16)  # beside the population's own number
IMAGES = 60_000
# Seconds of a trial. What the host takes for its first step, before the device has anything to do,
# is half as long as a step.
LEAST = 0.2


def mnist_cnn():
    """The model of examples/mnist.py."""
    path = Path(__file__).parent.parent / "examples" / "mnist.py"
    spec = importlib.util.spec_from_file_location("mnist_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_model()


class Cell:
    """Members, batch size and precision, on a device."""

    def __init__(self, members, batch_size, precision, device):
        self.members, self.batch_size, self.device = members, batch_size, device
        self.precision = precision
        self.autocast = torch.bfloat16 if precision == "bf16" else None
        generator = torch.Generator().manual_seed(0)
        count = IMAGES if device.type == "cuda" else 20 * batch_size
        self.images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)
        self.rates = [0.01 * (1 + i / members) for i in range(members)]

    def make_model(self):
        return mnist_cnn().to(self.device, memory_format=torch.channels_last)

    def population(self):
        return braze.Population(self.make_model, self.members, seeds=range(self.members))

    def optimizer(self, model, i):
        return braze.optim.SGD(model.parameters(), lr=self.rates[i])

    def loaders(self):
        options = {"dtype": self.autocast or torch.float32, "drop_last": True}
        first = DeviceLoader(
            self.images, self.labels, self.batch_size, device=self.device, mean=0.13, std=0.31,
            memory_format=torch.channels_last, **options,
        )  # fmt: skip
        loaders = [first, *(copy.copy(first) for _ in range(1, self.members))]
        for i, loader in enumerate(loaders):
            loader.restart(i)
        return loaders


def endless(step):
    """A function that makes a bound step's next step, epoch after epoch."""
    losses = itertools.chain.from_iterable(step.epoch() for _ in itertools.count())
    return lambda: next(losses)


def together(cell, streams=None):
    number, branches.STREAMS = branches.STREAMS, streams or branches.STREAMS
    try:
        population = cell.population().convert()
        optimizers = [cell.optimizer(model, i) for i, model in enumerate(population)]
        loss_function = braze.nn.CrossEntropyLoss()
        step = population.train_step(loss_function, optimizers, autocast=cell.autocast)
        return endless(step.bind(cell.loaders())), population
    finally:
        branches.STREAMS = number


def one_after_another(cell):
    steps, models = [], []
    for i, (model, loader) in enumerate(zip(cell.population(), cell.loaders(), strict=True)):
        model = braze.convert(model)
        optimizer, loss_function = cell.optimizer(model, i), braze.nn.CrossEntropyLoss()
        step = braze.TrainStep(model, loss_function, optimizer, autocast=cell.autocast)
        steps.append(endless(step.bind(loader)))
        models.append(model)
    return lambda: [step() for step in steps], models


def stacked(cell, compiled=False, graph=False):
    """Stock PyTorch: one model's function over all members' weights at once."""
    models = list(cell.population())
    base = copy.deepcopy(models[0]).to("meta")
    params, _ = stack_module_state(models)
    params = {name: p.detach() for name, p in params.items()}
    rates = torch.tensor(cell.rates, device=cell.device)
    batches = [next(iter(loader)) for loader in cell.loaders()]
    images, labels = (torch.stack(part) for part in zip(*batches, strict=True))

    def loss_of(own, x, y):
        with torch.autocast(cell.device.type, torch.bfloat16, enabled=cell.autocast is not None):
            return torch.nn.functional.cross_entropy(functional_call(base, own, (x,)), y)

    def train():
        grads, losses = vmap(grad_and_value(loss_of))(params, images, labels)
        for name, p in params.items():
            p.sub_(rates.view(-1, *[1] * (p.dim() - 1)) * grads[name])
        return losses

    train = torch.compile(train) if compiled else train
    return (in_cuda_graph(train) if graph else train), models


def modes(device):
    """Name -> what makes the step, and what has to live as long."""
    on_gpu = device.type == "cuda"
    found = {"braze population": together, "braze one after another": one_after_another}
    for streams in STREAMS if on_gpu else ():
        name = f"braze population, {streams} stream{'s' * (streams > 1)}"
        found[name] = lambda cell, streams=streams: together(cell, streams)
    found["stock vmap"] = stacked
    found["stock vmap compiled"] = lambda cell: stacked(cell, compiled=True)
    if on_gpu:
        found["stock vmap in a CUDA graph"] = lambda cell: stacked(cell, graph=True)
        found["stock vmap compiled in a CUDA graph"] = lambda cell: stacked(cell, True, True)
    return found


def check(cell):
    """Raises AssertionError unless every member is what it is alone, bit for bit."""
    torch.use_deterministic_algorithms(True)
    try:
        mine, population = together(cell)
        theirs, models = one_after_another(cell)
        share = branches.share_of(cell.device, branches.chain_count(population))
        for _ in range(CHECKED):
            with braze.multiprocessors(share):
                alone = theirs()
            assert torch.equal(mine(), torch.stack(alone)), "other losses than alone"
        for model, lone in zip(population, models, strict=True):
            pairs = zip(model.parameters(), lone.parameters(), strict=True)
            assert all(torch.equal(p, q) for p, q in pairs), "other weights than alone"
    finally:
        torch.use_deterministic_algorithms(False)


def begin(cell, mode, make):
    """A row, and the step to time or None where it failed."""
    values = (str(cell.members), str(cell.batch_size), cell.precision, mode)
    row, on_gpu = dict.fromkeys(COLUMNS, "") | dict(zip(KEY, values, strict=True)), False
    try:
        if mode == "braze population":
            check(cell)
        if on_gpu := cell.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(cell.device)
            before = torch.cuda.memory_allocated(cell.device)
        step, kept = make(cell)
        for _ in range(WARM_UP):
            step()
        wait(cell.device)
        if on_gpu:
            row["memory_mb"] = (torch.cuda.max_memory_allocated(cell.device) - before) >> 20
        return row, (step, kept, seconds_of(step, 3, cell.device))
    except Exception as problem:  # of compilers too: the row says it
        row["error"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return row, None


def host_seconds(step, device):
    """Of a call, until it returns."""
    seconds = []
    for _ in range(CALLS):
        wait(device)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    wait(device)
    return statistics.median(seconds)


def time_cell(cell, args):
    """A row per mode."""
    ready, rows = [], []
    for mode, make in modes(cell.device).items():
        if args.mode and not any(part in mode for part in args.mode):
            continue
        torch._dynamo.reset()
        gc.collect()
        row, found = begin(cell, mode, make)
        rows.append(row)
        if found:
            ready.append((row, *found, []))
    for _ in range(3 if args.quick else ROUNDS):
        for _, step, _, trial, seconds in ready:
            seconds.append(seconds_of(step, max(1, round(LEAST / trial)), cell.device))
    for row, step, *_, seconds in ready:
        row["host_ms"] = f"{1e3 * host_seconds(step, cell.device):.4g}"
        low, *_, high = statistics.quantiles(seconds, n=5, method="inclusive")
        ms = statistics.median(seconds), low, high
        row |= {k: f"{1e3 * v:.4g}" for k, v in zip(("ms", "p20", "p80"), ms, strict=True)}
        row["us_a_member"] = f"{1e6 * ms[0] / cell.members:.4g}"
    return rows


def run(device, args):
    """Yields the rows."""
    torch.backends.cudnn.benchmark = True
    on_gpu = device.type == "cuda"
    for precision in args.precision or (["bf16", "tf32", "fp32"] if on_gpu else ["fp32"]):
        set_precision(PRECISIONS[precision])
        for members in args.members or ([8, 32] if on_gpu else [4]):
            for batch in args.batch or ([64] if on_gpu else [16]):
                yield from time_cell(Cell(members, batch, precision, device), args)
                gc.collect()


def line(row):
    """A row for the terminal."""
    figures = row["error"] or (
        f"{row['ms']:>8} ms  {row['us_a_member']:>7} us a member  host {row['host_ms']:>7} ms"
    )
    what = f"{row['members']:>3} of batch {row['batch']:>4} {row['precision']}"
    return f"{what} {row['mode']:<36} {figures}"


def sections(folder):
    """The table, per device and versions."""
    return op_sections(folder, "population", summary)


def summary(rows):
    """A line per mode."""
    head = ["members", "batch", "precision", "what"]
    head += ["|", "ms", "p20", "host ms", "µs a member", "MB"]
    columns = [*KEY, "ms", "p20", "host_ms", "us_a_member", "memory_mb"]
    shown = [row for row in rows if not row["error"]]
    return table(head, [[row.get(name, "") for name in columns] for row in shown])
