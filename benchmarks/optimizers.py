"""``python -m braze bench optimizers``: an update of all parameters of a model, alone and with the
norm of the gradients clipped, beside torch's fused and foreach optimizers (on a GPU in a CUDA graph
each), and Muon beside a loop over layers."""

import torch

import braze
from benchmarks.harness import DTYPES, interleaved, rounded, timer_for
from benchmarks.markdown import op_sections, table, timed
from benchmarks.results import ENVIRONMENT
from braze.testing import assert_by_rule

MNIST = [(32, 1, 3, 3), (32,), (32,), (32,), (64, 32, 3, 3), (64,), (64,), (64,)]
MNIST += [(128, 3136), (128,), (10, 128), (10,)]
CLIP = 1.0


def _norm(channels):
    return [(channels,)] * 2


def resnet50():
    """The parameters of torchvision's."""
    shapes, inputs = [(64, 3, 7, 7), *_norm(64)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), *_norm(width), (width, width, 3, 3), *_norm(width)]
            shapes += [(4 * width, width, 1, 1), *_norm(4 * width)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), *_norm(4 * width)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def resnet18_convolutions():
    """Its weights of four dimensions."""
    shapes, inputs = [(64, 3, 7, 7)], 64
    for width in (64, 128, 256, 512):
        shapes += [(width, inputs, 3, 3), *[(width, width, 3, 3)] * 3]
        if inputs != width:
            shapes.append((width, inputs, 1, 1))
        inputs = width
    return shapes


SETS = {"MNIST network": MNIST, "ResNet-50": resnet50(), "1000 of 64": [(64,)] * 1000}
#: name -> settings, tensors of an element that the update moves, ways of torch's
OPTIMIZERS = {
    "SGD": ({"lr": 0.01, "momentum": 0.9}, 5, ("fused", "foreach")),
    "Adam": ({"lr": 1e-3}, 7, ("fused", "foreach")),
    "AdamW": ({"lr": 1e-3}, 7, ("fused", "foreach")),
    "RMSprop": ({"lr": 1e-3}, 5, ("foreach",)),
    "LAMB": ({"lr": 1e-3}, 10, ()),
}
TIMED = ("braze", "fused", "foreach", "loop")
COLUMNS = [
    *("op", "optimizer", "case", "clipped", "dtype"),
    *(f"{name}_{part}" for name in TIMED for part in ("us", "p20", "p80")),
    *("ratio", "rate", "unit", "floor_us", "error", *ENVIRONMENT),
]


def maker(optimizer, tensors, clip=None, **settings):
    """A function that makes the step; `clip`: by torch, before it."""

    def make():
        params = [torch.nn.Parameter(t.clone()) for t in tensors[0]]
        for p, grad in zip(params, tensors[1], strict=True):
            p.grad = grad.clone()
        instance = optimizer(params, **settings)

        def step():
            if clip:
                torch.nn.utils.clip_grad_norm_(params, clip)
            instance.step()
            return params

        return step

    return make


def makers_of(name, tensors, clipped, device):
    """Candidate -> what makes its step."""
    settings, _, ways = OPTIMIZERS[name]
    capturable = {"capturable": True} if device.type == "cuda" and name != "SGD" else {}
    clip = CLIP if clipped else None
    makers = {"braze": maker(getattr(braze.optim, name), tensors, max_grad_norm=clip, **settings)}
    for way in ways:
        stock = getattr(torch.optim, name)
        makers[way] = maker(stock, tensors, clip, **settings, **capturable, **{way: True})
    return makers


def muon_makers(tensors):
    flat = [[t.flatten(1) for t in group] for group in tensors]
    return {
        "braze": maker(braze.optim.Muon, tensors, lr=0.02),
        "loop": maker(torch.optim.Muon, flat, lr=0.02),
    }


def check(makers, name, tensors, clipped, device):
    """Raises AssertionError unless three steps agree by the rule."""
    stock = next((way for way in makers if way != "braze"), None)
    if stock is None:
        return
    doubles = [[t.double() for t in group] for group in tensors]
    reference = makers_of(name, doubles, clipped, device)[stock]
    trained = []
    for make in (makers["braze"], makers[stock], reference):
        step = make()
        trained.append([step() for _ in range(3)][-1])
    for a, s, r in zip(*trained, strict=True):
        assert_by_rule(a, s, r, terms=60)


def time_case(name, case, shapes, clipped, dtype_name, device, quick):
    dtype = DTYPES[dtype_name]
    tensors = [[torch.randn(s, device=device).to(dtype) for s in shapes] for _ in range(2)]
    row = dict.fromkeys(COLUMNS, "")
    row |= {"op": "optimizers", "optimizer": name, "case": case, "dtype": dtype_name}
    row["clipped"] = "yes" if clipped else "no"
    if name == "Muon":
        makers, moved = muon_makers(tensors), 0
    else:
        makers = makers_of(name, tensors, clipped, device)
        moved = OPTIMIZERS[name][1] + clipped
        try:
            check(makers, name, tensors, clipped, device)
        except AssertionError as problem:
            return row | {"error": f"{problem}".splitlines()[0]}
    times = interleaved(timer_for(device), makers, device, quick=quick)
    for way in makers:
        parts = ("us", "p20", "p80")
        row |= {f"{way}_{p}": rounded(t) for p, t in zip(parts, times[way], strict=True)}
    own = times["braze"][0]
    rivals = [times[way][0] for way in makers if way != "braze"]
    if rivals:
        row["ratio"] = f"{min(rivals) / own:.2f}"
    if moved:
        elements = sum(t.numel() for t in tensors[0])
        row["rate"] = f"{moved * elements * dtype.itemsize / own / 1e3:.4g}"
        row["unit"] = "GB/s"
    if "floor" in times:
        row["floor_us"] = rounded(times["floor"][0])
    return row


def run(device, args):
    """Yields a row per optimizer, set of parameters and dtype, plain and clipped."""
    wanted = args.case or [""]
    cells = [
        (name, case, shapes, clipped)
        for name in OPTIMIZERS
        for case, shapes in SETS.items()
        for clipped in (False, True)
    ]
    cells.append(("Muon", "ResNet-18's convolutions", resnet18_convolutions(), False))
    cells = [c for c in cells if any(part in f"{c[0]} {c[1]}" for part in wanted)]
    for dtype_name in args.dtype or ("float32",):
        for cell in cells[:1] if args.quick else cells:
            torch.manual_seed(0)
            yield time_case(*cell, dtype_name, device, args.quick)


def line(row):
    """A row for the terminal."""
    times = "  ".join(f"{name} {row[f'{name}_us']:>6}" for name in TIMED if row[f"{name}_us"])
    clipped = " clipped" * (row["clipped"] == "yes")
    return (
        f"{row['optimizer'] + clipped:<16} {row['case']:<25} {row['dtype']:<8} {times}  "
        f"best / braze {row['ratio']}  {row['rate']} {row['unit']} {row['error']}"
    )


def sections(folder):
    """The table, per device and versions."""
    return op_sections(folder, "optimizers", summary)


def summary(rows):
    head = ["optimizer", "parameters", "clipped", "dtype", "|", "braze µs"]
    head += ["torch fused µs", "torch foreach µs", "loop over layers µs", "best of these / braze"]
    head.append("braze's rate")
    body = []
    for row in rows:
        cells = [row[key] for key in ("optimizer", "case", "clipped", "dtype")]
        if row["error"]:
            body.append([*cells, f"failed: {row['error']}", *[""] * 5])
            continue
        cells += [timed(row, name) if row[f"{name}_us"] else "" for name in TIMED]
        body.append([*cells, row["ratio"], f"{row['rate']} {row['unit']}".strip()])
    return table(head, body)
