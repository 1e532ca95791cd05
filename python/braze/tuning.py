"""Measures which kernel is the fastest for each product and convolution: ``braze.tune``."""

import contextlib
import gc
import statistics
import threading
import time
from typing import NamedTuple

import torch

from braze import _config, _lib, _tuned, _tuning_conv2d
from braze._problems import KINDS, Convolution, Product
from braze._timing import compete, timer_for

# By how much a choice has to be faster than what "auto" would do without it.
_LEAST_GAIN, _LEAST_MICROSECONDS = 0.02, 0.2
# And in which share of the repeats: two kernels that are equal win half of them each.
_LEAST_WINS = 0.75
# The floor of the tolerance rule, in units of the last place. TF32 rounds inputs to 10 bits.
_ULPS = {"tf32": 2**13}
# How much slower than the present choice a candidate may be to be timed at all, besides seconds of
# setting up.
_MOST_TIMES, _SETUP_SECONDS = 20, 0.2
# The share of a problem's time that trying and checking the candidates may take.
_SHARE_OF_CHECKS = 0.6

_lock = threading.Lock()  # recording is global


class Tuned(NamedTuple):
    """What tuning one product, or one pass of a convolution, found: `before` and `after` are
    microseconds, `choice` is what ``braze.backend(matmul=...)`` (``conv2d=...``) takes; "auto"
    where nothing was faster."""

    device: torch.device
    product: Product | Convolution
    before: float
    after: float
    choice: str


def tune(fn, *args, candidates=None, seconds=1.0, save=True):
    """Finds the fastest kernel for every matrix product and convolution that ``fn(*args)`` makes
    braze compute.

    Calls ``fn(*args)`` once and takes down the products of :func:`braze.matmul` and ``linear``, and
    the passes of ``conv2d``, forward and backward, for which ``"auto"`` would choose. For each,
    every kernel and up to 32 of cuBLASLt's algorithms (cuDNN's engines) compute random tensors of
    that shape and layout. The fastest one becomes what ``"auto"`` chooses, at once and in later
    processes, if it is as accurate as the present choice, and at least 2 % and 0.2 us faster. Steps
    that were captured in a CUDA graph keep their kernels; :class:`braze.TrainStep` captures its
    steps anew.

    Measured choices are ignored under ``torch.use_deterministic_algorithms(True)``: they may differ
    from one machine or process to the next.

    Args:
        fn: for example a training step. It is called with `args`.
        candidates: measure only these, as ``braze.backend(matmul=..., conv2d=...)`` takes them.
        seconds: about how long each product or pass may take.
        save: keep the choices in the user's cache, by GPU, the libraries' versions and braze's.

    Returns:
        A list of ``Tuned(device, product, before, after, choice)``, one for each product, then one
        for each pass of a convolution.

    Raises:
        RuntimeError: the current stream is being captured in a CUDA graph.
        TypeError, ValueError: of the arguments.
        OSError: the choices, though effective, could not be saved.
    """
    if not callable(fn):
        raise TypeError(f"tune: expected fn to be callable, but got {type(fn).__name__}")
    if not seconds > 0:
        raise ValueError(f"tune: expected seconds to be positive, but got {seconds}")
    if isinstance(candidates, str):
        raise TypeError("tune: expected candidates to be a list of names, but got a str")
    for choice in candidates or ():
        if not _config.is_choice("conv2d", choice):
            _config.check_choice("tune", "matmul", choice)
        if choice in ("auto", "braze", "benchmark"):
            raise ValueError(f"tune: expected candidates to be single kernels, but got {choice!r}")
    refuse_capture()
    if not _lock.acquire(blocking=False):
        raise RuntimeError("tune: another call has not finished yet")
    try:
        results = [
            tune_product(device, product, candidates, seconds)
            for device, product in products_of(fn, *args)
        ]
    finally:
        _lock.release()
    if save:
        save_results(results)
    return results


def refuse_capture():
    """Raises RuntimeError while the current stream is captured: timing would be recorded."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tune: the current stream is being captured in a CUDA graph; call it before the capture"
        )


def products_of(fn, *args):
    """The (device, Product or Convolution) pairs that ``fn(*args)`` asks for, each once."""
    libraries = [library for library in (_lib.ops_library, _lib.cuda_library) if library]
    for library in libraries:
        library.record(True)
    try:
        fn(*args)
    finally:
        for library in libraries:
            library.record(False)
    found = [
        kind.from_words(words)
        for kind in KINDS
        for library in libraries
        for words in library.recorded(kind.op)
    ]
    return [(_device(index), product) for index, product in found]


def as_asked(problem, device):
    """The problem that operands made up for `problem` ask for: of two whose operands are the same
    memory one is the one in the tables. None where braze has nothing to choose."""
    asked = products_of(bound(problem, operands(problem, device)), "auto")
    return asked[0][1] if asked else None


def save_results(results, path=None):
    """Adds the choices to the user's cache, or to the table at `path`, where problems for which
    nothing is faster than the rules lose the choice that they had."""
    by_device = {}
    for result in results:
        by_device.setdefault(result.device, []).append(result)
    for device, group in by_device.items():
        place = _tuned.place_of(_index(device))
        rows = {r.product: _row(r) for r in group if path is not None or r.choice != "auto"}
        if rows:
            _tuned.write(path or place.user_file(), place, rows)


def _row(result):
    if result.choice == "auto":
        return None
    us = [round(result.before, 2), round(result.after, 2)]
    return {"choice": result.choice, "us": us}


def tune_product(device, product, candidates=None, seconds=1.0):
    """Measures a product or a pass, makes its choice effective; returns a :class:`Tuned`."""
    index = _index(device)
    context = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with context, torch.no_grad(), torch.autocast(device.type, enabled=False), _no_collection():
        matrices = operands(product, device)
        run = bound(product, matrices)
        names = _names(device, product.op)
        if candidates is not None:
            names = [name for name in candidates if _config.is_choice(product.op, name)]
        reference = _reference(product, matrices)
        usable = _usable(run, names, product, reference, seconds * _SHARE_OF_CHECKS)
        del reference
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what candidates' workspaces have left, no graph could take
        functions = {name: lambda name=name: run(name) for name in ["auto", *usable]}
        rest = seconds * (1 - _SHARE_OF_CHECKS)
        times = compete(timer_for(device), functions, "auto", rest)
    choice = _winner(times)
    if choice != "auto":
        _tuned.put(index, product, choice, True)
    before, after = (statistics.median(times[name]) for name in ("auto", choice))
    return Tuned(device, product, before, after, choice)


def _winner(times):
    """The fastest one, or "auto" where that is not faster by far enough to be sure."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    best, before = min(medians, key=medians.get), medians["auto"]
    pairs = list(zip(times[best], times["auto"], strict=True))
    wins = sum(ours < theirs for ours, theirs in pairs) / len(pairs)
    needed = max(_LEAST_GAIN * before, _LEAST_MICROSECONDS)
    return best if before - medians[best] >= needed and wins >= _LEAST_WINS else "auto"


def _device(index):
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def _index(device):
    return -1 if device.type == "cpu" else device.index


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _no_collection():
    """No garbage collection: destroying somebody's CUDA graph would break the timer's capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def operands(product, device):
    """Random A, B and bias (or None), in memory as the product has them; of a convolution what
    :mod:`braze._tuning_conv2d` says."""
    if isinstance(product, Convolution):
        return _tuning_conv2d.operands(product, device)
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if product.dtype == "tf32" else getattr(torch, product.dtype)

    def matrix(rows, cols, column_major, shared, aligned):
        vectors, length = (cols, rows) if column_major else (rows, cols)
        count = 1 if shared else product.batch
        grain = 16 // dtype.itemsize
        stride = -(-length // grain) * grain if aligned else length
        # Strides that are odd enough are as good as an odd address.
        offset = int(not aligned and (stride % grain == 0 or count * vectors == 1))
        memory = torch.randn(
            count * vectors * stride + offset, generator=generator, device=device, dtype=dtype
        )
        t = memory[offset:].view(count, vectors, stride)[:, :, :length]
        t = t.mT if column_major else t
        return t[0] if product.batch == 1 else t.expand(product.batch, -1, -1)

    m, n, k = product.m, product.n, product.k
    a = matrix(m, k, product.a_column_major, product.a_shared, product.a_aligned)
    b = matrix(k, n, product.b_column_major, product.b_shared, product.b_aligned)
    bias = None
    if product.bias:
        bias = torch.randn(n, generator=generator, device=device, dtype=dtype)
    return a, b, bias


def bound(product, matrices):
    """A function of a backend's name that computes the product of the :func:`operands`."""
    if isinstance(product, Convolution):
        return _tuning_conv2d.bound(product, matrices)
    a, b, bias = matrices
    tf32 = product.dtype == "tf32"
    linear, matmul = torch.ops.braze.linear.default, torch.ops.braze.matmul.default

    def run(backend):
        if product.batch > 1:
            return matmul(a, b, tf32, False, backend)
        return linear(a, b.mT, bias, product.relu, tf32, False, backend)

    return run


def _reference(product, matrices):
    """The product in float64, by torch."""
    if isinstance(product, Convolution):
        return _tuning_conv2d.reference(product, matrices)
    a, b, bias = (t if t is None else t.double() for t in matrices)
    result = torch.matmul(a, b)
    if bias is not None:
        result += bias
    return result.relu_() if product.relu else result


def _names(device, op):
    """All candidates, in the order in which they are tried."""
    library = _tuned.library_of(_index(device))
    names = [k["name"] for k in library.kernels() if k["op"] == op and k["shipped"]]
    if device.type == "cpu":
        return names + _config.backend._ON_CPUS.get(op, [])
    (vendor,) = _config.backend._VENDORS[op]
    if not library.vendor()[vendor]["missing"]:
        names += [f"{vendor}:{i}" for i in range(_lib.limits["library_candidates"])]
    return names


def _usable(run, names, product, reference, seconds):
    """Those of `names` that take the product, as accurately as "auto", as far as time allows."""
    end = time.perf_counter() + seconds

    def timed(name):
        _wait(reference.device)
        start = time.perf_counter()
        result = run(name)
        _wait(reference.device)
        return result, time.perf_counter() - start

    run("auto")  # loads kernels
    present, once = timed("auto")
    largest, error = reference.abs().max(), (present.double() - reference).abs().max()
    floor = _ULPS.get(product.dtype, 4) * torch.finfo(present.dtype).eps
    limit = 2 * error + floor * largest  # as braze.testing.assert_by_rule
    usable = []
    for name in names:
        try:
            result, took = timed(name)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # it does not take these arguments, or there are fewer candidates
            continue
        if took > _MOST_TIMES * once + _SETUP_SECONDS:
            continue
        # Not <= for what is not a number.
        if bool((result.double() - reference).abs().max() <= limit):
            usable.append(name)
        if time.perf_counter() > end:
            break
    return usable
