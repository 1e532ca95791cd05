"""What the tests of tuning share."""

import torch

import braze
from braze import _tuned, tuning
from braze._tuned import Product

# A kernel that both devices have and that neither would choose; it adds in an order of its own, so
# that the bits of a long sum show that it ran.
RUNG = "01_naive"
PRODUCT = Product("float32", 1, 16, 16, 3000)


def index_of(device):
    return -1 if device == "cpu" else torch.cuda.current_device()


def place(device):
    return _tuned.place_of(index_of(device))


def factors(device, dtype=torch.float32):
    """The operands of PRODUCT."""
    a, b = torch.randn(16, 3000, device=device), torch.randn(3000, 16, device=device)
    return a.to(dtype), b.to(dtype)


def by_name(name, a, b):
    with braze.backend(matmul=name):
        return braze.matmul(a, b)


def good_kernel(device):
    """A shipped kernel that takes fp32."""
    return "blocked" if device == "cpu" else "simt"


def timed(monkeypatch, times):
    """Lets tuning find these times: name -> microseconds. Returns the names that it compared."""
    seen = []

    def compete(timer, functions, baseline, seconds):
        seen.extend(functions)
        return {name: [us] * 4 for name, us in times.items() if name in functions}

    monkeypatch.setattr(tuning, "compete", compete)
    # The rung's long sums round more than the tolerance rule allows.
    monkeypatch.setitem(tuning._ULPS, "float32", 64)
    return seen
