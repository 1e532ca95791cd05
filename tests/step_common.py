"""What the tests of TrainStep share: a small model, its batches, and the plain loop."""

import contextlib

import torch

import braze
from braze.data import DeviceLoader

CALLS = 8  # two eager, one captured and replayed, the rest replayed
MAKERS = {
    "braze SGD": lambda p, cuda: braze.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "braze Adam": lambda p, cuda: braze.optim.Adam(p, lr=0.01, amsgrad=True, max_grad_norm=0.7),
    "braze AdamW": lambda p, cuda: braze.optim.AdamW(p, lr=0.01),
    "braze RMSprop": lambda p, cuda: braze.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "torch SGD": lambda p, cuda: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "torch SGD fused": lambda p, cuda: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "torch Adam": lambda p, cuda: torch.optim.Adam(p, lr=0.01, capturable=cuda),
    "torch AdamW fused": lambda p, cuda: torch.optim.AdamW(p, 0.01, fused=True, capturable=cuda),
}
OPTIONS = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "accumulated": {"accumulate": 3, "max_grad_norm": 0.5},
    "autocast": {"autocast": torch.bfloat16},
}


class Net(torch.nn.Module):
    """Buffers, dropout, and a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            braze.nn.Conv2d(1, 4, 3, padding=1),
            braze.nn.BatchNorm2d(4),
            braze.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Flatten(),
            braze.nn.Linear(64, 5),
        )
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.body(x)


def make(device, maker="braze SGD"):
    torch.manual_seed(0)
    model = Net().to(device)
    return model, MAKERS[maker](model.parameters(), device == "cuda")


def batches(device, count=CALLS, sizes=(6,)):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(sizes[i % len(sizes)], 1, 4, 4, generator=generator).to(device),
            torch.randint(5, (sizes[i % len(sizes)],), generator=generator).to(device),
        )
        for i in range(count)
    ]


loss_fn = braze.nn.CrossEntropyLoss()


def plain_loop(
    model, optimizer, data, *, autocast=None, scaler=None, accumulate=1, max_grad_norm=None
):
    """The uncaptured loop; returns the losses."""
    device, losses = next(model.parameters()).device.type, []
    for i, (x, y) in enumerate(data):
        context = torch.autocast(device, autocast) if autocast else contextlib.nullcontext()
        with context:
            loss = loss_fn(model(x), y)
        losses.append(loss.detach())
        loss = loss / accumulate if accumulate > 1 else loss
        (scaler.scale(loss) if scaler else loss).backward()
        if (i + 1) % accumulate:
            continue
        if max_grad_norm:
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(model, losses, other_model, other_losses):
    assert [float(x) for x in losses] == [float(x) for x in other_losses]
    for (name, a), b in zip(
        model.state_dict().items(), other_model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def make_plain(device):
    """Neither buffers nor dropout: a failed forward leaves no trace."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), braze.nn.Linear(16, 5)).to(device)
    return model, braze.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def entries(step):
    """What there is for each kind of call that has been captured."""
    return [entry for entry in step._graphs._entries.values() if entry.graph is not None]


@contextlib.contextmanager
def recorded_ops():
    """A list that has, after the block, braze's ops in it: names, and the shapes of arguments."""
    ops, activities = [], [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        yield ops
    for event in profile.events():
        if event.name.startswith("braze::"):
            ops.append((event.name.removeprefix("braze::"), event.input_shapes))


def check(device, data, maker="braze SGD", **options):
    """Trains both ways and compares. Returns the step."""
    model, optimizer = make(device, maker)
    torch.manual_seed(2)
    expected = plain_loop(model, optimizer, data, **options)
    mine, optimizer = make(device, maker)
    torch.manual_seed(2)
    step = braze.TrainStep(mine, loss_fn, optimizer, **options)
    losses = [step(x, y) for x, y in data]  # read only afterwards: each has to stay as it is
    assert_same(mine, losses, model, expected)
    return step


def loader_for(device, **options):
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (20, 4, 4), dtype=torch.uint8, generator=generator)
    labels = torch.randint(5, (20,), generator=generator)
    return DeviceLoader(images, labels, 6, device=device, seed=5, mean=0.5, std=0.25, **options)


def check_bound(device, make):
    """Trains four epochs of a loader both ways and compares. Returns the step.

    Args:
        make: ``make(device)`` returns model and optimizer, the same each time.
    """
    model, optimizer = make(device)
    torch.manual_seed(2)
    loader, losses = loader_for(device), []
    for _ in range(4):
        losses += plain_loop(model, optimizer, loader)
    mine, optimizer = make(device)
    torch.manual_seed(2)
    step = braze.TrainStep(mine, loss_fn, optimizer).bind(loader_for(device))
    my_losses = [loss for _ in range(4) for loss in step.epoch()]
    assert_same(mine, my_losses, model, losses)
    return step
