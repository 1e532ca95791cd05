"""``python -m braze bench evaluation``: the networks of ``bench networks`` in evaluation mode,
beside stock PyTorch compiled.

A run is the network's output for one resident batch in channels_last, without gradients, in
milliseconds of the wall clock between two synchronisations. Both sides have the same weights, and
as statistics of batch norm those of one batch; before it is timed, braze's output is compared with
float64's by the tolerance rule.
"""

import copy
import dataclasses
import functools
import typing

import torch

import braze
from benchmarks import networks
from braze.testing import assert_by_rule

BATCHES = (1, 128)
#: images of that batch
SEEN = 16


@dataclasses.dataclass
class Cell(networks.Cell):
    """One network in evaluation mode."""

    TABLE: typing.ClassVar = "evaluation"

    def __post_init__(self):
        super().__post_init__()
        self.model.to(self.device, memory_format=torch.channels_last)
        for module in self.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None  # the average
        self.model.train()
        with torch.no_grad():
            self.model(self.network.batch(SEEN, self.device)[0])
        self.model.eval().requires_grad_(False)

    def fresh_model(self, dtype=torch.float32):
        return copy.deepcopy(self.model).to(dtype)

    def output(self, model):
        with torch.no_grad(), self.autocast():
            return model(self.batch[0])

    def references(self):
        return self.exact(lambda model, images: model(images)), self.output(self.fresh_model())

    def judge(self, row, output, references):
        exact, stock_output = references
        if exact is not None and row["mode"] in self.OURS:
            ulps = networks.LOSS_ULPS[self.precision]
            assert_by_rule(output.float(), stock_output.float(), exact, ulps=ulps)


def stock(cell, compiled=False, graph=False):
    model = cell.fresh_model()
    step = functools.partial(cell.output, torch.compile(model) if compiled else model)
    return networks.in_cuda_graph(step) if graph else step


def ours(cell, captured=False):
    model = braze.convert(cell.fresh_model())
    step = functools.partial(cell.output, model)
    return braze.capture(step, modules=[model]) if captured else step


Cell.STOCK = {
    "stock eager": stock,
    "stock eager in a CUDA graph": functools.partial(stock, graph=True),
    "stock compile": functools.partial(stock, compiled=True),
    "stock compile in a CUDA graph": functools.partial(stock, compiled=True, graph=True),
}
Cell.OURS = {
    "braze eager": ours,
    "braze capture": functools.partial(ours, captured=True),
}


def run(device, args):
    """Yields the rows."""
    yield from networks.run(device, args, Cell, BATCHES)
