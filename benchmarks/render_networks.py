"""The table of ``bench networks``: stock's best mode beside braze, network by network."""

import math

from benchmarks.markdown import op_sections, table
from benchmarks.networks import OURS, STOCK

KEYS = ("network", "batch", "precision")
BRAZE_EAGER, BRAZE = OURS
STOCK_EAGER = next(iter(STOCK))


def sections(folder):
    """The table, per device and versions."""
    return op_sections(folder, "networks", summary)


def summary(rows):
    """A line per network, batch and precision; "" where a mode was not timed."""
    cells = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in KEYS), {})[row["mode"]] = row
    head = [*KEYS, "stock's best", "|", "ms", "braze ms", "stock / braze", "stock eager ms"]
    head += ["braze eager ms", "first 5 steps, stock's best s", "braze s"]
    body, ratios = [], []
    for key, found in cells.items():
        right = {mode: row for mode, row in found.items() if not row["error"]}
        stock = [row for mode, row in right.items() if mode in STOCK]
        best = min(stock, key=lambda row: float(row["ms"]), default=None)
        mine = right.get(BRAZE) or right.get(BRAZE_EAGER)
        ratio = ""
        if best and mine:
            ratios.append(float(best["ms"]) / float(mine["ms"]))
            ratio = f"{ratios[-1]:.2f}"
        body.append(
            [
                *key,
                best["mode"].removeprefix("stock ") if best else "",
                *(best["ms"] if best else "", mine["ms"] if mine else "", ratio),
                *(right.get(mode, {"ms": ""})["ms"] for mode in (STOCK_EAGER, BRAZE_EAGER)),
                *(best["first_s"] if best else "", mine["first_s"] if mine else ""),
            ]
        )
    text = table(head, body)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text += f"\nGeometric mean of stock / braze: {mean:.2f}, least {min(ratios):.2f}.\n"
    return text
