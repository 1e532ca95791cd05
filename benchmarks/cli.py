"""What ``python -m braze bench`` runs: ops, ladders, products, counters, rendering."""

import contextlib
import functools
import importlib
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import (
    convolutions,
    counters,
    depthwise,
    distributed,
    evaluation,
    ladder,
    networks,
    norm_act,
    optimizers,
    overhead,
    population,
    products,
    products_accuracy,
    render,
    render_convolutions,
    results,
)
from benchmarks.harness import run_benchmark

OPS = [
    "matmul",
    "linear",
    "conv2d",
    "conv_transpose2d",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "squeeze_excite",
    "relu",
    "bias_activation",
    "scale_add",
    "cat",
    "pool",
    "relu_max_pool2d",
    "upsample2d",
    "softmax",
    "cross_entropy",
    "sgd",
    "gather",
    "transpose",
    "vector_add",
]


class Table(NamedTuple):
    """A CSV: its name, what yields the rows for (device, args), and what prints one."""

    name: str
    run: Callable
    line: Callable
    #: columns in which rows of an earlier run have to be equal to be replaced; none: all are
    replaces: tuple = ()
    #: the same of a run of chosen cases or dtypes alone
    replaces_in_part: tuple = ()
    #: a text about all rows, printed after them
    summary: Callable | None = None


def of_op(run, op, device, args):
    """The rows of an op's benchmarks: `run` is run_benchmark or run_ladder."""
    if run is ladder.run_ladder:
        benchmarks = ladder.benchmarks_of(op)
    else:
        benchmarks = importlib.import_module(f"benchmarks.{op}").BENCHMARKS
    for benchmark in benchmarks:
        yield from run(benchmark, device, args)


def tables(what):
    """The :class:`Table`s that the command line names.

    Raises:
        ValueError: for a word that names nothing.
    """
    if what == ["products"]:
        return [
            Table("products", products.run, products.line),
            Table("products_accuracy", products_accuracy.run, products_accuracy.line),
        ]
    if what == ["convolutions"]:
        run, line, summary = convolutions.run, convolutions.line, render_convolutions.summary
        return [Table("convolutions", run, line, convolutions.KEY, summary=summary)]
    if what == ["depthwise"]:
        return [Table("depthwise", depthwise.run, depthwise.line)]
    if what == ["networks"]:
        return [Table("networks", networks.run, networks.line, networks.KEY)]
    if what == ["evaluation"]:
        return [Table("evaluation", evaluation.run, networks.line, networks.KEY)]
    if what == ["norm_act"]:
        return [Table("norm_act", norm_act.run, norm_act.line, norm_act.KEY)]
    if what == ["optimizers"]:
        return [Table("optimizers", optimizers.run, optimizers.line)]
    if what == ["overhead"]:
        return [Table("overhead", overhead.run, overhead.line, overhead.KEY)]
    if what == ["population"]:
        return [Table("population", population.run, population.line, population.KEY)]
    if what == ["distributed"]:
        return [Table("distributed", distributed.run, distributed.line, distributed.KEY)]
    if what == ["counters", "matmul"]:
        return [Table("counters_matmul", counters.run, counters.line)]
    is_ladder = what[:1] == ["ladder"]
    known = list(ladder.MODULES) if is_ladder else OPS
    ops = (what[1:] if is_ladder else what) or known
    unknown = [op for op in ops if op not in known]
    if unknown:
        raise ValueError(f"expected {', '.join(known)}, but got {', '.join(unknown)}")
    prefix, run = ("ladder_", ladder.run_ladder) if is_ladder else ("", run_benchmark)
    of_row = "op", "case", "pass", "dtype", "layout", "candidate"
    return [
        Table(prefix + op, functools.partial(of_op, run, op), results.line, replaces_in_part=of_row)
        for op in ops
    ]


@contextlib.contextmanager
def ended_by_signals():
    """Within it SIGTERM, by which time limits end a run, raises SystemExit, as Ctrl-C raises
    KeyboardInterrupt."""

    def end(number, frame):
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    if device.type == "cuda" and device.index is None:  # tables of tuned choices are of one GPU
        device = torch.device("cuda", torch.cuda.current_device())
    if args.tune and args.what == ["convolutions"]:
        convolutions.tune(device, args)
        return 0
    wrong, in_part = 0, bool(args.case or args.dtype)
    for table in chosen:
        rows = []
        try:
            with ended_by_signals():
                for row in table.run(device, args):
                    print(table.line(row), flush=True)
                    rows.append(row)
        finally:  # an interrupted run keeps the rows it has
            if rows and not args.quick:
                replaces = table.replaces or (table.replaces_in_part if in_part else ())
                path = results.save(folder, device, table.name, rows, replaces)
                print(f"written: {path}")
        if not rows:
            print(f"{table.name}: no case for these arguments")
        elif table.summary:
            print(table.summary(rows))
        wrong += sum(bool(row["error"]) and not results.is_refused(row) for row in rows)
    if wrong:
        print(f"{wrong} rows have no figures: the result was wrong or the call failed, see above")
    return 1 if wrong else 0
