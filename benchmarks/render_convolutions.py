"""What ``bench convolutions`` says of its rows, a line per class, and where "auto" is behind; the
same of ``bench depthwise``."""

from benchmarks.markdown import op_sections, table
from benchmarks.render_products import mean_and_worst, with_ratio

#: "auto" must not be behind the fastest by more: one kernel read twice differs by up to 4 %.
LEAST_AUTO = 0.93
#: and never counts as behind where it is by less, in microseconds
CLOSE_US = 1
KINDS = ("depthwise", "grouped", "1x1", "first layer", "other", "large filter")


def sections(folder):
    """The summary, per device."""
    return op_sections(folder, "convolutions", summary)


def depthwise_sections(folder):
    """The depthwise kernel beside the best of cuDNN and torch, per device."""
    return op_sections(folder, "depthwise", depthwise_summary)


def depthwise_summary(rows):
    """A line per precision, format, pass, filter and stride."""
    groups = {}
    for row in rows:
        window = row["case"].split(", ")[1]
        key = row["dtype"], row["layout"], row["pass"], window
        groups.setdefault(key, []).append(row)
    head = ["dtype", "layout", "pass", "filter/stride", "|", "layers"]
    head += ["best vendor / own, geometric mean", "worst", "own / bound, geometric mean"]
    body = []
    for key in sorted(groups):
        mine = groups[key]
        bound = mean_and_worst(mine, "of_bound")[0]
        body.append([*key, len(mine), *mean_and_worst(mine, "ratio"), bound])
    return table(head, body)


def summary(rows):
    """A Markdown table, and a sentence about "auto"."""
    head = ["class", "dtype", "layout", "worst own", "|", "passes"]
    head += ["best vendor / best own, geometric mean", "worst"]
    head += ["fastest of all / auto, geometric mean", "worst"]
    body = []
    groups = {}
    for row in rows:
        groups.setdefault((row["kind"], row["dtype"], row["layout"]), []).append(row)
        groups.setdefault(("all", row["dtype"], row["layout"]), []).append(row)

    def place(key):
        kind, *rest = key
        return *rest, KINDS.index(kind) if kind in KINDS else len(KINDS)

    for key in sorted(groups, key=place):
        mine = groups[key]
        own, auto = (with_ratio(mine, column) for column in ("ratio", "auto_ratio"))
        worst = min(own, key=lambda row: float(row["ratio"]), default=None)
        cells = [*key, f"{worst['pass']} {worst['case']}" if worst else ""]
        cells.append(len(own) if len(own) == len(mine) else f"{len(own)} of {len(mine)}")
        body.append([*cells, *mean_and_worst(own, "ratio"), *mean_and_worst(auto, "auto_ratio")])
    return table(head, body) + losses(rows)


def losses(rows):
    """Where "auto" is far behind the fastest, the worst first."""
    behind = [row for row in with_ratio(rows, "auto_ratio") if is_behind(row)]
    if not behind:
        return f"\n`auto` is nowhere below {LEAST_AUTO} of the fastest.\n"
    behind.sort(key=lambda row: float(row["auto_ratio"]))
    head = ["case", "pass", "dtype", "layout", "auto ran", "fastest", "|", "auto µs", "µs", "ratio"]
    body = []
    for row in behind:
        own, vendor = (float(row[f"{name}_us"] or "inf") for name in ("own", "vendor"))
        cells = [row[key] for key in ("case", "pass", "dtype", "layout", "auto_name")]
        cells.append(row["own_name"] if own < vendor else row["vendor_name"])
        body.append([*cells, row["auto_us"], row["best_us"], row["auto_ratio"]])
    closing = f"\n`auto` is below {LEAST_AUTO} of the fastest in {len(behind)} passes:\n\n"
    return closing + table(head, body)


def is_behind(row):
    late = float(row["auto_us"]) - float(row["best_us"])
    return float(row["auto_ratio"]) < LEAST_AUTO and late > CLOSE_US
