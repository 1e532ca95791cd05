"""What braze.TrainStep can capture and what not, and what a failed capture leaves behind."""

import copy

import pytest
import torch

import braze
from braze.step import branches
from braze.step.host_state import HostState
from braze.step.parts import StepParts
from braze.step.rates import AllRates, Rates
from conftest import cuda_only
from step_common import assert_same, batches, check, entries, loss_fn, make, make_plain, plain_loop

pytestmark = pytest.mark.usefixtures("deterministic")


def test_losses_stay_when_their_buffer_is_full(device, monkeypatch):
    """A graph that has no place left for losses is captured anew; no loss is overwritten."""
    monkeypatch.setattr(branches, "LOSSES", 3)
    check(device, batches(device, 12))


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
    assert len(entries(check(device, data))) == (device == "cuda")


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stock = Rates(optimizer, torch.device(device))
    key = stock.key()
    optimizer.param_groups[0]["lr"] = 0.2
    assert stock.key() != key


def test_rates_of_several_optimizers(device):
    """What is compared at once is noticed as what each would notice."""
    pairs = [make_plain(device) for _ in range(3)]
    optimizers = [optimizer for _, optimizer in pairs]
    rates, groups = AllRates(optimizers, torch.device(device)), optimizers[1].param_groups
    key = rates.key()
    with rates.on_device():
        tensor, other = groups[0]["lr"], optimizers[2].param_groups[0]["lr"]
    for rate in 0.25, 0.125:
        assert rates.key() is rates.key()
        assert rates.key() == key
        rates.write()
        assert tensor != rate
        groups[0]["lr"] = rate
        assert rates.key() == key
        assert tensor != rate
        rates.write()
        assert (tensor, other) == (rate, 0.1)
    known = {key}
    spare = torch.nn.Parameter(torch.zeros(2, device=device))
    changes = [
        lambda: groups[0].update(momentum=0.5),
        lambda: groups[0].update(mine=1),
        lambda: setattr(optimizers[2], "max_grad_norm", 2.0),
        lambda: optimizers[0].add_param_group({"params": [spare]}),
        lambda: groups[0].update(weight_decay=0.125),
    ]
    for change in changes:
        change()
        assert rates.key() not in known
        known.add(rates.key())
    groups[0]["schedule"] = [1]  # what may change by itself
    key = rates.key()
    groups[0]["schedule"].append(2)
    assert rates.key() != key


def test_what_a_replay_cannot_repeat_is_found_and_undone(device):
    model, _ = make_plain(device)
    model.append(ReplacesItsBuffer().to(device))
    optimizer = torch.optim.Adagrad(model.parameters())
    params = list(model.parameters())
    parts = StepParts(model, loss_fn, optimizer, None, None, 1, None)
    parts.params, parts.modules = params, list(model.modules())
    state, mean = HostState(parts), model[2].mean
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
