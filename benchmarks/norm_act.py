"""``python -m braze bench norm_act``: batch norm, addition and activation of four networks' layers,
layer norm over rows and group norm, in training, forward and backward, beside torch (eager and
compiled) and a copy that moves as many bytes as the passes have to; cold caches."""

import dataclasses
import math
import typing

import torch
import torch.nn.functional as stock

import braze
import braze.nn.functional as F
from benchmarks.harness import DTYPES, interleaved, rounded, timer_for
from benchmarks.markdown import op_sections, table, timed
from benchmarks.results import ENVIRONMENT
from braze.testing import check_against_stock

BUDGET = (0.03, 9, 40)
ACTIVATIONS = {
    "identity": lambda v: v,
    "relu": torch.relu,
    "relu6": stock.relu6,
    "silu": stock.silu,
    "hardswish": stock.hardswish,
    "gelu": stock.gelu,
}

#: network -> batch and (channels, height and width, activation, whether there is a residual)
LAYERS = {
    "ResNet-50": (
        64,
        [
            *((64, 112, "relu", False), (64, 56, "relu", False), (256, 56, "identity", False)),
            *((256, 56, "relu", True), (128, 28, "relu", False), (512, 28, "relu", True)),
            *((256, 14, "relu", False), (1024, 14, "relu", True), (512, 7, "relu", False)),
            (2048, 7, "relu", True),
        ],
    ),
    "MobileNetV2": (
        128,
        [
            *((32, 112, "relu6", False), (96, 56, "relu6", False), (144, 56, "relu6", False)),
            *((24, 56, "identity", True), (192, 28, "relu6", False), (576, 14, "relu6", False)),
            *((960, 7, "relu6", False), (1280, 7, "relu6", False)),
        ],
    ),
    "EfficientNet-B0": (
        128,
        [
            *((32, 112, "silu", False), (144, 56, "silu", False), (240, 28, "silu", False)),
            *((40, 28, "identity", True), (672, 14, "silu", False), (1152, 7, "silu", False)),
        ],
    ),
    "other": (
        128,
        [
            *((256, 32, "gelu", False), (240, 28, "hardswish", False), (256, 28, "silu", True)),
            # a tensor of 2 GB in bfloat16
            (1024, 90, "relu", True),
        ],
    ),
}
#: batch, channels, height and width; 32 groups, as of diffusion models' U-Nets and of ResNets
GROUP_NORM = [(8, 320, 64), (64, 256, 56), (64, 1024, 14), (4, 128, 256), (32, 512, 128)]
#: rows and their length: ConvNeXt-T's at batch 128, ViT-B's and -L's, language models', 2 GB
LAYER_NORM = [
    *((401408, 96), (100352, 192), (25088, 384), (25216, 768), (16384, 1024), (8192, 2048)),
    *((8192, 4096), (4096, 8192), (2048, 16384), (1024, 32768), (1 << 20, 1024), (1 << 18, 4096)),
]
TIMED = ("braze", "stock", "compile", "copy")
KEY = "network", "case", "pass", "dtype", "layout"
COLUMNS = [
    *("op", *KEY),
    *(f"{name}_{part}" for name in TIMED for part in ("us", "p20", "p80")),
    *("megabytes", "ratio", "ratio_compile", "of_copy", "floor_us", "error", *ENVIRONMENT),
]


def parameters_of(count, device, dtype):
    """Weight and bias."""
    values = torch.rand(2, count, device=device, dtype=dtype) + 0.5
    return [t.clone().requires_grad_() for t in values]


def images_of(shape, device, dtype, layout):
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    t = torch.empty(shape, device=device, dtype=dtype, memory_format=form)
    return t.normal_().requires_grad_()


# Where an activation's slope jumps.
KINKS = {"relu": (0,), "relu6": (0, 6)}


@dataclasses.dataclass(frozen=True)
class BatchNormLayer:
    layouts = ("channels_last", "contiguous")

    network: str
    batch: int
    channels: int
    size: int
    activation: str
    residual: bool

    @property
    def name(self):
        shape = f"{self.batch}x{self.channels}x{self.size}x{self.size}"
        return f"{shape}, {self.activation}{' + residual' * self.residual}"

    def bytes(self, pass_name, element_size):
        """What the passes move at least: csrc/cuda/batch_norm/pass.cuh."""
        elements = self.batch * self.channels * self.size**2
        tensors = 3 if pass_name == "forward" else 5
        mask = 0
        if self.residual and self.activation == "identity":
            tensors += pass_name == "forward"  # its gradient is the incoming one
        elif self.residual:
            tensors += 1
            has_mask = self.activation in ("relu", "relu6")
            mask = element_size * elements // 16 if has_mask else 0
            tensors += pass_name == "backward" and not has_mask
        return tensors * elements * element_size + mask

    def inputs(self, device, dtype, layout):
        shape = self.batch, self.channels, self.size, self.size
        parameter = torch.float64 if dtype == torch.float64 else torch.float32
        images = [images_of(shape, device, dtype, layout) for _ in range(1 + self.residual)]
        inputs = [images[0], *parameters_of(self.channels, device, parameter), *images[1:]]
        if dtype == torch.float32:
            self.keep_from_kinks(inputs)
        return inputs

    @torch.no_grad()
    def keep_from_kinks(self, inputs):
        """Moves the few of 10^8 elements whose gradient is all or nothing by the last bit of what
        is activated, so that the check compares arithmetic there and no luck."""
        kinks = KINKS.get(self.activation, ())
        if kinks:
            layer = dataclasses.replace(self, activation="identity")
            y = layer.stock(*(t.double() for t in inputs))
        for kink in kinks:
            inputs[0][(y - kink).abs() < 1e-5] += 0.01

    def braze(self, x, weight, bias, residual=None):
        return F.batch_norm_act(
            x, None, None, weight, bias, True, residual=residual, activation=self.activation
        )

    def stock(self, x, weight, bias, residual=None):
        y = stock.batch_norm(x, None, None, weight, bias, True)
        return ACTIVATIONS[self.activation](y if residual is None else y + residual)


@dataclasses.dataclass(frozen=True)
class RowNorm:
    """Layer norm of rows, or group norm of images."""

    layouts = ("contiguous",)
    # What passes one after the other move at least, in tensors: csrc/cuda/layer_norm/row.cuh and
    # csrc/cuda/group_norm/group_norm.cu, whose backward reads groups that it holds once: 3.
    MOVED: typing.ClassVar = {
        "layer norm": {"forward": 2, "backward": 3},
        "group norm": {"forward": 2, "backward": 5},
    }

    network: str
    shape: tuple[int, ...]

    @property
    def name(self):
        return "x".join(map(str, self.shape))

    def bytes(self, pass_name, element_size):
        return self.MOVED[self.network][pass_name] * math.prod(self.shape) * element_size

    def inputs(self, device, dtype, layout):
        # The parameters have the activations' dtype, as stock wants them on CUDA.
        x = images_of(self.shape, device, dtype, layout)
        return [x, *parameters_of(self.shape[1], device, dtype)]

    def run(self, functional, x, weight, bias):
        if self.network == "layer norm":
            return functional.layer_norm(x, weight.shape, weight, bias)
        return functional.group_norm(x, 32, weight, bias)

    def braze(self, x, weight, bias):
        with braze.backend(layer_norm="braze", group_norm="braze"):
            return self.run(F, x, weight, bias)

    def stock(self, x, weight, bias):
        return self.run(stock, x, weight, bias)


def maker(function, pass_name, inputs):
    def make():
        if pass_name == "forward":
            return lambda: function(*inputs)
        y = function(*inputs)
        grad = torch.randn_like(y)
        return lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)

    return make


def copy_of(count, device):
    source = torch.randint(256, (count // 2,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: lambda: target.copy_(source)


def time_layer(layer, dtype_name, layout, device, quick, compiled):
    dtype = DTYPES[dtype_name]
    inputs = layer.inputs(device, dtype, layout)
    error = ""
    # The float64 reference of the largest would not fit beside the rest.
    if inputs[0].numel() < 1 << 28:
        try:
            check_against_stock(layer.braze, layer.stock, inputs)
        except (AssertionError, RuntimeError) as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0]
    functions = {"braze": layer.braze, "stock": layer.stock}
    if compiled:
        functions["compile"] = torch.compile(layer.stock, fullgraph=True)
    for pass_name in ("forward", "backward"):
        moved = layer.bytes(pass_name, dtype.itemsize)
        makers = {name: maker(f, pass_name, inputs) for name, f in functions.items()}
        makers["copy"] = copy_of(moved, device)
        budget = BUDGET if device.type == "cuda" and not quick else None
        times = interleaved(timer_for(device), makers, device, quick=quick, budget=budget)
        row = dict.fromkeys(COLUMNS, "")
        row |= {"op": "norm_act", "network": layer.network, "case": layer.name}
        row |= {"pass": pass_name, "dtype": dtype_name, "layout": layout, "error": error}
        row["megabytes"] = f"{moved / 1e6:.1f}"
        for name in makers:
            parts = ("us", "p20", "p80")
            row |= {f"{name}_{p}": rounded(t) for p, t in zip(parts, times[name], strict=True)}
        own = times["braze"][0]
        row |= {"ratio": f"{times['stock'][0] / own:.2f}"}
        row |= {"of_copy": f"{times['copy'][0] / own:.2f}"}
        if compiled:
            row["ratio_compile"] = f"{times['compile'][0] / own:.2f}"
        if "floor" in times:
            row["floor_us"] = rounded(times["floor"][0])
        yield row


def layers_of(args):
    found = [
        BatchNormLayer(network, batch, *layer)
        for network, (batch, layers) in LAYERS.items()
        for layer in layers
    ]
    found += [RowNorm("layer norm", rows) for rows in LAYER_NORM]
    found += [RowNorm("group norm", (n, c, size, size)) for n, c, size in GROUP_NORM]
    wanted = args.case or [""]
    return [x for x in found if any(part in f"{x.network} {x.name}" for part in wanted)]


def run(device, args):
    """Yields a row per layer, dtype, layout and pass."""
    layers = layers_of(args)
    for dtype_name in args.dtype or ("bfloat16", "float32"):
        for layer in layers[:2] if args.quick else layers:
            for layout in [x for x in layer.layouts if x in (args.layout or layer.layouts)]:
                torch.manual_seed(0)
                yield from time_layer(layer, dtype_name, layout, device, args.quick, args.compile)


def line(row):
    """A row for the terminal."""
    return (
        f"{row['network']:<15} {row['case']:<36} {row['pass']:<8} {row['dtype']:<8} "
        f"{row['layout']:<13} {row['megabytes']:>7} MB  braze {row['braze_us']:>6} "
        f"stock {row['stock_us']:>6} compile {row['compile_us']:>6} copy {row['copy_us']:>6}  "
        f"of copy {row['of_copy']} {row['error']}"
    )


def sections(folder):
    """The table of ``bench norm_act``, per device and versions."""
    return op_sections(folder, "norm_act", summary)


def summary(rows):
    """A line per layer, dtype, layout and pass."""
    compiled = any(row["compile_us"] for row in rows)
    head = [*KEY, "|", "MB", "braze µs", "copy µs", "of the copy", "stock µs", "stock / braze"]
    head += ["compiled stock / braze"] * compiled
    body = []
    for row in rows:
        cells = [*(row[key] for key in KEY), row["megabytes"]]
        if row["error"]:
            body.append([*cells, f"failed: {row['error']}", *[""] * (len(head) - len(cells) - 2)])
            continue
        cells += [timed(row, "braze"), row["copy_us"], row["of_copy"], row["stock_us"]]
        body.append([*cells, row["ratio"], *[row["ratio_compile"]] * compiled])
    return table(head, body)
