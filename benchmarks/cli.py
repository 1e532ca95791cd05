"""What ``python -m braze bench`` runs: ops, ladders, products, counters, rendering."""

import functools
import importlib

import torch

from benchmarks import (
    counters,
    depthwise,
    ladder,
    norm_act,
    products,
    products_accuracy,
    render,
    results,
)
from benchmarks.harness import run_benchmark

OPS = [
    "matmul",
    "linear",
    "conv2d",
    "batch_norm",
    "relu",
    "pool",
    "softmax",
    "cross_entropy",
    "sgd",
    "gather",
    "transpose",
    "vector_add",
]


def of_op(run, op, device, args):
    """The rows of an op's benchmarks: `run` is run_benchmark or run_ladder."""
    module = ladder.MODULES[op] if run is ladder.run_ladder else op
    for benchmark in importlib.import_module(f"benchmarks.{module}").BENCHMARKS:
        yield from run(benchmark, device, args)


def tables(what):
    """What the command line names: (name of the CSV, rows of (device, args), line of a row) each.

    Raises:
        ValueError: for a word that names nothing.
    """
    if what == ["products"]:
        return [
            ("products", products.run, products.line),
            ("products_accuracy", products_accuracy.run, products_accuracy.line),
        ]
    if what == ["depthwise"]:
        return [("depthwise", depthwise.run, depthwise.line)]
    if what == ["norm_act"]:
        return [("norm_act", norm_act.run, norm_act.line)]
    if what == ["counters", "matmul"]:
        return [("counters_matmul", counters.run, counters.line)]
    is_ladder = what[:1] == ["ladder"]
    known = list(ladder.MODULES) if is_ladder else OPS
    ops = (what[1:] if is_ladder else what) or known
    unknown = [op for op in ops if op not in known]
    if unknown:
        raise ValueError(f"expected {', '.join(known)}, but got {', '.join(unknown)}")
    prefix, run = ("ladder_", ladder.run_ladder) if is_ladder else ("", run_benchmark)
    return [(prefix + op, functools.partial(of_op, run, op), results.line) for op in ops]


def main(args, root):
    folder = args.results or root / "benchmarks" / "results"
    if args.what == ["render"]:
        changed = render.render(root, folder)
        print("rewritten: " + (", ".join(changed) or "nothing, all tables are up to date"))
        return 0
    try:
        chosen = tables(args.what)
    except ValueError as error:
        print(f"braze bench: {error}")
        return 2
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wrong = 0
    for name, run, line in chosen:
        rows = []
        try:
            for row in run(device, args):
                print(line(row), flush=True)
                rows.append(row)
        finally:  # an interrupted run keeps the rows it has
            if rows and not args.quick:
                print(f"written: {results.save(folder, device, name, rows)}")
        if not rows:
            print(f"{name}: no case for these arguments")
        wrong += sum(bool(row["error"]) and not results.is_refused(row) for row in rows)
    if wrong:
        print(f"{wrong} rows have no figures: the result was wrong or the call failed, see above")
    return 1 if wrong else 0
