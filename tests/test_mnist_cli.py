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

pytest.importorskip("rich", reason="braze mnist needs rich")
pytest.importorskip("matplotlib", reason="braze mnist needs matplotlib")

TINY = ["--limit", "256", "--batch", "64", "--epochs", "1", "--steps", "2"]
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


def test_braze_and_stock(environment, data, tmp_path, device):
    out = tmp_path / "figures"
    done = run_command("--device", device, "--data", data, "--out", out, *TINY)
    assert done.returncode == 0, done.stderr
    if device == "cpu":  # on a GPU torch.compile has advice to give
        assert done.stderr == ""
    unwrapped = done.stdout.replace("\n", "")
    assert f"256 training and 200 test images: MNIST in {data}" in unwrapped
    assert "best stock / this" in done.stdout
    assert str(out / "mnist.json") in unwrapped
    # Without a terminal the progress bar is no flood of lines.
    assert len(done.stdout.splitlines()) < 60
    assert "\x1b" not in done.stdout

    figures = json.loads((out / "mnist.json").read_text())
    assert (figures["batch"], figures["epochs"], figures["steps"]) == (64, 1, 2)
    assert (figures["precision"], figures["seed"], figures["data"]) == ("fp32", 0, "MNIST")
    assert figures["lr"] > 0
    for result in (figures["training"][name] for name in ("braze", "stock")):
        assert len(result["losses"]) == 4
        assert 0 <= result["accuracy"] <= 1
        assert result["seconds"] > 0
    ours, stock = (np.array(figures["training"][name]["losses"]) for name in ("braze", "stock"))
    np.testing.assert_allclose(ours, stock, rtol=0.02)
    rows = figures["timings"]
    assert [row["error"] for row in rows] == [None] * len(rows)
    timed = {(row["name"], row["mode"]) for row in rows}
    assert timed >= {("braze", "eager"), ("stock", "eager"), ("stock", "compile")}
    assert all(0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"] for row in rows)
    assert figures["info"]["torch"]["version"] == torch.__version__
    # The file can be published: nothing of this machine's file system is in it.
    assert not re.search(r'"[^"]*(/tmp|/home|/usr|site-packages|bin/python)', json.dumps(figures))
    assert (out / "mnist.png").read_bytes().startswith(PNG)


def test_braze_alone_learns(environment, data, tmp_path):
    out = tmp_path / "figures"
    options = ["--batch", "20", "--epochs", "2", "--steps", "1", "--lr", "0.05", "--skip-stock"]
    done = run_command("--device", "cpu", "--data", data, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "mnist.json").read_text())
    assert list(figures["training"]) == ["braze"]
    assert {row["name"] for row in figures["timings"]} == {"braze"}
    assert figures["training"]["braze"]["accuracy"] > 0.9
    assert (out / "mnist.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "argument --batch: invalid positive int value: '0'"),
        (["--batch", "many"], "argument --batch: invalid positive int value: 'many'"),
        (["--lr", "nan"], "argument --lr: invalid positive float value: 'nan'"),
        (["--lr", "-1"], "argument --lr: invalid positive float value: '-1'"),
        (["--epochs", "1.5"], "argument --epochs: invalid positive int value: '1.5'"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
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
    assert process.returncode == 130
    assert "braze mnist: interrupted" in error
    assert "Traceback" not in out + error
