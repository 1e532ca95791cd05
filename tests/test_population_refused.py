"""What a braze.Population and its step refuse, before anything has changed."""

import io
import itertools

import pytest
import torch
from population_common import loaders

import braze
from step_common import Net, batches, loss_fn, make_plain


def optimizers(population):
    return [braze.optim.SGD(model.parameters(), lr=0.1) for model in population]


def test_bad_populations():
    counter = itertools.count()
    same = Net()

    def wider():
        return torch.nn.Linear(3, 2 + next(counter))

    def deeper():
        return torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(1 + next(counter))])

    for arguments, error, message in (
        ((Net(), 2), TypeError, "expected make_model to be a function"),
        ((Net, 2.0), TypeError, r"expected n to be an int, but got 2\.0"),
        ((Net, True), TypeError, "expected n to be an int"),
        ((Net, 0), ValueError, "expected n of at least 1"),
        ((Net, 2, [1]), ValueError, "expected 2 seeds, but got 1"),
        ((Net, 2, [1, 2.5]), TypeError, r"expected seeds to be ints, but got 2\.5"),
        ((lambda: 3, 2, [1, 2]), TypeError, "to return a torch.nn.Module, but got int"),
        (
            (lambda: same, 2, [1, 2]),
            ValueError,
            "is memory of member 0; make_model has to make a new",
        ),
        (
            (wider, 2, [1, 2]),
            ValueError,
            r"'weight' is float32 \[2, 3\] on cpu of member 0 and float32",
        ),
        (
            (deeper, 2, [1, 2]),
            ValueError,
            r"parameters of member 1 differ .*: \d\.bias, \d\.weight",
        ),
    ):
        state = torch.get_rng_state()
        with pytest.raises(error, match=message):
            braze.Population(*arguments)
        assert torch.equal(torch.get_rng_state(), state)


def test_bad_steps():
    population = braze.Population(Net, 3)
    good = optimizers(population)
    shared = torch.nn.Parameter(torch.ones(1))
    extra = optimizers(population)
    for optimizer in extra:
        optimizer.param_groups[0]["params"].append(shared)
    for loss, given, error, message in (
        (loss_fn, good[:2], ValueError, "expected 3 in optimizers, but got 2"),
        (
            loss_fn,
            good[0],
            TypeError,
            "expected optimizers to be a list of optimizers, but got SGD",
        ),
        (loss_fn, good[::-1], ValueError, "number 0 has a parameter .* of member 2"),
        (loss_fn, extra, ValueError, r"number 1 has a parameter \[1\] of member 0"),
        ([loss_fn] * 2, good, ValueError, "expected 3 in loss_fn, but got 2"),
        (3, good, TypeError, "expected loss_fn to be callable or a list of callables, but got int"),
        (loss_fn, [1, 2, 3], TypeError, "expected optimizer to be a torch.optim.Optimizer"),
    ):
        with pytest.raises(error, match=message):
            population.train_step(loss, given)
    with pytest.raises(ValueError, match="Population: expected max_grad_norm above 0"):
        population.train_step(loss_fn, good, max_grad_norm=-1)
    step = population.train_step(loss_fn, good)
    with pytest.raises(TypeError, match="expected inputs and a target, but got 1"):
        step(torch.ones(2))
    with pytest.raises(ValueError, match=r"first dimension of 3, .* got \[2, 1\]"):
        step.each(torch.ones(2, 1), torch.ones(3, 1))
    with pytest.raises(TypeError, match=r"save step.state_dict\(\)"):
        torch.save(step, io.BytesIO())


def test_bad_loaders():
    population = braze.Population(Net, 3)
    step = population.train_step(loss_fn, optimizers(population))
    with pytest.raises(RuntimeError, match=r"Population: call bind\(loader\) before epoch"):
        next(step.epoch())
    good = loaders("cpu", 3)
    step.bind(good)
    for given, error, message in (
        (good[0], TypeError, r"got one loader; copy.copy\(loader\)"),
        (good[:2], ValueError, "expected 3 loaders, but got 2"),
        ([*good[:2], good[0]], ValueError, "one is there twice"),
        ([*good[:2], 3], TypeError, "expected braze.data.DeviceLoaders, but got int"),
        (
            [*good[:2], *loaders("cpu", 1, batch_size=4)],
            ValueError,
            "equal batch size, but got 6 of member 0 and 4 of member 2",
        ),
        (
            [*good[:2], *loaders("cpu", 1, num_replicas=2)],
            ValueError,
            "equal number of images, but got 20 of member 0 and 10 of member 2",
        ),
        ([*good[:2], *loaders("cpu", 1, drop_last=True)], ValueError, "equal drop_last"),
        ([*good[:2], *loaders("cpu", 1, dtype=torch.float64)], ValueError, "equal dtype"),
    ):
        with pytest.raises(error, match=message):
            step.bind(given)
    assert len(list(step.epoch())) == 4  # still bound to the good ones


def test_bad_states():
    population = braze.Population(Net, 3)
    step = population.train_step(loss_fn, optimizers(population))
    state = step.state_dict()
    weights = [p.clone() for p in population.parameters()]
    with pytest.raises(KeyError, match="it has no 'rng'"):
        step.load_state_dict({key: value for key, value in state.items() if key != "rng"})
    with pytest.raises(ValueError, match="the state of 3 members, but got that of 2"):
        step.load_state_dict(state | {"optimizers": state["optimizers"][:2]})
    assert all(map(torch.equal, weights, population.parameters()))


class Counting:
    """A loss that counts."""

    def __init__(self):
        self.count = torch.zeros(())

    def __call__(self, logits, labels):
        self.count += len(labels)
        return loss_fn(logits, labels)


def test_what_members_share_is_not_written():
    population = braze.Population(lambda: make_plain("cpu")[0], 3)
    step = population.train_step(Counting(), optimizers(population))
    x, y = batches("cpu", 1)[0]
    weights = [p.clone() for p in population.parameters()]
    with pytest.raises(RuntimeError, match="loss_fn writes to a tensor of its own"):
        step(x, y)
    assert all(map(torch.equal, weights, population.parameters()))
    counts = [Counting() for _ in range(3)]
    population.train_step(counts, optimizers(population))(x, y)
    assert [int(one.count) for one in counts] == [6] * 3

    step = population.train_step(Counting(), optimizers(population)).bind(loaders("cpu", 3))
    with pytest.raises(RuntimeError, match="loss_fn writes to a tensor of its own"):
        next(step.epoch())

    def shifting():
        return torch.nn.Sequential(torch.nn.ReLU(inplace=True), make_plain("cpu")[0])

    population = braze.Population(shifting, 3)
    step = population.train_step(loss_fn, optimizers(population))
    with pytest.raises(RuntimeError, match=r"writes to the batch, .*step.each\(...\)"):
        step(x.clone(), y)
    losses = step.each(x.expand(3, *x.shape).clone(), y.expand(3, -1))
    assert losses.shape == (3,)


def test_two_members_in_processes_are_refused(monkeypatch):
    monkeypatch.setattr("braze.step.ranks.Ranks.are_several", lambda self: True)
    with pytest.raises(ValueError, match="let each process train its own members"):
        braze.Population(Net, 2)
