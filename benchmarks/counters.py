"""``python -m braze bench counters matmul``: hardware counters of every rung, read by ncu.

One run of ncu profiles a process (this file as a module) that calls each kernel once. Before each
call it launches torch's spin kernel, which in ncu's list separates one kernel's launches from the
next one's.
"""

import argparse
import csv
import functools
import os
import re
import shutil
import subprocess
import sys

import torch

import braze
from benchmarks.candidates import VENDORS
from benchmarks.harness import DTYPES, rounded, set_precision
from benchmarks.ladder import rungs
from benchmarks.results import ENVIRONMENT

CASE = "4096x4096x4096"
#: column -> ncu's metric, scale
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "fma_pct": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active", 1),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu.sum", 1),
    "sectors_per_load": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio", 1),
}
COLUMNS = ["op", "case", "dtype", "candidate", "kernel", *METRICS, "error", *ENVIRONMENT]
SEPARATOR = "spin_kernel"
DEFAULT_DTYPES = ("float32", "bfloat16")


def profile(dtype_name, case, device, metrics):
    """Runs ncu, with the clocks as they are, over a process that calls the kernels.

    Returns:
        What it printed: (text, lines that report errors).
    """
    wanted = ",".join(metric for metric, _ in metrics.values())
    ncu = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base"]
    ncu += ["--profile-from-start", "off", "--metrics", wanted]
    process = [sys.executable, "-m", "benchmarks.counters", dtype_name, case, str(device)]
    path = os.pathsep.join(part for part in sys.path if part)  # where this process found braze
    found = subprocess.run(
        [*ncu, *process], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    return found.stdout, [m for m in (found.stdout + found.stderr).splitlines() if "ERROR" in m]


def read(dtype_name, case, device, names):
    """parse() of ncu's output; metrics that this ncu does not know are left out."""
    text, errors = profile(dtype_name, case, device, METRICS)
    unknown = {c for c, (metric, _) in METRICS.items() if any(metric in line for line in errors)}
    if unknown:
        known = {c: metric for c, metric in METRICS.items() if c not in unknown}
        text, errors = profile(dtype_name, case, device, known)
    try:
        return parse(text, names)
    except ValueError as error:
        raise ValueError("; ".join([str(error), *errors])) from error


def parse(text, names):
    """What ncu printed with --csv, as (name, kernel, {column: value}) per launch, in its order.

    Args:
        names: of the calls; each begins with the separator's launch.

    Raises:
        ValueError: there is no table, or it has not one separator per name.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if '"Kernel Name"' in line), None)
    if start is None:
        raise ValueError("ncu printed no table: " + " ".join(lines[-3:]))
    # Messages of ncu and of the program may follow; a row begins with its quoted number.
    table = [line for line in lines[start:] if line.startswith('"')]
    launches, separators = {}, 0
    columns = {metric: (column, scale) for column, (metric, scale) in METRICS.items()}
    for row in csv.DictReader(table):
        launch = launches.get(row["ID"])
        if launch is None:
            separators += SEPARATOR in row["Kernel Name"]
            launch = launches[row["ID"]] = (separators, row["Kernel Name"], {})
        value = row["Metric Value"].replace(",", "")
        if row["Metric Name"] in columns and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value):
            column, scale = columns[row["Metric Name"]]
            launch[2][column] = float(value) * scale
    if separators != len(names):
        raise ValueError(f"expected {len(names)} calls in ncu's table, but found {separators}")
    return [
        (names[index - 1], short(kernel), values)
        for index, kernel, values in launches.values()
        if SEPARATOR not in kernel
    ]


def short(kernel):
    """A kernel's name without its template arguments, parameters and namespaces."""
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", kernel).removeprefix("void ")
    return re.split(r"[<(]", name)[0].split("::")[-1]


def calls(device):
    return [*rungs("matmul", device), VENDORS["matmul"]]


def run(device, args):
    """Yields a row per kernel that a rung launches.

    Raises:
        ValueError: there is no GPU, no ncu, no such case, or ncu failed.
    """
    if device.type != "cuda":
        raise ValueError("counters are those of a GPU; there is none here")
    if not shutil.which("ncu"):
        raise ValueError("ncu is missing: it is Nsight Compute's, and comes with the CUDA toolkit")
    case = (args.case or [CASE])[0]
    if not re.fullmatch(r"\d+x\d+x\d+", case):
        raise ValueError(f"expected a case like {CASE}, but got {case}")
    for dtype_name in args.dtype or DEFAULT_DTYPES[: 1 if args.quick else None]:
        for name, kernel, values in read(dtype_name, case, device, calls(device)):
            row = dict.fromkeys(COLUMNS, "") | {"op": "matmul", "case": case, "dtype": dtype_name}
            row |= {"candidate": name, "kernel": kernel}
            yield row | {column: rounded(value) for column, value in values.items()}


def line(row):
    """One row as a line for the terminal."""
    values = ", ".join(f"{column} {row[column]}" for column in METRICS)
    return f"{row['case']} {row['dtype']} {row['candidate']:<20} {row['kernel']}: {values}"


def launch(dtype_name, case, device):
    """What ncu watches: every kernel once."""
    m, n, k = map(int, case.split("x"))
    set_precision(dtype_name)
    torch.manual_seed(0)
    draw = functools.partial(torch.randn, device=device)
    a, b = (t.to(DTYPES[dtype_name]) for t in (draw(m, k), draw(k, n)))
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    for name in calls(device):
        torch.cuda._sleep(1)
        try:
            with braze.backend(matmul=name):
                braze.matmul(a, b)
        except RuntimeError as refused:  # a precision or a shape that it does not take
            print(f"{name}: {refused}", file=sys.stderr)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Calls every kernel of matmul once, for ncu.")
    parser.add_argument("dtype", choices=list(DTYPES))
    parser.add_argument("case", help="MxNxK")
    parser.add_argument("device", type=torch.device)
    given = parser.parse_args()
    with torch.cuda.device(given.device):
        launch(given.dtype, given.case, given.device)
