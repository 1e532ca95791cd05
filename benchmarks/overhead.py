"""``python -m braze bench overhead``: what eager mode costs the host: microseconds of Python,
dispatcher and autograd for layers on tensors so small that nothing is computed, and for training
steps of small networks, beside stock's.

Without waiting for the device, whose queue is empty at the start of each reading, and with one
thread. The table is in docs/eager.md.
"""

import copy
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import braze
from benchmarks.harness import set_precision
from benchmarks.markdown import op_sections, table
from benchmarks.network_models import airbench94, nature_cnn
from benchmarks.networks import LR, MOMENTUM, PRECISIONS, wait
from benchmarks.results import ENVIRONMENT

KEY = ("case", "precision", "pass")
COLUMNS = [*KEY, "braze_us", "braze_p20", "stock_us", "stock_p20", "ratio", "error", *ENVIRONMENT]
PASSES = ("forward", "step")
ROUNDS, CALLS, WARM_UP = 60, 10, 5


@dataclasses.dataclass
class Case:
    """A model, and what it is trained on."""

    name: str
    make: Callable
    shape: tuple
    classes: int


def small_lenet():
    """LeNet-5's layers on 8x8 pixels, with an eighth of its width."""
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)),
    )


def small_nature_cnn():
    """The network of Mnih et al., 2015, on 12x12 pixels, with an eighth of its width."""
    return nn.Sequential(
        *(nn.Conv2d(4, 4, 4, stride=2), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2), nn.ReLU()),
        *(nn.Conv2d(8, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 16), nn.ReLU()),
        nn.Linear(16, 18),
    )


def small_airbench94():
    """The network of airbench94, with about a thirtieth of its width."""
    return airbench94(4, (4, 8, 8))


class BasicBlock(nn.Module):
    """Of ResNet-18 (He et al., 2016), with torchvision's forward."""

    expansion = 1

    def __init__(self, channels_in, channels, stride, shortcut):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu, self.downsample = nn.ReLU(inplace=True), shortcut

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """Of ResNet-50, with torchvision's forward."""

    expansion = 4

    def __init__(self, channels_in, channels, stride, shortcut):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.relu, self.downsample = nn.ReLU(inplace=True), shortcut

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def small_resnet(kind, counts, width):
    """A ResNet of such blocks for 64x64 pixels, whose first stage has `width` channels."""
    layers = [nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]
    before = width
    for stage, count in enumerate(counts):
        channels, stage_blocks = width << stage, []
        after = kind.expansion * channels
        for i in range(count):
            stride, shortcut = 2 if stage and not i else 1, None
            if stride > 1 or before != after:
                conv = nn.Conv2d(before, after, 1, stride, bias=False)
                shortcut = nn.Sequential(conv, nn.BatchNorm2d(after))
            stage_blocks.append(kind(before, channels, stride, shortcut))
            before = after
        layers.append(nn.Sequential(*stage_blocks))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


class ConvNormAct(nn.Sequential):
    """Layers as torchvision groups them."""

    def __init__(self, channels_in, channels, *activation, **settings):
        conv = nn.Conv2d(channels_in, channels, bias=False, **settings)
        super().__init__(conv, nn.BatchNorm2d(channels), *activation)


class SqueezeExcitation(nn.Module):
    """Of EfficientNet (Tan and Le, 2019)."""

    def __init__(self, channels, inner):
        super().__init__()
        self.pool, self.act, self.gate = nn.AdaptiveAvgPool2d(1), nn.SiLU(), nn.Sigmoid()
        self.fc1, self.fc2 = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x):
        return x * self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))


class MBConv(nn.Module):
    """Of EfficientNet."""

    def __init__(self, channels, expanded):
        super().__init__()
        self.block = nn.Sequential(
            ConvNormAct(channels, expanded, nn.SiLU(), kernel_size=1),
            ConvNormAct(expanded, expanded, nn.SiLU(), kernel_size=3, padding=1, groups=expanded),
            SqueezeExcitation(expanded, 2),
            ConvNormAct(expanded, channels, kernel_size=1),
        )

    def forward(self, x):
        result = self.block(x)
        result += x
        return result


def small_efficientnet():
    """Sixteen of its blocks, as B0 has."""
    layers = [nn.Conv2d(3, 4, 3, padding=1), *(MBConv(4, 8) for _ in range(16))]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def block():
    layers = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten())


class Alone(nn.Module):
    """A layer by itself."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).view(len(x), -1)


IMAGES = (2, 2, 2, 2)
CASES = [
    Case("Linear", lambda: Alone(nn.Linear(8, 8)), (2, 8), 8),
    Case("Conv2d", lambda: Alone(nn.Conv2d(2, 2, 3, padding=1)), IMAGES, 8),
    Case("BatchNorm2d", lambda: Alone(nn.BatchNorm2d(2)), IMAGES, 8),
    Case("MaxPool2d", lambda: Alone(nn.MaxPool2d(3, 1, 1)), IMAGES, 8),
    Case("ReLU", lambda: Alone(nn.ReLU()), IMAGES, 8),
    Case("Conv2d, BatchNorm2d, ReLU, MaxPool2d", block, (2, 2, 4, 4), 8),
    Case("LeNet-5, small", small_lenet, (2, 1, 8, 8), 10),
    Case("Nature-CNN, small", small_nature_cnn, (2, 4, 12, 12), 18),
    Case("airbench94, small", small_airbench94, (2, 3, 32, 32), 10),
    Case("ResNet-18, small", lambda: small_resnet(BasicBlock, (2, 2, 2, 2), 4), (2, 3, 64, 64), 10),
    Case("ResNet-50, small", lambda: small_resnet(Bottleneck, (3, 4, 6, 3), 2), (2, 3, 64, 64), 10),
    Case("EfficientNet's blocks, small", small_efficientnet, (2, 3, 8, 8), 10),
    Case("Nature-CNN", nature_cnn, (1, 4, 84, 84), 18),
]


def calls_of(case, device, precision):
    """{"braze" and "stock": {pass: what to time}}, of the same weights and data."""
    torch.manual_seed(0)
    model = case.make()
    x = torch.randn(case.shape, device=device)
    labels = torch.randint(case.classes, case.shape[:1], device=device)

    def made(ours):
        own = copy.deepcopy(model).to(device).train()
        own = braze.convert(own) if ours else own
        loss_function = braze.nn.CrossEntropyLoss() if ours else nn.CrossEntropyLoss()
        fused = {"fused": True} if device.type == "cuda" and not ours else {}
        parameters = [*own.parameters()] or [nn.Parameter(torch.zeros(1, device=device))]
        sgd = braze.optim.SGD if ours else torch.optim.SGD
        optimizer = sgd(parameters, lr=LR, momentum=MOMENTUM, **fused)
        image = x.detach().requires_grad_()

        def forward():
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                return own(image)

        def step():
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_function(own(image), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return dict(zip(PASSES, (forward, step), strict=True))

    return {"braze": made(True), "stock": made(False)}


def time_case(case, device, precision, rounds):
    """A row per pass."""
    calls = calls_of(case, device, precision)
    for which in PASSES:
        seconds = {name: [] for name in calls}
        for functions in calls.values():
            for _ in range(WARM_UP):
                functions[which]()
        for _, (name, functions) in itertools.product(range(rounds), calls.items()):
            wait(device)
            start = time.perf_counter()
            for _ in range(CALLS):
                functions[which]()
            seconds[name].append((time.perf_counter() - start) / CALLS)
        row = dict.fromkeys(COLUMNS, "") | dict(
            zip(KEY, (case.name, precision, which), strict=True)
        )
        for name, each in seconds.items():
            row[f"{name}_us"] = f"{1e6 * statistics.median(each):.1f}"
            row[f"{name}_p20"] = (
                f"{1e6 * statistics.quantiles(each, n=5, method='inclusive')[0]:.1f}"
            )
        row["ratio"] = f"{float(row['braze_us']) / float(row['stock_us']):.2f}"
        yield row


def run(device, args):
    """Yields the rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chosen = [c for c in CASES if any(part in c.name for part in args.case or [""])]
        for case, precision in itertools.product(chosen, args.precision or ["fp32", "bf16"]):
            set_precision(PRECISIONS[precision])
            yield from time_case(case, device, precision, 5 if args.quick else ROUNDS)
    finally:
        torch.set_num_threads(threads)


def line(row):
    """A row for the terminal."""
    return (
        f"{row['case']:<38} {row['precision']} {row['pass']:<8} {row['braze_us']:>8} us  stock "
        f"{row['stock_us']:>8} us  braze / stock {row['ratio']}"
    )


def sections(folder):
    """The table, per device and versions."""
    return op_sections(folder, "overhead", summary)


def summary(rows):
    """A line per case and precision."""
    head = ["case", "precision", "|"]
    head += [f"{p} {what}" for p in PASSES for what in ("braze us", "stock us", "braze / stock")]
    cells = {}
    for row in rows:
        figures = [row["braze_us"], row["stock_us"], row["ratio"]]
        cells.setdefault((row["case"], row["precision"]), {})[row["pass"]] = figures
    nothing = ["", "", ""]
    body = [
        [*key, *(f for p in PASSES for f in found.get(p, nothing))] for key, found in cells.items()
    ]
    return table(head, body)
