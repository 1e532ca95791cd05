"""What ``python -m braze bench`` runs: ops, ladders, rendering."""

import importlib

import torch

from benchmarks import ladder, render, results
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
]


def main(args, root):
    folder = args.results or root / "benchmarks" / "results"
    if args.what == ["render"]:
        changed = render.render(root, folder)
        print("rewritten: " + (", ".join(changed) or "nothing, all tables are up to date"))
        return 0
    is_ladder = args.what[:1] == ["ladder"]
    known = list(ladder.OPS) if is_ladder else OPS
    ops = (args.what[1:] if is_ladder else args.what) or known
    unknown = [op for op in ops if op not in known]
    if unknown:
        print(f"braze bench: expected {', '.join(known)}, but got {', '.join(unknown)}")
        return 2
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wrong = 0
    for op in ops:
        benchmarks = importlib.import_module(f"benchmarks.{op}").BENCHMARKS
        rows = []
        try:
            for benchmark in benchmarks:
                run = ladder.run_ladder if is_ladder else run_benchmark
                for row in run(benchmark, device, args):
                    print(results.line(row), flush=True)
                    rows.append(row)
        finally:  # an interrupted run keeps the rows it has
            if rows and not args.quick:
                name = f"ladder_{op}" if is_ladder else op
                path = results.save(folder, device, name, rows)
                print(f"written: {path}")
        if not rows:
            print(f"{op}: no case for these arguments")
        wrong += sum(bool(row["error"]) for row in rows)
    if wrong:
        print(f"{wrong} rows have no figures: the result was wrong or the call failed, see above")
    return 1 if wrong else 0
