"""The benchmark of matrix products: its cases, its rows, its summary."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from braze import bench

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import products, products_accuracy, render, render_products, results  # noqa: E402
from benchmarks.candidates import by_rules, fastest, screen, vendor_names  # noqa: E402
from benchmarks.harness import timer_for  # noqa: E402


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


def test_the_cases():
    assert len(products.NETWORKS) == 60
    assert len({(p.name, p.dtype) for p in products.NETWORKS}) == 60
    assert {p.dtype for p in products.NETWORKS} == {"bfloat16", "float16", "tf32", "float32"}
    assert len(set(products.SQUARES)) == 2 * 4 * 5
    # x W^T, dy W and dy^T x of one layer, on real tensors.
    forward, dgrad, wgrad = products.of_layer("float32", 6, 5, 4)
    x, w = forward.inputs("cpu")
    assert (forward.name, x.shape, w.mT.shape) == ("6x4x5 NT", (6, 5), (4, 5))
    assert w.mT.is_contiguous()
    dy, w = dgrad.inputs("cpu")
    assert (dgrad.name, dy.shape, w.shape) == ("6x5x4 NN", (6, 4), (4, 5))
    dy, x = wgrad.inputs("cpu")
    assert (wgrad.name, dy.mT.shape, x.shape) == ("4x5x6 TN", (6, 4), (6, 5))
    assert dy.mT.is_contiguous()
    batched = next(products.of_layer("float16", 6, 5, 4, batch=3))
    assert [t.shape for t in batched.inputs("cpu")] == [(3, 6, 5), (3, 5, 4)]
    assert batched.flops == 3 * forward.flops


def test_rows(device):
    args = parse("products", "--quick", "--case", "64x10x128")
    rows = list(products.run(torch.device(device), args))
    assert [row["cache"] for row in rows] == ["cold", "warm"]
    for row in rows:
        check_row(row, device)
        assert bool(row["floor_us"]) == (row["cache"] == "cold" and device == "cuda")


def check_row(row, device):
    assert list(row) == products.COLUMNS
    assert (row["case"], row["dtype"], row["error"]) == ("64x10x128 NT", "bfloat16", "")
    for name in products.TIMED:
        assert float(row[f"{name}_p20"]) <= float(row[f"{name}_us"]) <= float(row[f"{name}_p80"])
    assert float(row["vendor_us"]) <= float(row["default_us"])
    ratio = float(row["vendor_us"]) / float(row["braze_us"])
    assert float(row["ratio"]) == pytest.approx(ratio, rel=0.01, abs=0.001)
    assert float(row["best_us"]) == min(float(row["vendor_us"]), float(row["own_best_us"]))
    if device == "cpu":
        assert "blocked" in row["own_kernel"].split(" or ")
        assert (row["vendor_name"], row["vendor_count"]) == ("stock", 1)
    else:
        assert row["own_kernel"]
        assert row["vendor_name"] in vendor_names("matmul")


def test_the_best_of_the_vendors(monkeypatch):
    """On a CPU, with rungs in the places of the vendor's algorithms."""
    made_up = ["01_naive", "cublas:1", "02_reordered", "blocked"]
    monkeypatch.setattr(products, "vendors_of", lambda device: made_up)
    monkeypatch.setattr(products, "FINALISTS", 1)
    args = parse("products", "--quick", "--case", "64x3136x128", "--dtype", "float32")
    (row,) = products.run(torch.device("cpu"), args)
    assert row["vendor_count"] == 3  # no cublas for CPU tensors
    assert row["vendor_name"] in made_up[2:]
    assert float(row["vendor_us"]) < float(row["default_us"])
    assert float(row["best_us"]) <= float(row["vendor_us"])


def test_a_wrong_own_result_has_no_ratio(monkeypatch, device):
    right = products.result_of
    monkeypatch.setattr(products, "result_of", lambda *args: 1.01 * right(*args))
    args = parse("products", "--quick", "--case", "1024x10x128", "--dtype", "float32")
    (row,) = products.run(torch.device(device), args)
    assert row["error"].startswith("AssertionError: output: error")
    assert row["ratio"] == row["braze_us"] == row["auto_us"] == ""


def test_a_quick_look_leaves_out_what_does_not_exist():
    def missing():
        raise RuntimeError("no such algorithm")

    timer = timer_for(torch.device("cpu"))
    slow, fast = torch.randn(400, 400), torch.randn(4, 4)
    makers = {"slow": lambda: slow.inverse, "none": lambda: missing, "fast": lambda: fast.neg}
    times = screen(timer, makers)
    assert list(times) == ["slow", "fast"]
    assert fastest(times) == ["fast"]
    assert fastest(times, 5) == ["fast", "slow"]


def test_by_rules():
    """Both what makes a function and the function run without torch's flag, which comes back."""
    flags = torch.backends.cudnn
    seen = []

    def make():
        seen.append(flags.benchmark)
        return lambda: seen.append(flags.benchmark)

    flags.benchmark = True
    try:
        by_rules(make)()()
        assert flags.benchmark
    finally:
        flags.benchmark = False
    assert seen == [False, False]


def made_up_row(**cells):
    row = dict.fromkeys(products.COLUMNS, "") | {"op": "products", "torch": "2.11", "device": "G"}
    row |= {"group": "network", "case": "1x2x3 NT", "pass": "forward", "dtype": "float32"}
    row |= {"candidate": "braze", "braze_us": "10", "auto_us": "10", "best_us": "10"}
    return row | cells


def test_summary():
    rows = [
        made_up_row(ratio="0.5", auto_ratio="1", auto_us="3", best_us="2"),  # 50 %, but 1 µs
        made_up_row(ratio="2", auto_ratio="1.21", auto_us="110", best_us="100"),
        made_up_row(dtype="tf32", case="7x7x7 NN", ratio="4", auto_ratio="1"),
        made_up_row(dtype="tf32", error="AssertionError: output: error"),
        made_up_row(group="square", dtype="float16", ratio="1.5", auto_ratio=""),
    ]
    text = render_products.summary_table(rows)
    end = "1.000 | 10.0% |"
    worst = "forward 1x2x3 NT"
    assert (
        f"| network | float32 | braze | {worst} | 2 | 1.000 | 0.500 | 1.100 | 1.000 | 10.0% |"
        in text
    )
    assert "| network | tf32 | braze | forward 7x7x7 NN | 1 of 2 | 4.000 | 4.000 | 1.000 |" in text
    # The cube root of 0.5 * 2 * 4, and of 1 * 1.21 * 1.
    assert f"| network | all |  | {worst} | 3 of 4 | 1.587 | 0.500 | 1.066 | {end}" in text
    assert f"| square | float16 | braze | {worst} | 1 | 1.500 | 1.500 |  |  | 0.0% |" in text


def test_accuracy(device):
    args = parse("products", "--quick", "--case", "accuracy")
    rows = list(products_accuracy.run(torch.device(device), args))
    kernels = products_accuracy.KERNELS[device]
    assert len(rows) == len(products_accuracy.INPUTS) * len(kernels)
    for row in rows:
        assert list(row) == products_accuracy.COLUMNS
        if not row["error"]:
            assert 0 < float(row["norm_error"]) < 1e-6
            # Parts of fp16 lose what lies far below a row's largest value; auto takes deeper sums.
            limit = 2 if (row["candidate"], row["inputs"]) == ("wgmma_scaled", "wide") else 1e-5
            assert 0 < float(row["component_error"]) < limit
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    exact = a.double() @ b.double()
    norm, component = products_accuracy.errors_of(exact * (1 + 1e-3), a, b)
    assert norm == pytest.approx(1e-3 * (exact.norm() / (a.norm() * b.norm())).item())
    assert norm < component <= 1e-3


def test_the_command_and_its_tables(tmp_path, capsys):
    arguments = "products", "--device", "cpu", "--results", tmp_path
    assert bench.main(parse(*arguments, "--quick")) == 0
    assert "network forward 1x128x3136 NT" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())  # a quick run saves nothing
    assert render.text_of("products", tmp_path) == render.NOTHING + "\n"
    assert bench.main(parse(*arguments, "--case", "10x1x100", "--case", "accuracy")) == 0
    assert {path.name for path in tmp_path.glob("*/*")} == {
        "products.csv",
        "products_accuracy.csv",
    }
    text = render.text_of("products", tmp_path)
    assert results.device_name(torch.device("cpu")) in text
    assert "| 10x1x100 NT | forward | float32 | blocked | stock of 1 |" in text
    assert "accuracy 128x128x4096" not in text
    assert "| accuracy 128x128x4096 | wide |" in render.text_of("accuracy", tmp_path)


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    def interrupted(device, args):
        yield made_up_row(braze_us="1")
        raise KeyboardInterrupt

    monkeypatch.setattr(products, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main(parse("products", "--device", "cpu", "--results", tmp_path))
    assert len(results.load(tmp_path, "products")) == 1
