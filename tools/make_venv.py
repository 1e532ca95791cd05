"""Makes the venv of the Makefile: `python tools/make_venv.py DIR TORCH_REQUIREMENT`.

The venv sees the packages of the Python that runs this script, so that an installed torch is used;
without torch 2.10 or newer there, the given one is installed. Needs the standard library alone.

Writes DIR/build.env, the build's default for this machine: one CPU instruction set. A variable that
is set wins.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

PROBE = """
import torch
assert tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
capability = torch.backends.cpu.get_cpu_capability().lower()
isa = capability if capability in ("avx2", "avx512") else "generic"
print(torch.__version__, isa, sep=",")
"""


def make_venv(venv):
    print(f"braze: making {venv} from {sys.executable}", flush=True)
    command = [sys.executable, "-m", "venv", "--system-site-packages", str(venv)]
    if subprocess.run(command).returncode:
        sys.exit(f"braze: {' '.join(command)} failed (Debian and Ubuntu: apt install python3-venv)")
    if sys.prefix != sys.base_prefix:
        # A venv made inside a venv sees the packages of the outermost Python only.
        outer = sysconfig.get_path("purelib")
        inner = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
        (Path(inner) / "outer_venv.pth").write_text(f"import site; site.addsitedir({outer!r})\n")


def probe_torch(python):
    """Returns (version, CPU instruction set), or None without a fit torch."""
    out = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    return out.stdout.strip().split(",") if out.returncode == 0 else None


def main(venv, requirement):
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(
            f"braze needs Python 3.10 or newer, but {sys.executable} is "
            f"{sys.version.split()[0]}: name another one with `make PYTHON=...`"
        )
    venv = Path(venv)
    make_venv(venv)
    python = str(venv / "bin" / "python")
    torch = probe_torch(python)
    if torch is None:
        print(f"braze: no torch 2.10 or newer here, installing {requirement}", flush=True)
        if subprocess.run([python, "-m", "pip", "install", requirement]).returncode:
            sys.exit(f"braze: {requirement} could not be installed")
        torch = probe_torch(python)
        if torch is None:
            sys.exit(f"braze: {requirement} was installed, but cannot be imported by {python}")
    version, isa = torch
    print(f"braze: using torch {version}", flush=True)
    (venv / "build.env").write_text(f"export BRAZE_CPU_ISA=${{BRAZE_CPU_ISA:-{isa}}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
