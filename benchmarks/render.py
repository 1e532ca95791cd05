"""Writes the tables of README.md, docs/ and the ladders' README.md from the results.

A table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``, NAME being an op, one of
MNIST's tables, ``products``, ``convolutions``, ``depthwise``, ``networks``, ``networks_headline``,
``evaluation``, ``norm_act``, ``optimizers``, ``overhead``, ``population``, ``distributed``,
``examples``, ``accuracy`` (fp32), ``ladder:OP``, ``rungs:OP`` (a line per kernel, for the largest
case), ``kernels:OP`` (a line per case), ``counters:matmul`` or ``checks`` (what test runs printed).
Figures in the documents are never typed by hand.
"""

import json
import re
from operator import itemgetter

from benchmarks import (
    distributed,
    ladder_chart,
    norm_act,
    optimizers,
    overhead,
    population,
    render_convolutions,
    render_examples,
    render_networks,
    render_products,
    results,
)
from benchmarks.candidates import VENDORS
from benchmarks.ladder import COPY
from benchmarks.markdown import LABELS, NOTHING, described, op_sections, table, timed
from braze.info import processor
from braze.mnist import timing

MARKER = re.compile(r"(<!-- bench:([\w:]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
PRECISIONS = ["fp32", "tf32", "bf16"]
MODES = [mode.mode for device in ("cuda", "cpu") for mode in timing.modes(device, True)]
GAINS = ["best stock", "kernels", "fusion", "graph"]


def render(root, folder, write=True):
    """Rewrites the tables; returns the names of the files that changed (or would)."""
    changed = ladder_chart.update(folder, write)
    documents = [*(root / "docs").rglob("*.md"), *(root / "csrc").rglob("README.md")]
    for path in [root / "README.md", *sorted(documents)]:
        old = path.read_text()
        new = MARKER.sub(lambda m: m[1] + text_of(m[2], folder) + m[3], old)
        if new != old:
            changed.append(str(path.relative_to(root)))
            if write:
                path.write_text(new)
    return changed


def text_of(name, folder):
    """The Markdown between the markers of table `name`."""
    if name in SECTIONS:
        sections = SECTIONS[name](folder)
    elif name == "checks":
        sections = op_sections(folder, name, checks_table, itemgetter("device"))
    elif name.startswith("kernels:"):
        sections = op_sections(folder, name.replace("kernels:", "ladder_"), kernels_table)
    elif name.startswith("rungs:"):
        sections = op_sections(folder, name.replace("rungs:", "ladder_"), rungs_table)
    elif name.startswith("ladder:"):
        sections = op_sections(folder, name.replace(":", "_"), ladder_table)
        if name == "ladder:matmul":
            sections = [*ladder_chart.links(folder), *sections]
    else:
        sections = op_sections(folder, name, op_table)
    return "\n".join(sections or [NOTHING + "\n"])


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
    head = ["case", "pass", "dtype", "layout", "kernel", "|", "µs", "rate"]
    # Where a copy was timed beside the kernels, it is what their rates are measured by.
    keys = ("case", "pass", "dtype", "layout")
    copies = {tuple(row[k] for k in keys): row for row in rows if row["candidate"] == COPY}
    head += ["of the copy" if copies else "of the peak", "stock / kernel"]
    body = []
    for row in rows:
        cells = [row[key] for key in (*keys, "candidate")]
        cells[-1] += f" ({row['note']})" if row["note"] else ""
        if row["error"]:
            why = "does not take it" if results.is_refused(row) else row["error"]
            body.append([*cells, "", why, "", ""])
            continue
        copy = copies.get(tuple(row[key] for key in keys))
        most = copy["rate"] if copy else row["peak"]
        share = f"{float(row['rate']) / float(most):.1%}" if most else ""
        rate = f"{row['rate']} {row['unit']}"
        body.append([*cells, timed(row, "braze"), rate, share, row["ratio"]])
    return table(head, body)


def rungs_table(rows):
    """The forward pass of the case that moves or computes most: each kernel's rate, and what it is
    of the vendor library's or of stock's."""
    rows = [row for row in rows if row["pass"] == "forward" and not row["error"]]
    case = max(rows, key=lambda row: float(row["floor_us"] or row["stock_us"]))["case"]
    rates = {}
    for row in rows:
        if row["case"] == case:
            rates.setdefault(row["dtype"], {})[row["candidate"]] = row
    names = dict.fromkeys(name for found in rates.values() for name in found)
    names = sorted(names, key=lambda name: (ladder_chart.place(name), name))
    head = [f"kernel ({case})", "|"]
    for dtype in rates:
        head += [dtype, "of stock"]
    body = []
    for name in names:
        cells = [name]
        for found in rates.values():
            row = found.get(name)
            cells += (
                [f"{row['rate']} {row['unit']}", f"{float(row['ratio']):.0%}"] if row else ["", ""]
            )
        body.append(cells)
    return table(head, body)


def kernels_table(rows):
    """What each kernel takes, a line per case, and how the fastest own one compares with stock."""
    keys = ("case", "pass", "dtype", "layout")
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    cases = {}
    for row in rows:
        cases.setdefault(tuple(row[key] for key in keys), {})[row["candidate"]] = row
    body = []
    for case, found in cases.items():
        us = {name: float(row["braze_us"]) for name, row in found.items() if not row["error"]}
        own = [us[name] for name in us if name not in {"auto", "stock", *VENDORS.values()}]
        cells = [found[name]["braze_us"] if name in us else "" for name in names]
        body.append([*case, *cells, f"{us['stock'] / min(own):.2f}" if own else ""])
    return table([*keys, "|", *(f"{name} µs" for name in names), "stock / own"], body)


def counters_table(rows):
    head = ["case", "dtype", "rung", "kernel", "|", "µs", "warps, % of the most", "tensor pipe %"]
    head += ["FMA pipe %", "bank conflicts", "sectors a global load"]
    keys = ["case", "dtype", "candidate", "kernel", "us", "occupancy_pct", "tensor_pct"]
    keys += ["fma_pct", "bank_conflicts", "sectors_per_load"]
    return table(head, [[row[key] for key in keys] for row in rows])


def checks_table(rows):
    head = ["commit", "check", "tests", "|", "passed", "failed", "skipped", "errors found"]
    keys = ("commit", "check", "tests", "passed", "failed", "skipped", "errors")
    return table(head, [[row[key] for key in keys] for row in rows])


def mnist_runs(folder, key):
    """What ``python -m braze mnist`` has written (`mnist*.json`), grouped by device and versions.

    Args:
        key: what the wanted files hold: "timings", "ops" (--profile) or "recipe" (--to-accuracy).
    """
    groups = {}
    for path in results.files(folder, "mnist*.json"):
        run = json.loads(path.read_text())
        if key not in run:
            continue
        versions, device = run["info"]["torch"], run["device"]
        if device == "CPU":
            device = processor(run["info"]["cpu"])
            if "MALLOC_TRIM_THRESHOLD_" in run.get("allocator", {}):
                device += ", an allocator that keeps memory"
        about = dict.fromkeys(LABELS, "") | {
            "device": device,
            "torch": versions["version"],
            "cuda": versions["cuda"],
            "cudnn": versions["cudnn"],
            "commit": run["info"]["braze"]["commit"],
        }
        groups.setdefault(described(about), []).append(run)
    for runs in groups.values():
        runs.sort(key=lambda run: (run.get("batch", 0), PRECISIONS.index(run["precision"])))
    return groups


def mnist_sections(folder):
    """Tables of the MNIST runs, one per device and versions: braze beside the best of stock, where
    that was timed."""
    head = ["batch", "precision", "best stock", "|", "ms", "braze ms", "stock / braze"]
    head += ["braze with auto ms", "stock / braze"]
    sections = []
    for about, runs in mnist_runs(folder, "timings").items():
        body = []
        for run in runs:
            ms = best_of_modes(run["timings"])
            stock = {mode: value for (name, mode, _), value in ms.items() if name == "stock"}
            if not stock:
                continue
            mode = min(stock, key=stock.get)
            cells = [run["batch"], run["precision"], mode, f"{stock[mode]:.3g}"]
            for backend in ("braze", "auto"):
                ours = [value for key, value in ms.items() if key[::2] == ("braze", backend)]
                cells.append(f"{min(ours):.3g}" if ours else "")
                cells.append(f"{stock[mode] / min(ours):.2f}" if ours else "")
            body.append(cells)
        if body:
            sections += [about, table(head, body)]
    return sections


def mnist_modes_sections(folder):
    """Every mode that was timed; of the memory layouts the faster one."""
    sections = []
    for about, runs in mnist_runs(folder, "timings").items():
        best = [best_of_modes(run["timings"]) for run in runs]
        # The full sweep, where this run has timed the best two of it only.
        for run, ms in zip(runs, best, strict=True):
            for key, value in best_of_modes(run.get("stock_sweep", [])).items():
                ms.setdefault(key, value)
        modes = list(dict.fromkeys(mode for ms in best for mode in ms))
        order = [mode for mode in MODES if mode in {m[1] for m in modes}]
        order += [mode for _, mode, _ in modes if mode not in order]  # of an earlier version
        modes.sort(key=lambda mode: (mode[0] != "stock", order.index(mode[1])))
        body = []
        for run, ms in zip(runs, best, strict=True):
            cells = [f"{ms[mode]:.3g}" if mode in ms else "" for mode in modes]
            body.append([run["batch"], run["precision"], *cells])
        names = [f"{name} {mode}" for name, mode, _ in modes]
        sections += [about, table(["batch", "precision", "|", *names], body)]
    return sections


def mnist_gains_sections(folder):
    """Where the speed comes from: fusion, graph, kernels."""
    sections = []
    for about, runs in mnist_runs(folder, "timings").items():
        runs = [run for run in runs if run.get("gains")]
        names = [name for name in GAINS if any(name in run["gains"] for run in runs)]
        body = [
            [
                run["batch"],
                run["precision"],
                *(f"{run['gains'][name]:.2f}" if name in run["gains"] else "" for name in names),
            ]
            for run in runs
        ]
        if body:
            sections += [about, table(["batch", "precision", "|", *names], body)]
    return sections


def mnist_profile_sections(folder):
    """Each op of a step with its kernels, its time and its floor."""
    head = ["op", "kernels", "|", "µs", "floor µs", "µs / floor", "MB", "GFLOP"]
    sections = []
    for about, runs in mnist_runs(folder, "ops").items():
        for run in runs:
            floor = sum(op["floor_us"] or 0 for op in run["ops"])
            sections.append(
                f"Batch {run['batch']}, {run['precision']}: {run['step_us']:.1f} µs from the first "
                f"kernel to the last, {run['busy_us']:.1f} µs in kernels, floor {floor:.1f} µs. "
                + about
            )
            sections.append(table(head, [profiled(op) for op in run["ops"]]))
    return sections


def profiled(op):
    kernels = ", ".join(dict.fromkeys(op["kernels"]))
    cells = [op["op"].removeprefix("braze::"), kernels, f"{op['us']:.1f}"]
    floor = op["floor_us"]
    cells += [f"{floor:.2f}", f"{op['us'] / floor:.1f}"] if floor else ["", ""]
    if op["bytes"] is None:
        return [*cells, "", ""]
    return [*cells, f"{op['bytes'] / 1e6:.3g}", f"{op['flop'] / 1e9:.3g}"]


def mnist_accuracy_sections(folder):
    """How long training takes to an accuracy."""
    head = ["precision", "batch", "steps", "target", "|", "median seconds of training"]
    head += ["runs that reach it", "median accuracy", "seconds before training"]
    sections = []
    for about, runs in mnist_runs(folder, "recipe").items():
        body = []
        for run in runs:
            if run["images"] != "test":
                continue
            body.append(
                [
                    run["precision"],
                    run["recipe"]["batch"],
                    run["recipe"]["steps"],
                    f"{run['target']:.1%}",
                    f"{run['median_seconds']:.3f}",
                    f"{run['reached']} of {len(run['runs'])}",
                    f"{run['median_accuracy']:.2%}",
                    f"{sum(run['before_training'].values()):.1f}",
                ]
            )
        if body:
            sections += [about, table(head, body)]
    return sections


def best_of_modes(timings):
    """(implementation, mode, backend) -> median ms in the faster layout, for what was measured."""
    best = {}
    for row in timings:
        if row.get("ms") is not None:
            # Earlier files do not say that braze ran with "auto".
            backend = row.get("backend") or ("auto" if row["name"] == "braze" else None)
            key = row["name"], row["mode"], backend
            best[key] = min(row["ms"], best.get(key, row["ms"]))
    return best


SECTIONS = {
    "mnist": mnist_sections,
    "mnist_modes": mnist_modes_sections,
    "mnist_gains": mnist_gains_sections,
    "mnist_profile": mnist_profile_sections,
    "mnist_accuracy": mnist_accuracy_sections,
    "products": render_products.sections,
    "convolutions": render_convolutions.sections,
    "depthwise": render_convolutions.depthwise_sections,
    "networks": render_networks.sections,
    "evaluation": render_networks.evaluation_sections,
    "networks_compiled": render_networks.compiled_sections,
    "networks_headline": render_networks.headline_sections,
    "examples": render_examples.sections,
    "distributed": distributed.sections,
    "norm_act": norm_act.sections,
    "optimizers": optimizers.sections,
    "overhead": overhead.sections,
    "population": population.sections,
    "accuracy": render_products.accuracy_sections,
    "counters:matmul": lambda folder: op_sections(folder, "counters_matmul", counters_table),
}
