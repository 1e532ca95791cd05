"""How far fp32 products are from exact ones; a part of ``python -m braze bench products``.

norm_error is ||C' - AB|| / (||A|| ||B||), in Frobenius norms. component_error is the largest
|C' - AB| / (|A| |B|), element by element: with inputs of a wide range the norms see only the
largest elements, this one sees all.
"""

import torch

import braze
from benchmarks.candidates import VENDORS
from benchmarks.harness import set_precision
from benchmarks.results import ENVIRONMENT

COLUMNS = [
    *("op", "case", "inputs", "dtype", "candidate", "norm_error", "component_error", "error"),
    *ENVIRONMENT,
]
SIZE = 1024
DEPTHS = (64, 256, 1024, 4096)
INPUTS = ("normal", "wide", "positive")
KERNELS = {
    "cuda": ("simt", "simt_tma", "mma_split", "wgmma_split", "wgmma_scaled", VENDORS["matmul"]),
    "cpu": ("blocked",),
}


def random_of(kind, *shape, device):
    values = torch.randn(shape, device=device)
    if kind == "positive":
        return values.abs()
    if kind == "wide":  # exponents from -60 to 60
        return values * torch.exp2(torch.randint(-60, 61, shape, device=device).float())
    return values


def errors_of(c, a, b):
    """(norm_error, component_error) of `c`, the product of `a` and `b`."""
    a, b = a.double(), b.double()
    error = (c.double() - a @ b).abs()
    bound = (a.abs() @ b.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    return (error.norm() / (a.norm() * b.norm())).item(), (error / bound).max().item()


def run(device, args):
    """Yields a row per kernel, kind of inputs and depth."""
    if args.dtype and "float32" not in args.dtype:
        return
    set_precision("float32")
    size = SIZE if device.type == "cuda" else SIZE // 8
    for kind in INPUTS:
        for k in DEPTHS[:1] if args.quick else DEPTHS:
            case = f"accuracy {size}x{size}x{k}"
            if not any(part in case for part in args.case or [""]):
                continue
            torch.manual_seed(0)
            a, b = random_of(kind, size, k, device=device), random_of(kind, k, size, device=device)
            for name in KERNELS[device.type]:
                row = dict.fromkeys(COLUMNS, "") | {"op": "products", "case": case}
                row |= {"inputs": kind, "dtype": "float32", "candidate": name}
                try:
                    with braze.backend(matmul=name):
                        errors = errors_of(braze.matmul(a, b), a, b)
                except RuntimeError as problem:
                    row["error"] = f"RuntimeError: {problem}".splitlines()[0]
                else:
                    names = ("norm_error", "component_error")
                    row |= {key: f"{e:.3e}" for key, e in zip(names, errors, strict=True)}
                yield row


def line(row):
    """One row as a line for the terminal."""
    case = f"{row['case']} {row['inputs']} {row['candidate']}"
    if row["error"]:
        return f"{case:<48} {row['error']}"
    return f"{case:<48} norm {row['norm_error']}  component {row['component_error']}"
