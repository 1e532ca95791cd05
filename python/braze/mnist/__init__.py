"""``python -m braze mnist``: trains the CNN of examples/mnist.py with braze and with stock PyTorch
from the same initial weights, then times a step of both in every mode."""

import contextlib
import dataclasses
import itertools
import math
import os
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console

from braze import _lib
from braze.data import load_mnist
from braze.info import info
from braze.mnist import accuracy, honesty, profile, ranks, recorded, report, timing
from braze.mnist.example import CountingLoss, train
from braze.mnist.steps import BrazeStep, Setup, StockStep

_DESCRIPTION = """Trains a small CNN on MNIST with braze, and with stock PyTorch from the same
weights, and times their training steps. With --to-accuracy it times the training itself, with
--profile it shows what one step consists of. Under torchrun several processes train together."""


def add_arguments(parser):
    """Adds the options of ``braze mnist`` to an argparse parser."""
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add("--batch", type=_positive(int), help="images per step (default: 64)")
    add("--precision", choices=["fp32", "tf32", "bf16"], default="fp32", help="bf16 is autocast")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    add("--data", type=Path, metavar="DIR", help="the four MNIST files (default: $BRAZE_DATA, ...)")
    add("--epochs", type=_positive(int), help="default: by batch size and device")
    add("--lr", type=_positive(float), help="learning rate of the training (default: 0.1)")
    add("--seed", type=_seed, default=0, help="of the weights and of the order (default: 0)")
    add("--limit", type=_positive(int), metavar="N", help="train on the first N images only")
    add("--steps", type=_positive(int), help="timed steps per row (default: 100; fewer on a CPU)")
    add(
        "--stock",
        choices=["all", "best", "none"],
        default="all",
        help="what of stock PyTorch is timed: every mode, the best two of a recorded run (every "
        "mode where none is recorded), or nothing (default: all)",
    )
    add("--all-modes", action="store_true", help="also torch.compile's max-autotune (minutes)")
    add(
        "--to-accuracy",
        type=_share,
        metavar="SHARE",
        help="time braze's training by the fixed recipe instead; how often it reaches this test "
        "accuracy, for example 0.99",
    )
    add("--seeds", type=_positive(int), help="with --to-accuracy: runs (default: 10; 3 on a CPU)")
    add(
        "--held-out",
        action="store_true",
        help="with --to-accuracy: train without the last 10,000 training images and measure the "
        "accuracy on them, as the recipe was chosen; --batch, --lr, --steps try another",
    )
    add("--profile", action="store_true", help="timeline and roofline of one step of braze instead")
    add("--out", type=Path, default=Path("braze_mnist"), metavar="DIR", help="for JSON and plots")


def run(args):
    """Runs with parsed arguments. Raises ValueError or OSError for what the user can put right."""
    _check_options(args)
    if ranks.count():
        device = _device(args.device or ranks.device_name(), args.precision)
        with ranks.group(device):
            _run(args, device, torch.distributed.get_rank(), ranks.count())
    else:
        _run(args, _device(args.device, args.precision))


def _run(args, device, rank=0, num_replicas=0):
    console = Console(quiet=rank > 0)
    _set_precision(args.precision)
    start = time.perf_counter()
    with ranks.first_alone() if num_replicas else contextlib.nullcontext():
        digits = _load(args, console)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    args.out.mkdir(parents=True, exist_ok=True)  # now, so that a bad --out costs no training
    if not os.access(args.out, os.W_OK):
        raise PermissionError(f"--out {args.out}: cannot be written to")
    about = {
        "device": place,
        "precision": args.precision,
        "seed": args.seed,
        "data": digits.source,
        "info": info(),
        "allocator": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")},
    }
    if args.to_accuracy is not None:
        loaded = time.perf_counter() - start
        accuracy.run(args, console, device, digits, about, loaded)
    elif args.profile:
        profile.run(args, console, _setup(args, device, digits), about)
    elif num_replicas:
        setup = _setup(args, device, digits, num_replicas, rank)
        together = num_replicas * setup.batch_size
        epochs = args.epochs or _epochs(together, device, len(digits.train_images))
        steps = args.steps or _steps(setup)
        ranks.train_and_time(args, console, setup, about, epochs, steps)
    else:
        _train_and_time(args, console, _setup(args, device, digits), about)


def _check_options(args):
    if args.to_accuracy is not None and args.profile:
        raise ValueError("--to-accuracy and --profile: expected one of them")
    if ranks.count() and (args.to_accuracy is not None or args.profile):
        raise ValueError("--to-accuracy and --profile: without torchrun")
    for option in ("seeds", "held_out"):
        if getattr(args, option) and args.to_accuracy is None:
            raise ValueError(f"--{option.replace('_', '-')}: only with --to-accuracy")


def _load(args, console):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.showwarning = lambda message, *rest, **_: console.print(f"Note: {message}")
        warnings.filterwarnings("always", message="MNIST could not be downloaded")
        digits = load_mnist(args.data)
    if args.limit:
        digits = digits._replace(
            train_images=digits.train_images[: args.limit],
            train_labels=digits.train_labels[: args.limit],
        )
    console.print(
        f"{len(digits.train_images)} training and {len(digits.test_images)} test images: "
        f"{digits.source}{f' in {digits.directory}' if digits.directory else ''}"
    )
    return digits


def _setup(args, device, digits, num_replicas=1, rank=0):
    count, batch = len(digits.train_images), args.batch or 64
    if batch * num_replicas > count:
        each = f" in each of {num_replicas} processes" if num_replicas > 1 else ""
        raise ValueError(f"--batch {batch}{each}: there are only {count} training images")
    settings = args.precision, batch, args.lr or 0.1, args.seed
    return Setup(digits, device, *settings, num_replicas, rank)


def _steps(setup):
    """How many are timed."""
    return 100 if setup.device.type == "cuda" else min(20, max(4, 1280 // setup.batch_size))


def _train_and_time(args, console, setup, about):
    device, batch = setup.device, setup.batch_size
    plots = report.can_plot(console)
    epochs = args.epochs or _epochs(batch, device, len(setup.digits.train_images))
    steps = args.steps or _steps(setup)
    console.print(
        f"{about['device']}, {args.precision}, batch {batch}, lr {setup.lr:g}, {_counted(epochs)}, "
        f"{steps} timed steps"
    )
    lengths = {"braze": epochs}
    if args.stock != "none":
        # On a CPU stock's training would be half of the program's time.
        lengths["stock"] = 1 if device.type == "cpu" and not args.epochs else epochs
    if device.type == "cpu":
        _print_plan(console, setup, lengths)
    trained = {name: _train(name, setup, length) for name, length in lengths.items()}
    for name, result in trained.items():
        console.print(
            f"{name}: test accuracy {result['accuracy']:.2%} after {_counted(result['epochs'])} "
            f"in {result['seconds']:.1f} s"
        )
    if lengths.get("stock", epochs) < epochs:
        console.print(f"(stock made its first epoch only; --epochs {epochs} trains both as long)")

    chosen, known = _choose(args, console, setup, about)
    timed = dataclasses.replace(setup, lr=honesty.RATE)
    with console.status("") as status:
        rows = timing.measure(timed, chosen, steps, args.all_modes, status.update)
    title = f"MNIST CNN, {about['device']}, {args.precision}, batch {batch}"
    console.print(report.table(rows, f"{title}: one training step"))
    factors = timing.gains(rows)
    if factors:
        parts = ", ".join(f"{name} {factor:.2f}x" for name, factor in factors.items())
        console.print(f"braze, own kernels, against: {parts}")

    json_path, plot_path = args.out / "mnist.json", args.out / "mnist.png"
    rows_as_dicts = [row.as_dict() for row in rows]
    stock_rows = [row for row in rows_as_dicts if row["name"] == "stock"]
    report.write_json(
        json_path,
        about
        | {
            "batch": batch,
            "lr": setup.lr,
            "epochs": epochs,
            "training": trained,
            "steps": steps,
            "checked_steps": honesty.checked_steps(setup),
            "timings": rows_as_dicts,
            "gains": factors,
            "stock_sweep": known or stock_rows,
        },
    )
    console.print(f"Figures: {json_path.resolve()}")
    if plots:
        losses = {name: result["losses"] for name, result in trained.items()}
        report.write_plot(plot_path, losses, rows, title)
        console.print(f"Plot:    {plot_path.resolve()}")


def _choose(args, console, setup, about):
    """Which modes are timed in which layouts, as timing.measure takes it; the recorded sweep."""
    if args.stock == "none":
        return lambda mode: timing.every_layout(mode) if mode.name == "braze" else [], []
    root = recorded.checkout() if args.stock == "best" else None
    known = root and recorded.sweep(
        root / "benchmarks" / "results",
        about["device"],
        about["info"]["cpu"],
        setup.batch_size,
        args.precision,
    )
    if not known:
        if args.stock == "best":
            console.print("No full run is recorded for this: timing every mode of stock")
        return timing.every_layout, []
    best = recorded.best(known, 2)
    console.print(f"Stock's best, as recorded: {', '.join(best)}")

    def chosen(mode):
        if mode.name == "braze":
            return timing.every_layout(mode)
        return [best[mode.mode]] if mode.mode in best else []

    return chosen, known


def _train(name, setup, epochs):
    device, layout = setup.device, "channels_last"
    if name == "braze":
        eager = BrazeStep(setup, layout)
        counting = eager.loss_function = CountingLoss(eager.loss_function, device)
        step = eager.captured(setup)
    else:
        step = eager = StockStep(setup, layout)
        counting = eager.loss_function = CountingLoss(eager.loss_function, device)
    start = time.perf_counter()
    losses = train(step, counting, eager.loader, epochs, label=f"training {name}")
    seconds = time.perf_counter() - start
    right = setup.test_accuracy(eager.model, eager.loader.memory_format)
    return {"accuracy": right, "epochs": epochs, "seconds": seconds, "losses": losses}


def _counted(epochs):
    return f"{epochs} epoch{'s' * (epochs > 1)}"


def _print_plan(console, setup, lengths):
    """Says how long training will take, from two steps after a first one."""
    parts = []
    for name, epochs in lengths.items():
        step = (BrazeStep if name == "braze" else StockStep)(setup, "channels_last")
        batches = step.epoch()
        next(batches)
        start = time.perf_counter()
        # A data set may be a single batch.
        done = sum(1 for _ in itertools.islice(batches, 2)) or 1
        seconds = (time.perf_counter() - start) / done * epochs * len(setup.loader)
        parts.append(f"{name} {_counted(epochs)} {seconds:.0f} s")
    console.print(f"Plan: training {', '.join(parts)}; then timing, about a minute")


def _positive(kind):
    def parse(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def _seed(text):
    value = int(text)
    if not 0 <= value < 1 << 62:  # torch's generators take 64 bits; --seeds counts on from here
        raise ValueError
    return value


_seed.__name__ = "seed from 0 to 2**62"


def _share(text):
    value = float(text)
    if not 0 < value < 1:
        raise ValueError
    return value


_share.__name__ = "share between 0 and 1"


def _device(name, precision):
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} "
                "GPUs; `python -m braze info` says more"
            )
        if _lib.cuda_library is None:
            raise ValueError(
                f"--device {name}: braze has no CUDA kernels here: {_lib.cuda_missing}; "
                "`--device cpu` works without them"
            )
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N")
    elif precision == "tf32":
        raise ValueError("--precision tf32: CPUs have no TF32; use fp32 or bf16")
    return device


def _set_precision(precision):
    # These two set the newer fp32_precision as well; set the other way round, they cannot be read.
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _epochs(batch, device, count):
    """Enough for 98.5 % on MNIST's 60,000 at batch 64; on two cores in about 45 seconds."""
    epochs = 2 if device.type == "cpu" and batch <= 128 else 5 * math.ceil(math.sqrt(batch / 64))
    # A smaller data set is seen as often as its size asks for, up to 20 times.
    return min(epochs * max(1, round(60000 / count)), max(epochs, 20))
