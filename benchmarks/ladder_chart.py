"""The picture of matmul's ladder: ladder_matmul.svg beside the CSV that it is drawn from."""

import csv
import hashlib
import json
from pathlib import Path

CASE = "4096x4096x4096"
NAME = "ladder_matmul.svg"
# Shipped kernels have names without numbers: after the rung that they have grown out of.
PLACES = {
    "simt": 8.4,
    "simt_tma": 8.6,
    "mma_sync": 9.4,
    "mma_split": 9.5,
    "dmma_tma": 9.6,
    "wgmma": 13,
    "wgmma_split": 14,
    "stream_k": 16,
    "wgmma_scaled": 17,
    "online": 6,
    "planes": 5,
    "rows": 5,
}
RIVALS = {"cutlass": 20, "triton": 21}
BEST = "cublas best"


def place(name):
    """Where on the axis: after all rungs if nobody has said."""
    number = name.split("_")[0]
    return (PLACES | RIVALS).get(name) or (float(number) if number.isdecimal() else 19)


def data_of(path):
    """dtype -> kernel -> TFLOP/s, and dtype -> peak, of the forward pass of CASE."""
    rates, peaks = {}, {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["case"] != CASE or row["pass"] != "forward" or row["error"]:
                continue
            rates.setdefault(row["dtype"], {})[row["candidate"]] = float(row["rate"])
            if row["peak"]:
                peaks[row["dtype"]] = float(row["peak"])
    return rates, peaks


def fingerprint(data):
    """What the picture's description holds: it is drawn again when the figures are others."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def charts(folder):
    """Yields (path of the picture, its data) for each device that has them."""
    for path in sorted(Path(folder).glob("*/ladder_matmul.csv")):
        data = data_of(path)
        if data[0]:
            yield path.with_name(NAME), data


def links(folder):
    """Markdown for a document in docs/results/."""
    for path, _ in charts(folder):
        device = path.parent.name
        yield f"![TFLOP/s of each rung, {device}](../../benchmarks/results/{device}/{NAME})\n"


def update(folder, write=True):
    """Draws the pictures that do not show their figures; returns their names."""
    stale = []
    for path, data in charts(folder):
        if path.exists() and fingerprint(data) in path.read_text():
            continue
        stale.append(f"{path.parent.name}/{NAME}")
        if write:
            draw(path, *data)
    return stale


def draw(path, rates, peaks):
    """A line per precision over the rungs, and what the vendor and the device reach."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    own = {name for of_dtype in rates.values() for name in of_dtype}
    names = sorted(own - {"auto", "cublas", "stock", BEST}, key=place)
    # Text stays text, and names of parts depend on nothing but the picture: a small, stable file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "braze"}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        for index, (dtype, of_dtype) in enumerate(rates.items()):
            colour = f"C{index}"
            shown = [name for name in names if name in of_dtype]
            rungs = [name for name in shown if name not in RIVALS]
            others = [name for name in shown if name in RIVALS]
            heights = [of_dtype[name] for name in rungs]
            axes.plot(list(map(names.index, rungs)), heights, "o-", color=colour, label=dtype)
            heights = [of_dtype[name] for name in others]
            axes.plot(list(map(names.index, others)), heights, "D", color=colour, mfc="none")
            if BEST in of_dtype:
                axes.axhline(of_dtype[BEST], color=colour, linestyle="--", linewidth=1)
            if dtype in peaks:
                axes.axhline(peaks[dtype], color=colour, linestyle=":", linewidth=1)
        axes.set(yscale="log", ylabel="TFLOP/s", title=f"matmul {CASE}, cold L2")
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        axes.plot([], [], "k--", linewidth=1, label="cuBLASLt's best")
        axes.plot([], [], "k:", linewidth=1, label="peak of the device")
        axes.legend(fontsize=8)
        metadata = {"Date": None, "Creator": None, "Description": fingerprint((rates, peaks))}
        figure.savefig(path, format="svg", metadata=metadata)
