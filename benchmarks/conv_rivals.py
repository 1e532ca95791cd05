"""What convolutions are compared with: cuDNN's engines by name, and torch in either memory format,
each with the fastest of what it tries.

To time all of them takes long. So it is done once per GPU and versions, and kept in a CSV beside
the results; later runs time the best two of each pass again, beside braze.
"""

import functools
from pathlib import Path

from benchmarks import results
from benchmarks.candidates import fastest, screen, vendor_names
from benchmarks.harness import rounded

NAME = "convolutions_rivals"
KEY = ("case", "pass", "dtype", "layout")
COLUMNS = [*KEY, "rival", "us", "error", *results.ENVIRONMENT]
#: what a recorded reading depends on; the driver and the clocks change all rivals alike
VERSIONS = ("device", "torch", "cudnn")
#: how many of cuDNN's engines are tried: it lists the best first
ENGINES = 8
#: how many rivals are timed beside braze
BEST = 2
TORCH, ELSEWHERE = "torch", "torch, transposed"


def makers(problem, names):
    """name -> function that makes the function to time."""
    of_torch = {TORCH: problem.by_torch, ELSEWHERE: problem.by_torch_elsewhere}
    return {name: of_torch.get(name) or functools.partial(problem.own, name) for name in names}


def measured(problem, timer, error_of, engines=ENGINES):
    """A row per rival, the fastest first. Those that are fast enough to matter are checked, and so
    is torch, whose choice users get."""
    cudnn = vendor_names("conv2d")[:engines] if problem.device.type == "cuda" else []
    every = makers(problem, [*cudnn, TORCH, ELSEWHERE])
    times = screen(timer, every)
    rows, right = [], 0
    for name in fastest(times, len(times)):
        error = ""
        if right < BEST or name == TORCH:
            error = error_of(every[name]())
            right += not error
        row = dict.fromkeys(COLUMNS, "") | dict(zip(KEY, problem.key, strict=True))
        rows.append(row | {"rival": name, "us": rounded(times[name]), "error": error})
    return rows


def best_of(rows):
    """The names of the best rivals that are right."""
    return [row["rival"] for row in rows if not row["error"]][:BEST]


class Book:
    """The recorded rivals of one device: those of the checkout, and of the folder that a run's
    results go to, where it has any."""

    def __init__(self, device, folder, keep):
        self.device, self.folder, self.keep = device, folder or results.CHECKOUT, keep
        self.here = {k: str(v) for k, v in results.environment(device).items() if k in VERSIONS}
        self.rows, self.new = {}, []
        for place in dict.fromkeys((results.CHECKOUT, Path(self.folder))):
            found = {}
            for row in results.load(place, NAME):
                if all(row[k] == self.here[k] for k in VERSIONS):
                    found.setdefault(tuple(row[k] for k in KEY), []).append(row)
            self.rows |= found

    def best(self, key):
        """The names of the best two, or None where the pass was not recorded."""
        return best_of(self.rows[key]) if key in self.rows else None

    def add(self, rows):
        self.new += rows

    def save(self):
        if self.new and self.keep:
            results.save(self.folder, self.device, NAME, self.new, replaces=KEY)
