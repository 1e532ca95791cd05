"""The benchmark of networks' convolutions: its cases, its rows, its rivals, its summary."""

import argparse
import math
import sys
from pathlib import Path

import pytest
import torch

from braze import _tuned, bench
from braze._problems import Convolution

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    conv_rivals,
    convolutions,
    render,
    render_convolutions,
    results,
)
from benchmarks.conv_passes import LAYOUTS, PASSES  # noqa: E402
from benchmarks.convolution_cases import AWKWARD, NETWORKS, cases  # noqa: E402
from benchmarks.convolution_cases import Convolution as Case  # noqa: E402
from tune_common import place, timed  # noqa: E402

# All parameters of torchvision's models of 1000 classes, as its documentation has them.
PARAMETERS = {
    "ResNet-18": 11_689_512,
    "ResNet-50": 25_557_032,
    "GoogLeNet": 6_624_904,
    "MobileNetV2": 3_504_872,
    "EfficientNet-B0": 5_288_548,
    "ResNeXt-50 32x4d": 25_028_904,
    "RegNet-Y 400MF": 4_344_144,
    "RegNet-Y 1.6GF": 11_202_430,
    "RegNet-Y 8GF": 39_381_472,
    "RegNet-Y 16GF": 83_590_140,
}


@pytest.fixture(autouse=True)
def no_recorded_rivals(monkeypatch, tmp_path):
    """The checkout may have rows of the machine at hand."""
    monkeypatch.setattr(results, "CHECKOUT", tmp_path / "checkout")


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


def command(*arguments):
    return parse("convolutions", "--device", "cpu", *arguments)


@pytest.mark.parametrize("network", PARAMETERS)
def test_networks_have_their_parameters(network):
    """Filters; a scale and a shift of batch norm each, or where nothing normalises, behind a
    squeeze, a bias; the classifier."""
    layers = NETWORKS[network]
    features = {"GoogLeNet": 1024}.get(network, layers[-1].k)
    shifts = sum(layer.k * (1 if layer.h == layer.w == 1 else 2) for layer in layers)
    filters = sum(layer.weights for layer in layers)
    assert filters + shifts + 1000 * features + 1000 == PARAMETERS[network]


@pytest.mark.parametrize(
    ("network", "parameters", "others"),
    [
        # biases and batch norm; the classifier's three layers
        ("VGG-11", 132_868_840, 3 * 2752 + 4097 * 4096 + 25089 * 4096 + 4097 * 1000),
        # batch norm at both ends, and below those in front of layers; the classifier
        ("DenseNet-121", 7_978_856, 2 * (64 + 1024) + 1025 * 1000),
    ],
)
def test_networks_with_other_parts(network, parameters, others):
    layers = NETWORKS[network]
    if network == "DenseNet-121":  # each 1x1 layer's input, and what it leaves for a 3x3 one
        ones = [layer for layer in layers if layer.r == 1]
        others += sum(2 * layer.c + 2 * 128 * (layer.k == 128) for layer in ones)
        # The first transition leaves 128 channels too, to nobody's 3x3 layer.
        others -= 2 * 128
    assert sum(layer.weights for layer in layers) + others == parameters


def test_the_cases():
    found = cases()
    assert len(AWKWARD) == len(set(AWKWARD)) == 40
    assert {case.kind for case in found} == set(render_convolutions.KINDS)
    for case, networks in found.items():
        assert min(case.out_size) > 0
        assert len(networks) == len(set(networks)) > 0
        assert case.c % case.groups == case.k % case.groups == 0
    # Names tell them apart: rows and rivals are known by them.
    assert len({case.name for case in found}) == len(found)
    shared = Case(64, 3, 224, 224, 64, 7, 7, 2, (3, 3))
    assert set(found[shared]) >= {"ResNet-18", "ResNet-50", "DenseNet-121", "GoogLeNet"}
    assert shared.passes == ("fprop", "wgrad")
    assert (shared.kind, shared.out_size) == ("first layer", (112, 112))
    assert shared.flops == 2 * 64 * 112 * 112 * 64 * 3 * 49
    of_resnet = cases(["resnet-50"], [8])
    assert len(of_resnet) == 23
    assert {case.n for case in of_resnet} == {8}
    assert {case.n for case in cases(["nature"])} == {1, 32, 256}
    assert set(cases(["awkward"], [8])) == set(AWKWARD)


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize(
    "case", [AWKWARD[16], AWKWARD[28], AWKWARD[39]], ids=lambda case: case.name
)
def test_all_compute_the_same(device, case, layout):
    """braze, torch and torch in the other format; and the sample of it is what it says."""
    for pass_name in PASSES:
        problem = convolutions.Problem(case, pass_name, "float64", layout, torch.device(device))
        error_of = problem.checker()
        makers = conv_rivals.makers(problem, [conv_rivals.TORCH, conv_rivals.ELSEWHERE, "auto"])
        expected = problem.stock()()
        for name, make in makers.items():
            assert error_of(make()) == "", (name, pass_name)
            actual = make()()
            assert actual.shape == expected.shape
            if name == "auto":  # torch may return another format
                assert actual.is_contiguous(memory_format=LAYOUTS[layout]), pass_name
        wrong = expected.clone()
        wrong[-1, -1, -1, -1] += 1  # the last image, filter and channel are in every sample
        if pass_name != "wgrad" or case.groups == 1:
            assert "error" in error_of(lambda wrong=wrong: wrong)
        assert "error" in error_of(lambda expected=expected: 1.01 * expected)


def test_samples():
    device = torch.device("cpu")
    assert convolutions.some(3, 3, device).tolist() == [0, 1, 2]
    picked = convolutions.some(1000, 16, device).tolist()
    assert (len(set(picked)), picked[0], picked[-1]) == (16, 0, 999)


def test_rows(tmp_path):
    args = command("--case", "64x5x32x32", "--quick", "--results", tmp_path)
    rows = list(convolutions.run(torch.device("cpu"), args))
    assert [row["pass"] for row in rows] == list(PASSES)
    for row in rows:
        assert list(row) == convolutions.COLUMNS
        assert (row["networks"], row["kind"], row["error"]) == ("awkward", "other", "")
        for name in convolutions.TIMED:
            assert (
                float(row[f"{name}_p20"]) <= float(row[f"{name}_us"]) <= float(row[f"{name}_p80"])
            )
        assert float(row["vendor_us"]) <= float(row["second_us"])
        assert {row["vendor_name"], row["second_name"]} == {"torch", "torch, transposed"}
        best = min(float(row["vendor_us"]), float(row["own_us"]))
        assert float(row["best_us"]) == best
        ratio = float(row["vendor_us"]) / float(row["own_us"])
        assert float(row["ratio"]) == pytest.approx(ratio, rel=0.01, abs=0.001)
        assert float(row["auto_ratio"]) == pytest.approx(
            best / float(row["auto_us"]), rel=0.01, abs=0.001
        )
        # They take about as long.
        assert row["own_name"] in ("implicit_gemm", "winograd", "blocked_im2col", "narrow_input")
        assert row["auto_name"] == "implicit_gemm"
    assert not list(tmp_path.iterdir())  # a quick run keeps nothing


def test_a_subset():
    device = torch.device("cpu")
    args = command("--network", "nature", "--batch", 1, "--pass", "wgrad", "--layout", "contiguous")
    found = list(convolutions.wanted(device, args))
    assert {(dtype, layout, name) for _, _, dtype, layout, name in found} == {
        ("float32", "contiguous", "wgrad")
    }
    assert [case.c for case, *_ in found] == [4, 32, 64]
    args = parse("convolutions", "--network", "ResNet-50", "--batch", 64, "--dtype", "tf32")
    found = list(convolutions.wanted(torch.device("cuda"), args))
    assert len(found) == 23 * 3 - 1
    assert not list(convolutions.wanted(device, args))  # CPUs have no TF32
    args = command("--network", "awkward", "--seconds", 1e-9)
    assert not list(convolutions.run(device, args))


def test_a_wrong_result_does_not_count(monkeypatch, tmp_path):
    """Neither ours nor a rival's."""
    args = command("--case", "64x5x32x32", "--pass", "fprop", "--quick", "--results", tmp_path)
    device = torch.device("cpu")
    wrong = convolutions.Problem.by_torch

    def off(self):
        call = wrong(self)
        return lambda: 1.01 * call()

    with monkeypatch.context() as patch:
        patch.setattr(convolutions.Problem, "by_torch", off)
        (row,) = convolutions.run(device, args)
    assert (row["vendor_name"], row["second_us"]) == ("torch, transposed", "")
    assert row["vendor_error"].startswith("torch: AssertionError: output: error")
    own = convolutions.Problem.own

    def ours_off(self, backend):
        call = own(self, backend)
        return lambda: 1.01 * call()

    monkeypatch.setattr(convolutions.Problem, "own", ours_off)
    (row,) = convolutions.run(device, args)
    assert "implicit_gemm: AssertionError" in row["error"]
    assert row["own_us"] == row["auto_us"] == row["ratio"] == row["auto_ratio"] == ""
    assert row["vendor_us"]


def test_what_torch_cannot_do_is_a_row(monkeypatch, tmp_path):
    def refused(*args):
        raise RuntimeError("no engine\nat all")

    monkeypatch.setattr(convolutions.Problem, "sample", refused)
    args = command("--case", "64x5x32x32", "--pass", "fprop", "--quick", "--results", tmp_path)
    (row,) = convolutions.run(torch.device("cpu"), args)
    assert row["error"] == "RuntimeError: no engine"
    assert row["own_us"] == row["ratio"] == ""


def test_rivals_are_measured_once(monkeypatch, tmp_path):
    device, folder = torch.device("cpu"), tmp_path / results.slug(torch.device("cpu"))
    args = command("--case", "64x5x32x32", "--pass", "fprop", "--results", tmp_path)
    list(convolutions.run(device, args))
    with (folder / "convolutions_rivals.csv").open() as file:
        first = file.read()
    assert first.count("\n") == 3
    asked = []
    measured = conv_rivals.measured

    def counted(*arguments):
        asked.append(arguments)
        return measured(*arguments)

    monkeypatch.setattr(conv_rivals, "measured", counted)
    (row,) = convolutions.run(device, args)
    assert not asked
    assert row["second_us"]
    args.passes = ["fprop", "wgrad"]
    list(convolutions.run(device, args))
    assert len(asked) == 1
    rows = results.load(tmp_path, conv_rivals.NAME)
    assert [row["pass"] for row in rows] == ["fprop"] * 2 + ["wgrad"] * 2
    args.anew = True
    list(convolutions.run(device, args))
    assert len(asked) == 3
    assert len(results.load(tmp_path, conv_rivals.NAME)) == 4
    # Another version's readings say nothing.
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert conv_rivals.Book(device, tmp_path, keep=False).rows == {}


def test_a_later_run_replaces_its_rows_alone(tmp_path):
    device = torch.device("cpu")
    rows = [{"case": case, "us": us} for case, us in (("a", 1), ("b", 2))]
    results.save(tmp_path, device, "x", rows, replaces=("case",))
    results.save(tmp_path, device, "x", [{"case": "a", "us": 3}], replaces=("case",))
    found = [(row["case"], row["us"]) for row in results.load(tmp_path, "x")]
    assert found == [("b", "2"), ("a", "3")]
    results.save(tmp_path, device, "x", rows[:1])
    assert len(results.load(tmp_path, "x")) == 1


def test_what_ran():
    """Of kernels with the same bits the one first that takes as long as "auto"."""
    case = AWKWARD[16]
    problem = convolutions.Problem(case, "wgrad", "float32", "contiguous", torch.device("cpu"))
    times = {"direct": 90.0, "implicit_gemm": 8.0, "braze": 5.0}
    assert convolutions.what_ran(problem, times, 5.5) == ["braze", "implicit_gemm"]
    assert convolutions.what_ran(problem, times, 9) == ["implicit_gemm", "braze"]


@pytest.mark.usefixtures("empty_tables")
def test_a_table_of_tuned_choices(device, monkeypatch, tmp_path, capsys):
    kernel = {"cpu": "implicit_gemm", "cuda": "direct"}[device]
    timed(monkeypatch, {"auto": 10, kernel: 1})
    path = tmp_path / "table.json"
    arguments = "--case", "64x5x32x32", "--pass", "wgrad", "--dtype", "float32", "--tune", path
    assert bench.main(parse("convolutions", "--device", device, *arguments)) == 0
    assert "1 of 1 passes have a choice" in capsys.readouterr().out
    padding = {"pad_h": 1, "pad_w": 1}
    problem = Convolution("float32", "wgrad", 64, 5, 32, 32, 7, 3, 3, channels_last=True, **padding)
    assert _tuned.read(path, place(device)) == {problem: {"choice": kernel, "us": [10, 1]}}


def made_up_row(**cells):
    row = dict.fromkeys(convolutions.COLUMNS, "") | {"op": "convolutions", "pass": "fprop"}
    row |= {"kind": "1x1", "case": "c", "dtype": "bfloat16", "layout": "channels_last"}
    return row | {"own_name": "halo_wgmma", "vendor_name": "cudnn:1", "auto_name": "direct"} | cells


def test_summary():
    times = {"own_us": "20", "vendor_us": "10", "best_us": "10", "auto_us": "12.5"}
    rows = [
        made_up_row(ratio="0.5", auto_ratio="0.8", **times),
        made_up_row(ratio="2", auto_ratio="1.0", **times),
        made_up_row(ratio="4", auto_ratio="0.5", **times | {"best_us": "12"}),  # 0.5 us
        made_up_row(kind="depthwise", ratio="8", auto_ratio="1", **times),
        made_up_row(error="AssertionError: output: error"),
    ]
    text = render_convolutions.summary(rows)
    mean = f"{math.cbrt(0.5 * 2 * 4):.3f} | 0.500 | {math.cbrt(0.8 * 0.5):.3f} | 0.500 |"
    assert f"| 1x1 | bfloat16 | channels_last | fprop c | 3 of 4 | {mean}" in text
    assert "| depthwise | bfloat16 | channels_last | fprop c | 1 | 8.000 | 8.000 | 1.000" in text
    assert text.index("| depthwise |") < text.index("| 1x1 |") < text.index("| all |")
    assert "below 0.93 of the fastest in 1 passes" in text
    assert "| direct | cudnn:1 | 12.5 | 10 | 0.8 |" in text
    assert "nowhere below 0.93" in render_convolutions.summary(rows[3:])


def test_the_command_and_its_table(tmp_path, capsys):
    arguments = "convolutions", "--device", "cpu", "--results", tmp_path
    assert bench.main(parse(*arguments, "--case", "1x4x84x84", "--pass", "fprop")) == 0
    printed = capsys.readouterr().out
    assert "1x4x84x84 to 32, 8x8/4 fprop float32 channels_last" in printed
    assert "best vendor / best own, geometric mean" in printed
    text = render.text_of("convolutions", tmp_path)
    assert results.device_name(torch.device("cpu")) in text
    assert "| first layer | float32 | channels_last | fprop 1x4x84x84 to 32, 8x8/4 | 1 |" in text
    assert bench.main(parse(*arguments, "--case", "1x64x9x9", "--pass", "fprop")) == 0
    assert len(results.load(tmp_path, "convolutions")) == 2
