"""The table, JSON file and plot of ``python -m braze mnist``."""

import importlib
import json

import numpy as np
from rich.table import Table

from braze.mnist.roofline import peak_rate

_COLOURS = {"braze": "#d1495b", "stock": "#30638e"}


def table(rows, title):
    """The timings as a table for rich's console."""
    best_stock = min(
        (r.milliseconds()[0] for r in rows if r.name == "stock" and r.seconds), default=0
    )
    result = Table(title=title)
    result.add_column("")
    result.add_column("layout", no_wrap=True)
    for name in ("ms/step", "p20", "p80", "best stock / this"):
        result.add_column(name, justify="right")
    for row in rows:
        if row.error:
            result.add_row(row.label, row.layout, "failed", end_section=False)
            result.add_row(f"  [dim]{row.error}[/dim]")
            continue
        median, low, high = row.milliseconds()
        style = "bold" if row.name == "braze" else None
        ratio = f"{best_stock / median:.2f}x" if best_stock else ""
        numbers = (f"{ms:.4g}" for ms in (median, low, high))
        result.add_row(row.label, row.layout, *numbers, ratio, style=style)
    return result


def write_json(path, figures):
    """Writes the figures; of ``figures["info"]`` not what is this machine's alone."""
    page = {name: _publishable(part) for name, part in figures["info"].items()}
    path.write_text(json.dumps(figures | {"info": page}, indent=2) + "\n")


def _publishable(part):
    if not isinstance(part, dict):
        return part
    private = ("path", "executable", "platform")  # the kernel's release
    return {key: value for key, value in part.items() if key not in private}


def can_plot(console):
    """Whether there is matplotlib; says so where not. To be asked before the work, which is worth
    doing without pictures."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        console.print(f"Note: no pictures ({error}): `pip install matplotlib`")
        return False
    return True


def write_plot(path, losses, rows, title):
    """Loss curves on the left, ms per step on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    curves, bars = figure.subplots(1, 2)
    # A moving average over a fiftieth of the longer run.
    width = max(1, max(map(len, losses.values())) // 50)
    for name, values in losses.items():
        smooth = np.convolve(values, np.full(width, 1 / width), mode="valid")
        steps = np.arange(len(smooth)) + width
        curves.plot(steps, smooth, label=name, color=_COLOURS[name], alpha=0.8)
    curves.set(xlabel="step", ylabel="training loss", yscale="log")
    curves.legend()
    timed = [row for row in rows if row.seconds][::-1]
    medians = [row.milliseconds()[0] for row in timed]
    drawn = bars.barh(
        [row.label for row in timed], medians, color=[_COLOURS[row.name] for row in timed]
    )
    bars.bar_label(drawn, [f"{ms:.3g}" for ms in medians], padding=3)
    bars.set(xlabel="ms per training step")
    bars.margins(x=0.15)
    figure.savefig(path, dpi=150)


def write_timeline(path, parts, title):
    """What ran when: one bar per kernel (on a CPU per op), pale where it may have waited for those
    before it; the number is the time of the rest."""
    from matplotlib.figure import Figure

    end = max(part["start_us"] + part["us"] for part in parts)
    figure = Figure(figsize=(11, 0.8 + 0.24 * len(parts)), layout="constrained")
    axes = figure.subplots()
    colours = {}
    for row, part in enumerate(parts):
        name = part["op"] or "(other)"
        colour = colours.setdefault(name, f"C{len(colours) % 10}")
        start, stop = part["start_us"], part["start_us"] + part["us"]
        axes.barh(row, part["us"], left=start, color=colour, height=0.8, alpha=0.35)
        axes.barh(row, part["own_us"], left=stop - part["own_us"], color=colour, height=0.8)
        label = f"{part['name']}  {part['own_us']:.1f}"
        if part["op"] and part["op"] != part["name"]:
            label += f"  ({part['op']})"
        # Behind the bar; before it where there is no room; within one that fills the picture.
        where, side = (stop, "left") if stop < 0.6 * end else (start, "right")
        if side == "right" and start < 0.35 * end:
            side = "left"
        axes.text(where, row, f" {label} ", va="center", ha=side, fontsize=7)
    axes.set(xlabel="µs", title=title, xlim=(-0.01 * end, 1.02 * end), yticks=[])
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


def write_roofline(path, ops, device, precision, title):
    """Each op's rate over its operations per byte, below the two limits of the device."""
    from matplotlib.figure import Figure

    peak, bandwidth = peak_rate(device, precision), device["bandwidth"]
    known = [op for op in ops if op["bytes"] and op["flop"]]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    intensities = [op["flop"] / op["bytes"] for op in known]
    ridge = peak / bandwidth
    least, most = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
    xs = np.geomspace(least, most, 200)
    axes.loglog(xs, np.minimum(peak, xs * bandwidth) / 1e12, color="black", linewidth=1)
    for index, (op, x) in enumerate(zip(known, intensities, strict=True)):
        rate = op["flop"] / (op["us"] * 1e-6) / 1e12
        label = f"{op['op'].removeprefix('braze::')}: {op['us']:.1f} µs, floor {op['floor_us']:.1f}"
        marker = "osD^vP*X"[index // 10 % 8]
        axes.loglog(x, rate, marker, color=f"C{index % 10}", label=label)
    axes.set(xlabel="operations per byte that has to be moved", ylabel="TFLOP/s", title=title)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
