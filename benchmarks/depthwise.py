"""``python -m braze bench depthwise``: the depthwise convolutions of six networks, pass by pass,
beside the best of cuDNN's engines and torch; same memory format on both sides, cold caches.

What a pass takes at least is the bytes of its two large tensors at a copy's bandwidth, or its
multiply-adds on CUDA cores, whichever is longer (`PEAKS`, an H200's).
"""

import dataclasses
import functools
import time

import torch

from benchmarks.candidates import fastest, screen, vendor_names
from benchmarks.conv_passes import PASSES, own_pass, torch_pass
from benchmarks.harness import DTYPES, interleaved, rounded, set_precision, timer_for
from benchmarks.results import ENVIRONMENT
from braze.testing import assert_by_rule

BUDGET = (0.02, 9, 30)
#: bytes and multiply-adds per second
PEAKS = 4.2e12, 30e12
#: Smaller tensors stay in L2, where launches count for more than kernels.
LEAST_BYTES = 16 << 20
#: How many of cuDNN's engines are tried: it lists the best first.
ENGINES = 6
OWN = "depthwise"

#: network -> (channels, height and width, filter, stride)
LAYERS = {
    "MobileNetV2": [
        *((32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 3, 2), (192, 28, 3, 1)),
        *((192, 28, 3, 2), (384, 14, 3, 1), (576, 14, 3, 1), (576, 14, 3, 2), (960, 7, 3, 1)),
    ],
    "MobileNetV3-L": [
        *((16, 112, 3, 1), (64, 112, 3, 2), (72, 56, 3, 1), (72, 56, 5, 2), (120, 28, 5, 1)),
        *((240, 28, 3, 2), (200, 14, 3, 1), (184, 14, 3, 1), (480, 14, 3, 1), (672, 14, 3, 1)),
        *((672, 14, 5, 2), (960, 7, 5, 1)),
    ],
    "EfficientNet-B0": [
        *((32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (240, 28, 5, 1)),
        *((240, 28, 3, 2), (480, 14, 3, 1), (480, 14, 5, 1), (672, 14, 5, 1), (672, 14, 5, 2)),
        *((1152, 7, 5, 1), (1152, 7, 3, 1)),
    ],
    "MnasNet": [
        *((32, 112, 3, 1), (48, 112, 3, 2), (72, 56, 3, 1), (72, 56, 5, 2), (120, 28, 5, 1)),
        *((240, 28, 5, 2), (480, 14, 5, 1), (480, 14, 3, 1), (576, 14, 3, 1), (576, 14, 5, 2)),
        *((1152, 7, 5, 1), (1152, 7, 3, 1)),
    ],
    "ShuffleNetV2": [
        *((24, 56, 3, 2), (58, 56, 3, 2), (58, 28, 3, 1), (116, 28, 3, 2), (116, 14, 3, 1)),
        *((232, 14, 3, 2), (232, 7, 3, 1)),
    ],
    "ConvNeXt-T": [(96, 56, 7, 1), (192, 28, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1)],
}

TIMED = ("own", "torch", "cudnn")
COLUMNS = [
    *("op", "networks", "case", "pass", "dtype", "layout"),
    *(f"{name}_{part}" for name in TIMED for part in ("us", "p20", "p80")),
    *("cudnn_name", "ratio", "bound_us", "of_bound", "floor_us", "error", *ENVIRONMENT),
]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution with "same"-like padding, one filter per channel."""

    batch: int
    channels: int
    size: int
    taps: int
    stride: int

    @property
    def name(self):
        image = f"{self.batch}x{self.channels}x{self.size}x{self.size}"
        return f"{image}, {self.taps}x{self.taps}/{self.stride}"

    @property
    def out_size(self):
        return (self.size - 1) // self.stride + 1

    @property
    def elements(self):
        return self.batch * self.channels * (self.size**2 + self.out_size**2)

    def bound_us(self, element_size):
        products = self.batch * self.channels * self.out_size**2 * self.taps**2
        return 1e6 * max(self.elements * element_size / PEAKS[0], products / PEAKS[1])

    def is_large(self, element_size):
        return self.batch * self.channels * self.size**2 * element_size >= LEAST_BYTES

    @property
    def geometry(self):
        return [self.stride] * 2, [self.taps // 2] * 2, [1, 1]

    def tensors(self, device, dtype, layout):
        form = torch.channels_last if layout == "channels_last" else torch.contiguous_format

        def randn(*shape):
            return torch.randn(shape, device=device).to(dtype, memory_format=form)

        return (
            randn(self.batch, self.channels, self.size, self.size),
            randn(self.channels, 1, self.taps, self.taps),
            randn(self.batch, self.channels, self.out_size, self.out_size),
        )


def networks_of():
    """Layer -> the networks that have it, for each batch."""
    found = {}
    for batch in (128, 64):
        for network, layers in LAYERS.items():
            for layer in layers:
                found.setdefault(Layer(batch, *layer), []).append(network)
    return found


def error_of(own, stock, layer, pass_name, tensors, tf32):
    """Why braze's result is not accepted, or ""."""
    what = layer.geometry, layer.channels, pass_name
    wide = torch_pass(*what, *(t.double() for t in tensors))
    tries_all = torch.backends.cudnn.benchmark
    try:
        expected = stock()  # which has to try all here already: torch keeps its first choice
        torch.backends.cudnn.benchmark = False
        assert_by_rule(own(), expected, wide(), ulps=2**13 if tf32 else 8)
    except (AssertionError, RuntimeError) as problem:
        return f"{type(problem).__name__}: {problem}".splitlines()[0]
    finally:
        torch.backends.cudnn.benchmark = tries_all
    return ""


def time_pass(layer, pass_name, dtype_name, layout, device, quick, check=True):
    timer, tf32 = timer_for(device), dtype_name == "tf32"
    tensors = layer.tensors(device, DTYPES[dtype_name], layout)
    what = layer.geometry, layer.channels, pass_name
    own = functools.partial(own_pass, *what, *tensors, tf32)
    stock = torch_pass(*what, *tensors)
    makers = {name: functools.partial(own, name) for name in vendor_names("conv2d")[:ENGINES]}
    makers["own"] = functools.partial(own, OWN)
    makers["torch"] = lambda: stock
    row = dict.fromkeys(COLUMNS, "")
    row |= {"op": "depthwise", "case": layer.name, "pass": pass_name}
    row |= {"dtype": dtype_name, "layout": layout}
    if check:
        row["error"] = error_of(makers["own"](), stock, layer, pass_name, tensors, tf32)
    engines = screen(timer, {k: v for k, v in makers.items() if k.startswith("cudnn")})
    names = fastest(engines, 1)
    budget = None if quick else BUDGET
    times = interleaved(
        timer, {k: makers[k] for k in ["own", "torch", *names]}, device, quick=quick, budget=budget
    )
    for name, columns in zip(["own", "torch", *names], TIMED, strict=False):
        parts = ("us", "p20", "p80")
        row |= {f"{columns}_{p}": rounded(t) for p, t in zip(parts, times[name], strict=True)}
    row["cudnn_name"] = names[0] if names else ""
    best = min(t[0] for name, t in times.items() if name not in ("own", "floor"))
    bound = layer.bound_us(tensors[0].element_size())
    row |= {"ratio": f"{best / times['own'][0]:.2f}", "bound_us": rounded(bound)}
    row |= {"of_bound": f"{times['own'][0] / bound:.2f}", "floor_us": rounded(times["floor"][0])}
    return row


def run(device, args, deadline=None, check=True):
    """Yields a row per layer, dtype, layout and pass, until time.monotonic() is `deadline`."""
    if device.type != "cuda":
        raise ValueError("bench depthwise: needs a GPU")
    torch.backends.cudnn.benchmark = True
    layers = [
        item for item in networks_of().items() if any(p in item[0].name for p in args.case or [""])
    ]
    for dtype_name in args.dtype or ("bfloat16", "tf32", "float32"):
        set_precision(dtype_name)
        for layer, networks in layers[:2] if args.quick else layers:
            if not layer.is_large(DTYPES[dtype_name].itemsize):
                continue
            for layout in ("channels_last", "contiguous"):
                for pass_name in PASSES:
                    if deadline and time.monotonic() > deadline:
                        return
                    row = time_pass(layer, pass_name, dtype_name, layout, device, args.quick, check)
                    yield row | {"networks": " ".join(networks)}


def line(row):
    """A row for the terminal."""
    return (
        f"{row['case']:<28} {row['pass']:<5} {row['dtype']:<8} {row['layout']:<13} "
        f"own {row['own_us']:>6} torch {row['torch_us']:>6} {row['cudnn_name']:<8} "
        f"{row['cudnn_us']:>6} ratio {row['ratio']} of bound {row['of_bound']} {row['error']}"
    )
