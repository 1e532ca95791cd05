"""``python -m braze mnist`` end to end, on a data set small enough for a test."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, idx_bytes, write

import braze
from braze.__main__ import main
from braze.data import load_mnist

pytest.importorskip("rich", reason="braze mnist needs rich")
pytest.importorskip("matplotlib", reason="braze mnist needs matplotlib")

from braze.mnist import accuracy, honesty, recorded, steps, timing

TINY = ["--limit", "128", "--batch", "32", "--epochs", "1", "--steps", "2"]
PNG = b"\x89PNG\r\n\x1a\n"


def command(*arguments):
    return [sys.executable, "-m", "braze", "mnist", *map(str, arguments)]


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """The environment of a user without MNIST, who has no time to wait for the compiler."""
    python_path = [os.fspath(Path(braze.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, python_path)))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("BRAZE_DATA", raising=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """500 training and 200 test images of bars, whose positions are the labels."""
    random = np.random.default_rng(0)
    contents = {}
    for images_name, labels_name, count in [
        (TRAIN_IMAGES, TRAIN_LABELS, 500),
        (TEST_IMAGES, TEST_LABELS, 200),
    ]:
        labels = random.integers(0, 10, count)
        images = random.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[:, 4 + 2 * label : 6 + 2 * label] = 255
        contents |= {images_name: idx_bytes(images), labels_name: idx_bytes(labels)}
    return write(tmp_path_factory.mktemp("mnist"), contents)


def run_command(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)


def errors_of(rows):
    """The rows that failed, for a message that says why."""
    return {f"{row['name']} {row['mode']}, {row['layout']}": row["error"] for row in rows}


def assert_publishable(figures):
    """Nothing of this machine's file system is in the file."""
    assert not re.search(r'"[^"]*(/tmp|/home|/usr|site-packages|bin/python)', json.dumps(figures))


def test_braze_and_stock(environment, data, tmp_path, device):
    out = tmp_path / "figures"
    done = run_command("--device", device, "--data", data, "--out", out, *TINY)
    assert done.returncode == 0, done.stderr
    if device == "cpu":  # on a GPU torch.compile has advice to give
        assert done.stderr == ""
    unwrapped = done.stdout.replace("\n", "")
    assert f"128 training and 200 test images: MNIST in {data}" in unwrapped
    assert "braze, own kernels, against: best stock" in done.stdout
    assert str(out / "mnist.json") in unwrapped
    # Without a terminal the progress bar is no flood of lines.
    assert len(done.stdout.splitlines()) < 70
    assert "\x1b" not in done.stdout

    figures = json.loads((out / "mnist.json").read_text())
    assert (figures["batch"], figures["epochs"], figures["steps"]) == (32, 1, 2)
    assert (figures["precision"], figures["seed"], figures["data"]) == ("fp32", 0, "MNIST")
    assert figures["lr"] > 0
    for result in (figures["training"][name] for name in ("braze", "stock")):
        assert len(result["losses"]) == 4
        assert 0 <= result["accuracy"] <= 1
        assert result["seconds"] > 0
    # Equal weights and batches; the later steps amplify rounding at this learning rate.
    ours, stock = (figures["training"][name]["losses"] for name in ("braze", "stock"))
    assert ours[0] == pytest.approx(stock[0], rel=1e-3), (ours, stock)

    rows = figures["timings"]
    assert not any(row["error"] for row in rows), json.dumps(errors_of(rows), indent=2)
    timed = {(row["name"], row["mode"]) for row in rows}
    expected = {("stock", "eager"), ("stock", "compile")}
    expected |= {("braze", "unfused eager"), ("braze", "fused eager")}
    expected |= {("braze", "fused eager, auto")} if device == "cpu" else set()
    if device == "cuda":
        expected |= {("stock", "CUDA graph"), ("braze", "unfused CUDA graph")}
        expected |= {("braze", "fused CUDA graph"), ("braze", "fused CUDA graph, auto")}
    assert timed >= expected
    assert len(timed) == len(rows)
    assert all(0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"] for row in rows)
    assert all(row["check"]["losses"] < 0.1 for row in rows)
    assert {row["backend"] for row in rows if row["name"] == "braze"} == {"braze", "auto"}
    assert figures["stock_sweep"] == [row for row in rows if row["name"] == "stock"]
    assert figures["gains"].keys() >= {"best stock", "kernels", "fusion"}
    assert figures["info"]["torch"]["version"] == torch.__version__
    assert_publishable(figures)
    assert (out / "mnist.png").read_bytes().startswith(PNG)


def test_braze_alone_learns(environment, data, tmp_path):
    out = tmp_path / "figures"
    options = ["--batch", "20", "--epochs", "2", "--steps", "1", "--lr", "0.05"]
    done = run_command("--device", "cpu", "--data", data, "--out", out, "--stock", "none", *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "mnist.json").read_text())
    assert list(figures["training"]) == ["braze"]
    assert {row["name"] for row in figures["timings"]} == {"braze"}
    assert figures["training"]["braze"]["accuracy"] > 0.9
    assert (out / "mnist.png").read_bytes().startswith(PNG)


def test_on_a_cpu_stock_stops_after_its_first_epoch(data, tmp_path, monkeypatch, capsys):
    """Unless --epochs says how long both train."""
    monkeypatch.setattr(timing, "measure", lambda *_: [])
    options = ["--device", "cpu", "--limit", "128", "--batch", "32", "--data", str(data)]
    options += ["--out", str(tmp_path)]
    for epochs, expected in (([], {"braze": 20, "stock": 1}), (["--epochs", "2"], {"stock": 2})):
        assert main(["mnist", *options, *epochs]) == 0
        out = capsys.readouterr().out
        training = json.loads((tmp_path / "mnist.json").read_text())["training"]
        for name, count in expected.items():
            assert training[name]["epochs"] == count
            assert len(training[name]["losses"]) == 4 * count
        assert ("stock made its first epoch only" in out) == (not epochs)
        assert re.search(r"stock: test accuracy .* after \d+ epochs? in", out)
        assert (tmp_path / "mnist.png").read_bytes().startswith(PNG)


def test_the_example_alone(environment, data, monkeypatch):
    monkeypatch.setenv("BRAZE_DATA", str(data))
    example = Path(braze.mnist.example.__file__).resolve()
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("of 200 test images are right")


def test_to_accuracy_trains_each_seed_anew(data, device, monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy, "RECIPE", accuracy.Recipe(20, 40, 0.02, 0.9, 10))
    options = ["--to-accuracy", "0.8", "--seeds", "2", "--data", data, "--out", tmp_path]
    figures = []
    for seed in (0, 1):
        arguments = ["mnist", "--device", device, "--seed", seed, *options]
        with braze.backend(matmul="braze", conv2d="braze"):  # repeatable
            assert main([str(argument) for argument in arguments]) == 0
        figures.append(json.loads((tmp_path / "mnist_to_accuracy.json").read_text()))
    first, second = figures
    assert [run["seed"] for run in first["runs"]] == [0, 1]
    assert first["reached"] == 2, first["runs"]
    assert all(run["seconds"] > 0 for run in first["runs"])
    assert first["runs"][0]["loss"] != first["runs"][1]["loss"]
    # Seed 1 gives the same after seed 0 as it gives alone: nothing is left of the run before.
    alone, after = second["runs"][0], first["runs"][1]
    assert alone["accuracy"] == after["accuracy"]
    assert alone["loss"] == after["loss"]
    assert set(first["before_training"]) == {"load", "transfer", "first steps and capture"}
    assert_publishable(first)


def test_profile(environment, data, tmp_path, device):
    done = run_command("--device", device, "--data", data, "--out", tmp_path, "--profile", *TINY)
    assert done.returncode == 0, done.stderr
    assert "profiler_st" not in done.stderr  # torch's report of its starts and stops
    figures = json.loads((tmp_path / "mnist_profile.json").read_text())
    assert (tmp_path / "mnist_timeline.png").read_bytes().startswith(PNG)
    ops = {op["op"]: op for op in figures["ops"]}
    wanted = {"braze::gather_next", "braze::cross_entropy_with_grad", "braze::sgd_"}
    assert wanted <= set(ops), set(ops)
    assert any("conv" in name and "backward" in name for name in ops)
    for name, op in ops.items():
        assert op["us"] > 0
        # Whatever braze op the step has, the roofline knows its work.
        assert not name.startswith("braze::") or op["bytes"] > 0, name
        assert (op["floor_us"] is not None) == (device == "cuda" and op["bytes"] is not None)
    parameters = 421_834
    assert ops["braze::sgd_"]["bytes"] == 4 * 3 * parameters
    drawn = 32 * 28 * 28
    position = 2 * (8 + 8)
    expected = drawn * (1 + 4) + 32 * (8 + 8 + 8) + 2 * 4 + position
    assert ops["braze::gather_next"]["bytes"] == expected
    starts = [part["start_us"] for part in figures["parts"]]
    assert starts == sorted(starts)
    assert figures["step_us"] >= max(starts)
    assert (tmp_path / "mnist_roofline.png").exists() == (device == "cuda")
    assert_publishable(figures)


@pytest.fixture
def judged(data, device):
    """A setup on the small data set, and its judge within the images that it checks with."""
    setup = steps.Setup(load_mnist(data), torch.device(device), "fp32", 50, honesty.RATE, 0)
    judge = honesty.Judge(setup)
    judge.steps = 6
    before = setup.loader.images.clone()
    with judge.hard_images():
        assert not torch.equal(setup.loader.images, before)
        yield setup, judge
    assert torch.equal(setup.loader.images, before)


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_right_passes_the_judge(judged, captured):
    setup, judge = judged
    step = steps.BrazeStep(setup, "channels_last")
    epoch = step.captured(setup).epoch if captured else step.epoch
    assert judge.check(step, epoch)[1] is None


def test_what_is_wrong_is_not_timed(judged, monkeypatch):
    setup, judge = judged
    monkeypatch.setattr(honesty, "_TRIES", 1)  # more make no difference to what is wrong

    def wrong(layout, change):
        step = steps.BrazeStep(setup, layout)
        change(step)
        return judge.check(step, step.epoch)[1]

    def other_rate(step):
        step.optimizer.param_groups[0]["lr"] *= 1.01

    def no_gradient(step):
        step.model[5].bias.requires_grad_(False)

    def other_eps(step):
        step.model[1].eps = 1e-3

    for change in (other_rate, no_gradient, other_eps):
        assert "against float64" in (wrong("contiguous", change) or ""), change


_TWO_GRAPHS = """
import gc
import torch
from braze.data import load_mnist
from braze.mnist import steps
from torch._inductor.cudagraph_trees import clear_cublass_cache

setup = steps.Setup(load_mnist({data!r}), torch.device("cuda"), "fp32", 500, 0.002, 0)

def losses(make):
    epoch = make(steps.StockStep(setup, "channels_last"))
    for _ in range(4):
        yield from (float(loss) for loss in epoch())

expected = list(losses(steps.eager))
dropped = steps.cuda_graph(steps.StockStep(setup, "contiguous"))
kept = losses(steps.cuda_graph)
actual = [next(kept)]
del dropped
clear_cublass_cache()  # as torch.compile's mode "reduce-overhead" does
gc.collect()
torch.cuda.empty_cache()
others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(256)]
actual += kept
torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-3, atol=0)
assert all(bool(other.isnan().all()) for other in others)
"""


def test_a_graph_of_stock_outlives_another(gpu, environment, data):
    """In a process of its own: memory that a graph has lost is an error that CUDA keeps."""
    code = _TWO_GRAPHS.format(data=os.fspath(data))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_stock_best_times_the_recorded_best_two(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(honesty, "checked_steps", lambda setup: 2)
    page = braze.info()
    rows = [
        {"name": "stock", "mode": mode, "layout": layout, "ms": ms, "error": None}
        for mode, layout, ms in [
            ("CUDA graph", "contiguous", 3.0),
            ("eager", "contiguous", 2.0),
            ("compile", "contiguous", 9.0),
            ("eager", "channels_last", 1.0),
        ]
    ]
    run = {"device": "CPU", "batch": 50, "precision": "fp32", "info": page, "timings": rows}
    folder = tmp_path / "checkout" / "benchmarks" / "results" / "some-cpu"
    folder.mkdir(parents=True)
    (folder / "mnist_50_fp32.json").write_text(json.dumps(run))
    monkeypatch.setattr(recorded, "checkout", lambda: tmp_path / "checkout")
    options = ["--device", "cpu", "--stock", "best", "--epochs", "1", "--steps", "1"]
    options += ["--limit", "100", "--data", str(data), "--out", str(tmp_path)]
    assert main(["mnist", "--batch", "50", *options]) == 0
    assert "Stock's best, as recorded: eager, CUDA graph" in capsys.readouterr().out
    figures = json.loads((tmp_path / "mnist.json").read_text())
    timed = [(r["mode"], r["layout"]) for r in figures["timings"] if r["name"] == "stock"]
    assert timed == [("eager", "channels_last")]  # a CPU has no CUDA graphs
    assert figures["stock_sweep"] == rows
    assert recorded.sweep(folder.parent, "CPU", page["cpu"], 64, "fp32") == []
    assert recorded.sweep(folder.parent, "some GPU", page["cpu"], 50, "fp32") == []
    other = "AVX512" if page["cpu"]["capability"] == "AVX2" else "AVX2"
    cpu = page["cpu"] | {"capability": other}
    assert recorded.sweep(folder.parent, "CPU", cpu, 50, "fp32") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "argument --batch: invalid positive int value: '0'"),
        (["--batch", "many"], "argument --batch: invalid positive int value: 'many'"),
        (["--lr", "nan"], "argument --lr: invalid positive float value: 'nan'"),
        (["--lr", "-1"], "argument --lr: invalid positive float value: '-1'"),
        (["--epochs", "1.5"], "argument --epochs: invalid positive int value: '1.5'"),
        (["--seed", "-1"], "argument --seed: invalid seed from 0 to 2**62 value: '-1'"),
        (["--seed", "1" + "0" * 30], "argument --seed: invalid seed from 0 to 2**62 value"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--stock", "some"], "argument --stock: invalid choice: 'some'"),
        (["--to-accuracy", "99"], "argument --to-accuracy: invalid share between 0 and 1 value"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_options(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(["mnist", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device tpu: expected cpu, cuda or cuda:N"),
        (["--device", "meta"], "--device meta: expected cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "--device cuda:99: torch"),
        (["--device", "cpu", "--precision", "tf32"], "--precision tf32: CPUs have no TF32"),
        (["--device", "cpu", "--data", "nowhere"], "nowhere: expected train-images-idx3-ubyte,"),
        (["--device", "cpu", "--batch", "501"], "--batch 501: there are only 500 training images"),
        (
            ["--device", "cpu", "--to-accuracy", "0.9"],
            "there are only 500 training images, but the recipe takes",
        ),
        (
            ["--device", "cpu", "--to-accuracy", "0.9", "--steps", "4"],
            "--steps: the recipe of --to-accuracy is fixed",
        ),
        (["--seeds", "3"], "--seeds: only with --to-accuracy"),
        (["--held-out"], "--held-out: only with --to-accuracy"),
        (["--to-accuracy", "0.9", "--profile"], "--to-accuracy and --profile: expected one"),
        (["--device", "cpu", "--out", "{data}/" + TRAIN_IMAGES], "File exists"),
    ],
)
def test_what_cannot_be_done(capsys, monkeypatch, data, options, message):
    monkeypatch.setenv("BRAZE_DATA", str(data))
    assert main(["mnist", *(option.format(data=data) for option in options)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("braze mnist: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("mode", [["--stock", "none"], ["--profile"]], ids=["training", "profile"])
def test_without_matplotlib_there_are_figures(data, tmp_path, monkeypatch, capsys, mode):
    """It is missed before the work, which is done nevertheless."""
    monkeypatch.setattr(honesty, "checked_steps", lambda setup: 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--device", "cpu", "--data", str(data), "--out", str(tmp_path), *mode]
    assert main(["mnist", *options, *TINY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Note: no pictures (")
    assert lines[1].endswith("`pip install matplotlib`")
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["batch"] == 32


def test_a_folder_that_cannot_be_written_costs_no_training(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # which root never meets
    out = ["--device", "cpu", "--data", str(data), "--out", str(tmp_path)]
    assert main(["mnist", *out]) == 2
    assert f"braze mnist: --out {tmp_path}: cannot be written to" in capsys.readouterr().err


def test_ctrl_c(environment, data, tmp_path):
    process = subprocess.Popen(
        command("--device", "cpu", "--data", data, "--out", tmp_path / "out", "--epochs", "10000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with the signal ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline().startswith("500 training and 200 test images")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, out + error
    assert "braze mnist: interrupted" in error
    assert "Traceback" not in out + error
