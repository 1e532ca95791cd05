"""Parts that the documents' tables share."""

from benchmarks import results

NOTHING = "*Not measured yet.*"


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
