"""``torchrun --nproc-per-node 2 -m braze mnist``: several processes train the CNN together.

Each has the whole data set, takes its part of every batch (``--batch`` images), normalises by its
own part's statistics, and averages gradients with the others by DistributedDataParallel: NCCL on
GPUs, Gloo on CPUs. Where torchrun starts one process, it does the same alone, without all this.
"""

import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch.nn.parallel import DistributedDataParallel

from braze.mnist import report
from braze.mnist.steps import BrazeStep, forever
from braze.mnist.timing import seconds_per_step

_ROUNDS = 5  # of timed steps


def count():
    """How many processes torchrun has started; 0 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if dist.is_torchelastic_launched() else 0


def device_name():
    """A GPU for each process of a machine, where there are GPUs."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def group(device):
    """The processes' group within the block."""
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def first_alone():
    """Runs the block in the first process, then in the others: who finds no files fetches them."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def train_and_time(args, console, setup, about, epochs, steps):
    """Trains, then times steps, and writes both down.

    Args:
        args: of the command line.
        console: a rich console, which says nothing but in the first process.
        setup: :class:`braze.mnist.steps.Setup` of this process.
        about: what goes into the JSON file beside the figures.
        epochs, steps: to train, and to time.
    """
    first, ranks = dist.get_rank() == 0, dist.get_world_size()
    eager = BrazeStep(setup, "channels_last")
    model = eager.model
    if ranks > 1:
        ids = [setup.device.index] if setup.device.type == "cuda" else None
        eager.model = DistributedDataParallel(model, device_ids=ids)
    step = eager.captured(setup)
    start = time.perf_counter()
    losses = []
    with Progress(console=console, disable=not first) as progress:
        bar = progress.add_task("training", total=epochs * len(eager.loader))
        for _ in range(epochs):
            for loss in step.epoch():
                losses.append(loss)
                progress.advance(bar)
    setup.synchronize()
    seconds = time.perf_counter() - start
    right = setup.test_accuracy(model, eager.loader.memory_format) if first else None
    console.print(
        f"{ranks} process{'es' * (ranks > 1)}, {setup.batch_size} images each: "
        f"test accuracy {right or 0:.2%} after "
        f"{epochs} epoch{'s' * (epochs > 1)} in {seconds:.1f} s"
    )
    milliseconds = _milliseconds(step, setup, steps)
    together = ranks * setup.batch_size
    console.print(
        f"One step: {milliseconds:.3f} ms, {together / milliseconds * 1e3:,.0f} images/s together"
    )
    if first:
        path = args.out / "mnist_ranks.json"
        figures = {
            "ranks": ranks,
            "batch": setup.batch_size,
            "lr": setup.lr,
            "epochs": epochs,
            "accuracy": right,
            "seconds": seconds,
            "losses": torch.stack(losses).tolist(),
            "steps": steps,
            "ms": milliseconds,
        }
        report.write_json(path, about | figures)
        console.print(f"Figures: {path.resolve()}")


def _milliseconds(step, setup, steps):
    """Median of a few rounds, each begun by all processes together."""
    batches, rounds = forever(step.epoch), []
    for _ in range(_ROUNDS):
        next(batches)
        setup.synchronize()
        dist.barrier()
        rounds.append(1e3 * seconds_per_step(batches, steps, setup))
    return statistics.median(rounds)
