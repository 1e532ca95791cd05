"""The tables of ``python -m braze bench products``: a summary first, then every product."""

import math

from benchmarks.markdown import op_sections, table, timed

#: Microseconds. Closer than this to the fastest counts as the fastest.
CLOSE_US = 1


def sections(folder):
    """The summary and the products one by one; one of each per device."""
    return op_sections(folder, "products", tables)


def accuracy_sections(folder):
    """How accurate the kernels for fp32 are."""
    return op_sections(folder, "products_accuracy", accuracy_table)


def tables(rows):
    parts = [summary_table(rows)]
    for group in dict.fromkeys(row["group"] for row in rows):
        parts.append(products_table([row for row in rows if row["group"] == group]))
    return "\n".join(parts)


def summary_table(rows):
    """A line per group, precision and own kernel; where a group mixes precisions, one for all."""
    head = ["group", "dtype", "own kernels", "worst case", "|", "products"]
    head += ["best vendor / own, geometric mean", "worst", "best vendor / auto, geometric mean"]
    head += ["worst", "auto behind the fastest"]
    kinds = {}
    for row in rows:
        kinds.setdefault((row["group"], row["dtype"], row["candidate"]), []).append(row)
        if row["group"] == "network":
            kinds.setdefault((row["group"], "all", ""), []).append(row)
    body = []
    for kind, mine in kinds.items():
        own, auto = (with_ratio(mine, key) for key in ("ratio", "auto_ratio"))
        worst = min(own, key=lambda row: float(row["ratio"]), default=None)
        cells = [*kind, f"{worst['pass']} {worst['case']}".strip() if worst else ""]
        cells.append(len(own) if len(own) == len(mine) else f"{len(own)} of {len(mine)}")
        cells += [*mean_and_worst(own, "ratio"), *mean_and_worst(auto, "auto_ratio")]
        body.append([*cells, f"{max(map(behind, auto), default=0):.1%}"])
    closing = (
        f"\nThe last column is the largest distance of `auto` to the fastest of all, own and "
        f"vendor's; up to {CLOSE_US} µs counts as none.\n"
    )
    return table(head, body) + closing


def with_ratio(rows, key):
    return [row for row in rows if row[key]]


def mean_and_worst(rows, key):
    ratios = [float(row[key]) for row in rows]
    if not ratios:
        return ["", ""]
    return [f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}", f"{min(ratios):.3f}"]


def behind(row):
    """By what share of its time the fastest is ahead of `auto`."""
    auto, best = float(row["auto_us"]), float(row["best_us"])
    return 0.0 if auto - best <= CLOSE_US else auto / best - 1


def products_table(rows):
    head = ["case", "pass", "dtype", "own kernel", "best vendor", "|", "own µs", "auto µs"]
    head += ["best vendor µs", "default vendor µs", "best vendor / own", "best vendor / auto"]
    head += ["fastest own", "own rate"]
    body = []
    for row in rows:
        cells = [row["case"], row["pass"], row["dtype"], row["own_kernel"] or row["candidate"]]
        if row["error"]:
            body.append([*cells, f"failed: {row['error']}", *[""] * (len(head) - 6)])
            continue
        cells.append(f"{row['vendor_name']} of {row['vendor_count']}")
        cells += [timed(row, name) for name in ("braze", "auto", "vendor", "default")]
        best = f"{row['own_best_name']} {row['own_best_us']}"
        rate = f"{row['rate']} {row['unit']}"
        body.append([*cells, row["ratio"], row["auto_ratio"], best, rate])
    return table(head, body)


def accuracy_table(rows):
    """Kernels side by side: the norms' quotient, and element by element in parentheses."""
    kernels = list(dict.fromkeys(row["candidate"] for row in rows))
    body = {}
    for row in rows:
        cell = "does not take it"
        if not row["error"]:
            cell = f"{float(row['norm_error']):.2g} ({float(row['component_error']):.2g})"
        body.setdefault((row["case"], row["inputs"]), {})[row["candidate"]] = cell
    cells = [[*key, *(found.get(name, "") for name in kernels)] for key, found in body.items()]
    return table(["fp32", "inputs", "|", *kernels], cells)
