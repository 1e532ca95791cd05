"""Stock's best modes, as an earlier run has recorded them."""

import json
from pathlib import Path

import torch

from braze.info import processor


def checkout():
    """The source tree that braze is imported from, or that is the current folder, or None."""
    candidates = [Path(__file__).resolve().parents[3], Path.cwd()]
    return next((p for p in candidates if (p / "benchmarks" / "harness.py").is_file()), None)


def sweep(folder, device, cpu, batch, precision):
    """Stock's rows of a full sweep on this device with this torch.

    Args:
        folder: of the results: what ``python -m braze mnist`` wrote, in a folder per device.
        device: the GPU's name, or "CPU".
        cpu: ``braze.info()["cpu"]``, which has to be equal where the device is the CPU.

    Returns:
        The rows that have a time, as the file holds them; [] where nothing fits.
    """
    for path in sorted(Path(folder).glob("*/mnist*.json")):
        run = json.loads(path.read_text())
        if "timings" not in run:
            continue
        info = run["info"]
        same = (run["device"], run["batch"], run["precision"], info["torch"]["version"])
        if same != (device, batch, precision, torch.__version__):
            continue
        if device == "CPU" and processor(info["cpu"]) != processor(cpu):
            continue
        rows = run.get("stock_sweep") or run["timings"]
        return [row for row in rows if row["name"] == "stock" and row.get("ms") is not None]
    return []


def best(rows, count):
    """mode -> layout of the fastest modes."""
    fastest = {}
    for row in sorted(rows, key=lambda row: row["ms"]):
        fastest.setdefault(row["mode"], row["layout"])
    return dict(list(fastest.items())[:count])
