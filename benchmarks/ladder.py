"""``python -m braze bench ladder OP``: every kernel of an op, own and vendor's, side by side."""

import contextlib
import functools
import time

import torch

import braze
from benchmarks.harness import (
    DTYPES,
    bind_pass,
    cells,
    check_same_result,
    fill,
    in_layout,
    interleaved,
    new_row,
    set_precision,
    timer_for,
    work,
)

#: op -> its vendor library
OPS = {"matmul": "cublas", "conv2d": "cudnn"}
#: Seconds of a forward pass; a kernel that takes longer is left out of the case.
LIMIT = {"cuda": 0.5, "cpu": 2.0}


def rungs(op, device):
    """The names of the kernels of this device type, in the ladder's order."""
    on_cpu = device.type == "cpu"
    return sorted({k["name"] for k in braze.kernels(op) if (k["arch"] == "cpu") == on_cpu})


def under(op, name, make):
    """`make`, and what it returns, run under ``braze.backend(op=name)``."""

    def made():
        with braze.backend(**{op: name}):
            fn = make()

        def call():
            with braze.backend(**{op: name}):
                return fn()

        return call

    return made


def too_slow(benchmark, inputs, kwargs, device):
    """Why the kernel is not timed on these inputs, or None."""
    start = time.perf_counter()
    benchmark.braze(*inputs, **kwargs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    limit = LIMIT[device.type]
    return f"takes {seconds:.1f} s, the limit is {limit} s" if seconds > limit else None


def run_ladder(benchmark, device, args):
    """Yields a row per case, dtype, layout, pass and kernel; `braze_us` is that kernel's time."""
    timer = timer_for(device)
    torch.backends.cudnn.benchmark = True
    op = benchmark.op
    names = ["auto", *rungs(op, device)]
    if device.type == "cuda":
        names.append(OPS[op])
    for case, dtype_name, layout in cells(benchmark, device, args):
        set_precision(dtype_name)
        torch.manual_seed(0)
        inputs = in_layout(case.inputs(device, DTYPES[dtype_name]), layout)
        errors = {}
        for name in names:
            with contextlib.ExitStack() as stack:
                stack.enter_context(braze.backend(**{op: name}))
                try:
                    slow = too_slow(benchmark, inputs, case.kwargs, device)
                    if slow:
                        errors[name] = slow
                        continue
                    # Twice the usual floor: the first rungs add up all terms in one chain.
                    floor = 2 * case.floor(dtype_name)
                    check_same_result(benchmark, inputs, case.kwargs, floor)
                except (AssertionError, RuntimeError) as problem:
                    errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
        for pass_name in benchmark.passes:
            make = functools.partial(bind_pass, benchmark)
            arguments = pass_name, inputs, case.kwargs
            makers = {
                name: under(op, name, functools.partial(make, benchmark.braze, *arguments))
                for name in names
                if name not in errors
            }
            makers["stock"] = functools.partial(make, benchmark.stock, *arguments)
            times = interleaved(timer, makers, device, case.warm, args.quick)
            out = benchmark.stock(*inputs, **case.kwargs)
            amount = work(benchmark, case, pass_name, inputs, out)
            for name in names:
                row = new_row(benchmark, case, pass_name, dtype_name, layout)
                row["candidate"] = name
                if name in errors:
                    row["error"] = errors[name]
                else:
                    fill(row, times[name], times["stock"], *amount)
                yield row
