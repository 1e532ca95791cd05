"""braze.TrainStep against the plain loop: the same numbers, bit for bit."""

import contextlib
import copy

import pytest
import torch

import braze
from step_common import (
    MAKERS,
    OPTIONS,
    assert_same,
    batches,
    check,
    entries,
    loss_fn,
    make,
    make_plain,
    plain_loop,
)

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_plain_loop(device, maker, options):
    settings = OPTIONS[options]
    step = check(device, batches(device, 4 * settings.get("accumulate", 1) + 2), maker, **settings)
    if device == "cuda":
        assert len(entries(step)) == settings.get("accumulate", 1)
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
    assert len(entries(step)) == (2 if device == "cuda" else 0)
    check(device, batches(device, 10, sizes=(6, 6, 6, 2)), accumulate=2)


@pytest.mark.parametrize("maker", ["braze SGD", "braze Adam", "torch SGD fused", "torch Adam"])
def test_learning_rate_schedule(device, maker):
    """braze's optimizer follows in the same graph; torch's exactly only by another."""
    if maker.startswith("torch"):
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
    if maker.startswith("braze"):
        assert_same(*results)
    else:
        # The graph's rate is rounded to float32, a change of 6e-8 that the steps amplify.
        losses = [torch.stack(results[i]) for i in (1, 3)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    if device == "cuda":
        assert len(entries(step)) == 1


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
