"""The files of tuned choices, and ``python -m braze tune``."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import braze
from braze import _tuned
from braze.__main__ import main
from braze._tuned import Product
from tune_common import PRODUCT, RUNG, by_name, factors, good_kernel, index_of, place, timed

pytestmark = pytest.mark.usefixtures("empty_tables")


def in_a_process(code, **kwargs):
    paths = [os.fspath(Path(braze.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **kwargs)


def test_round_trip(device, monkeypatch):
    timed(monkeypatch, {"auto": 10, RUNG: 1})
    a, b = factors(device)
    braze.tune(braze.matmul, a, b, candidates=[RUNG])
    _tuned.forget()
    assert not torch.equal(braze.matmul(a, b), by_name(RUNG, a, b))
    _tuned.load(index_of(device))
    assert torch.equal(braze.matmul(a, b), by_name(RUNG, a, b))
    assert _tuned.entries() == [(index_of(device), PRODUCT, RUNG, True)]


def test_files_keep_what_others_wrote(device):
    path, here = place(device).user_file(), place(device)
    other = PRODUCT._replace(m=17)
    _tuned.write(path, here, {PRODUCT: {"choice": "a"}, other: {"choice": "b"}})
    _tuned.write(path, here, {PRODUCT: {"choice": "c"}})
    assert _tuned.read(path, here) == {PRODUCT: {"choice": "c"}, other: {"choice": "b"}}
    _tuned.write(path, here, {other: None})
    assert _tuned.read(path, here) == {PRODUCT: {"choice": "c"}}
    assert {p.name for p in path.parent.iterdir()} == {path.name, path.with_suffix(".lock").name}


def damaged(text, place):
    content = json.loads(text)
    row = content["products"][0]
    yield text[: len(text) // 2]
    yield ""
    yield "[]"
    yield json.dumps(content | {"format": 0})
    for key in ("device", "library", "braze"):
        yield json.dumps(content | {key: "another"})
    for wrong in ({"m": "16"}, {"choice": 3}, {"dtype": "int8"}, {"relu": 0}):
        yield json.dumps(content | {"products": [row | wrong]})
    for number in (1 << 63, 1 << 64, 10**400, -1, 0, 1.5, float("nan"), float("inf"), None, []):
        # The second row: nothing of such a file takes effect.
        yield json.dumps(content | {"products": [row, row | {"k": number}]})
    for name in ("\ud800", "\0", "", "a" * 10**6, "naïve", {"a": 1}):
        yield json.dumps(content | {"products": [row | {"choice": name}]})
    yield json.dumps(content | {"products": [{"choice": RUNG}]})
    yield json.dumps(content | {"products": 3})
    yield json.dumps(content | {"products": {"a": row}})
    yield json.dumps(content | {"device": "a" * 10**6})
    yield text.replace('"products": [', '"products": ' + "[" * 10**5)
    yield '{"format": ' + "9" * 10**5 + "}"
    yield "NaN"
    yield text + " " * (16 << 20)
    yield "\ufeff" + text


def test_a_damaged_or_foreign_file_is_ignored(device):
    path, here = place(device).user_file(), place(device)
    _tuned.write(path, here, {PRODUCT: {"choice": RUNG}})
    whole = path.read_text()
    for text in damaged(whole, here):
        path.write_text(text)
        with pytest.warns(UserWarning, match="ignores the tuned choices in") as caught:
            _tuned.load(index_of(device))
        (message,) = [str(w.message) for w in caught]
        assert os.fspath(path) in message
        assert len(message) < 1000
        assert _tuned.entries() == []
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="UnicodeDecodeError"):
        _tuned.load(index_of(device))
    with pytest.warns(UserWarning, match="ignores"):
        _tuned.write(path, here, {PRODUCT: {"choice": RUNG}})
    assert path.read_text() == whole


def test_places_that_hold_no_file(device, monkeypatch, tmp_path):
    path = place(device).user_file()
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match=f"ignores the tuned choices in {path}: .*it is no file"):
        _tuned.load(index_of(device))
    path.rmdir()
    os.mkfifo(path)  # which nobody writes
    with pytest.warns(UserWarning, match="it is no file"):
        _tuned.load(index_of(device))
    for folder in (tmp_path / "file", tmp_path / ("a" * 300), "relative"):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(folder))
        monkeypatch.setenv("HOME", os.fspath(tmp_path / "home"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="braze reads no tuned choices")
            _tuned.load(index_of(device))
        assert _tuned.entries() == []


@pytest.mark.parametrize(
    "choice", ["auto", "braze", "nonsense", "cublas:9" + "9" * 30, "cublas:-1"]
)
def test_a_choice_that_no_kernel_answers_to_is_passed_over(device, choice):
    a, b = factors(device)
    expected = braze.matmul(a, b)
    here = place(device)
    _tuned.write(here.user_file(), here, {PRODUCT: {"choice": choice}})
    _tuned.load(index_of(device))
    assert torch.equal(braze.matmul(a, b), expected)


def test_built_in_table(device):
    here = place(device)
    path = _tuned.BUILT_IN / f"{here.slug()}.json"
    older = here._replace(braze="0.0.1")
    rows = {PRODUCT: {"choice": RUNG}, PRODUCT._replace(m=17): {"choice": "cublas:3"}}
    _tuned.write(path, older, rows)
    _tuned.load(index_of(device))
    found = [(choice, measured) for _, _, choice, measured in _tuned.entries()]
    assert found == [(RUNG, False), ("cublas:3", False)]
    _tuned.forget()
    # Another version of the library numbers its candidates otherwise.
    path.unlink()
    _tuned.write(path, older._replace(library="another"), rows)
    _tuned.load(index_of(device))
    assert [entry[2:] for entry in _tuned.entries()] == [(RUNG, False)]


def test_processes_that_write_at_once_lose_nothing():
    here = place("cpu")
    code = """
import sys
from braze import _tuned
place = _tuned.place_of(-1)
sys.stdin.readline()
for i in range(20):
    product = _tuned.Product("float32", int(sys.argv[1]), i + 1, 1, 1)
    _tuned.write(place.user_file(), place, {product: {"choice": "blocked"}})
"""
    writers = []
    for number in range(2):
        writer = in_a_process(code.replace("sys.argv[1]", str(number + 1)), stdin=subprocess.PIPE)
        writers.append(writer)
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    for writer in writers:
        writer.stdin.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(_tuned.read(here.user_file(), here)) == 40


def test_a_new_process_reads_the_cache():
    here = place("cpu")
    _tuned.write(here.user_file(), here, {PRODUCT: {"choice": RUNG}})
    code = """
import torch, braze
a, b = torch.randn(16, 3000), torch.randn(3000, 16)
with braze.backend(matmul="01_naive"):
    print(torch.equal(torch.ops.braze.matmul(a, b), braze.matmul(a, b)))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    out, errors = in_a_process(code, **pipes).communicate(timeout=60)
    assert (out, errors) == ("True\n", "")
    here.user_file().write_text("{ cut off")
    out, errors = in_a_process(code, **pipes).communicate(timeout=60)
    assert out == "False\n"
    assert "UserWarning: braze ignores the tuned choices in" in errors
    assert "Traceback" not in errors


def test_info(device):
    assert braze.info()["tuned"] == {"built_in": 0, "measured": 0}
    _tuned.put(index_of(device), PRODUCT, RUNG, True)
    _tuned.put(index_of(device), PRODUCT, RUNG, False)
    _tuned.put(index_of(device), PRODUCT._replace(m=1), RUNG, False)
    page = braze.info()
    assert page["tuned"] == {
        "built_in": 2,
        "measured": 1,
        "path": os.fspath(_tuned.user_folder()),
    }
    assert "  built_in: 2" in str(page).splitlines()


# --- the command line ---


def run(capsys, device, *arguments):
    pytest.importorskip("rich")
    code = main(["tune", "--device", device, *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_line(device, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    name = good_kernel(device)
    timed(monkeypatch, {"auto": 12.5, name: 3.25})
    code, out, _ = run(capsys, device, "16,16,3000", "8,24,32,nt,3", "--dtype", "float32")
    assert code == 0
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["16x16x3000 nn", "float32", "12.5", "3.25", name],
        ["8x24x32 nt batch 3", "float32", "12.5", "3.25", name],
    ]
    path = place(device).user_file()
    assert f"2 of 2 products changed: {path}" in out
    assert set(_tuned.read(path, place(device))) == {
        PRODUCT,
        Product("float32", 3, 8, 24, 32, a_shared=False, b_column_major=True, b_shared=False),
    }
    code, out, _ = run(capsys, device, "--list")
    assert code == 0
    assert out.count("measured here") == 2
    code, out, _ = run(capsys, device, "--clear")
    assert (code, out.split(" from ")[0]) == (0, "Deleted 1 files")
    assert not path.exists()


def test_command_line_writes_a_built_in_table(device, monkeypatch, capsys, tmp_path):
    name = good_kernel(device)
    path = tmp_path / "table.json"
    _tuned.put(index_of(device), PRODUCT, RUNG, False)
    timed(monkeypatch, {"auto": 10, name: 1})
    shape = ["16,16,3000", "--dtype", "float32", "--built-in", path]
    assert run(capsys, device, *shape)[0] == 0
    assert [e[2] for e in _tuned.entries()] == [name]  # measured without the choices of before
    assert _tuned.read(path, place(device))[PRODUCT] == {"choice": name, "us": [10, 1]}
    assert not place(device).user_file().exists()
    timed(monkeypatch, {"auto": 10})
    assert run(capsys, device, *shape)[0] == 0
    assert _tuned.read(path, place(device)) == {}


def test_command_line_tunes_mnist(device, monkeypatch, capsys):
    from braze import _tune_cli

    monkeypatch.setattr(_tune_cli, "_MNIST_BATCHES", (6,))
    monkeypatch.setenv("COLUMNS", "120")
    timed(monkeypatch, {"auto": 10})
    code, out, _ = run(capsys, device, "--dtype", "float32", "bfloat16")
    assert code == 0
    # The first layer's forward product, with ReLU, and the second's.
    assert out.count("6x128x3136 nt bias relu") == 2
    assert out.count("6x10x128 nt bias") == 2
    assert "0 of " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["5,5"], "5,5: expected M,N,K, M,N,K,nt or M,N,K,nt,BATCH"),
        (["5,5,0"], "5,5,0: expected"),
        (["5,5,5,xx"], "5,5,5,xx: expected"),
        (["9" * 30 + ",1,1"], "9,1,1: expected M,N,K, M,N,K,nt or"),
        (["1" + "0" * 12 + ",1" + "0" * 6 + ",1"], "cannot be computed here: "),
        (["5,5,5", "--built-in", "."], "--built-in .: expected a file, but it is a folder"),
        (["5,5,5", "--list"], "expected one of: shapes, --mnist, --list, --clear"),
        (["5,5,5", "--seconds", "0"], "--seconds 0.0: expected a positive number"),
        (
            ["--mnist", "--dtype", "float64"],
            "--dtype float64: `braze mnist` has float32, tf32, bfloat16",
        ),
        (["5,5,5", "--dtype", "tf32"], "--dtype tf32: CPUs have no TF32"),
    ],
)
def test_command_line_errors(capsys, arguments, message):
    code, _, errors = run(capsys, "cpu", *arguments)
    assert code == 2
    assert message in errors
