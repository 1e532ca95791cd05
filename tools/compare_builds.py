"""Times two builds of braze against each other, in processes that take turns on one machine.

    python tools/compare_builds.py OLD NEW                       # two checkouts, both built
    python tools/compare_builds.py OLD NEW --what mnist --out build/compare.json

For changes that must not cost speed: both register the same ops, so one process cannot hold both.
Each process reads the training step of ``python -m braze mnist`` (batch sizes and precisions),
matrix products, and convolutions with their gradients; a reading's figure is the best of a build's
turns. "Worse in every turn" is a reading whose best with NEW is `--limit` behind OLD's worst.
Nothing else may run beside it.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PRECISIONS = ("fp32", "tf32", "bf16")
BATCHES = (64, 1024, 8192)
# M, N, K of x @ w.T: what networks have, small and large, with odd ones.
PRODUCTS = [
    *((4096, 4096, 4096), (8192, 1024, 1024), (1024, 1024, 8192), (2048, 512, 4608)),
    *((512, 512, 512), (64, 128, 9216), (8192, 10, 128), (2000, 256, 27), (1000, 1000, 1000)),
    *((257, 513, 1025), (128, 50257, 768), (2048, 2048, 64)),
]
# batch, channels, filters, kernel, stride, padding, height and width
CONVOLUTIONS = [
    *((64, 64, 64, 3, 1, 1, 56), (64, 128, 128, 3, 1, 1, 28), (1024, 32, 64, 3, 1, 1, 14)),
    *((1024, 1, 32, 3, 1, 1, 28), (64, 3, 64, 7, 2, 3, 224), (64, 256, 64, 1, 1, 0, 56)),
    *((64, 512, 512, 3, 1, 1, 7), (64, 16, 16, 3, 1, 1, 33)),
]
LAYOUTS = ("contiguous", "channels_last")


def set_precision(torch, precision):
    value = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = value
    torch.backends.cudnn.conv.fp32_precision = value


def mnist(torch, device, seconds):
    """Seconds of one step, per batch size and precision; own kernels, channels_last."""
    import braze
    from braze.mnist import steps

    digits = braze.data.load_mnist()
    cpu = device.type == "cpu"
    for precision in PRECISIONS[::2] if cpu else PRECISIONS:
        for batch in BATCHES[:2] if cpu else BATCHES:
            set_precision(torch, precision)
            setup = steps.Setup(digits, device, precision, batch, 0.1, 0)
            with braze.backend(matmul="braze", conv2d="braze"):
                step = steps.BrazeStep(setup, "channels_last").captured(setup)
                losses = steps.forever(step.epoch)
                for _ in range(5):
                    next(losses)
                readings, spent, count = [], 0.0, 2
                while spent < seconds or len(readings) < 5:
                    setup.synchronize()
                    start = time.perf_counter()
                    for _ in range(count):
                        next(losses)
                    setup.synchronize()
                    lasted = time.perf_counter() - start
                    readings.append(lasted / count)
                    spent += lasted
                    if lasted < 0.02:  # idle time at both ends of a round has to count little
                        count, readings = 2 * count, []
            yield f"mnist {precision} {batch}", statistics.median(readings)
            del step, losses


def once(device, function, seconds):
    """Median seconds of a call: on a GPU a replay of its graph, cold caches."""
    from braze._timing import timer_for

    timer = timer_for(device)
    ready = timer.prepare(function)
    first = timer.microseconds([timer.once(ready) for _ in range(3)])
    repeats = min(200, max(10, int(seconds * 1e6 / min(first))))
    return statistics.median(timer.microseconds([timer.once(ready) for _ in range(repeats)])) / 1e6


def products(torch, device, seconds):
    import braze

    small = device.type == "cpu"
    for precision in PRECISIONS[::2] if small else PRECISIONS:
        set_precision(torch, precision)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for m, n, k in PRODUCTS:
            if small and m * n * k > 2**30:
                continue
            x = torch.randn(m, k, device=device, dtype=dtype)
            w = torch.randn(n, k, device=device, dtype=dtype)
            with braze.backend(matmul="braze"):
                name = f"matmul {precision} {m}x{n}x{k}"
                yield name, once(device, lambda x=x, w=w: braze.matmul(x, w.T), seconds)


def convolutions(torch, device, seconds):
    import braze
    import braze.nn.functional as F

    small = device.type == "cpu"
    for precision in PRECISIONS[::2] if small else PRECISIONS:
        set_precision(torch, precision)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for n, c, k, kernel, stride, padding, size in CONVOLUTIONS:
            for layout in LAYOUTS:
                n = min(n, 16) if small else n
                format = getattr(torch, f"{layout}_format", torch.channels_last)
                like = dict(device=device, dtype=dtype)
                x = torch.randn(n, c, size, size, **like).to(memory_format=format)
                w = torch.randn(k, c, kernel, kernel, **like).to(memory_format=format)
                x.requires_grad_(), w.requires_grad_()
                grad = torch.randn_like(F.conv2d(x, w, None, stride, padding))

                def forward(x=x, w=w, stride=stride, padding=padding):
                    return F.conv2d(x, w, None, stride, padding)

                def both(x=x, w=w, grad=grad, forward=forward):
                    # Recorded in one graph: a gradient node runs on its forward's stream.
                    torch.autograd.grad(forward(), (x, w), grad)

                name = f"conv2d {precision} {n}x{c}x{size} {k}x{kernel}/{stride} {layout}"
                with braze.backend(conv2d="auto"):
                    with torch.no_grad():
                        yield f"{name} forward", once(device, forward, seconds)
                    yield f"{name} all", once(device, both, seconds)


WHAT = {"mnist": mnist, "products": products, "convolutions": convolutions}


def worker(arguments):
    import torch

    device = torch.device(arguments.device)
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(arguments.threads)
    # What tensors share a bank or a cache set depends on where they lie.
    _elsewhere = torch.empty(arguments.number * 4_915_200, dtype=torch.uint8, device=device)
    for what in arguments.what:
        for name, seconds in WHAT[what](torch, device, arguments.seconds):
            print(json.dumps({"what": what, "name": name, "seconds": seconds}), flush=True)


def turn(tree, number, arguments):
    """One process's readings: (what, name) -> seconds. Each turn has its tensors elsewhere."""
    tree = Path(tree).resolve()
    paths = [str(tree / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, str(tree), str(tree), "--worker"]
    for name in ("device", "seconds", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--number", str(number), "--what", *arguments.what]
    lines = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    readings = map(json.loads, lines.splitlines())
    return {(reading["what"], reading["name"]): reading["seconds"] for reading in readings}


def compare(old, new, limit):
    """Rows of what both builds read, from the turns of each."""
    rows = []
    for key in old[0]:
        if not all(key in turn for turn in old + new):
            continue  # an op that one of the builds lacks
        before, after = ([turn[key] for turn in turns] for turns in (old, new))
        rows.append(
            {
                "what": key[0],
                "name": key[1],
                "old_us": [1e6 * s for s in before],
                "new_us": [1e6 * s for s in after],
                "ratio": min(after) / min(before),
                "repeatedly_worse": min(after) > (1 + limit) * max(before),
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="a checkout with its libraries built")
    parser.add_argument("new", help="the other")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--turns", type=int, default=2, help="processes per build")
    parser.add_argument("--seconds", type=float, default=0.05, help="at least, per reading")
    parser.add_argument("--limit", type=float, default=0.03, help="a loss that is listed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--out", type=Path, help="a JSON file with all readings")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return

    old, new = [], []
    for number in range(arguments.turns):
        old.append(turn(arguments.old, 2 * number, arguments))
        new.append(turn(arguments.new, 2 * number + 1, arguments))
    rows = compare(old, new, arguments.limit)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    for what in arguments.what:
        ratios = [row["ratio"] for row in rows if row["what"] == what]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{what}: new / old {mean:.3f} (geometric mean of {len(ratios)}), "
                  f"{min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip
    for row in rows:
        if row["repeatedly_worse"] or row["what"] == "mnist":
            mark = "  worse in every turn" if row["repeatedly_worse"] else ""
            print(f"  {row['name']}: {min(row['old_us']):.1f} -> {min(row['new_us']):.1f} µs "
                  f"({row['ratio']:.3f}){mark}")  # fmt: skip


if __name__ == "__main__":
    main()
