"""Builds braze's native libraries with ninja: incremental, parallel, one rule per source file.

What is built (into python/braze/lib/ for an editable install, else into the wheel):

  libbraze_ops_<isa>.so    schemas, op front ends and CPU kernels; one per instruction set, the best
                           one that the machine runs is loaded
  libbraze_cuda<major>.so  the op front ends again, for CUDA, and all CUDA kernels
  braze/_C.<abi>.so        the pybind11 module; all that depends on the Python version

Environment:

  BRAZE_CUDA            auto (default): build the CUDA library under a CUDA build of torch, where
                        nvcc is found; 1: build it under any torch, and fail without nvcc; 0: leave
                        it out
  TORCH_CUDA_ARCH_LIST  for example "8.0 9.0a 9.0+PTX"; all: "8.0 8.6 8.9 9.0a 9.0+PTX", what a
                        wheel has; default: the visible GPUs, else all
  BRAZE_CPU_ISA         "generic avx2 avx512" (default on x86-64); a subset builds faster
  CUDA_HOME             where nvcc is; default: that of the nvcc on PATH, or /usr/local/cuda
  CXX                   the C++ compiler; default: g++
  BRAZE_PYTHON          the Python that _C and the wheel are for; default: the one that runs this
  BRAZE_LINEINFO        1: the CUDA library knows its source lines, which Nsight Compute shows, and
                        is half as large again
  MAX_JOBS              parallel compile jobs

ccache is used where it is on PATH (CCACHE_DISABLE=1 turns it off).
"""

import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pybind11
import torch
from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
# The oldest torch whose stable ABI is used: 2.10.
TARGET_VERSION = "-DTORCH_TARGET_VERSION=0x020a000000000000"
WHEEL_ARCHS = "8.0 8.6 8.9 9.0a 9.0+PTX"
# Minutes of a server's core that compiling for an architecture takes; 9.0a has kernels of its own.
CPU_MINUTES = {"8.0": 11, "9.0a": 17}
# x86-64 levels that the CPU kernels are compiled for, each with the flags of its baseline chip.
ISA_FLAGS = {
    "generic": "",
    "avx2": "-mavx2 -mfma -mf16c -mbmi2",
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mbmi2 "
    "-mprefer-vector-width=512",
}


def cpu_isas():
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["generic"]
    isas = os.environ.get("BRAZE_CPU_ISA", "generic avx2 avx512").split()
    for isa in isas:
        if isa not in ISA_FLAGS:
            sys.exit(f"BRAZE_CPU_ISA: expected a subset of {' '.join(ISA_FLAGS)}, but got {isa}")
    return isas


# What a wheel has to know of its Python, which may be another than the one that builds it.
TARGET_PYTHON = """
import json, sys, sysconfig
print(json.dumps({
    "tag": f"cp{sys.version_info[0]}{sys.version_info[1]}",
    "abi": f"cp{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}",
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "include": sysconfig.get_path("include"),
}))
"""


def target_python():
    python = os.environ.get("BRAZE_PYTHON") or sys.executable
    out = subprocess.run([python, "-c", TARGET_PYTHON], capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"BRAZE_PYTHON: {python} does not run: {out.stderr.strip()}")
    return json.loads(out.stdout)


def find_cuda_home():
    if os.environ.get("CUDA_HOME"):
        return Path(os.environ["CUDA_HOME"])
    nvcc = shutil.which("nvcc")
    if nvcc:
        # nvcc on PATH may be a wrapper script: ask it where its toolkit is.
        out = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        top = re.search(r"^#\$ TOP=(.*)$", out.stderr, re.MULTILINE)
        if top:
            return Path(top.group(1)).resolve()
    default = Path("/usr/local/cuda")
    return default if (default / "bin" / "nvcc").exists() else None


def nvcc_version(cuda_home):
    out = subprocess.run(
        [cuda_home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True
    )
    return re.search(r"release (\d+\.\d+)", out.stdout).group(1)


def decide_cuda():
    """Returns (CUDA_HOME or None, the reason in words)."""
    mode = os.environ.get("BRAZE_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        sys.exit(f"BRAZE_CUDA: expected auto, 1 or 0, but got {mode!r}")
    if mode == "0":
        return None, "BRAZE_CUDA=0"
    if mode == "auto" and torch.version.cuda is None:
        why = f"torch {torch.__version__} is a CPU build, which could not load it"
        return None, f"{why} (BRAZE_CUDA=1 builds it all the same)"
    home = find_cuda_home()
    if home is None:
        why = "no nvcc was found on PATH, in CUDA_HOME or in /usr/local/cuda"
    else:
        major = nvcc_version(home).split(".")[0]
        if torch.version.cuda and torch.version.cuda.split(".")[0] != major:
            why = (
                f"nvcc in {home} is CUDA {nvcc_version(home)}, but torch {torch.__version__} was "
                f"built for CUDA {torch.version.cuda}: their major versions must be equal"
            )
        else:
            return home, f"nvcc {nvcc_version(home)} found"
    if mode == "1":
        sys.exit(f"BRAZE_CUDA=1, but {why}")
    return None, why


def arch_list():
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not archs:
        smi = shutil.which("nvidia-smi")
        out = smi and subprocess.run(
            [smi, "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
        if out and out.returncode == 0 and out.stdout.strip():
            # wgmma and TMA need the architecture-specific target of compute capability 9.0
            found = {"9.0a" if cap == "9.0" else cap for cap in out.stdout.split()}
            archs = " ".join(sorted(found))
        else:
            archs = "all"
    if archs.strip() == "all":
        archs = WHEEL_ARCHS
    return archs.replace(";", " ").replace(",", " ").split()


def gencode(archs):
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        if not re.fullmatch(r"\d{2,3}[af]?", number):
            sys.exit(f"TORCH_CUDA_ARCH_LIST: expected entries like 8.0, 9.0a, 9.0+PTX; got {arch}")
        code = "compute" if arch.endswith("+PTX") else "sm"
        flags.append(f"-gencode=arch=compute_{number},code={code}_{number}")
        if number == "90a":
            flags.append("-DBRAZE_SM90A")  # has_wgmma() in csrc/cuda/common/launch.cuh
    return flags


def vendor_include_dirs(cuda_home):
    """Folders that may hold cublasLt.h and cudnn.h: the toolkit's, then those of pip packages."""
    dirs = [cuda_home / "include"]
    for base in [*site.getsitepackages(), site.getusersitepackages(), *sys.path]:
        base = Path(base)
        dirs += sorted(base.glob("nvidia/*/include")) + [base / "include"]
    return dirs


def object_name(source):
    return "_".join(source.relative_to(CSRC).with_suffix("").parts)


def expected_minutes(archs):
    """How long compiling for these architectures takes, in words."""
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    cpu_minutes = sum(
        CPU_MINUTES.get(arch.removesuffix("+PTX"), CPU_MINUTES["8.0"]) for arch in archs
    )
    return f"about {max(1, round(cpu_minutes / jobs))} min with {jobs} jobs"


def first_with(dirs, header):
    return next((d for d in dirs if (d / header).exists()), None)


class Ninja:
    """Collects rules and edges and writes build.ninja."""

    def __init__(self, build_dir):
        self.dir = build_dir
        self.lines = []
        self.linked = set()

    def rule(self, name, command, deps=True):
        self.lines.append(f"rule {name}\n  command = {command}\n  description = {name} $out")
        if deps:
            self.lines.append("  depfile = $out.d\n  deps = gcc")

    def edge(self, out, rule, inputs, flags=""):
        escaped = [str(p).replace(" ", "$ ") for p in [out, *inputs]]
        self.lines.append(f"build {escaped[0]}: {rule} {' '.join(escaped[1:])}")
        if flags:
            self.lines.append(f"  flags = {flags}")
        if rule == "link":
            self.linked.add(out)
        return out

    def run(self, verbose):
        self.dir.mkdir(parents=True, exist_ok=True)
        text = "ninja_required_version = 1.5\n" + "\n".join(self.lines) + "\n"
        (self.dir / "build.ninja").write_text(text)
        ninja = shutil.which("ninja")
        if ninja is None:
            import ninja as package

            ninja = str(Path(package.BIN_DIR) / "ninja")
        jobs = os.environ.get("MAX_JOBS")
        subprocess.run(
            [ninja, *(["-v"] if verbose else []), *(["-j", jobs] if jobs else [])],
            cwd=self.dir,
            check=True,
        )


class BuildLibraries(build_ext):
    def run(self):
        package = (ROOT / "python" if self.inplace else Path(self.build_lib).resolve()) / "braze"
        lib = package / "lib"
        lib.mkdir(parents=True, exist_ok=True)
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}"
        ninja = Ninja(ROOT / "build" / tag)

        torch_root = Path(torch.__file__).parent
        includes = f"-I{CSRC} -isystem {torch_root / 'include'}"
        common = (
            f"-std=c++17 -O3 -fPIC -fvisibility=hidden {includes} {TARGET_VERSION} "
            "-Wall -Wno-unknown-pragmas"
        )
        link = f"-shared -Wl,--no-as-needed -L{torch_root / 'lib'} -ltorch -Wl,--as-needed"
        ccache = "ccache " if shutil.which("ccache") else ""
        cxx = os.environ.get("CXX", "g++")
        ninja.rule("cxx", f"{ccache}{cxx} {common} $flags -MMD -MF $out.d -c $in -o $out")
        ninja.rule("link", f"{cxx} $in -o $out $flags", deps=False)

        def compile_cxx(source, suffix, flags):
            return ninja.edge(f"{object_name(source)}.{suffix}.o", "cxx", [source], flags)

        # libbraze_ops_<isa>.so: op front ends compiled once, CPU kernels once per instruction set.
        cpu = "-DBRAZE_DEVICE=cpu"
        fronts = [
            compile_cxx(source, "cpu", cpu)
            for source in [
                CSRC / "bindings" / "library.cpp",
                CSRC / "bindings" / "exports.cpp",
                *sorted((CSRC / "ops").glob("*.cpp")),
            ]
        ]
        isas = cpu_isas()
        for isa in isas:
            # -Wno-psabi: vector types wider than the baseline's registers never leave a library
            flags = (
                f"{cpu} -fopenmp-simd -fno-math-errno -fno-trapping-math -Wno-psabi "
                f"{ISA_FLAGS[isa]}"
            )
            kernels = [
                compile_cxx(source, isa, flags) for source in sorted((CSRC / "cpu").rglob("*.cpp"))
            ]
            ninja.edge(lib / f"libbraze_ops_{isa}.so", "link", [*fronts, *kernels], link)

        cuda_home, why = decide_cuda()
        info = {
            "torch": torch.__version__,
            "cxx": subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout.split(
                "\n"
            )[0],
            "cpu_isas": isas,
            "cuda": None,
            "cuda_reason": why,
        }
        if cuda_home:
            info |= self.add_cuda_library(ninja, lib, cuda_home, link, compile_cxx, ccache)
            archs = info["cuda_archs"]
            print(
                f"braze: CUDA library: {why}, architectures {' '.join(archs)}: "
                f"{expected_minutes(archs)}, less where ccache or an earlier build has part of it",
                flush=True,
            )
        else:
            print(f"braze: CUDA library left out: {why}", flush=True)

        python = target_python()
        extension = package / ("_C" + python["suffix"])
        # -I comes before torch's folder, where some releases have a pybind11 that refuses to be
        # included under TORCH_TARGET_VERSION.
        python_include = f"-isystem {python['include']} -I{pybind11.get_include()}"
        module = compile_cxx(
            CSRC / "bindings" / "module.cpp", python["abi"], f"{cpu} {python_include}"
        )
        ninja.edge(extension, "link", [module], "-shared -ldl")

        ninja.run(self.verbose > 1)
        if not self.inplace:  # a wheel has nothing of an earlier build in the same folder
            for path in {*lib.glob("*.so"), *package.glob("_C*")} - ninja.linked:
                path.unlink()
        (lib / "build.json").write_text(json.dumps(info, indent=2) + "\n")

    def add_cuda_library(self, ninja, lib, cuda_home, link, compile_cxx, ccache):
        """Adds the edges of libbraze_cuda<major>.so; returns its part of build.json."""
        version = nvcc_version(cuda_home)
        archs = arch_list()
        cuda = "-DBRAZE_DEVICE=cuda -DBRAZE_CUDA"
        dirs = vendor_include_dirs(cuda_home)
        vendor = {
            "cublas": first_with(dirs, "cublasLt.h"),
            "cudnn": first_with(dirs, "cudnn.h"),
        }
        lines = "-lineinfo " if os.environ.get("BRAZE_LINEINFO") == "1" else ""
        nvcc_flags = (
            f"-std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden -I{CSRC} {cuda} "
            # Five architectures' code is large: compress for size, not speed.
            f"--expt-relaxed-constexpr --expt-extended-lambda --compress-mode=size {lines}"
            f"{' '.join(gencode(archs))}"
        )
        ninja.rule(
            "nvcc",
            f"{ccache}{cuda_home / 'bin' / 'nvcc'} {nvcc_flags} -MD -MF $out.d -c $in -o $out",
        )
        host = f"{cuda} -isystem {cuda_home / 'include'}"
        objects = [
            compile_cxx(source, "cuda", host)
            for source in [
                CSRC / "bindings" / "exports.cpp",
                *sorted((CSRC / "ops").glob("*.cpp")),
            ]
        ]
        for name, found in vendor.items():
            if found:
                host += f" -DBRAZE_WITH_{name.upper()} -isystem {found}"
        objects += [
            compile_cxx(source, "cuda", host)
            for source in sorted((CSRC / "libraries").glob("*.cpp"))
        ]
        for source in sorted((CSRC / "cuda").rglob("*.cu")):
            objects.append(ninja.edge(f"{object_name(source)}.cu.o", "nvcc", [source]))
        # The static runtime: the library needs the driver alone, whichever CUDA minor torch brings.
        # Names of kernels' host stubs, which nothing looks up, would be a tenth of the library.
        runtime = f"-L{cuda_home / 'lib64'} -lcudart_static -lrt -ldl -lpthread -Wl,--strip-all"
        major = version.split(".")[0]
        ninja.edge(lib / f"libbraze_cuda{major}.so", "link", objects, f"{link} {runtime}")
        return {
            "cuda": version,
            "cuda_archs": archs,
            "vendor_headers": {k: bool(v) for k, v in vendor.items()},
        }

    def get_outputs(self):
        package = Path(self.build_lib).resolve() / "braze"
        return [str(p) for p in [*package.glob("_C*"), *package.glob("lib/*")]]


class WheelForTarget(bdist_wheel):
    def get_tag(self):
        python = target_python()
        return python["tag"], python["abi"], super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    distclass=BinaryDistribution,
    package_dir={"": "python"},
    # One placeholder: BuildLibraries decides what is built.
    ext_modules=[Extension("braze._C", sources=[])],
    cmdclass={"bdist_wheel": WheelForTarget, "build_ext": BuildLibraries},
)
