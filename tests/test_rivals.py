"""What the ladder of matmul shows beside our kernels, its picture, and its hardware counters."""

import argparse
import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch

from braze import bench

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import counters, cutlass_gemm, ladder_chart, render, results, rivals  # noqa: E402
from benchmarks.harness import timer_for  # noqa: E402
from conftest import cuda_only  # noqa: E402

# As ncu 2025 prints it with --csv --print-units base, but for the columns that nothing reads.
NCU = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "spin_kernel": 0%....50%....100% - 1 pass
a line of the program
==PROF== Disconnected from process 4711
"ID","Process ID","Kernel Name","Device","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","at::cuda::<unnamed>::spin_kernel(long)","0","Command line profiler metrics","{time}","ns","1,500"
"1","4711","void braze::cuda::naive<float, (int)16>(Args)","0","Command line profiler metrics","{time}","ns","136,521,088"
"1","4711","void braze::cuda::naive<float, (int)16>(Args)","0","Command line profiler metrics","{banks}","","0"
"1","4711","void braze::cuda::naive<float, (int)16>(Args)","0","Command line profiler metrics","{sectors}","sector","32.50"
"2","4711","at::cuda::<unnamed>::spin_kernel(long)","0","Command line profiler metrics","{time}","ns","1,500"
"3","4711","at::cuda::<unnamed>::spin_kernel(long)","0","Command line profiler metrics","{time}","ns","1,500"
"4","4711","split_kernel(Args)","0","Command line profiler metrics","{time}","ns","2000"
"4","4711","split_kernel(Args)","0","Command line profiler metrics","{tensor}","%","n/a"
"5","4711","void (anonymous namespace)::gemm<Tile<(int)64>>(Args)","0","Command line profiler metrics","{tensor}","%","91.25"
==WARNING== Something
"""  # noqa: E501


def recorded():
    names = {"time": "us", "banks": "bank_conflicts", "sectors": "sectors_per_load"}
    metrics = {key: counters.METRICS[column][0] for key, column in names.items()}
    metrics["tensor"] = counters.METRICS["tensor_pct"][0]
    text = NCU
    for key, metric in metrics.items():
        text = text.replace("{" + key + "}", metric)
    return text


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


def test_the_counters_are_read():
    assert counters.parse(recorded(), ["01_naive", "refused", "wgmma_split"]) == [
        (
            "01_naive",
            "naive",
            {"us": pytest.approx(136521.088), "bank_conflicts": 0, "sectors_per_load": 32.5},
        ),
        ("wgmma_split", "split_kernel", {"us": 2}),
        ("wgmma_split", "gemm", {"tensor_pct": 91.25}),
    ]
    with pytest.raises(ValueError, match="expected 2 calls in ncu's table, but found 3"):
        counters.parse(recorded(), ["01_naive", "02_coalesced"])
    with pytest.raises(ValueError, match=r"ncu printed no table: .*no permission"):
        counters.parse("==ERROR== no permission\n", ["01_naive"])


def test_counters_without_gpu_or_ncu(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is none here"):
        bench.main(parse("counters", "matmul", "--device", "cpu"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="ncu is missing"):
        list(counters.run(torch.device("cuda"), parse("counters", "matmul")))


def test_the_command_for_counters(tmp_path, monkeypatch):
    """With a program in ncu's place that knows all metrics but one."""
    ncu = tmp_path / "ncu"
    unknown = counters.METRICS["fma_pct"][0]
    (tmp_path / "table").write_text(recorded())
    ncu.write_text(
        f'#!/bin/sh\ncase "$*" in *{unknown}*) echo "==ERROR== unknown: {unknown}"; exit 1;; esac\n'
        f"while read -r line; do echo \"$line\"; done < '{tmp_path}/table'\n"
    )
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(counters, "calls", lambda device: ["01_naive", "x", "wgmma_split"])
    args = parse("counters", "matmul", "--quick")
    rows = list(counters.run(torch.device("cuda"), args))
    assert [list(row) for row in rows] == [counters.COLUMNS] * 3
    assert rows[0]["us"] == "136521"
    assert rows[2]["tensor_pct"] == "91.25"
    assert rows[2]["fma_pct"] == rows[2]["error"] == ""
    results.save(tmp_path, torch.device("cpu"), "counters_matmul", rows)
    text = render.text_of("counters:matmul", tmp_path)
    assert "| 4096x4096x4096 | float32 | wgmma_split | gemm |  |  | 91.25 |  |  |  |" in text


def test_cutlass_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(cutlass_gemm, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    cutlass_gemm.library.cache_clear()

    def refusal(function):
        with pytest.raises(RuntimeError) as caught:
            function()
        return str(caught.value)

    assert refusal(cutlass_gemm.build) == "nvcc is missing"
    assert refusal(cutlass_gemm.library) == "not built (nvcc is missing)"
    (tmp_path / "nvcc").touch(0o755)
    monkeypatch.setattr(cutlass_gemm, "headers", list)
    assert refusal(cutlass_gemm.build).endswith("pip install nvidia-cutlass")
    monkeypatch.setattr(cutlass_gemm, "headers", lambda: [tmp_path])
    assert "run `python -m benchmarks.cutlass_gemm --build`" in refusal(cutlass_gemm.library)
    (tmp_path / cutlass_gemm.NAME).touch()
    assert refusal(cutlass_gemm.library).startswith("does not load")


def test_rivals_are_checked_and_say_why_they_are_missing(monkeypatch):
    def missing(a, b, dtype_name):
        return {"any": lambda: lambda: importlib.import_module("no_such_module")}

    def refusing(a, b, dtype_name):
        return {"one": lambda: lambda: torch.matmul(a, a)}

    def right(a, b, dtype_name):
        return {"slow": lambda: lambda: (a.mT.pinverse(), a @ b)[1], "fast": lambda: lambda: a @ b}

    def wrong(a, b, dtype_name):
        return {"one": lambda: lambda: 1.01 * (a @ b)}

    def fast_but_wrong(a, b, dtype_name):
        return {"wrong": lambda: lambda: zeros[:], "right": right(a, b, dtype_name)["slow"]}

    table = {"missing": missing, "refusing": refusing, "right": right, "wrong": wrong}
    table["half"] = fast_but_wrong
    monkeypatch.setattr(rivals, "RIVALS", table)
    a, b = torch.randn(200, 300), torch.randn(300, 7)
    zeros = torch.zeros(200, 7)
    found, errors = rivals.find(timer_for(torch.device("cpu")), a, b, "float32", 8)
    assert {name: variant for name, (variant, _) in found.items()} == {
        "right": "fast",
        "half": "right",
    }
    assert set(errors) == {"missing", "refusing", "wrong"}
    assert torch.equal(found["right"][1]()(), a @ b)
    assert errors["missing"] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert errors["refusing"].startswith("RuntimeError: mat1 and mat2 shapes")
    assert errors["wrong"].startswith("AssertionError: output: error")


@cuda_only
def test_rivals_on_a_gpu(device):
    a, b = torch.randn(256, 512, device=device), torch.randn(512, 128, device=device)
    found, errors = rivals.find(timer_for(torch.device(device)), a, b, "float32", 32)
    assert set(found) | set(errors) == set(rivals.RIVALS)
    assert found["cublas best"][0].startswith("cublas:")
    assert not any("output: error" in why for why in errors.values())


def ladder_rows():
    row = dict.fromkeys(results.COLUMNS, "") | {"case": ladder_chart.CASE, "pass": "forward"}
    row |= {"dtype": "float32", "device": "G", "torch": "2.11", "unit": "TFLOP/s", "ratio": "1"}
    rates = {"01_naive": 1, "simt": 50, "wgmma_split": 80, "auto": 50, "cutlass": 45}
    rates["a_new_kernel"] = 10
    rows = [row | {"candidate": c, "rate": str(r), "note": ""} for c, r in rates.items()]
    rows.append(row | {"candidate": "cublas best", "rate": "52", "note": "cublas:3"})
    why = "ModuleNotFoundError: No module named 'triton'"
    rows.append(row | {"candidate": "triton", "note": "", "error": why})
    return [row | {"peak": "100", "braze_us": "2", "braze_p20": "1"} for row in rows]


def test_the_ladder_and_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "some-gpu").mkdir()
    rows = ladder_rows()
    with (tmp_path / "some-gpu" / "ladder_matmul.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    picture = tmp_path / "some-gpu" / ladder_chart.NAME
    assert ladder_chart.update(tmp_path, write=False) == [f"some-gpu/{ladder_chart.NAME}"]
    assert not picture.exists()
    assert ladder_chart.update(tmp_path) == [f"some-gpu/{ladder_chart.NAME}"]
    assert ladder_chart.update(tmp_path) == []
    drawn = picture.read_text()
    names = ["01_naive", "simt", "wgmma_split", "a_new_kernel", "cutlass"]
    assert [drawn.index(f">{name}<") for name in names] == sorted(
        drawn.index(f">{name}<") for name in names
    )
    assert ">triton<" not in drawn
    assert ">auto<" not in drawn
    text = render.text_of("ladder:matmul", tmp_path)
    assert f"(../../benchmarks/results/some-gpu/{ladder_chart.NAME})" in text
    assert "| cublas best (cublas:3) | 2 (1, ) | 52 TFLOP/s | 52.0% | 1 |" in text
    assert "| triton |  | ModuleNotFoundError: No module named 'triton' |  |  |" in text
