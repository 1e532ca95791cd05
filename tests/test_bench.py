"""The benchmark harness: figures only for right results, and documents that equal their data."""

import argparse
import csv
import importlib
import json
import operator
import signal
import sys
from pathlib import Path

import pytest
import torch

from braze import bench

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import cli, distributed, ladder, render, results  # noqa: E402
from benchmarks.cli import OPS  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    Benchmark,
    Case,
    bind_pass,
    check_same_result,
    in_layout,
    interleaved,
    run_benchmark,
    timer_for,
)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


def small_relu(op):
    def inputs(device, dtype):
        return [torch.randn(2, 3, 4, 5, device=device).to(dtype).requires_grad_()]

    layouts = ("contiguous", "channels_last")
    return Benchmark("relu", op, torch.relu, [Case("small", inputs)], layouts=layouts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_run_that_is_ended_keeps_its_rows(tmp_path, monkeypatch, number):
    args = parse("relu", "--device", "cpu", "--results", tmp_path)
    (row, *_) = run_benchmark(small_relu(torch.relu), torch.device("cpu"), parse("--quick"))

    def ended(*_):
        yield row
        signal.raise_signal(number)
        yield row

    monkeypatch.setattr(cli, "tables", lambda what: [cli.Table("relu", ended, results.line)])
    before = signal.getsignal(signal.SIGTERM)
    # A shell's background jobs ignore it.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            cli.main(args, ROOT)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert len(results.load(tmp_path, "relu")) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_rows(device):
    args = parse("relu", "--quick", "--dtype", "float32")
    rows = list(run_benchmark(small_relu(torch.relu), torch.device(device), args))
    keys = [(row["pass"], row["layout"]) for row in rows]
    layouts = ("contiguous", "channels_last")
    assert keys == [(p, layout) for layout in layouts for p in ("forward", "backward")]
    for row in rows:
        assert float(row["braze_p20"]) <= float(row["braze_us"]) <= float(row["braze_p80"])
        ratio = float(row["stock_us"]) / float(row["braze_us"])
        assert abs(float(row["ratio"]) - ratio) < 0.01 * ratio + 0.01
        touched = 240 if row["pass"] == "forward" else 360  # elements
        rate = touched * 4 / float(row["braze_us"]) / 1e3
        assert abs(float(row["rate"]) - rate) < 0.01 * rate
        assert row["unit"] == "GB/s"


class Recorder:
    """A timer that takes down what it is asked to time; each name takes a microsecond a letter."""

    floor = None

    def __init__(self):
        self.timed = []

    def capture(self, make):
        return make()

    def time_once(self, candidate, warm):
        self.timed.append(candidate)
        return candidate

    def microseconds(self, measurements):
        return [float(len(name)) for name in measurements]


def test_no_candidate_keeps_its_place():
    names = ["a", "bb", "ccc", "dddd"]
    recorder = Recorder()
    makers = {name: lambda name=name: name for name in names}
    times = interleaved(recorder, makers, torch.device("cpu"), budget=(1.0, 40, 40))
    assert {name: us for name, (us, *_) in times.items()} == {"a": 1, "bb": 2, "ccc": 3, "dddd": 4}
    timed = recorder.timed[len(names) :]  # first, once each, for how long they take
    rounds = [timed[i : i + len(names)] for i in range(0, len(timed), len(names))]
    assert len(rounds) == 40
    assert all(sorted(r) == names for r in rounds)
    assert all({r[place] for r in rounds} == set(names) for place in range(len(names)))


def test_cases_by_name():
    args = parse("relu", "--quick", "--case", "all", "--case", "tiny")
    assert list(run_benchmark(small_relu(torch.relu), torch.device("cpu"), args))
    args = parse("relu", "--quick", "--case", "large")
    assert not list(run_benchmark(small_relu(torch.relu), torch.device("cpu"), args))


def test_the_ladder_leaves_out_slow_kernels(monkeypatch):
    args = parse("ladder", "matmul", "--quick", "--dtype", "float32", "--case", "64x128")
    (benchmark,) = importlib.import_module("benchmarks.matmul").BENCHMARKS

    def errors():
        rows = ladder.run_ladder(benchmark, torch.device("cpu"), args)
        # Those that some machines have do not take float32.
        return {
            row["candidate"]: row["error"]
            for row in rows
            if row["candidate"] not in ("amx", "dot_bf16")
        }

    own = {"auto", "01_naive", "02_reordered", "blocked"}
    assert set(errors()) == own | {"stock"}
    assert not any(errors().values())
    monkeypatch.setitem(ladder.LIMIT, "cpu", 0.0)
    found = errors()
    assert all("the limit is 0.0 s" in found[name] for name in own)
    assert not found["stock"]


@pytest.mark.parametrize("op", ["transpose_copy", "vector_add", "softmax", "batch_norm"])
def test_the_ladder_of_an_op_bound_by_memory(tmp_path, op):
    device = torch.device("cpu")
    args = parse("ladder", op, "--quick", "--dtype", "float32")
    (benchmark,) = ladder.benchmarks_of(op)
    rows = list(ladder.run_ladder(benchmark, device, args))
    names = [row["candidate"] for row in rows]
    assert names == ["auto", *ladder.rungs(op, device), "copy", "stock"]
    assert not any(row["error"] for row in rows)
    results.save(tmp_path, device, f"ladder_{op}", rows)
    lines = render.text_of(f"ladder:{op}", tmp_path).splitlines()
    assert "of the copy" in lines[2]
    assert lines[-2].split(" | ")[4] == "copy"
    assert "| 100.0% |" in lines[-2]
    short = render.text_of(f"rungs:{op}", tmp_path).splitlines()
    assert [line.split(" | ")[0][2:] for line in short[4:]] == sorted(
        names, key=lambda name: (render.ladder_chart.place(name), name)
    )
    results.save(tmp_path, device, f"ladder_{op}", rows[:-2])  # interrupted before the copy
    assert "of the copy" not in render.text_of(f"ladder:{op}", tmp_path)


def test_kernels_side_by_side(tmp_path):
    row = dict.fromkeys(results.COLUMNS, "") | {"op": "conv2d", "case": "c", "pass": "forward"}
    row |= {"dtype": "float32", "layout": "contiguous"}
    times = {"auto": "5", "direct": "8", "halo_wgmma": "", "cudnn": "3", "stock": "4"}
    rows = [
        row | {"candidate": name, "braze_us": us, "error": "" if us else "cannot take"}
        for name, us in times.items()
    ]
    results.save(tmp_path, torch.device("cpu"), "ladder_conv2d", rows)
    last = render.text_of("kernels:conv2d", tmp_path).splitlines()[-1]
    assert last == "| c | forward | float32 | contiguous | 5 | 8 |  | 3 | 4 | 0.50 |"


def test_rungs_of_the_largest_case(tmp_path):
    row = dict.fromkeys(results.COLUMNS, "") | {"op": "vector_add", "pass": "forward"}
    row |= {"case": "2^28", "unit": "GB/s", "dtype": "float32", "stock_us": "9"}
    rows = [
        row | {"candidate": "stock", "rate": "10", "ratio": "1.00"},
        row | {"candidate": "02_grid_stride", "rate": "9", "ratio": "0.90"},
        row | {"candidate": "02_grid_stride", "dtype": "float16", "rate": "7", "ratio": "0.80"},
        row | {"candidate": "01_naive", "case": "7", "rate": "3", "ratio": "0.30", "stock_us": "1"},
        row | {"candidate": "03_vectorized", "error": "cannot take"},
        row | {"candidate": "04_loads_in_flight", "pass": "backward", "rate": "8", "ratio": "1"},
    ]
    results.save(tmp_path, torch.device("cpu"), "ladder_vector_add", rows)
    lines = render.text_of("rungs:vector_add", tmp_path).splitlines()
    assert lines[2] == "| kernel (2^28) | float32 | of stock | float16 | of stock |"
    body = ["| 02_grid_stride | 9 GB/s | 90% | 7 GB/s | 80% |", "| stock | 10 GB/s | 100% |  |  |"]
    assert lines[4:] == body


def test_a_wrong_result_is_not_timed(device):
    args = parse("relu", "--quick", "--dtype", "float32")
    wrong = small_relu(lambda x: torch.relu(x) * 1.001)
    for row in run_benchmark(wrong, torch.device(device), args):
        assert row["error"].startswith("AssertionError: output: error")
        assert row["braze_us"] == ""


def test_results_are_replaced_and_rendered(tmp_path):
    device = torch.device("cpu")
    args = parse("relu", "--quick", "--dtype", "float32")
    rows = list(run_benchmark(small_relu(torch.relu), device, args))
    results.save(tmp_path, device, "relu", rows + rows)
    path = results.save(tmp_path, device, "relu", rows)
    assert path.parent.name == results.slug(device)
    with path.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    text = render.text_of("relu", tmp_path)
    assert results.device_name(device) in text
    assert text.count("| relu | small |") == len(rows)


def test_a_run_of_some_cases_keeps_the_others(tmp_path, monkeypatch):
    device = torch.device("cpu")
    rows = list(run_benchmark(small_relu(torch.relu), device, parse("--quick")))
    others = [row | {"case": "large"} for row in rows]
    (table,) = cli.tables(["relu"])
    for new, arguments, expected in (
        (rows, (), rows),
        (others, ("--case", "large"), rows + others),
        (others[:1], ("--dtype", others[0]["dtype"]), rows + others[1:] + others[:1]),
        (others, (), others),
    ):
        run = table._replace(run=lambda *_, new=new: iter(new))
        monkeypatch.setattr(cli, "tables", lambda what, run=run: [run])
        cli.main(parse("relu", "--device", "cpu", "--results", tmp_path, *arguments), ROOT)
        key = operator.itemgetter("case", "pass", "dtype", "layout")
        assert [*map(key, results.load(tmp_path, "relu"))] == [*map(key, expected)]


def test_mnist_table(tmp_path):
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    row = {"name": "stock", "mode": "eager", "layout": "contiguous", "ms": 2.0}
    run = {
        "device": "some GPU",
        "info": {
            "torch": {"version": "2.13.0", "cuda": "13.0", "cudnn": None},
            "braze": {"commit": "abc"},
        },
        "batch": 64,
        "precision": "bf16",
        "timings": [
            row | {"name": "braze", "mode": "fused eager", "backend": "braze", "ms": 0.25},
            row | {"name": "braze", "mode": "fused eager, auto", "backend": "auto", "ms": 0.2},
            row | {"name": "braze", "mode": "unfused CUDA graph", "ms": 0.1234},
            row,
            row | {"layout": "channels_last", "ms": 1.5},
            {"name": "stock", "mode": "compile", "layout": "contiguous", "error": "no compiler"},
        ],
        "stock_sweep": [row, row | {"mode": "compile whole step", "ms": 7.0}],
        "gains": {"best stock": 6.0, "fusion": 1.25},
    }
    (folder / "mnist_64_bf16.json").write_text(json.dumps(run))
    profile = {key: run[key] for key in ("device", "info", "batch", "precision")} | {
        "step_us": 50.0,
        "busy_us": 32.0,
        "ops": [
            {
                "op": "braze::relu",
                "kernels": ["a", "b"],
                "us": 30.0,
                "floor_us": 20.0,
                "bytes": 1e6,
                "flop": 2e6,
            },
            {
                "op": "(other)",
                "kernels": ["c"],
                "us": 2.0,
                "floor_us": None,
                "bytes": None,
                "flop": None,
            },
        ],
    }
    (folder / "mnist_profile_64_bf16.json").write_text(json.dumps(profile))
    text = render.text_of("mnist", tmp_path)
    assert "**some GPU** (torch 2.13.0, CUDA 13.0, commit abc)" in text
    assert "| 64 | bf16 | eager | 1.5 | 0.25 | 6.00 | 0.123 | 12.16 |" in text
    text = render.text_of("mnist_modes", tmp_path)
    stock, ours = "stock eager | stock compile whole step", "braze fused eager"
    assert f"| {stock} | braze unfused CUDA graph | {ours} | {ours}, auto |" in text
    assert "| 64 | bf16 | 1.5 | 7 | 0.123 | 0.25 | 0.2 |" in text
    assert "| 64 | bf16 | 6.00 | 1.25 |" in render.text_of("mnist_gains", tmp_path)
    text = render.text_of("mnist_profile", tmp_path)
    assert "Batch 64, bf16: 50.0 µs from the first kernel to the last, 32.0 µs in kernels" in text
    assert "| relu | a, b | 30.0 | 20.00 | 1.5 | 1 | 0.002 |" in text
    assert render.text_of("mnist_accuracy", tmp_path) == render.NOTHING + "\n"


def test_documents_equal_a_fresh_rendering():
    changed = render.render(ROOT, ROOT / "benchmarks" / "results", write=False)
    assert not changed, "run `python -m braze bench render`"


def test_every_table_and_every_op_has_a_place():
    text = (ROOT / "docs" / "results" / "ops.md").read_text()
    assert set(OPS) <= set(name for _, name, _ in render.MARKER.findall(text))
    assert set(OPS) <= {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


@pytest.mark.parametrize("op", OPS)
def test_first_case_of_each_op_is_right(device, op):
    timer = timer_for(torch.device(device))
    for benchmark in importlib.import_module(f"benchmarks.{op}").BENCHMARKS:
        case = benchmark.cases[0]
        if case.gpu_only and device == "cpu":
            continue  # minutes, and no benchmark runs it
        inputs = in_layout(case.inputs(device, torch.float32), benchmark.layouts[-1])
        check_same_result(benchmark, inputs, case.kwargs)
        for pass_name in benchmark.passes:
            # On a GPU this captures a CUDA graph.
            timer.capture(
                lambda: bind_pass(benchmark, benchmark.braze, pass_name, inputs, case.kwargs)  # noqa: B023
            )


def test_unknown_op_and_missing_checkout(tmp_path, monkeypatch, capsys):
    assert bench.main(parse("no_such_op")) == 2
    assert "expected matmul" in capsys.readouterr().out
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="part of the source tree"):
        bench.main(parse("relu"))


def test_steps_on_several_gpus():
    """Here in processes on the CPU."""
    args = parse("distributed", "--quick", "--network", "MNIST")
    rows = list(distributed.run(torch.device("cpu"), args))
    assert [(row["gpus"], row["error"]) for row in rows] == [("1", ""), ("2", "")]
    one, two = (float(row["ms"]) for row in rows)
    assert one > 0 < two
    text = distributed.summary(rows)
    assert "| MNIST CNN | 64 | fp32 | own | 1 |" in text
    assert f"| {2 * one / two:.2f} |" in text


def test_a_program_that_fails_on_several_gpus(monkeypatch, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise OSError('no such thing')")
    failing = distributed.Program("none", 1, "fp32", (str(script),), ("--images", 1))
    monkeypatch.setattr(distributed, "programs", lambda *_: [failing])
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 1)
    (row,) = distributed.run(torch.device("cuda"), parse("distributed", "--quick"))
    assert "no such thing" in row["error"]
    assert "none" not in distributed.summary([row])
