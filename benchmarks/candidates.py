"""Kernels and vendor algorithms of one product or convolution, and a quick look at which is fast.

A problem has up to 32 vendor algorithms. A few repeats of each tell the slow ones apart; the best
few are then timed properly, interleaved with everything else (:func:`fastest`).
"""

import statistics

import torch

import braze
from braze import _lib

#: op -> its vendor library
VENDORS = {"matmul": "cublas", "conv2d": "cudnn"}
#: the most algorithms that a vendor library is asked for
MOST = _lib.limits["library_candidates"]
# Repeats per candidate of a quick look, and the microseconds after which there are no more.
REPEATS, ENOUGH_US = 5, 50_000


def under(op, name, make):
    """`make`, and what it returns, run under ``braze.backend(op=name)``."""

    def made():
        with braze.backend(**{op: name}):
            fn = make()

        def call():
            with braze.backend(**{op: name}):
                return fn()

        return call

    return made


def by_rules(make):
    """`make`, and what it returns, run with torch.backends.cudnn.benchmark off: under it "auto"
    would measure convolutions."""

    def without_flag(function):
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
        try:
            return function()
        finally:
            torch.backends.cudnn.benchmark = before

    def made():
        call = without_flag(make)
        return lambda: without_flag(call)

    return made


def vendor_names(op):
    """The backend strings of all the vendor's algorithms; which exist depends on the problem."""
    return [f"{VENDORS[op]}:{i}" for i in range(MOST)]


def screen(timer, makers):
    """Times each candidate a few times, cold; those that a problem does not have are left out.

    Args:
        makers: name -> function that makes the function to time.

    Returns:
        name -> microseconds, in the order of `makers`.
    """
    found = {}
    for name, make in makers.items():
        try:
            candidate = timer.capture(make, warmups=1)
        except (RuntimeError, MemoryError):  # no such algorithm, or it refuses these operands
            continue
        us = timer.microseconds([timer.time_once(candidate, False)])[0]
        # One that is far behind stays so.
        if us < 2 * min(found.values(), default=us):
            repeats = int(min(REPEATS, max(1, ENOUGH_US / max(1.0, us))))
            times = [timer.time_once(candidate, False) for _ in range(repeats)]
            us = statistics.median(timer.microseconds(times))
        found[name] = us
    return found


def fastest(times, count=1):
    """The names of the `count` shortest times, the best one first."""
    return sorted(times, key=times.get)[:count]


def shipped(op, device, dtype):
    """The names of our own shipped kernels for a dtype on a type of device."""
    on_cpu = device.type == "cpu"
    dtype = str(dtype).removeprefix("torch.")
    return [
        kernel["name"]
        for kernel in braze.kernels(op)
        if kernel["shipped"]
        and (kernel["arch"] == "cpu") == on_cpu
        and dtype in kernel["dtypes"].split()
    ]
