"""Tests wheels as somebody who installs them would have them: `make test-wheel`.

    python tools/test_wheel.py [WHEEL ...] [--torch torch==2.10.0 ...] [--share 1]

For each wheel (default: the one in dist/ for this Python) and each torch: a fresh venv outside the
tree, in which pip installs both; `pip check`; the CPU library of each instruction set that this
processor runs; `python -m braze info` and 20 steps of MNIST without a compiler on PATH; and the op
tests, from a copy of tests/ beside the venv. Nothing there sees the source tree.

MNIST's files are those of BRAZE_DATA, or they are downloaded; the default torch is the one that
setup.py builds with, so that pip may take it from where `make` took it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_wheels import ROOT, find_python

# The tests of ops: those of nothing else in the tree than tests/.
OP_TESTS = [
    *["activations", "batch_norm", "batch_norm_act", "bn_relu", "cast", "conv2d", "conv2d_relu"],
    *["conv_bn_relu", "conv_transpose2d", "cross_entropy", "fused", "gather", "linear_fused"],
    *["linear_relu", "matmul", "matmul_epilogue", "pool", "relu", "relu_max_pool2d", "sgd"],
    *["softmax", "transpose", "vector_add"],
]
# torch's name for the CPU's vector level, as ATEN_CPU_CAPABILITY takes it -> the CPU library
ISAS = {"default": "generic", "avx2": "avx2", "avx512": "avx512"}
LOADED = "from braze import _lib; _lib.require(); print(_lib.cpu_isa)"


class Venv:
    def __init__(self, folder, python):
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        # Neither the source tree nor the packages of the user who runs this.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.env |= {"PYTHONNOUSERSITE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        # Threads that spin while they wait take the time of others, of this machine's too.
        self.env.setdefault("OMP_WAIT_POLICY", "passive")
        subprocess.run([python, "-m", "venv", self.bin.parent], check=True)

    def run(self, *arguments, path=None, **env):
        """Runs the venv's Python; returns what it printed. `path` becomes PATH."""
        out = subprocess.run(
            [self.bin / "python", *arguments],
            cwd=self.folder,
            env=self.env | ({"PATH": str(path)} if path else {}) | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if out.returncode:
            raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{out.stdout}")
        return out.stdout


def of_wheel(path):
    """The Python version that a wheel is for."""
    tag = re.search(r"-cp3(\d+)-", path.name)
    return f"3.{tag.group(1)}"


def libraries_here(page):
    """The CPU libraries that this processor runs, and torch's names for their levels."""
    levels = list(ISAS)
    # Torch has names of their own for other processors, where braze has the generic library.
    capability = page["cpu"]["capability"].lower()
    best = levels.index(capability) if capability in levels else 0
    return {ISAS[level]: level for level in levels[: best + 1]}


def check_info(page, venv, version):
    """Exits where `braze info` shows something else than the wheel that was installed."""
    # .resolve() of neither: a venv's python is a link out of it.
    assert Path(page["braze"]["path"]).is_relative_to(venv.bin.parent), page["braze"]
    assert page["braze"]["commit"] is None, page["braze"]
    assert page["python"]["version"].startswith(version + "."), page["python"]
    assert set(libraries_here(page)) <= set(page["build"]["cpu_isas"]), page["build"]
    cuda, mine = page["torch"]["cuda"], page["build"]["cuda"]
    if cuda and mine and cuda.split(".")[0] == mine.split(".")[0]:
        assert page["loaded"]["cuda"], page["loaded"]
    return page


def test(wheel, torch, share, keep):
    """Tests one wheel under one torch; returns a line of results."""
    version = of_wheel(wheel)
    python, why = find_python(version)
    if python is None:
        raise SystemExit(f"{wheel.name}: no Python {version} here: {why}")
    folder = Path(tempfile.mkdtemp(prefix="braze_test_wheel_")).resolve()
    start = time.monotonic()

    def say(what):
        print(f"  {time.monotonic() - start:4.0f} s  {what}", flush=True)

    try:
        print(f"{wheel.name}, {torch}: {folder}", flush=True)
        venv = Venv(folder, python)
        pip = ["-m", "pip", "--disable-pip-version-check"]
        venv.run(*pip, "install", torch, f"{wheel.resolve()}[test]")
        venv.run(*pip, "check")
        say("installed")

        page = json.loads(venv.run("-m", "braze", "info", "--json", path=venv.bin))
        check_info(page, venv, version)
        for isa, level in libraries_here(page).items():
            loaded = venv.run("-c", LOADED, ATEN_CPU_CAPABILITY=level).split()[-1]
            assert loaded == isa, f"{loaded} loaded for {level}"
        tried = ", ".join(libraries_here(page))
        cuda = "loaded" if page["loaded"]["cuda"] else "not loaded"
        say(f"info: torch {page['torch']['version']}; {tried}; CUDA library {cuda}")

        # 20 steps of 64 images are trained, then 20 are timed.
        steps = ["--batch", "64", "--limit", "1280", "--epochs", "1", "--steps", "20"]
        options = ["--device", "cpu", "--lr", "0.01", "--stock", "none", "--out", folder / "mnist"]
        venv.run("-m", "braze", "mnist", *steps, *options, path=venv.bin)
        trained = json.loads((folder / "mnist" / "mnist.json").read_text())["training"]["braze"]
        assert trained["accuracy"] > 0.5, trained  # a tenth by chance
        say(f"MNIST: test accuracy {trained['accuracy']:.1%} after 20 steps")

        shutil.copytree(ROOT / "tests", folder / "tests")
        files = [f"tests/test_{name}.py" for name in OP_TESTS]
        # torch.compile needs a compiler, braze or not: with all tests only.
        few = [] if share == 1 else ["--share", str(share), "-k", "not compile"]
        out = venv.run("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *few, *files)
        result = out.strip().splitlines()[-1]
        say(f"op tests: {result}")
        return f"{wheel.name}, torch {page['torch']['version']}: {result}"
    finally:
        if not keep:
            shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("wheels", nargs="*", type=Path, metavar="WHEEL", help="default: of this Python, in dist/")
    add("--torch", nargs="+", default=["torch==2.13.0"], help="what pip installs as torch")
    add("--share", type=float, default=0.05, help="of the op tests (default: 0.05)")
    add("--keep", action="store_true", help="leave the venvs where they are")
    args = parser.parse_args()
    wheels = args.wheels
    if not wheels:
        tag = f"cp3{sys.version_info[1]}"
        wheels = sorted((ROOT / "dist").glob(f"*-{tag}-{tag}-*.whl"), key=os.path.getmtime)[-1:]
    if not wheels:
        sys.exit("no wheel for this Python in dist/: `make wheel` builds them")
    results = [
        test(wheel, torch, args.share, args.keep) for wheel in wheels for torch in args.torch
    ]
    print("\n".join(results))


if __name__ == "__main__":
    main()
