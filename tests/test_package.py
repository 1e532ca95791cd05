"""What the package says of itself, and the checks of wheels in tools/make_wheels.py."""

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

import braze

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_wheels  # noqa: E402


def test_one_version():
    said = {"pyproject.toml": r'^version = "(.*)"$', "CITATION.cff": r"^version: (.*)$"}
    for name, pattern in said.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.search(pattern, text, re.MULTILINE).group(1) == braze.__version__, name


def test_wheels_are_built_for_the_pythons_that_the_metadata_lists():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text) == make_wheels.PYTHONS


def test_this_python_is_found():
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python, why = make_wheels.find_python(version)
    assert (python, why) == (Path(sys.executable), None)
    assert make_wheels.find_python("3.99") == (None, "not found")


def make(folder, name="braze-0-cp311-cp311-manylinux_2_34_x86_64.whl", others=(), **record):
    path = folder / name
    record = {"cuda": None, "cpu_isas": ["generic", "avx2", "avx512"]} | record
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("braze/lib/build.json", json.dumps(record))
        for other in ("braze/_C.so", *others):
            archive.writestr(other, "1" * 2_000_000)
    return path


def test_a_wheel_is_described(tmp_path):
    wheel = make(tmp_path)
    make_wheels.check(wheel)
    assert re.search(r"2\.0 MB, no CUDA library\n.*_C\.so 2\.0$", make_wheels.describe(wheel))
    wheel = make(tmp_path, cuda="13.0", cuda_archs=["8.0"], vendor_headers={"cudnn": True})
    make_wheels.check(wheel)
    assert "CUDA 13.0 for 8.0" in make_wheels.describe(wheel)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"name": "braze-0-cp311-cp311-linux_x86_64.whl"}, "no tag of manylinux"),
        ({"others": ["braze.libs/libtorch.so"]}, "bundles libraries"),
        ({"vendor_headers": {"cublas": True, "cudnn": False}}, r"without headers of \['cudnn'\]"),
    ],
)
def test_a_wheel_that_is_not_what_it_says_is_refused(tmp_path, wrong, why):
    with pytest.raises(SystemExit, match=why):
        make_wheels.check(make(tmp_path, **wrong))
