"""The table, JSON file and plot of ``python -m braze mnist``."""

import json

import numpy as np
from rich.table import Table

_COLOURS = {"braze": "#d1495b", "stock": "#30638e"}


def table(rows, title):
    """The timings as a table for rich's console."""
    best_stock = min(
        (r.milliseconds()[0] for r in rows if r.name == "stock" and r.seconds), default=0
    )
    result = Table(title=title)
    result.add_column("")
    result.add_column("layout")
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


def write_plot(path, losses, rows, title):
    """Loss curves on the left, ms per step on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    curves, bars = figure.subplots(1, 2)
    for name, values in losses.items():
        # A moving average over a fiftieth of the run.
        width = max(1, len(values) // 50)
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
