"""``python -m braze tune``."""

import re
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from braze import _tuned, tuning
from braze._problems import PASSES, Convolution, Product
from braze.data import Digits
from braze.mnist import _device, _set_precision
from braze.mnist.steps import BrazeStep, Setup

_PRECISIONS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16"}  # of braze.mnist
_DTYPES = ["float64", "float32", "tf32", "bfloat16", "float16"]
_MNIST_BATCHES = (64, 1024, 8192)


def add_arguments(parser):
    """Adds the subcommand's arguments to an ``argparse`` parser."""
    parser.description = """Measures which kernel is the fastest for matrix products and for the
    passes of convolutions, and keeps it in the user's cache, where "auto" finds it. Without shapes:
    those of `braze mnist` at batches of 64, 1024 and 8192."""
    add = parser.add_argument
    add(
        "shapes",
        nargs="*",
        metavar="M,N,K[,nt][,BATCH] | NxCxHxW,K,RxS[/STRIDE][,pP][,dD][,gG][,LAYOUT]",
        help="M x N results of sums of K products. nn, nt, tn or tt: whether A and B are as they "
        "are (n) or transposes (t) in memory (default: nn, both row-major). Or a convolution of K "
        "filters of R x S: padding P (default: 0), dilation D, G groups, contiguous (default) or "
        "channels_last; forward and both gradients",
    )
    add("--mnist", action="store_true", help="the problems of `braze mnist` (default)")
    add("--dtype", nargs="+", choices=_DTYPES, help="default: float32, bfloat16; on GPUs tf32 too")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    add("--seconds", type=float, default=1.0, help="about, for each problem (default: 1)")
    add(
        "--built-in",
        type=Path,
        metavar="PATH",
        help="measure against braze's rules alone and add the choices to this table instead, as "
        "the package has it in braze/tuned/",
    )
    add("--list", action="store_true", help="show what is in effect, and measure nothing")
    add("--clear", action="store_true", help="delete the user's cache, and measure nothing")


def run(args):
    """Runs the subcommand. Raises ValueError or OSError for what the user can put right."""
    wanted = [bool(args.shapes), args.mnist, args.list, args.clear]
    if sum(wanted) > 1:
        raise ValueError("expected one of: shapes, --mnist, --list, --clear")
    if not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds}: expected a positive number")
    if args.built_in and args.built_in.is_dir():
        raise ValueError(f"--built-in {args.built_in}: expected a file, but it is a folder")
    console = Console()
    if args.clear:
        files = _tuned.delete_cache()
        console.print(f"Deleted {len(files)} files from {_tuned.user_folder()}", soft_wrap=True)
        return
    device = _device(args.device, "fp32")
    if device.type == "cuda":
        torch.cuda.init()  # reads the tables
    if args.list:
        console.print(_table_of_entries(device))
        return
    gpu = ["tf32"] if device.type == "cuda" else []
    dtypes = args.dtype or ["float32", *gpu, "bfloat16"]
    if "tf32" in dtypes and not gpu:
        raise ValueError("--dtype tf32: CPUs have no TF32")
    products = _products_of_shapes if args.shapes else _products_of_mnist
    _tune(args, console, device, products(args.shapes, dtypes, device, console))


def _tune(args, console, device, products):
    if args.built_in:
        _tuned.forget()
    results = []
    with console.status("") as status:
        for i, product in enumerate(products):
            status.update(f"{i + 1} of {len(products)}: {product.dtype} {product}")
            results.append(tuning.tune_product(device, product, seconds=args.seconds))
    console.print(_table_of_results(results))
    place = _tuned.place_of(tuning._index(device))
    tuning.save_results(results, args.built_in)
    changed = sum(result.choice != "auto" for result in results)
    path = args.built_in or place.user_file()
    of_what = "products" if all(isinstance(p, Product) for p in products) else "problems"
    console.print(f"{changed} of {len(results)} {of_what} changed: {path}", soft_wrap=True)


def _parsed_convolution(shape):
    """The forward pass of a convolution on the command line, but for its dtype; None where it is no
    convolution."""
    found = re.fullmatch(
        r"(\d+)x(\d+)x(\d+)x(\d+),(\d+),(\d+)x(\d+)(?:/(\d+))?(?:,p(\d+))?(?:,d(\d+))?(?:,g(\d+))?"
        r"(?:,(contiguous|channels_last))?",
        shape,
    )
    if not found:
        return None
    numbers = [int(part or 1) for part in found.groups()[:-1]]
    numbers[8] = int(found[9] or 0)  # without padding
    *extents, stride, pad, dilation, groups = numbers
    c, k = extents[1], extents[4]
    if 0 in (*extents, stride, dilation, groups) or max(numbers) >> 31 or c % groups or k % groups:
        raise ValueError(f"{shape}: there is no such convolution")
    pairs = *[stride] * 2, *[pad] * 2, *[dilation] * 2
    layout = found[12] == "channels_last"
    problem = Convolution("", "fprop", *extents, *pairs, groups, channels_last=layout)
    if min(problem.out_size) < 1:
        raise ValueError(f"{shape}: there is no such convolution")
    return problem


def _parsed(shape):
    """((m, n, k, batch), layout) of a product on the command line, or a convolution."""
    if convolution := _parsed_convolution(shape):
        return convolution
    found = re.fullmatch(r"(\d+),(\d+),(\d+)(?:,([nt]{2}))?(?:,(\d+))?", shape)
    extents = found and [int(found[i] or 1) for i in (1, 2, 3, 5)]
    if not found or 0 in extents or max(extents) >> 63:
        raise ValueError(f"{shape}: expected M,N,K, M,N,K,nt or M,N,K,nt,BATCH, or NxCxHxW,K,RxS")
    return extents, found[4] or "nn"


def _products_of_shapes(shapes, dtypes, device, console):
    parsed = [_parsed(shape) for shape in shapes]
    products = []
    for dtype in dtypes:
        for shape, what in zip(shapes, parsed, strict=True):
            try:
                if isinstance(what, Convolution):
                    passes = (what._replace(dtype=dtype, pass_name=name) for name in PASSES)
                    products += [tuning.as_asked(problem, device) for problem in passes]
                else:
                    products += _products_of(dtype, *what, device)
            except RuntimeError as error:  # which is also what torch says without memory
                reason = str(error).partition("\n")[0]
                raise ValueError(f"{shape}: cannot be computed here: {reason}") from error
    return products


def _products_of(dtype, extents, layouts, device):
    m, n, k, batch = extents
    drawn = torch.float32 if dtype == "tf32" else getattr(torch, dtype)

    def matrix(rows, cols, layout):
        shape = [batch] * (batch > 1) + [rows, cols]
        if layout == "n":
            return torch.empty(shape, dtype=drawn, device=device)
        return torch.empty(*shape[:-2], cols, rows, dtype=drawn, device=device).mT

    a, b = matrix(m, k, layouts[0]), matrix(k, n, layouts[1])
    asked = tuning.products_of(torch.ops.braze.matmul, a, b, dtype == "tf32")
    return [product for _, product in asked]


def _products_of_mnist(_, dtypes, device, console):
    """What a training step of ``python -m braze mnist`` asks for, on random images."""
    products = {}
    for dtype in dtypes:
        if dtype not in _PRECISIONS:
            raise ValueError(f"--dtype {dtype}: `braze mnist` has {', '.join(_PRECISIONS)}")
        precision = _PRECISIONS[dtype]
        _set_precision(precision)
        for batch in _MNIST_BATCHES:
            with console.status(f"running a step of {batch} images in {dtype}"):
                images = torch.randint(256, (2 * batch, 28, 28), dtype=torch.uint8)
                labels = torch.randint(10, (2 * batch,), dtype=torch.uint8)
                digits = Digits(images, labels, images[:1], labels[:1], "random")
                setup = Setup(digits, device, precision, batch, lr=0.1, seed=0)
                step = BrazeStep(setup, "channels_last").captured(setup)
                for _device, product in tuning.products_of(list, step.epoch()):
                    products[product] = None
    return list(products)


def _table_of_results(results):
    table = Table("problem", "dtype")
    table.add_column("before us", justify="right")
    table.add_column("after us", justify="right")
    table.add_column("choice")
    for r in results:
        times = (f"{us:.4g}" for us in (r.before, r.after))
        style = None if r.choice == "auto" else "bold"
        table.add_row(str(r.product), r.product.dtype, *times, r.choice, style=style)
    return table


def _table_of_entries(device):
    table = Table("problem", "dtype", "choice", "from")
    for index, product, choice, measured in _tuned.entries():
        if index == tuning._index(device):
            origin = "measured here" if measured else "built in"
            table.add_row(str(product), product.dtype, choice, origin)
    return table
