"""braze.TrainStep bound to a loader: its batches, their moments, and where an epoch goes on."""

import pytest
import torch

import braze
from braze.step import prefetch
from step_common import (
    assert_same,
    batches,
    check_bound,
    entries,
    loader_for,
    loss_fn,
    make,
    plain_loop,
    recorded_ops,
)

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("ahead", [True, False], ids=["small", "large"])
def test_bound_to_a_loader(device, ahead, monkeypatch):
    if not ahead:
        monkeypatch.setattr(prefetch, "MAX_BYTES", 6 * 16 * 4 - 1)
    step = check_bound(device, make)
    if device == "cuda":
        # Of full batches, and of the last one.
        fetched = [entry.kept.prefetch is not None for entry in entries(step)]
        assert sorted(fetched) == [ahead, True]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("filters", [3, 5])
def test_moments_of_the_gathered_batch(device, filters, momentum):
    """The first block's statistics are summed where the batch is gathered."""

    def make():
        torch.manual_seed(0)
        block = braze.nn.ConvBnReLUMaxPool2d(1, 4, filters, padding=filters // 2, momentum=momentum)
        model = torch.nn.Sequential(block, torch.nn.Flatten(), braze.nn.Linear(16, 5)).to(device)
        return model, braze.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    loader, losses = loader_for(device), []
    for _ in range(4):
        losses += plain_loop(model, optimizer, loader)
    mine, optimizer = make()
    step = braze.TrainStep(mine, loss_fn, optimizer).bind(loader_for(device))
    with recorded_ops() as ops:
        my_losses = [loss for _ in range(4) for loss in step.epoch()]
    assert_same(mine, my_losses, model, losses)
    # Of each forward pass that is not a replay: whether the block was given a matrix of moments.
    shapes = [arguments for name, arguments in ops if name == "conv_bn_relu_max_pool2d"]
    taken = [len(arguments[12]) == 2 for arguments in shapes]
    # the first step learns of the block; momentum=None counts batches where moments are summed
    assert taken == [bool(momentum) and i > 0 for i in range(len(taken))]
    assert len(taken) == 16 if device == "cpu" else len(taken) >= 6


class Branches(torch.nn.Module):
    """Blocks whose filters see other patches of the same batch."""

    def __init__(self):
        super().__init__()
        block = braze.nn.ConvBnReLUMaxPool2d
        self.blocks = torch.nn.ModuleList(block(1, 4, 3, padding=p) for p in (1, 0, 0, 1))
        self.last = braze.nn.Linear(40, 5)

    def forward(self, x):
        return self.last(torch.cat([block(x).flatten(1) for block in self.blocks], 1))


class Shifting(torch.nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.block = braze.nn.ConvBnReLUMaxPool2d(1, 4, 3, padding=1)
        self.last = braze.nn.Linear(16, 5)

    def forward(self, x):
        return self.last(self.block(x.add_(0.5)).flatten(1))


@pytest.mark.parametrize("module", [Branches, Shifting])
def test_moments_of_another_batch(device, module):
    """What was summed where the batch was gathered belongs to those filters, and to the batch as it
    was gathered."""

    def make(device):
        torch.manual_seed(0)
        model = module().to(device)
        return model, braze.optim.SGD(model.parameters(), lr=0.1)

    check_bound(device, make)


def test_epochs_side_by_side(device):
    """Two epochs that take turns: each draws the batches of its own order."""
    model, optimizer = make(device)
    torch.manual_seed(2)
    loader, losses = loader_for(device), []
    for _ in range(3):
        taking_turns = zip(list(loader), list(loader), strict=True)
        losses += plain_loop(model, optimizer, [b for pair in taking_turns for b in pair])
    mine, optimizer = make(device)
    torch.manual_seed(2)
    step = braze.TrainStep(mine, loss_fn, optimizer).bind(loader_for(device))
    my_losses = []
    for _ in range(3):
        my_losses += [x for pair in zip(step.epoch(), step.epoch(), strict=True) for x in pair]
    assert_same(mine, my_losses, model, losses)


@pytest.mark.parametrize("saved_after", [6, 8], ids=["within an epoch", "after an epoch"])
def test_state_dict(device, saved_after, tmp_path):
    def build():
        model, optimizer = make(device)
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=3)
        step = braze.TrainStep(model, loss_fn, optimizer, grad_scaler=scaler)
        return model, step.bind(loader_for(device))

    def run(step, count):
        losses = []
        while len(losses) < count:
            losses += [loss for loss, _ in zip(step.epoch(), range(count), strict=False)]
        return losses

    model, step = build()
    torch.manual_seed(2)
    losses = []
    for epoch in range(4):
        for loss in step.epoch():
            losses.append(loss)
            if len(losses) == saved_after and epoch == 1 and saved_after % 4:
                torch.save(step.state_dict(), tmp_path / "state.pt")
        if len(losses) == saved_after:
            torch.save(step.state_dict(), tmp_path / "state.pt")
    other, step = build()
    run(step, 4)  # has captured something else before
    step.load_state_dict(torch.load(tmp_path / "state.pt", map_location=device))
    rest = []
    while len(rest) < len(losses) - saved_after:
        rest += list(step.epoch())
    assert_same(other, rest, model, losses[saved_after:])


def test_state_dict_within_a_window_is_refused(device):
    model, optimizer = make(device)
    step = braze.TrainStep(model, loss_fn, optimizer, accumulate=2)
    step(*batches(device)[0])
    with pytest.raises(RuntimeError, match="micro-step 1 of 2"):
        step.state_dict()
