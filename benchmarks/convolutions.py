"""``python -m braze bench convolutions``: every distinct convolution of networks that people train,
pass by pass, beside the best of cuDNN's engines and of torch.

Same memory format in and out, cold caches, at most 2 GiB of workspace on both sides. A rival whose
error breaks the tolerance rule does not count. On a CPU, which has no cuDNN, batches are of 16.
"""

import contextlib
import functools
import math
import os
import time

import torch

from benchmarks import conv_rivals
from benchmarks.candidates import fastest, screen, shipped
from benchmarks.conv_passes import LAYOUTS, PASSES, own_pass, torch_pass
from benchmarks.convolution_cases import BATCHES, cases
from benchmarks.harness import DTYPES, interleaved, rounded, set_precision, timer_for
from benchmarks.results import ENVIRONMENT
from braze import _tuned, tuning
from braze._problems import Convolution
from braze.testing import assert_by_rule

#: Seconds per candidate, and the least and most repeats of a pass.
BUDGET = {"cuda": (0.02, 11, 40), "cpu": (0.05, 3, 20)}
QUICK_BUDGET = {"cuda": (0.005, 7, 11), "cpu": (0.02, 3, 5)}
#: about, for each pass of a table of tuned choices
TUNING_SECONDS = 0.5
#: Multiplications and additions; more are left out on a CPU.
CPU_LIMIT = 1 << 36
#: what a network is timed at on a CPU, unless the command line says
CPU_BATCHES = (16,)
#: More, and `direct` is not tried, but for first layers and depthwise ones: it would take seconds.
DIRECT_LIMIT = 1 << 34
#: A second kernel of ours is timed beside the rest if it takes no more than this times the first.
CLOSE = 1.3
#: of cuDNN and of torch: what cuDNN's environment variable takes, in MiB
WORKSPACE = {"CUDNN_CONV_WSCAP_DBG": "2048"}
#: Images, channels and filters that a result is compared in; the float64 reference is of these.
IMAGES, CHANNELS, GROUPS = 3, 16, 8

#: cuDNN's own, which "auto" takes where it takes none of ours
FAVOURITE = "cudnn:0"

TIMED = ("own", "auto", "vendor", "second")
#: of a row, in which no two rows agree; a later run's row replaces an earlier one's
KEY = ("case", "pass", "dtype", "layout")
COLUMNS = [
    *("op", "networks", "kind", *KEY),
    *(f"{name}_{part}" for name in TIMED for part in ("us", "p20", "p80")),
    # Which of ours was the fastest, and what a quick look took each for; what "auto" ran.
    *("own_name", "own_kernels", "auto_name", "vendor_name", "second_name"),
    # best vendor / best own; the fastest of all / "auto"
    *("ratio", "auto_ratio", "best_us", "rate", "unit", "floor_us"),
    *("vendor_error", "cache", "error", *ENVIRONMENT),
]


class Problem:
    """One pass of a case in a precision and a layout, with its tensors on the device."""

    def __init__(self, case, pass_name, dtype_name, layout, device):
        self.case, self.pass_name, self.dtype_name, self.layout = (
            case,
            pass_name,
            dtype_name,
            layout,
        )
        self.device, self.tf32 = device, dtype_name == "tf32"
        self.geometry = [case.stride] * 2, list(case.padding), [case.dilation] * 2
        images = case.n, case.c, case.h, case.w
        filters = case.k, case.c // case.groups, case.r, case.s
        self.tensors = [self.randn(*s) for s in (images, filters, (case.n, case.k, *case.out_size))]

    def randn(self, *shape):
        values = torch.randn(shape, device=self.device).to(DTYPES[self.dtype_name])
        return values.to(memory_format=LAYOUTS[self.layout])

    @property
    def key(self):
        return self.case.name, self.pass_name, self.dtype_name, self.layout

    @property
    def terms(self):
        """Of each sum."""
        p, q = self.case.out_size
        taps = self.case.r * self.case.s
        of_pass = {"fprop": self.case.c * taps, "dgrad": self.case.k * taps}
        return of_pass.get(self.pass_name, self.case.n * p * q)

    def own(self, backend="auto"):
        what = self.geometry, self.case.groups, self.pass_name
        return own_pass(*what, *self.tensors, self.tf32, backend)

    def stock(self, tensors=None, groups=None):
        what = self.geometry, groups or self.case.groups, self.pass_name
        return torch_pass(*what, *(tensors or self.tensors))

    def tried(self, call):
        """`call` with the fastest of what torch tries. On a CPU it has one choice, and the setting
        takes as long as a small convolution."""
        if self.device.type == "cpu":
            return call

        def best():
            with torch_settings(benchmark=True):
                return call()

        return best

    def by_torch(self):
        return self.tried(self.stock())

    def by_torch_elsewhere(self):
        """In the other memory format, transposed on the way in and out."""
        here = LAYOUTS[self.layout]
        (there,) = (form for name, form in LAYOUTS.items() if name != self.layout)
        reads = {"fprop": (0, 1), "dgrad": (1, 2), "wgrad": (0, 2)}[self.pass_name]
        # Of a gradient, what it is of says which format it is wanted in.
        result = {"dgrad": 0, "wgrad": 1}.get(self.pass_name)

        def call():
            tensors = list(self.tensors)
            for i in reads:
                tensors[i] = tensors[i].contiguous(memory_format=there)
            if result is not None:
                tensors[result] = torch.empty_like(tensors[result], memory_format=there)
            return self.stock(tensors)().contiguous(memory_format=here)

        return self.tried(call)

    def sample(self):
        """(The part's result in float64, a function that takes this part of a result.)

        Images do not depend on each other, nor do pairs of channels and filters of a gradient.
        """
        case, (x, w, dy) = self.case, (t.detach() for t in self.tensors)
        groups = case.groups
        if self.pass_name != "wgrad":
            images = some(case.n, IMAGES, self.device)
            part = [x[images], w, dy[images]]

            def of(result):
                return result[images]
        elif groups == 1:
            channels, filters = (some(n, CHANNELS, self.device) for n in (case.c, case.k))
            part = [x[:, channels], w[filters][:, channels], dy[:, filters]]

            def of(result):
                return result[filters][:, channels]
        else:
            groups = min(groups, GROUPS)
            channels, filters = (n // case.groups * groups for n in (case.c, case.k))
            part = [x[:, :channels], w[:filters], dy[:, :filters]]

            def of(result):
                return result[:filters]

        part = [t.double() for t in part]
        if self.device.type == "cpu" and case.kind == "large filter":
            # torch writes the patches down: gigabytes.
            what = self.geometry, groups, self.pass_name, *part, False
            return own_pass(*what, "implicit_gemm")(), of
        with torch_settings(benchmark=False):
            return self.stock(part, groups)(), of

    def checker(self):
        """A function that says why a function's result is not accepted, or ""."""
        reference, of = self.sample()
        # torch keeps its first choice for a problem, unless it has to be a deterministic one.
        with torch_settings(benchmark=False, deterministic=True):
            stock = of(self.stock()())
        ulps = 2**13 if self.tf32 else 8

        def error_of(function):
            try:
                assert_by_rule(of(function()), stock, reference, ulps, terms=self.terms)
            except (AssertionError, RuntimeError) as problem:
                return f"{type(problem).__name__}: {problem}".splitlines()[0]
            return ""

        return error_of


def some(count, most, device):
    """Up to `most` indices below `count`, the first and the last among them."""
    if count <= most:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, most, device=device).round().long()


@contextlib.contextmanager
def torch_settings(benchmark, deterministic=False):
    """torch's choice among cuDNN's engines within. `benchmark` is off outside, so that "auto" too
    follows its rules."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def own_names(problem, only=()):
    """Our kernels that are worth a try; of these, if there are any, those in `only`."""
    names = shipped("conv2d", problem.device, DTYPES[problem.dtype_name])
    # By name on a GPU too, and not for all the others, which it has no chance at.
    names = [name for name in names if name != "fft"]
    if problem.case.kind == "large filter":
        names.append("fft")
    if only:
        return [name for name in names if name in only]
    is_hopeless = problem.case.flops > DIRECT_LIMIT
    if is_hopeless and problem.case.kind not in ("first layer", "depthwise"):
        return [name for name in names if name != "direct"]
    return names


def own_maker(problem, name):
    return functools.partial(problem.own, name)


def what_ran(problem, times, us):
    """Which of `times` (name -> microseconds) give the bits that "auto" gives, the one first that
    takes as long as that, `us`."""
    expected = own_maker(problem, "auto")()()
    alike = [name for name in times if torch.equal(own_maker(problem, name)()(), expected)]
    return sorted(alike, key=lambda name: abs(math.log(times[name] / us)))


def time_problem(problem, recorded, quick=False, engines=conv_rivals.ENGINES, only=()):
    """(The row of a pass, the rivals' rows if they were measured anew.)

    Args:
        recorded: the names of the rivals that are known to be the best, the best first, or None.
        only: as in :func:`own_names`.
    """
    timer, device = timer_for(problem.device), problem.device
    error_of = problem.checker()
    rows = []
    if recorded is None:
        rows = conv_rivals.measured(problem, timer, error_of, engines)
        recorded = conv_rivals.best_of(rows)
    screened = screen(timer, {name: own_maker(problem, name) for name in own_names(problem, only)})
    rivals = conv_rivals.makers(problem, recorded)
    # The fastest of ours whose results are right. Called again and again they find their own code
    # in the caches, which helps one more than another: in turn with the rest they do not.
    errors, close = {}, []
    for name in fastest(screened, len(screened)):
        if len(close) == 2 or (close and screened[name] > CLOSE * screened[close[0]]):
            break
        errors[name] = error_of(own_maker(problem, name)())
        if not errors[name]:
            close.append(name)
    errors["auto"] = error_of(own_maker(problem, "auto")())
    ours = [*close, *(["auto"] if not errors["auto"] else [])]
    makers = {name: own_maker(problem, name) for name in ours} | rivals
    budget = (QUICK_BUDGET if quick else BUDGET)[device.type]
    times = interleaved(timer, makers, device, budget=budget)
    own = min(close, key=lambda name: times[name][0], default=None)

    row = dict.fromkeys(COLUMNS, "") | {"op": "convolutions", "kind": problem.case.kind}
    row |= dict(zip(KEY, problem.key, strict=True)) | {"cache": "cold"}
    row["error"] = "; ".join(f"{name}: {why}" for name, why in errors.items() if why)
    row["vendor_error"] = "; ".join(f"{r['rival']}: {r['error']}" for r in rows if r["error"])
    row["own_kernels"] = "; ".join(
        f"{name} {rounded(screened[name])}" for name in fastest(screened, len(screened))
    )
    row |= {"floor_us": rounded(times["floor"][0])} if "floor" in times else {}
    # Of the recorded two, the one that is faster today comes first.
    best_rivals = sorted(rivals, key=lambda name: times[name][0])[:2]
    shown = dict(zip(TIMED, (own, "auto", *best_rivals), strict=False))
    for column, name in shown.items():
        if name in times:
            parts = zip(("us", "p20", "p80"), map(rounded, times[name]), strict=True)
            row |= {f"{column}_{part}": value for part, value in parts}
        if column != "auto":
            row[f"{column}_name"] = name or ""
    vendor = shown.get("vendor")
    candidates = [times[name][0] for name in (own, vendor) if name]
    if candidates:
        row["best_us"] = rounded(min(candidates))
    if own and vendor:
        row["ratio"] = f"{times[vendor][0] / times[own][0]:.4g}"
    if own:
        row |= {"rate": f"{problem.case.flops / times[own][0] / 1e6:.4g}", "unit": "TFLOP/s"}
    if candidates and "auto" in ours:
        row["auto_ratio"] = f"{min(candidates) / times['auto'][0]:.4g}"
        library = FAVOURITE if device.type == "cuda" else "torch"
        favourite = screen(timer, {library: own_maker(problem, library)})
        row["auto_name"] = " or ".join(what_ran(problem, screened | favourite, times["auto"][0]))
    return row, rows


def wanted(device, args):
    """(case, networks, dtype, layout, pass), as the command line has it."""
    dtypes = args.dtype or (["float32"] if device.type == "cpu" else ["bfloat16"])
    usual = CPU_BATCHES if device.type == "cpu" else BATCHES
    for dtype_name in dtypes:
        for case, networks in cases(args.network or (), args.batch or (), usual).items():
            if not any(part in case.name for part in args.case or [""]):
                continue
            if device.type == "cpu" and (dtype_name == "tf32" or case.flops > CPU_LIMIT):
                continue
            for layout in args.layout or ["channels_last"]:
                for pass_name in PASSES:
                    if pass_name in case.passes and pass_name in (args.passes or PASSES):
                        yield case, networks, dtype_name, layout, pass_name


def run(device, args):
    """Yields a row per case, precision, layout and pass.

    The rivals of what is measured for the first time with these versions are kept beside the
    results.
    """
    torch.backends.cudnn.benchmark = False
    for name, value in WORKSPACE.items():
        os.environ.setdefault(name, value)  # cuDNN reads it when it is first used
    deadline = time.monotonic() + (args.seconds or float("inf"))
    book = conv_rivals.Book(device, args.results, keep=not args.quick)
    left = 0
    if device.type == "cuda":
        torch.backends.cudnn.benchmark_limit = args.engines
    try:
        for case, networks, dtype_name, layout, pass_name in wanted(device, args):
            if time.monotonic() > deadline:
                left += 1
                continue
            set_precision(dtype_name)
            torch.manual_seed(0)
            try:
                problem = Problem(case, pass_name, dtype_name, layout, device)
                recorded = None if args.anew else book.best(problem.key)
                options = args.quick, args.engines, args.own or ()
                row, rivals = time_problem(problem, recorded, *options)
            except torch.AcceleratorError:  # nothing that follows would work
                raise
            except (
                RuntimeError,
                MemoryError,
            ) as error:  # torch cannot do it, or has no memory for it
                row = dict.fromkeys(COLUMNS, "") | {"op": "convolutions", "kind": case.kind}
                row |= dict(zip(KEY, (case.name, pass_name, dtype_name, layout), strict=True))
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
                rivals = []
            book.add(rivals)
            yield row | {"networks": "; ".join(networks)}
    finally:
        book.save()
    if left:
        print(f"convolutions: {left} more passes were left when {args.seconds:g} s were over")


def tune(device, args):
    """Measures what is the fastest for the same passes, against the rules alone, and adds it to the
    table of tuned choices ``args.tune``, as ``python -m braze tune --built-in`` does."""
    torch.backends.cudnn.benchmark = False
    deadline = time.monotonic() + (args.seconds or float("inf"))
    _tuned.forget()
    found = []
    try:
        for case, _, dtype_name, layout, pass_name in wanted(device, args):
            if time.monotonic() > deadline:
                break
            pairs = *[case.stride] * 2, *case.padding, *[case.dilation] * 2
            extents = case.n, case.c, case.h, case.w, case.k, case.r, case.s
            problem = Convolution(dtype_name, pass_name, *extents, *pairs, case.groups)
            problem = problem._replace(channels_last=layout == "channels_last")
            try:
                asked = tuning.as_asked(problem, device)
                result = tuning.tune_product(device, asked, seconds=TUNING_SECONDS)
            except torch.OutOfMemoryError as error:
                print(f"{problem}: {error}".splitlines()[0])
                continue
            print(
                f"{asked} {dtype_name}: {result.before:.4g} us, {result.choice} {result.after:.4g}"
            )
            found.append(result)
    finally:
        tuning.save_results(found, args.tune)
    changed = sum(result.choice != "auto" for result in found)
    print(f"{changed} of {len(found)} passes have a choice: {args.tune}")


def line(row):
    """A row for the terminal."""
    what = f"{row['case']} {row['pass']} {row['dtype']} {row['layout']}"
    text = (
        f"{what:<66} own {row['own_us']:>6} {row['own_name']:<18} vendor {row['vendor_us']:>6} "
        f"{row['vendor_name']:<9} {row['ratio']:>6}x  auto {row['auto_us']:>6} {row['auto_name']} "
        f"{row['auto_ratio']}"
    )
    return f"{text} {row['error']}".rstrip()
