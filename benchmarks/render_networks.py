"""The table of ``bench networks``: stock's best mode beside braze, network by network."""

import math

from benchmarks import evaluation
from benchmarks.markdown import described, op_sections, table
from benchmarks.networks import OURS, STOCK

KEYS = ("network", "batch", "precision")
BRAZE_EAGER, BRAZE, *COMPILED = OURS
STOCK_EAGER = next(iter(STOCK))


def sections(folder):
    """The table, per device and versions, of rows read at several commits."""
    return op_sections(folder, "networks", summary, versions, versions)


def headline_sections(folder):
    """As :func:`sections`, the columns that say who is faster."""
    return op_sections(folder, "networks", headline, versions, versions)


def compiled_sections(folder):
    """Converted models under torch.compile beside stock's, per device and versions."""
    return op_sections(folder, "networks", compiled, versions, versions)


def compiled(rows):
    """A line per network, batch and precision of which a converted model was compiled."""
    head = [*KEYS, "|", "stock compiled ms", "converted, compiled ms", "stock / braze"]
    head += ["stock in a CUDA graph ms", "converted in a CUDA graph ms", "stock / braze"]
    head += ["braze.TrainStep ms"]
    body = []
    for key, found in by_cell(rows).items():
        if not found.keys() & set(COMPILED):
            continue
        line = [*key]
        for mode in COMPILED:
            theirs, mine = (
                column(found.get(f"{who} {mode[6:]}"), "ms") for who in ("stock", "braze")
            )
            ratio = ratio_of(theirs, mine)
            line += [theirs, mine, f"{ratio:.2f}" if ratio else ""]
        body.append([*line, column(found.get(BRAZE), "ms")])
    return table(head, body) if body else ""


def evaluation_sections(folder):
    """The table of ``bench evaluation``, per device and versions."""
    return op_sections(folder, "evaluation", evaluated, versions, versions)


#: Modes that are set against each other: both as a user calls them, and both as CUDA graphs.
PAIRS = {
    "plain": ("stock compile", "braze eager"),
    "captured": ("stock compile in a CUDA graph", "braze capture"),
}
assert all(a in evaluation.Cell.STOCK and b in evaluation.Cell.OURS for a, b in PAIRS.values())


def evaluated(rows):
    """A line per network, batch and precision."""
    head = [*KEYS, "|"]
    for how in PAIRS:
        of_stock = "stock compiled" if how == "plain" else "the same in a CUDA graph"
        of_braze = "braze eager" if how == "plain" else "braze.capture"
        head += [f"{of_stock} ms", f"{of_braze} ms", "stock / braze"]
    body, ratios = [], {how: [] for how in PAIRS}
    for key, found in by_cell(rows).items():
        line = [*key]
        for how, modes in PAIRS.items():
            theirs, mine = (column(found.get(mode), "ms") for mode in modes)
            ratio = ratio_of(theirs, mine)
            ratios[how] += [ratio] if ratio else []
            line += [theirs, mine, f"{ratio:.2f}" if ratio else ""]
        body.append(line)
    means = [in_all(found, f" {how}") for how, found in ratios.items()]
    return table(head, body) + "".join(means)


def versions(row):
    return described(row | dict.fromkeys(("driver", "clocks", "commit"), ""))


def cell_of(row):
    return tuple(row[key] for key in KEYS)


def by_cell(rows):
    """(network, batch, precision) -> mode -> row without an error."""
    cells = {}
    for row in rows:
        found = cells.setdefault(cell_of(row), {})
        if not row["error"]:
            found[row["mode"]] = row
    return cells


def cells_of(rows):
    """(network, batch, precision) -> (mode -> row without an error, stock's best row or None,
    braze's row or None, by how much braze is faster or None). There is no best of stock where its
    compiled modes were not tried."""
    tried = {cell_of(row) for row in rows if row["mode"].startswith("stock compile")}
    for key, found in by_cell(rows).items():
        stock = [row for mode, row in found.items() if mode in STOCK and key in tried]
        best = min(stock, key=lambda row: float(row["ms"]), default=None)
        mine = found.get(BRAZE) or found.get(BRAZE_EAGER)
        ratio = ratio_of(column(best, "ms"), column(mine, "ms"))
        yield key, found, best, mine, ratio


def ratio_of(theirs, mine):
    """By how much braze is faster; None where one of the two was not timed."""
    return float(theirs) / float(mine) if theirs and mine else None


def column(row, name):
    return row[name] if row else ""


def summary(rows):
    """A line per network, batch and precision; "" where a mode was not timed."""
    head = [*KEYS, "stock's best", "read at", "braze's at", "|", "stock ms", "braze ms"]
    head += ["stock / braze", "stock eager ms", "braze eager ms", "braze's first 5 steps s"]
    head += ["stock eager MB", "braze MB"]
    body, ratios = [], []
    for key, found, best, mine, ratio in cells_of(rows):
        ratios += [ratio] if ratio else []
        body.append(
            [
                *key,
                column(best, "mode").removeprefix("stock "),
                *(column(row, "commit") for row in (best, mine)),
                *(column(row, "ms") for row in (best, mine)),
                f"{ratio:.2f}" if ratio else "",
                *(column(found.get(mode), "ms") for mode in (STOCK_EAGER, BRAZE_EAGER)),
                column(mine, "first_s"),
                *(column(row, "memory_mb") for row in (found.get(STOCK_EAGER), mine)),
            ]
        )
    return table(head, body) + in_all(ratios)


def headline(rows):
    body, ratios = [], []
    for key, _, best, mine, ratio in cells_of(rows):
        if ratio:
            ratios.append(ratio)
            body.append([*key, best["ms"], mine["ms"], f"{ratio:.2f}"])
    head = [*KEYS, "|", "stock's best ms", "braze ms", "stock / braze"]
    return table(head, body) + in_all(ratios)


def in_all(ratios, what=""):
    if not ratios:
        return ""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"\nGeometric mean of stock / braze{what}: {mean:.2f}, least {min(ratios):.2f}.\n"
