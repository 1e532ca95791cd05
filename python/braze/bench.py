"""``python -m braze bench``: finds the checkout's benchmarks/ folder and hands over to it."""

import importlib
import sys
from pathlib import Path


def add_arguments(parser):
    """Adds the subcommand's arguments to an ``argparse`` parser."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="OP | render | ladder OP | products | depthwise | norm_act | counters matmul",
        help="ops to time (default: all); render: rewrite the documents' tables from the results; "
        "ladder OP: time every kernel of an op beside the vendor's, or beside a copy of its bytes; "
        "products: matrix products beside the best of the vendor's algorithms; depthwise: "
        "depthwise convolutions of networks beside cuDNN's engines; counters matmul: "
        "the ladder's hardware counters, by ncu",
    )
    parser.add_argument("--device", help="cpu or cuda[:i] (default: cuda where there is a GPU)")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=["float64", "float32", "tf32", "bfloat16", "float16"],
        help="only this precision; may be repeated",
    )
    parser.add_argument(
        "--case", action="append", help="only cases whose name contains this; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="few cases and repeats, nothing saved")
    parser.add_argument("--compile", action="store_true", help="time torch.compile of stock too")
    parser.add_argument("--results", type=Path, help="folder of the CSV files and MNIST JSON files")


def main(args):
    """Runs the subcommand; returns the exit status.

    Args:
        args: the namespace that a parser with :func:`add_arguments` yields.
    """
    candidates = [Path(__file__).resolve().parents[2], Path.cwd()]
    root = next((p for p in candidates if (p / "benchmarks" / "harness.py").is_file()), None)
    if root is None:
        sys.exit(
            "braze bench: the benchmarks are part of the source tree, not of the installed "
            "package: run this in a checkout of braze"
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.cli").main(args, root)
