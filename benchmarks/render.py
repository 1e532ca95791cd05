"""Writes the tables of README.md and docs/*.md from the results.

A table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``, NAME being an op, ``mnist``
or ``ladder:OP``. Figures in the documents are never typed by hand.
"""

import json
import re
from pathlib import Path

from benchmarks import results

MARKER = re.compile(r"(<!-- bench:([\w:]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
PRECISIONS = ["fp32", "tf32", "bf16"]
NOTHING = "*Not measured yet.*"


def render(root, folder, write=True):
    """Rewrites the tables; returns the names of the files whose text changed (or would)."""
    changed = []
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        old = path.read_text()
        new = MARKER.sub(lambda m: m[1] + text_of(m[2], folder) + m[3], old)
        if new != old:
            changed.append(str(path.relative_to(root)))
            if write:
                path.write_text(new)
    return changed


def text_of(name, folder):
    """The Markdown between the markers of table `name`."""
    if name == "mnist":
        sections = mnist_sections(folder)
    elif name.startswith("ladder:"):
        sections = op_sections(folder, name.replace(":", "_"), ladder_table)
    else:
        sections = op_sections(folder, name, op_table)
    return "\n".join(sections or [NOTHING + "\n"])


def table(head, rows):
    """A Markdown table; columns after the last text column of the head ("|") are right-aligned."""
    split = head.index("|")
    head = [cell for cell in head if cell != "|"]
    rule = ["---"] * split + ["---:"] * (len(head) - split)
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in [head, rule, *rows])


def described(row):
    """What was measured with what, as one line."""
    parts = [f"torch {row['torch']}"]
    parts += [f"{label} {row[key]}" for key, label in LABELS.items() if row[key]]
    return f"**{row['device']}** ({', '.join(parts)})\n"


LABELS = {
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "driver": "driver",
    "clocks": "clocks",
    "commit": "commit",
}


def op_sections(folder, name, make_table):
    rows = results.load(folder, name)
    devices = list(dict.fromkeys(row["device"] for row in rows))
    sections = []
    for device in devices:
        mine = [row for row in rows if row["device"] == device]
        sections += [described(mine[0]), make_table(mine)]
    return sections


def timed(row, name):
    """Median with the 20th and 80th percentiles."""
    median, low, high = (row[f"{name}_{part}"] for part in ("us", "p20", "p80"))
    return f"{median} ({low}, {high})" if median else ""


def op_table(rows):
    compiled = any(row["compile_us"] for row in rows)
    head = ["op", "case", "pass", "dtype", "layout", "|", "braze µs", "stock µs"]
    head += ["compiled stock µs"] * compiled + ["stock / braze", "braze's rate"]
    body = []
    for row in rows:
        cells = [row[key] for key in ("op", "case", "pass", "dtype", "layout")]
        if row["error"]:
            body.append([*cells, f"failed: {row['error']}", *[""] * (len(head) - 7)])
            continue
        cells += [timed(row, "braze"), timed(row, "stock")]
        cells += [row["compile_us"]] * compiled
        body.append([*cells, row["ratio"], f"{row['rate']} {row['unit']}"])
    return table(head, body)


def ladder_table(rows):
    head = ["case", "pass", "dtype", "layout", "kernel", "|", "µs", "rate", "stock / kernel"]
    body = []
    for row in rows:
        cells = [row[key] for key in ("case", "pass", "dtype", "layout", "candidate")]
        if row["error"]:
            body.append([*cells, "", "does not take it", ""])
        else:
            body.append([*cells, timed(row, "braze"), f"{row['rate']} {row['unit']}", row["ratio"]])
    return table(head, body)


def mnist_sections(folder):
    """Tables of the MNIST runs (`mnist*.json`, what ``python -m braze mnist`` writes), one per
    device and version; of the memory layouts the faster one is shown."""
    groups = {}
    for path in sorted(Path(folder).glob("*/mnist*.json")):
        run = json.loads(path.read_text())
        versions = run["info"]["torch"]
        about = dict.fromkeys(LABELS, "") | {
            "device": run["device"],
            "torch": versions["version"],
            "cuda": versions["cuda"],
            "cudnn": versions["cudnn"],
            "commit": run["info"]["braze"]["commit"],
        }
        groups.setdefault(described(about), []).append(run)
    sections = []
    for about, runs in groups.items():
        runs.sort(key=lambda run: (run["batch"], PRECISIONS.index(run["precision"])))
        best = [best_of_modes(run["timings"]) for run in runs]
        modes = list(dict.fromkeys(mode for ms in best for mode in ms))
        body = []
        for run, ms in zip(runs, best, strict=True):
            ours = [value for (name, _), value in ms.items() if name == "braze"]
            stock = [value for (name, _), value in ms.items() if name != "braze"]
            ratio = f"{min(stock) / min(ours):.2f}" if ours and stock else ""
            cells = [f"{ms[mode]:.3g}" if mode in ms else "" for mode in modes]
            body.append([run["batch"], run["precision"], *cells, ratio])
        names = [" ".join(mode) for mode in modes]
        head = ["batch", "precision", "|", *names, "best stock / best braze"]
        sections += [about, table(head, body)]
    return sections


def best_of_modes(timings):
    """(implementation, mode) -> median ms in the faster layout, for what was measured."""
    best = {}
    for row in timings:
        if row.get("ms") is not None:
            key = row["name"], row["mode"]
            best[key] = min(row["ms"], best.get(key, row["ms"]))
    return best
