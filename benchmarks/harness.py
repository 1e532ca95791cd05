"""Times braze beside stock PyTorch, interleaved in one run; docs/benchmarks.md states the method.

A benchmark is an op with a list of cases. Each case is checked against stock by the tolerance rule
of braze.testing before it is timed, forward and backward are timed separately.
"""

import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.candidates import by_rules
from benchmarks.results import COLUMNS
from braze.testing import check_against_stock

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Larger than any L2 (or, on a CPU, the share of the last-level cache that one process gets).
FLUSH_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
# What is timed, per candidate and row: seconds, and the least and most repeats.
BUDGET = {"cuda": (0.2, 20, 100), "cpu": (0.5, 5, 50)}
QUICK_BUDGET = {"cuda": (0.02, 10, 20), "cpu": (0.05, 3, 10)}


@dataclasses.dataclass
class Case:
    """One shape. `inputs(device, dtype)` draws the random inputs, those with requires_grad being
    the ones whose gradients the backward pass computes; they are passed before `kwargs`."""

    name: str
    inputs: Callable
    kwargs: dict = dataclasses.field(default_factory=dict)
    #: of the forward pass; the backward pass does as many per gradient. None: count bytes instead.
    flops: int | None = None
    #: too slow for a CPU
    gpu_only: bool = False
    #: leave the caches as they are between repeats
    warm: bool = False
    #: the floor of the tolerance rule
    ulps: float = 4

    def floor(self, dtype_name):
        """The floor for one dtype. TF32 rounds to 10 bits; stock may compute in fp32 even so."""
        return max(self.ulps, 2**13) if dtype_name == "tf32" else self.ulps


@dataclasses.dataclass
class Benchmark:
    """An op: both implementations, called as ``fn(*inputs, **kwargs)``, and the cases."""

    op: str
    braze: Callable
    stock: Callable
    cases: list
    dtypes: tuple = ("float32", "bfloat16")
    layouts: tuple = ("contiguous",)
    passes: tuple = ("forward", "backward")
    #: what backward reads beside the gradient of the output: "inputs", "output" or None
    saved: str | None = "inputs"
    #: makes (fn, inputs, kwargs) a function of no arguments; None: calls fn
    bind: Callable | None = None
    #: raises AssertionError if the implementations disagree: (braze, stock, inputs, kwargs)
    check: Callable | None = None


def in_layout(tensors, layout):
    """The 4-D tensors in channels_last if `layout` says so, leaves again; others as they are."""
    if layout == "contiguous":
        return tensors
    return [
        t.detach().to(memory_format=torch.channels_last).requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.dim() == 4
        else t
        for t in tensors
    ]


def set_precision(dtype_name):
    precision = "tf32" if dtype_name == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision


def check_same_result(benchmark, inputs, kwargs, ulps=4):
    """Raises AssertionError unless braze is as accurate as stock, in results and gradients."""
    if benchmark.check:
        benchmark.check(benchmark.braze, benchmark.stock, inputs, kwargs)
        return

    tries_all = torch.backends.cudnn.benchmark

    def stock(*args):
        # The float64 reference would take minutes. (Stock itself has to try all algorithms here
        # already: torch keeps the first choice for a shape.)
        torch.backends.cudnn.benchmark = tries_all and args[0].dtype != torch.float64
        return benchmark.stock(*args, **kwargs)

    try:
        check_against_stock(lambda *args: benchmark.braze(*args, **kwargs), stock, inputs, ulps)
    finally:
        torch.backends.cudnn.benchmark = tries_all


def bind_pass(benchmark, fn, pass_name, inputs, kwargs):
    """A function of no arguments that runs one pass of `fn`."""
    if benchmark.bind:
        return benchmark.bind(fn, inputs, kwargs)
    if pass_name == "forward":
        return lambda: fn(*inputs, **kwargs)
    out = fn(*inputs, **kwargs)
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


class CudaTimer:
    """Times CUDA-graph replays with events, so that what is compared is the kernels."""

    def __init__(self, device):
        self.device = device
        self.scratch = torch.empty(FLUSH_BYTES["cuda"], dtype=torch.int8, device=device)
        self.stream = torch.cuda.Stream(device)
        self.one = torch.zeros(1, device=device)
        with torch.cuda.device(device):
            self.floor = self.capture(lambda: lambda: self.one.add_(1))

    def capture(self, make, warmups=3):
        """Captures what `make()` returns. Backward runs on the stream of its forward, so `make`
        itself is called on the stream of the capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            fn = make()
            for _ in range(warmups):
                fn()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            kept = fn()  # the results' memory belongs to the graph
        return graph, kept, fn

    def time_once(self, candidate, warm):
        if not warm:
            self.scratch.zero_()
        # Keeps the GPU busy while the CPU enqueues the rest: launch latency stays out.
        torch.cuda._sleep(40_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        candidate[0].replay()
        end.record()
        return start, end

    def microseconds(self, measurements):
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in measurements]


class CpuTimer:
    """Times calls by the wall clock, so that what is compared includes the calls' overhead."""

    floor = None

    def __init__(self, device):
        self.scratch = torch.empty(FLUSH_BYTES["cpu"], dtype=torch.int8)

    def capture(self, make, warmups=1):
        fn = make()
        for _ in range(warmups):
            fn()
        return fn

    def time_once(self, candidate, warm):
        if not warm:
            self.scratch.zero_()
        start = time.perf_counter()
        candidate()
        return time.perf_counter() - start

    def microseconds(self, measurements):
        return [seconds * 1e6 for seconds in measurements]


_timers = {}


def timer_for(device):
    if device not in _timers:
        _timers[device] = (CudaTimer if device.type == "cuda" else CpuTimer)(device)
    return _timers[device]


def interleaved(timer, makers, device, warm=False, quick=False, budget=None):
    """Times the candidates in turn, again and again, in an order that is drawn anew every time.

    What ran before leaves its mark: on the clock, which power limits, and in the instruction cache,
    where a second candidate that runs the same kernel finds it.

    Args:
        makers: name -> function that makes the function to time.
        budget: in the place of BUDGET's entry for the device.

    Returns:
        name -> (median, 20th percentile, 80th percentile) in microseconds.
    """
    candidates = {name: timer.capture(make) for name, make in makers.items()}
    if timer.floor is not None:
        candidates["floor"] = timer.floor
    seconds, least, most = budget or (QUICK_BUDGET if quick else BUDGET)[device.type]
    once = {}
    for name, candidate in candidates.items():
        once[name] = max(1.0, timer.microseconds([timer.time_once(candidate, warm)])[0])
    repeats = int(min(most, max(least, seconds * 1e6 / max(once.values()))))
    # A very slow one (the first rungs of a ladder) drops out when it has had ten times its share.
    enough = {name: max(3, 10 * seconds * 1e6 / us) for name, us in once.items()}
    measured = {name: [] for name in candidates}
    order, draw = list(candidates), random.Random(0)
    for i in range(repeats):
        draw.shuffle(order)
        for name in order:
            if i < enough[name]:
                measured[name].append(timer.time_once(candidates[name], warm))
    summary = {}
    for name, measurements in measured.items():
        times = timer.microseconds(measurements)
        quintiles = statistics.quantiles(times, n=5, method="inclusive")
        summary[name] = (statistics.median(times), quintiles[0], quintiles[-1])
    return summary


def work(benchmark, case, pass_name, inputs, out):
    """What a pass has to do at least: (amount, unit of its rate per second, scale of the unit)."""
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if case.flops:
        return case.flops * (1 if pass_name == "forward" else len(wanted[:2])), "TFLOP/s", 1e12
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    if pass_name == "forward":
        touched = [*tensors, out]
    else:
        saved = {"inputs": tensors, "output": [out], None: []}[benchmark.saved]
        touched = [out, *wanted, *saved]
    return sum(t.numel() * t.element_size() for t in touched), "GB/s", 1e9


def new_row(benchmark, case, pass_name, dtype_name, layout):
    row = dict.fromkeys(COLUMNS, "")
    row |= {"op": benchmark.op, "case": case.name, "pass": pass_name, "dtype": dtype_name}
    return row | {"layout": layout, "cache": "warm" if case.warm else "cold"}


def fill(row, braze, stock, amount, unit, scale):
    row |= dict(zip(("braze_us", "braze_p20", "braze_p80"), map(rounded, braze), strict=True))
    row |= dict(zip(("stock_us", "stock_p20", "stock_p80"), map(rounded, stock), strict=True))
    row["ratio"] = f"{stock[0] / braze[0]:.2f}"
    row["rate"] = f"{amount / (braze[0] * 1e-6) / scale:.4g}"
    row["unit"] = unit


def rounded(us):
    return f"{us:.4g}" if us < 1000 else f"{us:.0f}"


def cells(benchmark, device, args):
    """The (case, dtype, layout) combinations to run."""
    wanted = [c for c in benchmark.cases if any(part in c.name for part in args.case or [""])]
    for case in wanted[:1] if args.quick else wanted:
        if case.gpu_only and device.type == "cpu":
            continue
        for dtype_name in args.dtype or benchmark.dtypes:
            if dtype_name not in benchmark.dtypes and not args.dtype:
                continue
            if dtype_name == "tf32" and device.type == "cpu":
                continue
            for layout in benchmark.layouts:
                yield case, dtype_name, layout


def run_benchmark(benchmark, device, args):
    """Yields a row per case, dtype, layout and pass."""
    timer = timer_for(device)
    torch.backends.cudnn.benchmark = True
    for case, dtype_name, layout in cells(benchmark, device, args):
        set_precision(dtype_name)
        torch.manual_seed(0)
        inputs = in_layout(case.inputs(device, DTYPES[dtype_name]), layout)
        error = None
        try:
            check_same_result(benchmark, inputs, case.kwargs, case.floor(dtype_name))
        except (AssertionError, RuntimeError) as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0]
        for pass_name in benchmark.passes:
            row = new_row(benchmark, case, pass_name, dtype_name, layout)
            if error:
                row["error"] = error
                yield row
                continue
            functions = {"braze": benchmark.braze, "stock": benchmark.stock}
            if args.compile:
                functions["compile"] = torch.compile(benchmark.stock, fullgraph=True)
            makers = {
                name: functools.partial(bind_pass, benchmark, fn, pass_name, inputs, case.kwargs)
                for name, fn in functions.items()
            }
            if device.type == "cuda":
                makers["braze"] = by_rules(makers["braze"])
            times = interleaved(timer, makers, device, case.warm, args.quick)
            if benchmark.bind:
                amount = work(benchmark, case, "forward", inputs, inputs[0])
            else:
                amount = work(
                    benchmark, case, pass_name, inputs, benchmark.stock(*inputs, **case.kwargs)
                )
            fill(row, times["braze"], times["stock"], *amount)
            if args.compile:
                row["compile_us"] = rounded(times["compile"][0])
            if "floor" in times:
                row["floor_us"] = rounded(times["floor"][0])
            yield row
