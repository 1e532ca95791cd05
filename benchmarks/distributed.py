"""``python -m braze bench distributed``: training steps on one and on several GPUs of one host.

Programs that a user runs, started by torchrun: examples/ddp_resnet.py and ``-m braze mnist``, each
GPU with a batch of its own, on the same data set however many they are. One process trains without
DistributedDataParallel: what is compared is a user's choice. What a program prints is a median of
several rounds.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import results
from benchmarks.markdown import op_sections, table

KEY = ("program", "batch", "precision", "statistics", "gpus")
COLUMNS = [*KEY, "ms", "error", *results.ENVIRONMENT]
SECONDS = 300
ROOT = Path(__file__).parent.parent


class Program(NamedTuple):
    """What is started.

    Attributes:
        synchronized: what makes it normalise by all processes' images.
    """

    name: str
    batch: int
    precision: str
    command: tuple
    synchronized: tuple = ()


def programs(on_gpu, quick, most):
    """On a CPU small ones: whether all of this works. most: processes, for all of which there are
    images."""
    resnet = str(ROOT / "examples" / "ddp_resnet.py")
    if on_gpu:
        steps = "60" if quick else "200"
        of_resnet = (resnet, "--depth", "50", "--batch", "64", "--steps", steps)
        of_resnet = (*of_resnet, "--images", str(256 * most))
        of_mnist = ("-m", "braze", "mnist", "--batch", "8192", "--precision", "bf16")
        return [
            Program("ResNet-50", 64, "bf16", of_resnet, ("--sync",)),
            Program("MNIST CNN", 8192, "bf16", of_mnist),
        ]
    of_resnet = (resnet, "--depth", "18", "--image", "32", "--batch", "4", "--steps", "4")
    of_resnet = (*of_resnet, "--images", str(16 * most))
    of_mnist = ("-m", "braze", "mnist", "--epochs", "1", "--steps", "1", "--device", "cpu")
    of_mnist = (*of_mnist, "--limit", str(128 * most))
    return [
        Program("ResNet-18, 32 x 32", 4, "fp32", of_resnet, ("--sync",)),
        Program("MNIST CNN", 64, "fp32", of_mnist),
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
    for gpus in (2**i for i in range(most.bit_length())):
        yield "own", gpus, program.command
        if program.synchronized and gpus > 1:
            yield "all GPUs'", gpus, (*program.command, *program.synchronized)


def run(device, args):
    """Yields the rows."""
    on_gpu = device.type == "cuda"
    most = torch.cuda.device_count() if on_gpu else 2
    for program in programs(on_gpu, args.quick, most):
        if args.network and not any(part in program.name for part in args.network):
            continue
        for normalised, gpus, command in cases_of(program, most):
            values = program.name, program.batch, program.precision, normalised, gpus
            row = dict.fromkeys(COLUMNS, "") | dict(zip(KEY, map(str, values), strict=True))
            try:
                with tempfile.TemporaryDirectory() as folder:
                    row["ms"] = f"{milliseconds(command, gpus, folder):.4g}"
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                row["error"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
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
        body.append([program, *(row[k] for k in KEY[1:]), row["ms"], f"{rate:,.0f}", gain])
    return table(head, body)
