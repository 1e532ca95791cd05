"""braze.TrainStep where model, optimizer or settings change between calls, and where a state does
not fit."""

import copy

import pytest
import torch

import braze
from braze.data import DeviceLoader
from step_common import OPTIONS, assert_same, batches, loss_fn, make, make_plain, plain_loop

pytestmark = pytest.mark.usefixtures("deterministic")


def replace_a_layer(step):
    torch.manual_seed(5)
    step.model.body[5] = braze.nn.Linear(64, 5).to(step.device)
    step.optimizer.param_groups[0]["params"] = list(step.model.parameters())


def insert_a_layer(step):
    """One without parameters."""
    step.model.body[2] = torch.nn.Tanh()


def add_a_group(step):
    group = {"params": [torch.nn.Parameter(torch.full((5,), 0.5, device=step.device))], "lr": 0.3}
    step.model.body[5].register_parameter("offset", group["params"][0])
    step.model.body[5].register_forward_hook(lambda module, _, out: out + module.offset)
    step.optimizer.add_param_group(group)


def replace_a_parameter(step):
    layer = step.model.body[5]
    layer.bias = torch.nn.Parameter(torch.full_like(layer.bias, 0.25))
    step.optimizer.param_groups[0]["params"] = list(step.model.parameters())


def replace_a_buffer(step):
    step.model.body[1].running_mean = torch.full((4,), 0.5, device=step.device)


def replace_the_optimizer(step):
    parameters = step.model.parameters()
    step.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def freeze(step):
    step.model.body[0].requires_grad_(False)


CHANGES = [
    replace_a_layer,
    insert_a_layer,
    add_a_group,
    replace_a_parameter,
    replace_a_buffer,
    replace_the_optimizer,
    freeze,
]


@pytest.mark.parametrize("options", ["autocast", "accumulated"])
def test_weights_written_where_no_version_counts(any_device, options):
    """Autocast's copies are those of each step: see docs/optimizers.md."""
    settings = OPTIONS[options] | {"autocast": torch.bfloat16}
    window, results = settings.get("accumulate", 1), []
    for captured in (False, True):
        model, optimizer = make_plain(any_device)
        step, losses = braze.TrainStep(model, loss_fn, optimizer, **settings), []
        data = batches(any_device, 6 * window)
        for i in range(0, len(data), window):
            versions = [p._version for p in model.parameters()]
            for p in model.parameters():
                p.data.mul_(0.5)
            assert versions == [p._version for p in model.parameters()]
            part = data[i : i + window]
            if captured:
                losses += [step(x, y) for x, y in part]
            else:
                losses += plain_loop(model, optimizer, part, **settings)
        results += [model, losses]
    assert_same(*results)


@pytest.mark.parametrize("options", ["clipped", "accumulated"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_the_model_are_noticed(device, change, options):
    """Each at a window's start, before and after a capture, without recapture()."""
    settings = OPTIONS[options]
    window = settings.get("accumulate", 1)
    for changed_after in (2 * window, 5 * window):
        data, results = batches(device, 9 * window), []
        for captured in (False, True):
            model, optimizer = make(device)
            step = braze.TrainStep(model, loss_fn, optimizer, **settings)
            torch.manual_seed(2)
            losses = []
            for i in range(0, len(data), window):
                if i == changed_after:
                    change(step)
                    step.optimizer.zero_grad()
                    torch.manual_seed(2)
                if captured:
                    losses += [step(x, y) for x, y in data[i : i + window]]
                else:
                    losses += plain_loop(model, step.optimizer, data[i : i + window], **settings)
            results += [model, losses]
        assert_same(*results)


def test_gradients_of_a_new_layer_do_not_add_up(device):
    """The norm of the same batch's gradients, at a rate of 0, stays as it is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), braze.nn.Linear(16, 5)).to(device)
    step = braze.TrainStep(model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.0))
    x, y = batches(device)[0]
    step(x, y)
    model[1] = braze.nn.Linear(16, 5).to(device)
    step.optimizer.param_groups[0]["params"] = list(model.parameters())
    norms = []
    for _ in range(5):
        step(x, y)
        norms.append(float(model[1].weight.grad.norm()))
    assert norms == norms[:1] * 5
    assert norms[0] > 0


def test_a_layer_replaced_within_a_window(device):
    """What the replaced layer had gathered is dropped, the others' gradients are kept."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), braze.nn.Linear(16, 8), braze.nn.Linear(8, 5)
        ).to(device)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
        step = braze.TrainStep(model, loss_fn, optimizer, accumulate=2)
        losses = []
        for i, (x, y) in enumerate(batches(device, 12)):
            if i == 7:
                torch.manual_seed(5)
                model[2] = braze.nn.Linear(8, 5).to(device)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            if captured:
                losses.append(step(x, y))
                continue
            loss = loss_fn(model(x), y)
            (loss / 2).backward()
            losses.append(loss.detach())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        results += [model, losses]
    assert_same(*results)


def test_a_model_moved_to_where_it_cannot_be_trained_is_refused_unchanged(device):
    model, optimizer = make_plain(device)
    step, (x, y) = braze.TrainStep(model, loss_fn, optimizer), batches(device)[0]
    step(x, y)
    model.register_parameter("elsewhere", torch.nn.Parameter(torch.ones(1, device="meta")))
    with pytest.raises(ValueError, match=r"on one device, but found c.*, meta"):
        step(x, y)
    del model.elsewhere
    assert step(x, y).isfinite()


def test_a_shorter_window_takes_effect(device):
    model, optimizer = make_plain(device)
    step, data = braze.TrainStep(model, loss_fn, optimizer, accumulate=4), batches(device)
    for x, y in data[:3]:
        step(x, y)
    step.accumulate = 2  # the present window has had more already
    before = model[1].weight.detach().clone()
    step(*data[3])
    assert not torch.equal(model[1].weight, before)
    assert step._micro_step == 0


def test_states_that_do_not_fit_are_refused_unchanged(device):
    data = batches(device, 3)
    model, optimizer = make_plain(device)
    step = braze.TrainStep(model, loss_fn, optimizer)
    step(*data[0])
    states = {"none": step.state_dict()}
    states["disabled"] = states["none"] | {"grad_scaler": {}}
    other, optimizer = make_plain(device)
    scaler = torch.amp.GradScaler(device, init_scale=64.0)
    scaling = braze.TrainStep(other, loss_fn, optimizer, grad_scaler=scaler)
    scaling(*data[1])
    before = copy.deepcopy(scaling.state_dict())
    for state in states.values():
        with pytest.raises(RuntimeError, match="saved without one, or with a disabled one"):
            scaling.load_state_dict(state)
    with pytest.raises(KeyError, match="has no 'loader', 'rng'"):
        scaling.load_state_dict({"model": {}, "optimizer": {}, "grad_scaler": None})
    for name, value in other.state_dict().items():
        assert torch.equal(value, before["model"][name])
    # What the error advises, and the other way round.
    scaling.load_state_dict(states["none"] | {"grad_scaler": scaler.state_dict()})
    assert torch.equal(other[1].weight, model[1].weight)
    step.load_state_dict(scaling.state_dict())
    disabled = torch.amp.GradScaler(device, enabled=False)
    unscaled = braze.TrainStep(other, loss_fn, optimizer, grad_scaler=disabled)
    unscaled.load_state_dict(states["none"])
    unscaled(*data[2])


def test_a_state_of_a_longer_epoch_is_refused(device):
    """It would yield an epoch without batches."""
    images, labels = torch.zeros(8, 4, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)
    steps = []
    for size in (2, 8):
        model, optimizer = make_plain(device)
        loader = DeviceLoader(images, labels, size, device=device)
        steps.append(braze.TrainStep(model, loss_fn, optimizer).bind(loader))
    for _, _loss in zip(range(2), steps[0].epoch(), strict=False):
        state = copy.deepcopy(steps[0].state_dict())
    before = steps[1].model[1].weight.detach().clone()
    with pytest.raises(ValueError, match="at image 4 of an epoch, but the loader's steps are of 8"):
        steps[1].load_state_dict(state)
    assert torch.equal(steps[1].model[1].weight, before)


def test_a_group_that_is_gone(device):
    """Its parameters stay as they are; whatever its rate was."""
    model, _ = make_plain(device)
    rest = list(model.parameters())
    optimizer = braze.optim.SGD([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.2}], lr=0.1)
    step, data = braze.TrainStep(model, loss_fn, optimizer), batches(device)
    for x, y in data[:4]:
        step(x, y)
    del optimizer.param_groups[1]
    kept = rest[1].detach().clone()
    moved = rest[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.05
    for x, y in data[4:]:
        step(x, y)
    assert torch.equal(rest[1], kept)
    assert not torch.equal(rest[0], moved)


def test_first_steps_that_a_scaler_skips(device):
    """Before and after the capture; with dampening the first momentum has a rule of its own."""
    data = batches(device, 10)
    for skipped in (1, 2, 5):
        for i in range(skipped):
            data[i] = (torch.full_like(data[i][0], float("inf")), data[i][1])
        results = []
        for maker in (braze.optim.SGD, torch.optim.SGD):
            model, _ = make_plain(device)
            optimizer = maker(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
            scaler = torch.amp.GradScaler(device, init_scale=1024.0)
            if maker is braze.optim.SGD:
                step = braze.TrainStep(model, loss_fn, optimizer, grad_scaler=scaler)
                losses = [step(x, y) for x, y in data]
            else:
                losses = plain_loop(model, optimizer, data, scaler=scaler)
            results += [model[1].weight, torch.stack(losses)[skipped:]]
        torch.testing.assert_close(results[0], results[2])
        torch.testing.assert_close(results[1], results[3])


def test_loss_and_autocast_may_change(device):
    results = []
    for captured in (False, True):
        model, optimizer = make(device)
        step, losses = braze.TrainStep(model, loss_fn, optimizer), []
        torch.manual_seed(2)
        for i, (x, y) in enumerate(batches(device, 12)):
            if i == 4:
                step.autocast = torch.bfloat16
            if i == 8:
                step.loss_fn = lambda output, target: 2 * loss_fn(output, target)
            if captured:
                losses.append(step(x, y))
                continue
            with torch.autocast(device, torch.bfloat16, enabled=i >= 4):
                loss = step.loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results += [model, losses]
    assert_same(*results)
