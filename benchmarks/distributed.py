"""``python -m braze bench distributed``: training steps on one and on several GPUs of one host.

Programs that a user runs, started by torchrun: examples/ddp_resnet.py and ``-m braze mnist``, each
GPU with a batch of its own and with as many images, so that epochs are as long. One process trains
without DistributedDataParallel: what is compared is a user's choice. The cases of a program take
turns, several times; a row is the median.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import results
from benchmarks.markdown import op_sections, table

KEY = ("program", "batch", "precision", "statistics", "gpus")
COLUMNS = [*KEY, "ms", "least", "most", "error", *results.ENVIRONMENT]
ROUNDS, SECONDS = 2, 300
ROOT = Path(__file__).parent.parent


class Program(NamedTuple):
    """What is started.

    Attributes:
        images: an option and how many of each GPU follow it.
        synchronized: what makes it normalise by all processes' images.
    """

    name: str
    batch: int
    precision: str
    command: tuple
    images: tuple
    synchronized: tuple = ()


def programs(on_gpu, quick, most):
    """On a CPU small ones: whether all of this works. most: processes."""
    resnet = str(ROOT / "examples" / "ddp_resnet.py")
    if on_gpu:
        steps = "60" if quick else "200"
        of_resnet = (resnet, "--depth", "50", "--batch", "64", "--steps", steps)
        of_mnist = ("-m", "braze", "mnist", "--batch", "8192", "--precision", "bf16")
        return [
            Program("ResNet-50", 64, "bf16", of_resnet, ("--images", 256), ("--sync",)),
            Program("MNIST CNN", 8192, "bf16", of_mnist, ("--limit", 60_000 // most)),
        ]
    of_resnet = (resnet, "--depth", "18", "--image", "32", "--batch", "4", "--steps", "4")
    of_mnist = ("-m", "braze", "mnist", "--epochs", "1", "--steps", "1")
    return [
        Program("ResNet-18, 32 x 32", 4, "fp32", of_resnet, ("--images", 16), ("--sync",)),
        Program("MNIST CNN", 64, "fp32", (*of_mnist, "--device", "cpu"), ("--limit", 128)),
    ]


def milliseconds(command, gpus, folder):
    """Of a step, as the program prints it.

    Raises:
        RuntimeError: it failed, or printed none.
    """
    start = sys.executable, "-m", "torch.distributed.run", "--standalone"
    start = *start, "--nproc-per-node", str(gpus), *command
    done = subprocess.run(start, capture_output=True, text=True, timeout=SECONDS, cwd=folder)
    found = re.search(r"([\d.]+) ms", done.stdout)
    if done.returncode or not found:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(next((x for x in lines if "rror" in x), "no figure"))
    return float(found[1])


def cases_of(program, most):
    """(statistics, GPUs, command)."""
    option, images = program.images
    for gpus in (2**i for i in range(most.bit_length())):
        command = *program.command, option, str(images * gpus)
        yield "own", gpus, command
        if program.synchronized and gpus > 1:
            yield "all GPUs'", gpus, (*command, *program.synchronized)


def run(device, args):
    """Yields the rows."""
    on_gpu = device.type == "cuda"
    most = torch.cuda.device_count() if on_gpu else 2
    for program in programs(on_gpu, args.quick, most):
        if args.network and not any(part in program.name for part in args.network):
            continue
        cases = list(cases_of(program, most))
        found = {case: [] for case in cases}
        errors = {}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(1 if args.quick else ROUNDS):
                for case in cases:
                    if case in errors:
                        continue
                    try:
                        found[case].append(milliseconds(case[2], case[1], folder))
                    except (RuntimeError, subprocess.TimeoutExpired) as problem:
                        errors[case] = f"{type(problem).__name__}: {problem}".splitlines()[0]
        for case in cases:
            values = program.name, program.batch, program.precision, *case[:2]
            row = dict.fromkeys(COLUMNS, "") | dict(zip(KEY, map(str, values), strict=True))
            if case in errors:
                row["error"] = errors[case]
            else:
                ms = statistics.median(found[case]), min(found[case]), max(found[case])
                row |= zip(("ms", "least", "most"), (f"{v:.4g}" for v in ms), strict=True)
            yield row


def line(row):
    """A row for the terminal."""
    what = f"{row['program']} {row['batch']} {row['precision']} statistics: {row['statistics']}"
    return f"{what:<60} {row['gpus']} GPUs  {row['error'] or row['ms']} ms"


def sections(folder):
    """The table, per device and versions."""
    return op_sections(folder, "distributed", summary)


def summary(rows):
    """A line per case; how many times one GPU's images a second."""
    head = ["program", "batch of a GPU", "precision", "statistics", "|", "GPUs"]
    head += ["ms", "images/s", "of one GPU's"]
    body, alone = [], {}
    for row in rows:
        if row["error"]:
            continue
        program, gpus, ms = row["program"], int(row["gpus"]), float(row["ms"])
        rate = gpus * int(row["batch"]) / ms * 1e3
        alone.setdefault(program, rate if gpus == 1 else None)
        gain = f"{rate / alone[program]:.2f}" if alone[program] else ""
        times = f"{row['ms']} ({row['least']}, {row['most']})"
        body.append([program, *(row[k] for k in KEY[1:]), times, f"{rate:,.0f}", gain])
    return table(head, body)
