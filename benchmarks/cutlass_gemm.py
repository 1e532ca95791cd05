"""CUTLASS's matrix products, beside the ladder's: builds benchmarks/cutlass_gemm.cu and calls it.

    python -m benchmarks.cutlass_gemm --build build/cutlass

needs nvcc and CUTLASS's headers (``pip install nvidia-cutlass``, or CUTLASS_PATH naming a
checkout), but no GPU: the library may be built on one machine and carried to another.
"""

import argparse
import ctypes
import functools
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "cutlass"
NAME = "libbraze_cutlass.so"
DTYPES = {"float32": 0, "tf32": 1, "float16": 2, "bfloat16": 3}
TILES = (0, 1)
SWIZZLES = (1, 8)


def headers():
    """The folders to include, [] where CUTLASS is not there."""
    spec = importlib.util.find_spec("cutlass_library")
    roots = [Path(os.environ["CUTLASS_PATH"])] if "CUTLASS_PATH" in os.environ else []
    roots += [Path(spec.origin).parent / "source"] if spec else []
    for root in roots:
        if (root / "include" / "cutlass" / "cutlass.h").is_file():
            return [root / "include", root / "tools" / "util" / "include"]
    return []


def obstacle():
    """Why the library cannot be built here, or an empty string."""
    if not shutil.which("nvcc"):
        return "nvcc is missing"
    return "" if headers() else "CUTLASS's headers are missing: pip install nvidia-cutlass"


def build(folder=FOLDER):
    """Compiles the library; returns its path.

    Raises:
        RuntimeError: no nvcc, no headers, or the compiler failed.
    """
    if obstacle():
        raise RuntimeError(obstacle())
    path = Path(folder) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    # Its assertions would be calls, around which wgmma instructions are serialized.
    command = ["nvcc", "-O3", "-DNDEBUG", "-std=c++17", "--expt-relaxed-constexpr", "-shared"]
    command += ["-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC"]
    command += [f"-I{include}" for include in headers()]
    source = ROOT / "benchmarks" / "cutlass_gemm.cu"
    result = subprocess.run([*command, "-o", path, source], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"nvcc failed:\n{result.stderr}")
    return path


@functools.cache
def library():
    """The loaded library.

    Raises:
        RuntimeError: it is not built, or does not load.
    """
    path = FOLDER / NAME
    if not path.exists():
        how = "python -m benchmarks.cutlass_gemm --build"
        raise RuntimeError(f"not built ({obstacle() or f'run `{how}`'})")
    try:
        lib = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise RuntimeError(f"does not load: {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    numbers = ctypes.POINTER(ctypes.c_int64)
    lib.cutlass_gemm.argtypes = [*[number] * 7, *[pointer] * 3, number, pointer, numbers, pointer]
    lib.cutlass_gemm_status.argtypes = [number]
    lib.cutlass_gemm_status.restype = ctypes.c_char_p
    return lib


def matmul(a, b, dtype_name, tile=0, swizzle=1):
    """The product of dense matrices, or batches; `b` may be a transposed view.

    Raises:
        RuntimeError: no library, or CUTLASS does not take these operands.
    """
    lib = library()
    if dtype_name not in DTYPES or a.dtype != b.dtype:
        raise RuntimeError(f"expected one of {', '.join(DTYPES)}, but got {dtype_name}")
    if torch.cuda.get_device_capability(a.device) != (9, 0):
        raise RuntimeError("the kernels are built for compute capability 9.0")
    transposed = not b.is_contiguous()
    if not a.is_contiguous() or (transposed and not b.mT.is_contiguous()):
        raise RuntimeError("expected dense operands, the first one row-major")
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = a.shape[0] if a.dim() == 3 else 1
    out = a.new_empty(*a.shape[:-1], n)
    # As integers: ctypes converts them by argtypes.
    problem = [DTYPES[dtype_name], tile, transposed, m, n, k, batch]
    problem += [a.data_ptr(), b.data_ptr(), out.data_ptr(), swizzle]
    stream = torch.cuda.current_stream(a.device).cuda_stream

    def call(workspace, size):
        status = lib.cutlass_gemm(*problem, workspace, size, stream)
        if status:
            raise RuntimeError(lib.cutlass_gemm_status(status).decode())

    size = ctypes.c_int64()
    call(None, ctypes.byref(size))
    workspace = torch.empty(size.value, dtype=torch.int8, device=a.device)
    call(workspace.data_ptr(), None)
    return out


def variants(a, b, dtype_name):
    """name -> function that makes the function to time: tiles and orders of the tiles."""
    tiles = TILES[:1] if dtype_name == "float32" else TILES
    swizzles = SWIZZLES[:1] if dtype_name == "float32" else SWIZZLES
    return {
        f"cutlass, tile {tile}, swizzle {swizzle}": functools.partial(
            functools.partial, matmul, a, b, dtype_name, tile, swizzle
        )
        for tile, swizzle in itertools.product(tiles, swizzles)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds CUTLASS's kernels for the ladder.")
    parser.add_argument("--build", nargs="?", const=FOLDER, required=True, metavar="DIR")
    try:
        print(build(parser.parse_args().build))
    except RuntimeError as error:
        sys.exit(f"cutlass_gemm: {error}")
