"""What the ladder of matmul shows beside our kernels: cuBLASLt's best algorithm, CUTLASS, Triton.

Each has variants (algorithms, tiles, orders of tiles); a quick look picks a problem's fastest.
"""

import importlib

import torch

import braze
from benchmarks import cutlass_gemm
from benchmarks.candidates import fastest, screen, under, vendor_names
from braze.testing import assert_by_rule


def cublas(a, b, dtype_name):
    return {
        name: under("matmul", name, lambda: lambda: braze.matmul(a, b))
        for name in vendor_names("matmul")
    }


def triton(a, b, dtype_name):
    return importlib.import_module("benchmarks.triton_gemm").variants(a, b, dtype_name)


#: name -> function of (a, b, dtype) that returns variants: name -> maker of the function to time
RIVALS = {"cublas best": cublas, "cutlass": cutlass_gemm.variants, "triton": triton}


def find(timer, a, b, dtype_name, ulps):
    """The fastest variant of each rival whose result is right.

    Returns:
        ({rival: (variant, maker)}, {rival: why it is not there})
    """
    reference = torch.matmul(a.double(), b.double())
    stock = torch.matmul(a, b)
    found, errors = {}, {}
    for rival, variants_of in RIVALS.items():
        try:
            variants = variants_of(a, b, dtype_name)
            times = screen(timer, variants)
            # With nothing to choose from, a call says why.
            for name in fastest(times, len(times)) or variants:
                try:
                    assert_by_rule(variants[name]()(), stock, reference, ulps)
                except AssertionError as problem:
                    errors[rival] = f"AssertionError: {problem}"
                    continue
                found[rival] = name, variants[name]
                errors.pop(rival, None)
                break
        except Exception as problem:  # other people's code and compilers: anything may go wrong
            errors[rival] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return found, errors
