"""What the examples of `braze.capture` share: a loop, and the rival to time it against.

An example has ``build(device, smoke=False, stock=False)``, which returns a :class:`Loop`. With
`stock` it is the same training without braze, its objective compiled by ``torch.compile``;
``--compare`` puts that in a CUDA graph made by hand, which is the fastest that stock PyTorch has.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import braze


class Loop(NamedTuple):
    """A training loop: ``before(i)`` sets the rates of step `i`, ``function(*batch(i))`` is it."""

    function: Callable  # returns the loss, or a tuple that begins with it
    batch: Callable
    before: Callable
    steps: int
    report: Callable = lambda: ""  # what there is to say at the end


def set_rate(group, rate):
    """Of a parameter group; a graph made by hand reads it from a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def rate_of(rate, device, stock):
    """A learning rate as the optimizer is given it."""
    return torch.tensor(rate, device=device) if stock and device == "cuda" else rate


def train(loop, wrap=braze.capture, steps=None):
    """All steps; returns the losses."""
    function, losses = wrap(loop.function), []
    for i in range(steps or loop.steps):
        loop.before(i)
        result = function(*loop.batch(i))
        losses.append((result[0] if isinstance(result, tuple) else result).detach())
    return torch.stack(losses).tolist()


class StockGraph:
    """A function in CUDA graphs of torch's own, one for each set of arguments that are no tensors.

    The steps before a capture, and what is captured, are steps of the training too: for timing.
    """

    def __init__(self, function, eager_calls=11):
        self.function, self.eager_calls, self.graphs = function, eager_calls, {}

    def __call__(self, *args):
        key = tuple(x for x in args if not isinstance(x, torch.Tensor))
        if key not in self.graphs:
            own = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(self.eager_calls):
                    self.function(*own)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self.function(*own)
            self.graphs[key] = graph, own, result
        graph, own, result = self.graphs[key]
        for mine, given in zip(own, args, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(given)
        graph.replay()
        return result


def compare(build, rounds=7):
    """Times both sides in turns, on a GPU; prints ms per step: minimum, median, maximum."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    sides = {
        "braze.capture": (build("cuda"), braze.capture),
        "stock, compiled, in a CUDA graph": (build("cuda", stock=True), StockGraph),
    }
    ready = {}
    for name, (loop, wrap) in sides.items():
        ready[name] = loop, (function := wrap(loop.function))
        for i in range(loop.steps):  # all kinds of call are captured behind these
            loop.before(i)
            function(*loop.batch(i))
    times = {name: [] for name in ready}
    for _ in range(rounds):
        for name, (loop, function) in ready.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for i in range(loop.steps):
                loop.before(i)
                function(*loop.batch(i))
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / loop.steps)
    for name, found in times.items():
        found.sort()
        print(f"{name}: {found[0]:.3f} / {found[len(found) // 2]:.3f} / {found[-1]:.3f} ms a step")


def main(build, description):
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="small, in seconds on a CPU")
    parser.add_argument("--compare", action="store_true", help="time it against stock, on a GPU")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(build)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    loop = build(device, arguments.smoke)
    begin = time.perf_counter()
    losses = train(loop)
    seconds = time.perf_counter() - begin  # the losses have been read
    few = max(len(losses) // 10, 1)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    line = f"{len(losses)} steps in {seconds:.2f} s, loss {first:.4f} to {last:.4f}"
    print(" ".join([line, *filter(None, [loop.report()])]))
    return None
