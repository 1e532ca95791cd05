"""``python -m braze mnist --profile``: what one training step consists of, as JSON and pictures.

On a GPU the kernels of a replayed step, each with the op that launched it: a replay does not know
its ops, so that an eager step of the same model is profiled first and the two lists of kernels are
laid side by side. On a CPU the ops.
"""

import difflib
import json
import os
import re
import statistics
import tempfile
from pathlib import Path

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity

import braze
from braze.mnist import report, roofline
from braze.mnist.steps import BrazeStep

_LAYOUT = "channels_last"
_REPEATS = 9


def run(args, console, setup, about):
    """Profiles a step, prints the table, writes JSON and two pictures."""
    plots = report.can_plot(console)
    with braze.backend(matmul="braze", conv2d="braze"), console.status("profiling"):
        parts = _profile(setup)
    add_own_times(parts)
    devices = about["info"]["devices"]
    cuda = setup.device.type == "cuda"
    device = devices[setup.device.index or 0] if cuda else {}
    ops = _by_op(parts, device, args.precision)
    title = f"One step, {about['device']}, {args.precision}, batch {setup.batch_size}"
    end = max(part["start_us"] + part["us"] for part in parts)
    console.print(_table(ops, busy(parts), end, title))
    path = args.out / "mnist_profile.json"
    figures = {
        "batch": setup.batch_size,
        "step_us": end,
        "busy_us": busy(parts),
        "parts": parts,
        "ops": ops,
    }
    report.write_json(path, about | figures)
    console.print(f"Figures: {path.resolve()}")
    if not plots:
        return
    pictures = {"Timeline": "mnist_timeline.png", "Roofline": "mnist_roofline.png"}
    timeline, roof = (args.out / name for name in pictures.values())
    report.write_timeline(timeline, parts, title)
    console.print(f"Timeline: {timeline.resolve()}")
    if device.get("peak"):
        report.write_roofline(roof, ops, device, args.precision, title)
        console.print(f"Roofline: {roof.resolve()}")


def _profile(setup):
    """The parts of one step, in the order of time, as :func:`_part` describes them."""
    # CUPTI, taken down between profiles, does not get along with CUDA graphs.
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    # Above all levels: torch 2.13's profiler reports each of its starts and stops on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    step = BrazeStep(setup, _LAYOUT).captured(setup)
    traces = []
    for _ in range(2 + _REPEATS):
        # The first step of an epoch draws its order, too: it is not the one to look at.
        losses = step.epoch()
        if len(setup.loader) > 1:
            next(losses)
        setup.synchronize()
        traces.append(_trace(lambda losses=losses: next(losses), setup.device.type))
    if setup.device.type == "cpu":
        return _median([_ops(trace) for trace in traces[2:]])
    # A TrainStep's second call is the last one that runs eagerly.
    eager = _kernels(traces[0])
    replays = _median([_kernels(trace) for trace in traces[2:]])
    _label(replays, eager)
    return replays


def _label(replays, eager):
    """Gives the kernels of a replay the ops that launched the same kernels in an eager step.

    The order is the same but for branches of the graph that run side by side; those are matched by
    name, in the order of their own.
    """
    names = [[part["name"] for part in parts] for parts in (eager, replays)]
    blocks = difflib.SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
    pairs = {m.b + i: eager[m.a + i] for m in blocks for i in range(m.size)}
    used = {id(part) for part in pairs.values()}
    left = [part for part in eager if id(part) not in used]
    for index, part in enumerate(replays):
        same = pairs.get(index)
        if same is None:
            same = next((known for known in left if known["name"] == part["name"]), None)
            left = [known for known in left if known is not same]
        if same is None:
            part |= {"op": None, "call": None}  # counted from another trace's beginning
        else:
            part |= {key: same[key] for key in ("op", "call", "shapes", "types")}


def _trace(call, device_type):
    """What torch.profiler sees of one call, as Chrome events."""
    activities = [ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        call()
        if device_type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _kernels(events):
    """The kernels of a trace with the ops that launched them."""
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    by_id = {e["args"]["External id"]: e for e in ops if "External id" in e.get("args", {})}
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found.sort(key=lambda e: e["ts"])
    parts = []
    for event in found:
        args = event.get("args", {})
        op = by_id.get(args.get("External id")) or _around(
            launches.get(args.get("correlation")), ops
        )
        parts.append(_part(event, found[0]["ts"], op))
    return parts


def _around(launch, ops):
    """The innermost op during which a kernel was launched, or None."""
    if launch is None:
        return None
    around = [
        op
        for op in ops
        if op.get("tid") == launch.get("tid") and op["ts"] <= launch["ts"] <= op["ts"] + op["dur"]
    ]
    return min(around, key=lambda op: op["dur"], default=None)


def _ops(events):
    """The ops of a trace: braze's, and of the others the outermost that take any time."""
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    ours = [e for e in ops if e["name"].startswith("braze::")]
    shortest = 0.005 * sum(e["dur"] for e in ours)
    kept = list(ours)
    rest = [e for e in ops if e["name"].startswith("aten::") and e["dur"] >= shortest]
    for event in sorted(rest, key=lambda e: -e["dur"]):
        if not any(_overlap(event, other) for other in kept):
            kept.append(event)
    kept.sort(key=lambda e: e["ts"])
    return [_part(event, kept[0]["ts"], event) for event in kept]


def _overlap(a, b):
    return a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]


def _part(event, begin, op):
    args = op.get("args", {}) if op else {}
    return {
        "name": short_name(event["name"]),
        "op": op["name"] if op else None,
        "call": args.get("External id"),
        "start_us": event["ts"] - begin,
        "us": event["dur"],
        "shapes": args.get("Input Dims", []),
        "types": args.get("Input type", []),
    }


def short_name(name):
    """A kernel's name without return type, namespaces, template and function arguments."""
    name = name.replace("(anonymous namespace)", "").removeprefix("void ")
    name = re.split(r"[<(]", name)[0] if not name.startswith(("Memcpy", "Memset")) else name
    if name.startswith(("braze::", "aten::")) and name.count("::") == 1:
        return name  # an op
    return name.split("::")[-1].strip() or name


def _median(runs):
    """One run with the median times of those that have the parts, in the order, that most have."""
    orders = [[part["name"] for part in run] for run in runs]
    usual = max(orders, key=orders.count)
    runs = [run for run, order in zip(runs, orders, strict=True) if order == usual]
    parts = []
    for same in zip(*runs, strict=True):
        times = {key: statistics.median(p[key] for p in same) for key in ("start_us", "us")}
        parts.append(same[-1] | times)
    return parts


def add_own_times(parts):
    """Adds "own_us" to each part: from the end of those that started before it to its own end.

    A kernel of a graph starts early and waits for the one before it; what runs concurrently with
    others is counted as far as it ends after them.
    """
    for part in parts:
        start, end = part["start_us"], part["start_us"] + part["us"]
        ends = [p["start_us"] + p["us"] for p in parts if p["start_us"] < start]
        part["own_us"] = end - max([start, *(e for e in ends if e < end)])


def _by_op(parts, device, precision):
    """One entry per call of an op: its kernels, their own time together, and its floor."""
    calls = {}
    for index, part in enumerate(parts):
        calls.setdefault(part["call"] or f"kernel {index}", []).append(part)
    ops = []
    for kernels in calls.values():
        first = kernels[0]
        entry = {
            "op": first["op"] or "(other)",
            "kernels": [part["name"] for part in kernels],
            "us": sum(part["own_us"] for part in kernels),
            "bytes": None,
            "flop": None,
            "floor_us": None,
        }
        name = first["op"] or ""
        found = roofline.cost(name, first["shapes"], first["types"])
        if name.startswith("braze::") and found:
            entry["bytes"], entry["flop"] = found
            least = roofline.floor(*found, device, precision)
            entry["floor_us"] = least and 1e6 * least
        ops.append(entry)
    return ops


def busy(parts):
    """Microseconds during which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for part in sorted(parts, key=lambda part: part["start_us"]):
        end = part["start_us"] + part["us"]
        total += max(0.0, end - max(until, part["start_us"]))
        until = max(until, end)
    return total


def _table(ops, together, end, title):
    table = Table(title=title)
    for name, justify in [
        ("op", "left"),
        ("µs", "right"),
        ("floor", "right"),
        ("MB", "right"),
        ("GFLOP", "right"),
        ("kernels", "left"),
    ]:
        table.add_column(name, justify=justify, overflow="fold")
    for op in ops:
        floor = "" if op["floor_us"] is None else f"{op['floor_us']:.2f}"
        amounts = ["", ""]
        if op["bytes"] is not None:
            amounts = [f"{op['bytes'] / 1e6:.3g}", f"{op['flop'] / 1e9:.3g}"]
        kernels = ", ".join(name for name in dict.fromkeys(op["kernels"]) if name != op["op"])
        name = op["op"].removeprefix("braze::")
        table.add_row(name, f"{op['us']:.2f}", floor, *amounts, kernels)
    table.add_section()
    floor = sum(op["floor_us"] or 0 for op in ops)
    table.add_row("together", f"{together:.2f}", f"{floor:.2f}" if floor else "")
    table.add_row("from first to last", f"{end:.2f}")
    return table
