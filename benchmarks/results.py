"""Rows of results: the machine's description, CSV files, one line of text."""

import csv
import re
import shutil
import subprocess
from pathlib import Path

import torch

from braze.info import info, processor

#: of the checkout
CHECKOUT = Path(__file__).parent / "results"
#: what was measured, with what
ENVIRONMENT = ["device", "driver", "clocks", "torch", "cuda", "cudnn", "commit"]
COLUMNS = [
    "op",
    "case",
    "pass",
    "dtype",
    "layout",
    "candidate",
    "braze_us",
    "braze_p20",
    "braze_p80",
    "stock_us",
    "stock_p20",
    "stock_p80",
    "compile_us",
    "ratio",
    "rate",
    "unit",
    "floor_us",
    "cache",
    "error",
    *ENVIRONMENT,
]


def _output(*command):
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def device_name(device):
    """The GPU's name; on a CPU its model and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor(info()["cpu"])


def slug(device):
    """The folder name for a device's results, for example ``nvidia-h200``."""
    name = device_name(device).replace("(R)", "").replace("(TM)", "")
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment(device):
    """The columns ENVIRONMENT."""
    driver = clocks = ""
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(device).uuid
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
        found = _output("nvidia-smi", "-i", f"GPU-{uuid}", query, "--format=csv,noheader,nounits")
        if found:
            driver, sm, memory, most = found.split(", ")
            clocks = f"SM {sm} of {most} MHz, memory {memory} MHz"
    root = Path(__file__).parent.parent
    commit = _output("git", "-C", str(root), "rev-parse", "--short=10", "HEAD")
    # Results and documents change with every run: they do not make the code another one.
    paths = ["csrc", "python", "setup.py", "benchmarks/*.py"]
    if commit and _output("git", "-C", str(root), "status", "--porcelain", "--", *paths):
        commit += "+"
    return {
        "device": device_name(device),
        "driver": driver,
        "clocks": clocks,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() or "" if device.type == "cuda" else "",
        "commit": commit,
    }


def save(folder, device, name, rows, replaces=()):
    """Writes `rows`, which have the same keys, as the CSV `name` of this device, in the place of an
    earlier run's; given `replaces`, columns, only in the place of rows that are equal in these."""
    path = Path(folder) / slug(device) / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    described = environment(device)

    def key(row):
        return tuple(row[column] for column in replaces)

    kept, new = [], set(map(key, rows))
    if replaces and path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if key(row) not in new]
    with path.open("w", newline="") as file:
        columns = [key for key in rows[0] if key not in described] + ENVIRONMENT
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        writer.writerows(row | described for row in rows)
    return path


def files(folder, pattern):
    """The files of all devices that fit a pattern: GPUs' first (an H200's before an H100's), then
    by name."""
    paths = sorted(Path(folder).glob(f"*/{pattern}"))
    gpus = [p for p in paths if p.parent.name.startswith("nvidia-")]
    others = [p for p in paths if p not in gpus]
    return sorted(gpus, key=lambda p: p.parent.name, reverse=True) + others


def load(folder, name):
    """All rows of an op over all devices, in the order of :func:`files`."""
    rows = []
    for path in files(folder, f"{name}.csv"):
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def is_refused(row):
    """Whether one of our kernels was asked for that does not take the case, which it says."""
    return "op" in row and row["error"].startswith(f"RuntimeError: {row['op']}: ")


def line(row):
    """One row as a line for the terminal."""
    case = " ".join([row["op"], row["pass"], row["case"], row["dtype"], row["layout"]])
    if row["error"]:
        return f"{case:<64} {row['candidate']} {row['error']}"
    return (
        f"{case:<64} {row['candidate'] or 'braze'} {row['braze_us']:>9} us  stock "
        f"{row['stock_us']:>9} us  {row['ratio']:>5}x  {row['rate']} {row['unit']}"
    )
