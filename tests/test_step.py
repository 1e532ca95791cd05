"""braze.TrainStep against the plain loop: the same numbers, bit for bit."""

import contextlib
import copy

import pytest
import torch

import braze
from braze._aside import Aside
from braze._capture import HostState, Rates
from braze._ops.gather import GatheredMoments
from braze.data import DeviceLoader
from conftest import cuda_only
from step_common import MAKERS, OPTIONS, assert_same, batches, loss_fn, make, make_plain, plain_loop


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def graphs(step):
    return [entry.graph for entry in step._entries.values() if entry.graph is not None]


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


def test_losses_stay_when_their_buffer_is_full(device, monkeypatch):
    """A graph that has no place left for losses is captured anew; no loss is overwritten."""
    monkeypatch.setattr("braze.step._LOSSES", 3)
    check(device, batches(device, 12))


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_plain_loop(device, maker, options):
    settings = OPTIONS[options]
    step = check(device, batches(device, 4 * settings.get("accumulate", 1) + 2), maker, **settings)
    if device == "cuda":
        assert len(graphs(step)) == settings.get("accumulate", 1)
    assert ("max_grad_norm" in settings) == (step.grad_norm is not None)


def test_autocast_object_and_autocast_around_the_call(device):
    data, context, results = batches(device), torch.autocast(device, torch.bfloat16), []
    for how in ("dtype", "object", "around"):
        model, optimizer = make(device)
        settings = {"dtype": torch.bfloat16, "object": context, "around": None}
        step = braze.TrainStep(model, loss_fn, optimizer, autocast=settings[how])
        torch.manual_seed(2)
        with context if how == "around" else contextlib.nullcontext():
            losses = [step(x, y) for x, y in data]
        results.append((model, losses))
    assert_same(*results[0], *results[1])
    assert_same(*results[0], *results[2])


class EarlyReader(torch.nn.Module):
    """A convolution whose weight's gradient is not just what the op made: it is summed, scaled, or
    watched by a hook."""

    def __init__(self, how):
        super().__init__()
        self.conv = braze.nn.Conv2d(4, 4, 3, padding=1)
        self.last = braze.nn.Linear(64, 5)
        self.how = how
        if how == "scaled":
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
        if how == "hooked":
            self.conv.weight.register_hook(lambda grad: grad * 2)

    def forward(self, x):
        x = x.expand(-1, 4, -1, -1).contiguous()
        if self.how == "scaled":
            weight = self.conv.weight * self.scale
            x = braze.nn.functional.conv2d(x, weight, self.conv.bias, padding=1)
        else:
            x = self.conv(x)
        return self.last((self.conv(x) if self.how == "twice" else x).flatten(1))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("how", ["plain", "twice", "scaled", "hooked"])
def test_gradients_made_aside(device, how, autocast, monkeypatch):
    """A weight's gradient may be made on a branch of the graph, unless something reads it in the
    backward pass."""
    made, missing = [], []
    join, all_arrived = Aside._join, Aside.all_arrived

    def watched_join(aside, *args):
        join(aside, *args)
        made.extend(aside._missing)

    def watched(aside):
        missing.extend(aside._missing)
        return all_arrived(aside)

    monkeypatch.setattr(Aside, "_join", watched_join)
    monkeypatch.setattr(Aside, "all_arrived", watched)
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = EarlyReader(how).to(device)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
        data = batches(device)
        if captured:
            step = braze.TrainStep(model, loss_fn, optimizer, autocast=autocast)
            losses = [step(x, y) for x, y in data]
        else:
            losses = plain_loop(model, optimizer, data, autocast=autocast)
        results.append((model, losses))
    assert_same(*results[0], *results[1])
    if device == "cuda":
        assert bool(made) == (how != "hooked")
        assert bool(missing) == (how in ("twice", "scaled"))


def read_gradients(optimizer, *_):
    parameters = optimizer.param_groups[0]["params"]
    optimizer.largest = torch.stack([p.grad.abs().max() for p in parameters]).max()


class ReadingSGD(braze.optim.SGD):
    def step(self):
        read_gradients(self)
        super().step()


class TwoDtypes(EarlyReader):
    """Autocast to one dtype inside autocast to another; and a parameter without elements."""

    def __init__(self):
        super().__init__("plain")
        self.empty = braze.nn.Linear(0, 5)

    def forward(self, x):
        y = self.empty(x.new_empty(len(x), 0))
        with torch.autocast(x.device.type, torch.float16):
            return super().forward(x) + y


@pytest.mark.parametrize("how", ["plain", "two dtypes", "hook", "subclass", "not owned"])
def test_gradients_cast_by_the_update(device, how, monkeypatch):
    """Autocast's gradients are cast in the update's launch where nothing reads them before."""
    later = []
    cast_later = Aside.cast_later

    def watched(aside, gradients, sources):
        later.extend(gradients)
        cast_later(aside, gradients, sources)

    monkeypatch.setattr(Aside, "cast_later", watched)
    results, seen = [], []
    for captured in (False, True):
        torch.manual_seed(0)
        model = (TwoDtypes() if how == "two dtypes" else EarlyReader("plain")).to(device)
        owned = model.conv.parameters() if how == "not owned" else model.parameters()
        optimizer = (ReadingSGD if how == "subclass" else braze.optim.SGD)(owned, lr=0.1)
        if how == "hook":
            optimizer.register_step_pre_hook(read_gradients)
        data = batches(device)
        if captured:
            step = braze.TrainStep(model, loss_fn, optimizer, autocast=torch.bfloat16)
            losses = [step(x, y) for x, y in data]
        else:
            losses = plain_loop(model, optimizer, data, autocast=torch.bfloat16)
        results.append((model, losses))
        seen.append([float(getattr(optimizer, "largest", 0))])
        if captured and how != "not owned":
            seen[-1] += [p.grad.abs().sum().item() for p in model.parameters()]
    assert_same(*results[0], *results[1])
    assert seen[0][0] == seen[1][0]
    assert all(value == value for value in seen[1])  # the gradients are there, not NaN
    assert bool(later) == (device == "cuda" and how in ("plain", "two dtypes"))


def test_a_wrong_loop_is_rejected(device):
    model, optimizer = make(device)
    losses = plain_loop(model, optimizer, batches(device))
    mine, optimizer = make(device)
    optimizer.param_groups[0]["lr"] *= 1.0001
    step = braze.TrainStep(mine, loss_fn, optimizer)
    with pytest.raises(AssertionError):
        assert_same(mine, [step(x, y) for x, y in batches(device)], model, losses)


def test_changing_shapes(device):
    step = check(device, batches(device, 12, sizes=(6, 6, 3)))
    assert len(graphs(step)) == (2 if device == "cuda" else 0)
    check(device, batches(device, 10, sizes=(6, 6, 6, 2)), accumulate=2)


@pytest.mark.parametrize("maker", ["braze SGD", "torch SGD fused", "torch Adam"])
def test_learning_rate_schedule(device, maker):
    """braze's optimizer follows in the same graph; torch's exactly only by another."""
    if maker != "braze SGD":
        torch.use_deterministic_algorithms(False)
    data, results = batches(device, 10), []
    for captured in (False, True):
        model, optimizer = make(device, maker)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = braze.TrainStep(model, loss_fn, optimizer)
        torch.manual_seed(2)
        losses = []
        for x, y in data:
            losses += [step(x, y)] if captured else plain_loop(model, optimizer, [(x, y)])
            scheduler.step()
        assert isinstance(optimizer.param_groups[0]["lr"], float)
        results += [model, losses]
    if maker == "braze SGD":
        assert_same(*results)
    else:
        # The graph's rate is rounded to float32, a change of 6e-8 that the steps amplify.
        losses = [torch.stack(results[i]) for i in (1, 3)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    if device == "cuda":
        assert len(graphs(step)) == 1


def test_changed_hyper_parameters_modes_and_frozen_parameters(device):
    data, results = batches(device, 16), []
    for captured in (False, True):
        model, optimizer = make(device)
        step = braze.TrainStep(model, loss_fn, optimizer)
        torch.manual_seed(2)
        losses = []
        for i, (x, y) in enumerate(data):
            if i == 4:
                optimizer.param_groups[0]["momentum"] = 0.5
            if i == 8:
                model.body[1].eval()
            if i == 12:
                model.body[0].requires_grad_(False)
            losses += [step(x, y)] if captured else plain_loop(model, optimizer, [(x, y)])
        results += [model, losses]
    assert_same(*results)


def test_grad_scaler_skips_infinities(device):
    data = batches(device, 10)
    data[5] = (data[5][0] * float("inf"), data[5][1])
    for options in ({}, {"max_grad_norm": 0.5}, {"accumulate": 2, "max_grad_norm": 0.5}):
        results, scales = [], []
        for captured in (False, True):
            model, optimizer = make(device)
            model.body[1] = torch.nn.Identity()  # an infinity would stay in its running statistics
            scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3)
            torch.manual_seed(2)
            if captured:
                step = braze.TrainStep(model, loss_fn, optimizer, grad_scaler=scaler, **options)
                losses = [step(x, y) for x, y in data]
            else:
                losses = plain_loop(model, optimizer, data, scaler=scaler, **options)
            scales.append(scaler.get_scale())
            results += [model, [x.nan_to_num(7.0) for x in losses]]
            assert all(p.isfinite().all() for p in model.parameters())
        assert_same(*results)
        assert scales[0] == scales[1] != 1024


def test_nan_batch_gives_what_the_loop_gives(device):
    data = batches(device)
    data[5] = (data[5][0] * float("nan"), data[5][1])
    model, optimizer = make(device)
    step = braze.TrainStep(model, loss_fn, optimizer)
    losses = torch.stack([step(x, y) for x, y in data]).isnan().tolist()
    assert losses == [False] * 5 + [True] * 3
    # Healthy weights again, in the same memory: the same graph goes on with them.
    model.load_state_dict(make(device)[0].state_dict())
    optimizer.load_state_dict(make(device)[1].state_dict())
    assert step(*data[0]).isfinite()


def test_gradients_are_readable_and_written_anew(device):
    model, optimizer = make(device)
    step = braze.TrainStep(model, loss_fn, optimizer)
    for x, y in batches(device):
        other = copy.deepcopy(model)
        other.body[3] = torch.nn.Identity()
        model.body[3].p = 0.0
        loss_fn(other(x), y).backward()
        step(x, y)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
        optimizer.zero_grad()  # does no harm


def test_a_backward_through_weights_of_before_the_step_is_noticed(device):
    model, optimizer = make(device)
    step = braze.TrainStep(model, loss_fn, optimizer)
    data = batches(device)
    for x, y in data[:4]:
        step(x, y)
    x, y = data[4]
    stale = loss_fn(model(x.requires_grad_()), y)
    step(*data[5])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


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


@pytest.mark.parametrize("ahead", [True, False], ids=["small", "large"])
def test_bound_to_a_loader(device, ahead, monkeypatch):
    if not ahead:
        monkeypatch.setattr(braze.step, "_PREFETCHED", 6 * 16 * 4 - 1)
    step = check_bound(device, make)
    if device == "cuda":
        assert len(graphs(step)) == 2  # the full batch and the last one
        fetched = [entry.prefetch is not None for entry in step._entries.values()]
        assert sorted(fetched) == [ahead, True]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("filters", [3, 5])
def test_moments_of_the_gathered_batch(device, filters, momentum, monkeypatch):
    """The first block's statistics are summed where the batch is gathered."""
    taken = []
    take = GatheredMoments.take

    def watched(moments, *args):
        sums = take(moments, *args)
        taken.append(sums is not None)
        return sums

    monkeypatch.setattr(GatheredMoments, "take", watched)

    def make():
        torch.manual_seed(0)
        block = braze.nn.ConvBnReLUMaxPool2d(1, 4, filters, padding=filters // 2, momentum=momentum)
        model = torch.nn.Sequential(block, torch.nn.Flatten(), braze.nn.Linear(16, 5)).to(device)
        return model, braze.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    loader, losses = loader_for(device), []
    for _ in range(4):
        losses += plain_loop(model, optimizer, loader)
    assert not taken
    mine, optimizer = make()
    step = braze.TrainStep(mine, loss_fn, optimizer).bind(loader_for(device))
    my_losses = [loss for _ in range(4) for loss in step.epoch()]
    assert_same(mine, my_losses, model, losses)
    # the first step learns of the block; momentum=None counts batches where moments are summed
    assert taken[:2] == ([False, True] if momentum else [])
    assert all(taken[1:])


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


@pytest.mark.parametrize("failing_call", [0, 2])
def test_exception_in_user_code(device, failing_call):
    """It passes through, nothing has been trained, and all goes on. Call 2 captures."""
    data, calls = batches(device), []

    def fails_once(output, target):
        calls.append(1)
        if len(calls) == failing_call + 1:
            raise KeyError("user")
        return loss_fn(output, target)

    model, optimizer = make_plain(device)
    losses = plain_loop(model, optimizer, data)
    mine, optimizer = make_plain(device)
    step, my_losses = braze.TrainStep(mine, fails_once, optimizer), []
    for i, (x, y) in enumerate(data):
        if i == failing_call:
            with pytest.raises(KeyError, match="user"):
                step(x, y)
        my_losses.append(step(x, y))
    assert_same(mine, my_losses, model, losses)


def capturing():
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Synchronizes(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 1e9 else x


class ReplacesItsBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


class OutOfMemory(torch.nn.Module):
    def forward(self, x):
        if capturing():
            torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
        return x


@pytest.mark.parametrize(
    ("culprit", "error", "message"),
    [
        (Synchronizes, RuntimeError, "cannot be captured in a CUDA graph"),
        (ReplacesItsBuffer, RuntimeError, "replaces its buffer 'mean'"),
        (OutOfMemory, torch.OutOfMemoryError, "out of memory while capturing"),
    ],
)
def test_what_cannot_be_captured(device, culprit, error, message):
    """On a GPU refused at the capture, and everything is usable afterwards; on the CPU it runs."""
    data = batches(device)
    results = []
    for captured in (False, True):
        model, optimizer = make_plain(device)
        model.insert(1, culprit().to(device))
        step, losses = braze.TrainStep(model, loss_fn, optimizer), []
        for i, (x, y) in enumerate(data):
            if captured and device == "cuda" and i == 2:
                for _ in range(2):
                    with pytest.raises(error, match=message):
                        step(x, y)
                optimizer.zero_grad()  # a step leaves its gradients readable
            if captured and (device == "cpu" or i < 2):
                losses.append(step(x, y))
            else:
                losses += plain_loop(model, optimizer, [(x, y)])
        results += [model, losses]
    assert_same(*results)
    # Neither the generator nor the allocator believes that a capture is still going on.
    torch.nn.functional.dropout(torch.ones(5, device=device))
    assert len(graphs(check(device, data))) == (device == "cuda")


class CountsOnTheCPU(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p -= self.param_groups[0]["lr"] / state["step"] * p.grad


@cuda_only
def test_optimizers_that_count_on_the_cpu_are_refused(device):
    model, _ = make_plain(device)
    with pytest.raises(ValueError, match="capturable=True"):
        braze.TrainStep(model, loss_fn, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="Adagrad cannot be captured"):
        braze.TrainStep(model, loss_fn, torch.optim.Adagrad(model.parameters()))
    # One that nobody has announced is found at the capture.
    step = braze.TrainStep(model, loss_fn, CountsOnTheCPU(model.parameters(), {"lr": 0.1}))
    data = batches(device)
    step(*data[0])
    step(*data[1])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="CountsOnTheCPU counts 'step' on the CPU"):
        step(*data[2])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert next(iter(step.optimizer.state.values()))["step"] == 2
    scaler = torch.amp.GradScaler(device)
    plain_sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="checks for infinities itself"):
        braze.TrainStep(model, loss_fn, plain_sgd, grad_scaler=scaler)


def test_rates_stay_numbers_outside_a_capture(device):
    model, optimizer = make_plain(device)
    rates, group = Rates(optimizer, torch.device(device)), optimizer.param_groups[0]
    key = rates.key()
    with rates.on_device():
        tensor = group["lr"]
        assert tensor.device.type == device
    assert group["lr"] == 0.1
    group["lr"] = 0.25
    assert rates.key() == key
    assert tensor == 0.1
    rates.write()
    assert tensor == 0.25
    group["momentum"] = 0.5
    assert rates.key() != key
    stock = Rates(torch.optim.SGD(model.parameters(), lr=0.1), torch.device(device))
    key = stock.key()
    stock._optimizer.param_groups[0]["lr"] = 0.2
    assert stock.key() != key


def test_what_a_replay_cannot_repeat_is_found_and_undone(device):
    model, _ = make_plain(device)
    model.append(ReplacesItsBuffer().to(device))
    optimizer = torch.optim.Adagrad(model.parameters())
    params = list(model.parameters())
    state, mean = HostState(model, optimizer, params), model[2].mean
    state.verify()
    model(torch.ones(2, 16, device=device)).sum().backward()
    with pytest.raises(RuntimeError, match="ReplacesItsBuffer replaces its buffer 'mean'"):
        state.verify()
    state.restore()
    state.verify()
    assert model[2].mean is mean
    assert params[0].grad is None
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    with pytest.raises(RuntimeError, match="Adagrad counts 'step' on the CPU"):
        state.verify()
    state.restore()
    state.verify()
    params[0].data = params[0].data.clone()
    with pytest.raises(RuntimeError, match="gives a parameter new memory"):
        state.verify()


@cuda_only
def test_two_models_a_second_stream_and_empty_cache(device):
    data, steps, losses = batches(device, 12), [], ([], [])
    for _ in range(2):
        model, optimizer = make_plain(device)
        steps.append(braze.TrainStep(model, loss_fn, optimizer))
    streams = [torch.cuda.Stream(), torch.cuda.current_stream()]
    torch.cuda.synchronize()
    for i, (x, y) in enumerate(data):
        for step, mine in zip(steps, losses, strict=True):
            with torch.cuda.stream(streams[i % 2]):
                mine.append(step(x, y))
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    model, optimizer = make_plain(device)
    expected = plain_loop(model, optimizer, data)
    for step, mine in zip(steps, losses, strict=True):
        assert_same(step.model, mine, model, expected)


@cuda_only
def test_many_steps_leak_nothing(device):
    model, optimizer = make(device)
    step, (x, y) = braze.TrainStep(model, loss_fn, optimizer), batches(device)[0]
    for _ in range(10):
        step(x, y)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10_000):
        step(x, y)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_label_out_of_range(device):
    model, optimizer = make_plain(device)
    step, data = braze.TrainStep(model, loss_fn, optimizer), batches(device)
    for x, y in data[:4]:
        step(x, y)
    step.check()
    bad = data[4][1].clone()
    bad[0] = 5
    if device == "cpu":
        with pytest.raises(IndexError, match="Target 5 is out of bounds"):
            step(data[4][0], bad)
    else:
        assert step(data[4][0], bad).isnan()
        with pytest.raises(IndexError, match="Target 5 is out of bounds"):
            step.check()
    step.check()


class TakesADict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = braze.nn.Linear(16, 5)

    def forward(self, inputs, sign):
        return self.linear(inputs["x"].flatten(1)) * sign


def test_nested_batches_from_the_host(device):
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = TakesADict().to(device)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
        step = braze.TrainStep(model, loss_fn, optimizer)
        losses = []
        for i, (x, y) in enumerate(batches("cpu" if captured else device)):
            sign = 1 if i < 5 else -1
            if captured:
                losses.append(step({"x": x}, sign, y))
                continue
            loss = loss_fn(model({"x": x}, sign), y)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        results += [model, losses]
    assert_same(*results)


def test_reloading_the_optimizer_or_moving_the_weights(device):
    data, results = batches(device, 12), []
    for captured in (False, True):
        model, optimizer = make(device)
        step, losses = braze.TrainStep(model, loss_fn, optimizer), []
        torch.manual_seed(2)
        for i, (x, y) in enumerate(data):
            if i == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if i == 8:
                for p in model.parameters():
                    p.data = p.data.clone()
            losses += [step(x, y)] if captured else plain_loop(model, optimizer, [(x, y)])
        results += [model, losses]
    assert_same(*results)


def test_bad_arguments(device):
    model, optimizer = make(device)
    for settings, error, message in [
        ({"accumulate": 0}, ValueError, "accumulate of at least 1, but got 0"),
        ({"grad_scaler": True}, TypeError, "torch.amp.GradScaler or None, but got bool"),
        ({"accumulate": 1.5}, TypeError, "accumulate to be an int, but got 1.5"),
        ({"accumulate": True}, TypeError, "accumulate to be an int, but got True"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm to be a number, but got '1'"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm above 0 or None, but got -1.0"),
        ({"autocast": "bf16"}, TypeError, "a dtype, a torch.autocast or None, but got str"),
    ]:
        with pytest.raises(error, match=message):
            braze.TrainStep(model, loss_fn, optimizer, **settings)
    for arguments, message in [
        ((loss_fn, loss_fn, list(model.parameters())), "optimizer to be a torch.optim.Optimizer"),
        ((model, 3, optimizer), "loss_fn to be callable, but got int"),
        (([], loss_fn, optimizer), "model to be a torch.nn.Module, but got list"),
    ]:
        with pytest.raises(TypeError, match=message):
            braze.TrainStep(*arguments)
    with pytest.raises(ValueError, match="LBFGS calls the model by itself"):
        braze.TrainStep(model, loss_fn, torch.optim.LBFGS(model.parameters()))
    step = braze.TrainStep(model, loss_fn, optimizer, max_grad_norm=torch.tensor(2.0))
    assert step.max_grad_norm == 2.0
    with pytest.raises(TypeError, match="inputs and a target, but got 1"):
        step(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"bind\(loader\) before epoch"):
        next(step.epoch())
    with pytest.raises(TypeError, match="DeviceLoader, but got list"):
        step.bind([])
    model.register_buffer("elsewhere", torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"on one device, but found c.*, meta"):
        braze.TrainStep(model, loss_fn, optimizer)


class Tied(torch.nn.Module):
    """A layer used twice, one used once, and one that autocast leaves alone."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = braze.nn.Linear(6, 6), braze.nn.Linear(6, 3)
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x):
        return self.once(self.norm(self.twice(self.twice(x))))


def test_parameters_are_cast_together(device):
    """Autocast's casts share a launch, and give what separate casts give."""
    torch.manual_seed(0)
    model = Tied().to(device)
    plain = copy.deepcopy(model)
    loss_fn = braze.nn.CrossEntropyLoss()
    step = braze.TrainStep(
        model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.1), autocast=torch.bfloat16
    )
    optimizer = braze.optim.SGD(plain.parameters(), lr=0.1)
    x, target = torch.randn(8, 6, device=device), torch.randint(3, (8,), device=device)
    for _ in range(4):
        with torch.profiler.profile() as profile:
            loss = step(x, target)
        with torch.autocast(device, torch.bfloat16):
            expected = loss_fn(plain(x), target)
        expected.backward()
        assert torch.equal(loss, expected)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        optimizer.step()
        optimizer.zero_grad()
    if device == "cpu":  # a captured step calls nothing
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["braze::cast_"] == 2


class Clamping(torch.nn.Module):
    """Changes a parameter in its forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = braze.nn.Linear(6, 3)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def test_a_parameter_changed_before_its_cast_is_used(device):
    torch.manual_seed(0)
    model = Clamping().to(device)
    plain = copy.deepcopy(model)
    data = [(torch.randn(8, 6, device=device), torch.randint(3, (8,), device=device))] * 5
    optimizers = [braze.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    step = braze.TrainStep(model, loss_fn, optimizers[0], autocast=torch.bfloat16)
    results = [step(*batch) for batch in data]
    expected = plain_loop(plain, optimizers[1], data, autocast=torch.bfloat16)
    assert_same(model, results, plain, expected)
