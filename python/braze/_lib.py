"""Finds and loads the native libraries; says in words what is loaded, what is not, and why."""

import importlib
import json
import os
from pathlib import Path

try:
    import torch
except (ImportError, OSError) as error:  # OSError: a shared library of torch does not load
    torch, _torch_error = None, error

LIB_DIR = Path(__file__).parent / "lib"
MIN_TORCH = (2, 10)
# torch's name for the CPU's vector level -> the libraries that run on it, best first
_ISAS = {
    "AVX512": ["avx512", "avx2", "generic"],
    "AVX2": ["avx2", "generic"],
}

#: pybind11 handles of the loaded libraries, or None
ops_library = None
cuda_library = None
limits = {}  # of the kernels, as their sources have them
#: instruction set of the loaded CPU kernels
cpu_isa = None
#: the ImportError that says why nothing could be loaded; None when the ops are there
load_error = None
#: why CUDA kernels are not there; None when they are
cuda_missing = "the native libraries are not loaded"


def build_info():
    """What setup.py recorded about the build (compiler, torch, CUDA, architectures), or {}; of a
    record that cannot be read {"error": why}."""
    path = LIB_DIR / "build.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(record, dict):
            raise ValueError(f"{path} holds no record")
    except (OSError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return record


def load():
    """Loads libbraze_ops for this CPU and, under a CUDA build of torch, libbraze_cuda.

    Where torch is missing or too old, or the native libraries were not built or do not load,
    `load_error` says so and :func:`require` raises it.
    """
    global load_error
    try:
        _load()
    except ImportError as error:
        load_error = error


def require():
    """Raises the ImportError that :func:`load` met, if any."""
    if load_error is not None:
        raise load_error


def _load():
    global ops_library, cuda_library, limits, cpu_isa, cuda_missing
    if torch is None:
        raise ImportError(f"braze needs torch 2.10 or newer, but: {_torch_error}")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        raise ImportError(f"braze needs torch 2.10 or newer, but torch {torch.__version__} is here")
    try:
        _C = importlib.import_module("braze._C")
    except ImportError as error:
        raise ImportError(
            f"braze's native module does not load ({error}). Build it for this Python: "
            "run `pip install --no-build-isolation .` in the source tree, or `make`."
        ) from error
    limits = _C.limits
    wanted = _ISAS.get(torch.backends.cpu.get_cpu_capability(), ["generic"])
    cpu_isa = next((isa for isa in wanted if (LIB_DIR / f"libbraze_ops_{isa}.so").exists()), None)
    if cpu_isa is None:
        raise ImportError(
            f"no libbraze_ops_*.so for this CPU ({' or '.join(wanted)}) in {LIB_DIR}. Rebuild, "
            f"with BRAZE_CPU_ISA unset or including {wanted[-1]}."
        )
    ops_library = _C.Library(os.fspath(LIB_DIR / f"libbraze_ops_{cpu_isa}.so"))
    cuda_library, cuda_missing = _load_cuda(_C)


def _load_cuda(_C):
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is a CPU build; install a CUDA build of torch"
    major = torch.version.cuda.split(".")[0]
    path = LIB_DIR / f"libbraze_cuda{major}.so"
    if path.exists():
        try:
            return _C.Library(os.fspath(path)), None
        except ImportError as error:
            return None, f"{path.name} does not load: {error}"
    others = sorted(p.name for p in LIB_DIR.glob("libbraze_cuda*.so"))
    if others:
        why = f"torch uses CUDA {torch.version.cuda}, but what was built is {', '.join(others)}"
    else:
        why = f"the build left it out ({build_info().get('cuda_reason', 'no build record')})"
    return None, (
        f"{why}. Install CUDA {major}'s nvcc and rebuild with "
        "`BRAZE_CUDA=1 pip install --no-build-isolation .`"
    )


def define_missing_cuda_ops(library):
    """Makes every op raise, for CUDA tensors, an error that says how to get the CUDA library."""
    if cuda_library is not None or torch.version.cuda is None:
        return

    def missing(*args, **kwargs):
        raise RuntimeError(f"braze has no CUDA kernels here: {cuda_missing}")

    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(f"{library.ns}::"):
            library.impl(schema.name.removeprefix(f"{library.ns}::"), missing, "CUDA")
