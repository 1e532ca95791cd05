"""braze.Population: each member's training is that of the member alone, bit for bit."""

import copy
import pickle

import pytest
import torch
from population_common import (
    SEEDS,
    N,
    alone,
    assert_members,
    loaders,
    make,
    maker,
    train_alone,
)

import braze
from braze.data import DeviceLoader
from braze.population import branches
from conftest import cuda_only
from step_common import CALLS, Net, batches, loss_fn, recorded_ops

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True, params=[2], ids=["2 streams"])
def _few_streams(request, monkeypatch):
    """So that members share streams, and one is left over."""
    monkeypatch.setattr(branches, "STREAMS", request.param)


def train(step, schedulers, data, each=False):
    losses, norms = [], []
    for batch in data:
        losses.append(step.each(*batch) if each else step(*batch))
        norms.append(None if step.grad_norm is None else step.grad_norm.tolist())
        for scheduler in schedulers:
            scheduler.step()
    return losses, norms


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"autocast": torch.bfloat16}])
@pytest.mark.parametrize(
    "name", ["braze SGD", "braze Adam", "torch SGD", "torch Adam", "torch AdamW fused"]
)
def test_one_batch_for_all(any_device, name, options):
    data = batches(any_device)
    step, schedulers = make(any_device, name, **options)
    losses, norms = train(step, schedulers, data)
    trained = [train_alone(i, any_device, data, name=name, **options) for i in range(N)]
    assert_members(step, losses, trained)
    for i, (*_, alone_norms) in enumerate(trained):
        assert [row and row[i] for row in norms] == alone_norms
    assert len({float(x) for x in losses[-1]}) == N  # they are not all one member


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_batch_for_each(any_device, autocast):
    parts = [batches(any_device, N, (6,)) for _ in range(CALLS)]
    torch.manual_seed(4)
    parts = [[(x + torch.randn(1).item(), y) for x, y in members] for members in parts]
    data = [tuple(torch.stack(part) for part in zip(*members, strict=True)) for members in parts]
    step, schedulers = make(any_device, autocast=autocast)
    losses, _ = train(step, schedulers, data, each=True)
    trained = [
        train_alone(i, any_device, [members[i] for members in parts], autocast=autocast)
        for i in range(N)
    ]
    assert_members(step, losses, trained)


@pytest.mark.parametrize("own_data", [False, True], ids=["one data set", "data of their own"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_loaders(any_device, own_data, autocast):
    step, schedulers = make(any_device, autocast=autocast)
    step.bind(loaders(any_device, own_data=own_data))
    losses = []
    for _ in range(4):
        losses += step.epoch()
        for scheduler in schedulers:
            scheduler.step()
    trained = [
        train_alone(i, any_device, loader, epochs=4, autocast=autocast)
        for i, loader in enumerate(loaders(any_device, own_data=own_data))
    ]
    assert_members(step, losses, trained)


def test_a_large_batch_is_gathered_in_its_own_step(any_device, monkeypatch):
    monkeypatch.setattr("braze.step.prefetch.MAX_BYTES", 6 * 16 * 4 - 1)
    step, _ = make(any_device)
    step.bind(loaders(any_device))
    losses = [loss for _ in range(4) for loss in step.epoch()]
    trained = []
    for i, loader in enumerate(loaders(any_device)):
        lone, _ = alone(i, any_device)
        lone.bind(loader)
        trained.append((lone, [loss for _ in range(4) for loss in lone.epoch()], None))
    assert_members(step, losses, trained)


def test_loaders_of_one_data_set_gather_in_one_launch():
    step, _ = make("cpu")
    step.bind(loaders("cpu"))
    with recorded_ops() as ops:
        list(step.epoch())
    assert [name for name, _ in ops].count("gather_next") == 4
    step.bind(loaders("cpu", own_data=True))
    with recorded_ops() as ops:
        list(step.epoch())
    assert [name for name, _ in ops].count("gather_next") == 4 * N


class Block(torch.nn.Module):
    """Its first block takes the moments of the batch's patches, where they have been summed."""

    def __init__(self):
        super().__init__()
        self.block = braze.nn.ConvBnReLUMaxPool2d(1, 4, 3, padding=1)
        self.last = braze.nn.Linear(16, 5)

    def forward(self, x):
        return self.last(self.block(x).flatten(1))


def test_moments_of_the_members_batches(any_device):
    def make_model():
        return Block().to(any_device)

    step, _ = make(any_device, make_model=make_model)
    step.bind(loaders(any_device))
    with recorded_ops() as ops:
        losses = [loss for _ in range(4) for loss in step.epoch()]
    trained = []
    for i, loader in enumerate(loaders(any_device)):
        lone, _ = alone(i, any_device, make_model=make_model)
        lone.bind(loader)
        trained.append((lone, [loss for _ in range(4) for loss in lone.epoch()], None))
    assert_members(step, losses, trained)
    if any_device == "cpu":
        taken = [len(shapes[12]) == 2 for name, shapes in ops if name == "conv_bn_relu_max_pool2d"]
        assert taken == [False] * N + [True] * 15 * N  # the first step learns of the block


@cuda_only
def test_moments_are_as_many_sums_as_a_member_reads():
    """Those of a graph's first batch too, which are not summed by the graph."""

    def make_model():
        layers = braze.nn.ConvBnReLUMaxPool2d(1, 4, 3, padding=1), torch.nn.Flatten()
        return torch.nn.Sequential(*layers, braze.nn.Linear(4 * 14 * 14, 5)).to("cuda")

    def make_loaders():
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (192, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(5, (192,), generator=generator)
        options = {"mean": 0.5, "std": 0.25, "device": "cuda"}
        return [DeviceLoader(images, labels, 64, seed=i, **options) for i in range(N)]

    step, _ = make("cuda", make_model=make_model)
    step.bind(make_loaders())
    with braze.multiprocessors(4):
        share = step.multiprocessors
        losses = [loss for _ in range(2) for loss in step.epoch()]
    assert share == 2
    trained = []
    for i, loader in enumerate(make_loaders()):
        lone, _ = alone(i, "cuda", make_model=make_model)
        lone.bind(loader)
        with braze.multiprocessors(share):
            trained.append((lone, [loss for _ in range(2) for loss in lone.epoch()], None))
    assert_members(step, losses, trained)


def test_one_cast_of_a_wave():
    step, _ = make("cpu", autocast=torch.bfloat16)
    data = batches("cpu")
    step(*data[0])
    with recorded_ops() as ops:
        step(*data[1])
    # Of three waves forward, of each member backward.
    assert [name for name, _ in ops].count("cast_") == 3 + N


def test_members_are_what_make_model_makes_with_their_seeds(any_device):
    state = torch.get_rng_state()
    population = braze.Population(maker(any_device), N, seeds=SEEDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert population.seeds == SEEDS
    for seed, model in zip(SEEDS, population, strict=True):
        torch.manual_seed(seed)
        for p, q in zip(model.parameters(), Net().parameters(), strict=True):
            assert torch.equal(p.cpu(), q)
    torch.manual_seed(1)
    first = braze.Population(maker(any_device), 2).seeds
    torch.manual_seed(1)
    assert braze.Population(maker(any_device), 2).seeds == first
    assert braze.Population(maker(any_device), 2).seeds != first


def test_as_a_module(tmp_path):
    population = braze.Population(Net, 3, seeds=[1, 2, 3])
    assert len(population) == 3
    assert list(population) == [population[0], population[1], population[2]]
    assert population[1:] == list(population)[1:]
    assert isinstance(population.models, torch.nn.ModuleList)
    assert not any(model.training for model in population.eval())
    other = braze.Population(Net, 3, seeds=[4, 5, 6])
    other.load_state_dict(population.state_dict())
    for a, b in zip(population.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for again in (copy.deepcopy(population), pickle.loads(pickle.dumps(population))):
        assert again.seeds == [1, 2, 3]
        data = batches("cpu", 3)
        losses = []
        for one in (copy.deepcopy(population), again):
            step = one.train(True).train_step(loss_fn, lambda p: braze.optim.SGD(p, lr=0.1))
            losses.append(torch.stack([step(*batch) for batch in data]))
        assert torch.equal(*losses)


def test_converted():
    def plain():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, padding=1),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16, 5),
        )

    population = braze.Population(plain, 2, seeds=SEEDS[:2])
    assert population.convert() is population
    step = population.train_step(loss_fn, lambda p: braze.optim.SGD(p, lr=0.1))
    data = batches("cpu")
    with recorded_ops() as ops:
        losses = [step(*batch) for batch in data]
    assert "conv_bn_relu_max_pool2d" in {name for name, _ in ops}
    for i in range(2):
        torch.manual_seed(SEEDS[i])
        model = braze.convert(plain())
        lone = braze.TrainStep(model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.1))
        assert [float(row[i]) for row in losses] == [float(lone(*batch)) for batch in data]


@pytest.mark.parametrize("after", [6, 8], ids=["within an epoch", "after an epoch"])
def test_checkpoint(any_device, after, tmp_path):
    def build():
        step, _ = make(any_device, "braze Adam")
        return step.bind(loaders(any_device))

    step, losses = build(), []
    for _ in range(4):
        for loss in step.epoch():
            losses.append(loss)
            if len(losses) == after and after % 4:
                torch.save(step.state_dict(), tmp_path / "state.pt")
        if len(losses) == after and not after % 4:
            torch.save(step.state_dict(), tmp_path / "state.pt")
    other = build()
    for _ in range(2):
        list(other.epoch())  # has captured something else before
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    rest = []
    while len(rest) < len(losses) - after:
        rest += other.epoch()
    assert torch.equal(torch.stack(rest), torch.stack(losses[after:]))
    for a, b in zip(
        step.population.state_dict().values(), other.population.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_a_member_that_draws_otherwise_is_told_from_its_lone_training():
    """The comparison can fail: a member that took the numbers of another would be seen."""
    data = batches("cpu")
    step, schedulers = make("cpu")
    step._body.random._cpu.reverse()
    losses, _ = train(step, schedulers, data)
    trained = [train_alone(i, "cpu", data) for i in range(N)]
    with pytest.raises(AssertionError):
        assert_members(step, losses, trained)
