"""``python -m braze bench``: finds the checkout's benchmarks/ folder and hands over to it."""

import importlib
import sys
from pathlib import Path

BATCH_HELP = (
    "may be repeated; default, of convolutions: 64 and 256 (CPU: 16), of networks: their own, of "
    "evaluation: 1 and 128, of population: 64 (CPU: 16)"
)
PRECISION_HELP = (
    "of networks and evaluation (default: bf16), overhead and population (default: several); may "
    "be repeated"
)


def add_arguments(parser):
    """Adds the subcommand's arguments to an ``argparse`` parser."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="OP | render | ladder OP | products | convolutions | depthwise | networks | "
        "evaluation | norm_act | optimizers | overhead | population | distributed | "
        "counters matmul",
        help="ops to time (default: all); render: rewrite the documents' tables from the results; "
        "ladder OP: time every kernel of an op beside the vendor's, or beside a copy of its bytes; "
        "products: matrix products beside the best of the vendor's algorithms; convolutions: those "
        "of networks, pass by pass, beside the best of cuDNN's engines and of torch; depthwise: "
        "depthwise convolutions of networks beside cuDNN's engines; networks: training steps of "
        "whole networks beside stock's modes; evaluation: the same without gradients; "
        "norm_act: batch norm with addition and activation, layer norm and group norm, beside a "
        "copy of their bytes; "
        "optimizers: updates of all parameters beside torch's fused and foreach ones; "
        "overhead: the host's time for layers and steps in eager mode; "
        "population: many small networks in one step, and one after another; "
        "distributed: training steps on one and on several GPUs; "
        "counters matmul: the ladder's hardware counters, by ncu",
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
    add = parser.add_argument_group("of convolutions, networks and populations").add_argument
    many, only_this = {"action": "append"}, "only this; may be repeated"
    add("--network", **many, help="only networks whose name contains this; may be repeated")
    add("--batch", type=int, **many, help=BATCH_HELP)
    add("--mode", **many, help="of networks: only modes whose name contains this; may be repeated")
    add("--precision", choices=["bf16", "fp16", "tf32", "fp32"], **many, help=PRECISION_HELP)
    add("--members", type=int, **many, help="of population; default: 8 and 32 (CPU: 4)")
    add("--more", action="store_true", help="of networks: seventeen more of torchvision and timm")
    add("--layout", choices=["channels_last", "contiguous"], **many, help=only_this)
    add("--pass", dest="passes", choices=["fprop", "dgrad", "wgrad"], **many, help=only_this)
    add("--seconds", type=float, help="leave out what has not begun by then")
    add("--engines", type=int, default=8, help="of cuDNN's, how many are tried (default: 8)")
    add("--own", **many, help="of our kernels of convolutions, only this; may be repeated")
    add("--anew", action="store_true", help="measure the rivals anew that an earlier run recorded")
    add("--tune", type=Path, metavar="PATH", help="add the fastest to this table of tuned choices")
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
