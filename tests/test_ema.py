"""braze.optim.EMA against torch.optim.swa_utils.AveragedModel, updated after each step."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import braze
from common import assert_by_rule
from fake_cuda import FakeCuda
from step_common import batches, loss_fn, make

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "RMSprop": {"lr": 0.01},
}


def averaged(model, stock_optimizer, decay, **options):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), **options)
    stock_optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    return average


def steps(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("use_buffers", [False, True])
def test_matches_stock(device, name, use_buffers):
    """With a parameter without gradient, buffers of both kinds, and what loads into what."""
    trained = []
    for namespace in (braze.optim, torch.optim):
        model, _ = make(device)
        model.eval()
        optimizer = getattr(namespace, name)(model.parameters(), **OPTIMIZERS[name])
        if namespace is braze.optim:
            average = braze.optim.EMA(model, optimizer, 0.75, use_buffers)
        else:
            average = averaged(model, optimizer, 0.75, use_buffers=use_buffers)
        with torch.no_grad():
            model.body[1].running_mean.add_(1)
        steps(model, optimizer, batches(device, 1))
        state = average.state_dict()
        assert all(torch.equal(state[f"module.{k}"], v) for k, v in model.state_dict().items())
        with torch.no_grad():
            model.unused.add_(1)
            model.body[1].running_mean.add_(2)
            model.body[1].num_batches_tracked.add_(5)
        steps(model, optimizer, batches(device, 4))
        trained.append((model, average, optimizer))
    (_, mine, _), (_, theirs, _) = trained
    states = copy.deepcopy((mine.state_dict(), theirs.state_dict()))
    assert list(states[0]) == list(states[1])
    for key, tensor in states[1].items():
        torch.testing.assert_close(states[0][key].to(tensor.device), tensor)
    assert mine.n_averaged == 5
    x = batches(device, 1)[0][0]
    torch.testing.assert_close(mine(x), theirs(x))
    # Each goes on from the other's state.
    for (model, average, optimizer), state in zip(trained, reversed(states), strict=True):
        average.load_state_dict(state)
        steps(model, optimizer, batches(device, 2))
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[key].to(tensor.device), tensor)


def test_many_tensors_of_every_dtype(device, dtype):
    """By the rule, in float64 too; more tensors than a launch takes; other layouts."""
    shapes = [(n % 7 + 1, n % 11 + 1) for n in range(500)] + [(5000,), (0,)]
    trained = []
    for namespace, kind in ((braze, dtype), (torch, dtype), (torch, torch.float64)):
        model = torch.nn.ParameterList(torch.empty(s, device=device) for s in shapes).to(kind)
        generator = torch.Generator().manual_seed(2)

        def draw(t, generator=generator):
            values = torch.randn(t.shape, generator=generator, dtype=torch.float64)
            return values.to(device, dtype).to(t.dtype)

        with torch.no_grad():
            for p in model:
                p.copy_(draw(p))
        model[3] = torch.nn.Parameter(model[3].detach().t())
        optimizer = namespace.optim.SGD(model.parameters(), lr=0.5)
        if namespace is braze:
            average = braze.optim.EMA(model, optimizer, 0.9)
        else:
            average = averaged(model, optimizer, 0.9)
        for _ in range(3):
            for p in model:
                p.grad = draw(p)
            optimizer.step()
        trained.append(average)
    for a, s, r in zip(*(t.module for t in trained), strict=True):
        assert_by_rule(a, s, r, terms=30)


@pytest.mark.parametrize("first", [2.0, float("inf")])
def test_skipped_updates_are_averaged_too(device, first):
    """As in the plain loop, where update_parameters() follows scaler.step()."""
    trained = []
    for namespace in (braze.optim, torch.optim):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 40, device=device)
        unused = torch.nn.Parameter(torch.ones(2, device=device))
        model.register_parameter("unused", unused)
        optimizer = namespace.Adam(model.parameters(), lr=0.1)
        if namespace is braze.optim:
            average = braze.optim.EMA(model, optimizer, 0.5)
        else:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for factor in (first, 1.0, float("inf"), float("nan"), 3.0):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(2, 3, device=device)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if namespace is torch.optim:
                average.update_parameters(model)
        trained.append((model, average))
    for mine, theirs in zip(*trained, strict=True):
        for a, s in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, s)
    assert trained[0][1].n_averaged == 5


def test_averages_on_the_host():
    """As ``ema.cpu()`` leaves them: the launch, which could not write to them, has none."""
    trained = []
    with FakeCuda():
        for namespace in (braze.optim, torch.optim):
            torch.manual_seed(0)
            model, launched = torch.nn.Linear(3, 4).to("cuda"), []
            optimizer = namespace.SGD(model.parameters(), lr=0.1)
            if namespace is braze.optim:
                average = braze.optim.EMA(model, optimizer, 0.5).cpu()
                update = optimizer._update
                optimizer._update = lambda group, launch, shared, update=update, seen=launched: (
                    seen.append(launch.averages), update(group, launch, shared)
                )  # fmt: skip
            else:
                average = averaged(model, optimizer, 0.5).cpu()
            for _ in range(3):
                model(torch.ones(2, 3, device="cuda")).sum().backward()
                optimizer.step()
            trained.append(average.state_dict())
            assert launched == [[]] * 3 or namespace is torch.optim
        assert average.module.weight.device.type == "cpu"
    torch.testing.assert_close(*trained)


def test_in_a_step(device):
    """Eagerly and captured: the same average, counted at each replay."""
    results = []
    for captured in (False, True):
        model, optimizer = make(device)
        average = braze.optim.EMA(model, optimizer, 0.9)
        torch.manual_seed(2)
        if captured:
            step = braze.TrainStep(model, loss_fn, optimizer)
            for batch in batches(device):
                step(*batch)
        else:
            steps(model, optimizer, batches(device))
        results.append(average)
    for (name, a), b in zip(
        results[0].state_dict().items(), results[1].state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_what_is_refused(device):
    model, optimizer = make(device)
    with pytest.raises(TypeError, match=r"one of braze.optim, but got SGD"):
        braze.optim.EMA(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"Invalid decay value 1\.5"):
        braze.optim.EMA(model, optimizer, 1.5)
    average = braze.optim.EMA(model, optimizer)
    with pytest.raises(ValueError, match="an average already"):
        braze.optim.EMA(model, optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) updates the average by itself"):
        average.update_parameters(model)
