"""``python -m braze bench products``: matrix products beside the best of 32 cuBLASLt algorithms.

Three groups. "square": 4096 and 8192 cubed, every transposition, every precision. "network": 60
small, skinny, odd and batched products of real networks' layers. "warm": small ones, a hundred in
one CUDA graph with their operands in the caches, as most are in a training step; the others begin
with cold caches. On a CPU the small ones run, and stock torch stands in the vendor's place.
"""

import dataclasses

import torch

import braze
from benchmarks.candidates import fastest, screen, shipped, under, vendor_names
from benchmarks.harness import DTYPES, QUICK_BUDGET, interleaved, rounded, set_precision, timer_for
from benchmarks.results import ENVIRONMENT
from braze.testing import assert_by_rule

#: Seconds per candidate, and the least and most repeats of a product. Nine repeats of fp64's 20 ms
#: read one kernel under two names 4 % apart: power limits the clock.
BUDGET = {"cuda": (0.12, 25, 80), "cpu": (0.05, 3, 20)}
#: Multiply-adds; more are left out on a CPU.
CPU_LIMIT = 1 << 26
#: how many of the vendor's algorithms are timed properly, beside its own favourite
FINALISTS = 3

TIMED = ("braze", "auto", "vendor", "default", "own_best")
COLUMNS = [
    *("op", "group", "case", "pass", "dtype", "candidate", "own_kernel"),
    *(f"{name}_{part}" for name in TIMED for part in ("us", "p20", "p80")),
    *("vendor_name", "vendor_count", "own_best_name"),
    # best vendor / own, best vendor / auto; the fastest of all but "auto"
    *("ratio", "auto_ratio", "best_us"),
    *("rate", "unit", "floor_us", "cache", "error", *ENVIRONMENT),
]


@dataclasses.dataclass(frozen=True)
class Product:
    """C = A B, A m x k, B k x n; `layout` says which are transposed views, "NT" that B is one."""

    group: str
    pass_name: str
    dtype: str
    m: int
    n: int
    k: int
    layout: str
    batch: int = 1
    #: what braze.backend(matmul=...) is given for our own kernels
    own: tuple = ("braze",)
    #: that are timed together, with warm caches if they are several
    launches: int = 1

    @property
    def name(self):
        batched = f" batch {self.batch}" if self.batch > 1 else ""
        return f"{self.m}x{self.n}x{self.k}{batched} {self.layout}"

    def inputs(self, device):
        lead = () if self.batch == 1 else (self.batch,)

        def operand(rows, cols, transposed):
            if transposed == "T":
                return operand(cols, rows, "N").mT
            return torch.randn(*lead, rows, cols, device=device).to(DTYPES[self.dtype])

        left, right = self.layout
        return operand(self.m, self.k, left), operand(self.k, self.n, right)

    @property
    def flops(self):
        return 2 * self.batch * self.m * self.n * self.k


def own_kernels(dtype):
    # fp32 has two: one on CUDA cores, one on tensor cores at fp32's accuracy.
    return ("simt_tma", "wgmma_scaled") if dtype == "float32" else ("braze",)


SQUARES = [
    Product("square", "", dtype, size, size, size, layout, own=own_kernels(dtype))
    for dtype in ("bfloat16", "float16", "tf32", "float32", "float64")
    for size in (4096, 8192)
    for layout in ("NN", "NT", "TN", "TT")
]

# Rows (batch or sequence), features in, features out, and for attention the batch of heads.
LAYERS = {
    "bfloat16": [
        (1, 3136, 128),
        (8, 768, 3072),
        (64, 128, 10),
        (1576, 768, 3072),  # ViT-B, 8 images
        (8192, 3136, 128),
        (128, 64, 128, 96),  # attention: 96 heads
    ],
    "float16": [
        (1, 4096, 4096),
        (128, 2048, 1000),  # ResNet-50's classifier
        (4096, 100, 1),
        (197, 64, 197, 12),  # ViT-B's attention
    ],
    "tf32": [
        (32, 512, 7),
        (100, 784, 100),
        (256, 9216, 4096),  # AlexNet
        (1024, 3136, 128),
        (49, 32, 49, 64),  # Swin's windows
    ],
    "float32": [
        (1, 512, 7),
        (7, 2048, 1000),
        (10, 100, 1),
        (64, 3136, 128),
        (1024, 128, 10),
    ],
}


def of_layer(dtype, rows, features_in, features_out, batch=1):
    """The products of x W^T: the forward pass and the gradients of x and W."""
    common = {"batch": batch}
    yield Product(
        "network", "forward", dtype, rows, features_out, features_in, layout="NT", **common
    )
    yield Product("network", "dgrad", dtype, rows, features_in, features_out, layout="NN", **common)
    yield Product("network", "wgrad", dtype, features_out, features_in, rows, layout="TN", **common)


NETWORKS = [
    product
    for dtype, layers in LAYERS.items()
    for layer in layers
    for product in of_layer(dtype, *layer)
]


WARM = [
    Product("warm", "forward", "bfloat16", m, n, k, layout="NT", launches=100)
    for m, n, k in (
        (64, 10, 128),
        (100, 4096, 16),
        (512, 64, 64),
        (2000, 64, 64),
        (2000, 10, 128),
        (2000, 256, 27),
    )
]


def wanted(device, args):
    """The products to run."""
    for group in (SQUARES, NETWORKS, WARM):
        chosen = [p for p in group if any(part in p.name for part in args.case or [""])]
        chosen = [p for p in chosen if not args.dtype or p.dtype in args.dtype]
        if device.type == "cpu":
            chosen = [p for p in chosen if p.dtype != "tf32" and p.flops < 2 * CPU_LIMIT]
        yield from chosen[:2] if args.quick else chosen


def own_names(product, device):
    return product.own if device.type == "cuda" else ("braze",)


def result_of(name, a, b):
    with braze.backend(matmul=name):
        return braze.matmul(a, b)


def errors_of(names, product, a, b):
    """name -> why its result is not accepted, for those."""
    reference = torch.matmul(a.double(), b.double())
    stock = torch.matmul(a, b)
    # As in benchmarks/matmul.py; twice that, because the sums are in one chain on CUDA cores.
    ulps = max(8, product.k**0.5 / 2, 2**13 if product.dtype == "tf32" else 0)
    errors = {}
    for name in names:
        try:
            assert_by_rule(result_of(name, a, b), stock, reference, ulps)
        except (AssertionError, RuntimeError) as problem:
            errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return errors


def same_bits(own, names, a, b):
    """Which kernels `own` may have been: those that give the same bits."""
    expected = result_of(own, a, b)
    return [name for name in names if torch.equal(result_of(name, a, b), expected)]


def maker_of(name, a, b, launches):
    """Makes the function to time; "stock" is torch's own product."""
    product = torch.matmul if name == "stock" else braze.matmul

    def make():
        def several():
            for _ in range(launches):
                out = product(a, b)
            return out

        return several

    return make if name == "stock" else under("matmul", name, make)


def makers_of(names, a, b, launches=1):
    return {name: maker_of(name, a, b, launches) for name in names}


def vendors_of(device):
    """The vendor's algorithms, its favourite first."""
    return vendor_names("matmul") if device.type == "cuda" else ["stock"]


def time_product(product, timer, device, quick):
    """Yields a row per own kernel of the product."""
    a, b = product.inputs(device)
    vendors = vendors_of(device)
    launches = product.launches
    vendor_screen = screen(timer, makers_of(vendors, a, b, launches))
    own_screen = screen(timer, makers_of(shipped("matmul", device, a.dtype), a, b, launches))
    default = vendors[0] if vendors[0] in vendor_screen else None
    finalists = {*fastest(vendor_screen, FINALISTS), *([default] if default else [])}

    own = own_names(product, device)
    ours = dict.fromkeys([*own, "auto", *fastest(own_screen)])
    errors = errors_of(ours, product, a, b)
    right = [name for name in ours if name not in errors]
    names = [*right, *sorted(finalists)]
    budget = (QUICK_BUDGET if quick else BUDGET)[device.type]
    makers, warm = makers_of(names, a, b, launches), launches > 1
    times = interleaved(timer, makers, device, warm, budget=budget)
    if warm:  # the floor is that of one launch by itself
        times.pop("floor", None)
        times = {name: [us / launches for us in parts] for name, parts in times.items()}
    medians = {name: us for name, (us, *_) in times.items() if name != "floor"}
    vendor = min(finalists, key=medians.get, default=None)
    others = {name: us for name, us in medians.items() if name != "auto"}
    own_best = min(others.keys() - finalists, key=medians.get, default=None)

    for candidate in own:
        row = dict.fromkeys(COLUMNS, "")
        row |= {"op": "products", "group": product.group, "case": product.name}
        row["cache"] = "warm" if warm else "cold"
        row |= {"pass": product.pass_name, "dtype": product.dtype, "candidate": candidate}
        row |= {"vendor_name": vendor or "", "vendor_count": len(vendor_screen)}
        row |= {"own_best_name": own_best or ""}
        row |= {"floor_us": rounded(times["floor"][0])} if "floor" in times else {}
        row["error"] = errors.get(candidate) or errors.get("auto", "")
        shown = zip(TIMED, (candidate, "auto", vendor, default, own_best), strict=True)
        for key, name in shown:
            if name in times:
                parts = (f"{key}_us", f"{key}_p20", f"{key}_p80")
                row |= dict(zip(parts, map(rounded, times[name]), strict=True))
        if candidate in right:
            us = medians[candidate]
            row |= {"rate": f"{product.flops / us / 1e6:.4g}", "unit": "TFLOP/s"}
            row["ratio"] = f"{medians[vendor] / us:.3f}" if vendor else ""
            kernels = [candidate] if candidate in own_screen else own_screen
            row["own_kernel"] = " or ".join(same_bits(candidate, kernels, a, b))
        if "auto" in right:
            us = medians["auto"]
            row["auto_ratio"] = f"{medians[vendor] / us:.3f}" if vendor else ""
            row["best_us"] = rounded(min(others.values(), default=us))
        yield row


def run(device, args):
    """Yields a row per product and own kernel."""
    timer = timer_for(device)
    for product in wanted(device, args):
        set_precision(product.dtype)
        torch.manual_seed(0)
        yield from time_product(product, timer, device, args.quick)


def line(row):
    """One row as a line for the terminal."""
    case = f"{row['group']} {row['pass']} {row['case']} {row['dtype']} {row['candidate']}"
    if row["error"]:
        return f"{case:<58} {row['error']}"
    return (
        f"{case:<58} {row['braze_us']:>7} us ({row['own_kernel']})  {row['vendor_name']} of "
        f"{row['vendor_count']} {row['vendor_us']:>7}, default {row['default_us']:>7}  "
        f"{row['ratio']}x  auto {row['auto_us']} {row['auto_ratio']}x"
    )
