"""``python -m braze mnist``: trains the CNN of examples/mnist.py with braze and with stock PyTorch
from the same initial weights, then times a step of both in every mode."""

import math
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console

from braze import _lib
from braze.data import load_mnist
from braze.info import info
from braze.mnist import report, timing
from braze.mnist.example import evaluate, make_loader, make_model, train

_DESCRIPTION = """Trains a small CNN on MNIST with braze, and with stock PyTorch from the same
weights, and times their training steps."""


def add_arguments(parser):
    """Adds the options of ``braze mnist`` to an argparse parser."""
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add("--batch", type=_positive(int), default=64, help="images per step (default: %(default)s)")
    add("--precision", choices=["fp32", "tf32", "bf16"], default="fp32", help="bf16 is autocast")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    add("--data", type=Path, metavar="DIR", help="the four MNIST files (default: $BRAZE_DATA, ...)")
    add("--epochs", type=_positive(int), help="default: by batch size and device")
    add("--lr", type=_positive(float), default=0.1, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights and of the order (default: 0)")
    add("--limit", type=_positive(int), metavar="N", help="train on the first N images only")
    add("--steps", type=_positive(int), help="timed steps per row (default: 100; fewer on a CPU)")
    add("--skip-stock", action="store_true", help="train and time braze alone")
    add("--all-modes", action="store_true", help="also torch.compile's max-autotune (minutes)")
    add("--out", type=Path, default=Path("braze_mnist"), metavar="DIR", help="for JSON and plot")


def run(args):
    """Runs with parsed arguments. Raises ValueError or OSError for what the user can put right."""
    console = Console()
    device = _device(args.device, args.precision)
    _set_precision(args.precision)
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
    count = len(digits.train_images)
    if args.batch > count:
        raise ValueError(f"--batch {args.batch}: there are only {count} training images")
    args.out.mkdir(parents=True, exist_ok=True)  # now, so that a bad --out costs no training
    lr = args.lr
    epochs = args.epochs or _epochs(args.batch, device, count)
    steps = args.steps or (100 if device.type == "cuda" else min(20, max(4, 1280 // args.batch)))
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    console.print(
        f"{count} training and {len(digits.test_images)} test images: {digits.source}"
        f"{f' in {digits.directory}' if digits.directory else ''}\n"
        f"{place}, {args.precision}, batch {args.batch}, lr {lr:g}, {epochs} epochs, "
        f"{steps} timed steps"
    )

    torch.manual_seed(args.seed)
    initial = make_model(torch.nn).state_dict()

    def initialised(nn):
        model = make_model(nn)
        model.load_state_dict(initial)
        return model

    setup = timing.Setup(initialised, digits, device, args.precision, args.batch, lr, args.seed)
    names = ["braze"] if args.skip_stock else ["braze", "stock"]
    if device.type == "cpu":
        _print_plan(console, setup, names, epochs)
    trained = {name: _train(name, setup, epochs) for name in names}
    for name, result in trained.items():
        console.print(
            f"{name}: test accuracy {result['accuracy']:.2%} after {epochs} epochs "
            f"in {result['seconds']:.1f} s"
        )

    with console.status("") as status:
        rows = timing.measure(setup, names, steps, args.all_modes, lambda text: status.update(text))
    title = f"MNIST CNN, {place}, {args.precision}, batch {args.batch}"
    console.print(report.table(rows, f"{title}: one training step"))

    json_path, plot_path = args.out / "mnist.json", args.out / "mnist.png"
    report.write_json(
        json_path,
        {
            "device": place,
            "precision": args.precision,
            "batch": args.batch,
            "lr": lr,
            "epochs": epochs,
            "seed": args.seed,
            "data": digits.source,
            "training": trained,
            "steps": steps,
            "timings": [row.as_dict() for row in rows],
            "info": info(),
        },
    )
    losses = {name: result["losses"] for name, result in trained.items()}
    report.write_plot(plot_path, losses, rows, title)
    console.print(f"Figures: {json_path.resolve()}\nPlot:    {plot_path.resolve()}")


def _train(name, setup, epochs):
    step = timing.Step(setup, name, _training_layout(setup))
    start = time.perf_counter()
    losses = train(
        step.model,
        step.loss_function,
        step.optimizer,
        step.loader,
        epochs,
        step.autocast,
        label=f"training {name}",
    )
    seconds = time.perf_counter() - start
    digits = setup.digits
    loader = make_loader(digits.test_images, digits.test_labels, 1000, setup.device, shuffle=False)
    loader.memory_format = step.loader.memory_format
    accuracy = evaluate(step.model, loader, step.autocast)
    return {"accuracy": accuracy, "seconds": seconds, "losses": losses}


def _training_layout(setup):
    """CPUs train faster in channels_last; GPUs at small batches are bound by the launches."""
    return "channels_last" if setup.device.type == "cpu" else "contiguous"


def _print_plan(console, setup, names, epochs):
    """Says how long training will take, from two steps after a first one."""
    parts = []
    for name in names:
        step, batches = timing.Step(setup, name, _training_layout(setup)), setup.index_batches()
        step(next(batches))
        start = time.perf_counter()
        for _ in range(2):
            step(next(batches))
        seconds = (time.perf_counter() - start) / 2 * epochs * len(setup.loader)
        parts.append(f"{name} {seconds:.0f} s")
    console.print(f"Plan: training {', '.join(parts)}; then timing, about a minute")


def _positive(kind):
    def parse(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


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
    """Enough for 98.5 % on MNIST's 60,000 at batch 64; on two cores in under three minutes."""
    epochs = 4 if device.type == "cpu" and batch <= 128 else 5 * math.ceil(math.sqrt(batch / 64))
    # A smaller data set is seen as often as its size asks for, up to 20 times.
    return min(epochs * max(1, round(60000 / count)), max(epochs, 20))
