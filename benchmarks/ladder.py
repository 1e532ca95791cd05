"""``python -m braze bench ladder OP``: every kernel of an op, own and vendor's, side by side.

Where memory is the limit, a copy of as many bytes is timed with them.
"""

import contextlib
import functools
import importlib
import time

import torch

import braze
from benchmarks import rivals
from benchmarks.candidates import VENDORS, by_rules, under
from benchmarks.harness import (
    DTYPES,
    QUICK_BUDGET,
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
from braze.mnist import roofline

#: op -> the file beside this one that has its cases
MODULES = {
    "matmul": "matmul",
    "conv2d": "conv2d",
    "transpose_copy": "transpose",
    "vector_add": "vector_add",
    "softmax": "softmax",
    "batch_norm": "batch_norm",
}
#: The name of torch's copy of as many bytes, which stands beside the kernels of an op that no
#: vendor library has: the measured limit of what is bound by memory.
COPY = "copy"
#: Seconds of a forward pass; a kernel that takes longer is left out of the case.
LIMIT = {"cuda": 0.5, "cpu": 2.0}
#: Seconds per candidate, and the least and most repeats; the first rungs are slow.
BUDGET = {"cuda": (0.1, 5, 50), "cpu": (0.5, 5, 50)}
#: what roofline.peak_rate() calls a precision
PRECISIONS = {"float64": "fp64", "float32": "fp32", "tf32": "tf32"}


def benchmarks_of(op):
    """The ladder's cases of an op: LADDER of its file, where its rungs do not take all of the
    op's."""
    module = importlib.import_module(f"benchmarks.{MODULES[op]}")
    return getattr(module, "LADDER", module.BENCHMARKS)


def rungs(op, device):
    """The names of the kernels of this device type, in the ladder's order."""
    on_cpu = device.type == "cpu"
    return sorted({k["name"] for k in braze.kernels(op) if (k["arch"] == "cpu") == on_cpu})


def peaks(device):
    """dtype -> TFLOP/s of the device's fastest units, {} where they are not known."""
    devices = braze.info()["devices"]
    if device.type != "cuda" or "error" in devices:
        return {}
    about = devices[device.index or 0]
    names = {dtype: PRECISIONS.get(dtype, "bf16") for dtype in DTYPES}
    names = {dtype: name for dtype, name in names.items() if name in about["peak"]}
    return {dtype: roofline.peak_rate(about, name) / 1e12 for dtype, name in names.items()}


def too_slow(benchmark, inputs, kwargs, device):
    """Why the kernel is not timed on these inputs, or None."""
    limit = LIMIT[device.type]
    for _ in range(2):  # the first call may have to load a library
        start = time.perf_counter()
        benchmark.braze(*inputs, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        if seconds <= limit:
            return None
    return f"takes {seconds:.1f} s, the limit is {limit} s"


def find_errors(benchmark, names, inputs, kwargs, device, ulps):
    """name -> why that kernel is not timed, for those."""
    errors = {}
    for name in names:
        with contextlib.ExitStack() as stack:
            stack.enter_context(braze.backend(**{benchmark.op: name}))
            try:
                slow = too_slow(benchmark, inputs, kwargs, device)
                if slow:
                    errors[name] = slow
                    continue
                check_same_result(benchmark, inputs, kwargs, ulps)
            except (AssertionError, RuntimeError) as problem:
                errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return errors


def copy_of(bytes_moved, device):
    """Makes a function that reads half as many bytes and writes the other half."""
    source = torch.randint(256, (bytes_moved // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: lambda: target.copy_(source)


def run_ladder(benchmark, device, args):
    """Yields a row per case, dtype, layout, pass and kernel; `braze_us` is that kernel's time.

    The forward pass of matmul on a GPU has rows for rivals too (benchmarks/rivals.py), whose
    variant is in the column `note`; `peak` is what the device could do, in TFLOP/s.
    """
    timer = timer_for(device)
    torch.backends.cudnn.benchmark = True
    op = benchmark.op
    names = ["auto", *rungs(op, device)]
    vendor = VENDORS.get(op)
    if device.type == "cuda" and vendor:
        names.append(vendor)
    budget = (QUICK_BUDGET if args.quick else BUDGET)[device.type]
    peak = peaks(device) if vendor else {}
    for case, dtype_name, layout in cells(benchmark, device, args):
        set_precision(dtype_name)
        torch.manual_seed(0)
        inputs = in_layout(case.inputs(device, DTYPES[dtype_name]), layout)
        # Twice the usual floor: the first rungs add up all terms in one chain.
        ulps = 2 * case.floor(dtype_name)
        errors = find_errors(benchmark, names, inputs, case.kwargs, device, ulps)
        for pass_name in benchmark.passes:
            make = functools.partial(bind_pass, benchmark)
            arguments = pass_name, inputs, case.kwargs
            makers = {
                name: under(op, name, functools.partial(make, benchmark.braze, *arguments))
                for name in names
                if name not in errors
            }
            if device.type == "cuda" and "auto" in makers:
                makers["auto"] = by_rules(makers["auto"])
            others, missing = {}, {}
            if op == "matmul" and device.type == "cuda" and pass_name == "forward":
                operands = [t.detach() for t in inputs]
                others, missing = rivals.find(timer, *operands, dtype_name, ulps)
            makers |= {name: maker for name, (_, maker) in others.items()}
            makers["stock"] = functools.partial(make, benchmark.stock, *arguments)
            # Without gradients: a graph that is captured must not depend on this stream.
            with torch.no_grad():
                out = benchmark.stock(*inputs, **case.kwargs)
            amount = work(benchmark, case, pass_name, inputs, out)
            if not vendor:
                makers[COPY] = copy_of(amount[0], device)
                others[COPY] = ("", makers[COPY])
            times = interleaved(timer, makers, device, case.warm, budget=budget)
            for name in [*names, *others, *missing, "stock"]:
                row = new_row(benchmark, case, pass_name, dtype_name, layout)
                row |= {"candidate": name, "note": others[name][0] if name in others else ""}
                row["peak"] = f"{peak[dtype_name]:.4g}" if dtype_name in peak else ""
                row["error"] = (errors | missing).get(name, "")
                if not row["error"]:
                    fill(row, times[name], times["stock"], *amount)
                yield row
