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


def op_sections(folder, name, make_table, one_table=described, about=described):
    """about(row) and a table, unless it is "", for all rows of which one_table(row) is the same."""
    groups = {}
    for row in results.load(folder, name):
        groups.setdefault(one_table(row), []).append(row)
    tables = [(about(rows[0]), make_table(rows)) for rows in groups.values()]
    return [part for head, body in tables if body for part in (head, body)]


def timed(row, name):
    """Median with the 20th and 80th percentiles."""
    median, low, high = (row[f"{name}_{part}"] for part in ("us", "p20", "p80"))
    return f"{median} ({low}, {high})" if median else ""
