"""braze.info() and ``python -m braze info``, also where braze itself cannot be loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import braze
from braze import _C
from braze import info as info_function
from braze.info import Info, _missing, peak_rates, processor

SECTIONS = [
    *["braze", "python", "torch", "build", "loaded", "cpu", "devices", "vendor"],
    *["tuned", "missing"],
]
PACKAGE = Path(braze.__file__).parent


def run_info(*arguments, root=PACKAGE.parent, command="info"):
    """``python -m braze info`` in a process of its own; returns its text."""
    return subprocess.run(
        [sys.executable, "-m", "braze", command, *arguments],
        env=os.environ | {"PYTHONPATH": os.fspath(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def page():
    return info_function()


def copy_of_package(target):
    """braze without its native libraries."""
    ignored = shutil.ignore_patterns("lib", "_C*", "__pycache__")
    shutil.copytree(PACKAGE, target / "braze", ignore=ignored)
    return target


def test_keys(page):
    assert list(page) == SECTIONS
    assert [name for name in SECTIONS[:-1] if "error" in page[name]] == []
    assert page["braze"]["version"] == braze.__version__
    assert page["torch"]["version"] == torch.__version__
    assert page["build"]["torch"]
    assert page["build"]["cxx"]
    assert page["loaded"]["cpu_isa"] in page["build"]["cpu_isas"]
    assert page["loaded"]["kernels"] > 0
    assert page["cpu"]["threads"] == torch.get_num_threads()
    assert page["cpu"]["cores"] >= 1
    assert len(page["devices"]) == torch.cuda.device_count()
    assert json.loads(json.dumps(page)) == page


def test_processors_of_one_name():
    """Tables keep readings of a processor apart that has other instructions."""
    cpu = {"name": "Intel X", "threads": 2, "capability": "AVX512", "amx": True}
    assert processor(cpu) == "Intel X, 2 threads"
    assert processor(cpu | {"amx": False}) == "Intel X without AMX, 2 threads"
    assert processor(cpu | {"name": "AMD Y", "amx": False}) == "AMD Y, 2 threads"
    assert processor(cpu | {"capability": "AVX2", "amx": False}) == "Intel X with AVX2, 2 threads"
    del cpu["amx"]  # of readings before that was noted
    assert processor(cpu) == "Intel X, 2 threads"


def test_text(page):
    text = str(page)
    lines = text.splitlines()
    assert f"  version: {torch.__version__}" in lines
    assert "missing" in lines
    for sentence in page["missing"] or ["nothing"]:
        assert f"  - {sentence}" in text
    assert repr(page) == text


def test_device(device, page):
    if device == "cpu":
        assert page["loaded"]["cuda"] == (page["loaded"]["cuda_missing"] is None)
        if not page["loaded"]["cuda"]:
            assert any("no CUDA kernels: " in sentence for sentence in page["missing"])
        return
    properties = torch.cuda.get_device_properties(0)
    found = page["devices"][0]
    assert found["name"] == properties.name
    assert found["sm_count"] == properties.multi_processor_count
    assert 1e11 < found["bandwidth"] < 2e13
    assert 200 < found["sm_clock_mhz"] < 5000
    assert found["l2_bytes"] > 0
    assert "cuda:0" in str(page)
    assert properties.name in str(page)


def test_peak_rates():
    # NVIDIA's data sheets: H100 SXM with 132 SMs at 1830 MHz boost.
    rates = peak_rates("NVIDIA H100", [9, 0], 132, 1.83e9)
    assert rates["fp32"] == pytest.approx(61.8e12, rel=0.01)
    assert rates["bf16"] == pytest.approx(989e12, rel=0.01)
    board = peak_rates("NVIDIA GeForce RTX 4090", [8, 9], 128, 2.52e9)
    assert board["fp32"] == pytest.approx(82.6e12, rel=0.01)
    assert board["bf16"] == pytest.approx(165.2e12, rel=0.01)
    assert peak_rates("unknown", [3, 5], 1, 1e9) == {}


@pytest.mark.parametrize(
    ("torch_cuda", "build_cuda", "file"),
    [
        ("12.8", "12.8", "requirements-build-cuda12.txt"),
        ("13.0", None, "requirements-build-cuda13.txt"),
        (None, "12.9", "requirements-build-cuda12.txt"),
    ],
)
def test_missing_headers_name_a_file_that_exists(torch_cuda, build_cuda, file):
    page = Info(
        torch={"cuda": torch_cuda},
        build={"cuda": build_cuda, "vendor_headers": {"cublas": True, "cudnn": False}},
        loaded={"cuda_missing": None},
        devices=[{}],
    )
    sentences = [sentence for sentence in _missing(page) if "headers of cudnn," in sentence]
    assert len(sentences) == 1
    assert file in sentences[0]
    root = PACKAGE.parent.parent
    assert (root / file).exists() or not (root / "setup.py").exists()


def test_a_broken_part_does_not_hide_the_others(monkeypatch):
    def broken():
        raise OSError("no such counter")

    monkeypatch.setattr(sys.modules["braze.info"], "_cpu", broken)
    page = info_function()
    assert page["cpu"] == {"error": "OSError: no such counter"}
    assert "  error: OSError: no such counter" in str(page)
    assert page["loaded"]["kernels"] > 0


def test_command_line():
    out = run_info("--json")
    assert out.returncode == 0, out.stderr
    page = json.loads(out.stdout)
    assert list(page) == SECTIONS
    assert Path(page["braze"]["path"]) == PACKAGE


@pytest.mark.parametrize("package", ["numpy", "platformdirs", "sklearn"])
def test_command_line_without_a_package(tmp_path, package):
    """Each but torch may be missing; where braze needs it, the page says so."""
    code = f"import sys; sys.modules[{package!r}] = None\n"
    code += "from braze.__main__ import main; sys.exit(main(['info']))"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.fspath(PACKAGE.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out.stderr
    name = {"sklearn": "scikit-learn"}.get(package, package)
    assert f"  - no {name}, which is for " in out.stdout
    assert (f"braze does not load: import of {package}" in out.stdout) == (package != "sklearn")
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize("record", ["{ cut off", "[1]", "\xff"])
def test_a_damaged_build_record(monkeypatch, tmp_path, record):
    (tmp_path / "build.json").write_bytes(record.encode("latin-1"))
    monkeypatch.setattr(braze._lib, "LIB_DIR", tmp_path)
    page = info_function()
    assert "Error: " in page["build"]["error"]
    assert page["loaded"]["kernels"] > 0


def test_command_line_without_native_libraries(tmp_path):
    root = copy_of_package(tmp_path)
    out = run_info(root=root)
    assert out.returncode == 0, out.stderr
    assert "braze does not load: braze's native module does not load" in out.stdout
    assert "pip install --no-build-isolation ." in out.stdout
    assert f"version: {torch.__version__}" in out.stdout
    assert out.stderr == ""

    out = run_info("--device", "cpu", root=root, command="mnist")
    assert out.returncode == 2
    assert out.stderr.startswith("braze mnist: braze's native module does not load")
    assert "Traceback" not in out.stderr


def test_command_line_with_a_library_that_is_no_library(tmp_path):
    root = copy_of_package(tmp_path)
    native = Path(_C.__file__)  # others may be there, for other Pythons
    (root / "braze" / native.name).symlink_to(native)
    (root / "braze" / "lib").mkdir()
    for isa in ("avx512", "avx2", "generic"):
        (root / "braze" / "lib" / f"libbraze_ops_{isa}.so").write_bytes(b"not a library")
    (root / "braze" / "lib" / "build.json").write_text("{ cut off")
    out = run_info(root=root)
    assert out.returncode == 0, out.stderr
    assert "braze does not load: " in out.stdout
    assert "build\n  error: JSONDecodeError" in out.stdout
    assert "cpu\n  name: " in out.stdout
