"""The benchmark of whole networks: its models, its rows, its table."""

import argparse
import csv
import sys
from pathlib import Path

import pytest
import torch

from braze import bench

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import evaluation, networks, render_networks  # noqa: E402
from benchmarks.network_models import NETWORKS, Network  # noqa: E402

# LeNet-5: sums of filters x (channels x taps + 1); the U-Net by its definition's arithmetic.
PARAMETERS = {
    "LeNet-5": 6 * 26 + 16 * 151 + 120 * 401 + 84 * 121 + 10 * 85,
    "Nature-CNN": 32 * 257 + 64 * 513 + 64 * 577 + 512 * 3137 + 18 * 513,
    "ResNet-9": 9 * (3 * 64 + 64 * 128 + 2 * 128**2 + 128 * 256 + 256 * 512 + 2 * 512**2)
    + 2 * (64 + 3 * 128 + 256 + 3 * 512)
    + 513 * 10,
    "airbench94": 24 * 13
    + 9 * (24 * 64 + 64**2 + 64 * 256 + 3 * 256**2)
    + 2 * (2 * 64 + 4 * 256)
    + 2560,
}


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["networks", "--device", "cpu", *map(str, arguments)])


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_their_parameters(name):
    model = NETWORKS[name].make()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["LeNet-5", "Nature-CNN", "ResNet-9", "airbench94", "U-Net"])
def test_outputs(name):
    network = NETWORKS[name]
    images, labels = network.batch(2, torch.device("cpu"))
    out = network.make()(images)
    expected = (2, network.classes) + ((network.size,) * 2 if network.dense else ())
    assert tuple(out.shape) == expected
    assert labels.shape == out[:, 0].shape
    assert labels.max() < network.classes


@pytest.fixture
def small(monkeypatch):
    """One small network in the place of all."""

    def make():
        layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(144, 5))

    monkeypatch.setitem(networks.NETWORKS, "small", Network(make, (2,), 3, 8, 5))


def test_rows_and_table(small, tmp_path):
    modes = ["--mode", "stock eager", "--mode", "braze eager"]
    args = parse("--network", "small", "--precision", "fp32", "--quick", *modes)
    rows = list(networks.run(torch.device("cpu"), args))
    assert [row["mode"] for row in rows] == ["stock eager", "braze eager"]
    assert all(float(row["ms"]) > 0 and not row["error"] for row in rows)
    losses = [float(row["loss"]) for row in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    place = tmp_path / "some-device"
    place.mkdir()

    def write(*rows):
        with (place / "networks.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, networks.COLUMNS)
            writer.writeheader()
            writer.writerows(row | dict.fromkeys(networks.VERSIONS, "x") for row in rows)

    rows = [rows[0] | {"ms": "3"}, rows[1] | {"ms": "2"}]
    write(*rows, rows[0] | {"mode": "stock compile", "ms": "4"})
    text = "".join(render_networks.sections(tmp_path))
    assert "| small | 2 | fp32 | eager |  |  | 3 | 2 | 1.50 |" in text
    assert "Geometric mean of stock / braze: 1.50" in text
    short = "".join(render_networks.headline_sections(tmp_path))
    assert "| small | 2 | fp32 | 3 | 2 | 1.50 |" in short

    assert not render_networks.compiled_sections(tmp_path)

    write(rows[0] | {"mode": "stock compile", "ms": "4"}, rows[1] | {"mode": "braze compile"})
    text = "".join(render_networks.compiled_sections(tmp_path))
    assert "| small | 2 | fp32 | 4 | 2 | 2.00 |  |  |  |  |" in text

    write(*rows)  # stock was not tried at its best
    text = "".join(render_networks.sections(tmp_path))
    assert "| small | 2 | fp32 |  |  |  |  | 2 |  | 3 | 2 |" in text
    assert "| small |" not in "".join(render_networks.headline_sections(tmp_path))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sixteen_bits(small, precision):
    """fp16 with a GradScaler on both sides."""
    modes = ["--mode", "stock eager", "--mode", "braze eager"]
    args = parse("--network", "small", "--precision", precision, "--quick", *modes)
    rows = list(networks.run(torch.device("cpu"), args))
    assert [row["error"] for row in rows] == ["", ""]
    losses = [float(row["loss"]) for row in rows]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_converted_model_is_compiled_where_it_is_asked_for(small):
    args = parse("--network", "small", "--precision", "fp32", "--quick", "--mode", "braze compile")
    (row,) = networks.run(torch.device("cpu"), args)
    assert (row["mode"], row["error"]) == ("braze compile", "")
    assert float(row["ms"]) > 0


def test_a_wrong_loss_has_no_figures(small, monkeypatch):
    def wrong(cell, captured):
        return lambda: torch.tensor(0.5)

    monkeypatch.setitem(networks.OURS, "braze eager", lambda cell: wrong(cell, False))
    args = parse("--network", "small", "--precision", "fp32", "--quick", "--mode", "braze eager")
    (row,) = networks.run(torch.device("cpu"), args)
    assert row["error"].startswith("AssertionError")
    assert not row["ms"]


def test_recorded_modes_are_not_timed_again(small):
    cell = networks.Cell("small", 2, "fp32", torch.device("cpu"))
    recorded = [{"mode": "stock compile", "ms": "1"}, {"mode": "stock eager", "ms": "2"}]
    assert networks.modes_for(cell, parse(), recorded) == ["stock compile", "braze eager"]
    assert "stock eager" in networks.modes_for(cell, parse("--anew"), recorded)


def test_evaluation_mode(small, tmp_path, monkeypatch):
    modes = ["--mode", "stock eager", "--mode", "braze eager"]
    args = parse("--network", "small", "--precision", "fp32", "--batch", "2", "--quick", *modes)
    rows = list(evaluation.run(torch.device("cpu"), args))
    assert [row["mode"] for row in rows] == ["stock eager", "braze eager"]
    assert all(float(row["ms"]) > 0 and not row["error"] for row in rows)

    def wrong(cell):
        return lambda: torch.zeros(2, 5)

    monkeypatch.setitem(evaluation.Cell.OURS, "braze eager", wrong)
    *_, row = evaluation.run(torch.device("cpu"), args)
    assert row["error"].startswith("AssertionError")

    place = tmp_path / "some-device"
    place.mkdir()
    pairs = [*render_networks.PAIRS["plain"], *render_networks.PAIRS["captured"]]
    described = dict.fromkeys(networks.VERSIONS, "x")
    with (place / "evaluation.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, networks.COLUMNS)
        writer.writeheader()
        for mode, ms in zip(pairs, "3241", strict=True):
            writer.writerow(rows[0] | described | {"mode": mode, "ms": ms})
    text = "".join(render_networks.evaluation_sections(tmp_path))
    assert "| small | 2 | fp32 | 3 | 2 | 1.50 | 4 | 1 | 4.00 |" in text
    assert "Geometric mean of stock / braze captured: 4.00, least 4.00." in text
