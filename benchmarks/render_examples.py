"""The table of what ``python examples/NAME.py --compare`` prints: ms a step, minimum, median and
maximum of seven rounds."""

from benchmarks.markdown import described, op_sections, table


def sections(folder):
    """The table, per device and versions, of rows read at several commits."""
    return op_sections(folder, "examples", summary, versions, versions)


def versions(row):
    return described(row | dict.fromkeys(("driver", "clocks", "commit"), ""))


def summary(rows):
    head = ["example", "precision", "commit", "|", "stock ms", "braze ms", "stock / braze"]
    body = []
    for row in rows:
        times = [
            f"{row[f'{side}_ms']} ({row[f'{side}_least']}, {row[f'{side}_most']})"
            for side in ("stock", "braze")
        ]
        ratio = f"{float(row['stock_ms']) / float(row['braze_ms']):.2f}"
        body.append([row["example"], row["precision"], row["commit"], *times, ratio])
    return table(head, body)
