"""The training step of ``python -m braze mnist`` in every form that is timed.

One whole step: batch load, forward, backward, update, zero-grad. Each form is, in the end, a
function `epoch()` that yields the loss of every step of an epoch, as braze.TrainStep.epoch does.
"""

import contextlib
import copy
from dataclasses import dataclass

import torch

import braze
from braze.mnist.example import MEAN, STD, evaluate, make_loader, make_model

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass
class Setup:
    """What all steps share."""

    digits: braze.data.Digits
    device: torch.device
    precision: str
    batch_size: int
    lr: float
    seed: int
    num_replicas: int = 1  # processes that train together, and which of them this is
    rank: int = 0

    def __post_init__(self):
        self.loader = make_loader(
            self.digits.train_images,
            self.digits.train_labels,
            self.batch_size,
            self.device,
            seed=self.seed,
            drop_last=True,
            num_replicas=self.num_replicas,
            rank=self.rank,
        )

    def state(self, seed):
        """Initial weights; those of `self.seed` are what training and timing start from."""
        torch.manual_seed(seed)
        return make_model().state_dict()

    def make_model(self, nn):
        model = make_model(nn)
        model.load_state_dict(self.state(self.seed))
        return model

    def autocast(self):
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def fresh_loader(self, layout):
        """A loader at the start of its sequence; all share one copy of the images."""
        loader = copy.copy(self.loader)
        loader.restart(self.seed)
        loader.memory_format = LAYOUTS[layout]
        return loader

    def test_accuracy(self, model, memory_format):
        """The share of the test images that `model` classifies correctly."""
        images, labels = self.digits.test_images, self.digits.test_labels
        test = make_loader(images, labels, 1000, self.device, shuffle=False)
        test.memory_format = memory_format
        with self.autocast():
            return evaluate(model, test)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Step:
    """One whole training step in eager mode; called with the indices of its batch."""

    def __init__(self, setup, model, optimizer, loss_function, layout):
        self.model = model
        self.optimizer = optimizer
        self.loss_function = loss_function
        self.loader = setup.fresh_loader(layout)
        self.gather = self.loader.gather
        self.autocast = setup.autocast()

    def forward(self, images, labels):
        with self.autocast:
            return self.loss_function(self.model(images), labels)

    def __call__(self, indices):
        loss = self.forward(*self.gather(indices))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def epoch(self, call=None):
        """The loss of each step of one epoch."""
        return map(call or self, self.loader.index_batches())

    def start_anew(self, state, seed):
        """Other weights, in the memory of the present ones, and the batches of `seed`."""
        self.model.load_state_dict(state)
        self.loader.restart(seed)


class StockStep(Step):
    """The step of a user of stock PyTorch: nothing of braze runs in it."""

    def __init__(self, setup, layout, dtype=torch.float32):
        model = setup.make_model(torch.nn).to(setup.device, dtype, memory_format=LAYOUTS[layout])
        optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr, fused=True)
        super().__init__(setup, model, optimizer, torch.nn.CrossEntropyLoss(), layout)
        self.dtype = dtype
        self.gather = self._gather_by_torch
        if dtype == torch.float64:
            self.autocast = contextlib.nullcontext()

    def _gather_by_torch(self, indices):
        """The loader's batch made by torch's own ops, which the compiler can fuse."""
        images = self.loader.images.index_select(0, indices)
        images = images.to(self.dtype, memory_format=self.loader.memory_format)
        images = (images / 255 - MEAN) / STD
        return images, self.loader.labels.index_select(0, indices)


class BrazeStep(Step):
    """The step of a user of braze; converted, or unfused layer by layer."""

    def __init__(self, setup, layout, fused=True):
        model = setup.make_model(torch.nn if fused else braze.nn)
        model = model.to(setup.device, memory_format=LAYOUTS[layout])
        if fused:
            braze.convert(model)
        optimizer = braze.optim.SGD(model.parameters(), lr=setup.lr)
        super().__init__(setup, model, optimizer, braze.nn.CrossEntropyLoss(), layout)
        if setup.precision == "bf16":
            self.loader.dtype = torch.bfloat16  # what autocast would cast the images to

    def captured(self, setup):
        """The same step as a :class:`braze.TrainStep`: on a GPU one CUDA graph."""
        dtype = torch.bfloat16 if setup.precision == "bf16" else None
        step = braze.TrainStep(self.model, self.loss_function, self.optimizer, autocast=dtype)
        return step.bind(self.loader)


def forever(epoch):
    """The steps of ``epoch()``, epoch after epoch."""
    while True:
        yield from epoch()


def eager(step):
    return step.epoch


def cuda_graph(step):
    """Stock's step recorded once by hand and replayed: no launch costs on the CPU."""
    static_indices = torch.arange(step.loader.batch_size, device=step.loader.images.device)
    # The warm-up steps must not train: the weights are the user's.
    state = copy.deepcopy(step.model.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(static_indices)
    torch.cuda.current_stream().wait_stream(stream)
    step.model.load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    # On a stream of its own: torch keeps one workspace of cuBLAS per stream, in the memory of the
    # first graph captured there, and frees it with that graph (pytorch/pytorch#193402).
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        loss = step(static_indices)

    def replay(indices):
        static_indices.copy_(indices)
        graph.replay()
        return loss

    return lambda: step.epoch(replay)


def compiled(step, mode="default"):
    """Forward and loss, with their backward, compiled."""
    step.forward = torch.compile(step.forward, mode=mode)
    return eager(step) if mode == "default" else lambda: step.epoch(_marked(step))


def compiled_whole_step(step, mode="reduce-overhead"):
    """Gather, forward, backward and update in one compiled function (Dynamo splits it)."""
    # The compiler fuses the foreach update, but not the one that is fused already.
    group = step.optimizer.param_groups[0]
    step.optimizer = torch.optim.SGD(group["params"], lr=group["lr"], foreach=True)
    run = _marked(torch.compile(step.__call__, mode=mode))
    # One address for all batches: its CUDA graphs read the indices where the first ones were.
    static_indices = torch.zeros_like(step.loader.labels[: step.loader.batch_size])
    return lambda: step.epoch(lambda indices: run(static_indices.copy_(indices)))


def compiled_in_cuda_graph(step):
    step.forward = torch.compile(step.forward)
    return cuda_graph(step)


def _marked(call):
    def run(indices):
        torch.compiler.cudagraph_mark_step_begin()
        return call(indices)

    return run
